"""Prints the time of all ranks of a strategy in this process over that of one call of ATen's flash attention.

    PYTHONPATH=. python benchmarks/one_process.py

Both do the same attention, forward and backward, on one core. Rounds are interleaved, and the ratio is the median of
the rounds' ratios. The other columns have the same for block kernels alone, and their share of the total.
"""

import argparse
import statistics
import time

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.stopwatch import Stopwatch, TimedKernel
from megatron.context_parallel import AllRanks, context_parallel_attention
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.kernels.aten import AtenFlash

CASES = ["ring", "ring:layout=contiguous", "ring:layout=cyclic", "allgather", "ulysses", "lightseq", "attention2d"]
CASES += ["attention2d:layout=cyclic", "mesh", "loongtrain:head_parallel_size=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategies", nargs="+", default=CASES, metavar="NAME:OPTION=VALUE")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--kv-channels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = args.seq_length, 1, args.num_attention_heads, args.kv_channels
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    watch = Stopwatch()
    kernel = TimedKernel(AtenFlash(), watch)
    ranks = {}
    for text in args.strategies:
        ranks[text] = AllRanks(args.ranks, text)

    def seconds(attend) -> float:
        start = time.perf_counter()
        torch.autograd.grad(attend(), leaves, dout)
        return time.perf_counter() - start

    def aten() -> torch.Tensor:
        heads_first = (x.permute(1, 2, 0, 3) for x in leaves)
        return scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)

    ratios: dict[str, list[tuple[float, float]]] = {text: [] for text in ranks}
    for number in range(args.rounds + 1):
        one = seconds(aten)
        for text, cp in ranks.items():
            watch.seconds.clear()
            total = seconds(lambda cp=cp: context_parallel_attention(*leaves, cp, kernel=kernel))
            if number:  # the first round warms up
                ratios[text].append((total / one, watch.seconds["kernel"] / one))
    table = Table(
        "case", "total / ATen", "kernels / ATen", "kernels / total", title=f"{args.ranks} ranks in one process"
    )
    for text, rounds in ratios.items():
        total, kernels = (statistics.median(column) for column in zip(*rounds, strict=True))
        table.add_row(text, f"{total:.3f}", f"{kernels:.3f}", f"{kernels / total:.3f}")
    show(table)


if __name__ == "__main__":
    run_main(main)
