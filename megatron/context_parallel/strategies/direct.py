"""Direct attention: a rank fetches the keys and values that it needs from their owners. For placed documents.

If a batch brings its own placement, a rank sees keys of few others, and only some of their rows. Those it fetches, its
neighbours' first. With documents, blocks of one step take different times on different ranks. So the fetches are in few
groups, and a group begins two steps before it is needed: a rank seldom waits for what another one computes. The groups
first grow, so that little is sent before the first block, and then shrink, so that few gradients return last.

The forward pass computes its own pair first, while groups arrive. The backward pass computes it for a quarter of the
heads first, and for the others last, while gradients return to their owners. Groups of gradients use three channels in
turn: one that is late does not hold up the next ones. Units received with all pairs visible: forward 2(n-1), backward
4(n-1).
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from megatron.context_parallel.plan.ir import Attend, Comm, Recv, Send, Step, T

from .registry import Pass, register

FIRST = 0.25  # of the heads of the own pair, in the backward pass
RETURNING = ("results", "more results", "further results")  # channels of gradients


@register(
    "direct",
    layouts=("zigzag", "cyclic", "contiguous"),
    channels=("fetch", *RETURNING),
    planned=False,
    period=1,
)
def direct(at: Pass) -> Iterator[Step]:
    rank, n = at.rank, at.n
    groups = groups_of_distances(n)
    own = Attend((rank,), (rank,))

    def fetch(group: int) -> tuple[Comm, ...]:
        """The owner of a chunk sends it to the rank that is so far ahead of it, modulo n."""
        distances = groups[group] if group < len(groups) else []
        sends = [Send(T.KV, rank, (rank + d) % n, "fetch") for d in distances if at.visible_pairs((rank + d) % n, rank)]
        owners = [(rank - d) % n for d in distances]
        return (*sends, *[Recv(T.KV, owner, owner, "fetch") for owner in owners if at.visible_pairs(rank, owner)])

    def give_back(group: int) -> tuple[Comm, ...]:
        """The gradients of fetched keys and values return to their owners."""
        channel = RETURNING[group % len(RETURNING)]
        owners = [(rank - d) % n for d in groups[group]]
        sends = [Send(T.DKV, owner, owner, channel) for owner in owners if at.visible_pairs(rank, owner)]
        clients = [(rank + d) % n for d in groups[group]]
        return (*sends, *[Recv(T.DKV, rank, client, channel) for client in clients if at.visible_pairs(client, rank)])

    first, last = (replace(own, heads=heads) for heads in ((0, FIRST), (FIRST, 1)))
    split = at.backward and len(groups) > 0
    yield Step(fetch(0))
    yield Step(fetch(1), (first if split else own,))
    for group, distances in enumerate(groups):
        returning = give_back(group - 1) if at.backward and group else ()
        yield Step(fetch(group + 2) + returning, tuple(Attend((rank,), ((rank - d) % n,)) for d in distances))
    if split:
        yield Step(give_back(len(groups) - 1), (last,))


def groups_of_distances(n: int) -> list[list[int]]:
    """The distances 1 .. n - 1 between ranks, modulo n, the shortest first, in groups that first grow and then shrink.

    A group has at most a fifth of all distances, and a third of those that are left.
    """
    distances = sorted(range(1, n), key=lambda d: (min(d, n - d), d))
    groups = list[list[int]]()
    size = 1
    while distances:
        size = min(size, max(1, round(n / 5)), ceil(len(distances) / 3))
        groups.append(distances[:size])
        distances = distances[size:]
        size *= 2
    return groups
