"""Which keys a query sees: causality, sliding windows and packed documents, all as intervals of positions.

Under each of these masks a query sees one interval of positions. From one query to the next, neither end of the
interval moves back. So if the rows of a block are in ascending order of position, each query sees one run of keys, in
any layout (`kernels/masks.py`).
"""

from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError
from .layout import Chunks
from .pairs import Pairs


class Documents:
    """Packed documents: a token sees only tokens of its document. Make one per batch and pass it to every layer.

    Attributes:
        starts: int64 [samples, length] on CPU, where the document of each token starts.
        ends: the same, where it ends (exclusive). For a token of no document both are its own position.
    """

    def __init__(self, ids: Tensor) -> None:
        """Makes documents from a number for each token.

        Args:
            ids: integers [length] or [samples, length]. Equal neighbours share a document; negative is no document.

        Raises:
            UsageError: another shape or dtype.
        """
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or not ids.numel():
            raise UsageError(
                f"documents {list(ids.shape)} of {ids.dtype}: need integers [length] or [samples, length], such as "
                "[0, 0, 1, 1]"
            )
        ids = torch.atleast_2d(ids.detach().cpu())
        at = torch.arange(ids.shape[1])
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        last = first.roll(-1, 1)
        self.starts = torch.where(first, at, 0).cummax(1).values
        self.ends = torch.where(last, at + 1, len(at)).flip(1).cummin(1).values.flip(1)
        outside = ids < 0
        self.starts, self.ends = (torch.where(outside, at, x) for x in (self.starts, self.ends))

    @property
    def shape(self) -> torch.Size:
        """(samples, length)."""
        return self.starts.shape

    def around(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where the documents of tokens start and end: two int64 [samples, s]."""
        return self.starts[:, positions], self.ends[:, positions]

    @classmethod
    def after(cls, ends: Tensor) -> "Documents":
        """Documents that end with the marked tokens: bool [samples, length], as Megatron's `--reset-attention-mask`."""
        return cls(ends.long().cumsum(1) - ends.long())

    @classmethod
    def packed(
        cls, cu_seqlens: Tensor, length: int, cu_seqlens_padded: Tensor | None = None, samples: int = 1
    ) -> "Documents":
        """Documents of Megatron's `PackedSeqParams`, which counts through all samples.

        Args:
            cu_seqlens: int [documents + 1], ascending from 0; tokens beyond the last belong to no document.
            length: tokens of a sample.
            cu_seqlens_padded: where the documents begin, if there is padding between them.
            samples: the batch size.

        Raises:
            UsageError: bounds that do not ascend from 0, or a document that leaves its sample or the last one.
        """
        if any(x is not None and (x.dim() != 1 or x.is_floating_point()) for x in (cu_seqlens, cu_seqlens_padded)):
            raise UsageError(
                f"cu_seqlens {list(cu_seqlens.shape)} of {cu_seqlens.dtype}: need integers [documents + 1]"
            )
        lengths = cu_seqlens.detach().cpu().long().diff()
        bounds = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).detach().cpu().long()
        if len(lengths) == 0 or bounds[0] != 0 or lengths.min() < 0 or (bounds.diff() < lengths).any():
            raise UsageError(f"cu_seqlens {cu_seqlens.tolist()[:8]}: must ascend from 0, such as [0, 5, {length}]")
        starts = bounds[:-1]
        lasts = (starts + lengths - 1)[lengths > 0]
        if (starts[lengths > 0] // length != lasts // length).any():
            raise UsageError(f"cu_seqlens: a document crosses the end of its sample of {length} tokens; cut it there")
        if bounds[-1] > samples * length:
            needed = -(-int(bounds[-1]) // length)
            raise UsageError(
                f"cu_seqlens: ends at {int(bounds[-1])}, beyond {samples} x {length} tokens; give samples={needed}"
            )
        at = torch.arange(samples * length)
        document = torch.bucketize(at, bounds[1:], right=True)
        inside = document < len(lengths)
        inside[inside.clone()] = (at - bounds[document.clamp_max(len(starts))])[inside] < lengths[document[inside]]
        return cls(torch.where(inside, document, -1).view(samples, length))


class Sequences:
    """Sequences of a batch laid end to end: a token sees only tokens of its sequence.

    Unlike `Documents` it has no number for each token, and blocks are cut between sequences. So what is computed of one
    depends on no other.

    Attributes:
        bounds: int64 [count + 1], where the sequences begin, and the end of the last. A token's position is the begin
            of its sequence and its place there.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.bounds = torch.tensor([0, *lengths]).cumsum(0)

    @property
    def shape(self) -> torch.Size:
        """(samples, length)."""
        return torch.Size((1, int(self.bounds[-1])))

    def around(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where the sequences of tokens start and end: two int64 [1, s]."""
        of = torch.bucketize(positions, self.bounds[1:], right=True).unsqueeze(0)
        return self.bounds[of], self.bounds[of + 1]

    def cut(self, *positions: Tensor) -> list[tuple[slice, ...]]:
        """For each sequence, which of some ascending positions are of it."""
        edges = [torch.searchsorted(x, self.bounds).tolist() for x in positions]
        return list(zip(*([slice(*pair) for pair in pairwise(of)] for of in edges), strict=True))


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        causal: it sees itself and the tokens before it; otherwise the tokens after it too.
        window: how many tokens before and after itself it sees at most; -1 for no limit (Megatron's `--window-size`).
        documents: it sees only the tokens of its document, or of its sequence.

    Raises:
        UsageError: a window that is not two such numbers.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    documents: Documents | Sequences | None = None

    def __post_init__(self) -> None:
        good = isinstance(self.window, tuple) and len(self.window) == 2 and all(type(w) is int for w in self.window)
        if not good or min(self.window) < -1:
            raise UsageError(f"--window-size {self.window}: give tokens before and after, -1 for all, such as 4096,0")

    @property
    def plain(self) -> bool:
        """Causal or full, and nothing else."""
        return self.window == (-1, -1) and self.documents is None

    def seen(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first position seen from each of `positions` int64 [s], and the end (exclusive): two int64 [samples, s].

        If nothing is seen, the end is not beyond the first. Bounds may lie outside the sequence.
        """
        before, after = self.window
        first = positions - before if before >= 0 else torch.zeros_like(positions)
        end = torch.full_like(positions, torch.iinfo(torch.int32).max)
        if after >= 0:
            end = positions + after + 1
        if self.causal:
            end = end.clamp_max(positions + 1)
        if self.documents is None:
            return first.unsqueeze(0), end.unsqueeze(0)
        starts, ends = self.documents.around(positions)
        return torch.maximum(first, starts), torch.minimum(end, ends)

    def pairs(self, q: Chunks, kv: Chunks) -> Pairs:
        """The pairs of query and key/value chunks that the mask does not empty.

        For strided chunks it may contain more pairs; otherwise it is exact.
        """
        n = q.n
        if not self.causal and self.plain:
            return Pairs.all(n)
        every = [[(p.start, p.stride, p.last) for p in chain(*chunks.progressions)] for chunks in (q, kv)]
        (first, _, final), (start, stride, last) = (torch.tensor(x).unbind(1) for x in every)
        low, high = self.seen(first)[0], self.seen(final)[1]  # of all queries of a progression together
        nearest = start + ((low.unsqueeze(2) - start).clamp_min(0) + stride - 1) // stride * stride
        some = (nearest < high.unsqueeze(2)) & (nearest <= last)
        seen = some.any(0).view(n, some.shape[1] // n, n, -1).any(3).any(1)
        rows = np.packbits(seen.numpy(), axis=1, bitorder="little")
        return Pairs(tuple(int.from_bytes(row.tobytes(), "little") for row in rows))
