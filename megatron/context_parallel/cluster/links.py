"""Which links of a cluster a message crosses."""

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
        period: ranks that are a multiple of `period` apart use their links alike; they count as one.
    """

    def __init__(self, cluster: Cluster, period: int | None = None) -> None:
        self.cluster, self.period = cluster, period or cluster.ranks
        self.path = cache(self._path)

    def _path(self, sender: int, receiver: int) -> Path:
        cluster = self.cluster
        out, into = (divmod(rank % self.period, cluster.devices_per_node) for rank in (sender, receiver))
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

    @property
    def smallest_period(self) -> int:
        """The fewest ranks after which the links repeat."""
        return self.cluster.devices_per_node * (self.cluster.nodes_per_switch or 1)
