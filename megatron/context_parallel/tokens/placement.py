"""A batch's own placement: which rank holds which of its tokens. The static layouts are in `layout.py`."""

import hashlib
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.errors import UsageError


class Placement:
    """The chunks of a batch whose samples are laid end to end. A chunk is a list of slices of the batch.

    It is used like `layout.Chunks`. All chunks have equally many rows. Chunk i belongs to context rank i; with head
    parallelism, each rank of its head group owns an equal part of its rows, in order.

    Args:
        slices: for each chunk the first token and the end (exclusive) of each slice, ascending.

    Attributes:
        starts, ends: the same, int64 [slices] for each chunk. Neighbouring slices are joined.
        length: tokens of the batch.

    Raises:
        UsageError: a token is in no chunk or in two, slices do not ascend, or chunks have different numbers of rows.
    """

    def __init__(self, slices: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.starts: list[np.ndarray] = []
        self.ends: list[np.ndarray] = []
        for chunk in slices:
            starts, ends = np.array(list(chunk), np.int64).reshape(-1, 2).T
            joined = starts[1:] == ends[:-1]
            self.starts.append(starts[np.insert(~joined, 0, True)] if len(starts) else starts)
            self.ends.append(ends[np.append(~joined, True)] if len(ends) else ends)
        self.counts = tuple(int((e - s).sum()) for s, e in zip(self.starts, self.ends, strict=True))
        self.length = sum(self.counts)
        self._check()
        self._sets: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _check(self) -> None:
        if len(set(self.counts)) != 1 or not self.length:
            raise UsageError(
                f"placement: chunks of {list(self.counts)} tokens; give each chunk equally many, 1 or more"
            )
        for chunk, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True)):
            if (starts >= ends).any() or (starts[1:] < ends[:-1]).any():
                raise UsageError(f"placement: the slices of chunk {chunk} do not ascend, such as (0, 4), (8, 12)")
        order = sorted(chain.from_iterable(zip(s.tolist(), e.tolist(), strict=True) for s, e in self._both()))
        gaps = [(end, start) for (_, end), (start, _) in pairwise(order) if end != start]
        if order[0][0] != 0 or gaps:
            end, start = gaps[0] if gaps else (0, order[0][0])
            wrong = (
                f"{end} to {start - 1} are in no chunk" if start > end else f"{start} to {end - 1} are in two chunks"
            )
            raise UsageError(f"placement: tokens {wrong}; give each token to one chunk")

    def _both(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [*zip(self.starts, self.ends, strict=True)]

    @property
    def n(self) -> int:
        """The number of chunks."""
        return len(self.counts)

    def rows(self, chunk: int) -> int:
        """Tokens of `chunk`."""
        return self.counts[chunk]

    def positions(self, chunk: int) -> Tensor:
        """The tokens of `chunk`, int64 [rows], ascending."""
        starts, ends = self.starts[chunk], self.ends[chunk]
        lengths = ends - starts
        before = np.cumsum(lengths) - lengths  # rows before each slice
        return torch.from_numpy(np.repeat(starts - before, lengths) + np.arange(self.counts[chunk]))

    def of_rank(self, rank_chunk: int, ranks: int) -> Tensor:
        """The tokens of the rank that owns chunk `rank_chunk` of `ranks`, a multiple of n: int64 [length / ranks]."""
        each = ranks // self.n
        whole = self.positions(rank_chunk // each)
        return whole.chunk(each)[rank_chunk % each]

    def before(self, chunks: tuple[int, ...], bounds: np.ndarray) -> np.ndarray:
        """The number of rows of `chunks` with a token below each of `bounds` (int64): int32."""
        starts, lengths, first_rows = self._set(chunks)
        at = np.searchsorted(starts, bounds, side="right") - 1
        inside = np.clip(bounds - starts[at], 0, lengths[at])  # at is -1 before the first slice
        return np.where(at < 0, 0, first_rows[at] + inside).astype(np.int32)

    def _set(self, chunks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The slices of several chunks, ascending: first tokens, lengths, and rows before each."""
        if chunks not in self._sets:
            starts = np.concatenate([self.starts[chunk] for chunk in chunks])
            lengths = np.concatenate([self.ends[chunk] for chunk in chunks]) - starts
            order = np.argsort(starts)
            starts, lengths = starts[order], lengths[order]
            self._sets[chunks] = starts, lengths, np.cumsum(lengths) - lengths
        return self._sets[chunks]

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """All slices ascending: their first tokens, and the chunk of each."""
        starts = np.concatenate(self.starts)
        chunks = np.repeat(np.arange(self.n), [len(of_chunk) for of_chunk in self.starts])
        order = np.argsort(starts)
        return starts[order], chunks[order]

    def shard(self, x: Tensor, rank_chunk: int, ranks: int, dim: int = 0) -> Tensor:
        """The tokens of a rank (`of_rank`) of the whole batch: [..., length, ...] to [..., length / ranks, ...]."""
        return x.index_select(dim, self.of_rank(rank_chunk, ranks).to(x.device))

    def unshard(self, parts: list[Tensor]) -> Tensor:
        """The whole batch [length, ...] from the parts of all ranks, in the order of their chunks."""
        whole = parts[0].new_empty(self.length, *parts[0].shape[1:])
        for chunk, part in enumerate(parts):
            whole[self.of_rank(chunk, len(parts)).to(part.device)] = part
        return whole

    def digest(self) -> int:
        """A number that differs for other placements: 63 bits."""
        content = hashlib.blake2b(digest_size=8)
        for starts, ends in self._both():
            content.update(len(starts).to_bytes(8, "little") + starts.tobytes() + ends.tobytes())
        return int.from_bytes(content.digest(), "little") >> 1
