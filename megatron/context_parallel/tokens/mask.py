"""Masks: causality, sliding windows and packed documents, all as intervals of positions.

Under each of these masks a query sees one interval of positions. From one query to the next, neither end of the
interval moves back. So if the rows of a block are in ascending order of position, each query sees one run of keys, in
any layout (`kernels/masks.py`).
"""

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .chunk_pairs import Pairs
from .handles import HasHandle
from .layout import Chunks
from .placement import Placement
from .slices import Slices

BEYOND = torch.iinfo(torch.int32).max  # a position after all, and more tokens than there are
PAIRS_AT_ONCE = 2**22  # of progressions that are compared; limits memory


class Documents(HasHandle):
    """Packed documents: a token sees only tokens of its document. Make one per batch and pass it to every layer.

    It does not store a number for each token, so it is fast to create from end tokens or `cu_seqlens`.

    Attributes:
        shared: whether all samples of a batch have the same documents.
        edges: for each sample, the starts of documents and of gaps between them, and the length: int64, ascending.
        inside: for each edge except the last, whether a document starts there, not a gap: bool, for each sample.
        placement: which rank holds which tokens; None: as the layout of the context group says.
        sample_length: with a placement, the tokens of each sample before they were laid end to end.
        spans: with a placement, a place where each kind of mask keeps the spans that it found.
    """

    placement: Placement | None = None
    sample_length: int | None = None
    spans: dict[tuple[bool, tuple[int, int]], tuple[np.ndarray, np.ndarray, np.ndarray]]

    def __init__(self, ids: Tensor) -> None:
        """Documents from a number for each token.

        Args:
            ids: integers [samples, length], or [length] for documents common to all samples. Neighbours with equal
                numbers are in the same document; negative numbers are in no document.

        Raises:
            UsageError: another shape or dtype.
        """
        if not _has_integers(ids) or ids.dim() not in (1, 2) or not ids.numel():
            raise UsageError(
                f"documents {_kind(ids)}: need integers [length] or [samples, length], such as [0, 0, 1, 1]"
            )
        self.shared = ids.dim() == 1
        of_tokens = torch.atleast_2d(ids.detach().cpu()).numpy()
        self.edges = _edges(of_tokens[:, 1:] != of_tokens[:, :-1], of_tokens.shape[1])
        self.inside = [row[edges[:-1]] >= 0 for row, edges in zip(of_tokens, self.edges, strict=True)]

    @classmethod
    def _of(cls, edges: list[np.ndarray], inside: list[np.ndarray]) -> "Documents":
        made = cls.__new__(cls)
        made.edges, made.inside, made.shared = edges, inside, False
        return made

    def end_to_end(self) -> "Documents":
        """The documents of all samples as those of one sample, which is as long as all of them."""
        samples, length = self.shape
        starts = [edges[:-1] + sample * length for sample, edges in enumerate(self.edges)]
        edges = np.concatenate((*starts, [samples * length]))
        return Documents._of([edges], [np.concatenate(self.inside)])

    def placed(self, placement: Placement) -> "Documents":
        """The documents of all samples end to end, whose tokens are where `placement` says.

        Raises:
            UsageError: the placement has another number of tokens.
        """
        samples, length = self.shape
        if placement.length != samples * length:
            raise UsageError(f"placement of {placement.length} tokens: the documents have {samples} x {length}")
        made = self.end_to_end()
        made.placement, made.sample_length, made.spans = placement, length, {}
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """(samples, length)."""
        return len(self.edges), int(self.edges[0][-1])

    def around(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where the documents of tokens start and end (exclusive): two int64 [samples, s] for positions int64 [s].

        For a token of no document both are its own position.
        """
        at = positions.numpy()
        starts = []
        ends = []
        for edges, inside in zip(self.edges, self.inside, strict=True):
            document = np.searchsorted(edges[1:], at, side="right")
            starts.append(np.where(inside[document], edges[document], at))
            ends.append(np.where(inside[document], edges[document + 1], at))
        return torch.from_numpy(np.stack(starts)), torch.from_numpy(np.stack(ends))

    @classmethod
    def after(cls, ends: Tensor) -> "Documents":
        """Documents that end with the marked tokens, bool [samples, length], like Megatron's `--reset-attention-mask`.

        Raises:
            UsageError: another shape or dtype.
        """
        if not _has_values(ends) or ends.dtype is not torch.bool or ends.dim() != 2 or not ends.numel():
            raise UsageError(f"ends of documents {_kind(ends)}: need bool [samples, length], such as tokens == eod")
        edges = _edges(ends[:, :-1].cpu().numpy(), ends.shape[1])
        return cls._of(edges, [np.ones(len(bounds) - 1, bool) for bounds in edges])

    @classmethod
    def packed(
        cls, cu_seqlens: Tensor, length: int, cu_seqlens_padded: Tensor | None = None, samples: int = 1
    ) -> "Documents":
        """Documents of Megatron's `PackedSeqParams`, which counts tokens over all samples.

        Args:
            cu_seqlens: int [documents + 1], ascending from 0; tokens beyond the last belong to no document.
            length: tokens of a sample.
            cu_seqlens_padded: the starts of the documents, if there is padding between them.
            samples: the batch size.

        Raises:
            UsageError: bounds that do not ascend from 0, or end before the last sample begins; a document that crosses
                the end of its sample or of the last one.
        """
        padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        _check_packed(cu_seqlens, length, padded, samples)
        lengths = cu_seqlens.detach().cpu().long().diff()
        bounds = padded.detach().cpu().long()
        if len(lengths) == 0 or bounds[0] != 0 or lengths.min() < 0 or (bounds.diff() < lengths).any():
            raise UsageError(f"cu_seqlens {cu_seqlens.tolist()[:8]}: must ascend from 0, such as [0, 5, {length}]")
        filled = lengths > 0
        starts = bounds[:-1][filled].numpy()
        ends = (bounds[:-1] + lengths)[filled].numpy()
        if (starts // length != (ends - 1) // length).any():
            raise UsageError(f"cu_seqlens: a document crosses the end of its sample of {length} tokens; cut it there")
        _check_end(int(bounds[-1]), length, samples)
        of_samples = np.arange(samples + 1) * length
        all_edges = np.unique(np.concatenate((starts, ends, of_samples)))
        edges = []
        inside = []
        for first, end in pairwise(of_samples):
            own = all_edges[(all_edges >= first) & (all_edges <= end)]
            edges.append(own - first)
            inside.append(np.isin(own[:-1], starts))
        return cls._of(edges, inside)


def _check_packed(cu_seqlens: Tensor, length: int, padded: Tensor, samples: int) -> None:
    """Raises UsageError for types and shapes that packed documents cannot have."""
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", padded)):
        if not _has_integers(x) or x.dim() != 1:
            raise UsageError(f"{name} {_kind(x)}: need integers [documents + 1], such as [0, 5, 8]")
    for name, number in (("length", length), ("samples", samples)):
        if type(number) is not int or number < 1:
            raise UsageError(f"{name} {number!r} of packed documents: need a whole number, 1 or more, such as 8")
    if len(padded) != len(cu_seqlens):
        raise UsageError(f"cu_seqlens_padded of {len(padded)} bounds: need {len(cu_seqlens)}, as cu_seqlens has")


def _check_end(end: int, length: int, samples: int) -> None:
    """Raises UsageError for bounds that end outside the last sample."""
    if end > samples * length:
        needed = -(-end // length)
        raise UsageError(f"cu_seqlens: ends at {end}, beyond {samples} x {length} tokens; give samples={needed}")
    if end <= (samples - 1) * length:
        raise UsageError(
            f"cu_seqlens: ends at {end}, before the last of {samples} samples of {length} tokens begins; "
            f"count through all samples, to {samples * length}"
        )


def _has_values(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not (x.is_meta or x.is_nested)


def _has_integers(x: object) -> TypeGuard[Tensor]:
    return _has_values(x) and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def _kind(x: object) -> str:
    """The description, in an error, of a value that should be a tensor."""
    if not isinstance(x, Tensor):
        return f"of type {type(x).__name__}"
    return "nested" if x.is_nested else f"{list(x.shape)} of {x.dtype}{' on meta' if x.is_meta else ''}"


def _edges(changes: np.ndarray, length: int) -> list[np.ndarray]:
    """The starts of segments in each sample, and the length. `changes` [samples, length - 1]: at the next token."""
    return [np.concatenate(([0], np.flatnonzero(sample) + 1, [length])) for sample in changes]


def _progressions(chunks: Chunks) -> tuple[Tensor, ...]:
    """The first position, stride and last position of each progression, chunk after chunk: three int64."""
    return torch.tensor([(p.start, p.stride, p.last) for p in chain(*chunks.progressions)]).unbind(1)


def _as_bits(seen: np.ndarray) -> list[int]:
    """Each row of bool [rows, n] as an integer whose bits are its columns."""
    packed = np.packbits(seen, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


class Sequences:
    """Concatenated sequences of a batch: a token sees only tokens of its sequence.

    Unlike with `Documents`, blocks are cut between sequences. So the result of a sequence does not depend on others.

    Attributes:
        bounds: int64 [count + 1], the starts of the sequences and the end of the last. A token's position is the start
            of its sequence plus its index in the sequence.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.bounds = torch.tensor([*accumulate(lengths, initial=0)])

    @property
    def shape(self) -> torch.Size:
        """(samples, length)."""
        return torch.Size((1, int(self.bounds[-1])))

    def around(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The start and end of each token's sequence: two int64 [1, s]."""
        sequence = torch.bucketize(positions, self.bounds[1:], right=True).unsqueeze(0)
        return self.bounds[sequence], self.bounds[sequence + 1]


def placement_of(documents: Documents | Sequences | None) -> Placement | None:
    """The placement that a batch brings."""
    return documents.placement if isinstance(documents, Documents) else None


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
            for edges in self.documents.edges:
                at = np.searchsorted(start, edges[:-1], side="right") - 1  # the slice at each edge; -1: none
                hops = -((start[at] - edges[:-1]) // stride[at])  # to its first position not before the edge
                first = start[at] + hops * stride[at]
                firsts = np.append(firsts, first[(at >= 0) & (first <= last[at])])
            firsts = np.unique(firsts)
        at = np.searchsorted(start, firsts, side="right") - 1
        following = np.append(firsts[1:], np.iinfo(np.int64).max)
        return firsts, np.where(following <= last[at], following - stride[at], last[at])

    def _spans(self, chunks: Slices, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each part of a document in a chunk whose queries see any key: its first position, and the span of keys.

        A token of no document sees none.
        """
        first, last = self._parts(chunks, chunk)
        low, high = self.seen(torch.from_numpy(first))[0].numpy(), self.seen(torch.from_numpy(last))[1].numpy()
        some = high > low
        if isinstance(self.documents, Documents):
            for sample, (edges, inside) in enumerate(zip(self.documents.edges, self.documents.inside, strict=True)):
                some[sample] &= inside[np.searchsorted(edges[1:], first, side="right")]
        return np.broadcast_to(first, some.shape)[some], low[some], high[some]

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
