"""Masks: causality, sliding windows and packed documents, all as intervals of positions.

Under each of these masks a query sees one interval of positions. From one query to the next, neither end of the
interval moves back. So if the rows of a block are in ascending order of position, each query sees one range of keys, in
any layout (`kernels/masks.py`).
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .chunk_pairs import Pairs
from .documents import Documents, Sequences
from .layout import Chunks
from .placement import Placement
from .slices import Slices

BEYOND = torch.iinfo(torch.int32).max  # a position after all, and more tokens than there are
PAIRS_AT_ONCE = 2**22  # of progressions that are compared; limits memory


def _progressions(chunks: Chunks) -> tuple[Tensor, ...]:
    """The first position, stride and last position of each progression, chunk after chunk: three int64."""
    return torch.tensor([(p.start, p.stride, p.last) for p in chain(*chunks.progressions)]).unbind(1)


def _as_bits(seen: np.ndarray) -> list[int]:
    """Each row of bool [rows, n] as an integer whose bits are its columns."""
    packed = np.packbits(seen, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _firsts_from(edges: np.ndarray, start: np.ndarray, stride: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The first position from each edge on in the slice where it lies. Slices without one are left out."""
    in_slice = np.searchsorted(start, edges, side="right") - 1  # -1: before all slices
    hops = -((start[in_slice] - edges) // stride[in_slice])
    first = start[in_slice] + hops * stride[in_slice]
    return first[(in_slice >= 0) & (first <= last[in_slice])]


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees.

    Attributes:
        causal: a query sees itself and the tokens before it; otherwise also the tokens after it.
        window: maximum numbers of tokens before and after itself that a query sees; -1 for no limit (`--window-size`).
        documents: a query sees only the tokens of its document, or of its sequence.

    Raises:
        UsageError: `causal` is not a bool, or the window is not a pair of such numbers.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    documents: Documents | Sequences | None = None

    def __post_init__(self) -> None:
        if type(self.causal) is not bool:
            raise UsageError(f"causal {self.causal!r}: give True, or False for full attention")
        good = isinstance(self.window, tuple) and len(self.window) == 2 and all(type(w) is int for w in self.window)
        if not good or min(self.window) < -1:
            raise UsageError(f"--window-size {self.window}: give tokens before and after, -1 for all, such as 4096,0")

    @property
    def plain(self) -> bool:
        """Whether the mask is just causal or full."""
        return self.window == (-1, -1) and self.documents is None

    def seen(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first position seen from each of `positions` int64 [s], and the end (exclusive): two int64 [samples, s].

        If nothing is seen, the end is not beyond the first. Bounds may lie outside the sequence.
        """
        before, after = self.window
        first = positions - before if before >= 0 else torch.zeros_like(positions)
        end = torch.full_like(positions, BEYOND)
        if after >= 0:
            end = positions + after + 1
        if self.causal:
            end = end.clamp_max(positions + 1)
        if self.documents is None:
            return first.unsqueeze(0), end.unsqueeze(0)
        starts, ends = self.documents.around(positions)
        return torch.maximum(first, starts), torch.minimum(end, ends)

    def pairs(self, q: Chunks | Placement, kv: Chunks | Placement) -> Pairs:
        """The pairs of query and key/value chunks that the mask does not empty.

        For strided chunks it may contain more pairs; otherwise it is exact.
        """
        if isinstance(q, Placement) or isinstance(kv, Placement):
            assert q is kv and isinstance(q, Placement)  # self-attention of a batch
            return self._pairs_of_placement(q)
        n = q.n
        if not self.causal and self.plain:
            return Pairs.all(n)
        q_first, _, q_last = _progressions(q)
        kv_first, stride, kv_last = _progressions(kv)
        # The union of what the queries of a progression see: [samples, query progressions, 1].
        low, high = self.seen(q_first)[0].unsqueeze(2), self.seen(q_last)[1].unsqueeze(2)
        rows = list[int]()
        per_chunk = len(q_first) // n  # progressions
        at_once = per_chunk * max(1, PAIRS_AT_ONCE // (per_chunk * len(kv_first)))  # progressions of whole query chunks
        for some_low, some_high in zip(low.split(at_once, 1), high.split(at_once, 1), strict=True):
            # The first key of each progression not before this union: [samples, query progressions, key progressions].
            hops = ((some_low - kv_first).clamp_min(0) + stride - 1) // stride
            nearest = kv_first + hops * stride
            seen = ((nearest < some_high) & (nearest <= kv_last)).any(0)
            by_chunk = seen.view(-1, per_chunk, n, len(kv_first) // n)
            rows += _as_bits(by_chunk.any(3).any(1).numpy())
        return Pairs(tuple(rows))

    def spans(self, chunks: Slices, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys that the queries of a chunk see: first positions and ends (exclusive), in any order.

        There is a span for each part of a document in each slice. It has all keys that one of the queries sees. It
        may have more only where the stride of a slice is larger than the window.
        """
        if isinstance(chunks, Placement):
            queries, low, high = self._spans_of_placement(chunks)
            first, end = np.searchsorted(queries, (chunk, chunk + 1))
            return low[first:end], high[first:end]
        return self._spans(chunks, chunk)[1:]

    def spans_of_keys(self, chunks: Slices, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The queries that see the keys of a chunk, as `spans`."""
        return Mask(False, self._mirrored_window(), self.documents)._spans(chunks, chunk)[1:]

    def _mirrored_window(self) -> tuple[int, int]:
        """The queries before and after a key that see it."""
        before, after = self.window
        if self.causal:
            return 0, before
        return after if after >= 0 else BEYOND, before  # of more queries than keys the first have positions below 0

    def _parts(self, chunks: Slices, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and last position of each part of a document, of any sample, in each slice: two int64 [parts]."""
        start, stride, count = chunks.of_chunks[chunk].T
        last = start + (count - 1) * stride
        firsts = start
        if isinstance(self.documents, Documents) and len(start):
            at_edges = [_firsts_from(edges[:-1], start, stride, last) for edges in self.documents.edges]
            firsts = np.unique(np.concatenate([start, *at_edges]))
        in_slice = np.searchsorted(start, firsts, side="right") - 1
        next_first = np.append(firsts[1:], np.iinfo(np.int64).max)
        same_slice = next_first <= last[in_slice]
        return firsts, np.where(same_slice, next_first - stride[in_slice], last[in_slice])

    def _spans(self, chunks: Slices, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each part of a document in a chunk whose queries see any key: its first position, and the span of keys.

        A token of no document sees none.
        """
        first, last = self._parts(chunks, chunk)
        low = self.seen(torch.from_numpy(first))[0].numpy()  # [samples, parts]
        high = self.seen(torch.from_numpy(last))[1].numpy()
        sees_any = high > low
        if isinstance(self.documents, Documents):
            for sample, (edges, inside) in enumerate(zip(self.documents.edges, self.documents.inside, strict=True)):
                sees_any[sample] &= inside[np.searchsorted(edges[1:], first, side="right")]
        return np.broadcast_to(first, sees_any.shape)[sees_any], low[sees_any], high[sees_any]

    def _pairs_of_placement(self, placement: Placement) -> Pairs:
        queries, low, high = self._spans_of_placement(placement)
        span, owners, _ = placement.met(low, high)
        seen = np.zeros((placement.n, placement.n), bool)
        seen[queries[span], owners] = True
        return Pairs(tuple(_as_bits(seen)))

    def _spans_of_placement(self, placement: Placement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The spans of all chunks, chunk after chunk: the chunk of queries, first positions and ends. Found once."""
        documents, kind = self.documents, (self.causal, self.window)
        assert isinstance(documents, Documents) and documents.placement is placement
        if kind not in documents.spans:
            starts, owners = placement.owners()
            slices = np.stack((starts, np.ones_like(starts), np.diff(starts, append=placement.length)), 1)
            first, low, high = self._spans(Slices([slices]), 0)
            queries = owners[np.searchsorted(starts, first, side="right") - 1]
            order = np.argsort(queries, kind="stable")
            documents.spans[kind] = queries[order], low[order], high[order]
        return documents.spans[kind]
