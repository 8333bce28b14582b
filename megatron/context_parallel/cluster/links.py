"""Which links of a cluster a message crosses."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from .description import Cluster


class Path(NamedTuple):
    """The links from one rank to another.

    Attributes:
        links: (name, bytes a second) of each.
        seconds: before the first byte arrives.
        processor: seconds a byte that it takes of a processor at each end.
        between_nodes: it crosses NICs.
    """

    links: tuple[tuple[tuple, float], ...]
    seconds: float
    processor: float
    between_nodes: bool


class Links:
    """The links between the ranks of a context group: rank r is device r of the cluster, counted node by node.

    Args:
        cluster: the cluster.
        like: the rank that stands for a rank. Its links count for those of both.
    """

    def __init__(self, cluster: Cluster, like: Callable[[int], int] = lambda rank: rank) -> None:
        self.cluster, self.like = cluster, like
        self.path = cache(self._path)

    def _path(self, sender: int, receiver: int) -> Path:
        cluster = self.cluster
        out, into = (divmod(self.like(rank), cluster.devices_per_node) for rank in (sender, receiver))
        if sender // cluster.devices_per_node == receiver // cluster.devices_per_node:
            assert cluster.inside  # a node of more than one device has it
            rate = cluster.inside.GB_s * 1e9
            shared = (("inside", out[0]),) if cluster.inside.shared else (("device out", *out), ("device in", *into))
            costs = cluster.inside.latency_us * 1e-6, cluster.inside.processor_ns_per_byte * 1e-9
            return Path(tuple((link, rate) for link in shared), *costs, False)
        nics = cluster.nics
        assert nics  # a cluster of more than one node has them
        each = cluster.devices_per_node // nics.per_node
        links: list[tuple[tuple, float]] = [
            (("nic out", out[0], out[1] // each), nics.GB_s * 1e9),
            (("nic in", into[0], into[1] // each), nics.GB_s * 1e9),
        ]
        if leaf := cluster.nodes_per_switch:
            nodes = [rank // cluster.devices_per_node // leaf for rank in (sender, receiver)]
            if nodes[0] != nodes[1]:
                uplink = leaf * nics.per_node * nics.GB_s * 1e9 / cluster.oversubscription
                links += [(("switch out", out[0] // leaf), uplink), (("switch in", into[0] // leaf), uplink)]
        return Path(tuple(links), nics.latency_us * 1e-6, nics.processor_ns_per_byte * 1e-9, True)


def period_of_links(cluster: Cluster) -> int:
    """The fewest devices after which the links repeat."""
    return cluster.devices_per_node * (cluster.nodes_per_switch or 1)
