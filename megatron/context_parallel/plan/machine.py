"""Runs a plan symbolically: what each rank holds, and when it waits for whom. A clock tells when that happens.

The machine has the batches and the limit of the executor, and stricter rules:

- A rank launches the batches of a step when it has all data that the step sends.
- A batch starts when the batch before it on its channel is complete.
- A batch completes as a whole, when each of its operations is complete on all ranks that take part.

So a plan that passes here hangs on neither NCCL nor gloo. A partial is represented by the set of its contributions
(bits of chunks). So a block that is counted twice or lost is seen where it happens.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .ir import (
    IN_FLIGHT,
    PARTIAL,
    AllGather,
    Attend,
    Comm,
    Key,
    Plan,
    PlanError,
    Recv,
    ReduceScatter,
    Send,
    SwapHeads,
    T,
    batches,
)


@dataclass(eq=False, slots=True)
class Operation:
    """One operation with all ranks that take part, and what each gives."""

    label: tuple
    parties_needed: int
    parties: list[tuple["Batch", Comm]] = field(default_factory=list)
    started: int = 0  # parties whose batch has started
    given: dict[int, dict[Key, int]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Batch:
    """The operations that a rank launches together on a channel."""

    rank: int
    step: int
    channel: str
    comm: list[Comm]
    previous: "Batch | None"
    operations: list[Operation] = field(default_factory=list)
    following: "Batch | None" = None
    open: int = 0  # operations that are not complete
    begin: float = 0.0  # when the last of them started
    done: bool = False


class Wait(NamedTuple):
    """A rank goes on when a batch is complete."""

    step: int
    what: str
    batch: Batch


class Launch(NamedTuple):
    """The start of a step: what it takes to launch its operations, before any of them moves."""

    comm: tuple[Comm | SwapHeads, ...]
    first: bool  # the pass begins with it


class Merge(NamedTuple):
    """Received partials are added to what the rank has."""

    tensor: T
    times: int


class Work(NamedTuple):
    """A rank goes on when it has computed a block, swapped heads with its peers, launched a step or merged partials."""

    step: int
    work: Attend | SwapHeads | Launch | Merge


class Machine:
    """The ranks of a plan. `program` is that of one: it yields what the rank must wait for.

    Where rank r + `period` does what rank r does, with all ranks and chunks `period` further, only the ranks below
    `period` run. Each stands for those that are a multiple of `period` further.

    Attributes:
        started: operations that all parties have started, for the clock to run. It tells `complete` when they are done.
        completed: batches that are complete, for the clock to look at.
    """

    def __init__(self, plan: Plan, period: int | None = None) -> None:
        self.plan, self.period = plan, period or plan.n
        ranks = range(self.period)
        self.held = [{(t, r): 1 << r for t in plan.starts} for r in ranks]
        self.arriving: list[dict[Key, list[tuple[Operation, Batch, Comm]]]] = [defaultdict(list) for _ in ranks]
        self.groups: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self.launched: dict[tuple[int, str], deque[Batch]] = defaultdict(partial(deque, maxlen=IN_FLIGHT))
        self.unmatched: dict[tuple, list[Operation]] = defaultdict(list)
        self.joined: dict[tuple, int] = defaultdict(int)
        self.started: list[Operation] = []
        self.completed: list[Batch] = []

    # -- one rank's program ------------------------------------------------------------------------------------

    def program(self, r: int) -> Iterator[Wait | Work]:
        """What rank `r` waits for, in order."""
        for swap in self.plan.before:
            yield Work(0, Launch((swap,), False))
            yield Work(0, swap)
        for s, step in enumerate(self.plan.steps[r]):
            yield Work(s, Launch(step.comm, s == 0))
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
        for swap in self.plan.after:
            yield Work(end, Launch((swap,), False))
            yield Work(end, swap)

    def _need(self, r: int, s: int, key: Key, why: str) -> Iterator[Wait | Work]:
        held, waiting = self.held[r], self.arriving[r].pop(key, [])
        for operation, batch, op in waiting:
            if not batch.done:
                yield Wait(s, say(key), batch)
            value = self._given(r, s, operation, op, key)
            if key in held and held[key] & value and key[0] in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received with blocks it already counts")
            if key in held and key[0] not in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received over the one already there")
            times = (len(op.group) - 1 if isinstance(op, ReduceScatter) else 1) - (key not in held)
            if times and key[0] in PARTIAL:
                yield Work(s, Merge(key[0], times))
            held[key] = held.get(key, 0) | value
        if key not in held:
            raise PlanError(f"rank {r}, step {s}: {why} {say(key)}, which is not there")

    def _make_room(self, r: int, s: int, channel: str) -> Iterator[Wait | Work]:
        running = self.launched[r, channel]
        if len(running) == IN_FLIGHT and not running[0].done:
            yield Wait(s, f"the oldest of the {IN_FLIGHT} batches under way", running[0])

    def _attend(self, r: int, s: int, attend: Attend) -> Iterator[Wait | Work]:
        plan, held = self.plan, self.held[r]
        for key in attend.reads(plan.backward):
            yield from self._need(r, s, key, "block needs")
        for q, kv in attend.pairs(plan.sees):
            for tensor, chunk, other in zip(plan.ends, (q, kv), (kv, q), strict=False):
                if held.get((tensor, chunk), 0) >> other & 1:
                    raise PlanError(f"rank {r}, step {s}: block (query chunk {q}, key chunk {kv}) computed twice")
                held[tensor, chunk] = held.get((tensor, chunk), 0) | 1 << other
        yield Work(s, attend)

    # -- channels ----------------------------------------------------------------------------------------------

    def _launch(self, r: int, s: int, channel: str, comm: list[Comm]) -> None:
        running = self.launched[r, channel]
        batch = Batch(r, s, channel, comm, running[-1] if running else None)
        if batch.previous:
            batch.previous.following = batch
        running.append(batch)
        for op in comm:
            operation = self._meet(r, s, op)
            operation.parties.append((batch, op))
            batch.operations.append(operation)
            self._move(r, op, operation, batch)
        batch.open = len(comm)
        if batch.previous is None or batch.previous.done:
            self._start(batch)

    def _meet(self, r: int, s: int, op: Comm) -> Operation:
        """This operation with its parties: the next of its kind on the channel between its ranks."""
        n, period = self.plan.n, self.period
        where: tuple
        me: tuple
        if isinstance(op, AllGather | ReduceScatter):
            group, turn = self._first(op.group)
            where, me, count = (group, op.channel), (group, op.channel, r), len({member % period for member in group})
            label = type(op).__name__, op.tensor, tuple((chunk + turn) % n for chunk in op.chunks)
        else:
            sender, receiver = (r, op.peer) if isinstance(op, Send) else (op.peer, r)
            where, count = (sender % period, (receiver - sender) % n, op.channel), 2
            me, label = (where, type(op)), ("p2p", op.tensor, ((op.chunk - sender + sender % period) % n,))
        queue, mine = self.unmatched[where], self.joined[me]
        self.joined[me] += 1
        if mine == len(queue):
            queue.append(Operation(label, count))
        operation = queue[mine]
        if operation.label != label:
            first, _ = operation.parties[0]
            raise PlanError(
                f"rank {r}, step {s}: {say_operation(label)} on channel {op.channel} meets "
                f"{say_operation(operation.label)} of rank {first.rank}, step {first.step}"
            )
        return operation

    def _first(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Of the groups that are multiples of the period further, the first one, and how much further that is."""
        if group not in self.groups:
            turns = range(0, self.plan.n, self.period)
            turned = [(tuple(sorted((member + turn) % self.plan.n for member in group)), turn) for turn in turns]
            self.groups[group] = min(turned)
        return self.groups[group]

    def _move(self, r: int, op: Comm, operation: Operation, batch: Batch) -> None:
        held = self.held[r]
        for key in op.reads(r):
            operation.given.setdefault(r, {})[key] = held.pop(key) if key[0] in PARTIAL else held[key]
        for key in op.brings(r):
            self.arriving[r][key].append((operation, batch, op))

    def _given(self, r: int, s: int, operation: Operation, op: Comm, key: Key) -> int:
        """The contributions to a chunk that rank `r` receives."""
        total, n, (tensor, chunk) = 0, self.plan.n, key
        if isinstance(op, Send | Recv):
            givers: tuple[int, ...] = (op.peer,)
        else:
            givers = op.group if isinstance(op, ReduceScatter) else (op.group[op.chunks.index(chunk)],)
        for giver in givers:
            like = giver % self.period
            turn = giver - like
            value = operation.given[like][tensor, (chunk - turn) % n]
            if turn:
                value = (value << turn | value >> (n - turn)) & ((1 << n) - 1)
            if total & value:
                raise PlanError(f"rank {r}, step {s}: {say(key)} reduced with blocks counted twice")
            total |= value
        return total

    def _start(self, batch: Batch) -> None:
        batch.previous = None
        for operation in batch.operations:
            operation.started += 1
            if operation.started == operation.parties_needed:
                self.started.append(operation)

    def complete(self, operation: Operation) -> None:
        """Completes the batches of which this operation was the last, and starts those behind them."""
        for batch, _ in operation.parties:
            batch.open -= 1
            if batch.open == 0:
                batch.done = True
                self.completed.append(batch)
                if batch.following:
                    self._start(batch.following)

    def check_matched(self) -> None:
        """Raises PlanError if an operation has no counterpart."""
        for queue in self.unmatched.values():
            for operation in queue:
                if len(operation.parties) < operation.parties_needed:
                    batch, _ = operation.parties[0]
                    raise PlanError(
                        f"rank {batch.rank}, step {batch.step}: {say_operation(operation.label)} has no counterpart"
                    )


def say(key: Key) -> str:
    return f"{key[0]} chunk {key[1]}"


def say_operation(label: tuple) -> str:
    kind, tensor, chunks = label
    named = f"chunk {chunks[0]}" if kind == "p2p" else f"chunks {chunks}"
    return f"{'message' if kind == 'p2p' else kind} {tensor} {named}"
