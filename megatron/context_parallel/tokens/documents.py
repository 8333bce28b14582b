"""Packed documents and concatenated sequences: which tokens of a batch belong together."""

from itertools import accumulate, pairwise
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .handles import HasHandle
from .placement import Placement


class Documents(HasHandle):
    """Packed documents: a token sees only tokens of its document. Make one per batch and pass it to every layer.

    It does not store a number for each token, so it is fast to create from end tokens or `cu_seqlens`.

    Attributes:
        shared: whether all samples of a batch have the same documents.
        edges: for each sample, the starts of documents and of gaps between them, and the length: int64, ascending.
        inside: for each edge except the last, whether a document starts there, not a gap: bool, for each sample.
        placement: which rank holds which tokens; None: as the layout of the context group says.
        sample_length: with a placement, the tokens of each sample before they were laid end to end.
        spans: with a placement, the spans that each kind of mask found, kept here for all layers.
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

    @property
    def lengths(self) -> list[int]:
        """The tokens of each document of all samples."""
        of_samples = [np.diff(edges)[inside] for edges, inside in zip(self.edges, self.inside, strict=True)]
        return np.concatenate(of_samples).tolist()

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
