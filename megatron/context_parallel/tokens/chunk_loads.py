"""What a distribution of tokens costs each rank: the pairs of rows that it computes, and the keys that it needs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .layout import Chunks
from .mask import Documents, Mask
from .placement import Placement
from .slices import Slices


@dataclass(frozen=True)
class ChunkLoads:
    """The work of each of n chunks, and the keys of other chunks that its queries see.

    Attributes:
        pairs: visible pairs of a query of the chunk and any key, int64 [n].
        rows: rows of keys of the second chunk that a query of the first sees, int64 [n, n]; 0 for the chunk itself.
    """

    pairs: np.ndarray
    rows: np.ndarray

    def inside(self, ranks_per_node: int | None) -> np.ndarray:
        """Those of `rows` whose two ranks are on one node; None: all are."""
        nodes = np.arange(len(self.pairs)) // (ranks_per_node or len(self.pairs))
        return np.where(nodes[:, None] == nodes, self.rows, 0)


class _Parts(NamedTuple):
    """Parts of documents in chunks, chunk after chunk and ascending in each: int64 [parts].

    `count` rows at first, first + stride, ... of a document from `start` to `end` (exclusive).
    """

    chunk: np.ndarray
    first: np.ndarray
    stride: np.ndarray
    count: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def at(self, which: np.ndarray) -> "_Parts":
        return _Parts(*(of_parts[which] for of_parts in self))


def chunk_loads(mask: Mask, chunks: Chunks | Placement) -> ChunkLoads:
    """The pairs and rows of each chunk, added up over the samples.

    For documents with a placement of their own, give the documents end to end and the placement.
    """
    length = sum(chunks.counts)
    loads = []
    if mask.documents is None:
        loads.append(_loads_of_sample(mask, chunks, np.array([0, length]), np.array([True])))
    else:
        assert isinstance(mask.documents, Documents)
        for edges, inside in zip(mask.documents.edges, mask.documents.inside, strict=True):
            assert edges[-1] == length
            loads.append(_loads_of_sample(mask, chunks, edges, inside))
    return ChunkLoads(sum(of.pairs for of in loads), sum(of.rows for of in loads))


def _loads_of_sample(mask: Mask, chunks: Chunks | Placement, edges: np.ndarray, inside: np.ndarray) -> ChunkLoads:
    parts = _cut(*_progressions(chunks), edges, inside)
    before, after = reach(mask, int(edges[-1]))
    pairs = np.bincount(parts.chunk, _visible(parts, before, after), chunks.n)
    gaps = parts.stride > before + after + 1  # keys between two rows of such a part are seen by neither
    parts = _single_rows(parts, gaps)
    last = parts.first + (parts.count - 1) * parts.stride
    low, high = np.maximum(parts.first - before, parts.start), np.minimum(last + after + 1, parts.end)
    others = (low < parts.first) | (high > last + 1) | (parts.stride > 1)  # else a part sees nothing but itself
    rows = _rows_between(chunks, parts.chunk[others], low[others], high[others])
    return ChunkLoads(pairs.astype(np.int64), rows)


def reach(mask: Mask, length: int) -> tuple[int, int]:
    """How many positions before and after its own a token of a sequence of `length` tokens sees at most."""
    before, after = mask.window
    before = length if before < 0 else before
    after = length if after < 0 else after
    return before, 0 if mask.causal else after


def _progressions(chunks: Chunks | Placement) -> tuple[np.ndarray, ...]:
    """The chunk, first position, stride and number of rows of each progression: four int64."""
    slices = Slices.of(chunks)
    owners = np.repeat(np.arange(slices.n), [len(of_chunk) for of_chunk in slices.of_chunks])
    return owners, *np.concatenate(slices.of_chunks).T


def _cut(
    chunk: np.ndarray, first: np.ndarray, stride: np.ndarray, count: np.ndarray, edges: np.ndarray, inside: np.ndarray
) -> _Parts:
    """Progressions cut where documents begin and end. Rows of no document are left out."""
    last = first + (count - 1) * stride
    first_document = np.searchsorted(edges, first, side="right") - 1
    documents = np.searchsorted(edges, last, side="right") - first_document  # that each progression meets
    of = np.repeat(np.arange(len(first)), documents)
    document = first_document[of] + np.arange(len(of)) - np.repeat(np.cumsum(documents) - documents, documents)
    begin = _rows_below(edges[document], first[of], stride[of], count[of])
    end = _rows_below(edges[document + 1], first[of], stride[of], count[of])
    parts = _Parts(
        chunk[of], first[of] + begin * stride[of], stride[of], end - begin, edges[document], edges[document + 1]
    )
    return parts.at((end > begin) & inside[document])


def _rows_below(bound: np.ndarray, first: np.ndarray, stride: np.ndarray, count: np.ndarray) -> np.ndarray:
    """How many rows of each progression have a position below its bound."""
    return (-((first - bound) // stride)).clip(0, count)


def _visible(parts: _Parts, before: int, after: int) -> np.ndarray:
    """The keys that all rows of each part see together: int64 [parts]."""
    _, first, stride, count, start, end = parts
    free = _rows_below(end - after, first, stride, count)  # rows that see all positions that they may after their own
    ends = _sum(first, stride, free) + free * (after + 1) + (count - free) * end
    held = _rows_below(start + before, first, stride, count)  # rows that see the document from its start
    firsts = held * start + _sum(first, stride, count) - _sum(first, stride, held) - (count - held) * before
    return ends - firsts


def _sum(first: np.ndarray, stride: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The sum of the first `count` positions of each progression."""
    return count * first + stride * (count * (count - 1) // 2)


def _single_rows(parts: _Parts, which: np.ndarray) -> _Parts:
    """The parts, some of them as parts of one row each."""
    if not which.any():
        return parts
    copies = np.where(which, parts.count, 1)
    of = np.repeat(np.arange(len(copies)), copies)
    row = np.arange(len(of)) - np.repeat(np.cumsum(copies) - copies, copies)
    rows = parts.at(of)
    return rows._replace(first=rows.first + row * rows.stride, count=np.where(which[of], 1, rows.count))


def _rows_between(chunks: Chunks | Placement, chunk: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The rows of each chunk in the spans of keys of each other chunk, int64 [n, n].

    Spans are given chunk after chunk, ascending in each; those of one chunk may overlap.
    """
    begins = np.diff(chunk, prepend=-1) > 0  # the first span of a chunk
    low = np.maximum(low, np.where(begins, 0, np.roll(high, 1)))  # what the span before it has not
    rows = np.zeros((chunks.n, chunks.n), np.int64)
    for owner in range(chunks.n):
        seen = chunks.before((owner,), high) - chunks.before((owner,), low)
        rows[:, owner] = np.bincount(chunk, seen, chunks.n)
    np.fill_diagonal(rows, 0)
    return rows
