"""Measurements that ranks make together."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.patches.torch_gpu_sleep import let_host_ahead
from megatron.context_parallel.runtime.comm.communicators import group_of_this_rank
from megatron.context_parallel.runtime.comm.first_rank import of_all_ranks
from megatron.context_parallel.runtime.comm.transport import MessageList, TorchTransport, Work

CHANNEL = "probe"
LARGEST = {"cpu": 2**24, "cuda": 2**28}  # bytes of a message: caches of a processor hold chunks, not 2**28
STAT = Path("/proc/stat")
WINDOWS = 5  # in which processors are counted
QUEUED = 16  # actions that the host queues ahead of a GPU

Action = Callable[[], object]
Exchange = Callable[[Tensor], Work]  # starts messages as large as the tensor


class Meter:
    """Measures the time of joint actions of a group's ranks. All ranks make the same calls.

    Attributes:
        quick: measure less, and shorter.
        target: minimum seconds of one measurement.
        shared: whether the ranks share fewer processors than there are ranks, without devices, on one host.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, quick: bool) -> None:
        self.group = group_of_this_rank(group)
        self.device = device
        self.quick = quick
        self.transport = TorchTransport(self.group, "the probe of a cluster")
        self.rank, self.n = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.transport.connect([(CHANNEL, tuple(range(self.n)))])
        self.target = 0.03 if quick else 0.2
        self.processors = len(os.sched_getaffinity(0))
        hosts = self.everyone(Path("/proc/sys/kernel/random/boot_id").read_text())
        self.shared = device.type == "cpu" and len(set(hosts)) == 1 and self.n > self.processors

    def everyone(self, value: object) -> list:
        """`value` of all ranks."""
        return of_all_ranks(value, self.group)

    def largest(self, values: list[float]) -> list[float]:
        """The maximum of each number over all ranks."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers.tolist()

    def start_together(self) -> None:
        self.largest([0.0])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Action, runs: int | None = None) -> float:
        """Median time of `action` on the slowest rank. It is called once before."""
        action()
        times = []
        for _ in range(runs or (3 if self.quick else 5)):
            self.start_together()
            begin = time.perf_counter()
            action()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - begin)
        return statistics.median(self.largest(times))

    def computing(self, action: Action) -> float:
        """Seconds of `action` while all ranks do it, on a processor or device of its own."""
        clock = time.thread_time if self.shared else time.perf_counter
        times = list[float]()
        spent = 0.0
        action()
        self.start_together()
        while spent < self.target or len(times) < 3:
            begin = clock()
            action()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(clock() - begin)
            spent += times[-1]
        return statistics.median(self.everyone(statistics.mean(times)))

    def queued(self, action: Action) -> float:
        """Seconds of `action` as `computing`, on a GPU without the host's time: the host queues the actions ahead."""
        if self.device.type != "cuda":
            return self.computing(action)
        times = list[float]()
        action()
        for _ in range(3 if self.quick else 5):
            self.start_together()
            let_host_ahead()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(QUEUED):
                action()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000 / QUEUED)
        return statistics.median(self.everyone(statistics.median(times)))

    def processors_together(self, action: Action) -> float:
        """Processors that all ranks have together while all do `action` over and over.

        Fewer than the host has, if its own host takes some of their time, or other processes do. Of several
        measurements the median counts, because other processes come and go.
        """
        found = list[float]()
        for _ in range(WINDOWS):
            self.start_together()
            used, begin = time.thread_time(), time.perf_counter()
            while time.perf_counter() < begin + 5 * self.target:
                action()
            own = (time.thread_time() - used) / (time.perf_counter() - begin)
            found.append(sum(self.everyone(own)))
        return min(float(self.processors), statistics.median(found))

    def busy(self, action: Action, times: int) -> float:
        """Seconds of all processors that `times` calls of `action` on all ranks take."""
        action()
        self.start_together()
        before = _busy()
        for _ in range(times):
            action()
        self.start_together()
        return self.everyone(_busy() - before)[0]

    def rate(self, exchange: Exchange) -> float:
        """Bytes a second of an exchange of one tensor, large enough that it takes `target` seconds, up to `LARGEST`."""
        size = 2**16
        largest = LARGEST[self.device.type]
        while True:
            tensor = torch.zeros(size, dtype=torch.uint8, device=self.device)
            took = self.seconds(partial(_complete, exchange, tensor), 1)
            if took >= self.target or size == largest:
                return size / self.seconds(partial(_complete, exchange, tensor), 3 if took >= self.target else 9)
            size = min(largest, size * (16 if took < self.target / 16 else 2))

    def exchange(self, sends: MessageList, receives: MessageList) -> Work:
        """Starts messages."""
        return self.transport.exchange(CHANNEL, sends, receives)


def _complete(exchange: Exchange, tensor: Tensor) -> None:
    exchange(tensor).wait()


def _busy() -> float:
    """Seconds that the processors of this host have worked, interrupts included."""
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
