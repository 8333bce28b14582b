"""Decides which rank holds which tokens of a batch of documents, so that the slowest rank is as fast as possible.

The ranks are filled one after the other. Each gets its part of the rows and its part of the work exactly: long
documents bring the work, and the shortest ones fill up the rows. A document that is too long for what is left of a rank
goes on on the next one. So few documents are cut, over few and neighbouring ranks, and a rank has the middle of at
most one of them.

A rank's part of a cut document is a pair of slices, as far from its beginning as from its end. So its work is
proportional to its rows. One document over all ranks is the zigzag layout.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.context_parallel.errors import UsageError

from .chunk_loads import ChunkLoads, chunk_loads, reach
from .mask import Documents, Mask
from .placement import Placement

_TOLERANCE = 0.03  # of the work of a rank: no document is cut for less
_LIMITS = (1.0, 1.25, 1.5, 2.0, 3.0)  # of the mean work: how much a rank gets before a document is cut


@dataclass(frozen=True)
class Costs:
    """Seconds of both passes of the attention of one layer.

    Attributes:
        pair: of a visible pair of rows.
        row_inside: of a row of keys and values from a rank of the same node. Its gradients take as long on their way
            back: they are sent once, in float32, while keys and values are sent in both passes.
        row_between: the same from a rank of another node.
        ranks_per_node: neighbouring context ranks on a node; None: all.
    """

    pair: float
    row_inside: float = 0.0
    row_between: float = 0.0
    ranks_per_node: int | None = None

    def of_links(self, loads: ChunkLoads) -> np.ndarray:
        """Seconds in which each rank receives keys and values, and gradients of its own: float64 [n]."""
        inside = loads.inside(self.ranks_per_node)
        rows = self.row_inside * inside + self.row_between * (loads.rows - inside)
        return rows.sum(1) + rows.sum(0)

    def seconds(self, loads: ChunkLoads) -> np.ndarray:
        """Seconds of each rank, float64 [n]: it receives while it computes."""
        return np.maximum(self.pair * loads.pairs, self.of_links(loads))


def place(
    documents: Documents, n: int, costs: Costs, causal: bool = True, window: tuple[int, int] = (-1, -1)
) -> Placement:
    """A placement of the samples of `documents`, end to end, over n context ranks: equally many rows on each.

    Equal arguments give equal placements. `causal` and `window` are those of the mask.

    Raises:
        UsageError: n does not divide the tokens, or the mask is invalid.
    """
    together = documents.end_to_end()
    mask = Mask(causal, window, together)
    tokens = together.shape[1]
    if n < 1 or tokens % n:
        fewer = max(ranks for ranks in range(1, max(n, 1) + 1) if tokens % ranks == 0)
        raise UsageError(f"placement of {tokens} tokens over {n} ranks: equally many on each; give {fewer} ranks")
    pool = _Pool(mask)
    best, fastest = None, np.inf
    for limit in _LIMITS:
        placement = Placement(_slices(pool, _deal(pool, n, limit), n))
        loads = chunk_loads(mask, placement)
        seconds = costs.seconds(loads).max()
        if seconds < fastest:
            best, fastest = placement, seconds
        if costs.of_links(loads).max() <= costs.pair * loads.pairs.max():
            break  # fewer cuts would not make it faster
    assert best is not None
    return best


class _Pool:
    """The documents that are not placed yet, the least dense first: those with the fewest visible pairs for a row.

    Tokens of no document are the first entries.

    Attributes:
        starts: first token, int64 [documents].
        lengths: tokens, int64 [documents].
        density: visible pairs for a row, float64 [documents].
        paired: whether a cut document is cut into pairs of slices. Otherwise a window is so short that consecutive
            slices have equal work, and need fewer keys.
    """

    def __init__(self, mask: Mask) -> None:
        assert isinstance(mask.documents, Documents)
        (edges,), (inside,) = mask.documents.edges, mask.documents.inside
        lengths = np.diff(edges)
        before, after = reach(mask, int(edges[-1]))
        density = np.where(inside, (lengths + _ramp(lengths, before) + _ramp(lengths, after)) / lengths, 0)
        order = np.argsort(density, kind="stable")
        self.starts, self.lengths, self.density = edges[:-1][order], lengths[order], density[order]
        self.paired = 4 * before > self.lengths


def _ramp(lengths: np.ndarray, reach: int) -> np.ndarray:
    """The keys before them that all tokens of each document see, or those after them."""
    most = np.minimum(lengths, reach)
    return most * (most - 1) // 2 + (lengths - most) * most


Share = tuple[int, int, int]  # a document of the pool, a rank, and how many of its rows the rank gets


def _deal(pool: _Pool, n: int, limit: float) -> list[Share]:
    """Deals all rows to n ranks: equally many to each, and equal work.

    A rank gets up to `limit` times the mean work if this saves a cut.
    """
    left = pool.lengths.copy()
    most = limit * float(left @ pool.density) / n
    shares: list[Share] = []
    cut = None
    for rank in range(n):
        filling = _Filling(pool.density, left, n - rank, most)
        cut = filling.begin(cut)
        if cut is None:
            filling.take_whole()
            cut = filling.close_gap()
        filling.fill_up()
        if cut is not None and not left[cut]:
            cut = None
        shares += [(document, rank, rows) for document, rows in filling.taken]
    return shares


class _Filling:
    """A rank while it is filled. What it takes leaves it able to reach its rows and its part of the work.

    Args:
        density: of all documents, ascending.
        left: their rows that no rank has yet; they become fewer.
        ranks: how many share them.
        most: work that the rank may get if this saves a cut.

    Attributes:
        room: rows that it lacks.
        work: visible pairs of what it has.
        target: those that it should get.
        taken: documents and rows.
    """

    def __init__(self, density: np.ndarray, left: np.ndarray, ranks: int, most: float) -> None:
        self.density, self.left = density, left
        self.room = int(left.sum()) // ranks
        self.work = 0.0
        self.target = float(left @ density) / ranks
        self.most = max(most, (1 + _TOLERANCE) * self.target)
        self.taken: list[tuple[int, int]] = []
        self._count()

    def begin(self, cut: int | None) -> int | None:
        """Takes what it can of the document that is cut, or else of the densest if no rank can have it as a whole.

        Returns:
            the document if the rank is complete without the rest of it.
        """
        first = int(np.flatnonzero(self.left)[-1]) if cut is None else cut
        if not self._may_take(self.left[first], self.left[first] * self.density[first], self.most):
            self._take_part(first)
            return first
        if cut is not None:
            self._take(np.array([cut]), self.left[[cut]])
        return None

    def take_whole(self) -> None:
        """Takes whole documents that bring work that the rank lacks, always the densest that it can take."""
        while self._gap() > _TOLERANCE * self.target:
            documents = np.flatnonzero(self.left)[::-1]
            rows = self.left[documents]
            work = rows * self.density[documents]
            can = np.flatnonzero(self._may_take(rows, work, self.most))
            if not len(can) or work[can[0]] <= self._least(self.room) - self._least(self.room - rows[can[0]]):
                return
            following = slice(can[0], None)
            together = self._may_take(rows[following].cumsum(), work[following].cumsum(), self.target)
            count = max(1, int(together.argmin()))  # of the documents after the densest, as many as it can take
            run = documents[following][:count]
            self._take(run, self.left[run])

    def close_gap(self) -> int | None:
        """If the rank lacks work: takes a part of the shortest document that brings it. Returns this document."""
        if self._gap() <= _TOLERANCE * self.target:
            return None
        rows = np.minimum(self.left, self.room)
        enough = self.work + rows * self.density + self._least(self.room - rows) > self.target
        if not enough.any():
            return None
        document = int(enough.argmax())
        self._take_part(document)
        return document

    def fill_up(self) -> None:
        """Takes the least dense documents, the last of them in part."""
        documents = np.flatnonzero(self.left)
        before = self._rows[documents]
        filling = documents[before < self.room]
        self._take(filling, np.minimum(self.left[filling], self.room - self._rows[filling]))

    def _take_part(self, document: int) -> None:
        """Takes as many rows of a document as the rank's work allows."""
        density = self.density[document]
        most = int(min(self.left[document], self.room))
        rows = bisect_left(
            range(1, most + 1), True, key=lambda rows: not self._may_take(rows, rows * density, self.target)
        )
        self._take(np.array([document]), np.array([rows]))

    def _take(self, documents: np.ndarray, rows: np.ndarray) -> None:
        self.taken += zip(documents.tolist(), rows.tolist(), strict=True)
        self.left[documents] -= rows
        self.room -= int(rows.sum())
        self.work += float(rows @ self.density[documents])
        self._count()

    def _count(self) -> None:
        """The rows and the work of all documents before each, and of all."""
        self._rows = np.append(0, self.left.cumsum())
        self._work = np.append(0, (self.left * self.density).cumsum())

    def _least(self, rows: Any) -> Any:
        """The work of so many rows of the least dense documents."""
        return np.interp(rows, self._rows, self._work)

    def _greatest(self, rows: Any) -> Any:
        """The work of so many rows of the densest documents."""
        return self._work[-1] - self._least(self._rows[-1] - rows)

    def _gap(self) -> float:
        """The work that is missing if the least dense documents fill the rank up."""
        return self.target - self.work - self._least(self.room)

    def _may_take(self, rows: Any, work: Any, most: float) -> Any:
        """Whether the rank can take so many rows with so much work, and still reach its target but not exceed `most`."""
        room = self.room - rows
        least = self.work + work + self._least(room) <= most
        enough = self.work + work + self._greatest(room) >= (1 - _TOLERANCE) * self.target
        return (room >= 0) & least & enough


def _slices(pool: _Pool, shares: Sequence[Share], n: int) -> list[list[tuple[int, int]]]:
    """The slices of the batch that each rank has."""
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    begun = pool.starts.tolist()  # the first token of each document that no rank has yet
    ended = (pool.starts + pool.lengths).tolist()  # the end of those
    paired = pool.paired.tolist()
    for document, rank, rows in shares:
        begin, end = begun[document], ended[document]
        half = rows // 2 if paired[document] and rows < end - begin else rows
        begun[document] += half
        ended[document] -= rows - half
        chunks[rank] += [(begin, begun[document]), (ended[document], end)]
    return [sorted(part for part in chunk if part[0] < part[1]) for chunk in chunks]
