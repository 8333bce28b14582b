"""Readers of plans that move nothing: who waits for whom under the executor, or under one queue per rank.

Written from the executor and the transports, not from the machine that `verify` uses, which they are to check.
"""

from collections import defaultdict
from collections.abc import Iterator

from megatron.context_parallel.plan.ir import (
    IN_FLIGHT,
    AllGather,
    Attend,
    Plan,
    Recv,
    ReduceScatter,
    Send,
    SwapHeads,
    T,
)


class Batch:
    """Operations launched together; complete when every other end of each has been launched."""

    def __init__(self, label: str) -> None:
        self.label, self.meetings = label, []

    @property
    def complete(self) -> bool:
        return all(len(there) == needed for there, needed in self.meetings)


class Network:
    """What has been launched: the nth message of a line, or nth collective of a group, meets its other ends."""

    def __init__(self) -> None:
        self.there: dict[tuple, set] = defaultdict(set)
        self.count: dict[tuple, int] = defaultdict(int)

    def join(self, batch: Batch, line: tuple, end: object, needed: int) -> None:
        nth = self.count[line, end]
        self.count[line, end] += 1
        there = self.there[line, nth]
        there.add(end)
        batch.meetings.append((there, needed))

    def message(self, batch: Batch, channel: str, source: int, to: int, sends: bool) -> None:
        self.join(batch, (channel, source, to), "sender" if sends else "receiver", 2)


def stuck(plan: Plan, one_queue: bool) -> list[str]:
    """The ranks that wait forever, as lines to read; none if the plan ends.

    A rank waits as the executor does; with `one_queue` it waits for each batch as soon as it has launched it, as
    kernels of NCCL do where CUDA_DEVICE_MAX_CONNECTIONS is 1. Sums are then collectives.
    """
    network = Network()
    programs = {rank: _program(plan, rank, network, one_queue) for rank in range(plan.all_ranks)}
    waits: dict[int, Batch | None] = dict.fromkeys(programs)
    while True:
        free = [rank for rank, batch in waits.items() if batch is None or batch.complete]
        if not free:
            return [batch.label for batch in waits.values()]
        for rank in free:
            waits[rank] = next(programs[rank], None)
            if waits[rank] is None:
                del waits[rank]


def _program(plan: Plan, rank: int, network: Network, one_queue: bool) -> Iterator[Batch]:
    """What one of all ranks waits for, in turn."""
    place = plan.grid.coordinates(rank)
    r, ranks = place["context"], plan.grid.along(rank, "context")
    arriving: dict[tuple, list[Batch]] = defaultdict(list)
    launched: dict[str, list[Batch]] = defaultdict(list)

    def launch(s: int, channel: str, ops: list) -> Iterator[Batch]:
        yield from launched[channel][-IN_FLIGHT:][:1] if len(launched[channel]) >= IN_FLIGHT else ()
        batch = Batch(f"rank {rank}, step {s}, channel {channel}: {ops}")
        for op in ops:
            _join(network, batch, op, rank, r, ranks, one_queue)
            for key in _brings(op, r):
                arriving[key].append(batch)
        launched[channel].append(batch)
        if one_queue:
            yield batch

    def swap(ops: tuple[SwapHeads, ...], started: list[Batch]) -> Iterator[Batch]:
        for op in ops:
            batch = Batch(f"rank {rank}: {op}")
            for peer in plan.grid.along(rank, "heads"):
                if peer != rank:
                    network.message(batch, op.channel, rank, peer, True)
                    network.message(batch, op.channel, peer, rank, False)
            started.append(batch)
            if one_queue:
                yield batch

    def steps() -> Iterator[Batch]:
        for s, step in enumerate(plan.steps[r]):
            messages: dict[str, list] = defaultdict(list)
            for op in step.comm:
                for key in _reads(op, plan, r, one_queue):
                    yield from arriving.pop(key, ())
                messages[op.channel] += [op] if isinstance(op, Send | Recv) else []
                if isinstance(op, AllGather | ReduceScatter):
                    yield from launch(s, op.channel, [op])
            for channel, ops in messages.items():
                if ops:
                    yield from launch(s, channel, ops)
            for attend in step.attend:
                for key in _reads(attend, plan, r, one_queue):
                    yield from arriving.pop(key, ())
        for batches in launched.values():
            yield from batches

    before: list[Batch] = []
    after: list[Batch] = []
    yield from swap(plan.swaps_before, before)
    for round_index in range(plan.head_rounds):
        yield from before[round_index : round_index + 1]
        if round_index + 1 < plan.head_rounds:
            yield from swap(plan.swaps_before, before)
        yield from steps()
        if round_index > 0:
            yield from after[round_index - 1 : round_index]
        yield from swap(plan.swaps_after, after)
    yield from after[-1:]


def _summed(op: object, nccl: bool) -> bool:
    """Whether a reduce-scatter is a collective, as sums are over NCCL, and not messages."""
    return nccl and isinstance(op, ReduceScatter) and op.tensor is not T.O


def _join(network: Network, batch: Batch, op: object, rank: int, r: int, ranks: tuple[int, ...], nccl: bool) -> None:
    match op:
        case Send():
            network.message(batch, op.channel, rank, ranks[op.peer], True)
        case Recv():
            network.message(batch, op.channel, ranks[op.peer], rank, False)
        case AllGather() | ReduceScatter() if isinstance(op, AllGather) or _summed(op, nccl):
            network.join(batch, (op.channel, tuple(ranks[m] for m in op.group)), rank, len(op.group))
        case ReduceScatter():  # executed as messages
            for peer in (ranks[m] for m in op.group if m != r):
                network.message(batch, op.channel, rank, peer, True)
                network.message(batch, op.channel, peer, rank, False)


def _brings(op: object, r: int) -> list[tuple]:
    match op:
        case Recv():
            return [(op.tensor, op.chunk)]
        case AllGather():
            return [(op.tensor, c) for member, c in zip(op.group, op.chunks, strict=True) if member != r]
        case ReduceScatter():
            return [(op.tensor, op.chunks[op.group.index(r)])]
    return []


def _reads(op: object, plan: Plan, r: int, nccl: bool) -> list[tuple]:
    match op:
        case Send():
            return [(op.tensor, op.chunk)]
        case AllGather():
            return [(op.tensor, op.chunks[op.group.index(r)])]
        case ReduceScatter():
            pairs = zip(op.group, op.chunks, strict=True)
            return [(op.tensor, c) for member, c in pairs if member != r or _summed(op, nccl)]
        case Attend():
            return [(plan.inputs[1], c) for c in op.kv_chunks] + [(plan.inputs[0], c) for c in op.q_chunks]
    return []
