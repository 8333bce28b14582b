"""The watch: a thread of each rank that sends its position to the monitors, and ends the rank if the job is broken."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch.distributed as dist

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.flight_recorder import named, recorder
from megatron.context_parallel.trainer.config.flags import Arguments

from .crash_log import crash_log, linger
from .judge import BEAT, GRACE, Verdict, never_came
from .monitor import SECONDS_OF_PATIENCE, Connection, Monitor
from .rank_file import RankFile

_SECONDS_TO_ANSWER = 7  # of a monitor, at most
_SECONDS_TO_SAY = 5
_SECONDS_TO_CONNECT = 30
_SHORTEST_PAUSE = 0.02
_SECONDS_TO_FAIL = 0.2  # for a rank that another one broke: its own error makes its crash log more useful


class Watch:
    """The watch of this rank. Every rank starts one. With one rank there is nothing to watch.

    Args:
        args: the arguments of the run.
        store: the store of the job.

    Raises:
        UsageError: GLOO_SOCKET_IFNAME does not name an interface.
    """

    def __init__(self, args: Arguments, store: dist.Store) -> None:
        self.args = args
        store = dist.PrefixStore("watch", store)
        drawn = json.dumps([uuid.uuid4().hex, self._choose_deputy()])
        job, self._deputy = json.loads(store.compare_set("job", "", drawn))  # those of the first rank that joins
        self._limits = _limits(args)
        several = args.world_size > 1
        self.monitor = self._monitor(job) if several and args.rank in (0, self._deputy) else None
        if self.monitor:
            store.set(f"monitor {args.rank}", json.dumps([_own_address(), self.monitor.port]))
            self.monitor.thread.start()
        self.file = RankFile(args.rank, args.world_size, job)
        self._addresses: dict[int, tuple[str, int]] = {}  # of monitors
        self._monitors: dict[int, Connection] = {}
        self._heard = time.monotonic()  # when a monitor last sent something
        self._lost = -1, 0.0  # the rank whose monitor was lost last, and when
        self._met = threading.Event()  # all ranks have joined
        self._left: set[int] = set()  # ranks whose monitors left normally
        self._answered = threading.Event()
        self._speaks = False
        self._said = threading.Event()  # this rank failed and has nothing more to report
        self._failed: dict[str, str] = {}  # sent to the monitors when the main thread fails by itself
        self.before_end: Callable[[], None] = lambda: None  # called in the watch's thread when the job is broken
        self._closed = threading.Event()
        self._notes = -1  # the recorder's count when the monitors were last told
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._close_in_child)

    def meet(self, store: dist.Store) -> None:
        """Wait until all ranks have joined. If one does not join, or dies, the monitors report it and end this process.

        Raises:
            UsageError: a monitor cannot be reached, or does not start.
        """
        if self.args.world_size == 1:
            return
        store = dist.PrefixStore("watch", store)
        missing = {0, self._deputy}
        deadline = time.monotonic() + self._limits[0] + _SECONDS_TO_ANSWER
        pause = _SHORTEST_PAUSE
        while missing or not self._met.wait(pause):
            for rank in sorted(missing, key=lambda rank: rank != self.args.rank):
                if store.check([f"monitor {rank}"]):
                    missing.discard(rank)
                    self._addresses[rank] = tuple(json.loads(store.get(f"monitor {rank}")))
                    self._connect(rank, _SECONDS_TO_CONNECT)
            if time.monotonic() > deadline:
                raise UsageError(never_came(missing or {0}, self._limits[0]))
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, BEAT)

    def _choose_deputy(self) -> int:
        """The first rank of the second host, or rank 1 of a single one."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(local if local < self.args.world_size else 1, self.args.world_size - 1)

    def _monitor(self, job: str) -> Monitor:
        return Monitor(_own_address(), job, self.args.rank, self.args.world_size, self._limits, self._say)

    def _connect(self, rank: int, seconds: float) -> None:
        address, port = self._addresses[rank]
        try:
            connection = Connection(socket.create_connection((address, port), seconds))
        except ConnectionRefusedError:
            self._lost = rank, time.monotonic()
            return
        except OSError as error:
            raise UsageError(
                f"rank {self.args.rank} cannot reach rank {rank} at {address} port {port} ({error}); set "
                "GLOO_SOCKET_IFNAME to the network interface that connects the hosts, such as eth0"
            ) from None
        connection.send(asdict(self.file.process))
        self._monitors[rank] = connection

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat = 0.0
        while not self._closed.is_set():
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                self._tell({} if self._failed else {"at": self._position()})
            sockets = {connection.socket: rank for rank, connection in list(self._monitors.items())}
            longest = BEAT if self._met.is_set() else _SHORTEST_PAUSE  # monitors may still join
            asked = time.monotonic()
            ready = wait([*sockets], max(0.0, min(beat - asked, longest)))
            for connected, rank in sockets.items():
                if connected in ready:
                    self._hear(rank)
            self._check(asked)

    def _check(self, now: float) -> None:
        """End this process if no monitor can report that the job is broken. All messages before `now` were read."""
        if self._closed.is_set() or self._answered.is_set():
            return
        lost, when = self._lost
        me = f"rank {self.args.rank}"
        if not self._met.is_set() and lost >= 0 and now - when > GRACE:
            line = f"rank {lost} ended before all ranks had joined, as {me} noticed"
            self._end({"end": line, "speak": bool(self.monitor or not self._monitors), "kill": []})
        elif self._met.is_set() and not self._monitors and not self._left:
            first = self.args.rank == self._deputy + 1  # the first of the ranks except those two
            self._end({"end": f"{me} lost ranks 0 and {self._deputy}", "speak": first, "kill": []})
        limit = self._limits[recorder.position.done > 0]
        if self._monitors and not self._left and now - self._heard > limit:
            silence = f"it received nothing from {named(sorted(self._monitors))} for {limit:g} s"
            line = f"{me} on {socket.gethostname()} is cut off: {silence}"
            self._end({"end": line, "speak": _speaks_for_host(self.args), "kill": []})

    def _position(self) -> str:
        """Find out what a thread waits for outside of a plan, if it waits for long."""
        before, self._notes = self._notes, recorder.now[0]
        still = before == self._notes
        return (self.file.look_up(self._own_threads()) if still else recorder.position).text

    def _own_threads(self) -> set[int]:
        return {t.ident for t in (self._thread, self.monitor and self.monitor.thread) if t and t.ident}

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in list(self._monitors.values()):
            connection.send(message)

    def _hear(self, rank: int) -> None:
        """Read the messages of the monitor of `rank`."""
        messages = self._monitors[rank].read()
        self._heard = time.monotonic()
        for message in messages or ():
            if "met" in message:
                self._met.set()
            if "end" in message:
                self._end(message)
            if "bye" in message:
                self._left.add(rank)
        if messages is None:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """The connection to the monitor of `rank` broke. If nothing else did, it is replaced."""
        (before, when), self._lost = self._lost, (rank, time.monotonic())
        broken = self._monitors[rank]
        again = before == rank and time.monotonic() - when < GRACE
        if self._met.is_set() and not (again or self._left or self._closed.is_set()):
            with contextlib.suppress(OSError, UsageError):
                self._connect(rank, GRACE)
        if self._monitors[rank] is broken:
            del self._monitors[rank]
        elif self._failed:
            self._monitors[rank].send(self._failed)

    def _end(self, message: dict[str, Any]) -> None:
        """The job is broken."""
        for host, pid in message["kill"]:
            if host == self.file.process.host and pid != self.file.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._speaks = message["speak"]
        self._answered.set()
        with contextlib.suppress(Exception):  # the rank ends anyway
            self.before_end()
        time.sleep(_SECONDS_TO_FAIL)
        if self._failed:  # the main thread ends by itself
            return
        if message["speak"]:
            print(message["end"], file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            crash_log(self.args, f"ended because {message['end'] or 'another rank failed'}")
        self.leave()
        linger()
        os._exit(1)

    def _say(self, verdict: Verdict) -> None:
        """Called in the thread of this rank's monitor: the ranks that broke the job cannot report it themselves."""
        words = verdict.line
        for rank in verdict.silent:
            with contextlib.suppress(OSError):
                words = f"{verdict.line}; details in {crash_log(self.args, verdict.line, rank).parent}"
        if words:
            print(words, file=sys.stderr, flush=True)

    # -- for the main thread -------------------------------------------------------------------------------------

    def fail(self, kind: str) -> None:
        """Tell the monitors that this rank fails, with a value of `RankStatus.ended`.

        If a signal arrives while the rank fails with its own error, it waits here until the rank has printed why.
        """
        if kind.startswith("SIG") and self._failed.get("ended") in ("failed", "usage"):
            self._said.wait(_SECONDS_TO_ANSWER + _SECONDS_TO_SAY)
            return
        self._failed = {"ended": kind}
        if self.monitor and kind.startswith("SIG"):  # other ranks get it too
            self.monitor.silent = True
        at = {} if self._notes == recorder.now[0] else {"at": recorder.position.text}
        self._tell(at | self._failed)

    def silent_ranks(self) -> list[int]:
        """Ranks that have sent nothing to this rank's monitor for some seconds."""
        return self.monitor.silent_ranks() if self.monitor else []

    def may_speak(self) -> bool:
        """Whether this rank, which failed, should print why, because it broke the job."""
        if not self._monitors and not self._answered.is_set():
            return True
        return not self._answered.wait(_SECONDS_TO_ANSWER) or self._speaks

    def said(self) -> None:
        """This rank has printed why it failed, or leaves that to another rank: a signal may end it now."""
        self._said.set()

    def leave(self) -> None:
        """Leave normally. After a verdict the monitor of this rank stays until all ranks have received it."""
        self._tell({"ended": "left"})
        self._closed.set()
        for connection in list(self._monitors.values()):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        if self.monitor:
            self.monitor.close()
        self.file.remove()

    def _close_in_child(self) -> None:
        """Close the connections in forked processes: the monitors detect a dead rank by its closed connections."""
        recorder.memory = None
        sockets = [connection.socket for connection in self._monitors.values()]
        if self.monitor:
            sockets += [self.monitor.listener, *(connection.socket for connection in self.monitor.connections)]
        for connected in sockets:
            connected.close()


def _limits(args: Arguments) -> tuple[float, float]:
    """The limits of `judge`."""
    settled = args.distributed_timeout_seconds_after_init
    return 60.0 * args.distributed_timeout_minutes, settled or 60.0 * args.distributed_timeout_minutes


def _speaks_for_host(args: Arguments) -> bool:
    """Whether this rank prints for its host: one per host; on the first host all, because rank 0 may be missing."""
    return os.environ.get("LOCAL_RANK", "0") in ("0", str(args.rank))


def wait_for_store(args: Arguments) -> None:
    """Wait until a process listens at MASTER_ADDR: torch would print a stack for each rank and each attempt.

    Raises:
        UsageError: none does so within `--distributed-timeout-minutes`.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    began = time.monotonic()
    limit = _limits(args)[0]
    pause = _SHORTEST_PAUSE
    told = False
    while True:
        try:
            socket.create_connection((address, port), _SECONDS_TO_CONNECT).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - began, error
        where = f"the first host does not answer at MASTER_ADDR {address} port {port} ({why})"
        if waited > limit:
            raise UsageError(f"{never_came([0], limit)}; {where}")
        if waited > SECONDS_OF_PATIENCE and _speaks_for_host(args) and not told:
            told = True
            words = f"{where} after {waited:.0f} s; waiting up to --distributed-timeout-minutes {limit / 60:g}"
            print(f"rank {args.rank}: {words}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, BEAT)


def _own_address() -> str:
    """The address of this host on GLOO_SOCKET_IFNAME, or else on the interface that reaches MASTER_ADDR."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        found = [a.address for a in psutil.net_if_addrs().get(name, ()) if a.family == socket.AF_INET]
        if not found:
            raise UsageError(f"GLOO_SOCKET_IFNAME={name}: no interface of that name has an address; see `ip address`")
        return found[0]
    family, kind, _, _, target = socket.getaddrinfo(
        os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
