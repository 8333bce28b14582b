"""The longest sequences of Llama3-8B on nodes of 8 H100 with 80 GB, predicted: a dry run for each number of GPUs.

    PYTHONPATH=. python examples/llama/longest.py 8
    PYTHONPATH=. python examples/llama/longest.py 32 --optimizer-cpu-offload
    PYTHONPATH=. python examples/llama/longest.py --table    all of them, written to docs/memory.md

It prints the command. To train, leave out --dry-run and --longest, give the length that was found as --seq-length, and
the data.
"""

import argparse
from itertools import product
from pathlib import Path

from benchmarks.page import write_table
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cluster.step.memory import host_memory
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from megatron.context_parallel.trainer.dry_run import describe
from megatron.context_parallel.trainer.memory_report import longest_run

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
STRATEGY = "ring:head_parallel_size=2,head_rounds=16"
ALL_GPUS = (8, 32)
MEASURES = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --offload-checkpoints "
MEASURES += "--mlp-chunks-for-training 64 --cross-entropy-chunk-size 2048 --use-torch-fsdp2"
ON_HOST = " --optimizer-cpu-offload"
GIB = 80
PUBLISHED = {  # tokens on H100 GPUs with 80 GB, by GPUs and system
    (8, "ALST, optimizer on the CPU (published)"): "3.7M",
    (8, "UPipe (published)"): "5M",
    (32, "ALST, optimizer on the CPU (published)"): "15M",
}
HEADINGS = ["GPUs", "system", "tokens", "host memory of a node, GiB"]


def flags(gpus: int, on_host: bool = False) -> str:
    """Those of the trainer; `on_host`: with the optimizer and FSDP2's shards in host memory."""
    run = f"--preset llama3-8b --bf16 --micro-batch-size 1 --context-parallel-size {gpus} {MEASURES}"
    return f"{run} --cp-strategy {STRATEGY} --device-memory {GIB}GB --dry-run --longest{ON_HOST if on_host else ''}"


def row(gpus: int, on_host: bool) -> list[str]:
    """A line of the table."""
    args, _ = longest_run(parse_args(flags(gpus, on_host).split()), GIB)
    there = 8 * host_memory(model_of(args), run_of(args)) / 2**30
    system = f"this project, `{STRATEGY}`{', optimizer on the CPU' if on_host else ''} (predicted)"
    return [str(gpus), system, f"{args.seq_length / 1e6:.1f}M", f"{there:,.0f}"]


def table() -> list[str]:
    rows = [[str(gpus), system, tokens, ""] for (gpus, system), tokens in PUBLISHED.items()]
    rows += [row(gpus, on_host) for gpus, on_host in product(ALL_GPUS, (False, True))]
    rows.sort(key=lambda cells: int(cells[0]))
    return [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="?", type=int, choices=ALL_GPUS)
    parser.add_argument(ON_HOST.strip(), action="store_true", help="the optimizer and FSDP2's shards in host memory")
    parser.add_argument("--table", action="store_true", help="write docs/memory.md")
    given = parser.parse_args(argv)
    if given.table:
        write_table(PAGE, "examples/llama/longest.py", table())
    elif given.gpus:
        words = flags(given.gpus, given.optimizer_cpu_offload)
        print(f"python pretrain_gpt.py {words}")
        describe(parse_args(words.split()))
    else:
        parser.error("give a number of GPUs, or --table")


if __name__ == "__main__":
    run_main(main)
