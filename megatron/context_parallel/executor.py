"""Executes a plan on one rank: launches communication, computes blocks meanwhile, merges partials, frees chunks.

Inside, tensors are folded: queries [s, B, G, d], keys and values [s, B, d], with B = batch × kv_heads and G = heads /
kv_heads. These are views of Megatron's [s, b, heads, d], and rows stay contiguous for sending.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks
from .kernels import BlockGrad, Kernel, Scores
from .kernels.masks import Piece
from .kernels.merge import merge
from .marks import marks
from .plan.ir import IN_FLIGHT, PARTIAL, AllGather, Attend, Key, Plan, Recv, ReduceScatter, Send, T
from .plan.liveness import freed
from .recorder import recorder
from .transport import Program, Transport, Work

Value = tuple[Tensor, ...]
Part = slice | tuple[slice, slice]  # rows, or rows and heads


@dataclass(frozen=True)
class Problem:
    """What is the same on all ranks: the blocks, the key/value heads of the model, the kernel and the scores."""

    blocks: Blocks
    kv_heads: int
    kernel: Kernel
    scores: Scores


class Executor:
    """One run of one rank's part of a plan."""

    def __init__(self, plan: Plan, rank: int, problem: Problem, transport: Transport, inputs: dict[T, Value]) -> None:
        self.plan, self.rank, self.problem, self.transport = plan, rank, problem, transport
        self.held: dict[Key, Value] = {(t, rank): value for t, value in inputs.items()}
        self.arriving: dict[Key, list[tuple[Work, int, Value]]] = defaultdict(list)  # with the peer that sends it
        self.launched: dict[str, deque[Work]] = defaultdict(deque)
        self.freed = freed(plan, rank)
        self.shapes: dict[T, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        self.q, (self.k, self.v) = inputs[plan.starts[0]][0], inputs[T.KV]
        self.wide = torch.promote_types(self.q.dtype, torch.float32)

    def run(self) -> Program[dict[T, Value]]:
        """Yields each communication that it must wait for; returns the tensors that the plan ends with."""
        steps = self.plan.steps[self.rank]
        for s, step in enumerate(steps):
            recorder.at_step(s)
            yield from self._launch(step.comm)
            for attend in step.attend:
                yield from self._attend(attend)
            self._free(s)
        recorder.at_step(len(steps))
        ends = {}
        for t in self.plan.ends:
            ends[t] = yield from self._take(t, self.rank)
        for works in self.launched.values():
            yield from works
        return ends

    # -- communication -----------------------------------------------------------------------------------------

    def _launch(self, comm: tuple) -> Program[None]:
        batches: dict[str, tuple[list, list, list]] = defaultdict(lambda: ([], [], []))
        received: dict[str, list] = defaultdict(list)
        for op in comm:
            sends, receives, ops = batches[op.channel]
            ops += [op] if isinstance(op, Send | Recv) else []
            match op:
                case Send():
                    sends += [(op.peer, x) for x in (yield from self._leaving(op.tensor, op.chunk))]
                case Recv():
                    value = self._empty(op.tensor, op.chunk)
                    receives += [(op.peer, x) for x in value]
                    received[op.channel].append((op, value))
                case AllGather():
                    yield from self._all_gather(op)
                case ReduceScatter():
                    yield from self._reduce_scatter(op)
        for channel, (sends, receives, ops) in batches.items():
            if not sends and not receives:
                continue
            yield from self._make_room(channel)
            work = marks.batch(channel, ops, self.transport.exchange(channel, sends, receives))
            self.launched[channel].append(work)
            for op, value in received[channel]:
                self.arriving[op.tensor, op.chunk].append((work, op.peer, value))

    def _all_gather(self, op: AllGather) -> Program[None]:
        """Gathers into one buffer, of which each chunk becomes a view."""
        mine = yield from self._take(op.tensor, op.chunks[op.group.index(self.rank)])
        yield from self._make_room(op.channel)
        chunks = self.problem.blocks.chunks(op.tensor)
        rows = tuple(chunks.rows(chunk) for chunk in op.chunks)
        everyone = [x.new_empty((sum(rows), *x.shape[1:])) for x in mine]
        tensors = list(zip(mine, everyone, strict=True))
        work = marks.batch(op.channel, (op,), self.transport.all_gather(op.channel, op.group, rows, tensors))
        self.launched[op.channel].append(work)
        parts = zip(*(x.split(rows) for x in everyone), strict=True)
        for peer, chunk, value in zip(op.group, op.chunks, parts, strict=True):
            if peer != self.rank:
                self.arriving[op.tensor, chunk].append((work, peer, value))

    def _reduce_scatter(self, op: ReduceScatter) -> Program[None]:
        """Each rank receives all partials of its chunk and merges them: gloo's own sum moves twice the bytes."""
        place, size = op.group.index(self.rank), len(op.group)
        rows = self.problem.blocks.chunks(op.tensor).rows
        if op.tensor is not T.O and self.transport.sums and len({rows(chunk) for chunk in op.chunks}) == 1:
            yield from self._sum(op, place)
            return
        sends, receives, values = [], [], []
        for k in range(1, size):
            after, before = (place + k) % size, (place - k) % size
            sends += [(op.group[after], x) for x in (yield from self._leaving(op.tensor, op.chunks[after]))]
            values.append((op.group[before], self._empty(op.tensor, op.chunks[place])))
            receives += [(op.group[before], x) for x in values[-1][1]]
        yield from self._make_room(op.channel)
        work = marks.batch(op.channel, (op,), self.transport.exchange(op.channel, sends, receives))
        self.launched[op.channel].append(work)
        self.arriving[op.tensor, op.chunks[place]] += [(work, *value) for value in values]

    def _sum(self, op: ReduceScatter, place: int) -> Program[None]:
        """A reduce-scatter by the transport, which needs no buffer for each other rank."""
        parts = []
        for chunk in op.chunks:
            parts.append((yield from self._leaving(op.tensor, chunk)))
        yield from self._make_room(op.channel)
        mine = self._empty(op.tensor, op.chunks[place])
        together = [torch.cat(of_chunks) for of_chunks in zip(*parts, strict=True)]
        tensors = list(zip(mine, together, strict=True))
        work = marks.batch(op.channel, (op,), self.transport.reduce_scatter(op.channel, op.group, tensors))
        self.launched[op.channel].append(work)
        self.arriving[op.tensor, op.chunks[place]].append((work, op.group[place - 1], mine))

    def _make_room(self, channel: str) -> Program[None]:
        works = self.launched[channel]
        while len(works) >= IN_FLIGHT:
            done = works.popleft()
            yield done
            self._settle(done)

    def _settle(self, done: Work) -> None:
        """Merges the partials that a complete batch brought. Otherwise they would fill memory until they are read."""
        for key in [key for key in self.arriving if key[0] in PARTIAL]:
            waiting = self.arriving.pop(key)
            for work, _, value in waiting:
                if work is done:
                    self._put(key, value)
            if rest := [entry for entry in waiting if entry[0] is not done]:
                self.arriving[key] = rest

    def _need(self, key: Key) -> Program[Value]:
        """The value of `key`, after everything that was sent for it has arrived and been merged."""
        for work, peer, value in self.arriving.pop(key, ()):
            recorder.need(*key, self.transport.world(peer))
            yield work
            self._put(key, value)
        return self.held[key]

    def _put(self, key: Key, value: Value) -> None:
        if key[0] in PARTIAL and key in self.held:
            self._reduce(key[0], self._partial(*key), value)
        else:
            self.held[key] = value

    def _leaving(self, tensor: T, chunk: int) -> Program[Value]:
        """The value to send. Partials travel in float32, or wider."""
        value = yield from self._take(tensor, chunk)
        return tuple(x.to(self.wide) for x in value) if tensor in PARTIAL else value

    def _take(self, tensor: T, chunk: int) -> Program[Value]:
        """The value to send or to end with. A partial leaves this rank; it is zero if nothing was added to it."""
        if tensor not in PARTIAL:
            return (yield from self._need((tensor, chunk)))
        if (tensor, chunk) not in self.held and (tensor, chunk) not in self.arriving:
            return self._zero(tensor, chunk)
        value = yield from self._need((tensor, chunk))
        del self.held[tensor, chunk]
        return (value[0], value[1].to(self.wide).contiguous()) if tensor is T.O else value

    def _free(self, step: int) -> None:
        for key in self.freed.get(step, ()):
            self.held.pop(key, None)

    # -- values ------------------------------------------------------------------------------------------------

    def _empty(self, tensor: T, chunk: int) -> Value:
        rows, device = self.problem.blocks.chunks(tensor).rows(chunk), self.q.device
        if tensor not in self.shapes:
            self.shapes[tensor] = self._shapes(tensor)
        return tuple([torch.empty((rows, *x), dtype=dtype, device=device) for x, dtype in self.shapes[tensor]])

    def _shapes(self, tensor: T) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape of a row and the dtype of each part of a tensor."""
        dtype, by_row, stats = self.wide if tensor in PARTIAL else self.q.dtype, self.q.shape[1:3], 0
        queries, outputs = (*by_row, self.q.shape[3]), (*by_row, self.v.shape[-1])
        match tensor:
            case T.KV | T.DKV:
                parts = [tuple(x.shape[1:]) for x in (self.k, self.v)]
            case T.Q | T.DQ:
                parts = [queries]
            case T.O:
                parts, stats = [outputs], 1  # log-sum-exp
            case _:
                parts, stats = [queries, outputs], 2  # and delta
        return [*((part, dtype) for part in parts), *[(tuple(by_row), self.wide)] * stats]

    def _zero(self, tensor: T, chunk: int) -> Value:
        value = self._empty(tensor, chunk)
        for x in value:
            x.zero_()
        if tensor is T.O:
            value[1].fill_(float("-inf"))
        return value

    def _partial(self, tensor: T, chunk: int) -> Value:
        """The partial that more is added to. An output stays in the dtype of its kernel until then."""
        value = self.held.get((tensor, chunk)) or self._zero(tensor, chunk)
        if tensor is T.O:
            value = value[0].to(self.wide), value[1].double()  # see `merge`
        self.held[tensor, chunk] = value
        return value

    def _reduce(self, tensor: T, into: Value, value: Value) -> None:
        if tensor is T.O:
            merge(*into, *value)
        else:
            for total, x in zip(into, value, strict=True):
                total.add_(x)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _attend(self, attend: Attend) -> Program[None]:
        query = self.plan.starts[0]
        for key in [*((T.KV, chunk) for chunk in attend.kv_chunks), *((query, chunk) for chunk in attend.q_chunks)]:
            if key in self.arriving:
                yield from self._need(key)
        with marks.block(attend):
            self._block(attend)

    def _block(self, attend: Attend) -> None:
        cut = {chunk: self.problem.blocks.pieces(chunk, attend.kv_chunks) for chunk in attend.q_chunks}
        keys = self._keys(attend.kv_chunks) if any(cut.values()) else ()
        for chunk in attend.q_chunks:
            queries = self.held[self.plan.starts[0], chunk]
            if self.plan.backward:
                self._backward(chunk, queries, attend.kv_chunks, keys, cut[chunk])
            else:
                self._forward(chunk, queries, keys, cut[chunk])

    def _keys(self, chunks: tuple[int, ...]) -> Value:
        """Keys and values of the chunks, [rows, B, d] each, in ascending order of position."""
        if len(chunks) == 1:
            return self.held[T.KV, chunks[0]]
        blocks = self.problem.blocks
        gathered = tuple(x.new_empty(blocks.keys(chunks), *x.shape[1:]) for x in (self.k, self.v))
        for chunk, own, where in blocks.order(chunks):
            for x, part in zip(gathered, self.held[T.KV, chunk], strict=True):
                x[where] = part[own]
        return gathered

    def _rows(self, piece: Piece) -> tuple[Part, Part]:
        """Where the piece is in queries and in keys: rows, and the heads of its sample."""
        if piece.sample is None:
            return piece.q, piece.kv
        documents = self.problem.blocks.mask.documents
        assert documents is not None  # only they give a piece to one sample
        per_sample = self.q.shape[1] // documents.shape[0]
        heads = slice(piece.sample * per_sample, (piece.sample + 1) * per_sample)
        return (piece.q, heads), (piece.kv, heads)

    def _forward(self, chunk: int, queries: Value, keys: Value, cut: list[Piece]) -> None:
        key, (q,) = (T.O, chunk), queries
        for piece in cut:
            rows, kv_rows = self._rows(piece)
            k, v = keys[0][kv_rows], keys[1][kv_rows]
            out, lse = self.problem.kernel.forward(q[rows], k, v, piece.mask, self.problem.scores)
            if key not in self.held and len(out) == len(q) and out.shape[1] == q.shape[1]:
                self._put(key, (out.contiguous(), lse))
            else:
                into_out, into_lse = self._partial(*key)
                merge(into_out[rows], into_lse[rows], out, lse)
        if not cut:
            self._partial(*key)

    def _backward(self, chunk: int, queries: Value, kv_chunks: tuple[int, ...], keys: Value, cut: list[Piece]) -> None:
        q, dout, lse, delta = queries
        kernel, scores = self.problem.kernel, self.problem.scores
        gathered: Value | None = None  # gradients of the keys of several chunks
        for piece in cut:
            rows, kv_rows = self._rows(piece)
            k, v = keys[0][kv_rows], keys[1][kv_rows]
            block = BlockGrad(dout[rows], q[rows], k, v, lse[rows], delta[rows], piece.mask)
            dq, *dkv = kernel.backward(block, scores)
            self.held[T.DQ, chunk] = self._plus(self.held.get((T.DQ, chunk)), (q,), rows, (dq,))
            if len(kv_chunks) == 1:
                key = T.DKV, kv_chunks[0]
                self.held[key] = self._plus(self.held.get(key), keys, kv_rows, dkv)
            else:
                gathered = self._plus(gathered, keys, kv_rows, dkv)
        if gathered:
            self._scatter(kv_chunks, gathered)

    def _plus(self, total: Value | None, like: Value, rows: Part, parts: Sequence[Tensor]) -> Value:
        """`total`, new in the shape of `like` if None, with `parts` added to its rows."""
        if total is None:
            if all([part.shape == x.shape for part, x in zip(parts, like, strict=True)]):
                return tuple([part.to(self.wide).contiguous() for part in parts])
            total = tuple([torch.zeros_like(x, dtype=self.wide) for x in like])
        for x, part in zip(total, parts, strict=True):
            x[rows].add_(part)
        return total

    def _scatter(self, chunks: tuple[int, ...], gathered: Value) -> None:
        """Adds gradients of gathered keys and values to those of their chunks."""
        new = {chunk for chunk in chunks if (T.DKV, chunk) not in self.held}
        for chunk in new:
            self.held[T.DKV, chunk] = self._empty(T.DKV, chunk)
        for chunk, own, where in self.problem.blocks.order(chunks):
            for total, part in zip(self.held[T.DKV, chunk], gathered, strict=True):
                if chunk in new:
                    total[own] = part[where]
                else:
                    total[own].add_(part[where])
