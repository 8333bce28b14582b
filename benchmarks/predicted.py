"""Predicts the runs of attention.py on a described cluster, and compares with what was measured.

    PYTHONPATH=. python benchmarks/predicted.py cluster.yaml runs/4x4 runs/placement

The cluster file is one that tools/cluster_probe.py wrote where the runs were made. A folder without a `run.json` whose
cases are to be predicted before they are measured: see `--predict`.
"""

import argparse
import json
import statistics
from itertools import combinations
from pathlib import Path

from rich.table import Table

from benchmarks.cases import DTYPES, Workload, parse_case
from benchmarks.report import title
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.simulate import simulate
from megatron.context_parallel.commands.run import run_main
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.mask import Mask
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.tables import show

APART = 0.05  # cases that differ by less may be in any order


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("cluster", help="file of the cluster")
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folders of measured runs")
    return parser.parse_args(argv)


def predicted(text: str, problem: Workload, cluster: Cluster) -> float:
    """Seconds of forward and backward of a case."""
    rows = problem.length // problem.ranks * problem.batch
    itemsize = DTYPES[problem.dtype].itemsize
    shape = Shape(rows, problem.heads, problem.kv_heads, problem.head_dim, itemsize)
    how = {"mask": Mask(problem.causal), "batch": problem.batch, "dtype": problem.dtype}
    plans = parse_case(text).plans(problem)
    return sum(simulate(plan, cluster.part(problem.ranks), shape, **how).seconds for plan in plans)


def wrong_order(found: dict[str, tuple[float, dict]]) -> list[str]:
    """Pairs of cases that are apart by more than 5 % and their spreads, and predicted the other way round."""
    lines = []
    for (a, (said_a, was_a)), (b, (said_b, was_b)) in combinations(found.items(), 2):
        low, high = sorted((was_a, was_b), key=lambda was: was["median"])
        apart = high["median"] / low["median"] > 1 + APART and min(high["times"]) > max(low["times"])
        if apart and (said_a < said_b) != (was_a["median"] < was_b["median"]):
            lines.append(f"wrong order: {a} and {b}")
    return lines


def compare(folder: Path, cluster: Cluster) -> None:
    run = json.loads((folder / "run.json").read_text())
    problem = Workload(**run["problem"])
    found, errors = dict[str, tuple[float, dict]](), list[float]()
    table = Table("case", title=title(run))
    for name in ("predicted", "measured", "spread", "error"):
        table.add_column(name, justify="right")
    for text, was in run["summaries"].items():
        if not was or text.startswith("peer:"):
            continue
        said = predicted(text, problem, cluster)
        found[text] = said, was
        errors.append(said / was["median"] - 1)
        table.add_row(text, f"{said:.3f}", f"{was['median']:.3f}", f"{was['spread']:.0%}", f"{errors[-1]:+.1%}")
    show(table)
    sizes = [abs(error) for error in errors]
    print(f"error: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    print("\n".join(wrong_order(found)) or "all cases are in the right order")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    cluster = load_cluster(args.cluster)
    for folder in args.runs:
        if not (folder / "run.json").is_file():
            raise UsageError(f"{folder}: no run.json there; give a folder that benchmarks/attention.py wrote")
        compare(folder, cluster)


if __name__ == "__main__":
    run_main(main)
