"""Times a training step of a tiny Llama per strategy, interleaved (A B C A B C ...).

Flags after -- are the trainer's and win over the defaults here. Run it from the project's folder:

    PYTHONPATH=. python benchmarks/training_step.py --ranks 4 --output runs/step \\
        --strategies ring attention2d:grid=2x2 mesh -- --num-layers 2 --seq-length 2048

With --documents every step has the same documents. Their placement and plans are made before the timed steps.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from benchmarks import job, report
from benchmarks.attention import add_documents, with_documents
from benchmarks.cases import Case, Workload, parse_case
from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries, run_main
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import PRESETS, Arguments
from tools.netlab import add_device_flags, add_flags, cluster_of, exits_as_ranks_did, with_devices

RANK = Path(__file__).with_name("training_rank.py")
# The preset's two layers with the heads of attention.py, and so few weights that their reduction does not dominate.
# A dry run needs no data; it only means that the trainer's flags are checked without.
LLAMA = "--preset tiny-llama --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 8 --num-query-groups 8 "
LLAMA += "--kv-channels 64 --seq-length 4096 --micro-batch-size 1 --lr 1e-3 --train-iters 1000 --dry-run"


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags here, and those of the trainer."""
    words = sys.argv[1:] if argv is None else argv
    own, trainer = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    names = ", ".join(STRATEGIES)
    parser.add_argument("--strategies", nargs="+", required=True, metavar="NAME[:OPTION=VALUE,...]", help=f"of {names}")
    add_flags(parser)
    add_device_flags(parser)
    add_documents(parser)
    text = "with --devices: the matrix products take the share of a step that they have in a layer of this model"
    parser.add_argument("--products-of", choices=PRESETS, metavar="MODEL", help=text)
    text = "each strategy also with all layers recomputed, and with attention kept (Selective Checkpoint++)"
    parser.add_argument("--recompute", action="store_true", help=text)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each; default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for CSV, JSON and plot")
    return parser.parse_args(own), trainer


def trainer_flags(given: list[str], ranks: int) -> list[str]:
    """The trainer's flags: those here, then those given."""
    return [*LLAMA.split(), *given, "--context-parallel-size", str(ranks)]


def trainer_args(flags: list[str], ranks: int) -> Arguments:
    """The trainer's arguments from its flags on these ranks."""
    ignore_warnings_of_libraries()
    from megatron.context_parallel.trainer.arguments.complete import parse_args as parse_trainer

    with patch.dict(os.environ, WORLD_SIZE=str(ranks)):
        args = parse_trainer(flags)
    if args.context_parallel_size != ranks or args.global_batch_size != args.micro_batch_size:
        raise UsageError("--context-parallel-size, --global-batch-size: set by this benchmark; leave them out after --")
    return args


def problem_of(args: Arguments) -> Workload:
    """The attention of a layer."""
    dtype = "bf16" if args.bf16 else "fp32"
    sizes = (args.seq_length, args.micro_batch_size, args.num_attention_heads, args.num_query_groups)
    return Workload(args.context_parallel_size, *sizes, args.kv_channels, dtype, causal=True)


def cases_of(texts: list[str], problem: Workload) -> list[Case]:
    """Raises UsageError for a case that cannot train on these ranks and heads."""
    cases = [parse_case(text) for text in texts]
    for case in cases:
        if case.peer:
            raise UsageError(f"--strategies {case.text}: the trainer runs only this project's strategies, such as ring")
        case.plans(problem)
    return cases


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args, given = parse_args(argv)
    ranks = cluster_of(args).ranks
    flags = trainer_flags(given, ranks)
    problem = problem_of(trainer_args(flags, ranks))
    place, described = with_devices(args, problem.length)
    if args.products_of and described is None:
        raise UsageError(f"--products-of {args.products_of}: needs --devices; give a preset or a file")
    problem = with_documents(args, problem)
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: need at least 1")
    cases = cases_of(args.strategies, problem)
    report.make_folder(args.output)
    run = {"title": "training step", "problem": asdict(problem), "trainer_flags": flags}
    run["surroundings"] = job.surroundings(place)
    task = {"problem": run["problem"], "cases": [case.text for case in cases], "flags": flags}
    task |= {"recompute": args.recompute, "products_of": args.products_of}
    task["stands_for"] = args.stands_for or problem.length
    task["cluster"] = job.write_cluster(described, args.output)
    entries = job.results_of(RANK, task | {"rounds": args.rounds, "warm_up": 1}, place)
    run["entries"] = [entry | {"planned": None} for entry in entries]
    report.publish(run, args.output)
    return int(any(entry["failure"] for entry in entries))


if __name__ == "__main__":
    run_main(main)
