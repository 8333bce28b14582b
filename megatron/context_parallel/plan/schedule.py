"""A rank's steps as its executor runs them: operations launched together, waits, and chunks to free."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from .ir import PARTIAL, Attend, Collective, Comm, Key, Message, Plan, Recv, Send, T, batches
from .liveness import last_reads


class MessageBatch(NamedTuple):
    """A batch of messages on a channel. A key names the tensor and the chunk that a message carries."""

    channel: str
    sends: tuple[tuple[Key, int], ...]  # with the peer
    receives: tuple[tuple[Key, int], ...]
    ops: tuple[Comm, ...]


class ScheduledBlock(NamedTuple):
    """A block of a step.

    Attributes:
        needed: the chunks that it needs.
        last: whether the next block has other keys, or their gradients are sent before it. Until then gathered keys are
            kept, and their gradients are accumulated.
    """

    attend: Attend
    needed: tuple[Key, ...]
    last: bool


class Scheduled(NamedTuple):
    """One step of a rank.

    Attributes:
        collectives, messages: the operations that it launches, in this order.
        blocks: the blocks that it computes.
        freed: the received copies that no later step reads.
    """

    collectives: tuple[Collective, ...]
    messages: tuple[MessageBatch, ...]
    blocks: tuple[ScheduledBlock, ...]
    freed: tuple[Key, ...]


_schedules: WeakKeyDictionary[Plan, dict[int, tuple[Scheduled, ...]]] = WeakKeyDictionary()  # by rank


def schedule(plan: Plan, rank: int) -> tuple[Scheduled, ...]:
    """The steps of `rank` (among the ranks that run the steps together), computed once for each plan and rank."""
    by_rank = _schedules.setdefault(plan, {})
    if rank not in by_rank:
        by_rank[rank] = tuple(_scheduled(plan, rank))
    return by_rank[rank]


def _scheduled(plan: Plan, rank: int) -> Iterator[Scheduled]:
    freed: dict[int, list[Key]] = {}
    for (tensor, chunk), last_read in last_reads(plan, rank).items():
        if tensor not in PARTIAL and chunk != rank:
            freed.setdefault(last_read, []).append((tensor, chunk))
    last = _last(plan, rank)
    for s, step in enumerate(plan.steps[rank]):
        collectives = tuple(op for op in step.comm if isinstance(op, Collective))
        messages = [
            MessageBatch(channel, _ends(ops, Send), _ends(ops, Recv), tuple(ops))
            for channel, ops in batches(step.comm)
            if isinstance(ops[0], Message)
        ]
        blocks = [ScheduledBlock(attend, attend.reads(plan.backward), next(last)) for attend in step.attend]
        yield Scheduled(collectives, tuple(messages), tuple(blocks), tuple(freed.get(s, ())))


def _ends(ops: list[Comm], kind: type[Message]) -> tuple[tuple[Key, int], ...]:
    return tuple(((op.tensor, op.chunk), op.peer) for op in ops if isinstance(op, kind))


def _last(plan: Plan, rank: int) -> Iterator[bool]:
    """`ScheduledBlock.last` of each block of `rank`, in order."""
    steps = plan.steps[rank]
    blocks = [(s, attend.kv_chunks) for s, step in enumerate(steps) for attend in step.attend]
    for (before, chunks), (after, following) in pairwise(blocks):
        ops = (op for step in steps[before + 1 : after + 1] for op in step.comm)
        leaves = any(tensor is T.DKV and chunk in chunks for op in ops for tensor, chunk in op.reads(rank))
        yield chunks != following or leaves
    yield True
