"""What a distribution of tokens costs each rank: the pairs of rows that it computes, and the keys that it needs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .documents import Documents
from .layout import Chunks
from .mask import Mask
from .placement import Placement
from .slices import Slices, numbered


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

    `rows` rows at first, first + stride, ... of a document from `start` to `end` (exclusive).
    """

    chunk: np.ndarray
    first: np.ndarray
    stride: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def last(self) -> np.ndarray:
        return self.first + (self.rows - 1) * self.stride

    def at(self, which: np.ndarray) -> "_Parts":
        return _Parts(*(of_parts[which] for of_parts in self))


def chunk_loads(mask: Mask, chunks: Chunks | Placement) -> ChunkLoads:
    """The pairs and rows of each chunk, added up over the samples.

    For documents with a placement of their own, give the documents end to end and the placement.
    """
    total = ChunkLoads(np.zeros(chunks.n, np.int64), np.zeros((chunks.n, chunks.n), np.int64))
    for edges, inside in _samples(mask, chunks):
        of_sample = _loads_of_sample(mask, chunks, edges, inside)
        total = ChunkLoads(total.pairs + of_sample.pairs, total.rows + of_sample.rows)
    return total


def pairs_between(mask: Mask, chunks: Chunks | Slices) -> np.ndarray:
    """The visible pairs of a row of each query chunk and of each key chunk, added up over the samples: int64 [n, n].

    All progressions of the chunks have one stride.
    """
    counts = np.zeros((chunks.n, chunks.n), np.int64)
    for edges, inside in _samples(mask, chunks):
        parts = _documents_in(chunks, edges, inside)
        parts = parts.at(np.argsort(parts.start, kind="stable"))
        before, after = reach(mask, int(edges[-1]))
        for kv in range(chunks.n):
            of_kv = parts.at(parts.chunk == kv)
            first = np.searchsorted(parts.start, of_kv.start, side="left")  # queries of the same document
            count = np.searchsorted(parts.start, of_kv.start, side="right") - first
            queries = parts.at(np.repeat(first, count) + numbered(count))
            keys = of_kv.at(np.repeat(np.arange(len(count)), count))
            seen = _keys_up_to(after, queries, keys) - _keys_up_to(-before - 1, queries, keys)
            np.add.at(counts[:, kv], queries.chunk, seen)
    return counts


def _keys_up_to(offset: int, queries: _Parts, keys: _Parts) -> np.ndarray:
    """The pairs of a query and a key that is at most `offset` positions after it, for each two parts: int64."""
    first = (queries.first + offset - keys.first) // keys.stride + 1  # such keys of the first query, if below 0 or all
    return _capped_sum(first + queries.rows, keys.rows) - _capped_sum(first, keys.rows)


def _capped_sum(end: np.ndarray, cap: np.ndarray) -> np.ndarray:
    """The sum of min(i, cap) over 0 <= i < end."""
    rising = end.clip(0, cap)
    return rising * (rising - 1) // 2 + (end.clip(0) - rising) * cap


def _samples(mask: Mask, chunks: Chunks | Slices) -> list[tuple[np.ndarray, np.ndarray]]:
    """The edges of the documents of each sample, and whether they are inside one."""
    length = sum(chunks.rows)
    if mask.documents is None:
        return [(np.array([0, length]), np.array([True]))]
    assert isinstance(mask.documents, Documents)
    assert all(edges[-1] == length for edges in mask.documents.edges)
    return [*zip(mask.documents.edges, mask.documents.inside, strict=True)]


def _loads_of_sample(mask: Mask, chunks: Chunks | Placement, edges: np.ndarray, inside: np.ndarray) -> ChunkLoads:
    parts = _documents_in(chunks, edges, inside)
    before, after = reach(mask, int(edges[-1]))
    pairs = np.bincount(parts.chunk, _visible(parts, before, after), chunks.n)
    gaps = parts.stride > before + after + 1  # keys between two rows of such a part are seen by neither
    parts = _single_rows(parts, gaps)
    low, high = np.maximum(parts.first - before, parts.start), np.minimum(parts.last + after + 1, parts.end)
    others = (low < parts.first) | (high > parts.last + 1) | (parts.stride > 1)  # else a part sees only itself
    rows = _rows_between(chunks, parts.chunk[others], low[others], high[others])
    return ChunkLoads(pairs.astype(np.int64), rows)


def reach(mask: Mask, length: int) -> tuple[int, int]:
    """How many positions before and after its own a token of a sequence of `length` tokens sees at most."""
    before, after = mask.window
    before = length if before < 0 else before
    after = length if after < 0 else after
    return before, 0 if mask.causal else after


def _documents_in(chunks: Chunks | Slices, edges: np.ndarray, inside: np.ndarray) -> _Parts:
    """The parts of documents in all chunks."""
    whole = _progressions(chunks)
    first_document = np.searchsorted(edges, whole.first, side="right") - 1
    documents = np.searchsorted(edges, whole.last, side="right") - first_document  # that each progression meets
    parts = whole.at(np.repeat(np.arange(len(documents)), documents))
    document = np.repeat(first_document, documents) + numbered(documents)
    start, end = edges[document], edges[document + 1]
    before = _rows_below(start, parts)
    rows = _rows_below(end, parts) - before
    parts = parts._replace(first=parts.first + before * parts.stride, rows=rows, start=start, end=end)
    return parts.at((rows > 0) & inside[document])


def _progressions(chunks: Chunks | Slices) -> _Parts:
    """The progressions of all chunks, as if each were a document."""
    slices = Slices.of(chunks)
    owner = np.repeat(np.arange(slices.n), [len(of_chunk) for of_chunk in slices.of_chunks])
    first, stride, rows = np.concatenate(slices.of_chunks).T
    return _Parts(owner, first, stride, rows, first, first + (rows - 1) * stride + 1)


def _rows_below(bound: np.ndarray, parts: _Parts) -> np.ndarray:
    """How many rows of each part have a position below its bound."""
    return (-((parts.first - bound) // parts.stride)).clip(0, parts.rows)


def _visible(parts: _Parts, before: int, after: int) -> np.ndarray:
    """The keys that all rows of each part see together: int64 [parts].

    A row at position p sees max(start, p - before) to min(end, p + after + 1) - 1.
    """
    inside = _rows_below(parts.end - after, parts)  # rows whose window ends in the document
    ends = _sum(parts, inside) + inside * (after + 1) + (parts.rows - inside) * parts.end
    cut = _rows_below(parts.start + before, parts)  # rows whose window begins before the document
    firsts = cut * parts.start + _sum(parts, parts.rows) - _sum(parts, cut) - (parts.rows - cut) * before
    return ends - firsts


def _sum(parts: _Parts, count: np.ndarray) -> np.ndarray:
    """The sum of the first `count` positions of each part."""
    return count * parts.first + parts.stride * (count * (count - 1) // 2)


def _single_rows(parts: _Parts, which: np.ndarray) -> _Parts:
    """The parts, some of them as parts of one row each."""
    if not which.any():
        return parts
    copies = np.where(which, parts.rows, 1)
    rows = parts.at(np.repeat(np.arange(len(copies)), copies))
    single = np.repeat(which, copies)
    return rows._replace(first=rows.first + numbered(copies) * rows.stride, rows=np.where(single, 1, rows.rows))


def _rows_between(chunks: Chunks | Placement, chunk: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The rows of each chunk in the spans of keys of each other chunk, int64 [n, n].

    Spans are given chunk after chunk, ascending in each; those of one chunk may overlap.
    """
    begins = np.diff(chunk, prepend=-1) > 0  # the first span of a chunk
    low = np.maximum(low, np.where(begins, 0, np.roll(high, 1)))  # what the span before it has not
    rows = np.zeros((chunks.n, chunks.n), np.int64)
    if isinstance(chunks, Placement):
        span, owners, tokens = chunks.met(low, high)
        np.add.at(rows, (chunk[span], owners), tokens)
    else:
        for owner in range(chunks.n):
            seen = chunks.before((owner,), high) - chunks.before((owner,), low)
            rows[:, owner] = np.bincount(chunk, seen, chunks.n)
    np.fill_diagonal(rows, 0)
    return rows
