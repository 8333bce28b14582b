"""The rows of a chunk that a rank needs. Only they are sent.

A rank needs a row of queries if the row sees a key of a block that the rank computes, and a row of keys if such a query
sees it. It also needs the rows that it passes on. Of a partial result it has the rows that its blocks compute, and
those of the partials that it received. A plan has no sizes: the row sets follow from the plan and the mask, and every
rank finds the same ones.
"""

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import RowSet, Slices, joined, members, size_of

from .ir import OF_KEYS, PARTIAL, Comm, Key, Message, Plan, Recv, T, Transfer

_NO_ROWS = np.empty((0, 2), np.int64)


class MetRows:
    """The rows of a chunk that meet another chunk under a mask. They are the same for all plans, so these share them.

    Args:
        mask: which queries see which keys.
        q, kv: the chunks of queries and of keys.
    """

    def __init__(self, mask: Mask, q: Slices, kv: Slices) -> None:
        self.mask, self.q, self.kv = mask, q, kv
        self.whole = _all_rows(q), _all_rows(kv)
        self._spans: dict[tuple[bool, int], tuple[np.ndarray, np.ndarray]] = {}
        self._rows: dict[tuple[bool, int, int], RowSet] = {}

    def all(self, tensor: T, chunk: int) -> RowSet:
        """All rows of a chunk."""
        return self.whole[tensor in OF_KEYS][chunk]

    def count(self, tensor: T, chunk: int) -> int:
        """The number of all rows of a chunk."""
        return (self.kv if tensor in OF_KEYS else self.q).rows[chunk]

    def of(self, of_keys: bool, chunk: int, other: int) -> RowSet:
        """The rows of a chunk of keys that a query of another chunk sees, or of queries that see a key of it."""
        key = of_keys, chunk, other
        if key not in self._rows:
            spans = self._spans_of(of_keys, other)
            self._rows[key] = (self.kv if of_keys else self.q).range_of(chunk, *spans)
        return self._rows[key]

    def _spans_of(self, of_keys: bool, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        key = of_keys, chunk
        if key not in self._spans:
            spans = self.mask.spans(self.q, chunk) if of_keys else self.mask.spans_of_keys(self.kv, chunk)
            self._spans[key] = spans
        return self._spans[key]


def _all_rows(chunks: Slices) -> list[RowSet]:
    return [np.array([(0, count)], np.int64) for count in chunks.rows]


@dataclass
class _Uses:
    """What a rank does with chunks.

    Attributes:
        others: for an input of its blocks, the chunks of the other input that it meets there.
        peers: to which it sends an input, or from which it receives a partial.
        whole: what a collective has.
    """

    others: dict[Key, list[int]] = field(default_factory=dict)
    peers: dict[Key, list[int]] = field(default_factory=dict)
    whole: set[Key] = field(default_factory=set)

    def add(self, op: Comm) -> None:
        if not isinstance(op, Message):
            self.whole.update([(op.tensor, chunk) for chunk in op.chunks])
        elif isinstance(op, Recv) == (op.tensor in PARTIAL):
            self.peers.setdefault((op.tensor, op.chunk), []).append(op.peer)


class RowSets:
    """The row sets of a plan's chunks under a mask.

    Args:
        plan: its steps are read for the ranks that exchange chunks with the rank that is asked for.
        met: the rows that its blocks compute with.

    Attributes:
        of_ranks: what the runtime makes of the sets for its ranks, kept here for all layers.
    """

    def __init__(self, plan: Plan, met: MetRows) -> None:
        self.plan, self.met = plan, met
        self.of_ranks: dict[tuple, Any] = {}
        self._uses: dict[int, _Uses] = {}
        self._sets: dict[Key, dict[int, RowSet]] = defaultdict(dict)  # by rank
        self._in_blocks: dict[tuple[int, T, int], RowSet] = {}

    def rows(self, rank: int, tensor: T, chunk: int) -> RowSet:
        """The rows of a chunk of a tensor that `rank` has at any time."""
        of_chunk = self._sets[tensor, chunk]
        if rank not in of_chunk:
            self._follow(rank, tensor, chunk, of_chunk)
        return of_chunk[rank]

    def _follow(self, rank: int, tensor: T, chunk: int, found: dict[int, RowSet]) -> None:
        """Finds the rows of a rank, after those of the ranks whose rows they include."""
        all_rows = self.met.all(tensor, chunk)
        for at in self._included_first(rank, (tensor, chunk), found):
            if self._has_all(at, (tensor, chunk)):
                found[at] = all_rows
                continue
            rows = [self.in_blocks(at, tensor, chunk)]
            for peer in self._of_rank(at).peers.get((tensor, chunk), []):
                rows.append(found.get(peer, all_rows))  # not found yet: the chunk goes round and comes back
            found[at] = _union(rows)

    def _included_first(self, rank: int, key: Key, found: Container[int]) -> list[int]:
        """A rank, and those on the way of the chunk whose rows it includes and that are not found yet: they come first.

        Not by recursion: a ring has more ranks than Python nests calls.
        """
        order, entered = list[int](), set[int]()
        path = [(rank, False)]  # with whether those that it includes were entered
        while path:
            at, is_last = path.pop()
            if is_last:
                order.append(at)
            elif at not in entered and at not in found:
                entered.add(at)
                path.append((at, True))
                if not self._has_all(at, key):
                    path += [(peer, False) for peer in self._of_rank(at).peers.get(key, [])]
        return order

    def _has_all(self, rank: int, key: Key) -> bool:
        """Whether a rank has all rows of a chunk: of its own, and of those of collectives."""
        return rank == key[1] or key in self._of_rank(rank).whole

    def in_blocks(self, rank: int, tensor: T, chunk: int) -> RowSet:
        """The rows of a chunk that the blocks of `rank` compute with; all rows of its own chunk."""
        if rank == chunk:
            return self.met.all(tensor, chunk)
        of_keys = tensor in OF_KEYS
        read = T.KV if of_keys else self.plan.inputs[0]
        others = self._of_rank(rank).others.get((read, chunk))
        if not others:
            return _NO_ROWS
        key = rank, read, chunk
        if key not in self._in_blocks:
            self._in_blocks[key] = _union([self.met.of(of_keys, chunk, other) for other in others])
        return self._in_blocks[key]

    def carried(self, tensor: T, chunk: int, sender: int, receiver: int) -> int:
        """The number of rows in a message: those that the receiver needs, or the sender's of a partial result."""
        return size_of(self.rows(sender if tensor in PARTIAL else receiver, tensor, chunk))

    def share(self, transfer: Transfer) -> float:
        """The share of a chunk's rows that a transfer between ranks of the steps carries."""
        tensor, chunk, sender, receiver, _ = transfer
        return self.carried(tensor, chunk, sender, receiver) / self.met.count(tensor, chunk)

    def least_share(self, transfer: Transfer) -> float:
        """The share that the blocks at its end need, or of a partial at its beginning: found without other ranks."""
        tensor, chunk, sender, receiver, _ = transfer
        of_blocks = self.in_blocks(sender if tensor in PARTIAL else receiver, tensor, chunk)
        return size_of(of_blocks) / self.met.count(tensor, chunk)

    def chunks(self, rank: int) -> tuple[Slices, Slices]:
        """The query and key chunks, with only the rows that the blocks of `rank` compute with."""
        query = self.plan.inputs[0]
        computed = [*self._of_rank(rank).others, (query, rank), (T.KV, rank)]
        queries = {chunk: self.in_blocks(rank, query, chunk) for tensor, chunk in computed if tensor is query}
        keys = {chunk: self.in_blocks(rank, T.KV, chunk) for tensor, chunk in computed if tensor is T.KV}
        return self.met.q.narrowed(queries), self.met.kv.narrowed(keys)

    def indices(self, inner: RowSet, outer: RowSet) -> np.ndarray | None:
        """The indices of the rows of `inner` among those of `outer`, int64; None if they are the same."""
        if np.array_equal(inner, outer):
            return None
        return np.searchsorted(members(outer), members(inner))

    def _of_rank(self, rank: int) -> _Uses:
        if rank not in self._uses:
            self._uses[rank] = uses = _Uses()
            query = self.plan.inputs[0]
            for step in self.plan.steps[rank]:
                for op in step.comm:
                    uses.add(op)
                for block in step.attend:
                    for q, kv in block.pairs(self.plan.visible_pairs):
                        uses.others.setdefault((query, q), []).append(kv)
                        uses.others.setdefault((T.KV, kv), []).append(q)
        return self._uses[rank]


def _union(sets: list[RowSet]) -> RowSet:
    """The rows that are in any of the sets. Most sets of a window are empty, and a union takes long."""
    some = [rows for rows in sets if len(rows)]
    if len(some) < 2:
        return some[0] if some else _NO_ROWS
    return joined(np.concatenate(some))
