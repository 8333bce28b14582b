"""vLLM's server behind the proxy: texts over HTTP, and what happens without a prefill server.

python -m tests.vllm.proxy FOLDER VLLM_PYTHON PREFILL_PORT
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONNECTOR = json.loads((ROOT / "examples/vllm/connector.json").read_text()) | {"kv_load_failure_policy": "fail"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def post(port: int, body: dict) -> tuple[int, dict]:
    data = json.dumps({"model": "model", "temperature": 0} | body).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metric(port: int, name: str) -> float:
    lines = [line for line in get(port, "/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)


def started(stack: ExitStack, words: list[str], port: int, log: Path) -> None:
    """Start a server, which ends with the stack, and wait until it answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in range(180):
        try:
            get(port, "/health")
            return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"FAILED {what}: {found} instead of {expected}")
    print(f"ok {what}: {expected}", flush=True)


def right_texts(port: int, texts: list[dict]) -> int:
    """How many answers of a server are transformers'."""
    right = 0
    for text in texts:
        asked = {"prompt": text["prompt"], "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        status, answer = post(port, asked)
        right += status == 200 and answer["choices"][0]["token_ids"] == text["answer"]
    return right


def main(folder: Path, python: str, prefill: int) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    tokens = sum(len(text["prompt"]) for text in texts)
    decode, proxy, lone = free_port(), free_port(), free_port()
    fetched = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="model",source="external_kv_transfer"}'
    os.environ["PYTHONPATH"] = str(ROOT)
    with ExitStack() as stack:
        flags = ["--model", str(folder / "model"), "--served-model-name", "model", "--dtype", "float32"]
        flags += ["--enforce-eager", "--max-model-len", "1024", "--no-enable-prefix-caching", "--host", "127.0.0.1"]
        flags += ["--port", str(decode), "--kv-transfer-config", json.dumps(CONNECTOR)]
        started(stack, [python, "-m", "vllm.entrypoints.openai.api_server", *flags], decode, folder / "vllm.log")
        for port, server in ((proxy, prefill), (lone, free_port())):
            words = [python, "examples/vllm/proxy.py", "--port", str(port), "--prefill", f"http://127.0.0.1:{server}"]
            started(stack, [*words, "--decode", f"http://127.0.0.1:{decode}"], port, folder / f"proxy{port}.log")
        check("texts through the proxy", right_texts(proxy, texts), len(texts))
        check("prompt tokens that were fetched", metric(decode, fetched), tokens)
        check("rows in vLLM's metrics", metric(decode, "vllm:context_parallel_rows_total"), tokens)
        check("failures in vLLM's metrics", metric(decode, "vllm:context_parallel_failures_total"), 0)
        check("texts without a prefill server", right_texts(lone, texts), len(texts))
        check("prompt tokens fetched then", metric(decode, fetched), tokens)
        status, _ = post(proxy, {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}})
        check("a client's ticket", status, 400)
        failed_loads_are_errors(decode, prefill, texts[-1]["prompt"])


def failed_loads_are_errors(decode: int, prefill: int, prompt: list[int]) -> None:
    """With vLLM's policy "fail", rows that do not arrive end the request, and nothing else."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    _, answer = post(prefill, {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted})
    params = answer["kv_transfer_params"]
    params["context_parallel"]["places"][1]["port"] = free_port()
    status, answer = post(decode, {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
    check("a failed load", status, 500)
    status, answer = post(decode, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
    check("a text after it", (status, answer["choices"][0]["finish_reason"]), (200, "length"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
