"""A batch's own placement: which rank holds which of its tokens. The static layouts are in `layout.py`."""

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .slices import Slices, joined


class Placement(Slices):
    """The chunks of a batch whose samples are laid end to end. A chunk is a list of slices of the batch.

    All chunks have equally many rows. Chunk i belongs to context rank i; with head parallelism, each rank of its head
    group owns an equal part of its rows, in order.

    Args:
        slices: for each chunk the first token and the end (exclusive) of each slice, ascending.

    Attributes:
        length: tokens of the batch.

    Raises:
        UsageError: a token is in no chunk or in two, slices do not ascend, or chunks have different numbers of rows.
    """

    def __init__(self, slices: Sequence[Sequence[tuple[int, int]] | np.ndarray]) -> None:
        of_chunks = []
        for chunk, given in enumerate(slices):
            ranges = np.asarray(given, np.int64).reshape(-1, 2)
            starts, ends = ranges.T
            if (starts >= ends).any() or (starts[1:] < ends[:-1]).any():
                raise UsageError(f"placement: the slices of chunk {chunk} do not ascend, such as (0, 4), (8, 12)")
            starts, ends = joined(ranges).T
            of_chunks.append(np.stack((starts, np.ones_like(starts), ends - starts), 1))
        super().__init__(of_chunks)
        self.length = sum(self.counts)
        self._positions: dict[int, Tensor] = {}  # each tensor of a batch asks for those of its rank
        self._check()

    def _check(self) -> None:
        if len(set(self.counts)) != 1 or not self.length:
            raise UsageError(f"placement: chunks of {[*self.counts]} tokens; give each chunk equally many, 1 or more")
        everything = np.concatenate(self.of_chunks)
        start, _, count = everything[np.argsort(everything[:, 0])].T
        expected = np.cumsum(count) - count  # if the slices follow each other
        wrong = np.flatnonzero(start != expected)
        if len(wrong):
            first = wrong[0]
            if start[first] > expected[first]:
                place = f"{expected[first]} to {start[first] - 1} are in no chunk"
            else:
                place = f"{start[first]} to {expected[first] - 1} are in two chunks"
            raise UsageError(f"placement: tokens {place}; give each token to one chunk")

    def positions(self, chunk: int) -> Tensor:
        """As `Slices.positions`, computed once: do not change them."""
        if chunk not in self._positions:
            self._positions[chunk] = super().positions(chunk)
        return self._positions[chunk]

    def of_rank(self, rank_chunk: int, ranks: int) -> Tensor:
        """The tokens of the rank that owns chunk `rank_chunk` of `ranks`, a multiple of n: int64 [length / ranks]."""
        each = ranks // self.n
        return self.positions(rank_chunk // each).chunk(each)[rank_chunk % each]

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """All slices ascending: their first tokens, and the chunk of each."""
        starts = np.concatenate([of[:, 0] for of in self.of_chunks])
        chunks = np.repeat(np.arange(self.n), [len(of) for of in self.of_chunks])
        order = np.argsort(starts)
        return starts[order], chunks[order]

    def shard(self, x: Tensor, rank_chunk: int, ranks: int, dim: int = 0) -> Tensor:
        """The tokens of a rank (`of_rank`) of the whole batch: [..., length, ...] to [..., length / ranks, ...].

        Raises:
            UsageError: the tensor has another number of tokens.
        """
        if x.shape[dim] != self.length:
            raise UsageError(
                f"placement of {self.length} tokens: a tensor {list(x.shape)} has {x.shape[dim]} in dimension {dim}; "
                "lay the samples of the batch end to end"
            )
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
        for of_chunk in self.of_chunks:
            content.update(len(of_chunk).to_bytes(8, "little") + np.ascontiguousarray(of_chunk).tobytes())
        return int.from_bytes(content.digest(), "little") >> 1
