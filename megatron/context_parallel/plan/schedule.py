"""A rank's steps as its executor runs them: what is launched together, waited for and freed."""

from typing import NamedTuple

from .ir import PARTIAL, AllGather, Attend, Comm, Key, Plan, Recv, ReduceScatter, Send, batches
from .liveness import last_reads


class Messages(NamedTuple):
    """A batch of messages on a channel. A key names the tensor and the chunk that a message carries."""

    channel: str
    sends: tuple[tuple[Key, int], ...]  # with the peer
    receives: tuple[tuple[Key, int], ...]
    ops: tuple[Comm, ...]


class Scheduled(NamedTuple):
    """One step of a rank.

    Attributes:
        collectives, messages: what it launches, in this order.
        attend: its blocks, each with the chunks that it needs.
        freed: the received copies that no later step reads.
    """

    collectives: tuple[AllGather | ReduceScatter, ...]
    messages: tuple[Messages, ...]
    attend: tuple[tuple[Attend, tuple[Key, ...]], ...]
    freed: tuple[Key, ...]


def schedule(plan: Plan, rank: int) -> tuple[Scheduled, ...]:
    """The steps of `rank` (of those that run the steps together). Found once for a plan and rank."""
    if rank not in plan.schedules:
        freed: dict[int, list[Key]] = {}
        for (tensor, chunk), step in last_reads(plan, rank).items():
            if tensor not in PARTIAL and chunk != rank:
                freed.setdefault(step, []).append((tensor, chunk))
        plan.schedules[rank] = tuple(
            Scheduled(
                tuple(op for op in step.comm if isinstance(op, AllGather | ReduceScatter)),
                tuple(
                    Messages(channel, _ends(ops, Send), _ends(ops, Recv), tuple(ops))
                    for channel, ops in batches(step.comm)
                    if isinstance(ops[0], Send | Recv)
                ),
                tuple((attend, attend.reads(plan.backward)) for attend in step.attend),
                tuple(freed.get(s, ())),
            )
            for s, step in enumerate(plan.steps[rank])
        )
    return plan.schedules[rank]


def _ends(ops: list[Comm], kind: type[Send | Recv]) -> tuple[tuple[Key, int], ...]:
    return tuple(((op.tensor, op.chunk), op.peer) for op in ops if isinstance(op, kind))
