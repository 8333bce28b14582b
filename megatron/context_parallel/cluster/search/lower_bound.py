"""A lower bound and an estimate of the time of a pass, from its steps, without a simulation."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from megatron.context_parallel.cluster.simulate.block_time import MANY_RANKS, BlockTime
from megatron.context_parallel.cluster.simulate.links import Links
from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, Message, Plan, SwapHeads, T
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.plan.volume import Shape, chunk_bytes

ALL_UP_TO = 16  # ranks that are all looked at

MessageCost = tuple[int, int, float]  # sender, receiver, bytes


class PassBound(NamedTuple):
    """Seconds of a pass.

    Attributes:
        lower_bound: the busiest link sends its bytes, and the busiest rank computes its blocks.
        estimate: each step takes the longer of its blocks and its messages. It orders the simulations.
    """

    lower_bound: float
    estimate: float


def lower_bound(plan: Plan, links: Links, shape: Shape, blocks: BlockTime, sent: RowSets | None = None) -> PassBound:
    """Bounds of a pass, before it is simulated.

    Args:
        plan: the pass.
        links: between its ranks.
        shape: the sizes on a rank.
        blocks: the times of its blocks.
        sent: the rows that are sent; default: whole chunks.
    """
    ranks = _looked_at(links)
    shared = links.cluster.shared_cores
    cores = shared / links.together if shared else plan.all_ranks
    size_of = cache(lambda tensor, swap: chunk_bytes(plan, tensor, shape, swap))
    wires = defaultdict[tuple, float](float)  # seconds of each link, all steps
    computed = [0.0] * len(ranks)  # seconds of each rank, all steps
    busy, estimate = 0.0, 0.0
    for works in zip_longest(*(_Rank(plan, rank, size_of, sent).steps() for rank in ranks), fillvalue=((), ())):
        step = _Step(links, ranks)
        for i, (attends, messages) in enumerate(works):
            seconds = sum([attend.share * blocks(attend) for attend in attends])
            computed[i] += seconds
            step.add(ranks[i], seconds, messages)
        for link, seconds in step.wires.items():
            wires[link] += seconds
        busy += step.busy
        moved = max(step.wires.values(), default=0.0) + step.latency
        worked = max(step.longest, step.busy / len(ranks) * plan.all_ranks / cores)
        estimate += max(moved, worked)
    return PassBound(float(max([*wires.values(), *computed, busy / cores])), float(estimate))


def _looked_at(links: Links) -> list[int]:
    """All ranks, or of many: those that share a link with the first, the last of its node, and the last of all.

    Of very many: those that share a link with the last of the last node but one. In every layout it computes about as
    much as any, and sends to the next node.
    """
    cluster, devices = links.cluster, links.devices
    ranks = range(len(devices))
    if len(ranks) <= ALL_UP_TO:
        return [*ranks]
    sharers = cluster.devices_per_node  # devices on a link
    if cluster.nics and not (cluster.inside and cluster.inside.shared):
        sharers //= cluster.nics.per_node
    if len(ranks) > MANY_RANKS:
        last = next((rank for rank in reversed(ranks) if links.nodes[rank] != links.nodes[-1]), ranks[-1])
        node = [rank for rank in ranks if links.nodes[rank] == links.nodes[last]]
        return [rank for rank in node if devices[last] - devices[rank] < sharers]
    node = [rank for rank in ranks if links.nodes[rank] == links.nodes[0]]
    near = [rank for rank in node if devices[rank] - devices[0] < sharers]
    return sorted({*near, node[-1], ranks[-1]})


class _Step:
    """A step of some ranks.

    Attributes:
        wires: seconds that each link is taken.
        latency: seconds until the first byte of the slowest message.
        longest: seconds of the blocks of a rank.
        busy: seconds that the processors of all these ranks work.
    """

    def __init__(self, links: Links, ranks: list[int]) -> None:
        self.links = links
        self.ranks = ranks
        self.wires = defaultdict[tuple, float](float)
        self.latency, self.longest, self.busy = 0.0, 0.0, 0.0

    def add(self, rank: int, seconds: float, messages: Iterable[MessageCost]) -> None:
        """What a rank does: blocks of so many seconds, and messages that it sends or receives."""
        shared = self.links.cluster.shared_cores
        self.longest = max(self.longest, seconds)
        self.busy += seconds
        for sender, receiver, size in messages:
            path = self.links.path(sender, receiver)
            if shared:
                self.busy += size * path.processor  # at this end
            if rank == sender or sender not in self.ranks:  # each message once
                self.latency = max(self.latency, path.seconds)
                for link in path.links:
                    self.wires[link.name] += size / link.rate


class _Rank:
    """What a rank (of all ranks) computes and moves."""

    def __init__(self, plan: Plan, rank: int, size_of: Callable[[T, bool], float], sent: RowSets | None) -> None:
        self.plan, self.rank, self.bytes, self.sent = plan, rank, size_of, sent
        self.context_rank = plan.grid.coordinates(rank)["context"]  # among `members`
        self.members = plan.grid.along(rank, "context")

    def steps(self) -> Iterator[tuple[Iterable[Attend], Iterable[MessageCost]]]:
        """The blocks of each step, and its messages. The swaps beside a round belong to its first step."""
        plan = self.plan
        before = [message for swap in plan.swaps_before for message in self._swapped(swap)]
        after = [message for swap in plan.swaps_after for message in self._swapped(swap)]
        yield (), before
        if plan.token_rounds > 1:
            for step in plan.steps[self.context_rank]:
                yield step.attend, (plan.token_rounds - 1) * [*before, *after]
        for k in range(plan.head_rounds if plan.token_rounds == 1 else 0):
            beside = (before if k < plan.head_rounds - 1 else []) + (after if k else [])
            for step in plan.steps[self.context_rank]:
                yield step.attend, [*self._moved(step.comm), *beside]
                beside = []
        yield (), after

    def _swapped(self, op: SwapHeads) -> list[MessageCost]:
        moved = self.plan.swap_transfers(op, self.rank)
        return [(t.sender, t.receiver, self.bytes(t.tensor, True) * t.share) for t in moved]

    def _moved(self, comm: tuple[Comm, ...]) -> Iterator[MessageCost]:
        for op in comm:
            size = self.bytes(op.tensor, False)
            if isinstance(op, AllGather):  # libraries pass the chunks on along a ring
                ring = [self.members[r] for r in op.group]
                at = ring.index(self.rank)
                passed = size * (len(ring) - 1)
                yield ring[at - 1], self.rank, passed
                yield self.rank, ring[(at + 1) % len(ring)], passed
            else:
                for t in op.transfers(self.context_rank):
                    share = self.sent.least_share(t) if self.sent and isinstance(op, Message) else 1.0
                    yield self.members[t.sender], self.members[t.receiver], size * share
