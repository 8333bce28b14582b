"""The times of all blocks and messages of a plan: the symbolic machine with a clock."""

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from .flows import Flows, Task
from .form import check_form
from .ir import Attend, Comm, Key, Message, Plan, PlanError, SwapHeads, Transfer
from .machine import Block, Launch, Machine, MatchedOp, Merge, Overhead, Swap, SwapStart, SwapWait, Wait

INSTANT = Launch, Merge, SwapStart  # after it a rank goes on, if it takes no time
Rank = tuple[int, int]  # group, and rank in the steps


class Span(NamedTuple):
    """An interval on a rank: a block (`channel` empty), a batch of a channel, or a head swap.

    Attributes:
        step: its number; with several rounds they go on counting.
        what: the block, the operations of the batch, or the swap.
    """

    rank: int
    step: int
    channel: str
    what: tuple
    start: float
    end: float


@dataclass
class Trace:
    """The result of a run.

    Attributes:
        spans: each block, batch and swap, with its time.
        finish: the end of the last of them.
        held: for each rank, the contributions that it has at the end, by (tensor, chunk).
    """

    spans: list[Span]
    finish: float
    held: list[dict[Key, int]]


class Costs(Protocol):
    """The costs of blocks and messages."""

    flows: Flows

    def block(self, group: int, rank: int, attend: Attend, round_index: int) -> Task:
        """The task of a block in a round."""
        ...

    def overhead(self, group: int, rank: int, work: Overhead) -> Task | None:
        """The task of anything that is neither block nor message. None: it takes no time."""
        ...

    def messages(self, group: int, op: Comm | SwapHeads, transfers: Sequence[Transfer]) -> Iterable[tuple[Task, float]]:
        """The tasks of an operation that moves `transfers`, and the seconds before each starts."""
        ...


class _Alone:
    """Each channel of each rank has a separate line in each direction."""

    def __init__(self, plan: Plan, block_time: Callable, transfer_time: Callable[[Transfer], float] | None) -> None:
        self.plan = plan
        self.block_time = block_time
        self.transfer_time = transfer_time
        self.flows = Flows()

    def block(self, group: int, rank: int, attend: Attend, round_index: int) -> Task:
        return Task(attend.share * self.plan.block_share(round_index) * self.block_time(attend, self.plan))

    def overhead(self, group: int, rank: int, work: Overhead) -> None:
        return None

    def messages(self, group: int, op: Comm | SwapHeads, transfers: Sequence[Transfer]) -> Iterator[tuple[Task, float]]:
        for transfer in transfers:
            if time := self.transfer_time(transfer) if self.transfer_time else 0.0:
                lines = (op.channel, transfer.sender, "out"), (op.channel, transfer.receiver, "in")
                yield Task(time, tuple([self.flows.resource(line, 1.0) for line in lines])), 0.0


def _pair_cost(attend: Attend, plan: Plan) -> float:
    return sum(1 for _ in attend.pairs(plan.visible_pairs))


def trace(
    plan: Plan,
    block_time: Callable[[Attend, Plan], float] = _pair_cost,
    transfer_time: Callable[[Transfer], float] | None = None,
) -> Trace:
    """Runs `plan` on the symbolic machine.

    Args:
        plan: the plan.
        block_time: the time of a block, for all heads; default: 1 for each pair of chunks that the mask does not empty.
        transfer_time: the time of a chunk, or share of one, from sender to receiver, in the same unit; default: 0.

    Raises:
        PlanError: an invalid form (`check_form`), an operation without counterpart or out of order, a deadlock, or a
            chunk that is missing or counted twice.
    """
    check_form(plan)
    clock = Clock(plan, _Alone(plan, block_time, transfer_time))
    clock.run()
    return Trace(clock.spans, max((span.end for span in clock.spans), default=0.0), clock.machines[0].held)


class Clock:
    """Runs machines, one for each group of ranks that runs the steps of a plan.

    Args:
        plan: the plan.
        costs: the costs of its blocks and messages.
        groups: the number of its `heads` groups that run. The others behave the same. Spans describe the first.
        period, buffered: as in `Machine`.
        starts: the time at which each rank begins; default: 0.

    Attributes:
        ends: the time at which each rank was done.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        groups: int = 1,
        period: int | None = None,
        buffered: bool = False,
        starts: Mapping[Rank, float] | None = None,
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.flows = costs.flows
        self.spans: list[Span] = []
        self.machines = [Machine(plan, period, buffered) for _ in range(groups)]
        ranks = range(period or plan.n)
        self.programs = {(g, r): machine.program(r) for g, machine in enumerate(self.machines) for r in ranks}
        self.ends: dict[Rank, float] = {}
        self.ready = deque[Rank]() if starts else deque(self.programs)
        self.resume = {rank: partial(self.ready.append, rank) for rank in self.programs}
        for rank, start in (starts or {}).items():
            self.flows.add(self.resume[rank], Task(start))
        self.waiting: dict[Rank, Wait] = {}
        self.swapping: dict[tuple[int, Swap], int] = Counter()  # ranks that have started a swap, by context rank
        self.swapped: set[tuple[int, Swap]] = set()
        self.waiting_for_swap: dict[Rank, Swap] = {}

    def run(self) -> None:
        """Runs all ranks to their end. Raises PlanError as `trace` does."""
        with _no_garbage_collection():
            self._run()
        for machine in self.machines:
            machine.check_matched()

    def _run(self) -> None:
        while self.programs:
            while self.ready:
                self._resume(self.ready.popleft())
            if not self.programs:
                break
            done = self.flows.advance()
            if not done:
                raise PlanError(_deadlock(self.waiting))
            for what in done:
                what()
            for group in range(len(self.machines)):
                self._run_matched(group)

    def _resume(self, rank: Rank) -> None:
        group, context_rank = rank
        program = self.programs[rank]
        event = next(program, None)
        while isinstance(event, INSTANT):
            if isinstance(event, SwapStart):
                self._swap(context_rank, event)
            elif task := self.costs.overhead(group, context_rank, event):
                self.flows.add(self.resume[rank], task)
                break
            event = next(program, None)
        if self.machines[group].started:
            self._run_matched(group)
        if isinstance(event, Block):
            task = self.costs.block(group, context_rank, event.attend, event.round_index)
            self.flows.add(partial(self._computed, rank, event, self.flows.now), task)
        elif isinstance(event, Wait):
            if event.batch.done:
                self.ready.append(rank)
            else:
                self.waiting[rank] = event
        elif isinstance(event, SwapWait):
            if (context_rank, event.swap) in self.swapped:
                self.ready.append(rank)
            else:
                self.waiting_for_swap[rank] = event.swap
        elif event is None:
            del self.programs[rank]
            self.ends[rank] = self.flows.now

    def _computed(self, rank: Rank, event: Block, start: float) -> None:
        if rank[0] == 0:
            self.spans.append(Span(rank[1], event.step, "", (event.attend,), start, self.flows.now))
        self.ready.append(rank)

    # -- matched operations ------------------------------------------------------------------------------------

    def _run_matched(self, group: int) -> None:
        """Starts the messages of operations that all parties have started, and completes those without duration."""
        machine = self.machines[group]
        while machine.started:
            matched = machine.started.pop()
            batch, op = matched.parties[-1]
            transfers: Sequence[Transfer]
            if isinstance(op, Message):
                transfers = op.transfers(batch.rank)
            else:
                own = ((batch.rank, op.transfers(batch.rank)) for batch, op in matched.parties)
                transfers = [t for rank, moved in own for t in moved if t.receiver == rank]
            for batch, _ in matched.parties:
                batch.begin = self.flows.now
            machine.complete_buffered_sends(matched)
            if machine.completed:
                self._note_completed(group)
            self._send(self.costs.messages(group, op, transfers), partial(self._complete, group, matched))

    def _send(self, messages: Iterable[tuple[Task, float]], then: Callable[[], None]) -> None:
        """Starts messages, and calls `then` when all have arrived."""
        tasks = [message for message in messages if message[0].size or message[1]]
        if not tasks:
            then()
            return
        if len(tasks) == 1:
            self.flows.add(then, *tasks[0])
            return
        under_way = len(tasks)

        def arrived() -> None:
            nonlocal under_way
            under_way -= 1
            if under_way == 0:
                then()

        for task, delay in tasks:
            self.flows.add(arrived, task, delay)

    def _complete(self, group: int, matched: MatchedOp) -> None:
        self.machines[group].complete(matched)
        self._note_completed(group)

    def _note_completed(self, group: int) -> None:
        """Resumes ranks that waited for batches that are now complete."""
        completed, now = self.machines[group].completed, self.flows.now
        for batch in completed:
            if group == 0:
                self.spans.append(Span(batch.rank, batch.step, batch.channel, tuple(batch.comm), batch.begin, now))
            rank = group, batch.rank
            waiting = self.waiting.get(rank)
            if waiting and waiting.batch is batch:
                del self.waiting[rank]
                self.ready.append(rank)
        completed.clear()

    def _swap(self, context_rank: int, event: SwapStart) -> None:
        """The messages of a head swap start when the last of its ranks has started it."""
        step, swap = event
        op = swap.op
        self.swapping[context_rank, swap] += 1
        if self.swapping[context_rank, swap] < len(self.machines):
            return
        groups = range(len(self.machines))
        ranks = [self.plan.grid.rank(heads=g, context=context_rank) for g in groups]
        transfers = [t for r in ranks for t in self.plan.swap_transfers(op, r) if t.receiver == r]
        start = self.flows.now

        def swapped() -> None:
            self.spans.append(Span(context_rank, step, op.channel, (op,), start, self.flows.now))
            self.swapped.add((context_rank, swap))
            for rank in [(g, context_rank) for g in groups]:
                if self.waiting_for_swap.get(rank) == swap:
                    del self.waiting_for_swap[rank]
                    self.ready.append(rank)

        self._send(self.costs.messages(0, op, transfers), swapped)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables Python's garbage collector: its scans of all objects would take as long as a long run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _deadlock(waiting: dict[Rank, Wait]) -> str:
    (_, r), first = min(waiting.items(), key=lambda item: item[1].batch.step)
    others = ", ".join(f"rank {o} at step {w.step} for {w.what}" for (_, o), w in waiting.items() if o != r)
    return (
        f"rank {r}, step {first.step}: waits forever for {first.what}, launched in step {first.batch.step} on channel "
        f"{first.batch.channel}; also waiting: {others or 'none'}"
    )
