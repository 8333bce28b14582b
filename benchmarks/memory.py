"""Compares the predicted memory of training steps with real ones, and writes the table of docs/benchmarks/memory.md.

    PYTHONPATH=. python benchmarks/memory.py

Each case trains in processes of its own, on one or more ranks of this host: two steps whose resident memory above the
start is measured, then one whose allocations PyTorch's profiler records. It takes about 10 minutes. glibc's
MALLOC_MMAP_THRESHOLD_ is 65536, so that resident memory follows what is allocated. With --cases only some are measured;
the other lines of the page stay. With --default-malloc glibc keeps its own thresholds, and lines are only printed.
"""

import argparse
import os
import sys
from pathlib import Path
from unittest.mock import patch

from benchmarks import job
from benchmarks.page import table_of, write_table
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries, run_main
from megatron.context_parallel.cluster.step import memory, moment
from tools.netlab import Loopback

RANK = Path(__file__).with_name("memory_rank.py")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "memory.md"
SCRIPT = "benchmarks/memory.py"
MMAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

COMMON = "--micro-batch-size 1 --lr 1e-3 --train-iters 100 --tokenizer-type NullTokenizer --dry-run"
LLAMA = "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm "
LLAMA += "--untie-embeddings-and-output-weights"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KEPT = f"{FULL} --recompute-whitelist core_attention"
SOME = "--recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 1024"


def sizes(layers: int, hidden: int, inner: int, heads: int, width: int, length: int, vocabulary: int) -> str:
    """Flags of a model: `width` is that of a head, `inner` that of the MLP."""
    flags = f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {inner} --num-attention-heads {heads} "
    return flags + f"--kv-channels {width} --seq-length {length} --vocab-size {vocabulary - 1}"


WEIGHTS = sizes(4, 512, 1408, 8, 64, 256, 2048)
HEADS = sizes(12, 64, 64, 16, 64, 1024, 512)
WIDE = sizes(7, 128, 2048, 4, 32, 1024, 512)
LOGITS = sizes(2, 64, 128, 4, 16, 1024, 32768)
CUT_LOGITS = sizes(2, 64, 128, 4, 16, 2048, 65536)
CHUNKS = sizes(2, 64, 64, 48, 64, 2048, 512)
CASES: dict[str, tuple[int, str]] = {  # ranks and flags by name
    "weights": (1, f"{WEIGHTS} {LLAMA}"),
    "weights, bf16": (1, f"{WEIGHTS} {LLAMA} --bf16"),
    "weights, GPT": (1, WEIGHTS),
    "weights, optimizer sharded": (2, f"{WEIGHTS} {LLAMA} --bf16 --use-distributed-optimizer"),
    "weights, recomputed": (1, f"{WEIGHTS} {LLAMA} {FULL}"),
    "heads": (1, f"{HEADS} {LLAMA}"),
    "heads, bf16": (1, f"{HEADS} {LLAMA} --bf16"),
    "heads, GPT": (1, HEADS),
    "heads, ulysses": (2, f"{HEADS} {LLAMA} --cp-strategy ulysses"),
    "heads, ulysses in 4 rounds": (2, f"{HEADS} {LLAMA} --cp-strategy ulysses --cp-head-rounds 4"),
    "heads, ulysses in 4 rounds of tokens": (
        2,
        f"{HEADS} {LLAMA} --cp-strategy ulysses --cp-token-rounds 4 --cp-layout cyclic",
    ),
    "heads, kept": (1, f"{HEADS.replace('layers 12', 'layers 36')} {LLAMA} {KEPT}"),
    "heads, attention and norms recomputed": (1, f"{HEADS} {LLAMA} {SOME} core_attn layernorm"),
    "wide MLP": (1, f"{WIDE} {LLAMA}"),
    "wide MLP, bf16": (1, f"{WIDE} {LLAMA} --bf16"),
    "wide MLP, GPT": (1, WIDE),
    "wide MLP, recomputed": (1, f"{WIDE} {LLAMA} {FULL}"),
    "wide MLP, in chunks": (1, f"{WIDE} {LLAMA} --mlp-chunks-for-training 4"),
    "wide MLP, 2 layers recomputed": (
        2,
        f"{WIDE} {LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    "experts": (1, f"{WIDE} {LLAMA} {EXPERTS}"),
    "wide MLP, products kept": (1, f"{WIDE} {LLAMA} {KEPT} qkv proj fc1 fc2"),
    "experts, recomputed": (1, f"{WIDE} {LLAMA} {EXPERTS} {SOME} moe"),
    "logits": (1, f"{LOGITS} {LLAMA} --cross-entropy-chunk-size 1024"),
    "logits, bf16": (1, f"{LOGITS} {LLAMA} --cross-entropy-chunk-size 1024 --bf16"),
    "logits, tied": (1, f"{LOGITS} --cross-entropy-chunk-size 1024"),
    "logits, in chunks": (1, f"{CUT_LOGITS} {LLAMA} --cross-entropy-chunk-size 512"),
    "logits, in chunks, bf16": (1, f"{CUT_LOGITS} {LLAMA} --cross-entropy-chunk-size 512 --bf16"),
    "ring, recomputed": (2, f"{CHUNKS} {LLAMA} {FULL} --cp-strategy ring"),
    "ring, recomputed, bf16": (2, f"{CHUNKS} {LLAMA} {FULL} --cp-strategy ring --bf16"),
    "ring of 4, recomputed": (4, f"{CHUNKS} {LLAMA} {FULL} --cp-strategy ring"),
    "mesh of 4, recomputed": (4, f"{CHUNKS} {LLAMA} {FULL} --cp-strategy mesh"),
}
HEADINGS = ["case", "ranks", "largest kind", "fullest moment", "predicted GiB", "allocated GiB", "resident GiB"]
HEADINGS += ["predicted / allocated", "predicted / resident"]
GROUPS = {
    "weights": "weights and optimizer",
    "gradients": "weights and optimizer",
    "optimizer": "weights and optimizer",
    moment.REDUCTION: "weights and optimizer",
    "Adam's own numbers": "weights and optimizer",
    "attention activations": "activations of attention",
    "kept outputs": "activations of attention",
    "MLP activations": "activations of the MLP",
    moment.MLP: "activations of the MLP",
    moment.LOGITS: "logits",
    moment.BUFFERS: "chunks of attention",
}


def row(name: str, malloc: dict[str, str]) -> list[str]:
    """A case's line of the table, measured with these variables for glibc."""
    ranks, flags = CASES[name]
    words = [*COMMON.split(), *flags.split(), "--context-parallel-size", str(ranks)]
    expected = predicted(words, ranks)
    with patch.dict(os.environ, malloc):
        found = job.results_of(RANK, {"flags": words}, Loopback(ranks))
    allocated, resident = (max(rank[what] for rank in found) for what in ("allocated", "resident"))
    kinds: dict[str, int] = {}
    for item in expected.items:
        kind = GROUPS.get(item.what, item.what)
        kinds[kind] = kinds.get(kind, 0) + item.bytes
    largest = max(kinds, key=kinds.__getitem__)
    shown = [f"{size / 2**30:.3f}" for size in (expected.bytes, allocated, resident)]
    ratios = [f"{expected.bytes / size:.3f}" for size in (allocated, resident)]
    return [name, str(ranks), largest, expected.name, *shown, *ratios]


def predicted(flags: list[str], ranks: int) -> moment.Moment:
    """The fullest moment of the run with these flags of the trainer."""
    from megatron.context_parallel.trainer.arguments.complete import parse_args
    from megatron.context_parallel.trainer.config.workload import model_of, run_of

    with patch.dict(os.environ, WORLD_SIZE=str(ranks)):
        args = parse_args(flags)
    return memory.peak(model_of(args), run_of(args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--default-malloc", action="store_true", help="glibc's own thresholds; the page stays as it is")
    args = parser.parse_args()
    ignore_warnings_of_libraries()
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table_of(PAGE, SCRIPT)[2:]}
    for name in args.cases or CASES:
        lines[name] = f"| {' | '.join(row(name, {} if args.default_malloc else MMAP))} |"
        print(lines[name], file=sys.stderr, flush=True)
        if args.default_malloc:
            continue
        table = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
        table += [lines[case] for case in CASES if case in lines]
        write_table(PAGE, SCRIPT, table)


if __name__ == "__main__":
    run_main(main)
