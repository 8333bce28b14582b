"""Runs a plan symbolically: what each rank holds, when it waits for whom, and when everything happens.

The machine is the strictest that executes plans: the operations of one step on one channel form a batch, a batch
starts when it is launched and the channel's previous batch is complete, and it completes as a whole when each of
its operations has met its counterpart. A plan that passes here hangs on neither NCCL nor gloo.

Partials are sets of contributions (bit masks of chunks), so a block counted twice or lost is seen where it happens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .ir import PARTIAL, AllGather, Attend, Comm, Plan, PlanError, Recv, ReduceScatter, Send, SwapHeads, T

Key = tuple[T, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a rank: a block (`channel` empty) or the batch of a channel."""

    rank: int
    step: int
    channel: str
    what: tuple
    start: float
    end: float


@dataclass
class Trace:
    """What happened. `held[rank]` maps (tensor, chunk) to the contributions left there at the end."""

    spans: list[Span]
    finish: float
    held: list[dict[Key, int]]


@dataclass(eq=False)
class _Transfer:
    """One operation with all its parties; for a reduction, `values` collects what each contributed."""

    label: tuple
    parties_needed: int
    parties: list["_Batch"] = field(default_factory=list)
    values: dict[Key, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Batch:
    rank: int
    step: int
    channel: str
    launched: float
    previous: "_Batch | None"
    transfers: list[_Transfer] = field(default_factory=list)
    following: "_Batch | None" = None
    start: float | None = None
    done: float | None = None


def contributions(attend: Attend, plan: Plan) -> Iterator[tuple[int, int]]:
    """The (query chunk, key/value chunk) pairs of a block that its mask does not empty."""
    for q in attend.q_chunks:
        for kv in attend.kv_chunks:
            if plan.sees(q, kv):
                yield q, kv


def _pair_cost(attend: Attend, plan: Plan) -> float:
    return sum(1 for _ in contributions(attend, plan))


def _no_cost(op: Comm | SwapHeads) -> float:
    return 0.0


class _Machine:
    def __init__(self, plan: Plan, block_time: Callable, transfer_time: Callable) -> None:
        self.plan, self.block_time, self.transfer_time = plan, block_time, transfer_time
        self.held = [{(t, r): 1 << r for t in plan.starts} for r in range(plan.n)]
        self.arriving: list[dict[Key, list[tuple[_Transfer, _Batch, bool]]]] = [
            defaultdict(list) for _ in range(plan.n)
        ]
        self.clock = [0.0] * plan.n
        self.last: dict[tuple[int, str], _Batch] = {}
        self.unmatched: dict[tuple, list[_Transfer]] = defaultdict(list)
        self.joined: dict[tuple, int] = defaultdict(int)
        self.spans: list[Span] = []

    # -- one rank's program ------------------------------------------------------------------------------------

    def rank(self, r: int) -> Iterator[tuple]:
        self._swap(r, 0, self.plan.before)
        for s, step in enumerate(self.plan.steps[r]):
            for op in step.comm:
                for key in self._inputs(op, r):
                    if key[0] in PARTIAL and not self.arriving[r][key]:
                        self.held[r].setdefault(key, 0)  # no contribution: zeros travel
                    yield from self._need(r, s, key, f"{type(op).__name__} of")
            for channel in dict.fromkeys(op.channel for op in step.comm):
                self._launch(r, s, channel, [op for op in step.comm if op.channel == channel])
            for attend in step.attend:
                yield from self._attend(r, s, attend)
        end = len(self.plan.steps[r])
        for key in [key for key, waiting in self.arriving[r].items() if waiting]:
            yield from self._need(r, end, key, "the end of the plan, which needs")
        self._swap(r, end, self.plan.after)

    def _swap(self, r: int, s: int, swaps: tuple[SwapHeads, ...]) -> None:
        """Its parties run the same steps with the same times, so nobody waits for anybody."""
        for op in swaps:
            start = self.clock[r]
            self.clock[r] += self.transfer_time(op)
            self.spans.append(Span(r, s, op.channel, (op,), start, self.clock[r]))

    def _inputs(self, op: Comm, r: int) -> list[Key]:
        match op:
            case Send():
                return [(op.tensor, op.chunk)]
            case AllGather():
                return [(op.tensor, op.chunks[op.group.index(r)])]
            case ReduceScatter():
                return [(op.tensor, c) for c in op.chunks]
        return []

    def _need(self, r: int, s: int, key: Key, why: str) -> Iterator[tuple]:
        held, waiting = self.held[r], self.arriving[r].pop(key, [])
        for transfer, batch, reduce in waiting:
            while batch.done is None:
                yield r, s, key, batch
            self.clock[r] = max(self.clock[r], batch.done)
            value = transfer.values[key]
            if key in held and held[key] & value and key[0] in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {_say(key)} received with blocks it already counts")
            if key in held and not reduce:
                raise PlanError(f"rank {r}, step {s}: {_say(key)} received over the one already there")
            held[key] = held.get(key, 0) | value
        if key not in held:
            raise PlanError(f"rank {r}, step {s}: {why} {_say(key)}, which is not there")

    def _attend(self, r: int, s: int, attend: Attend) -> Iterator[tuple]:
        plan, held = self.plan, self.held[r]
        for tensor, chunks in zip(plan.starts, (attend.q_chunks, attend.kv_chunks), strict=True):
            for c in chunks:
                yield from self._need(r, s, (tensor, c), "block needs")
        for q, kv in contributions(attend, plan):
            for tensor, chunk, other in zip(plan.ends, (q, kv), (kv, q), strict=False):
                if held.get((tensor, chunk), 0) >> other & 1:
                    raise PlanError(f"rank {r}, step {s}: block (query chunk {q}, key chunk {kv}) computed twice")
                held[tensor, chunk] = held.get((tensor, chunk), 0) | 1 << other
        start = self.clock[r]
        self.clock[r] += self.block_time(attend, plan)
        self.spans.append(Span(r, s, "", (attend,), start, self.clock[r]))

    # -- channels ----------------------------------------------------------------------------------------------

    def _launch(self, r: int, s: int, channel: str, ops: list[Comm]) -> None:
        batch = _Batch(r, s, channel, self.clock[r], self.last.get((r, channel)))
        if batch.previous:
            batch.previous.following = batch
        self.last[r, channel] = batch
        for op in ops:
            transfer = self._meet(r, s, op)
            transfer.parties.append(batch)
            batch.transfers.append(transfer)
            self._move(r, op, transfer, batch)
        self._settle([batch])

    def _meet(self, r: int, s: int, op: Comm) -> _Transfer:
        """The transfer this operation takes part in: the next of its kind on the channel between its parties."""
        if isinstance(op, AllGather | ReduceScatter):
            if r not in op.group or len(op.group) != len(op.chunks):
                raise PlanError(f"rank {r}, step {s}: {type(op).__name__} of {op.tensor} over {op.group} is malformed")
            where, label = (op.group, op.channel), (type(op).__name__, op.tensor, op.chunks)
            count, mine = len(op.group), self.joined[op.group, op.channel, r]
            self.joined[op.group, op.channel, r] += 1
        else:
            if not 0 <= op.peer < self.plan.n or op.peer == r:
                raise PlanError(f"rank {r}, step {s}: {_say((op.tensor, op.chunk))} has peer {op.peer}")
            ends = (r, op.peer) if isinstance(op, Send) else (op.peer, r)
            where, label = (*ends, op.channel), ("p2p", op.tensor, (op.chunk,))
            count, mine = 2, self.joined[ends, op.channel, type(op)]
            self.joined[ends, op.channel, type(op)] += 1
        queue = self.unmatched[where]
        if mine == len(queue):
            queue.append(_Transfer(label, count))
        transfer = queue[mine]
        if transfer.label != label:
            first = transfer.parties[0]
            raise PlanError(
                f"rank {r}, step {s}: {_label(label)} on channel {op.channel} meets {_label(transfer.label)} "
                f"of rank {first.rank}, step {first.step}"
            )
        return transfer

    def _move(self, r: int, op: Comm, transfer: _Transfer, batch: _Batch) -> None:
        held = self.held[r]
        for key in self._inputs(op, r):
            if transfer.values.get(key, 0) & held[key] and key[0] in PARTIAL:
                raise PlanError(f"rank {r}, step {batch.step}: {_say(key)} reduced with blocks counted twice")
            transfer.values[key] = transfer.values.get(key, 0) | held[key]
            if key[0] in PARTIAL:
                del held[key]
        match op:
            case Recv():
                self.arriving[r][op.tensor, op.chunk].append((transfer, batch, op.reduce))
            case AllGather():
                for rank, chunk in zip(op.group, op.chunks, strict=True):
                    if rank != r:
                        self.arriving[r][op.tensor, chunk].append((transfer, batch, False))
            case ReduceScatter():
                mine = op.chunks[op.group.index(r)]
                self.arriving[r][op.tensor, mine].append((transfer, batch, True))

    def _settle(self, work: list[_Batch]) -> None:
        """Starts and completes whatever the new batch lets start and complete."""
        while work:
            batch = work.pop()
            if batch.start is None and (batch.previous is None or batch.previous.done is not None):
                batch.start = max(batch.launched, batch.previous.done if batch.previous else 0.0)
                work += [p for t in batch.transfers for p in t.parties if p is not batch]
            if batch.start is None or batch.done is not None:
                continue
            if all(
                len(t.parties) == t.parties_needed and all(p.start is not None for p in t.parties)
                for t in batch.transfers
            ):
                # It begins when its last party does; each direction carries its operations one after the other.
                begin = max(p.start for t in batch.transfers for p in t.parties)
                ops = [op for op in self.plan.steps[batch.rank][batch.step].comm if op.channel == batch.channel]
                outward = sum(self.transfer_time(op) for op in ops if not isinstance(op, Recv))
                inward = sum(self.transfer_time(op) for op in ops if not isinstance(op, Send))
                batch.done = begin + max(outward, inward)
                self.spans.append(Span(batch.rank, batch.step, batch.channel, tuple(ops), begin, batch.done))
                if batch.following:
                    work.append(batch.following)


def trace(
    plan: Plan,
    block_time: Callable[[Attend, Plan], float] = _pair_cost,
    transfer_time: Callable[[Comm | SwapHeads], float] = _no_cost,
) -> Trace:
    """Runs `plan` on the symbolic machine.

    `block_time` gives a block's time (default: one per unmasked pair of chunks) and `transfer_time` the time an
    operation occupies its channel (default: none), in any one unit.

    Raises:
        PlanError: an operation without counterpart or out of order, a circular wait, a missing or doubled chunk.
    """
    machine = _Machine(plan, block_time, transfer_time)
    running = {r: machine.rank(r) for r in range(plan.n)}
    stuck: dict[int, tuple] = {}
    while running:
        progress = False
        for r, program in list(running.items()):
            if r in stuck and stuck[r][3].done is None:
                continue
            progress = True
            try:
                stuck[r] = next(program)
            except StopIteration:
                del running[r]
                stuck.pop(r, None)
        if not progress:
            raise PlanError(_deadlock(stuck))
    for queue in machine.unmatched.values():
        for transfer in queue:
            if len(transfer.parties) < transfer.parties_needed:
                batch = transfer.parties[0]
                raise PlanError(f"rank {batch.rank}, step {batch.step}: {_label(transfer.label)} has no counterpart")
    finish = max((span.end for span in machine.spans), default=0.0)
    return Trace(machine.spans, finish, machine.held)


def _deadlock(stuck: dict[int, tuple]) -> str:
    r, (_, s, key, batch) = min(stuck.items(), key=lambda item: item[1][3].step)
    others = ", ".join(f"rank {o} at step {w[1]} for {_say(w[2])}" for o, w in stuck.items() if o != r)
    return (
        f"rank {r}, step {s}: waits for ever for {_say(key)}, asked for in step {batch.step} on channel "
        f"{batch.channel}; also waiting: {others or 'nobody'}"
    )


def _say(key: Key) -> str:
    return f"{key[0]} chunk {key[1]}"


def _label(label: tuple) -> str:
    kind, tensor, chunks = label
    named = f"chunk {chunks[0]}" if kind == "p2p" else f"chunks {chunks}"
    return f"{'message' if kind == 'p2p' else kind} {tensor} {named}"
