"""Finds the longest sequence that trains with little memory, with more and more measures that save it.

    PYTHONPATH=. python benchmarks/longest.py

Two ranks train a small Llama on this host. The kernel of this host refuses a rank more than 160 MiB above its memory
at the start (RLIMIT_DATA). The search tries lengths with attention that allocates as ever, but returns zeros. One real
step then trains at the lengths that the table divides. It writes the table of docs/benchmarks/memory.md.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.memory import FULL, LLAMA, MMAP
from benchmarks.page import write_table
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries, run_main
from megatron.context_parallel.cluster.step.longest import longest
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.workload import model_of, run_of

RANKS = 2
ROOM = 160 * 2**20  # bytes
EACH = 128  # lengths are multiples of it
STEP = 0.02  # of the predicted length, from trial to trial
NEAR = 0.01  # between the longest that trains and the shortest that does not
MODEL = "--num-layers 8 --hidden-size 64 --ffn-hidden-size 224 --num-attention-heads 2 --vocab-size 8191"
COMMON = f"{MODEL} {LLAMA} --micro-batch-size 1 --lr 1e-3 --train-iters 100 --tokenizer-type NullTokenizer --dry-run "
COMMON += f"--context-parallel-size {RANKS} --seq-length 256"
WHOLE = "--cross-entropy-chunk-size 1000000000"  # all logits at once
CHUNKS = "--cross-entropy-chunk-size 512"
TILES = "--mlp-chunks-for-training 8"
OFFLOAD = "--offload-checkpoints"
CASES = {  # flags by name
    "plain": WHOLE,
    "full recomputation": f"{WHOLE} {FULL}",
    "+ chunks of the loss": f"{CHUNKS} {FULL}",
    "+ chunks of the MLP": f"{CHUNKS} {FULL} {TILES}",
    "+ checkpoints in host memory": f"{CHUNKS} {FULL} {TILES} {OFFLOAD}",
    "+ sharded optimizer: all measures": f"{CHUNKS} {FULL} {TILES} {OFFLOAD} --use-distributed-optimizer",
}
REAL = {"plain", "full recomputation", "+ sharded optimizer: all measures"}  # a real step trains too
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "memory.md"
HEADINGS = ["measures", "tokens", "times plain", "times full recomputation", "predicted tokens"]


class Found(NamedTuple):
    """Tokens of the longest sequence, and those predicted."""

    tokens: int
    predicted: int


def find(flags: list[str], context: ForkServerContext, ratio: float, real: bool) -> Found:
    """Searches from `ratio` times the predicted length on. If `real`, a real step trains at the result."""
    args = parse_args(flags)
    predicted = longest(model_of(args), run_of(args), ROOM).tokens // EACH * EACH
    tokens = round(ratio * predicted / EACH) * EACH
    step = max(EACH, round(STEP * predicted / EACH) * EACH)
    trains, fails = 0, 0
    while not (trains and fails):
        if trains_with(flags, tokens, context):
            trains, tokens = tokens, tokens + step
        else:
            fails, tokens = tokens, tokens - step
    while fails - trains > max(EACH, NEAR * predicted):
        middle = (trains + fails) // 2 // EACH * EACH
        if trains_with(flags, middle, context):
            trains = middle
        else:
            fails = middle
    while real and not trains_with(flags, trains, context, computes=True):
        trains -= EACH
    return Found(trains, predicted)


def trains_with(flags: list[str], tokens: int, context: ForkServerContext, computes: bool = False) -> bool:
    """Whether a step with sequences of `tokens` trains; else a rank lacks memory."""
    from benchmarks.longest_rank import Trial, train

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(flags, tokens, ROOM, computes, RANKS, f"{folder}/store")
        processes = [context.Process(target=train, args=(rank, trial)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        status = first_failure(processes)
    said = f"{tokens} tokens {'lack memory' if status else 'train'}, {time.monotonic() - began:.1f} s"
    print(said + " with attention" * computes, file=sys.stderr, flush=True)
    return status == 0


def fork_server() -> ForkServerContext:
    """Processes with everything imported, and with memory that follows what is allocated."""
    os.environ.update(MMAP, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", WORLD_SIZE=str(RANKS))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.longest_rank"])
    return context


def first_failure(processes: list[ForkServerProcess]) -> int:
    """Waits until a process fails or all are done; the others end then. Returns the status of the first that failed.

    Raises:
        RuntimeError: it failed for another reason than a lack of memory.
    """
    from benchmarks.longest_rank import NO_MEMORY

    left = {process.sentinel: process for process in processes}
    status = 0
    while left and not status:
        for sentinel in wait([*left]):
            process = left.pop(sentinel)
            process.join()
            status = status or process.exitcode
    for process in left.values():
        process.kill()
        process.join()
    if status > 0 and status != NO_MEMORY:  # by a signal: C++ code that could not allocate
        raise RuntimeError(f"a rank ended with status {status}")
    return status


def table(found: dict[str, Found]) -> list[str]:
    """The lines of the page."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    plain, full = (found[name].tokens for name in [*CASES][:2])
    for name, (tokens, predicted) in found.items():
        cells = [name, f"{tokens:,}", f"{tokens / plain:.1f}", f"{tokens / full:.1f}", f"{predicted:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ignore_warnings_of_libraries()
    context = fork_server()
    found = dict[str, Found]()
    ratio = 1.0  # of the length found to the predicted one, as in the line before
    for name, flags in CASES.items():
        print(name, file=sys.stderr)
        found[name] = find([*COMMON.split(), *flags.split()], context, ratio, name in REAL)
        ratio = found[name].tokens / found[name].predicted
    lines = table(found)
    print("\n".join(lines))
    write_table(PAGE, "benchmarks/longest.py", lines)


if __name__ == "__main__":
    run_main(main)
