"""Measures what connects the ranks: rates alone and together, latency, and processors' work."""

import os
import socket
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..errors import UsageError
from .description import Inside, Nics
from .meter import Meter

SMALL = 16  # messages of a small exchange, each way
WORK = 0.3  # seconds of processors' work that are enough to count


class Links:
    """The ranks of a group on their nodes, and what is measured between them.

    Attributes:
        nodes, each: nodes, and ranks of each.

    Raises:
        UsageError: nodes with different numbers of ranks, or ranks that are not in the order of nodes.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        local = int(os.environ.get("LOCAL_WORLD_SIZE", meter.n))
        places = meter.everyone((socket.gethostname(), int(os.environ.get("RANK", meter.rank)) // local))
        self.nodes = len(set(places))
        self.each = meter.n // self.nodes
        if any(len(set(places[i : i + self.each])) > 1 for i in range(0, meter.n, self.each)):
            raise UsageError(
                f"{meter.n} ranks on {self.nodes} nodes: need as many on each, in the order of nodes, such as "
                "torchrun --nnodes 2 --nproc-per-node 8"
            )
        self.node, self.place = divmod(meter.rank, self.each)

    def message_us(self) -> float:
        """Processors' work for a message at each end."""
        if not self.meter.shared:
            return 0.0
        x = torch.zeros(1, device=self.meter.device)
        small = partial(self._shift, 1, [x] * SMALL)
        return self._work(small) / (2 * SMALL * self.meter.n) * 1e6

    def inside(self, message_us: float) -> Inside | None:
        if self.each == 1:
            return None
        alone = self.meter.rate(partial(self._pair, 1))
        together = self.meter.rate(partial(self._around, 1))
        # Ranks that share processors are slower together because of that.
        shared = not self.meter.shared and together < 0.6 * alone
        rate = alone if self.meter.shared else together * (self.each if shared else 1)
        work = self._per_byte(partial(self._around, 1), message_us)
        return Inside(
            GB_s=rate / 1e9, latency_us=self._latency(1, message_us), shared=shared, processor_ns_per_byte=work
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
            processor_ns_per_byte=self._per_byte(partial(self._shift, self.each), message_us),
            crowding=self._crowding(rate * per_node),
        )

    # -- exchanges: each gets what it sends -------------------------------------------------------------------

    def _pair(self, peer: int, x: Tensor) -> None:
        """Rank 0 and `peer`, both ways."""
        if self.meter.rank in (0, peer):
            other = peer - self.meter.rank
            self.meter.exchange([(other, x)], [(other, torch.empty_like(x))])

    def _around(self, by: int, x: Tensor) -> None:
        """All ranks of each node in a ring."""
        after, before = (self.node * self.each + (self.place + turn) % self.each for turn in (by, -by))
        self.meter.exchange([(after, x)], [(before, torch.empty_like(x))])

    def _shift(self, by: int, xs: Tensor | list[Tensor]) -> None:
        """All ranks, each to the one `by` further."""
        xs = xs if isinstance(xs, list) else [xs]
        after, before = ((self.meter.rank + turn) % self.meter.n for turn in (by, -by))
        self.meter.exchange([(after, x) for x in xs], [(before, torch.empty_like(x)) for x in xs])

    def _all_pairs(self, x: Tensor) -> None:
        """Each rank with each rank of the other nodes, all at once; x is shared out among them."""
        others = [(self.meter.rank + k) % self.meter.n for k in range(1, self.meter.n)]
        others = [other for other in others if other // self.each != self.node]
        part = x[: max(1, len(x) // len(others))]
        self.meter.exchange([(o, part) for o in others], [(o, torch.empty_like(part)) for o in reversed(others)])

    # -- what follows from them --------------------------------------------------------------------------------

    def _latency(self, peer: int, message_us: float) -> float:
        """Half of the time of a message and its answer, without the processors' work. In microseconds."""
        x, back, meter = torch.zeros(1, device=self.meter.device), torch.zeros(1, device=self.meter.device), self.meter

        def there_and_back(times: int = 10) -> None:
            for _ in range(times):
                if meter.rank == 0:
                    meter.exchange([(peer, x)], [])
                    meter.exchange([], [(peer, back)])
                elif meter.rank == peer:
                    meter.exchange([], [(0, back)])
                    meter.exchange([(0, x)], [])

        return max(0.0, meter.seconds(there_and_back) / 20 * 1e6 - message_us)

    def _work(self, action: Callable[[], object]) -> float:
        """Seconds of all processors for one call."""
        times = 1
        while (spent := self.meter.busy(action, times)) < WORK / (4 if self.meter.quick else 1):
            times *= 4
        return spent / times

    def _per_byte(self, exchange: Callable[[Tensor], object], message_us: float) -> float:
        """Nanoseconds of a processor at each end."""
        if not self.meter.shared:
            return 0.0
        x = torch.zeros(2**20, dtype=torch.uint8)
        work = self._work(partial(exchange, x)) / (2 * self.meter.n) - message_us * 1e-6
        return max(0.0, work / len(x) * 1e9)

    def _crowding(self, node_rate: float) -> float:
        """How much less NICs carry when each rank exchanges with all of the other nodes at once."""
        others = self.meter.n - self.each
        if others < 3:
            return 0.0
        rate = self.meter.rate(self._all_pairs)
        return max(0.0, node_rate / self.each / rate - 1) / (others - 1)
