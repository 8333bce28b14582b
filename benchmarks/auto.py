"""Times the choice of `--cp-strategy auto` against a sweep of other cases, interleaved (A B C A B C ...).

The ranks measure their cluster (or take it from a file), plan, and run the choice and the sweep: the predicted best of
every strategy, then what is predicted within 1.5 times of the best. Run it from the project's folder:

    PYTHONPATH=. python benchmarks/auto.py --ranks 4 --seq-length 2048 --output runs/auto
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks import job, report
from benchmarks.attention import add_workload, problem_of
from megatron.context_parallel.commands.run import run_main
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.tables import show
from tools.netlab import add_flags, cluster_of, exits_as_ranks_did

RANK = Path(__file__).with_name("auto_rank.py")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--cp-cluster", metavar="NAME", help="a preset or .yaml file; default: measured by the ranks")
    parser.add_argument("--cp-head-parallel-size", type=int, metavar="N", help="only cases with this one")
    parser.add_argument("--cases", type=int, default=14, help="of the sweep at most; default: %(default)s")
    add_flags(parser)
    add_workload(parser)
    args = parser.parse_args(argv)
    if args.cases < 2:
        raise UsageError(f"--cases {args.cases}: need at least 2")
    return args


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    place = cluster_of(args)
    problem = problem_of(args, place.ranks)
    report.make_folder(args.output)
    run = {"title": "auto, forward and backward", "problem": asdict(problem)}
    run["surroundings"] = job.surroundings(place)
    fixed = {"head_parallel_size": args.cp_head_parallel_size} if args.cp_head_parallel_size else {}
    task = {"problem": run["problem"], "cluster": args.cp_cluster, "fixed": fixed, "cases": args.cases}
    entries = job.results_of(RANK, task | {"rounds": args.rounds, "warm_up": args.warm_up}, place)
    run["entries"] = [entry | {"planned": None} for entry in entries]
    report.publish(run, args.output)
    show(judged(run))
    return int(any(entry["failure"] for entry in entries))


def judged(run: dict) -> Table:
    """Predicted and measured times of all cases, the choice first, and how far the choice is from the best."""
    timed = {entry["case"]: (entry, report.summarize(entry)) for entry in run["entries"] if entry["rounds"]}
    choice = next(iter(timed))
    best = min(timed, key=lambda case: timed[case][1]["median"])
    off, spread = (timed[choice][1]["median"] / timed[best][1]["median"] - 1, timed[best][1]["spread"])
    table = Table("case", title=f"{report.title(run)}\n\nchoice: {choice}")
    for heading in ("predicted", "measured", "off", "spread", "x choice"):
        table.add_column(heading, justify="right")
    for case, (entry, summary) in timed.items():
        told, median = entry["predicted"], summary["median"]
        cells = [f"{told:.3f}", f"{median:.3f}", f"{told / median - 1:+.0%}"] if told else ["-", f"{median:.3f}", "-"]
        ratio = timed[choice][1]["median"] / median
        table.add_row(case, *cells, f"{summary['spread']:.0%}", f"{ratio:.2f}")
    table.caption = (
        f"best of {len(timed)}: {best}\nthe choice takes {off:.1%} longer than the best, whose spread is {spread:.1%}: "
        f"{'within' if off <= max(0.03, spread) else 'NOT within'} 3 % or the spread"
    )
    return table


if __name__ == "__main__":
    run_main(main)
