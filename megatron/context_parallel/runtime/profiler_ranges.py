"""Marks blocks and communication for a profiler. Nothing is recorded without one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import time_ns
from typing import Any, NamedTuple

import torch

from megatron.context_parallel.plan.ir import Attend, Comm, SwapHeads
from megatron.context_parallel.plan.pictures.labels import label

from .comm.transport import Work

_NOTHING = nullcontext()


class Mark(NamedTuple):
    """A batch of a channel, from its launch until the rank has waited for it, in nanoseconds since 1970.

    On a GPU these are times of the current stream. The host only queues a wait there.
    """

    channel: str
    name: str
    begin: int
    end: int


class _HostClock:
    def now(self) -> int:
        return time_ns()

    def nanoseconds(self, moment: int) -> int:
        return moment


class _GpuClock:
    """Moments are events of the current stream."""

    def __init__(self) -> None:
        self.start = self.now()
        self.start.synchronize()
        self.started = time_ns()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, moment: torch.cuda.Event) -> int:
        """It waits for the event."""
        moment.synchronize()
        return self.started + round(1e6 * self.start.elapsed_time(moment))


class Marks:
    """The profiler ranges of this process.

    Attributes:
        on: whether a profiler runs.
    """

    def __init__(self) -> None:
        self.on = False
        self.clock: Any = _HostClock()
        self.batches: list[tuple[str, str, Any, Any]] = []  # channel, name, begin, end

    def start(self) -> None:
        """A profiler has started."""
        self.clock = _GpuClock() if torch.cuda.is_initialized() else _HostClock()
        self.batches = []
        self.on = True

    def stop(self) -> list[Mark]:
        """The profiler stops. Returns the finished batches."""
        self.on = False
        at = self.clock.nanoseconds
        finished = [Mark(channel, name, at(begin), at(end)) for channel, name, begin, end in self.batches]
        self.batches = []
        return finished

    def block(self, attend: Attend) -> AbstractContextManager:
        """Around a block."""
        return torch.profiler.record_function(label((attend,))) if self.on else _NOTHING

    def batch(self, channel: str, comm: Sequence[Comm | SwapHeads], work: Work) -> Work:
        """Wraps communication that has just been launched."""
        return _Marked(channel, label(comm), work) if self.on else work


class _Marked:
    def __init__(self, channel: str, name: str, work: Work) -> None:
        self.channel = channel
        self.name = name
        self.work = work
        self.begin = marks.clock.now()

    def wait(self) -> None:
        self.work.wait()
        if self.begin is not None:
            marks.batches.append((self.channel, self.name, self.begin, marks.clock.now()))
        self.begin = None  # there may be several waits for it


marks = Marks()
