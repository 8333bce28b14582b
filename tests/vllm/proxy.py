"""vLLM's server behind the proxy: texts over HTTP, and what happens without a prefill server.

python -m tests.vllm.proxy FOLDER VLLM_PYTHON PREFILL_PORT
"""

import json
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from .relay import FIELD
from .servers import ROOT, check, free_port, metric, post, start_proxy, start_vllm, ticket


def right_texts(port: int, texts: list[dict]) -> int:
    """How many answers of a server are transformers'."""
    right = 0
    for text in texts:
        asked = {"prompt": text["prompt"], "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        status, answer = post(port, asked)
        right += status == 200 and answer["choices"][0]["token_ids"] == text["answer"]
    return right


def fetched(port: int) -> float:
    """Prompt tokens that a vLLM fetched."""
    return metric(port, "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


def main(folder: Path, python: str, prefill: int) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    tokens = sum(len(text["prompt"]) for text in texts)
    os.environ["PYTHONPATH"] = str(ROOT)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as silent:
        vllm = start_vllm(stack, python, folder, "vllm", kv_load_failure_policy="fail")
        servers = {"": prefill, " without a prefill server": free_port()}
        servers[" with a prefill server that accepts and sends nothing"] = silent.getsockname()[1]
        proxies = {what: start_proxy(stack, python, folder, server, vllm.port) for what, server in servers.items()}
        for server in (vllm, *proxies.values()):
            server.wait_until_ready()
        for what, proxy in proxies.items():
            some = texts[-2:] if "nothing" in what else texts  # each waits for 2 seconds
            check(f"texts through the proxy{what}", right_texts(proxy.port, some), len(some))
            check(f"prompt tokens that were fetched{what}", fetched(vllm.port), tokens)
        check("rows in vLLM's metrics", metric(vllm.port, "vllm:context_parallel_rows_total"), tokens)
        check("failures in vLLM's metrics", metric(vllm.port, "vllm:context_parallel_failures_total"), 0)
        status, _ = post(proxies[""].port, {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}})
        check("a client's ticket", status, 400)
        failed_loads_are_errors(vllm.port, prefill, texts[-1]["prompt"])


def failed_loads_are_errors(decode: int, prefill: int, prompt: list[int]) -> None:
    """With vLLM's policy "fail", rows that do not arrive end the request, and nothing else."""
    params = ticket(prefill, prompt)
    params[FIELD]["places"][1]["port"] = free_port()
    status, answer = post(decode, {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
    check("a failed load", status, 500)
    status, answer = post(decode, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
    check("a text after it", (status, answer["choices"][0]["finish_reason"]), (200, "length"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
