"""Chunks with any number of slices, and sets of their rows."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .layout import Chunks

RowSet = np.ndarray  # int64 [ranges, 2]: first row and end (exclusive) of each range, ascending and apart


class Slices:
    """Chunks that are lists of slices, used like `layout.Chunks`, also if they have thousands of slices.

    Args:
        of_chunks: for each chunk int64 [slices, 3]: first position, stride and number of positions of each slice. The
            positions of a chunk ascend from slice to slice.

    Attributes:
        counts: the tokens of each chunk.
    """

    def __init__(self, of_chunks: list[np.ndarray]) -> None:
        self.of_chunks = of_chunks
        self.counts = tuple(int(of[:, 2].sum()) for of in of_chunks)
        self._first_rows = [np.cumsum(of[:, 2]) - of[:, 2] for of in of_chunks]

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

    def rows(self, chunk: int) -> int:
        """Tokens of `chunk`."""
        return self.counts[chunk]

    def positions(self, chunk: int) -> Tensor:
        """The positions of `chunk`, int64 [rows], ascending."""
        start, stride, count = self.of_chunks[chunk].T
        in_slice = np.arange(self.counts[chunk]) - np.repeat(self._first_rows[chunk], count)
        return torch.from_numpy(np.repeat(start, count) + in_slice * np.repeat(stride, count))

    def before(self, chunks: tuple[int, ...], bounds: np.ndarray) -> np.ndarray:
        """The number of rows of `chunks` with a position below each of `bounds` (int64): int32."""
        total = np.zeros(bounds.shape, np.int32)
        for chunk in chunks:
            start, stride, count = self.of_chunks[chunk].T
            if len(start):
                at = np.searchsorted(start, bounds) - 1  # the last slice that begins below the bound, or -1
                inside = np.minimum((bounds - start[at] + stride[at] - 1) // stride[at], count[at])
                total += np.where(at < 0, 0, self._first_rows[chunk][at] + inside).astype(np.int32)
        return total

    def range_of(self, chunk: int, low: np.ndarray, high: np.ndarray) -> RowSet:
        """The rows of `chunk` with a position in any of the spans low .. high - 1; int64 [spans] each."""
        return joined(np.stack((self.before((chunk,), low), self.before((chunk,), high)), 1).astype(np.int64))

    def narrowed(self, sets: Mapping[int, RowSet]) -> "Slices":
        """The same chunks with some rows of some of them; the others keep all rows."""
        return Slices([self._narrowed(c, sets[c]) if c in sets else of for c, of in enumerate(self.of_chunks)])

    def _narrowed(self, chunk: int, rows: RowSet) -> np.ndarray:
        """The slices of a chunk, cut to these rows."""
        if np.array_equal(rows, [(0, self.counts[chunk])]):
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
    before = np.cumsum(count) - count
    return np.repeat(rows[:, 0] - before, count) + np.arange(count.sum())
