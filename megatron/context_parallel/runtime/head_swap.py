"""Head parallelism around any plan (LoongTrain section 4.1, Algorithm 1): SeqAlltoAll, and replicated key/value heads.

The ranks of a head group swap (own chunk, all heads) for (the group's chunks, a part of the heads), run the plan's
steps with the ranks that have the same part of the heads, and swap back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron.context_parallel.patches.torch_foreach import copy_each
from megatron.context_parallel.plan.ir import SWAPS, Plan
from megatron.context_parallel.tokens.layout import rows_in

from .comm.transport import Program, Subgroup, Transport, Work
from .profiler_ranges import marks

Pair = tuple[Tensor, Tensor]  # of one shape
ALIGNED = 16  # bytes; tensors in a message start at a multiple, so that they can be viewed in their dtype


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


class StartedSwap(NamedTuple):
    """A head swap in flight, and what to do with what it brings."""

    work: Work
    land: Callable[[], list[Tensor]]

    def wait(self) -> Program[list[Tensor]]:
        """The swapped tensors."""
        yield self.work
        return self.land()


class HeadGroup:
    """The head group of one rank, its part of the heads, and the ranks with the same part."""

    def __init__(self, plan: Plan, rank: int, transport: Transport) -> None:
        self.plan, self.transport = plan, transport
        self.part, self.context_rank, self.members, same_heads, self.chunks = place_of(plan, rank)
        self.context = Subgroup(transport, same_heads) if plan.head_parallel_size > 1 else transport

    def slice_of(self, heads: int, round_index: int) -> slice:
        """The heads, out of `heads`, that this rank computes in a round."""
        parts = self.plan.head_parts
        first = (self.part * self.plan.head_rounds + self.plan.head_round(round_index)) * heads // parts
        return slice(first, first + max(1, heads // parts))

    def by_member(self, x: Tensor, round_index: int) -> Tensor:
        """The heads that each rank of the group computes in a round: [s, b, heads, ...] to [s, b, size, h, ...].

        Where each rank has heads of its own it is a view. Otherwise each gets the head that its queries read.
        """
        size, rounds, number = len(self.members), self.plan.head_rounds, self.plan.head_round(round_index)
        heads = x.shape[2]
        if heads >= size * rounds:
            return x.unflatten(2, (size, rounds, -1))[:, :, :, number]
        per_rank = max(1, heads // size)
        read = x.unflatten(2, (-1, per_rank))[:, :, :, number * per_rank // rounds]  # [s, b, heads / per_rank, ...]
        copies = size // read.shape[2]
        return (read.repeat_interleave(copies, 2) if copies > 1 else read).unsqueeze(3)

    def to_heads(self, tensors: Sequence[Tensor], round_index: int) -> StartedSwap:
        """Swaps [s, b, heads, ...] of this rank's chunk for [s * size, b, h, ...] of the group's, for a round."""
        chunks = [self.by_member(x, round_index).movedim(2, 0) for x in tensors]
        sent, sent_parts = _messages(chunks)
        received, received_parts = _messages(chunks)
        _copy(self._by_heads(sent_parts, chunks))
        work = self._trade(sent, received)
        wholes: list[Tensor] = []

        def copy_own() -> None:
            wholes.extend([x.new_empty(x.shape[0] * x.shape[1], *x.shape[2:]) for x in chunks])
            _copy(self._own(wholes, chunks))

        def land() -> list[Tensor]:
            if not wholes:
                copy_own()
            _copy(self._by_rows(wholes, received_parts))
            return wholes

        if self.plan.rounds == 1:  # otherwise the copies would take memory while another round is computed
            copy_own()
        return StartedSwap(marks.batch(SWAPS, (self.plan.swaps_before[0],), work), land)

    def to_chunks(self, tensors: Sequence[Tensor], into: list[Tensor]) -> StartedSwap:
        """The inverse of `to_heads`: swaps [s * size, b, h, ...] for `into`, each [s, b, size, h, ...]."""
        chunks = [x.movedim(2, 0) for x in into]
        sent, sent_parts = _messages(chunks)
        received, received_parts = _messages(chunks)
        _copy(_reversed(self._by_rows(tensors, sent_parts)))
        work = self._trade(sent, received)
        _copy(_reversed(self._own(tensors, chunks)))

        def land() -> list[Tensor]:
            _copy(_reversed(self._by_heads(received_parts, chunks)))
            return into

        return StartedSwap(marks.batch(SWAPS, (self.plan.swaps_after[0],), work), land)

    def _trade(self, sent: Tensor, received: Tensor) -> Work:
        """Starts the messages of a swap; with several rounds so that they travel while this rank computes."""
        return self.transport.all_to_all(SWAPS, self.members, sent, received, at_once=self.plan.rounds > 1)

    def _rows(self, whole: Tensor) -> list[tuple[tuple[slice, slice], ...]]:
        """The rows of each member's tokens: (rows of its own chunk, rows of the group's chunk)."""
        plan, n = self.plan, self.plan.n
        sizes = n, plan.head_parallel_size, n * len(whole)
        return [rows_in(plan.layout, chunk, self.context_rank, *sizes) for chunk in self.chunks]

    def _by_heads(self, parts: Sequence[Tensor], chunks: Sequence[Tensor]) -> Iterator[Pair]:
        """Each other member's part of the messages, and its heads of this rank's chunk."""
        for part, chunk in zip(parts, chunks, strict=True):
            yield part[: self.part], chunk[: self.part]
            yield part[self.part :], chunk[self.part + 1 :]

    def _by_rows(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Iterator[Pair]:
        """Each other member's rows of the group's chunk, and its part of the messages."""
        for whole, part in zip(wholes, parts, strict=True):
            rows = self._rows(whole)
            del rows[self.part]
            for theirs, pieces in zip(part.unbind(), rows, strict=True):
                yield from [(whole[where], theirs[own]) for own, where in pieces]

    def _own(self, wholes: Sequence[Tensor], chunks: Sequence[Tensor]) -> Iterator[Pair]:
        """This rank's rows of the group's chunk, and its heads of its own chunk."""
        for whole, chunk in zip(wholes, chunks, strict=True):
            ours = chunk[self.part]
            yield from [(whole[where], ours[own]) for own, where in self._rows(whole)[self.part]]


def _messages(chunks: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A buffer [ranks - 1, bytes] for tensors [ranks, rows, b, heads, ...], without one rank, and its view as each."""
    widths = [chunk[0].numel() * chunk.element_size() for chunk in chunks]
    starts = [0, *accumulate([-(-width // ALIGNED) * ALIGNED for width in widths])]
    others = len(chunks[0]) - 1
    buffer = torch.empty(others, starts[-1], dtype=torch.uint8, device=chunks[0].device)
    views = []
    for chunk, start, width in zip(chunks, starts, widths, strict=False):
        view = buffer[:, start : start + width].view(chunk.dtype)
        views.append(view.view(others, *chunk.shape[1:]))
    return buffer, views


def _reversed(pairs: Iterable[Pair]) -> Iterator[Pair]:
    return ((source, into) for into, source in pairs)


def _copy(pairs: Iterable[Pair]) -> None:
    """Copies the second of each pair into the first."""
    into, sources = zip(*pairs, strict=True)
    copy_each(into, sources)
