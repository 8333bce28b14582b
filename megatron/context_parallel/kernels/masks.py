"""Masked blocks: the range of keys that each query sees, and the pieces that ordinary flash kernels can compute.

Rows of a block are in ascending order of position, so query row i sees key rows first[i] .. end[i] - 1, and neither
bound ever decreases. If `end` grows by the same m at each row, the block is a shifted diagonal (m = 1) or a staircase
of m interleaved diagonals (chunks of a cyclic layout against a gathered set of them). It consists of full rectangles
and causal squares, whose keys are taken in steps of m.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

FULL, CAUSAL = "full", "causal"
SHORT = 32  # rows: shorter pieces are not worth a separate kernel call


class KeyRanges(NamedTuple):
    """The range of key rows that each query row sees: int32 [samples, s] each; 1 sample if all are equal."""

    first: Tensor
    end: Tensor

    def of(self, rows: slice, keys: slice) -> "KeyRanges":
        """The ranges of some query rows, relative to `keys`."""
        bounds = (x[:, rows].clamp(keys.start, keys.stop) - keys.start for x in self)
        return KeyRanges(*bounds)

    def by_sample(self) -> Iterator["KeyRanges"]:
        """The ranges of each sample alone."""
        return map(KeyRanges, self.first.split(1), self.end.split(1))


PieceMask = str | KeyRanges  # FULL, CAUSAL (square: row i sees key rows 0..i), or ranges


class Piece(NamedTuple):
    """Query rows against key rows under a mask that a kernel supports, for one sample or all."""

    q: slice
    kv: slice
    mask: PieceMask
    sample: int | None = None


def of_each_sample(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same pieces, but those with ranges of several samples are cut into one for each sample."""
    for piece in pieces:
        if not isinstance(piece.mask, KeyRanges) or len(piece.mask.first) == 1:
            yield piece
            continue
        for sample, ranges in enumerate(piece.mask.by_sample()):
            yield piece._replace(mask=ranges, sample=sample)


def tiles(block: KeyRanges, batch: int, step: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Tiles of at most `step` query rows that see any key, for kernels on a CPU.

    Each is (heads, rows, keys, seen): `seen` is bool [rows, keys], and the heads are those of one of `batch` samples.
    """
    samples, count = block.first.shape
    for sample in range(samples):
        heads = slice(sample * batch // samples, (sample + 1) * batch // samples)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            first, end = (x[sample, rows].unsqueeze(1) for x in block)
            keys = slice(int(first[0]), int(end[-1]))
            if keys.stop > keys.start:
                at = torch.arange(keys.start, keys.stop)
                yield heads, rows, keys, (at >= first) & (at < end)


def cut(block: KeyRanges, short: int = SHORT, most: int | None = None) -> list[Piece]:
    """FULL and CAUSAL pieces, and pieces with ranges for irregular parts (windows, fewer than `short` regular rows).

    Keys that no row of a piece sees are cut off. A block that sees nothing has no pieces. At most the first `most`
    pieces are returned.
    """
    if block.first.numel() == 1:  # as for each sequence of a decoding step
        first, end = int(block.first), int(block.end)
        return [Piece(slice(0, 1), slice(first, end), FULL)] if end > first else []
    if len(block.first) == 1:
        return list(islice(_cut_sample(block, None, short), most))
    of_samples = (_cut_sample(ranges, sample, short) for sample, ranges in enumerate(block.by_sample()))
    return list(islice(chain.from_iterable(of_samples), most))


def _cut_sample(block: KeyRanges, sample: int | None, short: int) -> Iterator[Piece]:
    first, end = (bound[0].numpy() for bound in block)
    short = min(short, len(first))
    irregular: slice | None = None  # rows until the next regular piece: one piece with ranges covers them
    for rows, first_step, end_step in _segments(first, end):
        low, high = int(first[rows.start]), int(end[rows.start])
        if low == high and not first_step and not end_step:
            continue
        if first_step or end_step > SHORT or rows.stop - rows.start < short:
            irregular = slice(irregular.start if irregular else rows.start, rows.stop)
            continue
        if irregular:
            yield _with_key_ranges(block, irregular, sample)
            irregular = None
        for piece in _staircase(rows, low, high, end_step):
            yield piece._replace(sample=sample)
    if irregular:
        yield _with_key_ranges(block, irregular, sample)


def _segments(first: numpy.ndarray, end: numpy.ndarray) -> Iterator[tuple[slice, int, int]]:
    """Successive rows whose bounds grow evenly: (rows, growth of first per row, growth of end per row)."""
    first_growth, end_growth = numpy.diff(first), numpy.diff(end)
    changed = (first_growth[1:] != first_growth[:-1]) | (end_growth[1:] != end_growth[:-1])
    edges = [0, *(numpy.flatnonzero(changed) + 1).tolist(), len(first) - 1]
    row = 0  # where the next segment begins
    for start, stop in pairwise(edges):  # rows start .. stop grow evenly
        jump = stop - start == 1 and stop < len(first) - 1  # the row after a jump belongs to the next group
        if row > stop or (jump and row == stop):
            continue
        segment = slice(row, stop if jump else stop + 1)
        if segment.stop - row > 1:
            yield segment, int(first_growth[start]), int(end_growth[start])
        else:
            yield segment, 0, 0
        row = segment.stop
    if row < len(first):
        yield slice(row, len(first)), 0, 0


def _staircase(rows: slice, first: int, end: int, step: int) -> Iterator[Piece]:
    """The pieces of rows whose first sees keys first .. end-1, and each next row `step` more at the end."""
    square = max(first, end - step)  # keys from here on are not seen by all rows
    if square > first:
        yield Piece(rows, slice(first, square), FULL)
    for residue in range(step):
        key = end - step + residue
        late = int(key < first)  # rows that do not yet see the residue's first key
        key += late * step
        count = rows.stop - rows.start - late
        if count > 0:
            last = key + (count - 1) * step
            yield Piece(slice(rows.start + late, rows.stop), slice(key, last + 1, step), CAUSAL)


def _with_key_ranges(block: KeyRanges, rows: slice, sample: int | None) -> Piece:
    keys = slice(int(block.first[0, rows].min()), int(block.end[0, rows].max()))
    return Piece(rows, keys, block.of(rows, keys), sample)
