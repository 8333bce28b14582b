"""Which links of a cluster a message crosses."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster


class Link(NamedTuple):
    """A link, as a group of ranks has it.

    Attributes:
        name: of all groups.
        rate: bytes a second.
        crowding: as in `Nics`.
        groups: how many share it, of those that crowd it.
    """

    name: tuple
    rate: float
    crowding: float = 0.0
    groups: int = 1


class Path(NamedTuple):
    """The links from one rank to another.

    Attributes:
        links: those that it crosses.
        seconds: before the first byte arrives.
        processor: seconds a byte that it takes of a processor at each end.
        stream: bytes a second that messages of steps from one rank to the other reach at most; 0: as the links.
    """

    links: tuple[Link, ...]
    seconds: float
    processor: float
    stream: float


class Links:
    """The links between the ranks of a context group.

    Args:
        cluster: the cluster. Its devices are counted node by node.
        representative: the rank that stands for a rank. Its links count for those of both.
        devices: the device of each rank; default: rank r is device r.
        others: the devices of other groups that do the same at the same time. Groups that share a NIC, a switch or the
            shared link of a node get equal parts of it.
    """

    def __init__(
        self,
        cluster: Cluster,
        representative: Callable[[int], int] = lambda rank: rank,
        devices: Sequence[int] | None = None,
        others: Sequence[Sequence[int]] = (),
    ) -> None:
        self.cluster = cluster
        self.devices = devices or range(cluster.ranks)
        self.representatives = [representative(rank) for rank in range(len(self.devices))]
        self.nodes = [device // cluster.devices_per_node for device in self.devices]  # of each rank
        simulated = [self.devices[rank] for rank in self.representatives]
        self.places = [divmod(device, cluster.devices_per_node) for device in simulated]  # node, device in it
        self.together = 1 + len(others)
        self.sharing = Counter(part for group in (self.devices, *others) for part in {*self._parts(group)})
        self.path, self._at_device, self._at_node = cache(self._path), cache(self._inside), cache(self._outside)

    def _parts(self, group: Iterable[int]) -> Iterator[tuple]:
        """What the devices of a group may share with other groups."""
        for device in group:
            node, place = divmod(device, self.cluster.devices_per_node)
            yield "node", node
            if self.cluster.nics:
                yield "nic", node, self._nic(place)
                yield "leaf", node // (self.cluster.nodes_per_switch or 1)

    def _nic(self, place: int) -> int:
        assert self.cluster.nics  # a cluster of more than one node has them
        return place // (self.cluster.devices_per_node // self.cluster.nics.per_node)

    def _path(self, sender: int, receiver: int) -> Path:
        cluster = self.cluster
        nodes = (self.nodes[sender], self.nodes[receiver])
        if nodes[0] == nodes[1]:
            assert cluster.inside  # a node of more than one device has it
            links = self._at_device("out", sender), self._at_device("in", receiver)
            return Path(links[:1] if cluster.inside.shared else links, *self._costs_inside)
        (out, uplink), (into, downlink) = self._at_node("out", sender), self._at_node("in", receiver)
        leaf = cluster.nodes_per_switch
        crosses = leaf and nodes[0] // leaf != nodes[1] // leaf
        return Path((out, into, uplink, downlink) if crosses else (out, into), *self._costs_outside)

    @cached_property
    def _costs_inside(self) -> tuple[float, float, float]:
        """Of a `Path` inside a node: seconds, processor, stream."""
        inside = self.cluster.inside
        assert inside  # as above
        costs = inside.latency_us * 1e-6, inside.processor_ns_per_byte * 1e-9
        return *costs, (inside.stream_GB_s or 0.0) * 1e9

    @cached_property
    def _costs_outside(self) -> tuple[float, float, float]:
        """The same between nodes."""
        nics = self.cluster.nics
        assert nics  # a cluster of more than one node has them
        costs = nics.latency_us * 1e-6, nics.processor_ns_per_byte * 1e-9
        return *costs, (nics.stream_GB_s or 0.0) * self._pace

    def _inside(self, way: str, rank: int) -> Link:
        """The link of a rank to the others of its node."""
        inside, place = self.cluster.inside, self.places[rank]
        assert inside  # as above
        if inside.shared:
            return Link(("inside", place[0]), inside.GB_s * 1e9 / self.sharing["node", place[0]])
        return Link((f"device {way}", *place), inside.GB_s * 1e9)

    def _outside(self, way: str, rank: int) -> tuple[Link, Link]:
        """The NIC of a rank, and the link of its switch to the others."""
        nics, (node, place) = self.cluster.nics, self.places[rank]
        assert nics  # as above
        nic = node, self._nic(place)
        leaf = self.cluster.nodes_per_switch or 1
        uplink = leaf * nics.per_node * nics.GB_s * self._pace / self.cluster.oversubscription
        on_nic, on_leaf = self.sharing[("nic", *nic)], self.sharing["leaf", node // leaf]
        return (
            Link((f"nic {way}", *nic), nics.GB_s * self._pace / on_nic, nics.crowding, on_nic),
            Link((f"switch {way}", node // leaf), uplink / on_leaf),
        )

    @cached_property
    def _pace(self) -> float:
        """Bytes a second for each GB_s of a NIC."""
        assert self.cluster.nics  # as above
        return 1e9 / (1 + self.cluster.nics.spread * math.log2(self.cluster.nodes))


def period_of_links(cluster: Cluster, devices: Sequence[int]) -> int:
    """The fewest ranks after which the links repeat; `devices` are those of the ranks."""
    repeat = cluster.devices_per_node * (cluster.nodes_per_switch or 1)
    for period in range(1, len(devices)):
        if all(devices[r] - devices[r - period] == repeat for r in range(period, len(devices))):
            return period
    return len(devices)
