"""Prints the host's time of a step of a plan with a kernel that does nothing, on all ranks in this process.

    PYTHONPATH=. python benchmarks/overhead.py

Microseconds of CPU time for each step and rank, the minimum of several rounds. The first two columns count all work of
a rank in a pass except messages: steps, receive buffers, merging, and the work before and after the steps. The other
two also count posting each message with torch.distributed, to a group that sends nothing.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.context_parallel import AllRanks
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.kernels.interface import Scores
from megatron.context_parallel.kernels.masks import Piece
from megatron.context_parallel.patches.torch_dispatcher import below_autograd
from megatron.context_parallel.runtime import passes
from megatron.context_parallel.runtime.comm.transport import TorchTransport, Transport, run_rank
from megatron.context_parallel.runtime.executor import Problem
from megatron.context_parallel.tokens.mask import Mask

CASES = ["ring", "lightseq", "attention2d", "mesh", "loongtrain:head_parallel_size=2"]


class Nothing:
    """A kernel that computes nothing: its results are uninitialized."""

    def pieces(self, block, keys):
        return [Piece(slice(0, block.first.shape[1]), slice(0, keys), "full")]

    def forward(self, q, k, v, mask, scores):
        return torch.empty_like(q), q.squeeze(-1)  # head_dim is 1

    def backward(self, grad, scores):
        return torch.empty_like(grad.q), torch.empty_like(grad.k), torch.empty_like(grad.v)


class Silent:
    """A transport that sends nothing: received data is uninitialized."""

    can_reduce = False

    def world_rank(self, peer):
        return peer

    def exchange(self, channel, sends, receives):
        return self

    all_to_all = all_gather = lambda self, *_, **_how: self

    def wait(self):
        pass


class Posting(TorchTransport):
    """All communicators are the process's group, whose backend "fake" moves nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks = rank, list(range(dist.get_world_size()))
        self._everyone, self.nccl, self.can_reduce = tuple(self.ranks), False, False

    def _group(self, channel, members):
        return dist.group.WORLD


def turns(transport: Callable[[int], Transport]) -> Callable:
    """As `AllRanks.run`: each rank in turn, over a transport that needs no other rank."""

    def run(program, plan, problem, parts):
        return [run_rank(program(plan, problem, rank, transport(rank), *part)) for rank, part in enumerate(parts)]

    return run


def microseconds(cp: AllRanks, run: Callable, rounds: int) -> list[float]:
    """Of each step and rank: forward, backward."""
    lengths, heads, kernel = (4 * cp.n, 4 * cp.n), 2, Nothing()
    problem = Problem(cp.plans.blocks(Mask(), lengths, kernel), heads, kernel, Scores(1.0))
    plans = [cp.plans.of(Mask(), lengths, heads, heads, backward=backward) for backward in (False, True)]
    q, k, v, dout = (torch.zeros(4, 1, heads, 1) for _ in range(4))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):  # the first makes steps and blocks
        start = time.process_time()
        ended = run(passes.forward, plans[0], problem, [(None, q, k, v)] * cp.n)
        middle = time.process_time()
        inputs = [(None, dout, out, *folded) for out, _, *folded in ended]
        begun = time.process_time()
        run(passes.backward, plans[1], problem, inputs)
        times[0].append(middle - start)
        times[1].append(time.process_time() - begun)
    counts = [sum(map(len, plan.steps)) * plan.head_parallel_size for plan in plans]
    return [1e6 * min(of[1:]) / count for of, count in zip(times, counts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--strategies", nargs="+", default=CASES, metavar="NAME:OPTION=VALUE")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = "case", "ranks", "forward", "backward", "forward, posting", "backward, posting"
    table = Table(*columns, title="microseconds of a step and rank, an empty kernel")
    for n in args.ranks:
        dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
        for text in args.strategies:
            cp = AllRanks(n, text)
            ways = turns(lambda rank: Silent()), turns(Posting)
            with below_autograd():  # as inside the operator of a layer
                found = [x for run in ways for x in microseconds(cp, run, args.rounds)]
            table.add_row(text, str(n), *(f"{x:.1f}" for x in found))
        dist.destroy_process_group()
    show(table)


if __name__ == "__main__":
    run_main(main)
