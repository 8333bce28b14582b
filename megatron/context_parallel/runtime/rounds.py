"""The rounds of a head-parallel pass: a rank computes a part of its heads or tokens while others are swapped."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from torch import Tensor

from megatron.context_parallel.plan.ir import Plan

from .comm.transport import Program, Work
from .head_swap import HeadGroup, StartedSwap

Results = list[Tensor]
Compute = Callable[..., Program[Program[Results]]]  # (round, meanwhile, *swapped tensors) to what waits for results


def in_rounds(
    group: HeadGroup, tensors: Sequence[Tensor], compute: Compute, kv_heads: int | None = None
) -> Program[Results]:
    """Swaps, computes and swaps back, round by round. Returns the results for this rank's chunk.

    Args:
        group: of this rank.
        tensors: each [s, b, heads, ...] of this rank's chunk.
        compute: gets a round, what else is to do after its first block, and the tensors [s * size, b, h, ...] of the
            group's chunk. It runs the steps, and returns a program that waits for the results, of the tensors' form.
        kv_heads: all results but the first are partial gradients of so many heads, of which parts share some. Their
            sums are returned in the dtype of the first. None: each result belongs to one part.
    """
    if len(group.members) == 1:
        return (yield from (yield from compute(0, (), *tensors)))
    plan, own_chunk = group.plan, _OwnChunk(group, kv_heads)
    # Lists, because buffers are freed when their swap leaves them.
    arriving = [group.to_heads([rows_of(plan, x, 0) for x in tensors], 0)]
    departing: list[StartedSwap] = []

    def enter(round_index: int) -> Program[None]:
        if round_index < plan.rounds:
            arriving.append(group.to_heads([rows_of(plan, x, round_index) for x in tensors], round_index))
        yield from ()  # a program like `leave`, but it waits for nothing

    def leave(round_index: int, ending: Program[Results]) -> Program[None]:
        results = yield from ending
        if departing:
            own_chunk.add((yield from departing.pop().wait()), round_index - 1)
        departing.append(group.to_chunks(results, own_chunk.of_round(results, round_index)))

    leaving: Iterable[Work] = ()
    for round_index in range(plan.rounds):
        swapped = yield from arriving.pop().wait()
        entering = enter(round_index + 1)
        if not plan.rounds_overlap:
            yield from entering
        meanwhile = chain(entering, leaving)
        ending = yield from compute(round_index, meanwhile, *swapped)
        del swapped
        yield from meanwhile  # if no step of this rank has a block
        leaving = leave(round_index, ending)
        if not plan.rounds_overlap:
            yield from leaving
    yield from leaving
    own_chunk.add((yield from departing.pop().wait()), plan.rounds - 1)
    return own_chunk.wholes


def rows_of(plan: Plan, x: Tensor, round_index: int) -> Tensor:
    """The rows of a round of tokens, out of [s, ...]; all of them without such rounds."""
    return x.chunk(plan.token_rounds)[plan.range_of(round_index)] if plan.token_rounds > 1 else x


class _OwnChunk:
    """Results of all rounds, for the chunk of a rank.

    Attributes:
        wholes: each [s, b, heads, ...].
        heads_of_rank: with partial gradients, the key/value heads that a rank of the group computes, or shares.
    """

    def __init__(self, group: HeadGroup, kv_heads: int | None) -> None:
        self.group, self.kv_heads = group, kv_heads
        self.heads_of_rank = max(1, (kv_heads or 0) // len(group.members))
        self.wholes: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}  # of the heads at work, in the dtype of partial gradients

    def of_round(self, results: Results, round_index: int) -> list[Tensor]:
        """Where to receive the results of a round, each [s, b, size, h, ...]: in `wholes`; partial gradients apart."""
        size, plan = len(self.group.members), self.group.plan
        into = []
        for i, x in enumerate(results):
            rows, b, heads = len(x) // size, *x.shape[1:3]
            if i > 0 and self.kv_heads:
                into.append(x.new_empty(rows, b, size, heads, *x.shape[3:]))
                continue
            if round_index == 0:
                whole = plan.token_rounds * rows, b, size * plan.head_rounds * heads, *x.shape[3:]
                self.wholes.append(x.new_empty(whole))
            into.append(self.group.by_member(rows_of(plan, self.wholes[i], round_index), round_index))
        return into

    def add(self, received: list[Tensor], round_index: int) -> None:
        """Adds partial gradients of a round to their heads. Each of the ranks that share a head has sent one."""
        if self.kv_heads is None:
            return
        target = self._target(round_index)
        is_first = round_index == 0 or self._target(round_index - 1) != target
        is_last = round_index == self.group.plan.rounds - 1 or self._target(round_index + 1) != target
        for i, partials in enumerate(received[1:], 1):
            sums = self._over_sharers(partials, self.kv_heads)
            into = self._rows(i, sums, target)
            kept_apart = into.dtype != sums.dtype  # the sums of several rounds, which are rounded once
            if not is_first:
                sums += self._sums.pop(i) if kept_apart else into
            if kept_apart and not is_last:
                self._sums[i] = sums
            else:
                into.copy_(sums)

    def _over_sharers(self, partials: Tensor, kv_heads: int) -> Tensor:
        """[s, b, size, h, ...] of the ranks of the group to [s, b, heads, ...], summed over ranks that share a head."""
        by_head = partials.flatten(2, 3).unflatten(2, (kv_heads // self.heads_of_rank, -1))
        return by_head.sum(3) if by_head.shape[3] > 1 else by_head.squeeze(3)

    def _target(self, round_index: int) -> tuple[int, int]:
        """Where the sums of a round belong: a range of the tokens, and one of the heads of each rank."""
        plan = self.group.plan
        tokens = plan.range_of(round_index) if plan.token_rounds > 1 else 0
        return tokens, plan.head_round(round_index) * self.heads_of_rank // plan.head_rounds

    def _rows(self, i: int, sums: Tensor, target: tuple[int, int]) -> Tensor:
        """Where sums [s, b, heads / heads_of_rank, ...] belong, in the dtype of the queries."""
        ranges, (tokens, head) = self.group.plan.token_rounds, target
        if len(self.wholes) == i:
            shape = ranges * len(sums), sums.shape[1], self.heads_of_rank * sums.shape[2], *sums.shape[3:]
            self.wholes.append(sums.new_empty(shape, dtype=self.wholes[0].dtype))
        return self.wholes[i].chunk(ranges)[tokens].unflatten(2, (-1, self.heads_of_rank))[:, :, :, head]
