"""Head parallelism around any plan (LoongTrain section 4.1, Algorithm 1): SeqAlltoAll, and replicated key/value heads.

The ranks of a head group swap (own chunk, all heads) for (the group's chunks, a part of the heads), run the plan's
steps with the ranks that have the same part of the heads, and swap back.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from megatron.context_parallel.plan.ir import Plan, SwapHeads
from megatron.context_parallel.tokens.layout import rows_in

from .comm.transport import MessageList, Program, Subgroup, Transport
from .profiler_ranges import marks


class RankPlace(NamedTuple):
    """The coordinates of a rank in the grid of a plan.

    Attributes:
        part: its part of the heads; context_rank: its rank in the steps.
        members: its head group; same_heads: the ranks that run the steps together.
        chunks: the chunks of the members.
    """

    part: int
    context_rank: int
    members: tuple[int, ...]
    same_heads: tuple[int, ...]
    chunks: list[int]


_places: WeakKeyDictionary[Plan, dict[int, RankPlace]] = WeakKeyDictionary()  # by rank


def place_of(plan: Plan, rank: int) -> RankPlace:
    """The coordinates of `rank` (of all ranks), computed once for each plan and rank."""
    by_rank = _places.setdefault(plan, {})
    if rank not in by_rank:
        at, members = plan.grid.coordinates(rank), plan.grid.along(rank, "heads")
        chunks = [plan.chunk_of(member) for member in members]
        by_rank[rank] = RankPlace(at["heads"], at["context"], members, plan.grid.along(rank, "context"), chunks)
    return by_rank[rank]


class _Pieces(NamedTuple):
    """The tensors of a head swap.

    Attributes:
        wholes: the tensors that it fills.
        sent: the tensors to send to each member; landing: the parts of `wholes` that receive from each member.
    """

    wholes: list[Tensor]
    sent: list[list[Tensor]]
    landing: list[list[Tensor]]

    @classmethod
    def among(cls, size: int) -> "_Pieces":
        return cls([], [[] for _ in range(size)], [[] for _ in range(size)])


class HeadGroup:
    """The head group of one rank, its part of the heads, and the ranks with the same part."""

    def __init__(self, plan: Plan, rank: int, transport: Transport) -> None:
        self.plan, self.transport = plan, transport
        self.part, self.context_rank, self.members, same_heads, self.chunks = place_of(plan, rank)
        self.context = Subgroup(transport, same_heads) if plan.heads > 1 else transport

    def slice_of(self, heads: int) -> slice:
        """The heads, out of `heads`, that this rank computes."""
        return _heads(self.part, len(self.members), heads)

    def _rows(self, length: int) -> list[tuple[tuple[slice, slice], ...]]:
        """The rows of each member's tokens: (rows of its own chunk, rows of the group's chunk)."""
        plan = self.plan
        return [rows_in(plan.layout, c, self.context_rank, plan.n, plan.heads, length) for c in self.chunks]

    def to_heads(self, *tensors: Tensor) -> Program[list[Tensor]]:
        """Swaps [s, b, h, ...] of this rank's chunk for [s * size, b, h / size, ...] of the group's chunk.

        With fewer heads than ranks, each rank gets the head that its queries read.
        """
        size = len(self.members)
        if size == 1:
            return list(tensors)
        pieces = _Pieces.among(size)
        for x in tensors:
            rows = self._rows(len(x) * self.plan.size)
            ours = self.slice_of(x.shape[2])
            whole = x.new_empty(len(x) * size, x.shape[1], ours.stop - ours.start, *x.shape[3:])
            for p in range(size):
                theirs = _heads(p, size, x.shape[2])
                pieces.sent[p] += [x[own, :, theirs] for own, _ in rows[self.part]]
                pieces.landing[p] += [whole[where] for _, where in rows[p]]
            pieces.wholes.append(whole)
        return (yield from self._swap(self.plan.before[0], pieces))

    def to_chunks(self, *tensors: Tensor) -> Program[list[Tensor]]:
        """The inverse of `to_heads`. Replicated heads return as all their replicas, side by side."""
        size = len(self.members)
        if size == 1:
            return list(tensors)
        pieces = _Pieces.among(size)
        for x in tensors:
            rows = self._rows(len(x) * self.plan.n)
            whole = x.new_empty(len(x) // size, x.shape[1], x.shape[2] * size, *x.shape[3:])
            for p, theirs in enumerate(whole.chunk(size, 2)):  # their heads of our chunk
                pieces.sent[p] += [x[where] for _, where in rows[p]]
                pieces.landing[p] += [theirs[own] for own, _ in rows[self.part]]
            pieces.wholes.append(whole)
        return (yield from self._swap(self.plan.after[0], pieces))

    def _swap(self, op: SwapHeads, pieces: _Pieces) -> Program[list[Tensor]]:
        """Completes the tensors."""
        wholes, sent, landing = pieces
        for there, x in zip(landing[self.part], sent[self.part], strict=True):
            there.copy_(x)
        sends, receives = list[MessageList](), list[MessageList]()
        for k in range(1, len(self.members)):
            after, before = (self.part + k) % len(self.members), (self.part - k) % len(self.members)
            sends.append([(self.members[after], x) for x in sent[after]])
            receives.append([(self.members[before], x) for x in landing[before]])
        yield marks.batch("heads", (op,), self.transport.trade("heads", sends, receives))
        return wholes


def _heads(part: int, size: int, heads: int) -> slice:
    first = part * heads // size
    return slice(first, max(first + 1, (part + 1) * heads // size))
