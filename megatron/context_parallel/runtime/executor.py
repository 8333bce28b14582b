"""Executes a plan on one rank: launches communication, computes blocks meanwhile, merges partials, frees chunks.

Inside, tensors are folded: queries [s, B, G, d], keys and values [s, B, d], with B = batch × kv_heads and G = heads /
kv_heads. These are views of Megatron's [s, b, heads, d], and rows stay contiguous for sending.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.plan.ir import IN_FLIGHT, PARTIAL, AllGather, Key, Plan, ReduceScatter, T
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.plan.schedule import MessageBatch, ScheduledBlock, schedule

from .blocks import ALL, Blocks, HeadPiece, RowSlice
from .buffers import Value, empty
from .comm.flight_recorder import recorder
from .comm.transport import Program, Transport, Work
from .profiler_ranges import marks
from .rank_rows import Where, rows_of_rank


@dataclass(frozen=True)
class Problem:
    """The inputs that are the same on all ranks: blocks, key/value heads of the model, kernel and scores.

    Attributes:
        row_sets: the rows that are sent; None: whole chunks.
        ranges: with rounds of tokens, the blocks of each part of the queries, with the keys up to its end.
        value_dim: of outputs; None: that of the values as they are stored.
    """

    blocks: Blocks
    kv_heads: int
    kernel: Kernel
    scores: Scores
    row_sets: RowSets | None = None
    ranges: tuple[Blocks, ...] = ()
    value_dim: int | None = None

    def of_range(self, number: int) -> "Problem":
        """The problem of a part of the queries; itself without rounds of tokens."""
        return replace(self, blocks=self.ranges[number], row_sets=None) if self.ranges else self


class Executor:
    """One execution of one rank's part of a plan."""

    def __init__(self, plan: Plan, rank: int, problem: Problem, transport: Transport, inputs: dict[T, Value]) -> None:
        self.plan, self.rank, self.problem, self.transport = plan, rank, problem, transport
        self.held: dict[Key, Value] = {(t, rank): value for t, value in inputs.items()}
        self.arriving: dict[Key, list[tuple[Work, int, Value]]] = defaultdict(list)  # with the peer that sends it
        self.launched: dict[str, deque[Work]] = defaultdict(deque)
        self.gathered_keys: Value | None = None  # of several chunks, while successive blocks use the same ones
        self.gathered_key_grads: Value | None = None  # their gradients
        self.q = inputs[plan.inputs[0]][0]
        self.rows = rows_of_rank(problem.row_sets, rank, problem.blocks, self.q.device)
        self.blocks = self.rows.blocks
        self.k, self.v = inputs[T.KV]
        self.wide = torch.promote_types(self.q.dtype, torch.float32)
        self.widen = Tensor.double if self.wide is torch.float64 else Tensor.float  # faster than `to`
        self.sizes = *self.q.shape[1:], problem.value_dim or self.v.shape[-1]

    def run(self, meanwhile: Iterable[Work] = ()) -> Program[None]:
        """Runs the steps. Yields each communication that it must wait for, and after the first block `meanwhile`."""
        steps = schedule(self.plan, self.rank)
        for s, step in enumerate(steps):
            recorder.at_step(s)
            for op in step.collectives:
                yield from self._all_gather(op) if isinstance(op, AllGather) else self._reduce_scatter(op)
            if step.messages:
                yield from self._launch(step.messages)
            for block in step.blocks:
                for key in block.needed:
                    if key in self.arriving:
                        yield from self._wait_for(key)
                if marks.on:
                    with marks.block(block.attend):
                        self._compute(block)
                else:
                    self._compute(block)
            self._free(step.freed)
            if step.blocks:
                yield from meanwhile
        recorder.at_step(len(steps))
        if self.plan.rounds_overlap:  # the next round is computed before the results of this one are there
            self._free([(t, self.rank) for t in self.plan.inputs])
            self.q, self.k, self.v = (x[:0].clone() for x in (self.q, self.k, self.v))  # for their dtype and device

    def results(self) -> Program[dict[T, Value]]:
        """Waits for what the steps launched last. Returns the final tensors of the plan."""
        for t in self.plan.results:
            if (t, self.rank) in self.arriving:
                yield from self._wait_for((t, self.rank))
        for works in self.launched.values():
            yield from works
        return {t: self._pop_partial((t, self.rank)) for t in self.plan.results}

    # -- communication -----------------------------------------------------------------------------------------

    def _launch(self, messages: tuple[MessageBatch, ...]) -> Program[None]:
        """Launches a batch on each channel, when all data that they send has arrived."""
        arriving = self.arriving
        leaving = []
        for batch in messages:
            sends: list[tuple[int, Tensor]] = []
            for key, peer in batch.sends:
                if key in arriving:
                    yield from self._wait_for(key)
                sends += zip(repeat(peer), self._value_for(key, peer))
            leaving.append(sends)
        for batch, sends in zip(messages, leaving, strict=True):
            values: list[tuple[Key, int, Value]] = []
            receives: list[tuple[int, Tensor]] = []
            for key, peer in batch.receives:
                value = self._buffer(key[0], self.rows.received(*key, peer))
                values.append((key, peer, value))
                receives += zip(repeat(peer), value)
            launched = self.launched[batch.channel]
            if len(launched) >= IN_FLIGHT:
                yield from self._wait_for_oldest(batch.channel)
            work = self.transport.exchange(batch.channel, sends, receives)
            if marks.on:
                work = marks.batch(batch.channel, batch.ops, work)
            launched.append(work)
            for key, peer, value in values:
                arriving[key].append((work, peer, value))

    def _all_gather(self, op: AllGather) -> Program[None]:
        """Gathers into one buffer; each chunk becomes a view of it."""
        own = op.tensor, op.chunks[op.group.index(self.rank)]
        if own in self.arriving:
            yield from self._wait_for(own)
        mine = self.held[own]
        yield from self._wait_for_oldest(op.channel)
        chunks = self.problem.blocks.chunks(op.tensor)
        rows = tuple(chunks.rows[chunk] for chunk in op.chunks)
        everyone = [x.new_empty((sum(rows), *x.shape[1:])) for x in mine]
        tensors = list(zip(mine, everyone, strict=True))
        work = marks.batch(op.channel, (op,), self.transport.all_gather(op.channel, op.group, rows, tensors))
        self.launched[op.channel].append(work)
        parts = zip(*(x.split(rows) for x in everyone), strict=True)
        for peer, chunk, value in zip(op.group, op.chunks, parts, strict=True):
            if peer != self.rank:
                self.arriving[op.tensor, chunk].append((work, peer, value))

    def _reduce_scatter(self, op: ReduceScatter) -> Program[None]:
        """Each rank gets the partials of its chunk from all other ranks, or their sum from the transport."""
        index = op.group.index(self.rank)
        own = op.tensor, op.chunks[index]
        can_reduce = self._can_reduce(op)
        for chunk in op.chunks:
            key = op.tensor, chunk
            if key in self.arriving and (can_reduce or key != own):
                yield from self._wait_for(key)
        if can_reduce:
            yield from self._library_reduce_scatter(op, own, op.group[index - 1])
        else:
            yield from self._exchange_partials(op, own, index)

    def _can_reduce(self, op: ReduceScatter) -> bool:
        """Whether the transport can sum gradients, and all of their chunks have the same number of rows."""
        if not (self.plan.can_reduce(op) and self.transport.can_reduce):
            return False
        rows = self.problem.blocks.chunks(op.tensor).rows
        return len({rows[chunk] for chunk in op.chunks}) == 1

    def _library_reduce_scatter(self, op: ReduceScatter, own: Key, peer: int) -> Program[None]:
        """A reduce-scatter by the transport, without a buffer for each other rank."""
        parts = [self._partial_to_send((op.tensor, chunk)) for chunk in op.chunks]
        yield from self._wait_for_oldest(op.channel)
        mine = self._empty(*own)
        together = [torch.cat(of_chunks) for of_chunks in zip(*parts, strict=True)]
        tensors = list(zip(mine, together, strict=True))
        work = marks.batch(op.channel, (op,), self.transport.reduce_scatter(op.channel, op.group, tensors))
        self.launched[op.channel].append(work)
        self.arriving[own].append((work, peer, mine))

    def _exchange_partials(self, op: ReduceScatter, own: Key, index: int) -> Program[None]:
        """A reduce-scatter with messages and local sums: gloo's own reduce-scatter sends twice the bytes."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        values: list[tuple[int, Value]] = []
        size = len(op.group)
        for k in range(1, size):
            after = (index + k) % size
            before = op.group[(index - k) % size]
            sends += zip(repeat(op.group[after]), self._partial_to_send((op.tensor, op.chunks[after])))
            value = self._buffer(op.tensor, self.rows.count(*own))
            values.append((before, value))
            receives += zip(repeat(before), value)
        yield from self._wait_for_oldest(op.channel)
        work = marks.batch(op.channel, (op,), self.transport.exchange(op.channel, sends, receives))
        self.launched[op.channel].append(work)
        self.arriving[own] += [(work, peer, value) for peer, value in values]

    def _wait_for_oldest(self, channel: str) -> Program[None]:
        works = self.launched[channel]
        while len(works) >= IN_FLIGHT:
            done = works.popleft()
            yield done
            self._merge_arrived(done)

    def _merge_arrived(self, done: Work) -> None:
        """Merges the partials of a complete batch. Otherwise they would occupy memory until they are read."""
        for key in [key for key in self.arriving if key[0] in PARTIAL]:
            waiting = self.arriving.pop(key)
            for work, peer, value in waiting:
                if work is done:
                    self._keep_or_merge(key, value, peer)
            if rest := [entry for entry in waiting if entry[0] is not done]:
                self.arriving[key] = rest

    def _wait_for(self, key: Key) -> Program[None]:
        """Waits for all messages for `key`, and merges them."""
        for work, peer, value in self.arriving.pop(key):
            recorder.need(*key, self.transport.world_rank(peer))
            yield work
            self._keep_or_merge(key, value, peer)

    def _keep_or_merge(self, key: Key, value: Value, peer: int) -> None:
        """Keeps a received chunk. A partial is merged with the one that is there."""
        tensor, _ = key
        where = self.rows.where(key, peer) if tensor in PARTIAL else None
        if tensor not in PARTIAL or (key not in self.held and where is None):
            self.held[key] = self._wide(value) if tensor in (T.DQ, T.DKV) else value
        elif tensor is T.O:
            out, lse = value
            self._merge_outputs(key, where, [(ALL, out, lse)])
        else:
            self._add_gradients(key, where, value)

    def _merge_outputs(self, key: Key, where: Where, results: Iterable[tuple[RowSlice, Tensor, Tensor]]) -> None:
        """Merges partial outputs, each for some of the rows `where` of the partial of this rank."""
        partial = self._merge_target(key)
        some = partial if where is None else tuple([x[where] for x in partial])
        for rows, out, lse in results:
            merge(_slice(some[0], rows), _slice(some[1], rows), out, lse)
        if isinstance(where, Tensor):  # `some` are copies
            for x, merged in zip(partial, some, strict=True):
                x[where] = merged

    def _value_for(self, key: Key, peer: int) -> Value:
        """The value to send to a peer."""
        if key[0] in PARTIAL:
            return self._partial_to_send(key)
        where = self.rows.where(key, peer)
        return self.held[key] if where is None else tuple([x[where] for x in self.held[key]])

    def _partial_to_send(self, key: Key) -> Value:
        """Removes a partial, to send it in float32 or wider, or in the model's dtype if the plan says so."""
        value = self._pop_partial(key)
        if not self.plan.partials_in_16_bits:
            return self._wide(value)
        if key[0] is T.O:
            out, lse = value
            return out.to(self.q.dtype), lse
        return tuple([x.to(self.q.dtype) for x in value])

    def _wide(self, value: Value) -> Value:
        """A partial in float32 or wider."""
        return tuple(map(self.widen, value))

    def _pop_partial(self, key: Key) -> Value:
        """Removes a partial, to send it or to return it. It is zero if nothing was added to it."""
        value = self.held.pop(key, None) or self._zero(*key)
        return (value[0], self.widen(value[1]).contiguous()) if key[0] is T.O else value

    def _free(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.held.pop(key, None)

    # -- values ------------------------------------------------------------------------------------------------

    def _buffer(self, tensor: T, rows: int) -> Value:
        """Where a message is received."""
        if tensor is T.KV:
            return tuple([x.new_empty(rows, *x.shape[1:]) for x in (self.k, self.v)])
        return empty(tensor, rows, self.sizes, self.q, self.plan.partials_in_16_bits)

    def _empty(self, tensor: T, chunk: int) -> Value:
        return empty(tensor, self.rows.count(tensor, chunk), self.sizes, self.q)

    def _zero(self, tensor: T, chunk: int) -> Value:
        value = self._empty(tensor, chunk)
        for x in value:
            x.zero_()
        if tensor is T.O:
            value[1].fill_(float("-inf"))
        return value

    def _merge_target(self, key: Key) -> Value:
        """The partial output to merge into. Until the first merge it keeps the dtypes of its kernel."""
        value = self.held.get(key) or self._zero(*key)
        if value[1].dtype is not torch.float64:
            value = self.widen(value[0]), value[1].double()  # see `merge`
        self.held[key] = value
        return value

    # -- blocks ------------------------------------------------------------------------------------------------

    def _compute(self, block: ScheduledBlock) -> None:
        """Computes a block, query chunk by query chunk, and adds its results to the partials of its chunks."""
        kv_chunks = block.attend.kv_chunks
        for chunk in block.attend.q_chunks:
            pieces = self.blocks.pieces_of_heads(chunk, kv_chunks, block.attend.heads, self.q.shape[1])
            if self.plan.backward:
                self._backward(chunk, kv_chunks, pieces)
            else:
                self._forward(chunk, kv_chunks, pieces)
        if block.last:
            if self.gathered_key_grads:
                self._scatter_key_grads(kv_chunks, self.gathered_key_grads)
            self.gathered_keys = self.gathered_key_grads = None

    def _block_input(self, tensor: T, chunk: int) -> Value:
        """The rows of an input that blocks compute with."""
        where = self.rows.where((tensor, chunk))
        value = self.held[tensor, chunk]
        return value if where is None else tuple([x[where] for x in value])

    def _keys(self, chunks: tuple[int, ...]) -> Value:
        """Keys and values of the chunks, [rows, B, d] each, in ascending order of position."""
        if len(chunks) == 1:
            return self._block_input(T.KV, chunks[0])
        if self.gathered_keys is None:
            self.gathered_keys = self._gather_keys(chunks)
        return self.gathered_keys

    def _gather_keys(self, chunks: tuple[int, ...]) -> Value:
        blocks = self.blocks
        parts_k, parts_v = [], []
        order = blocks.gather_order(chunks, self.q.device)
        for chunk, own, _ in order:
            k, v = self._block_input(T.KV, chunk)
            parts_k.append(k[own])
            parts_v.append(v[own])
        if all(isinstance(where, slice) and where.step == 1 for _, _, where in order):  # side by side
            return torch.cat(parts_k), torch.cat(parts_v)
        rows = blocks.key_rows(chunks)
        gathered_k, gathered_v = (x.new_empty(rows, *x.shape[1:]) for x in (self.k, self.v))
        for (_, _, where), k, v in zip(order, parts_k, parts_v, strict=True):
            gathered_k[where] = k
            gathered_v[where] = v
        return gathered_k, gathered_v

    def _forward(self, chunk: int, kv_chunks: tuple[int, ...], pieces: list[HeadPiece]) -> None:
        key = (T.O, chunk)
        (q,) = self._block_input(T.Q, chunk)
        where = self.rows.where(key)
        results = []
        for rows, kv_rows, mask in pieces:
            k, v = self._keys(kv_chunks)
            k, v = _slice(k, kv_rows), _slice(v, kv_rows)
            out, lse = self.problem.kernel.forward(_slice(q, rows), k, v, mask, self.problem.scores)
            if key not in self.held and where is None and out.shape[:2] == q.shape[:2]:
                self.held[key] = out.contiguous(), lse
            elif isinstance(where, Tensor):
                results.append((rows, out, lse))
            else:
                self._merge_outputs(key, where, [(rows, out, lse)])
        if results or not pieces:
            self._merge_outputs(key, where, results)

    def _backward(self, chunk: int, kv_chunks: tuple[int, ...], pieces: list[HeadPiece]) -> None:
        queries = self._block_input(T.QDO, chunk)
        dq_total = self._gradients_before((T.DQ, chunk))
        of_one_chunk = len(kv_chunks) == 1
        dkv_total = self._gradients_before((T.DKV, kv_chunks[0])) if of_one_chunk else self.gathered_key_grads
        for rows, kv_rows, mask in pieces:
            keys = self._keys(kv_chunks)
            q, dout, lse, delta = queries if rows is ALL else [_slice(x, rows) for x in queries]
            k, v = keys if kv_rows is ALL else [_slice(x, kv_rows) for x in keys]
            grad = BlockGrad(dout, q, k, v, lse, delta, mask)
            dq, *dkv = self.problem.kernel.backward(grad, self.problem.scores)
            dq_total = self._accumulate(dq_total, queries, rows, (dq,))
            dkv_total = self._accumulate(dkv_total, keys, kv_rows, dkv)
            del dq, dkv  # the next piece needs the memory
        self._keep_gradients((T.DQ, chunk), dq_total)
        if of_one_chunk:
            self._keep_gradients((T.DKV, kv_chunks[0]), dkv_total)
        else:
            self.gathered_key_grads = dkv_total

    def _gradients_before(self, key: Key) -> Value | None:
        """The gradients that those of a block are added to: the partial itself, if it has the rows of the block."""
        return self.held.get(key) if self.rows.where(key) is None else None

    def _keep_gradients(self, key: Key, total: Value | None) -> None:
        """Keeps the gradients of `_gradients_before` with those of the block added."""
        where = self.rows.where(key)
        if total is None:
            return
        if where is None:
            self.held[key] = total
        else:
            self._add_gradients(key, where, total)

    def _add_gradients(self, key: Key, where: Where, gradients: Value) -> None:
        """Adds gradients to the rows `where` of a partial."""
        if key not in self.held:
            self.held[key] = self._zero(*key)
        for total, x in zip(self.held[key], gradients, strict=True):
            if isinstance(where, Tensor):
                total.index_add_(0, where, x.to(total.dtype))
            else:
                (total if where is None else total[where]).add_(x)

    def _accumulate(self, total: Value | None, like: Value, rows: RowSlice, parts: Sequence[Tensor]) -> Value:
        """`total`, or zeros with the shapes of `like` if None, with `parts` added to some rows."""
        if total is None:
            if all([part.shape == x.shape for part, x in zip(parts, like, strict=False)]):
                return tuple([self.widen(part).contiguous() for part in parts])
            total = tuple([torch.zeros_like(x, dtype=self.wide) for x in like[: len(parts)]])
        for x, part in zip(total, parts, strict=True):
            _slice(x, rows).add_(part)
        return total

    def _scatter_key_grads(self, chunks: tuple[int, ...], gathered: Value) -> None:
        """Adds the gradients of gathered keys and values to those of their chunks."""
        new = {chunk for chunk in chunks if (T.DKV, chunk) not in self.held}
        for chunk in new:
            whole = self.rows.where((T.DKV, chunk)) is None
            self.held[T.DKV, chunk] = self._empty(T.DKV, chunk) if whole else self._zero(T.DKV, chunk)
        for chunk, own, where in self.blocks.gather_order(chunks, self.q.device):
            among = self.rows.where((T.DKV, chunk))
            if among is not None:  # all its rows together, because a chunk with row sets has no other order
                self._add_gradients((T.DKV, chunk), among, tuple([x[where] for x in gathered]))
                continue
            for total, part in zip(self.held[T.DKV, chunk], gathered, strict=True):
                if chunk in new:
                    total[own].copy_(part[where])
                else:
                    total[own].add_(part[where])


def _slice(x: Tensor, part: RowSlice) -> Tensor:
    return x if part is ALL else x[part]
