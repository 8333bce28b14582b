"""Chunks with any number of slices, and sets of their rows."""

from collections.abc import Mapping
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from .layout import Chunks

RowSet = np.ndarray  # int64 [ranges, 2]: first row and end (exclusive) of each range, ascending and apart
_NONE = np.empty((0, 3), np.int64)  # slices


class Slices:
    """Chunks that are lists of slices, used like `layout.Chunks`, also if they have thousands of slices.

    Args:
        of_chunks: for each chunk int64 [slices, 3]: first position, stride and number of positions of each slice. The
            positions of a chunk ascend from slice to slice.

    Attributes:
        rows: the number of tokens of each chunk.
    """

    def __init__(self, of_chunks: list[np.ndarray]) -> None:
        self.of_chunks = of_chunks
        edges = [*accumulate(map(len, of_chunks), initial=0)]  # of the chunks, among the slices of all
        before = np.append(0, np.concatenate([_NONE, *of_chunks])[:, 2].cumsum())  # rows of all slices before each
        of_chunk = before[edges]
        self.rows = tuple(np.diff(of_chunk).tolist())
        in_chunk = before[:-1] - np.repeat(of_chunk[:-1], np.diff(edges))
        self._first_rows = [in_chunk[first:end] for first, end in pairwise(edges)]

    @classmethod
    def of(cls, chunks: "Chunks | Slices") -> "Slices":
        """The same chunks."""
        if isinstance(chunks, Slices):
            return chunks
        of_chunks = []
        for progressions in chunks.progressions:
            of_chunks.append(np.array(progressions, np.int64))  # start, stride and length of each
        return cls(of_chunks)

    @property
    def n(self) -> int:
        """The number of chunks."""
        return len(self.of_chunks)

    def positions(self, chunk: int) -> Tensor:
        """The positions of `chunk`, int64 [rows], ascending."""
        start, stride, count = self.of_chunks[chunk].T
        in_slice = np.arange(self.rows[chunk]) - np.repeat(self._first_rows[chunk], count)
        return torch.from_numpy(np.repeat(start, count) + in_slice * np.repeat(stride, count))

    def before(self, chunks: tuple[int, ...], bounds: np.ndarray) -> np.ndarray:
        """The number of rows of `chunks` with a position below each of `bounds` (int64, ascending): int32."""
        ascending = bounds.ravel()
        assert (ascending[1:] >= ascending[:-1]).all()
        total = np.zeros(len(ascending), np.int64)
        for chunk in chunks:
            start, stride, count = self.of_chunks[chunk].T
            if not len(start):
                continue
            begin = np.searchsorted(ascending, start, side="right")  # the first bound after the start of each slice
            times = np.diff(begin, append=len(ascending))
            rows = ascending[begin[0] :] - np.repeat(start, times)
            if (stride > 1).any():  # divisions take long
                rows = -(-rows // np.repeat(stride, times))
            total[begin[0] :] += np.minimum(rows, np.repeat(count, times)) + np.repeat(self._first_rows[chunk], times)
        return total.astype(np.int32).reshape(bounds.shape)

    def range_of(self, chunk: int, low: np.ndarray, high: np.ndarray) -> RowSet:
        """The rows of `chunk` with a position in any of the spans low .. high - 1; int64 [spans] each."""
        low, high = joined(np.stack((low, high), 1)).T
        return joined(np.stack((self.before((chunk,), low), self.before((chunk,), high)), 1).astype(np.int64))

    def narrowed(self, sets: Mapping[int, RowSet]) -> "Slices":
        """The same chunks with only these rows; without any of a chunk that is not among them."""
        return Slices([self._narrowed(c, sets[c]) if c in sets else _NONE for c in range(self.n)])

    def _narrowed(self, chunk: int, rows: RowSet) -> np.ndarray:
        """The slices of a chunk, cut to these rows."""
        if np.array_equal(rows, [(0, self.rows[chunk])]):
            return self.of_chunks[chunk]
        if not len(rows):
            return self.of_chunks[chunk][:0]
        start, stride, count = self.of_chunks[chunk].T
        first_rows = self._first_rows[chunk]
        cuts = np.unique(np.concatenate((rows[:, 0], first_rows)))  # where ranges or slices begin
        in_range = np.searchsorted(rows[:, 0], cuts, side="right") - 1
        cuts = cuts[(in_range >= 0) & (cuts < rows[in_range, 1])]
        in_slice = np.searchsorted(first_rows, cuts, side="right") - 1
        in_range = np.searchsorted(rows[:, 0], cuts, side="right") - 1
        ends = np.minimum(rows[in_range, 1], first_rows[in_slice] + count[in_slice])
        positions = start[in_slice] + (cuts - first_rows[in_slice]) * stride[in_slice]
        return np.stack((positions, stride[in_slice], ends - cuts), 1)


def joined(ranges: np.ndarray) -> RowSet:
    """The union of ranges [ranges, 2], in any order; empty ones are left out."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    furthest = np.maximum.accumulate(ranges[:, 1])
    begins = np.append(True, ranges[1:, 0] > furthest[:-1])
    ends = np.append(begins[1:], True)
    return np.stack((ranges[begins, 0], furthest[ends]), 1)


def size_of(rows: RowSet) -> int:
    """The number of rows of a set."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def members(rows: RowSet) -> np.ndarray:
    """The rows of a set, int64, ascending."""
    count = rows[:, 1] - rows[:, 0]
    return np.repeat(rows[:, 0], count) + numbered(count)


def numbered(counts: np.ndarray) -> np.ndarray:
    """As many numbers 0, 1, ... as each of `counts` says: (3, 1, 2) becomes (0, 1, 2, 0, 0, 1)."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(before, counts)
