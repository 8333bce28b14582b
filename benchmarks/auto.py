"""Times the choice of `--cp-strategy auto` against a sweep of other cases.

The ranks measure their cluster (or take it from a file) and plan. The sweep is the predicted best of every strategy,
then what is predicted within 1.5 times of the best. Each job times the choice and two other cases, interleaved (A B C
A B C ...): each case keeps communicators, and those of many cases would slow all of them down. Run it from the
project's folder:

    PYTHONPATH=. python benchmarks/auto.py --ranks 4 --seq-length 2048 --output runs/auto
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks import job, report
from benchmarks.attention import add_workload, problem_of
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError
from tools.netlab import add_flags, cluster_of, exits_as_ranks_did

PLAN, TIME = (Path(__file__).with_name(name) for name in ("auto_rank.py", "attention_rank.py"))
TOGETHER = 2  # cases of a job, beside the choice


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--cp-cluster", metavar="NAME", help="a preset or .yaml file; default: measured by the ranks")
    parser.add_argument("--cp-head-parallel-size", type=int, metavar="N", help="only run cases with this size")
    parser.add_argument("--cases", type=int, default=14, help="maximum cases of the sweep; default: %(default)s")
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
    described = str(args.output / "cluster.yaml")
    task = {"problem": run["problem"], "cluster": args.cp_cluster, "fixed": fixed, "described": described}
    planned = job.results_of(PLAN, task | {"cases": args.cases}, place)
    run["predicted"] = {entry["case"]: entry["predicted"] for entry in planned}
    choice, *others = run["predicted"]
    task = {"problem": run["problem"], "rounds": args.rounds, "warm_up": args.warm_up, "cluster": None}
    groups = [[choice, *others[i : i + TOGETHER]] for i in range(0, len(others), TOGETHER)]
    run["jobs"] = [job.results_of(TIME, task | {"cases": cases}, place) for cases in groups]
    (args.output / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    show(judged(run))
    failed = [entry for entries in run["jobs"] for entry in entries if entry["failure"]]
    for entry in failed:
        print(f"{entry['case']}: not timed: {entry['failure']}")
    return int(bool(failed))


def judged(run: dict) -> Table:
    """Predicted and measured times of all cases, the choice first, and how far the choice is from the best.

    A case is compared with the choice in the same job: `x choice` is how many times faster it was.
    """
    choice, found = next(iter(run["predicted"])), dict[str, tuple[dict, float]]()
    for entries in run["jobs"]:
        timed = {entry["case"]: was for entry in entries if (was := report.summarize(entry | {"planned": None}))}
        for case, was in timed.items():
            found.setdefault(case, (was, timed[choice]["median"] / was["median"] if choice in timed else 0.0))
    best = max(found, key=lambda case: found[case][1])
    was, ratio = found[best]
    table = Table("case", title=f"{report.title(run)}\n\nchoice: {choice}")
    for heading in ("predicted", "measured", "off", "spread", "x choice"):
        table.add_column(heading, justify="right")
    for case, (summary, times) in found.items():
        told, median = run["predicted"][case], summary["median"]
        cells = [f"{told:.3f}", f"{median:.3f}", f"{told / median - 1:+.0%}"] if told else ["-", f"{median:.3f}", "-"]
        table.add_row(case, *cells, f"{summary['spread']:.0%}", f"{times:.2f}")
    table.caption = (
        f"best of {len(found)}: {best}\nthe choice takes {ratio - 1:.1%} longer than the best, whose spread is "
        f"{was['spread']:.1%}: {'within' if ratio - 1 <= max(0.03, was['spread']) else 'NOT within'} 3 % or the spread"
    )
    return table


if __name__ == "__main__":
    run_main(main)
