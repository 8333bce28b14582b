"""Runs in vLLM's environment: a vLLM decodes what servers prefilled; its tokens must be those of transformers.

decode.py FOLDER TENSOR BLOCK PORT...
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from .servers import check, metric, settled, ticket

MODULE = "megatron.context_parallel.integration.vllm.connector"
KV = 2 * 2 * 2 * 32 * 4  # bytes of a token: layers, keys and values, heads, head_dim, float32


def start(model: Path, tensor: int, block: int, silence: float = 30, **engine) -> LLM:
    """A vLLM with our connector, and these settings of its engine."""
    transfer = {
        "kv_connector": "ContextParallelConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"silence_seconds": silence},
    }
    common = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "max_model_len": 1024}
    return LLM(
        str(model),
        block_size=block,
        tensor_parallel_size=tensor,
        kv_transfer_config=KVTransferConfig(**transfer),
        **common | engine,
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


def equal_tokens(what: str, outputs: list, texts: list[dict]) -> None:
    right = sum([*output.outputs[0].token_ids] == text["answer"] for output, text in zip(outputs, texts, strict=True))
    check(f"{what}: texts equal to transformers'", right, len(texts))


def main(folder: Path, tensor: int, block: int, ports: list[int]) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    prompts = [text["prompt"] for text in texts]
    tokens = sum(map(len, prompts))
    llm = start(folder / "model", tensor, block)
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
    """A longer prompt: vLLM has the full blocks of the first turn, and our ranks have all of it."""
    prompt = text["prompt"] + text["answer"]
    before, sent = counts(llm), metric(port, "handoff_bytes_total")
    reused = metric(port, "vllm:prompt_tokens_cached_total")
    (output,) = decode(llm, [prompt[:-12]], [ticket(port, prompt[:-12])], 12)
    check(f"{what}: second turn", [*output.outputs[0].token_ids], text["answer"][-12:])
    found = difference(counts(llm), before)
    fetched = found["external_kv_transfer"]
    check(f"{what}: all tokens of it", fetched + found["local_cache_hit"], len(prompt) - 12)
    check(f"{what}: some are cached", found["local_cache_hit"] >= 512, True)
    kept = metric(port, "vllm:prompt_tokens_cached_total") - reused
    check(f"{what}: our ranks compute the new tokens only", kept >= len(text["prompt"]), True)
    check(
        f"{what}: bytes of the rest",
        int(settled(port, "handoff_bytes_total", sent + fetched * KV) - sent),
        fetched * KV,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [*map(int, sys.argv[4:])])
