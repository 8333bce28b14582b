"""The rows of a chunk that a rank needs. Only they are sent.

A rank needs a row of queries if the row sees a key of a block that the rank computes, and a row of keys if such a query
sees it. It also needs the rows that it passes on. Of a partial result it has the rows that its blocks compute, and
those of the partials that it received. A plan has no sizes: the row sets follow from the plan and the mask, and every
rank finds the same ones.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import RowSet, Slices, joined, members, size_of

from .ir import OF_KEYS, PARTIAL, Key, Message, Plan, Recv, T, Transfer

_NO_ROWS = np.empty((0, 2), np.int64)


@dataclass
class _Uses:
    """What a rank does with a chunk of a tensor: its blocks, its peers, and whether a collective has it."""

    others: list[int] = field(default_factory=list)  # the other chunks of its blocks
    peers: list[int] = field(default_factory=list)  # to which it sends an input, or from which it receives a partial
    whole: bool = False


class RowSets:
    """The row sets of a plan's chunks under a mask.

    Args:
        plan: its steps are read for the ranks that exchange chunks with the rank that is asked for.
        q, kv: the chunks of queries and of keys.

    Attributes:
        of_ranks: a place where the runtime keeps what it makes of the sets for its ranks.
    """

    def __init__(self, plan: Plan, mask: Mask, q: Slices, kv: Slices) -> None:
        self.plan, self.mask, self.q, self.kv = plan, mask, q, kv
        self.of_ranks: dict[tuple, Any] = {}
        self._uses: dict[int, dict[Key, _Uses]] = {}
        self._sets: dict[tuple[int, T, int], RowSet] = {}
        self._spans: dict[tuple[bool, int], tuple[np.ndarray, np.ndarray]] = {}
        self._in_blocks: dict[tuple[int, T, int], RowSet] = {}

    def rows(self, rank: int, tensor: T, chunk: int) -> RowSet:
        """The rows of a chunk of a tensor that `rank` has at any time."""
        key = rank, tensor, chunk
        if key not in self._sets:
            self._follow(rank, tensor, chunk)
        return self._sets[key]

    def _follow(self, rank: int, tensor: T, chunk: int) -> None:
        """Finds the rows of a rank, after those of the ranks behind it, or before it, on the way of the chunk."""
        path, met = [rank], set[int]()  # not by recursion: a ring is longer than Python lets functions call each other
        while path:
            at = path[-1]
            key, uses = (at, tensor, chunk), self._of_rank(at)[tensor, chunk]
            if key not in self._sets:
                self._sets[key] = self._all(tensor, chunk)  # also if a chunk goes round and comes back
                if at != chunk and not uses.whole:
                    met.add(at)
                    path += [peer for peer in uses.peers if (peer, tensor, chunk) not in self._sets]
            if path[-1] == at:
                path.pop()
                if at in met:
                    met.remove(at)
                    passed = [self._sets[peer, tensor, chunk] for peer in uses.peers]
                    self._sets[key] = _union([self.in_blocks(at, tensor, chunk), *passed])

    def in_blocks(self, rank: int, tensor: T, chunk: int) -> RowSet:
        """The rows of a chunk that the blocks of `rank` compute with; all rows of its own chunk."""
        of_keys = tensor in OF_KEYS
        if rank == chunk:
            return self._all(tensor, chunk)
        read = T.KV if of_keys else self.plan.starts[0]
        key = rank, read, chunk
        if key not in self._in_blocks:
            seen = [self._needed(of_keys, chunk, other) for other in self._of_rank(rank)[read, chunk].others]
            self._in_blocks[key] = _union(seen)
        return self._in_blocks[key]

    def carried(self, tensor: T, chunk: int, sender: int, receiver: int) -> int:
        """The number of rows in a message: those that the receiver needs, or the sender's of a partial result."""
        return size_of(self.rows(sender if tensor in PARTIAL else receiver, tensor, chunk))

    def share(self, transfer: Transfer) -> float:
        """The share of a chunk's rows that a transfer between ranks of the steps carries."""
        tensor, chunk, sender, receiver, _ = transfer
        return self.carried(tensor, chunk, sender, receiver) / size_of(self._all(tensor, chunk))

    def least_share(self, transfer: Transfer) -> float:
        """The share that the blocks at its end need, or of a partial at its beginning: found without other ranks."""
        tensor, chunk, sender, receiver, _ = transfer
        of_blocks = self.in_blocks(sender if tensor in PARTIAL else receiver, tensor, chunk)
        return size_of(of_blocks) / size_of(self._all(tensor, chunk))

    def chunks(self, rank: int) -> tuple[Slices, Slices]:
        """The query and key chunks, with only the rows that the blocks of `rank` compute with."""
        query = self.plan.starts[0]
        uses = self._of_rank(rank)
        computed = [key for key, use in uses.items() if use.others] + [(query, rank), (T.KV, rank)]
        queries = {chunk: self.in_blocks(rank, query, chunk) for tensor, chunk in computed if tensor is query}
        keys = {chunk: self.in_blocks(rank, T.KV, chunk) for tensor, chunk in computed if tensor is T.KV}
        return self.q.narrowed(queries), self.kv.narrowed(keys)

    def places(self, inner: RowSet, outer: RowSet) -> np.ndarray | None:
        """The indices of the rows of `inner` among those of `outer`, int64; None if they are the same."""
        if np.array_equal(inner, outer):
            return None
        return np.searchsorted(members(outer), members(inner))

    def _all(self, tensor: T, chunk: int) -> RowSet:
        return self._everything[tensor in OF_KEYS][chunk]

    @cached_property
    def _everything(self) -> tuple[list[RowSet], list[RowSet]]:
        of_queries = [np.array([(0, count)], np.int64) for count in self.q.counts]
        of_keys = [np.array([(0, count)], np.int64) for count in self.kv.counts]
        return of_queries, of_keys

    def _needed(self, of_keys: bool, chunk: int, other: int) -> RowSet:
        """The rows of a chunk that see, or are seen by, a row of the other chunk."""
        key = of_keys, other
        if key not in self._spans:
            spans = self.mask.spans(self.q, other) if of_keys else self.mask.spans_of_keys(self.kv, other)
            self._spans[key] = spans
        return (self.kv if of_keys else self.q).range_of(chunk, *self._spans[key])

    def _of_rank(self, rank: int) -> dict[Key, _Uses]:
        if rank not in self._uses:
            uses: dict[Key, _Uses] = defaultdict(_Uses)
            query = self.plan.starts[0]
            for step in self.plan.steps[rank]:
                for op in step.comm:
                    if isinstance(op, Message):
                        if isinstance(op, Recv) == (op.tensor in PARTIAL):
                            uses[op.tensor, op.chunk].peers.append(op.peer)
                    else:
                        for chunk in op.chunks:
                            uses[op.tensor, chunk].whole = True
                for block in step.attend:
                    for q, kv in block.pairs(self.plan.visible_pairs):
                        uses[query, q].others.append(kv)
                        uses[T.KV, kv].others.append(q)
            self._uses[rank] = uses
        return self._uses[rank]


def _union(sets: list[RowSet]) -> RowSet:
    """The rows that are in any of the sets. Most sets of a window are empty, and a union takes long."""
    some = [rows for rows in sets if len(rows)]
    if len(some) < 2:
        return some[0] if some else _NO_ROWS
    return joined(np.concatenate(some))
