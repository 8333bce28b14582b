"""Decides which rank holds which tokens of a batch of documents, so that the slowest rank is as fast as possible.

The ranks are filled one after the other. Each gets its part of the rows and, within a small tolerance, its part of the
work: long documents bring the work, and the shortest ones fill up the rows. A document that is too long for the rest of
a rank goes on on the next one. So few documents are cut, over as few ranks as their work needs, and these are
neighbours. Where links take longer than the work, documents may also stay whole for some more work of a rank.

A rank's part of a cut document is a pair of slices, as far from its beginning as from its end. So its work is
proportional to its rows. One document over all ranks is the zigzag layout.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron.context_parallel.errors import UsageError

from .chunk_loads import ChunkLoads, chunk_loads, reach
from .documents import Documents
from .mask import Mask
from .placement import Placement

_TOLERANCE = 0.01  # of the work of a rank: no document is cut for less
_FEW = 64  # documents that are looked at before all others
_LIMITS = (1.0, 1.25)  # of the mean work: how much a rank may get before a document is cut


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
    documents: Documents,
    n: int,
    costs: Costs,
    causal: bool = True,
    windows: Sequence[tuple[int, int]] = ((-1, -1),),
) -> Placement:
    """A placement of the samples of `documents`, end to end, over n context ranks: equally many rows on each.

    Equal arguments give equal placements. `causal` is that of the masks, and `windows` are those of the layers: one
    for each, or one for all.

    Raises:
        UsageError: n does not divide the tokens, or a mask is invalid.
    """
    together = documents.end_to_end()
    layers = Counter(Mask(causal, window, together) for window in windows)
    tokens = together.shape[1]
    if n < 1 or tokens % n:
        fewer = max(ranks for ranks in range(1, max(n, 1) + 1) if tokens % ranks == 0)
        raise UsageError(f"placement of {tokens} tokens over {n} ranks: equally many on each; give {fewer} ranks")
    pool = _Pool(together, layers)
    found: list[tuple[float, Placement]] = []
    for limit in _LIMITS:
        placement = Placement(_slices(pool, _deal(pool, n, limit), n))
        links, work, seconds = np.zeros(n), np.zeros(n), np.zeros(n)
        for mask, count in layers.items():
            loads = chunk_loads(mask, placement)
            links += count * costs.of_links(loads)
            work += count * costs.pair * loads.pairs
            seconds += count * costs.seconds(loads)
        found.append((seconds.max(), placement))
        if links.max() <= work.max():
            break  # fewer cuts would not make it faster
    return min(found, key=lambda one: one[0])[1]


class _Pool:
    """The documents that are not placed yet, the least dense first: those with the fewest visible pairs for a row.

    Tokens of no document are the first entries.

    Attributes:
        starts: first token, int64 [documents].
        lengths: tokens, int64 [documents].
        density: visible pairs for a row, of all layers, float64 [documents].
        paired: whether a cut document is cut into pairs of slices. Otherwise the windows are so short that consecutive
            slices have equal work, and need fewer keys.
    """

    def __init__(self, documents: Documents, layers: Counter[Mask]) -> None:
        (edges,), (inside,) = documents.edges, documents.inside
        lengths = np.diff(edges)
        pairs = np.zeros(len(lengths))
        furthest = 0
        for mask, count in layers.items():
            before, after = reach(mask, int(edges[-1]))
            pairs += count * (lengths + _ramp(lengths, before) + _ramp(lengths, after))
            furthest = max(furthest, before)
        density = np.where(inside, pairs / lengths, 0)
        order = np.argsort(density, kind="stable")
        self.starts, self.lengths, self.density = edges[:-1][order], lengths[order], density[order]
        self.paired = 4 * furthest > self.lengths


def _ramp(lengths: np.ndarray, reach: int) -> np.ndarray:
    """The keys before them that all tokens of each document see, or those after them."""
    most = np.minimum(lengths, reach)
    return most * (most - 1) // 2 + (lengths - most) * most


def _deal(pool: _Pool, n: int, limit: float) -> np.ndarray:
    """Deals all rows to n ranks: equally many to each, and equal work.

    A rank gets up to `limit` times the mean work if this saves a cut.

    Returns:
        for each share of a document: the document, the rank and the number of rows. Ranks ascend. int64 [3, shares].
    """
    left = pool.lengths.copy()
    most = limit * float((left * pool.density).sum()) / n
    documents, counts, rows = list[np.ndarray](), list[int](), list[np.ndarray]()
    low, high = 0, len(left)  # all documents of which rows are left
    cut = list[int]()  # documents that a rank could not take whole
    for rank in range(n):
        (some,) = (left[low:high] > 0).nonzero()
        low, high = low + int(some[0]), low + int(some[-1]) + 1
        before = left[low:high].copy()
        filling = _Filling(pool.density[low:high], left[low:high], n - rank, most)
        met = filling.fill([document - low for document in cut if left[document]])
        cut = sorted({low + document for document in met})
        taken = before - left[low:high]
        (some,) = (taken > 0).nonzero()
        documents.append(low + some)
        counts.append(len(some))
        rows.append(taken[some])
    return np.stack((np.concatenate(documents), np.repeat(np.arange(n), counts), np.concatenate(rows)))


class _Filling:
    """A rank while it is filled. Whatever it takes, it can still reach its rows and its part of the work.

    Args:
        density: of the documents, ascending.
        left: their rows that are left, of the first and the last at least one; what the rank takes is subtracted.
        ranks: how many ranks share them.
        most: work that the rank may get if this saves a cut.

    Attributes:
        room: rows that the rank lacks.
        work: visible pairs of what it has.
        target: those that it should get.
        densest: no denser document has rows left.
    """

    def __init__(self, density: np.ndarray, left: np.ndarray, ranks: int, most: float) -> None:
        self.density, self.left = density, left
        self._rows = np.zeros(len(left) + 1, np.int64)  # of all documents before each, and of all
        self._work = np.zeros(len(left) + 1)
        self._ends = self._rows[1:-1]
        self._count(0)
        self.densest = len(left) - 1
        self.room = int(self._rows[-1]) // ranks
        self.work = 0.0
        self.target = float(self._work[-1]) / ranks
        self.most = max(most, (1 + _TOLERANCE) * self.target)

    def fill(self, cut: list[int]) -> list[int]:
        """Takes all rows of the rank, first of the documents `cut` before. Returns these and those that it cuts."""
        if not cut and not self._may_take_whole(self.densest):
            cut = [self.densest]
        for document in cut:
            self._take_most(document)
        self._take_whole()
        if self._lacks_work():
            cut = [*cut, self._shortest_that_closes()]
            self._take_most(cut[-1])
        self._fill_up()
        return cut

    def _may_take_whole(self, document: int) -> bool:
        """Whether the rank can have what is left of a document."""
        rows = self.left[document]
        return bool(self._may_take(rows, rows * self.density[document], self.most))

    def _take_most(self, document: int) -> None:
        """Takes what is left of a document, or as many rows as the rank's work allows."""
        rows, density = int(self.left[document]), self.density[document]
        if not self._may_take_whole(document):
            fewer = range(1, min(rows, self.room) + 1)
            rows = bisect_left(fewer, True, key=lambda some: not self._may_take(some, some * density, self.target))
        self._take(slice(document, document + 1), np.array([rows]))

    def _take_whole(self) -> None:
        """Takes whole documents that bring work that the rank lacks, always the densest that it can take."""
        while self._lacks_work():
            last = self._densest_that_fits()
            if last < 0:
                return
            rows, end = self.left[last], last + 1
            instead = self._least(self.room) - self._least(self.room - rows)  # work of the least dense rows
            if rows * self.density[last] <= instead:
                return
            # With it the less dense ones before it, as many as fit together.
            begin = int(self._rows.searchsorted(self._rows[end] - self.room))  # their rows fit
            rows_from, work_from = self._rows[end] - self._rows[begin:end], self._work[end] - self._work[begin:end]
            fit = self._may_take(rows_from, work_from, self.target)[::-1]  # 1, 2, ... documents
            count = max(1, int(np.append(fit, False).argmin()))
            run = slice(end - count, end)
            self._take(run, self.left[run].copy())
            if last == self.densest:
                self.densest = max(0, run.start - 1)

    def _densest_that_fits(self) -> int:
        """The densest document of which the rank can have all that is left; -1 if there is none."""
        end = self.densest + 1
        if self.left[self.densest] and self._may_take_whole(self.densest):
            return self.densest
        for first in (max(0, end - _FEW), 0):  # seldom another one
            rows = self.left[first:end]
            can = self._may_take(rows, rows * self.density[first:end], self.most) & (rows > 0)
            if can.any():
                return first + int(np.flatnonzero(can)[-1])
        return -1

    def _shortest_that_closes(self) -> int:
        """The shortest document of which a part brings the work that the rank lacks."""
        rows = np.minimum(self.left, self.room)
        brought = rows * self.density + self._least(self.room - rows)
        return int(np.argmax(brought >= min(brought.max(), self.target - self.work)))

    def _fill_up(self) -> None:
        """Takes the least dense documents, the last of them in part."""
        whole = int(self._ends.searchsorted(self.room, side="right"))
        self.left[:whole] = 0
        self.left[whole] -= self.room - self._rows[whole]

    def _take(self, documents: slice, rows: np.ndarray) -> None:
        self.left[documents] -= rows
        self.room -= int(rows.sum())
        self.work += float((rows * self.density[documents]).sum())
        self._count(documents.start)

    def _count(self, first: int) -> None:
        """Adds up the rows and the work before each document, from the document `first` on."""
        rows, work = self._rows[first:], self._work[first:]
        rows[1:] = self.left[first:]
        np.multiply(self.left[first:], self.density[first:], out=work[1:])
        rows.cumsum(out=rows)
        work.cumsum(out=work)

    def _least(self, rows: Any) -> Any:
        """The work of so many rows of the least dense documents."""
        last = self._ends.searchsorted(rows, side="right")
        return self._work[last] + (rows - self._rows[last]) * self.density[last]

    def _greatest(self, rows: Any) -> Any:
        """The work of so many rows of the densest documents."""
        return self._work[-1] - self._least(self._rows[-1] - rows)

    def _lacks_work(self) -> bool:
        """Whether the rank would have too little work if the least dense documents filled it up."""
        return bool(self.work + self._least(self.room) < (1 - _TOLERANCE) * self.target)

    def _may_take(self, rows: Any, work: Any, most: float) -> Any:
        """Whether the rank, with so many rows and their work, can still reach its target and does not exceed `most`."""
        room, work = self.room - rows, self.work + work
        enough = work + self._greatest(room) >= (1 - _TOLERANCE) * self.target
        return (room >= 0) & (work + self._least(room) <= most) & enough


def _slices(pool: _Pool, shares: np.ndarray, n: int) -> list[np.ndarray]:
    """The slices that each rank has: int64 [slices, 2] each, first tokens and ends.

    Of a document that is cut it has one from each side of what is left.
    """
    document, rank, rows = shares[:, np.argsort(shares[0], kind="stable")]
    first = np.diff(document, prepend=-1) > 0  # shares of documents
    last = np.append(first[1:], True)
    front = np.where(pool.paired[document] & ~last, rows // 2, rows)
    begin = pool.starts[document] + _before(front, first)
    end = pool.starts[document] + pool.lengths[document] - _before(rows - front, first)
    slices = np.stack((np.append(begin, end - rows + front), np.append(begin + front, end), np.append(rank, rank)), 1)
    slices = slices[slices[:, 0] < slices[:, 1]]
    slices = slices[np.lexsort((slices[:, 0], slices[:, 2]))]
    edges = np.searchsorted(slices[:, 2], np.arange(n + 1)).tolist()
    return [slices[begin:end, :2] for begin, end in pairwise(edges)]


def _before(numbers: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The sum of the numbers before each one in its group. Groups begin where `first` is true."""
    before = numbers.cumsum() - numbers
    return before - before[first][first.cumsum() - 1]
