"""How long a sequence stays pinned for its decoder. Rank 0 decides; the engine releases on all ranks in one step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class _Lease:
    end: float
    reports: set[int] = field(default_factory=set)  # the decoder's workers that need it no more


class Leases:
    """The leases of handed sequences. A lease ends when all workers of the decoder have reported, or by time.

    Args:
        seconds: a lease ends so long after the answer to the prefill, or after the last sign of its decoder.
        release: called once for each lease that ends, with its name and whether its time was up.
    """

    def __init__(self, seconds: float, release: Callable[[str, bool], object]) -> None:
        self.seconds = seconds
        self._release = release
        self._leases: dict[str, _Lease] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._leases

    def begin(self, name: str) -> None:
        self._leases[name] = _Lease(time.monotonic() + self.seconds)

    def renew(self, name: str) -> None:
        """The decoder is still at work. Unknown names are ignored."""
        if lease := self._leases.get(name):
            lease.end = time.monotonic() + self.seconds

    def report(self, name: str, worker: int, workers: int) -> None:
        """A worker of the decoder, of so many, needs the sequence no more: it has all rows, or has given up."""
        if lease := self._leases.get(name):
            lease.reports.add(worker)
            if len(lease.reports) >= workers:
                self._end(name, False)

    def end_late_ones(self) -> None:
        """End the leases whose time is up."""
        now = time.monotonic()
        for name in [name for name, lease in self._leases.items() if lease.end <= now]:
            self._end(name, True)

    def _end(self, name: str, late: bool) -> None:
        del self._leases[name]
        self._release(name, late)
