"""Prints how long the prediction of one pass takes, with how much memory, for each strategy and many ranks.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/planner_scale.py [SPEC ...] [--ranks 256 1024] [--check 32 128]

Each pass is predicted in a process of its own: grouped-query attention, 4096 tokens a rank, on the preset dgx-h100. The
times are those of the processor, so that other work on the machine counts little.
With `--check`, a pass that is simulated with few ranks must take what it takes with all ranks, to the last digit.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from rich.table import Table

from megatron.context_parallel.cli.run_main import announce, run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.simulate.one_pass import PassForecast, simulate
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.progress import tracked
from megatron.context_parallel.strategies import parse_spec

CLUSTER = "dgx-h100"
ROWS, HEADS, KV_HEADS, HEAD_DIM, ITEMSIZE = 4096, 32, 8, 128, 2
SPECS = (
    "ring",
    "allgather",
    "mesh",
    "attention2d",
    "loongtrain",
    "usp:head_parallel_size=8",
    "mesh:head_parallel_size=8,layout=cyclic",
    "lightseq",
    "ring:layout=contiguous",
)


class Run(NamedTuple):
    """What the prediction of a pass took."""

    seconds: float
    mebibytes: float
    forecast: PassForecast


def predict(spec: str, ranks: int, backward: bool, every: bool = False) -> PassForecast:
    """A pass, with all ranks simulated one by one if `every`."""
    plan = parse_spec(spec).plan(ranks, backward=backward, heads=HEADS, kv_heads=KV_HEADS)
    shape = Shape(ROWS, HEADS, KV_HEADS, HEAD_DIM, ITEMSIZE)
    return simulate(plan, load_cluster(CLUSTER).part(ranks), shape, all_up_to=ranks if every else 1)


def timed(spec: str, ranks: int, backward: bool) -> Run:
    start = time.process_time()
    forecast = predict(spec, ranks, backward)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return Run(seconds, peak, PassForecast(forecast.seconds, forecast.compute, [], forecast.symmetry, {}))


def alone(spec: str, ranks: int, backward: bool) -> Run:
    """`timed` in a process of its own."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(timed, spec, ranks, backward).result()


def unequal(spec: str, ranks: int, backward: bool) -> str:
    """The difference between few ranks and all; nothing if there is none."""
    few, every = (predict(spec, ranks, backward, every) for every in (False, True))
    same = (few.seconds, few.compute) == (every.seconds, every.compute)
    return "" if same else f"{spec}, {ranks} ranks: {few.seconds!r} s with few ranks, {every.seconds!r} s with all"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--ranks", nargs="*", type=int, default=[256, 1024])
    parser.add_argument("--check", nargs="*", type=int, default=[])
    args = parser.parse_args()
    table = Table("strategy", "ranks", "simulated", "forward, s", "backward, s", "MiB", title=f"on {CLUSTER}")
    cases = [(spec, ranks) for ranks in args.ranks for spec in args.specs]
    for spec, ranks in tracked(cases, "predicting passes"):
        passes = [alone(spec, ranks, backward) for backward in (False, True)]
        seconds = [f"{one.seconds:.2f}" for one in passes]
        few = passes[0].forecast.symmetry
        table.add_row(
            spec, str(ranks), str(few.ranks * few.groups), *seconds, f"{max(p.mebibytes for p in passes):.0f}"
        )
    if cases:
        show(table)
    checks = [(spec, ranks, backward) for ranks in args.check for spec in args.specs for backward in (False, True)]
    wrong = [said for check in tracked(checks, "comparing few ranks with all") if (said := unequal(*check))]
    print("\n".join(wrong) if wrong else f"{len(checks)} passes take as long with few ranks as with all")
    return 1 if wrong else 0


if __name__ == "__main__":
    announce("predicting passes of many ranks")
    sys.exit(run_main(main))
