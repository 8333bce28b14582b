"""Times forward and backward of distributed attentions against each other, interleaved (A B C A B C ...).

Each is first compared with exact attention; cases that are not exact are not timed. Run it in the project's folder:

    PYTHONPATH=. python benchmarks/attention.py --ranks 4 --seq-length 1024 --output runs/try \\
        --strategies ring attention2d:grid=2x2 loongtrain:head_parallel_size=2,inner_ring_size=2 peer:ring-flash-attn
"""

import argparse
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks import job, report
from benchmarks.cases import DTYPES, PRESETS, Case, Workload, parse_case, preset
from benchmarks.peers import PEERS
from benchmarks.placement import LENGTHS, draw
from benchmarks.volume import planned_bytes
from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.errors import UsageError
from tools.netlab import add_device_flags, add_flags, exits_as_ranks_did, with_devices

RANK = Path(__file__).with_name("attention_rank.py")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    names = ", ".join([*STRATEGIES, *(f"peer:{name} ({text})" for name, (_, text) in PEERS.items())])
    what.add_argument("--strategies", nargs="+", metavar="NAME[:OPTION=VALUE,...]", help=f"of {names}")
    sets = "; ".join(f"{name}: {text}" for name, text in PRESETS.items())
    what.add_argument("--preset", metavar="NAME", help=f"a ready-made comparison: {sets}")
    add_flags(parser)
    add_device_flags(parser)
    add_workload(parser)
    add_documents(parser)
    return parser.parse_args(argv)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags for the problem, the number of rounds, and the output."""
    parser.add_argument(
        "--num-attention-heads", type=int, default=8, help="number of query heads; default: %(default)s"
    )
    parser.add_argument("--num-query-groups", type=int, help="number of key/value heads; default: as query heads")
    parser.add_argument("--kv-channels", type=int, default=64, help="width of a head; default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=4096, help="number of tokens; default: %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="number of sequences; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")
    parser.add_argument("--full-mask", action="store_true", help="every token sees every token; default: causal")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds; default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=1, help="warm-up passes of each case; default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for CSV, JSON and plot")


def add_documents(parser: argparse.ArgumentParser) -> None:
    text = "pack documents of such lengths; a case placed:SPEC places them"
    parser.add_argument("--documents", choices=LENGTHS, help=text)


def problem_of(args: argparse.Namespace, ranks: int) -> Workload:
    """Raises UsageError for invalid sizes."""
    for flag, least in (
        ("num_attention_heads", 1),
        ("num_query_groups", 1),
        ("kv_channels", 1),
        ("seq_length", ranks),
        ("micro_batch_size", 1),
        ("rounds", 1),
        ("warm_up", 0),
    ):
        if (value := getattr(args, flag)) is not None and value < least:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: need at least {least}")
    heads, kv_heads = args.num_attention_heads, args.num_query_groups or args.num_attention_heads
    if heads % kv_heads:
        raise UsageError(f"--num-query-groups {kv_heads}: must divide --num-attention-heads {heads}, as 1 does")
    if args.seq_length % (2 * ranks):
        near = max(2 * ranks, args.seq_length // (2 * ranks) * 2 * ranks)
        raise UsageError(
            f"--seq-length {args.seq_length}: {ranks} ranks need a multiple of {2 * ranks}, such as {near}"
        )
    sizes = (args.seq_length, args.micro_batch_size, heads, kv_heads, args.kv_channels)
    return Workload(ranks, *sizes, args.dtype, not args.full_mask)


def with_documents(args: argparse.Namespace, problem: Workload) -> Workload:
    """The problem with the documents of `--documents`, if given."""
    if args.documents is None:
        return problem
    token = (args.stands_for or problem.length) / problem.length
    return replace(problem, documents=lengths(args.documents, problem.length, token))


def lengths(kind: str, tokens: int, token: float) -> tuple[int, ...]:
    """Drawn lengths of documents that fill a sequence, whose tokens stand for `token` each."""
    documents = draw(kind, round(tokens * token), np.random.default_rng(0))
    ends = np.unique(np.append((documents.edges[0][1:-1] / token).round().astype(int).clip(1, tokens), tokens))
    return tuple(np.diff(ends, prepend=0).tolist())


def cases_of(args: argparse.Namespace, problem: Workload) -> tuple[list[Case], list[list[int] | None]]:
    """The cases, and for each the bytes per rank of its plans (None for a peer, and with documents).

    Raises:
        UsageError: a case is unknown, does not work on these ranks and heads, or is given twice.
    """
    texts = args.strategies or preset(args.preset, problem)
    if twice := next((text for text in texts if texts.count(text) > 1), None):
        raise UsageError(f"--strategies {twice}: is given twice; give it once")
    cases = [parse_case(text) for text in texts]
    return cases, [
        None if case.peer or problem.documents else planned_bytes(case.plans(problem), problem) for case in cases
    ]


def with_python(described: Cluster, cases: list[Case], problem: Workload, entries: list[dict]) -> Cluster:
    """The description of an emulated cluster, with Python's own time of a step and of a head swap.

    They are medians over the strategies. All ranks swap at once, so they take turns on the processors of this machine.
    """
    plain, swapping = list[float](), list[tuple[float, int, int]]()
    for case, entry in zip(cases, entries, strict=True):
        if case.peer or "python" not in entry:
            continue
        plans = case.plans(problem)
        steps = sum(len(plan.steps[0]) for plan in plans)
        swaps = sum(len(plan.swaps_before) + len(plan.swaps_after) for plan in plans)
        seconds = entry["python"]["seconds"]
        if swaps:
            swapping.append((seconds, steps, swaps))
        else:
            plain.append(seconds / steps)
    step = statistics.median(plain or [seconds / steps for seconds, steps, _ in swapping] or [0.0])
    turns = max(1.0, problem.ranks / len(os.sched_getaffinity(0)))
    swap = statistics.median([(seconds - steps * step) / swaps for seconds, steps, swaps in swapping] or [0.0])
    step_us, swap_us = float(round(step * 1e6)), float(round(max(swap, 0) * turns * 1e6))
    return replace(described, device=replace(described.device, step_us=step_us, swap_us=swap_us))


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    place, described = with_devices(args, args.seq_length)
    problem = with_documents(args, problem_of(args, place.ranks))
    cases, planned = cases_of(args, problem)
    report.make_folder(args.output)
    run = {"title": "attention, forward and backward", "problem": asdict(problem)}
    run["surroundings"] = job.surroundings(place)
    task = {"problem": run["problem"], "cases": [case.text for case in cases]}
    task["cluster"] = job.write_cluster(described, args.output)
    entries = job.results_of(RANK, task | {"rounds": args.rounds, "warm_up": args.warm_up}, place)
    run["entries"] = [{"planned": plan} | entry for entry, plan in zip(entries, planned, strict=True)]
    if described:
        job.write_cluster(with_python(described, cases, problem, entries), args.output)
    report.publish(run, args.output)
    return int(any(entry["failure"] and not case.peer for entry, case in zip(entries, cases, strict=True)))


if __name__ == "__main__":
    run_main(main)
