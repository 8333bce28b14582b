"""The watch: a thread of each rank that tells the monitors where the rank is, and ends it when the job is broken."""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import UsageError
from ..recorder import recorder
from .crash import crash_log, linger
from .flags import Arguments
from .judge import BEAT, Verdict
from .monitor import Connection, Monitor
from .rank_file import RankFile

_SECONDS_TO_ANSWER = 10  # of a monitor, at most
_SECONDS_TO_CONNECT = 30
_SECONDS_TO_FAIL = 0.2  # of a rank that another broke: its own error tells more in its crash log


class Watch:
    """The watch of this rank. Every rank of the world starts one; a world of one rank has nobody to watch.

    Raises:
        UsageError: a monitor cannot be reached, or GLOO_SOCKET_IFNAME names no interface.
    """

    def __init__(self, args: Arguments) -> None:
        self.args = args
        store = dist.PrefixStore("watch", distributed_c10d._get_default_store())
        deputy = self._choose_deputy()
        if args.rank == 0:
            store.set("job", json.dumps([uuid.uuid4().hex, deputy]))
        job, self._deputy = json.loads(store.get("job"))
        self.monitor = self._monitor(job) if args.rank in (0, self._deputy) else None
        if self.monitor:
            store.set(f"monitor {args.rank}", json.dumps([_own_address(), self.monitor.port]))
            self.monitor.thread.start()
        self.file = RankFile(args.rank, args.world_size, job)
        self._monitors: dict[int, Connection] = {}
        for rank in sorted({0, self._deputy}) if args.world_size > 1 else ():
            self._monitors[rank] = self._connect(rank, *json.loads(store.get(f"monitor {rank}")))
        self._left: set[int] = set()  # whose monitors left in order
        self._answered, self._speaks = threading.Event(), False
        self._failed = False  # the main thread leaves by itself
        self.before_end: Callable[[], None] = lambda: None  # called in the watch's thread when the job is broken
        self._closed = threading.Event()
        self._notes = -1  # of the recorder, when the monitors were last told
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._close_in_child)

    def _choose_deputy(self) -> int:
        """The first rank of the second host, or rank 1 of a single one."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(local if local < self.args.world_size else 1, self.args.world_size - 1)

    def _monitor(self, job: str) -> Monitor:
        minutes = self.args.distributed_timeout_minutes
        settled = self.args.distributed_timeout_seconds_after_init
        return Monitor(_own_address(), job, self.args.rank, (60.0 * minutes, settled or 60.0 * minutes), self._say)

    def _connect(self, rank: int, address: str, port: int) -> Connection:
        try:
            connection = Connection(socket.create_connection((address, port), _SECONDS_TO_CONNECT))
        except OSError as error:
            raise UsageError(
                f"rank {self.args.rank} cannot reach rank {rank} at {address} port {port} ({error}); set "
                "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, such as eth0"
            ) from None
        connection.send(asdict(self.file.process))
        return connection

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        selector, beat = selectors.DefaultSelector(), 0.0
        for rank, connection in self._monitors.items():
            selector.register(connection.socket, selectors.EVENT_READ, rank)
        while not self._closed.is_set():
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                self._tell({} if self._failed else {"at": self._position()})
            for key, _ in selector.select(max(0.0, beat - time.monotonic())):
                if not self._hear(key.data):
                    selector.unregister(key.fileobj)

    def _position(self) -> str:
        """What a thread waits for outside of a plan is looked up if it waits for long."""
        before, self._notes = self._notes, recorder.now[0]
        still = before == self._notes
        return repr(tuple(self.file.look_up(self._own_threads()) if still else recorder.position))

    def _own_threads(self) -> set[int]:
        return {t.ident for t in (self._thread, self.monitor and self.monitor.thread) if t and t.ident}

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in list(self._monitors.values()):
            connection.send(message)

    def _hear(self, rank: int) -> bool:
        """Whether the monitor of `rank` is still there."""
        messages = self._monitors[rank].read()
        for message in messages or ():
            if "end" in message:
                self._end(message)
            if "bye" in message:
                self._left.add(rank)
        if messages is None:
            del self._monitors[rank]
            if not (self._monitors or self._left or self._closed.is_set() or self._answered.is_set()):
                first = self.args.rank == self._deputy + 1  # without those two
                self._end({"end": f"rank {self.args.rank} lost ranks 0 and {self._deputy}", "speak": first, "kill": []})
        return messages is not None

    def _end(self, message: dict[str, Any]) -> None:
        """The job is broken."""
        for host, pid in message["kill"]:
            if host == self.file.process.host and pid != self.file.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._speaks = message["speak"]
        self._answered.set()
        with contextlib.suppress(Exception):  # it ends all the same
            self.before_end()
        time.sleep(_SECONDS_TO_FAIL)
        if self._failed:  # the main thread leaves by itself
            return
        if message["speak"]:
            print(message["end"], file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            crash_log(self.args, f"ended because {message['end'] or 'another rank failed'}")
        self.leave()
        linger()
        os._exit(1)

    def _say(self, verdict: Verdict) -> None:
        """In the thread of the monitor of this rank: the ranks that broke the job do not say it themselves."""
        words = verdict.line
        for rank in verdict.silent:
            with contextlib.suppress(OSError):
                words = f"{verdict.line}; details in {crash_log(self.args, verdict.line, rank).parent}"
        if words:
            print(words, file=sys.stderr, flush=True)

    # -- for the main thread -------------------------------------------------------------------------------------

    def fail(self, kind: str) -> None:
        """Tell the monitors that this rank fails, in one of the ways of `Heard.ended`."""
        self._failed = True
        if self.monitor and kind.startswith("SIG"):  # it comes to others too
            self.monitor.silent = True
        at = {} if self._notes == recorder.now[0] else {"at": repr(tuple(recorder.position))}
        self._tell(at | {"ended": kind})

    def silent_ranks(self) -> list[int]:
        """Ranks that have sent nothing for some seconds, by the monitor of this rank."""
        return self.monitor.silent_ranks() if self.monitor else []

    def may_speak(self) -> bool:
        """Whether this rank, which failed, is to say why, because it broke the job."""
        if not self._monitors and not self._answered.is_set():
            return True
        return not self._answered.wait(_SECONDS_TO_ANSWER) or self._speaks

    def leave(self) -> None:
        """Leave in order. After a verdict the monitor of this rank stays until all have heard it."""
        self._tell({"ended": "left"})
        self._closed.set()
        for connection in list(self._monitors.values()):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        if self.monitor:
            self.monitor.close()
        self.file.remove()

    def _close_in_child(self) -> None:
        """What is forked must not hold connections: the monitors know by them that a rank is dead."""
        recorder.memory = None
        sockets = [connection.socket for connection in self._monitors.values()]
        if self.monitor:
            sockets += [self.monitor.listener, *(connection.socket for connection in self.monitor.connections)]
        for connected in sockets:
            connected.close()


def _own_address() -> str:
    """The address of this host at GLOO_SOCKET_IFNAME, or else at the interface from which MASTER_ADDR is reached."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        found = [a.address for a in psutil.net_if_addrs().get(name, ()) if a.family == socket.AF_INET]
        if not found:
            raise UsageError(f"GLOO_SOCKET_IFNAME={name}: no such interface with an address; see `ip address`")
        return found[0]
    family, kind, _, _, target = socket.getaddrinfo(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
