"""The monitor: a thread that receives messages from every rank and reports which one broke the job.

Rank 0 runs one. A deputy runs another, which reports only failures of rank 0. Each rank sends lines of JSON to both:
its identity, its position every half second, and how it ends. The kernel closes the connections of a process that dies.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from megatron.context_parallel.runtime.comm.flight_recorder import Position, named

from .judge import BEAT, SILENT, TOLD, RankStatus, Verdict, judge, judge_absent, judge_first
from .rank_file import RankProcess, file_of, read_rank_file, this_host

_TICK = 0.1  # seconds
_LONGEST_LINE = 16384
_SECONDS_TO_BE_HEARD = 3
_SECONDS_TO_DIE = 0.3
_SECONDS_TO_SPEAK = 2  # for the failed rank to print why, before the others may leave
SECONDS_OF_PATIENCE = 30  # of waiting for ranks that have not joined, before a message


class Connection:
    """Lines of JSON over TCP. Sending never raises: reading reports that the other end is gone.

    Nothing blocks: data that a stalled network does not accept is sent before the next message.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.rank = -1
        self._rest = b""
        self._unsent = b""
        self._sending = threading.Lock()
        connected.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            if len(self._unsent) < _LONGEST_LINE:  # otherwise many beats are already waiting
                self._unsent += json.dumps(message).encode() + b"\n"
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def read(self) -> list[dict[str, Any]] | None:
        """The received messages; None if the other end is gone.

        Raises:
            ValueError: the received data is not a message.
        """
        try:
            received = self.socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ValueError("line too long")
        return [json.loads(line) for line in lines]


class Monitor:
    """Judges the ranks and calls `say` with the first verdict.

    Args:
        address: the address of this host to listen at.
        job: the key of the job.
        rank: the rank of this process: 0, or the deputy.
        world: the number of ranks.
        limits: the limits of `judge`, in seconds.
        say: called with the verdict.
    """

    def __init__(
        self, address: str, job: str, rank: int, world: int, limits: tuple[float, float], say: Callable
    ) -> None:
        self.job, self.rank, self.limits, self.say = job, rank, limits, say
        self.world = world
        self.absent = set(range(world)) if rank == 0 else {0}  # of the ranks that it judges
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family, backlog=4096)
        self.ranks: dict[int, RankStatus] = {}
        self.connections: list[Connection] = []
        self.verdict: Verdict | None = None
        self._others_wait_until = 0.0  # until then only the rank that should print has received the verdict
        self.closed = threading.Event()
        self.silent = False  # whether it has nothing more to report
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    def _run(self) -> None:
        began = before = beat = time.monotonic()
        patience: float = SECONDS_OF_PATIENCE
        while not self.closed.is_set():
            events = self._selector.select(_TICK)
            now = time.monotonic()
            if now - before > 20 * _TICK:  # this process was stopped too
                self._forgive(now - before)
                began += now - before
            before = now
            for key, _ in events:
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._hear(key.data, now)
            for status in self.ranks.values():
                if now - status.heard > 2 * BEAT:
                    self._look_at_file(status, now)
            if now >= beat:
                beat = now + max(BEAT, min(self.limits) / 10)
                self._tell_all({})
            if self.absent and now - began > patience:
                patience = self.limits[0]
                self._ask_for_patience(now - began)
            if not self.verdict and not self.silent:
                self.verdict = judge_absent(self.absent, now - began, self.limits[0]) or self._decide(now)
                if self.verdict:
                    self._announce(self.verdict, now)
            self._let_others_leave(now)

    def silent_ranks(self) -> list[int]:
        """Ranks that have sent nothing for some seconds but may still send. Any thread may call it."""
        now = time.monotonic()
        return sorted(rank for rank, status in [*self.ranks.items()] if now - status.heard > SILENT)

    def _decide(self, now: float) -> Verdict | None:
        if not self._judge(now):
            return None
        for status in self.ranks.values():  # their last message may be half a second old
            self._look_at_file(status, now)
        return self._judge(now)

    def _judge(self, now: float) -> Verdict | None:
        if self.rank == 0:
            return judge(self.ranks, now, self.limits)
        return judge_first(self.ranks, now, self.limits, self.rank)

    def _ask_for_patience(self, waited: float) -> None:
        if waited < self.limits[0]:
            ranks, limit = sorted(self.absent), f"--distributed-timeout-minutes {self.limits[0] / 60:g}"
            words = f"{named(ranks, TOLD)} of {self.world} not joined after {waited:.0f} s; waiting up to {limit}"
            self.say(Verdict(ranks, words))

    def _forgive(self, seconds: float) -> None:
        for status in self.ranks.values():
            status.heard += seconds
            status.moved += seconds

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(self.listener.accept()[0])
            self.connections.append(connection)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _hear(self, connection: Connection, now: float) -> None:
        try:
            messages = connection.read()
            for message in messages or ():
                self._take(connection, message, now)
        except (ValueError, SyntaxError, TypeError, KeyError):  # not a rank of this job
            messages = None
        if messages is None:
            self._selector.unregister(connection.socket)
            self.connections.remove(connection)
            connection.socket.close()
            if all(other.rank != connection.rank for other in self.connections):
                self._gone(connection.rank, now)

    def _take(self, connection: Connection, message: dict[str, Any], now: float) -> None:
        if connection.rank < 0:
            process = RankProcess(**message)
            if process.job != self.job:
                raise ValueError("message of another job")
            connection.rank = process.rank
            self._join(process, now)
            self.absent.discard(process.rank)
            if self.rank == 0 and not self.absent:
                self._tell_all({"met": True})
            if self.verdict and self._may_hear(connection):
                self._send_verdict(connection, self.verdict)
            return
        status = self.ranks[connection.rank]
        status.heard = now
        if "at" in message:
            self._move(status, Position.read(message["at"]), now)
        if "ended" in message:
            status.spoke = message["ended"] == "left"
            if not status.ended:
                status.ended, status.at = message["ended"], now

    def _join(self, process: RankProcess, now: float) -> None:
        status = self.ranks.get(process.rank)
        if not status:
            self.ranks[process.rank] = RankStatus(process, now, now)
            return
        if status.process != process:
            raise ValueError("another process has that rank")
        status.heard = status.cut = now  # its connection broke, and it reconnected
        if status.disconnected:
            status.ended = ""

    def _move(self, status: RankStatus, position: Position, now: float) -> None:
        if position.notes != status.position.notes:
            status.moved = now
        status.position = position

    def _gone(self, rank: int, now: float) -> None:
        if rank < 0:
            return
        status = self.ranks[rank]
        chosen = self.verdict and rank in self.verdict.ranks
        unsaid = not status.spoke and (status.ended in ("failed", "usage") or chosen)
        if status.ended and not unsaid:
            return
        elsewhere = status.process.host != this_host()
        status.ended = "gone" if elsewhere else "cut off" if _lives(status.process) else "died"
        if not unsaid:
            status.at = now

    def _look_at_file(self, status: RankStatus, now: float) -> None:
        """The position of a rank on this host, newer than the last one it sent."""
        if status.ended == "left" or status.process.host != this_host():
            return
        with contextlib.suppress(OSError, ValueError):
            process, position = read_rank_file(file_of(status.process.pid))
            if process == status.process:
                self._move(status, position, now)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for connection in list(self.connections):
            connection.send(message)

    def _announce(self, verdict: Verdict, now: float) -> None:
        self.say(verdict)
        self._others_wait_until = 0.0 if verdict.line else now + _SECONDS_TO_SPEAK
        for connection in self.connections:
            if self._may_hear(connection):
                self._send_verdict(connection, verdict)

    def _may_hear(self, connection: Connection) -> bool:
        """Send the verdict first to the rank that should print: a launcher ends it when another rank has left."""
        assert self.verdict
        return not self._others_wait_until or connection.rank == self.verdict.ranks[0]

    def _let_others_leave(self, now: float) -> None:
        if not self.verdict or not self._others_wait_until:
            return
        speaker = self.ranks[self.verdict.ranks[0]]
        if speaker.ended == "died" or speaker.disconnected:  # without a message
            line = f"rank {speaker.process.rank} failed at {speaker.position}, and ended before it reported why"
            self.verdict = Verdict(self.verdict.ranks, line, self.verdict.ranks)
            self._announce(self.verdict, now)
        elif speaker.spoke or now > self._others_wait_until:
            self._others_wait_until = 0.0
            for connection in self.connections:
                if connection.rank != speaker.process.rank:
                    self._send_verdict(connection, self.verdict)

    def _send_verdict(self, connection: Connection, verdict: Verdict) -> None:
        status = self.ranks.get(connection.rank)
        stopped = [self.ranks[rank].process for rank in verdict.stopped]
        # A rank ends those of its own host. With those of all hosts the line could be too long to be read.
        pids = [[other.host, other.pid] for other in stopped if status and other.host == status.process.host]
        speaks = not verdict.line and connection.rank == verdict.ranks[0]
        connection.send({"end": verdict.line, "speak": speaks, "kill": pids})

    def close(self) -> None:
        """Leave. After a verdict, wait until the ranks have received it. Otherwise tell them that it left."""
        self.silent = True
        deadline = time.monotonic() + _SECONDS_TO_BE_HEARD
        while self.verdict and time.monotonic() < deadline and any(c.rank != self.rank for c in self.connections):
            time.sleep(0.01)
        if not self.verdict:
            self._tell_all({"bye": True})
        self.closed.set()


def _lives(process: RankProcess) -> bool:
    """Whether a process of this host stays alive. A dying process closes its connections shortly before its end."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.005)
    return True
