"""The rounds of a head-parallel pass: a rank computes a part of its heads while the next and the last are swapped."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .comm.transport import Program
from .head_swap import HeadGroup, StartedSwap

Compute = Callable[..., Program[list[Tensor]]]  # (round, *swapped tensors) to results


def in_rounds(
    group: HeadGroup, tensors: Sequence[Tensor], compute: Compute, kv_heads: int | None = None
) -> Program[list[Tensor]]:
    """Swaps, computes and swaps back, round by round. Returns the results for this rank's chunk.

    Args:
        group: of this rank.
        tensors: each [s, b, heads, ...] of this rank's chunk.
        compute: gets the tensors [s * size, b, h, ...] of the group's chunk; returns results of this form.
        kv_heads: all results but the first are partial gradients of so many heads, of which parts share some. None:
            each result belongs to one part.
    """
    if len(group.members) == 1:
        return (yield from compute(0, *tensors))
    back = _Results(group, kv_heads)
    arriving = [group.to_heads(tensors, 0)]  # lists, because buffers are freed when their swap leaves them
    leaving: list[StartedSwap] = []
    for turn in range(group.plan.rounds):
        swapped = yield from arriving.pop().wait()
        if turn + 1 < group.plan.rounds:
            arriving.append(group.to_heads(tensors, turn + 1))
        results = yield from compute(turn, *swapped)
        del swapped
        if leaving:
            back.add((yield from leaving.pop().wait()), turn - 1)
        leaving.append(group.to_chunks(results, back.of_round(results, turn)))
        del results
    back.add((yield from leaving.pop().wait()), group.plan.rounds - 1)
    return back.wholes


class _Results:
    """Results of all rounds, for the chunk of a rank.

    Attributes:
        wholes: each [s, b, heads, ...].
    """

    def __init__(self, group: HeadGroup, kv_heads: int | None) -> None:
        self.group, self.kv_heads = group, kv_heads
        self.wholes: list[Tensor] = []

    def of_round(self, results: list[Tensor], turn: int) -> list[Tensor]:
        """Where to receive the results of a round, each [s, b, size, h, ...]: in `wholes`; partial gradients apart."""
        size, rounds = len(self.group.members), self.group.plan.rounds
        into = []
        for i, x in enumerate(results):
            rows, b, heads = len(x) // size, *x.shape[1:3]
            if i > 0 and self.kv_heads:
                into.append(x.new_empty(rows, b, size, heads, *x.shape[3:]))
                continue
            if turn == 0:
                self.wholes.append(x.new_empty(rows, b, size * rounds * heads, *x.shape[3:]))
            into.append(self.group.by_member(self.wholes[i], turn))
        return into

    def add(self, received: list[Tensor], turn: int) -> None:
        """Adds partial gradients of a round to their heads. Each of the ranks that share a head has sent one."""
        if self.kv_heads is None:
            return
        size, rounds = len(self.group.members), self.group.plan.rounds
        of_rank = max(1, self.kv_heads // size)  # heads
        for i, x in enumerate(received[1:], 1):
            sums = x.flatten(2, 3).unflatten(2, (self.kv_heads // of_rank, -1)).sum(3)
            if turn == 0 and of_rank == 1:
                self.wholes.append(sums)
                continue
            if turn == 0:
                self.wholes.append(x.new_zeros(*x.shape[:2], self.kv_heads, *x.shape[4:]))
            self.wholes[i].unflatten(2, (-1, of_rank))[:, :, :, turn * of_rank // rounds] += sums
