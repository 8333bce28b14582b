"""Measures the links between ranks: rates alone and together, latency, and processor time."""

import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.context_parallel.cluster.description import IntraNode, Nics
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.transport import Work

from .meter import LARGEST, Exchange, Meter

SMALL = 2  # messages of a small exchange, each way: keys and values
WORK = 0.3  # seconds of processors' work that are enough to count
TURNS = 3  # measurements of which the median counts: other processes may work too
PINGS = 0.5  # seconds of messages there and back


class LinkProbe:
    """The ranks of a group on their nodes, and what is measured between them.

    Args:
        block: computes for some milliseconds.

    Attributes:
        nodes, each: nodes, and ranks of each.

    Raises:
        UsageError: nodes with different numbers of ranks, or ranks that are not in the order of nodes.
    """

    def __init__(self, meter: Meter, block: Callable[[], object]) -> None:
        self.meter, self.block = meter, block
        local = int(os.environ.get("LOCAL_WORLD_SIZE", meter.n))
        node = socket.gethostname(), int(os.environ.get("RANK", meter.rank)) // local
        nodes = meter.everyone(node)
        self.nodes = len(set(nodes))
        self.each = meter.n // self.nodes
        first_of_node = [r // self.each * self.each for r in range(meter.n)]
        if self.each * self.nodes != meter.n or nodes != [nodes[first] for first in first_of_node]:
            raise UsageError(
                f"{meter.n} ranks on {self.nodes} nodes: need as many on each, in the order of nodes, such as "
                "torchrun --nnodes 2 --nproc-per-node 8"
            )
        self.node, self.rank_in_node = divmod(meter.rank, self.each)

    def message_us(self) -> float:
        """Processors' work for a message at each end."""
        if not self.meter.shared:
            return 0.0
        x = torch.zeros(1, device=self.meter.device)
        each = [self._work(lambda: self._shift(1, *[x] * SMALL).wait())[0] for _ in range(TURNS)]
        return statistics.median(each) / (2 * SMALL * self.meter.n) * 1e6

    def inside(self, message_us: float) -> IntraNode | None:
        if self.each == 1:
            return None
        alone = self.meter.rate(partial(self._pair, 1))
        together = self.meter.rate(partial(self._around, 1))
        # Ranks that share processors are slower together because of that.
        shared = not self.meter.shared and together < 0.6 * alone
        rate = alone if self.meter.shared else together * (self.each if shared else 1)
        return IntraNode(
            GB_s=rate / 1e9,
            latency_us=self._latency(1, message_us),
            shared=shared,
            processor_ns_per_byte=self._per_byte(partial(self._around, 1), message_us, rate),
        )

    def nics(self, message_us: float) -> Nics | None:
        if self.nodes == 1:
            return None
        alone = self.meter.rate(partial(self._pair, self.each))
        together = self.meter.rate(partial(self._shift, self.each))
        sizes = [count for count in range(1, self.each + 1) if self.each % count == 0]
        per_node = min(sizes, key=lambda count: abs(count - self.each * together / alone))
        rate = together * self.each / per_node
        return Nics(
            per_node=per_node,
            GB_s=rate / 1e9,
            latency_us=self._latency(self.each, message_us),
            processor_ns_per_byte=self._per_byte(partial(self._shift, self.each), message_us, together),
            crowding=self._crowding(self.each // per_node),
        )

    # -- exchanges, started: each rank gets as much as it sends ------------------------------------------------

    def _pair(self, peer: int, x: Tensor) -> Work:
        """Rank 0 and `peer`, both ways."""
        if self.meter.rank not in (0, peer):
            return _Nothing()
        other = peer - self.meter.rank
        return self.meter.exchange([(other, x)], [(other, torch.empty_like(x))])

    def _around(self, by: int, x: Tensor) -> Work:
        """All ranks of each node in a ring."""
        after, before = (self.node * self.each + (self.rank_in_node + turn) % self.each for turn in (by, -by))
        return self.meter.exchange([(after, x)], [(before, torch.empty_like(x))])

    def _shift(self, by: int, *xs: Tensor) -> Work:
        """All ranks, each to the one `by` further."""
        after, before = ((self.meter.rank + turn) % self.meter.n for turn in (by, -by))
        return self.meter.exchange([(after, x) for x in xs], [(before, torch.empty_like(x)) for x in xs])

    def _all_pairs(self, x: Tensor) -> Work:
        """Each rank with each rank of the other nodes, all at once; x is divided among them."""
        others = [(self.meter.rank + k) % self.meter.n for k in range(1, self.meter.n)]
        others = [other for other in others if other // self.each != self.node]
        part = x[: max(1, len(x) // len(others))]
        return self.meter.exchange([(o, part) for o in others], [(o, torch.empty_like(part)) for o in others[::-1]])

    # -- what follows from them --------------------------------------------------------------------------------

    def _latency(self, peer: int, message_us: float) -> float:
        """Half of the time of a message and its answer, without the processors' work. In microseconds."""
        x = torch.zeros(1, device=self.meter.device)
        back = torch.zeros(1, device=self.meter.device)
        meter = self.meter

        def there_and_back(times: int = 10) -> None:
            for _ in range(times):
                if meter.rank == 0:
                    meter.exchange([(peer, x)], []).wait()
                    meter.exchange([], [(peer, back)]).wait()
                elif meter.rank == peer:
                    meter.exchange([], [(0, back)]).wait()
                    meter.exchange([(0, x)], []).wait()

        return max(0.0, meter.seconds(there_and_back) / 20 * 1e6 - message_us)

    def busy_latency_us(self) -> float:
        """How much longer a message takes for each rank that computes on a processor."""
        computing = (self.meter.n - 2) / self.meter.processors
        if not self.meter.shared or computing < 1:
            return 0.0
        idle, busy = (self.meter.everyone(self._ping(compute))[0] for compute in (False, True))
        return max(0.0, busy - idle) / computing * 1e6

    def _ping(self, compute: bool) -> float:
        """Seconds of a message of rank 0 to rank 1 and back. The others wait meanwhile, or compute."""
        meter = self.meter
        more = torch.ones(1)
        back = torch.ones(1)
        times = list[float]()
        meter.start_together()
        begin = time.perf_counter()
        if meter.rank > 1:
            while compute and time.perf_counter() - begin < 1.5 * PINGS:
                self.block()
        while meter.rank < 2 and more:
            start = time.perf_counter()
            if meter.rank == 0:
                more.fill_(start - begin < PINGS)
                meter.exchange([(1, more)], [(1, back)]).wait()
                times.append(time.perf_counter() - start)
            else:
                meter.exchange([(0, back)], [(0, more)]).wait()
        return statistics.fmean(times[1:] or [0.0])  # others may not compute yet during the first

    def _work(self, action: Callable[[], object]) -> tuple[float, int]:
        """Seconds of all processors for one call, and how many calls they were measured in."""
        times = 1
        while (spent := self.meter.busy(action, times)) < WORK / (4 if self.meter.quick else 1):
            times *= 4
        return spent / times, times

    def _per_byte(self, exchange: Exchange, message_us: float, rate: float) -> float:
        """Nanoseconds of a processor at each end, while it computes: to switch between both is part of the work."""
        if not self.meter.shared:
            return 0.0
        x = torch.zeros(min(LARGEST["cpu"], max(2**20, int(rate * self.meter.target))), dtype=torch.uint8)
        block = self.meter.everyone(self.meter.computing(self.block))[0]
        blocks = math.ceil(len(x) / rate * self.meter.processors / self.meter.n / block)

        def compute() -> None:
            for _ in range(blocks):
                self.block()

        def both() -> None:
            work = exchange(x)
            compute()
            work.wait()

        more = []
        for _ in range(TURNS):
            spent, times = self._work(both)
            more.append(spent - self.meter.busy(compute, times) / times)
        of_a_message = statistics.median(more) / (2 * self.meter.n)
        return max(0.0, of_a_message - message_us * 1e-6) / len(x) * 1e9

    def _crowding(self, ranks: int) -> float:
        """How much less a NIC of some ranks carries when each of them exchanges with all of the other nodes at once."""
        messages = ranks * (self.meter.n - self.each)
        if messages < 3:
            return 0.0
        one = partial(self._shift, self.each)
        slower = [self.meter.rate(one) / self.meter.rate(self._all_pairs) for _ in range(TURNS)]
        return max(0.0, statistics.median(slower) - 1) / (messages - 1)


class _Nothing:
    def wait(self) -> None:
        pass
