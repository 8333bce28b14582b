"""The time of collectives of many groups of ranks, all at the same time, on the links of a cluster."""

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.plan.flows import Flows, Task

from .links import Links

Group = tuple[int, ...]  # devices


class Rate(NamedTuple):
    """The cost of a collective: `latency` seconds, and `per_byte` seconds for each byte of the whole tensor."""

    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        return self.latency + self.per_byte * size


@lru_cache(1024)
def ring(cluster: Cluster, groups: tuple[Group, ...]) -> Rate:
    """An all-gather or a reduce-scatter in each group; an all-reduce is both.

    A group on several nodes makes one ring for each NIC that its nodes have, as NCCL does. Each carries its part.
    """
    hops = []
    for group in (group for group in groups if len(group) > 1):
        rings = _rings(cluster, group)
        for order in rings:
            hops += [
                (a, b, (1 - 1 / len(group)) / len(rings)) for a, b in zip(order, order[1:] + order[:1], strict=True)
            ]
    rounds = max((len(group) - 1 for group in groups), default=0)
    return _together(cluster, hops, rounds)


@lru_cache(1024)
def all_to_all(cluster: Cluster, groups: tuple[Group, ...]) -> Rate:
    """Each device of a group sends an equal part of its tensor to each of the others."""
    hops = [(a, b, 1 / len(group)) for group in groups for a, b in permutations(group, 2)]
    return _together(cluster, hops, 1)


@lru_cache(1024)
def exchange(cluster: Cluster, pairs: tuple[tuple[int, int], ...]) -> Rate:
    """A message from one device to another in each pair."""
    return _together(cluster, [(a, b, 1.0) for a, b in pairs], 1)


def _rings(cluster: Cluster, group: Group) -> list[Group]:
    """Orders of a group. In each another device of a node is the one that sends to the next node."""
    nodes: dict[int, list[int]] = {}
    for device in group:
        nodes.setdefault(device // cluster.devices_per_node, []).append(device)
    fewest = min(map(len, nodes.values()))
    count = min(cluster.nics.per_node, fewest) if cluster.nics and len(nodes) > 1 else 1
    orders = []
    for i in range(count):
        shift = i * fewest // count
        orders.append(tuple(device for node in nodes.values() for device in node[shift:] + node[:shift]))
    return orders


def _together(cluster: Cluster, hops: list[tuple[int, int, float]], rounds: int) -> Rate:
    """All hops at once, each with a share of the bytes, in `rounds` messages one after the other."""
    links = Links(cluster)
    flows = Flows()
    latency = 0.0
    for sender, receiver, share in hops:
        path = links.path(sender, receiver)
        latency = max(latency, path.seconds)
        flows.add(None, Task(share, tuple([flows.resource(link.name, link.rate) for link in path.links])))
    while flows.advance():
        pass
    return Rate(latency * rounds, flows.now)
