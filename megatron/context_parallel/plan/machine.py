"""Runs a plan symbolically: what each rank holds, and which rank it waits for. A clock can add times.

The machine has the same batches and limits as the executor, and stricter rules:

- A rank launches the batches of a step when it has all data that the step sends.
- A batch starts when the batch before it on its channel is complete.
- A batch completes as a whole, when each of its operations is complete on all participating ranks.

So a plan that passes here does not hang with NCCL or gloo. A partial is represented by the set of its contributions
(bits of chunks). So a block that is counted twice or lost is detected where it happens.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, NoReturn

from megatron.context_parallel.tokens.shift import Shift

from .ir import (
    IN_FLIGHT,
    OF_KEYS,
    PARTIAL,
    Attend,
    Collective,
    Comm,
    Key,
    Message,
    Plan,
    PlanError,
    Recv,
    ReduceScatter,
    Send,
    SwapHeads,
    T,
    Transfer,
    batches,
)


class MatchedOp:
    """A message or a collective with all of its ranks, matched from the operations of each, and what each contributes.

    Attributes:
        label: kind, tensor and chunks, which must be the same on all of them.
        parties: the batches and operations of the ranks that have launched it; `parties_needed`: how many it needs.
    """

    __slots__ = ("contributions", "label", "parties", "parties_needed", "started")

    def __init__(self, label: tuple, parties_needed: int) -> None:
        self.label, self.parties_needed = label, parties_needed
        self.parties: list[tuple[CommBatch, Comm]] = []
        self.started = 0  # parties whose batch has started
        self.contributions: dict[tuple[int, Key], int] = {}  # by rank, and tensor and chunk


class CommBatch:
    """The operations that a rank launches together on a channel."""

    __slots__ = ("begin", "channel", "comm", "done", "following", "matched", "pending", "previous", "rank", "step")

    def __init__(self, rank: int, step: int, channel: str, comm: list[Comm], previous: "CommBatch | None") -> None:
        self.rank, self.step, self.channel, self.comm, self.previous = rank, step, channel, comm, previous
        self.matched: Sequence[MatchedOp] = ()  # until it starts
        self.following: CommBatch | None = None
        self.pending = len(comm)  # the number of operations that are not complete
        self.begin = 0.0  # when the last of them started
        self.done = False


class CollectiveQueue(NamedTuple):
    """The collectives of a group on a channel.

    Attributes:
        unmatched: those that not all parties have launched, by their number.
        launched: the number that each party has launched.
    """

    unmatched: dict[int, MatchedOp]
    launched: dict[int, int]


class Wait(NamedTuple):
    """A rank continues when a batch is complete: it needs `key`, or, with None, a place in flight."""

    step: int
    key: Key | None
    batch: CommBatch

    @property
    def what(self) -> str:
        return say(self.key) if self.key else f"the oldest of the {IN_FLIGHT} batches in flight"


class Launch(NamedTuple):
    """The start of a step, or of a swap: the time to launch its operations, before any of them starts."""

    comm: tuple[Comm | SwapHeads, ...]
    first: bool  # the pass begins with it
    swap: SwapHeads | None = None


class Merge(NamedTuple):
    """Received partials are added to what the rank has. `message`: what brought them; None: a collective did."""

    tensor: T
    times: int
    message: Transfer | None


class Block(NamedTuple):
    """A rank continues when it has computed a block."""

    step: int
    attend: Attend
    round_index: int


class Swap(NamedTuple):
    """The head swap before or after a round."""

    op: SwapHeads
    round: int


class SwapStart(NamedTuple):
    """A rank starts a head swap, and continues."""

    step: int
    swap: Swap


class SwapWait(NamedTuple):
    """A rank continues when a head swap is complete."""

    swap: Swap


Overhead = Launch | Merge  # a rank continues when it has done it
Event = Wait | Block | Overhead | SwapStart | SwapWait
Arriving = dict[Key, list[tuple[MatchedOp, CommBatch, Comm]]]  # by what it brings


class Machine:
    """The ranks of a plan. `program` is the program of one rank: it yields what the rank must wait for.

    If rank r + `period` does the same as rank r, with all ranks and chunks moved by `period`, only the ranks below
    `period` run. Each represents all ranks moved by multiples of `period` (`Shift`, with the width of the plan).

    With `buffered`, a message is complete for its sender when it starts, and the batches of a channel may overlap, as
    with gloo.

    Attributes:
        started: operations that all parties have started, for the clock. It calls `complete` when they end.
        completed: batches that are complete, for the clock.
    """

    def __init__(self, plan: Plan, period: int | None = None, buffered: bool = False) -> None:
        self.plan = plan
        self.n = plan.n
        self.shift = Shift(plan.n, period, plan.width) if period else Shift(plan.n, plan.n)
        self.symmetric = self.shift.period < plan.n
        self.results = plan.results
        self.buffered = buffered
        self.held: list[dict[Key, int]] = [{} for _ in range(self.shift.period)]  # in the round at work
        self.arriving: list[Arriving] = [{} for _ in self.held]
        self.partly_computed: list[dict[tuple, float]] = [{} for _ in self.held]  # blocks, and the share of their heads
        self.groups: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self.launched: dict[tuple[int, str], deque[CommBatch]] = defaultdict(partial(deque, maxlen=IN_FLIGHT))
        self.messages: dict[tuple, list[MatchedOp]] = defaultdict(list)  # without counterpart, by their ends
        self.collectives: dict[tuple, CollectiveQueue] = defaultdict(lambda: CollectiveQueue({}, {}))
        self.started: list[MatchedOp] = []
        self.completed: list[CommBatch] = []

    # -- one rank's program ------------------------------------------------------------------------------------

    def program(self, r: int) -> Iterator[Event]:
        """The waits of rank `r`, in order. The steps of round k are counted from k times their number."""
        plan = self.plan
        count = len(plan.steps[r])
        last = plan.rounds - 1
        yield from _start_swap(plan.swaps_before, 0, 0)
        leaving: Iterable[Event] = ()
        for k in range(plan.rounds):
            yield from [SwapWait(Swap(op, k)) for op in plan.swaps_before]
            entering = _start_swap(plan.swaps_before if k < last else (), k + 1, (k + 1) * count)
            if not plan.rounds_overlap:
                yield from entering
            yield from self._steps(r, k, k * count, chain(entering, leaving))
            leaving = self._end_round(r, k, (k + 1) * count, self.held[r], self.arriving[r])
            if not plan.rounds_overlap:
                yield from leaving
        yield from leaving
        yield from [SwapWait(Swap(op, last)) for op in plan.swaps_after]

    def _end_round(self, r: int, k: int, end: int, held: dict[Key, int], arriving: Arriving) -> Iterator[Event]:
        """The end of round k: what its last steps bring, and the swap back."""
        for key in list(arriving):
            yield from self._receive(r, end, key, held, arriving)
        if k > 0:
            yield from [SwapWait(Swap(op, k - 1)) for op in self.plan.swaps_after]
        yield from _start_swap(self.plan.swaps_after, k, end)

    def _steps(self, r: int, round_index: int, first: int, meanwhile: Iterable[Event]) -> Iterator[Event]:
        """The steps of a round of rank `r`, counted from `first`, with other events after the first block."""
        held = self.held[r] = {(t, r): 1 << r for t in self.plan.inputs}
        arriving = self.arriving[r] = {}
        backward, partly_computed = self.plan.backward, self.partly_computed[r]
        for s, step in enumerate(self.plan.steps[r], first):
            yield Launch(step.comm, s == 0)
            for op in step.comm:
                for key in op.reads(r):
                    if key in arriving:
                        yield from self._receive(r, s, key, held, arriving)
                    elif key not in held:
                        if key[0] not in PARTIAL:
                            kind = type(op).__name__
                            raise PlanError(f"rank {r}, step {s}: {kind} of {say(key)}, which the rank does not have")
                        held[key] = 0  # no contribution: zeros are sent
                    if partly_computed and key[0] in PARTIAL:
                        self._check_whole(r, s, key)
            for channel, ops in batches(step.comm):
                running = self.launched[r, channel]
                if len(running) == IN_FLIGHT and not running[0].done:
                    yield Wait(s, None, running[0])
                self._launch(CommBatch(r, s, channel, ops, running[-1] if running else None), running)
            for attend in step.attend:
                for key in attend.reads(backward):
                    if key in arriving:
                        yield from self._receive(r, s, key, held, arriving)
                    elif key not in held:
                        raise PlanError(f"rank {r}, step {s}: block needs {say(key)}, which the rank does not have")
                self._compute(r, s, attend)
                yield Block(s, attend, round_index)
            if step.attend:
                yield from meanwhile
        for (q_chunks, kv_chunks), done in partly_computed.items():
            end = first + len(self.plan.steps[r])
            which = f"block of query chunks {q_chunks} and key chunks {kv_chunks}"
            raise PlanError(f"rank {r}, step {end}: {which} ends with {done} of the heads; compute the rest")
        yield from meanwhile

    def _receive(self, r: int, s: int, key: Key, held: dict[Key, int], arriving: Arriving) -> Iterator[Event]:
        """Waits for a chunk, and merges the partials that have arrived."""
        for matched, batch, op in arriving.pop(key):
            if not batch.done:
                yield Wait(s, key, batch)
            value = self._contributions(r, s, matched, op, key)
            if key in held and key[0] not in PARTIAL:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received, but the rank already has it")
            before = held.get(key, 0)
            if before & value:
                raise PlanError(f"rank {r}, step {s}: {say(key)} received with blocks that it already contains")
            if key[0] in PARTIAL:
                times = (len(op.group) - 1 if isinstance(op, ReduceScatter) else 1) - (key not in held)
                if times:
                    message = op.transfers(r)[0] if isinstance(op, Recv) else None
                    yield Merge(key[0], times, message)
            held[key] = before | value

    def _compute(self, r: int, s: int, attend: Attend) -> None:
        """Adds the pairs of a block to the partials of its chunks, with the last part of its heads."""
        block = attend.q_chunks, attend.kv_chunks
        if (done := self.partly_computed[r].pop(block, 0.0)) != attend.heads[0]:
            which = f"block of query chunks {block[0]} and key chunks {block[1]}"
            raise PlanError(f"rank {r}, step {s}: {which} from {attend.heads[0]} of the heads, after {done} of them")
        if attend.heads[1] < 1:
            self.partly_computed[r][block] = attend.heads[1]
            return
        visible_pairs = self.plan.visible_pairs
        self._add(r, s, self.results[0], attend.q_chunks, visible_pairs.rows, attend.kv_chunks)
        if self.plan.backward:
            self._add(r, s, self.results[1], attend.kv_chunks, visible_pairs.columns, attend.q_chunks)

    def _check_whole(self, r: int, s: int, key: Key) -> None:
        """Raises PlanError if a partial that leaves has some heads only of a block."""
        tensor, chunk = key
        for q_chunks, kv_chunks in self.partly_computed[r]:
            if chunk in (kv_chunks if tensor in OF_KEYS else q_chunks):
                raise PlanError(f"rank {r}, step {s}: {say(key)} is sent with a part of the heads of a block")

    def _add(
        self, r: int, s: int, tensor: T, chunks: tuple[int, ...], seen: tuple[int, ...], others: tuple[int, ...]
    ) -> None:
        held = self.held[r]
        bits = 1 << others[0] if len(others) == 1 else sum([1 << other for other in others])
        for chunk in chunks:
            if added := seen[chunk] & bits:
                before = held.get((tensor, chunk), 0)
                if twice := before & added:
                    other = (twice & -twice).bit_length() - 1
                    q, kv = (other, chunk) if tensor is T.DKV else (chunk, other)
                    raise PlanError(f"rank {r}, step {s}: block (query chunk {q}, key chunk {kv}) computed twice")
                held[tensor, chunk] = before | added

    # -- channels ----------------------------------------------------------------------------------------------

    def _launch(self, batch: CommBatch, running: deque[CommBatch]) -> None:
        """Launches a batch after those of its channel that are `running`."""
        r, previous, of_batch = batch.rank, batch.previous, list[MatchedOp]()
        if previous:
            previous.following = batch
        running.append(batch)
        held, arriving = self.held[r], self.arriving[r]
        for op in batch.comm:
            matched = self._match_message(batch, op) if isinstance(op, Message) else self._match_collective(batch, op)
            matched.parties.append((batch, op))
            of_batch.append(matched)
            for key in op.reads(r):
                matched.contributions[r, key] = held.pop(key) if key[0] in PARTIAL else held[key]
            for key in op.brings(r):
                arriving.setdefault(key, []).append((matched, batch, op))
        batch.matched = of_batch
        if self.buffered or previous is None or previous.done:
            self._start(batch)

    def _match_message(self, batch: CommBatch, op: Message) -> MatchedOp:
        """The message of `op`: the first without this end on the channel between its ranks, or a new one."""
        sends = isinstance(op, Send)
        sender, receiver = (batch.rank, op.peer) if sends else (op.peer, batch.rank)
        chunk = op.chunk
        if self.symmetric and (by := self.shift.way_back(sender)):
            sender, receiver, chunk = [self.shift.moved(number, by) for number in (sender, receiver, chunk)]
        waiting = self.messages[sender, receiver, op.channel]
        label = "p2p", op.tensor, (chunk,)
        if not waiting or isinstance(waiting[0].parties[0][1], Send) == sends:
            matched = MatchedOp(label, 2)
            waiting.append(matched)
            return matched
        matched = waiting.pop(0)
        if matched.label != label:
            self._mismatch(batch, op, label, matched)
        return matched

    def _match_collective(self, batch: CommBatch, op: Collective) -> MatchedOp:
        """The collective of `op`: the next of its group on the channel."""
        r, shift = batch.rank, self.shift
        group, by = self._representative(op.group)
        queue = self.collectives[group, op.channel]
        label = type(op).__name__, op.tensor, tuple(shift.moved(chunk, by) for chunk in op.chunks)
        number = queue.launched.get(r, 0)
        queue.launched[r] = number + 1
        matched = queue.unmatched.get(number)
        if matched is None:
            parties = {shift.representative(member) for member in group}
            matched = queue.unmatched[number] = MatchedOp(label, len(parties))
        elif matched.label != label:
            self._mismatch(batch, op, label, matched)
        if len(matched.parties) + 1 == matched.parties_needed:
            del queue.unmatched[number]
        return matched

    def _mismatch(self, batch: CommBatch, op: Comm, label: tuple, matched: MatchedOp) -> NoReturn:
        other, _ = matched.parties[0]
        raise PlanError(
            f"rank {batch.rank}, step {batch.step}: {say_operation(label)} on channel {op.channel} meets "
            f"{say_operation(matched.label)} of rank {other.rank}, step {other.step}"
        )

    def _representative(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The first of the groups that are moved by multiples of the period, and the move."""
        if group not in self.groups:
            moved = []
            for by in range(0, self.n, self.shift.period):
                members = sorted([self.shift.moved(member, by) for member in group])
                moved.append((tuple(members), by))
            self.groups[group] = min(moved)
        return self.groups[group]

    def _contributions(self, r: int, s: int, matched: MatchedOp, op: Comm, key: Key) -> int:
        """The contributions to a chunk that rank `r` receives."""
        total = 0
        shift = self.shift
        tensor, chunk = key
        givers: tuple[int, ...]
        if isinstance(op, Message):
            givers = (op.peer,)
        else:
            givers = op.group if isinstance(op, ReduceScatter) else (op.group[op.chunks.index(chunk)],)
        for giver in givers:
            if self.symmetric and (by := shift.way_back(giver)):
                given = matched.contributions[shift.moved(giver, by), (tensor, shift.moved(chunk, by))]
                value = shift.moved_bits(given, -by)
            else:
                value = matched.contributions[giver, key]
            if total & value:
                raise PlanError(f"rank {r}, step {s}: {say(key)} reduced with blocks counted twice")
            total |= value
        return total

    def _start(self, batch: CommBatch) -> None:
        of_batch, batch.matched, batch.previous = batch.matched, (), None
        for matched in of_batch:
            matched.started += 1
            if matched.started == matched.parties_needed:
                self.started.append(matched)

    def complete_buffered_sends(self, matched: MatchedOp) -> None:
        """Completes the sends of an operation of `started`: a buffered message is complete when it starts."""
        if self.buffered:
            for batch, op in matched.parties:
                if isinstance(op, Send):
                    self._count_complete(batch)

    def complete(self, matched: MatchedOp) -> None:
        """Completes the batches whose last operation this was, and starts the next batches."""
        for batch, op in matched.parties:
            if not (self.buffered and isinstance(op, Send)):
                self._count_complete(batch)

    def _count_complete(self, batch: CommBatch) -> None:
        batch.pending -= 1
        if batch.pending == 0:
            batch.done = True
            self.completed.append(batch)
            if batch.following:
                self._start(batch.following)

    def check_matched(self) -> None:
        """Raises PlanError if an operation has no counterpart."""
        left = [*self.messages.values(), *(queue.unmatched.values() for queue in self.collectives.values())]
        for matched in chain.from_iterable(left):
            batch, _ = matched.parties[0]
            raise PlanError(f"rank {batch.rank}, step {batch.step}: {say_operation(matched.label)} has no counterpart")


def _start_swap(swaps: tuple[SwapHeads, ...], number: int, step: int) -> Iterator[Event]:
    """The start of a round's head swap, if there is one, with the time to pack heads."""
    for op in swaps:
        yield Launch((op,), False, op)
        yield SwapStart(step, Swap(op, number))


def say(key: Key) -> str:
    return f"{key[0]} chunk {key[1]}"


def say_operation(label: tuple) -> str:
    kind, tensor, chunks = label
    named = f"chunk {chunks[0]}" if kind == "p2p" else f"chunks {chunks}"
    return f"{'message' if kind == 'p2p' else kind} {tensor} {named}"
