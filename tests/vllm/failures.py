"""Runs in vLLM's environment: transfers that fail. The tokens must be right, and nothing may wait forever.

    python -m tests.vllm.failures FOLDER PORT SHORT_LEASE_PORT TORCHRUN_PID

PORT: a server of two ranks, started by the process TORCHRUN_PID, which is ended at last; SHORT_LEASE_PORT: a server
whose leases end after 2 seconds. vLLM computes what did not come in chunks of 64 tokens.
"""

import copy
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from vllm import SamplingParams

from megatron.context_parallel.integration.vllm import connector

from .decode import counts, decode, difference, equal_tokens, start
from .relay import FIELD, MIDDLE, Hang, cut, damage, through
from .servers import check, free_port, metric, post, settled, ticket


def changed(params: dict, **fields: object) -> dict:
    spoiled = copy.deepcopy(params)
    spoiled[FIELD] |= fields
    return spoiled


def with_model(params: dict, **fields: object) -> dict:
    return changed(params, model=params[FIELD]["model"] | fields)


def absent(params: dict) -> dict:
    spoiled = copy.deepcopy(params)
    spoiled[FIELD]["places"][1]["port"] = free_port()
    return spoiled


def other_heads(params: dict) -> dict:
    spoiled = copy.deepcopy(params)
    spoiled[FIELD]["places"][1] |= {"first_head": 1, "heads": 1}
    return spoiled


def late(params: dict) -> dict:
    time.sleep(3.5)
    return params


# For each case: what is done to a ticket, whether vLLM counts a failed load (else it does not try), and whether our
# ranks learn that the rows are not needed.
CASES = {
    "a rank is absent": (absent, 1, True),
    "the first rank is lost while it sends": (lambda params: through(params, 0, cut), 1, True),
    "the second rank is lost while it sends": (lambda params: through(params, 1, cut), 1, True),
    "a rank hangs": (lambda params: through(params, 1, Hang()), 1, True),
    "a rank accepts and sends nothing": (lambda params: through(params, 1, Hang(0)), 1, True),
    "the rank of the lease accepts and sends nothing": (lambda params: through(params, 0, Hang(0)), 1, False),
    "a byte is damaged": (lambda params: through(params, 1, damage), 1, True),
    "a rank has other heads": (other_heads, 1, True),
    "an unknown sequence": (lambda params: changed(params, id="0" * 32), 1, False),
    "another prompt": (lambda params: changed(params, tokens_digest="0" * 32), 0, True),
    "fewer tokens": (lambda params: changed(params, tokens=699), 0, True),
    "other weights": (lambda params: with_model(params, weights="0" * 32), 0, True),
    "another dtype": (lambda params: with_model(params, dtype="bfloat16"), 0, True),
    "another rope": (lambda params: with_model(params, rope={"rope_theta": 10000.0}), 0, True),
    "another version": (lambda params: changed(params, version=2), 0, False),
    "no ticket at all": (lambda params: changed(params, places="nowhere"), 0, False),
}


def recomputed(llm: object, what: str, text: dict, params: dict, failures: int) -> None:
    """Decode beside a sound request: both texts are right, in time, and the failure is counted."""
    llm.reset_prefix_cache()
    before, begin = counts(llm), time.monotonic()
    outputs = decode(llm, [text["prompt"], text["prompt"][:50]], [params, None])
    seconds = time.monotonic() - begin
    equal_tokens(what, outputs[:1], [text])
    found = difference(counts(llm), before)
    check(f"{what}: failed loads", found.get("failures_total", found.get("failures", 0)), failures)
    check(f"{what}: within 20 s", seconds < 20, True)


def refused_settings(llm: object) -> None:
    """What ends the start of vLLM with a line: a release that was not tested, and rows that no rank has."""
    config = llm.llm_engine.vllm_config
    one, two = (SimpleNamespace(kv_cache_groups=["full attention"] * n) for n in (1, 2))
    connector._check(config, one)
    check("two kinds of attention", refusal(config, two), "all layers must have full attention")
    with patch.object(connector, "CHECKED", ("0.1.0",)):
        check("another release", refusal(config, one), "vLLM 0.32.0 was not tested; use 0.1.0")
    with patch.object(config.parallel_config, "decode_context_parallel_size", 2):
        check("a cache of several ranks", refusal(config, one), "decode_context_parallel_size: give 1")


def refusal(config: object, caches: object) -> str:
    try:
        connector._check(config, caches)
    except ValueError as error:
        return str(error).removeprefix("ContextParallelConnector: ")
    return ""


def main(folder: Path, port: int, short: int, torchrun: int) -> None:
    text = json.loads((folder / "texts.json").read_text())[-1]
    llm = start(folder / "model", 1, 32, silence=3, max_num_batched_tokens=64, max_num_seqs=16)
    refused_settings(llm)
    for what, (spoil, failures, told) in CASES.items():
        pinned = metric(port, "handoffs_pinned") + (not told)
        recomputed(llm, what, text, spoil(ticket(port, text["prompt"])), failures)
        check(f"{what}: pinned", settled(port, "handoffs_pinned", pinned), pinned)
    aborted(llm, port, text)
    recomputed(llm, "its lease is over", text, late(ticket(short, text["prompt"])), 1)
    client_gone(short, text)
    rank_killed(llm, port, text, torchrun)


def aborted(llm: object, port: int, text: dict) -> None:
    """A client leaves before vLLM has begun: the lease ends at once."""
    pinned, params = metric(port, "handoffs_pinned"), ticket(port, text["prompt"])
    check("aborted: pinned", settled(port, "handoffs_pinned", pinned + 1), pinned + 1)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    llm.llm_engine.add_request("gone", {"prompt_token_ids": text["prompt"]}, sampling)
    llm.llm_engine.abort_request(["gone"])
    check("aborted: pinned at last", settled(port, "handoffs_pinned", pinned), pinned)


def client_gone(port: int, text: dict) -> None:
    """Nobody decodes: the lease ends by time, and the pages are free for others."""
    before = metric(port, "handoffs_total")
    for _ in range(5):
        ticket(port, text["prompt"])
    check("client gone: leases that ended", settled(port, "handoffs_total", before + 5) - before, 5)
    check("client gone: pinned", settled(port, "handoffs_pinned", 0), 0)
    status, _ = post(port, {"prompt": text["prompt"], "max_tokens": 900})
    check("client gone: a request that needs most of the cache", status, 200)


def rank_killed(llm: object, port: int, text: dict, torchrun: int) -> None:
    """A rank is killed while it sends; then the whole server ends, and its tickets are of no use."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    first, second = ticket(port, text["prompt"]), ticket(port, text["prompt"])

    def kill(data: bytearray, passed: int) -> bytes | None:
        if passed <= MIDDLE:
            return bytes(data)
        os.kill(int(children[1]), signal.SIGKILL)
        return None

    recomputed(llm, "a rank is killed while it sends", text, through(first, 1, kill), 1)
    recomputed(llm, "the server has ended", text, second, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
