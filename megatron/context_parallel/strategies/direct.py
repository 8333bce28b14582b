"""Direct attention: a rank fetches the keys and values that it needs from their owners. For placed documents.

If a batch brings its own placement, a rank sees keys of few others, and only some of their rows. Those it fetches, its
neighbours' first. With documents, blocks of one step take different times on different ranks. So the fetches are in few
groups, and a group begins two steps before it is needed: a rank seldom waits for what another one computes. The groups
grow from one distance between ranks to a quarter of all, and shrink again: little is sent before the first block and
after the last one.

The forward pass computes its own pair while the first group arrives. The backward pass computes it after a little more
than half of the groups: gradients that return to their owners until then are not waited for. Units received with all
pairs visible: forward 2(n-1), backward 4(n-1).
"""

from collections.abc import Iterator

from megatron.context_parallel.plan.ir import Attend, Comm, Recv, Send, Step, T

from .registry import Pass, register


@register("direct", layouts=("zigzag", "cyclic", "contiguous"), channels=("fetch", "results"), planned=False, period=1)
def direct(at: Pass) -> Iterator[Step]:
    rank, n = at.rank, at.n
    groups = groups_of_distances(n)
    own = (Attend((rank,), (rank,)),)

    def fetch(distances: list[int]) -> tuple[Comm, ...]:
        """The owner of a chunk sends it to the rank that is so far ahead of it, modulo n."""
        sends = [Send(T.KV, rank, (rank + d) % n, "fetch") for d in distances if at.visible_pairs((rank + d) % n, rank)]
        owners = [(rank - d) % n for d in distances]
        return (*sends, *[Recv(T.KV, owner, owner, "fetch") for owner in owners if at.visible_pairs(rank, owner)])

    def give_back(distances: list[int]) -> tuple[Comm, ...]:
        """The gradients of fetched keys and values return to their owners."""
        owners = [(rank - d) % n for d in distances]
        sends = [Send(T.DKV, owner, owner, "results") for owner in owners if at.visible_pairs(rank, owner)]
        clients = [(rank + d) % n for d in distances]
        return (*sends, *[Recv(T.DKV, rank, client, "results") for client in clients if at.visible_pairs(client, rank)])

    def blocks(distances: list[int]) -> tuple[Attend, ...]:
        return tuple(Attend((rank,), ((rank - d) % n,)) for d in distances)

    if not groups:
        yield Step(attend=own)
        return
    own_after = len(groups) // 2 + 1
    yield Step(fetch(groups[0]))
    if not at.backward:
        yield Step(fetch(groups[1]) if len(groups) > 1 else (), own)
    before = list[int]()
    for g, group in enumerate(groups):
        ahead = g + 1 if at.backward else g + 2
        comm = fetch(groups[ahead]) if ahead < len(groups) else ()
        if at.backward and before:
            comm += give_back(before)
        if at.backward and g == own_after:
            yield Step(comm, own)
            comm = ()
        yield Step(comm, blocks(group))
        before = group
    if at.backward:
        yield Step(give_back(before), own if own_after >= len(groups) else ())


def groups_of_distances(n: int) -> list[list[int]]:
    """The distances 1 .. n - 1 between ranks, modulo n, the shortest first, in groups that grow and shrink again."""
    distances = sorted(range(1, n), key=lambda d: (min(d, n - d), d))
    groups = list[list[int]]()
    size = 1
    while distances:
        left = len(distances)
        size = min(2 * size, max(1, n // 4), (left + 1) // 2) if groups else 1
        groups.append(distances[:size])
        distances = distances[size:]
    return groups
