"""Runs in vLLM's environment: a vLLM decodes what servers prefilled; its tokens must be those of transformers.

decode.py FOLDER TENSOR BLOCK PORT...
"""

import json
import sys
import time
import urllib.request
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

MODULE = "megatron.context_parallel.integration.vllm.connector"
KV = 2 * 2 * 2 * 32 * 4  # bytes of a token: layers, keys and values, heads, head_dim, float32


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def settled(port: int, name: str, value: float, seconds: float = 10) -> float:
    """A metric when it has this value, or after some seconds."""
    end = time.monotonic() + seconds
    while (found := metric(port, name)) != value and time.monotonic() < end:
        time.sleep(0.1)
    return found


def ticket(port: int, prompt: list[int]) -> dict:
    """The ticket of a prompt that the server at a port of this machine prefills."""
    return ticket_of(f"http://127.0.0.1:{port}", prompt)


def ticket_of(url: str, prompt: list[int]) -> dict:
    """The ticket of a prompt that a server prefills."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
    answer = post(url, body)
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0, answer
    return answer["kv_transfer_params"]


def start(
    folder: Path, tensor: int, block: int, model: str = "model", length: int = 1024, silence: float = 30, **changes
) -> LLM:
    transfer = {
        "kv_connector": "ContextParallelConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"silence_seconds": silence},
    }
    common = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "max_model_len": length}
    return LLM(
        str(folder / model),
        block_size=block,
        tensor_parallel_size=tensor,
        kv_transfer_config=KVTransferConfig(**transfer | changes),
        **common,
    )


def decode(llm: LLM, prompts: list[list[int]], tickets: list[dict | None], new: int = 24) -> list:
    params = [
        SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, extra_args={"kv_transfer_params": t} if t else {}
        )
        for t in tickets
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def counts(llm: LLM) -> dict[str, float]:
    """vLLM's counters: prompt tokens by source."""
    found = {}
    for one in llm.get_metrics():
        if one.name == "vllm:prompt_tokens_by_source":
            found[one.labels["source"]] = one.value
        if one.name.startswith("vllm:context_parallel"):
            found[one.name.partition("parallel_")[2]] = one.value
    return found


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, int]:
    return {name: int(value - before.get(name, 0)) for name, value in after.items() if value != before.get(name, 0)}


def check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise SystemExit(f"FAILED {what}: {found} instead of {expected}")
    print(f"ok {what}: {expected}", flush=True)


def equal_tokens(what: str, outputs: list, texts: list[dict]) -> None:
    right = sum([*output.outputs[0].token_ids] == text["answer"] for output, text in zip(outputs, texts, strict=True))
    check(f"{what}: texts equal to transformers'", right, len(texts))


def main(folder: Path, tensor: int, block: int, ports: list[int]) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    prompts = [text["prompt"] for text in texts]
    tokens = sum(map(len, prompts))
    llm = start(folder, tensor, block)
    for port in ports:
        what = f"tensor {tensor}, block {block}, port {port}"
        llm.reset_prefix_cache()
        before, sent = counts(llm), metric(port, "handoff_bytes_total")
        outputs = decode(llm, prompts, [ticket(port, prompt) for prompt in prompts])
        equal_tokens(what, outputs, texts)
        found = difference(counts(llm), before)
        check(f"{what}: computed by vLLM", found.get("local_compute", 0), 0)
        check(f"{what}: fetched", found.get("external_kv_transfer"), tokens)
        check(f"{what}: bytes", int(settled(port, "handoff_bytes_total", sent + tokens * KV) - sent), tokens * KV)
        check(f"{what}: sequences pinned at last", settled(port, "handoffs_pinned", 0), 0)
        second_turn(llm, port, what, texts[-1])


def second_turn(llm: LLM, port: int, what: str, text: dict) -> None:
    """A longer prompt: vLLM has the full blocks of the first turn, and fetches the rest."""
    prompt = text["prompt"] + text["answer"]
    before, sent = counts(llm), metric(port, "handoff_bytes_total")
    (output,) = decode(llm, [prompt[:-12]], [ticket(port, prompt[:-12])], 12)
    check(f"{what}: second turn", [*output.outputs[0].token_ids], text["answer"][-12:])
    found = difference(counts(llm), before)
    fetched = found["external_kv_transfer"]
    check(f"{what}: all tokens of it", fetched + found["local_cache_hit"], len(prompt) - 12)
    check(f"{what}: some are cached", found["local_cache_hit"] >= 512, True)
    check(
        f"{what}: bytes of the rest",
        int(settled(port, "handoff_bytes_total", sent + fetched * KV) - sent),
        fetched * KV,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [*map(int, sys.argv[4:])])
