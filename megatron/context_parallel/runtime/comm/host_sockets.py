"""Messages between the ranks of one host over Unix sockets. For a few bytes they are many times faster than gloo.

gloo wakes a thread of its own for each message, over TCP. These messages are sent and received by the calling thread.
"""

import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.patches.torch_process_groups import timeout_of

_HOST = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/mnt")
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_LONG = 2_000_000  # seconds; about the most milliseconds that poll takes
_Rest = list[tuple[socket.socket, memoryview]]


class HostSockets:
    """Connections between all ranks of a group. `connect` makes them.

    Args:
        links: a connection to each other rank, by its number in the group.
        seconds: how long an exchange waits for another rank; None: without end.
    """

    def __init__(self, links: Mapping[int, socket.socket], seconds: float | None) -> None:
        self.links, self.seconds = links, seconds
        limit = divmod(int((seconds or 0) * 1e6), 1_000_000)  # 0: without end
        for link in links.values():
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *limit))

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> "HostSockets | None":
        """Connects all ranks of a group, if all are on one host and there are several. All of them call it."""
        n, rank = group.size(), group.rank()
        if n == 1:
            return None
        with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/rank")  # only this user may enter the folder; a path has at most 107 bytes
            listener.listen(n)
            found: list[tuple[str, str]] = [("", "")] * n
            dist.all_gather_object(found, (_host(), f"{folder}/rank"), group=group)
            if not found[rank][0] or len({host for host, _ in found}) > 1:
                return None
            links = dict[int, socket.socket]()
            for other in range(rank):
                links[other] = socket.socket(socket.AF_UNIX)
                links[other].connect(found[other][1])
                links[other].sendall(rank.to_bytes(4, "little"))
            timeout = timeout_of(group).total_seconds()
            seconds = timeout if timeout < _LONG else None
            listener.settimeout(seconds)
            for _ in range(rank + 1, n):
                link, _address = listener.accept()
                links[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")] = link
        return cls(links, seconds)


class Exchange:
    """Messages to some ranks and from some, from and into contiguous tensors on the host.

    Each `wait` sends and receives them. All ranks wait for their exchanges in the same order.
    """

    def __init__(self, sockets: HostSockets, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        self.seconds = sockets.seconds
        self.sends = [(sockets.links[rank], _bytes(x)) for rank, x in sends.items() if x.numel()]
        self.receives = [(sockets.links[rank], _bytes(x)) for rank, x in receives.items() if x.numel()]

    def wait(self) -> None:
        """Sends all messages and receives all of them. Until all are sent it takes what comes, part by part: so ranks
        cannot block each other.

        Raises:
            RuntimeError: another rank has ended, or does not answer.
        """
        into = self.receives
        try:
            out = _go_on(socket.socket.send, self.sends)
            while out:
                into = _go_on(_receive, into)
                self._sleep(out, into)
                out = _go_on(socket.socket.send, out)
            for link, part in into:
                while part:
                    part = part[_receive(link, part, socket.MSG_WAITALL) :]
        except BlockingIOError:
            raise self._silence() from None
        except OSError as error:
            raise RuntimeError(f"a rank of this host has ended: {error}") from error

    def _sleep(self, out: _Rest, into: _Rest) -> None:
        """Waits until something can be sent or received."""
        events = dict.fromkeys([link for link, _ in into], select.POLLIN)
        for link, _ in out:
            events[link] = events.get(link, 0) | select.POLLOUT
        poll = select.poll()
        for link, awaited in events.items():
            poll.register(link, awaited)
        if not poll.poll(None if self.seconds is None else self.seconds * 1000):
            raise self._silence()

    def _silence(self) -> RuntimeError:
        return RuntimeError(f"a rank of this host has not answered for {self.seconds:g} s")


def _go_on(call: Callable[[socket.socket, memoryview, int], int], parts: _Rest) -> _Rest:
    """Sends or receives what can be without waiting; returns what is left."""
    left = []
    for link, part in parts:
        try:
            done = call(link, part, _FLAGS)
        except BlockingIOError:
            done = 0
        if done < len(part):
            left.append((link, part[done:]))
    return left


def _receive(link: socket.socket, into: memoryview, flags: int) -> int:
    if not (count := link.recv_into(into, 0, flags)):
        raise ConnectionResetError("the connection is closed")
    return count


def _bytes(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data


def _host() -> str:
    """The same for processes that see the same network and files; "" on other systems than Linux."""
    boot, *namespaces = map(Path, _HOST)
    if not boot.exists():
        return ""
    return " ".join([boot.read_text().strip(), *map(os.readlink, namespaces)])
