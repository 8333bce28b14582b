"""Which strategy is fastest on a described cluster, among all that can run."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import UsageError
from ..plan.ir import Attend, Plan, T
from ..plan.liveness import peak_bytes
from ..plan.volume import chunk_bytes
from ..strategies import AUTO, choose
from .block_time import BlockTime
from .candidates import Rejected, Workload, candidates
from .description import Cluster
from .links import Links
from .outlook import Outlook, outlook
from .simulate import simulate

SIMULATED = 64  # ways, those whose outlook is best
GAIN = 0.01  # part of the time that another strategy in the backward pass must save

Name = TypeVar("Name", bound=Hashable)


class Place(NamedTuple):
    """The devices of a context group.

    Attributes:
        cluster: they belong to.
        devices: the device of each rank; default: all of the cluster, in order.
        others: the devices of other groups that compute the same at the same time.
    """

    cluster: Cluster
    devices: Sequence[int] | None = None
    others: Sequence[Sequence[int]] = ()

    @property
    def n(self) -> int:
        return len(self.devices or range(self.cluster.ranks))


class Passed(NamedTuple):
    """What a pass takes.

    Attributes:
        seconds: until the last rank has its results.
        exposed: seconds of them in which the busiest rank does not compute.
        memory: bytes of chunks and partials that a rank has at once.
    """

    seconds: float
    exposed: float
    memory: float


class Prediction(NamedTuple):
    """What the passes of a way take, which run in turn."""

    passes: tuple[Passed, ...]

    @property
    def seconds(self) -> float:
        return sum(of.seconds for of in self.passes)

    @property
    def exposed(self) -> float:
        return sum(of.exposed for of in self.passes)

    @property
    def memory(plan: Plan, workload: Workload) -> int:
    """Bytes of chunks and partials of one attention that a rank has at once, of the first or the last rank."""
    return max(peak_bytes(plan, rank, workload.shape(plan.size)) for rank in {0, plan.n - 1})


def _q_cost(workload: Workload, place: Place, head_parallel_size: int) -> float:
    """How long a message of queries takes on the slowest link between neighbours, in forward blocks."""
    n, links = place.n, Links(place.cluster, devices=place.devices, others=place.others)
    if head_parallel_size == n:
        return 1.0
    plan = choose("ring", layout="cyclic").plan(n, head_parallel_size=head_parallel_size)
    block = _block_time(plan, place, workload)(Attend((1,), (0,))) * max(1.0, n / (place.cluster.shared_cores or n))
    seconds, size = Counter[tuple](), chunk_bytes(plan, T.Q, workload.shape(n), swap=False)
    for rank in range(n):
        for link, rate in links.path(rank, (rank + head_parallel_size) % n).links:
            seconds[link] += size / rate  # type: ignore[assignment]
    return max(seconds.values()) / block
