"""Predicts the prefill of a prompt of a million tokens in chunks of several sizes.

    PYTHONPATH=. python benchmarks/prefill_chunks.py

Llama 3 8B in bf16 on 8 H100 (`dgx-h100`): in one node, or each in a node of its own on Ethernet (the NIC of `gti`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.inference.choose import sent_bytes
from megatron.context_parallel.inference.prefill_chunks import PassTime, PrefillChunks
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

MODEL, TOKENS, RANKS = "llama3-8b", 1_000_000, 8
FIXED = (512, 8192, 65_536, TOKENS)


class Prefilled(NamedTuple):
    """A whole prompt: the bytes that a rank sends in a layer, and the tokens and seconds of each pass."""

    sent: float
    sizes: list[int]
    steps: list[float]


def prefill(time: PassTime, chunk: Callable[[int], int]) -> Prefilled:
    """A prompt in chunks of `chunk(cached)` tokens."""
    sizes = list[int]()
    steps = list[float]()
    cached, sent = 0, 0.0
    while cached < TOKENS:
        new = min(chunk(cached), TOKENS - cached)
        sent += sent_bytes(time.variant(new, cached), new, cached, time.n, time.sizes)
        steps.append(time(new, cached))
        sizes.append(new)
        cached += new
    return Prefilled(sent, sizes, steps)


def links() -> dict[str, Cluster]:
    """8 GPUs in one node, and in 8 nodes."""
    node, slow = load_cluster("dgx-h100"), load_cluster("gti").nics
    assert slow
    apart = replace(node, nodes=RANKS, devices_per_node=1, inside=None, nics=replace(slow, per_node=1))
    return {"NVLink, 450 GB/s": node, "Ethernet, 3 GB/s": apart}


def main() -> None:
    for link, cluster in links().items():
        time = PassTime(preset_model(MODEL, TOKENS), cluster, RANKS)
        chosen = PrefillChunks.predicted(time, TOKENS)
        table = Table("tokens of a step", "passes", "GB per rank and layer", "predicted seconds", "longest step, s")
        for tokens in FIXED:
            _row(table, f"{tokens:,}", prefill(time, lambda cached, tokens=tokens: tokens))
        for name, decoding in (("chosen", False), ("chosen while texts are generated", True)):
            found = prefill(time, partial(chosen, decoding=decoding))
            _row(table, f"{name}: {min(found.sizes[:-1] or found.sizes):,} to {max(found.sizes):,}", found)
        table.title = f"{MODEL}, {TOKENS:,} tokens, {RANKS} ranks, {link}"
        show(table)


def _row(table: Table, name: str, found: Prefilled) -> None:
    longest = max(found.steps)
    table.add_row(name, f"{len(found.sizes):,}", f"{found.sent / 1e9:.1f}", f"{sum(found.steps):.1f}", f"{longest:.2f}")


if __name__ == "__main__":
    main()
