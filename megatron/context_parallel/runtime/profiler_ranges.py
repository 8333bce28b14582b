"""Marks blocks and communication for a profiler. Nothing is recorded without one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import time_ns
from typing import NamedTuple

import torch

from megatron.context_parallel.plan.ir import Attend, Comm, SwapHeads
from megatron.context_parallel.plan.pictures.labels import label

from .comm.transport import Work

_NOTHING = nullcontext()


class Mark(NamedTuple):
    """A batch of a channel, from its launch until the rank has waited for it, in nanoseconds since 1970."""

    channel: str
    name: str
    begin: int
    end: int


class Marks:
    """The profiler ranges of this process.

    Attributes:
        on: whether a profiler runs.
        batches: the finished batches.
    """

    def __init__(self) -> None:
        self.on = False
        self.batches: list[Mark] = []

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
        self.begin = time_ns()

    def wait(self) -> None:
        self.work.wait()
        if self.begin:
            marks.batches.append(Mark(self.channel, self.name, self.begin, time_ns()))
        self.begin = 0  # there may be several waits for it


marks = Marks()
