"""What a pass takes at least, and about how long: counted in its steps, without a simulation."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from megatron.context_parallel.cluster.simulate.block_time import BlockTime
from megatron.context_parallel.cluster.simulate.links import Links
from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, Plan, SwapHeads, T
from megatron.context_parallel.plan.volume import Shape, chunk_bytes

ALL_UP_TO = 16  # ranks that are all looked at

MessageCost = tuple[int, int, float]  # sender, receiver, bytes


class PassBound(NamedTuple):
    """Seconds of a pass.

    Attributes:
        least: no run takes less: the busiest link carries its bytes, and the busiest rank computes its blocks.
        likely: if each step takes as long as its blocks or its messages. It says what to simulate first.
    """

    least: float
    likely: float


def lower_bound(plan: Plan, links: Links, shape: Shape, blocks: BlockTime) -> PassBound:
    """What is known of a pass before it is simulated.

    Args:
        plan: the pass.
        links: between its ranks.
        shape: the sizes on a rank.
        blocks: the times of its blocks.
    """
    shared = links.cluster.shared_cores
    ranks, cores = _looked_at(links), shared / links.together if shared else plan.size
    wires, computed, busy, likely = defaultdict[tuple, float](float), [0.0] * len(ranks), 0.0, 0.0
    size_of = cache(lambda tensor, swap: chunk_bytes(plan, tensor, shape, swap))
    for step in zip_longest(*(_Rank(plan, rank, size_of).steps() for rank in ranks), fillvalue=((), ())):
        wire, latency, longest, spent = defaultdict[tuple, float](float), 0.0, 0.0, 0.0
        for i, (attends, messages) in enumerate(step):
            seconds = sum(map(blocks, attends))
            computed[i], longest, spent = computed[i] + seconds, max(longest, seconds), spent + seconds
            for sender, receiver, size in messages:
                path = links.path(sender, receiver)
                spent += size * path.processor if shared else 0.0  # at this end
                if ranks[i] == sender or sender not in ranks:  # each message once
                    latency = max(latency, path.seconds)
                    for link, rate in path.links:
                        wire[link] += size / rate
        for link, seconds in wire.items():
            wires[link] += seconds
        busy += spent
        work = max(longest, spent / len(ranks) * plan.size / cores)
        likely += max(max(wire.values(), default=0.0) + latency, work)
    return PassBound(float(max([*wires.values(), *computed, busy / cores])), float(likely))


def _looked_at(links: Links) -> list[int]:
    """All ranks, or of many: those that share a link with the first, the last of its node, and the last of all."""
    cluster, n = links.cluster, len(links.devices)
    if n <= ALL_UP_TO:
        return [*range(n)]
    each, nics, inside = cluster.devices_per_node, cluster.nics, cluster.inside
    sharers = each // nics.per_node if nics and not (inside and inside.shared) else each
    node = [rank for rank in range(n) if links.devices[rank] // each == links.devices[0] // each]
    near = [rank for rank in node if links.devices[rank] - links.devices[0] < sharers]
    return sorted({*near, node[-1], n - 1})


class _Rank:
    """What a rank (of all ranks) computes and moves."""

    def __init__(self, plan: Plan, rank: int, size_of: Callable[[T, bool], float]) -> None:
        self.plan, self.rank, self.bytes, grid = plan, rank, size_of, plan.grid
        self.place, self.members = grid.coordinates(rank)["context"], grid.along(rank, "context")

    def steps(self) -> Iterator[tuple[Iterable[Attend], Iterable[MessageCost]]]:
        """The blocks of each step, and its messages."""
        plan = self.plan
        yield from (((), self._swapped(swap)) for swap in plan.before)
        yield from ((step.attend, self._moved(step.comm)) for step in plan.steps[self.place])
        yield from (((), self._swapped(swap)) for swap in plan.after)

    def _swapped(self, op: SwapHeads) -> list[MessageCost]:
        moved = self.plan.swapped(op, self.rank)
        return [(t.sender, t.receiver, self.bytes(t.tensor, True) * t.share) for t in moved]

    def _moved(self, comm: tuple[Comm, ...]) -> Iterator[MessageCost]:
        for op in comm:
            size = self.bytes(op.tensor, False)
            if isinstance(op, AllGather):  # libraries pass the chunks on along a ring
                at, others = op.group.index(self.place), len(op.group) - 1
                before, after = (self.members[op.group[(at + by) % (others + 1)]] for by in (-1, 1))
                yield before, self.rank, size * others
                yield self.rank, after, size * others
            else:
                for t in op.transfers(self.place):
                    yield self.members[t.sender], self.members[t.receiver], size
