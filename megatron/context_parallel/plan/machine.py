"""Runs a plan symbolically: what each rank holds, when it waits for whom, and when everything happens.

The machine has the batches and the limit of the executor, and stricter rules:

- A rank launches the batches of a step when it has all data that the step sends.
- A batch starts when the batch before it on its channel is complete.
- A batch completes as a whole, when each of its operations has met its counterpart.

So a plan that passes here hangs on neither NCCL nor gloo. A partial is represented by the set of its contributions
(bits of chunks). So a block that is counted twice or lost is seen where it happens.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from .ir import (
    IN_FLIGHT,
    PARTIAL,
    AllGather,
    Attend,
    Comm,
    Key,
    Plan,
    PlanError,
    ReduceScatter,
    Send,
    SwapHeads,
    batches,
)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a rank: a block (`channel` empty) or the batch of a channel."""

    rank: int
    step: int
    channel: str
    what: tuple
    start: float
    end: float


@dataclass(eq=False)
class _Transfer:
    """One operation with all ranks that take part. For a reduction, `values` collects what each rank gave."""

    label: tuple
    parties_needed: int
    parties: list["_Batch"] = field(default_factory=list)
    started: int = 0
    begin: float = 0.0  # when the last party of those started did
    values: dict[Key, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Batch:
    rank: int
    step: int
    channel: str
    ops: list[Comm]
    launched: float
    previous: "_Batch | None"
    transfers: list[_Transfer] = field(default_factory=list)
    following: "_Batch | None" = None
    unmet: int = 0  # transfers of which not all parties have started
    done: float | None = None


class Machine:
    """All ranks of a plan. `rank` is the program of one. It yields each (rank, step, what, batch) that it waits for."""

    def __init__(self, plan: Plan, block_time: Callable, transfer_time: Callable) -> None:
        self.plan, self.block_time, self.transfer_time = plan, block_time, transfer_time
        self.held = [{(t, r): 1 << r for t in plan.starts} for r in range(plan.n)]
        self.arriving: list[dict[Key, list[tuple[_Transfer, _Batch]]]] = [defaultdict(list) for _ in range(plan.n)]
        self.clock = [0.0] * plan.n
        self.launched: dict[tuple[int, str], deque[_Batch]] = defaultdict(partial(deque, maxlen=IN_FLIGHT))
        self.unmatched: dict[tuple, list[_Transfer]] = defaultdict(list)
        self.joined: dict[tuple, int] = defaultdict(int)
        self.spans: list[Span] = []

    # -- one rank's program ------------------------------------------------------------------------------------

    def rank(self, r: int) -> Iterator[tuple]:
        self._swap(r, 0, self.plan.before)
        for s, step in enumerate(self.plan.steps[r]):
            for op in step.comm:
                for key in op.reads(r):
                    if key[0] in PARTIAL and not self.arriving[r][key]:
                        self.held[r].setdefault(key, 0)  # no contribution: zeros travel
                    yield from self._need(r, s, key, f"{type(op).__name__} of")
            for channel, ops in batches(step.comm):
                yield from self._make_room(r, s, channel)
                self._launch(r, s, channel, ops)
            for attend in step.attend:
                yield from self._attend(r, s, attend)
        end = len(self.plan.steps[r])
        for key in [key for key, waiting in self.arriving[r].items() if waiting]:
            yield from self._need(r, end, key, "the end of the plan, which needs")
        self._swap(r, end, self.plan.after)

    def _swap(self, r: int, s: int, swaps: tuple[SwapHeads, ...]) -> None:
        """All ranks of a swap run the same steps in the same time, so no rank waits for another."""
        for op in swaps:
            start, rank = self.clock[r], self.plan.grid.rank(context=r)
            received = (t for t in self.plan.swapped(op, rank) if t.receiver == rank)  # as much as it sends
            self.clock[r] += sum(map(self.transfer_time, received))
            self.spans.append(Span(r, s, op.channel, (op,), start, self.clock[r]))

    def _need(self, r: int, s: int, key: Key, why: str) -> Iterator[tuple]:
        held, waiting = self.held[r], self.arriving[r].pop(key, [])
        for transfer, batch in waiting:
            yield from self._wait(r, s, say(key), batch)
            value = transfer.values[key]
            if key in held and held[key] & value and key[0] in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received with blocks it already counts")
            if key in held and key[0] not in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received over the one already there")
            held[key] = held.get(key, 0) | value
        if key not in held:
            raise PlanError(f"rank {r}, step {s}: {why} {say(key)}, which is not there")

    def _make_room(self, r: int, s: int, channel: str) -> Iterator[tuple]:
        running = self.launched[r, channel]
        if len(running) == IN_FLIGHT:
            yield from self._wait(r, s, f"the oldest of the {IN_FLIGHT} batches under way", running[0])

    def _wait(self, r: int, s: int, what: str, batch: _Batch) -> Iterator[tuple]:
        while batch.done is None:
            yield r, s, what, batch
        self.clock[r] = max(self.clock[r], batch.done)

    def _attend(self, r: int, s: int, attend: Attend) -> Iterator[tuple]:
        plan, held = self.plan, self.held[r]
        for key in attend.reads(plan.backward):
            yield from self._need(r, s, key, "block needs")
        for q, kv in attend.pairs(plan.sees):
            for tensor, chunk, other in zip(plan.ends, (q, kv), (kv, q), strict=False):
                if held.get((tensor, chunk), 0) >> other & 1:
                    raise PlanError(f"rank {r}, step {s}: block (query chunk {q}, key chunk {kv}) computed twice")
                held[tensor, chunk] = held.get((tensor, chunk), 0) | 1 << other
        start = self.clock[r]
        self.clock[r] += self.block_time(attend, plan)
        self.spans.append(Span(r, s, "", (attend,), start, self.clock[r]))

    # -- channels ----------------------------------------------------------------------------------------------

    def _launch(self, r: int, s: int, channel: str, ops: list[Comm]) -> None:
        running = self.launched[r, channel]
        batch = _Batch(r, s, channel, ops, self.clock[r], running[-1] if running else None)
        if batch.previous:
            batch.previous.following = batch
        running.append(batch)
        for op in ops:
            transfer = self._meet(r, s, op)
            transfer.parties.append(batch)
            batch.transfers.append(transfer)
            self._move(r, op, transfer, batch)
        batch.unmet = len(batch.transfers)
        if batch.previous is None or batch.previous.done is not None:
            self._start(batch)

    def _meet(self, r: int, s: int, op: Comm) -> _Transfer:
        """The transfer of this operation: the next of its kind on the channel between its ranks."""
        where: tuple
        if isinstance(op, AllGather | ReduceScatter):
            where, label = (op.group, op.channel), (type(op).__name__, op.tensor, op.chunks)
            count, mine = len(op.group), self.joined[op.group, op.channel, r]
            self.joined[op.group, op.channel, r] += 1
        else:
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
                f"rank {r}, step {s}: {say_transfer(label)} on channel {op.channel} meets "
                f"{say_transfer(transfer.label)} of rank {first.rank}, step {first.step}"
            )
        return transfer

    def _move(self, r: int, op: Comm, transfer: _Transfer, batch: _Batch) -> None:
        held = self.held[r]
        for key in op.reads(r):
            if transfer.values.get(key, 0) & held[key] and key[0] in PARTIAL:
                raise PlanError(f"rank {r}, step {batch.step}: {say(key)} reduced with blocks counted twice")
            transfer.values[key] = transfer.values.get(key, 0) | held[key]
            if key[0] in PARTIAL:
                del held[key]
        for key in op.brings(r):
            self.arriving[r][key].append((transfer, batch))

    def _start(self, first: _Batch) -> None:
        """Starts a batch, completes those that it was the last to meet, and starts those behind them."""
        ready = [first]
        while ready:
            batch = ready.pop()
            before = batch.previous.done if batch.previous else 0.0
            assert before is not None  # it is complete
            start = max(batch.launched, before)
            batch.previous = None
            for transfer in batch.transfers:
                transfer.started += 1
                transfer.begin = max(transfer.begin, start)
                if transfer.started == transfer.parties_needed:
                    ready += self._met(transfer)

    def _met(self, transfer: _Transfer) -> list[_Batch]:
        """Completes the batches that waited only for this transfer. Returns the batches that may start now."""
        for batch in transfer.parties:
            batch.unmet -= 1
        complete = [batch for batch in transfer.parties if batch.unmet == 0]
        for batch in complete:
            # It begins when its last party does; each direction carries its operations one after the other.
            begin = max(t.begin for t in batch.transfers)
            moved = [transfer for op in batch.ops for transfer in op.transfers(batch.rank)]
            outward = sum(self.transfer_time(t) for t in moved if t.sender == batch.rank)
            inward = sum(self.transfer_time(t) for t in moved if t.receiver == batch.rank)
            end = batch.done = begin + max(outward, inward)
            self.spans.append(Span(batch.rank, batch.step, batch.channel, tuple(batch.ops), begin, end))
        return [batch.following for batch in complete if batch.following]


def say(key: Key) -> str:
    return f"{key[0]} chunk {key[1]}"


def say_transfer(label: tuple) -> str:
    kind, tensor, chunks = label
    named = f"chunk {chunks[0]}" if kind == "p2p" else f"chunks {chunks}"
    return f"{'message' if kind == 'p2p' else kind} {tensor} {named}"
