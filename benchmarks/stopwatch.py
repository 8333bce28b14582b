"""The time that a rank spends by kind, and the bytes that its sockets receive, measured from outside the code."""

import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable

import torch.distributed._functional_collectives as functional
from torch.distributed import ProcessGroup, Work

TCP_INFO_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received (u64) in struct tcp_info, linux/tcp.h


class Stopwatch:
    """Seconds spent in functions, by the name under which each was wrapped."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, whose running time is added to `seconds[name]`."""

        def run(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return run

    def watch_waits(self) -> None:
        """From now on all time inside torch.distributed in this process counts as "wait".

        Launching belongs to it: gloo's `send` copies what the socket takes before it returns.
        """
        Work.wait = self.timed("wait", Work.wait)
        for launch in ("send", "recv", "allgather", "_allgather_base", "alltoall", "alltoall_base"):
            setattr(ProcessGroup, launch, self.timed("wait", getattr(ProcessGroup, launch)))
        functional.wait_tensor = self.timed("wait", functional.wait_tensor)


class TimedKernel:
    """A block kernel whose passes count as "kernel"."""

    def __init__(self, kernel: object, watch: Stopwatch) -> None:
        self._kernel = kernel
        self.forward = watch.timed("kernel", kernel.forward)
        self.backward = watch.timed("kernel", kernel.backward)

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)


def received_bytes() -> int:
    """Payload bytes that all TCP connections of this process have received, as the kernel counts them."""
    total = 0
    for entry in list(os.scandir("/proc/self/fd")):
        try:
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8)
                total += struct.unpack_from("Q", info, TCP_INFO_BYTES_RECEIVED)[0]
    return total
