"""Prints the host's time of a step of a plan with a kernel that does nothing, on all ranks in this process.

    PYTHONPATH=. python benchmarks/overhead.py

Microseconds of CPU time for each step and rank, forward and backward, the least of several rounds.
"""

import argparse
import time

import torch
from rich.table import Table

from megatron.context_parallel import AllRanks, context_parallel_attention
from megatron.context_parallel.commands.run import run_main
from megatron.context_parallel.kernels.masks import Piece
from megatron.context_parallel.mask import Mask
from megatron.context_parallel.tables import show

CASES = ["ring", "lightseq", "attention2d", "mesh", "loongtrain:head_parallel_size=2"]


class Nothing:
    """A kernel that computes nothing: its results are what was in memory."""

    def pieces(self, block, keys):
        return [Piece(slice(0, block.first.shape[1]), slice(0, keys), "full")]

    def forward(self, q, k, v, mask, scores):
        return torch.empty(q.shape), torch.empty(q.shape[:-1])

    def backward(self, grad, scores):
        return tuple([torch.empty(x.shape) for x in (grad.q, grad.k, grad.v)])


def microseconds(cp: AllRanks, rounds: int) -> tuple[float, float]:
    """Of each step and rank: forward, backward."""
    length, heads, kernel = 4 * cp.n, 2, Nothing()
    q, k, v, dout = (torch.zeros(length, 1, heads, 1) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plans = [cp.plan(Mask(), (length,) * 2, heads, heads, backward=backward) for backward in (False, True)]
    steps = [sum(map(len, plan.steps)) * plan.heads for plan in plans]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):  # the first makes plans and blocks
        start = time.process_time()
        out = context_parallel_attention(*leaves, cp, kernel=kernel)
        middle = time.process_time()
        torch.autograd.grad(out, leaves, dout)
        times[0].append(middle - start)
        times[1].append(time.process_time() - middle)
    forward, backward = (1e6 * min(of[1:]) / count for of, count in zip(times, steps, strict=True))
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--strategies", nargs="+", default=CASES, metavar="NAME:OPTION=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("case", "ranks", "forward", "backward", title="microseconds of a step and rank, an empty kernel")
    for text in args.strategies:
        for n in args.ranks:
            table.add_row(text, str(n), *(f"{x:.1f}" for x in microseconds(AllRanks(n, text), args.rounds)))
    show(table)


if __name__ == "__main__":
    run_main(main)
