"""A batch's own placement: which rank holds which of its tokens. The static layouts are in `layout.py`."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from megatron.context_parallel.errors import UsageError

from .slices import Slices, numbered


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
        of_chunks = [np.asarray(chunk, np.int64).reshape(-1, 2) for chunk in slices]
        counts = np.array([len(chunk) for chunk in of_chunks], np.int64)
        chunks = np.repeat(np.arange(len(of_chunks)), counts)
        starts, ends = np.concatenate([np.empty((0, 2), np.int64), *of_chunks]).T
        follows = np.diff(chunks, prepend=-1) == 0  # a slice of the same chunk
        before = np.append(0, ends[:-1])
        wrong = chunks[(starts >= ends) | follows & (starts < before)]
        if len(wrong):
            raise UsageError(f"placement: the slices of chunk {wrong[0]} do not ascend, such as (0, 4), (8, 12)")
        first = ~(follows & (starts == before))  # slices that touch become one
        last = np.append(first[1:], True)[: len(first)]
        starts, ends, chunks = starts[first], ends[last], chunks[first]
        bounds = np.searchsorted(chunks, np.arange(len(of_chunks) + 1)).tolist()
        joined = np.stack((starts, np.ones_like(starts), ends - starts), 1)
        super().__init__([joined[begin:end] for begin, end in pairwise(bounds)])
        self.length = sum(self.rows)
        self._positions: dict[int, Tensor] = {}  # each tensor of a batch asks for those of its rank
        order = np.argsort(starts)
        self._starts, self._owners = starts[order], chunks[order]
        self._check(ends[order])

    def _check(self, ends: np.ndarray) -> None:
        if len(set(self.rows)) != 1 or not self.length:
            raise UsageError(f"placement: chunks of {[*self.rows]} tokens; give each chunk equally many, 1 or more")
        rows = ends - self._starts
        expected = np.cumsum(rows) - rows  # if the slices follow each other
        wrong = np.flatnonzero(self._starts != expected)
        if len(wrong):
            start, expected = self._starts[wrong[0]], expected[wrong[0]]
            if start > expected:
                place = f"{expected} to {start - 1} are in no chunk"
            else:
                place = f"{start} to {expected - 1} are in two chunks"
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

    def met(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which slices each span of tokens low .. high - 1 meets: int64 [spans] each.

        Returns:
            for each meeting, span after span: the span, the chunk of the slice, and the tokens of the slice in the
            span. int64 [meetings] each.
        """
        begin = np.searchsorted(self._starts, low, side="right") - 1
        count = np.searchsorted(self._starts, high, side="left") - begin
        span = np.repeat(np.arange(len(begin)), count)
        met = np.repeat(begin, count) + numbered(count)  # slices
        ends = np.append(self._starts[1:], self.length)
        tokens = np.minimum(ends[met], high[span]) - np.maximum(self._starts[met], low[span])
        return span, self._owners[met], tokens

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """All slices ascending: their first tokens, and the chunk of each."""
        return self._starts, self._owners

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
