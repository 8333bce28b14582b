"""Predicts every strategy on 8, 64 and 512 GPUs, and writes docs/images/comparison.json, which pictures show.

It takes minutes. Run it after a change of strategies, of the cluster or of the cost model, and then
`python -m tools.make_images`. With --check it changes nothing, and fails if the file has other numbers.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.cluster.search.planner import GroupDevices, fastest
from megatron.context_parallel.cluster.step.block_memory import gradient_swap_bytes, packed_bytes
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.ir import Plan, T
from megatron.context_parallel.plan.liveness import peak_bytes
from megatron.context_parallel.plan.volume import Shape, chunk_bytes
from megatron.context_parallel.strategies import parse_spec

FILE = Path(__file__).parents[1] / "docs" / "images" / "comparison.json"
CLUSTER = "dgx-h100"
HEADS, HEAD_DIM = 32, 128
NODE = 8  # GPUs; usp and loongtrain split the heads over a node
K, M = 2**10, 2**20
OVERVIEW = [(ranks, M, HEADS) for ranks in (8, 64, 512)]  # ranks, tokens, key/value heads
SPEED_UP = [(64, length, kv_heads) for length in (128 * K, M) for kv_heads in (HEADS, 8)]
MEMORY = [(64, length, HEADS) for length in (32 * K, 128 * K, 512 * K, 2 * M)]


def specs(ranks: int) -> dict[str, str]:
    """The eight strategies as the pictures show them, with the options that a strategy cannot do without."""
    split = f":head_parallel_size={min(NODE, ranks // 2)}"
    plain = {name: name for name in ("ring", "allgather", "lightseq", "attention2d", "mesh", "ulysses")}
    return plain | {"loongtrain": f"loongtrain{split}", "usp": f"usp{split}"}


def sent_bytes(plan: Plan, shape: Shape) -> int:
    """The most bytes that a rank sends in a pass, with log-sum-exp and delta, without headers."""
    return max(sent_by(plan, place, shape) for place in range(plan.n))


def sent_by(plan: Plan, place: int, shape: Shape) -> int:
    """The bytes that a rank with this place in the steps sends."""
    rank = plan.grid.rank(context=place)
    total = 0.0
    for swap in plan.swaps:
        for transfer in plan.swap_transfers(swap, rank):
            if transfer.sender == rank:
                total += chunk_bytes(plan, transfer.tensor, shape, swap=True) * transfer.share
    for op in (op for step in plan.steps[place] for op in step.comm):
        for transfer in op.transfers(place):
            if transfer.sender == place:
                total += chunk_bytes(plan, transfer.tensor, shape, swap=False) * transfer.share
    return round(plan.rounds * total)


def held_bytes(plan: Plan, shape: Shape) -> int:
    """Bytes of chunks, partials and swapped heads of one attention at once, of the first or the last rank."""
    most = max(peak_bytes(plan, rank, shape) for rank in {0, plan.n - 1}) + packed_bytes(plan, shape)
    if plan.backward and plan.keeps_swapped:
        own = chunk_bytes(plan, T.Q, shape, swap=False) + chunk_bytes(plan, T.KV, shape, swap=False)
        most = max(most, own + gradient_swap_bytes(plan, shape))
    return round(most)


def row(name: str, ranks: int, length: int, kv_heads: int, timed: bool) -> dict:
    """What is predicted of a strategy, forward and backward together: bytes sent, bytes held at once, seconds."""
    shown = {"strategy": name, "ranks": ranks, "tokens": length, "kv_heads": kv_heads}
    workload, spec = Workload(length, HEADS, kv_heads, HEAD_DIM), specs(ranks)[name]
    try:
        choice = parse_spec(spec)
        plans = [choice.plan(ranks, backward=way, heads=HEADS, kv_heads=kv_heads) for way in (False, True)]
    except UsageError:
        return shown | {"refused": True}
    shown |= {"memory": max(held_bytes(plan, workload.shape(ranks)) for plan in plans)}
    if not timed:
        return shown
    cluster = load_cluster(CLUSTER)
    place = GroupDevices(replace(cluster, nodes=ranks // cluster.devices_per_node))
    found, _ = fastest({spec: plans}, place, workload)
    sent = sum(sent_bytes(plan, workload.shape(ranks)) for plan in plans)
    return shown | {"sent": sent, "seconds": float(f"{found[spec].seconds:.6g}")}


def rows(most: int = 512) -> Iterator[dict]:
    """The rows of all pictures with at most so many ranks."""
    timed = dict.fromkeys((*OVERVIEW, *SPEED_UP))
    for case in dict.fromkeys((*timed, *MEMORY)):
        for name in specs(NODE):
            if case[0] <= most:
                yield row(name, *case, timed=case in timed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the file has other numbers")
    args = parser.parse_args()
    lines = []
    for shown in rows():
        lines.append(json.dumps(shown))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    if args.check:
        current = text == FILE.read_text()
        print("current" if current else f"{FILE} has other numbers: run python -m tools.compare_strategies")
        return int(not current)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
