"""Predicts runs of attention.py and training_step.py on a described cluster, beside measured times or before measuring.

    PYTHONPATH=. python benchmarks/predicted.py cluster.yaml runs/4x4 runs/4x4-more
    PYTHONPATH=. python benchmarks/predicted.py cluster.yaml -- --nodes 4 --strategies ring mesh --output runs/4x1

The first form compares the runs in these folders; those of one problem on one cluster share a table. The second one
takes the flags of attention.py after `--` and measures nothing; with --training-step those of training_step.py.
`cluster.yaml` is what tools/cluster_probe.py wrote there.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

from rich.table import Table

from benchmarks import attention, training_step
from benchmarks.cases import DTYPES, RECOMPUTATION, Workload, parse_case
from benchmarks.report import title
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.fields import what_if
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.tokens.mask import Mask
from tools.netlab import cluster_of

APART = 0.05  # cases that differ by less may be in any order
Predict = Callable[[str], float]  # seconds of a case


def parse_args(argv: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("cluster", metavar="FILE", help="description of the cluster, or a preset")
    parser.add_argument("--training-step", action="store_true", help="the flags after -- are those of training_step.py")
    parser.add_argument("--what-if", metavar="FIELD=NUMBER,...", help="other values of fields of the cluster")
    parser.add_argument("runs", nargs="*", type=Path, metavar="DIR", help="folders of measured runs")
    return parser.parse_args(argv)


def seconds(text: str, problem: Workload, cluster: Cluster) -> float:
    """Predicted time of a forward and backward pass of a case. A rank begins the second when its first is done."""
    rows = problem.length // problem.ranks * problem.batch
    shape = Shape(rows, problem.heads, problem.kv_heads, problem.head_dim, DTYPES[problem.dtype].itemsize)
    how = {"mask": Mask(problem.causal), "batch": problem.batch, "dtype": problem.dtype}
    plans = parse_case(text).plans(problem)
    forecast = None
    for plan in plans:
        starts = forecast.ends if forecast else None
        forecast = simulate(plan, cluster.part(problem.ranks), shape, **how, all_up_to=problem.ranks, starts=starts)
    return forecast.seconds


def step_seconds(text: str, flags: list[str], ranks: int, cluster: Cluster) -> float:
    """Predicted time of a training step of a case, with these flags of the trainer."""
    from megatron.context_parallel.cluster.step.step_time import forecast_step
    from megatron.context_parallel.trainer.config.workload import model_of, run_of

    name, comma, how = text.partition(", ")
    args = replace(training_step.trainer_args(flags, ranks), **RECOMPUTATION[comma + how])
    return forecast_step(model_of(args), run_of(args, parse_case(name).choice), cluster).seconds


def wrong_order(predicted: dict[str, float], measured: dict[str, dict], apart: float = APART) -> list[str]:
    """Pairs of cases predicted in the wrong order, among those that differ by more than `apart` and their spreads."""
    lines = []
    for a, b in combinations(measured, 2):
        fast, slow = sorted((a, b), key=lambda case: measured[case]["median"])
        differ = measured[slow]["median"] / measured[fast]["median"] > 1 + apart
        if differ and max(measured[fast]["times"]) < min(measured[slow]["times"]) and predicted[slow] < predicted[fast]:
            lines.append(f"wrong order: {slow} was slower than {fast}")
    return lines


def compare(heading: str, measured: dict[str, dict], predict: Predict) -> None:
    """Prints both, and their agreement. `measured`: summaries of `report.summarize`, by case."""
    predicted = {case: predict(case) for case in measured}
    errors = {case: predicted[case] / was["median"] - 1 for case, was in measured.items()}
    table = Table("case", title=heading)
    for name in ("predicted", "measured", "spread", "error"):
        table.add_column(name, justify="right")
    for case, was in measured.items():
        times = f"{predicted[case]:.3f}", f"{was['median']:.3f}"
        table.add_row(case, *times, f"{was['spread']:.0%}", f"{errors[case]:+.1%}")
    show(table)
    sizes = [abs(error) for error in errors.values()]
    print(f"error: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    print("\n".join(wrong_order(predicted, measured)) or "every pair that differs is in the right order")


def compare_runs(folders: list[Path], cluster: Cluster) -> None:
    together: dict[str, tuple[Predict, dict[str, dict]]] = {}
    for folder in folders:
        if not (folder / "run.json").is_file():
            raise UsageError(f"{folder}: contains no run.json; give an output folder of benchmarks/attention.py")
        run = json.loads((folder / "run.json").read_text())
        own = {case: was for case, was in run["summaries"].items() if was and not case.startswith("peer:")}
        problem = Workload(**run["problem"])
        predict = partial(seconds, problem=problem, cluster=cluster)
        if "trainer_flags" in run:
            predict = partial(step_seconds, flags=run["trainer_flags"], ranks=problem.ranks, cluster=cluster)
        together.setdefault(title(run), (predict, {}))[1].update(own)
    for heading, (predict, measured) in together.items():
        compare(heading, measured, predict)


def before(flags: list[str], cluster: Cluster) -> None:
    """Prints the predicted results of a command of attention.py."""
    args = attention.parse_args(flags)
    place = cluster_of(args)
    problem = attention.problem_of(args, place.ranks)
    cases, _ = attention.cases_of(args, problem)
    show_before([case.text for case in cases], partial(seconds, problem=problem, cluster=cluster), flags)


def before_training(flags: list[str], cluster: Cluster) -> None:
    """Prints the predicted results of a command of training_step.py."""
    args, given = training_step.parse_args(flags)
    ranks = cluster_of(args).ranks
    trainer = training_step.trainer_flags(given, ranks)
    how = RECOMPUTATION if args.recompute else [""]
    texts = [case + recomputed for case in args.strategies for recomputed in how]
    show_before(texts, partial(step_seconds, flags=trainer, ranks=ranks, cluster=cluster), flags)


def show_before(cases: list[str], predict: Predict, flags: list[str]) -> None:
    table = Table("case", title=f"predicted, not measured: {' '.join(flags)}")
    table.add_column("seconds", justify="right")
    for case in cases:
        table.add_row(case, f"{predict(case):.3f}")
    show(table)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args = parse_args(own)
    if bool(args.runs) == bool(flags):
        raise UsageError("runs: give folders of measured runs, or the flags of attention.py after --")
    cluster = load_cluster(args.cluster)
    cluster = what_if(cluster, args.what_if) if args.what_if else cluster
    if flags:
        (before_training if args.training_step else before)(flags, cluster)
    else:
        compare_runs(args.runs, cluster)


if __name__ == "__main__":
    run_main(main)
