"""Who is to blame when a job stalls: by data, and with real ranks that are killed and stopped."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.context_parallel.commands import stuck
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.flight_recorder import Position
from megatron.context_parallel.trainer import setup
from megatron.context_parallel.trainer.faults import crash, crash_log, lifetime, rank_file
from megatron.context_parallel.trainer.faults import judge as judges
from megatron.context_parallel.trainer.faults import monitor as monitors
from megatron.context_parallel.trainer.faults import watch as watches
from megatron.context_parallel.trainer.faults.judge import (
    GRACE,
    SIGNAL_GRACE,
    SILENT,
    RankStatus,
    judge,
    judge_absent,
    judge_first,
)
from megatron.context_parallel.trainer.faults.monitor import Connection, Monitor
from megatron.context_parallel.trainer.faults.rank_file import RankFile, RankProcess, rank_files, read_rank_file
from megatron.context_parallel.trainer.faults.wait_graph import chains, culprits, describe_culprits
from megatron.context_parallel.trainer.faults.watch import Watch

LIMITS = (100.0, 30.0)
NOW = 1000.0


def receives(rank: int, notes: int = 1) -> Position:
    return Position(notes, 1, 5, "forward", 1, "ring", False, 2, None, ("receive", "ring", (rank,)))


def gathers(*ranks: int) -> Position:
    return Position(1, 1, 5, "optimizer", waits=("all_reduce", "", ranks))


BUSY = Position(1, 1, 5, "data", code="read (data.py:3)")


@pytest.mark.parametrize(
    "positions, blamed",
    [
        ([receives(3), receives(0), BUSY, receives(2)], [2]),  # the end of a chain
        ([receives(1), receives(0), receives(1)], [0, 1]),  # a circle, and one behind it
        ([receives(1), receives(2), receives(0)], [0, 1, 2]),
        ([gathers(1, 2), gathers(0, 2), BUSY], [2]),  # who does not come to a collective
        ([gathers(1, 2), gathers(0, 2), gathers(0, 1)], [0, 1, 2]),  # all came
        ([gathers(1), gathers(0), receives(3), BUSY], [3]),  # the circle 0, 1 is no circle: they are together
        ([receives(1), BUSY, BUSY], [1]),  # nobody waits for rank 2
        ([gathers(1), receives(0)], [0, 1]),  # rank 1 is not in the collective of rank 0, which it waits for
        ([receives(7)], [7]),  # a rank that is not known here
    ],
)
def test_culprits(positions, blamed):
    assert culprits(dict(enumerate(positions))) == blamed


def test_what_a_stopped_rank_waits_for_does_not_matter():
    positions = dict(enumerate([receives(1), receives(0), receives(0)]))
    assert culprits(positions, stopped=[1]) == [1]
    assert chains(positions, stopped=[1]) == [[2, 0, 1]]


def test_chains_end_at_a_culprit_or_close_a_circle():
    assert chains(dict(enumerate([receives(2), receives(0), BUSY]))) == [[1, 0, 2]]
    assert chains(dict(enumerate([receives(1), receives(0), receives(1)]))) == [[2, 1, 0, 1]]
    assert chains(dict(enumerate([gathers(1, 2), BUSY, gathers(0, 1)]))) == [[0, 1], [2, 1]]
    assert chains({0: BUSY}) == []


def test_a_hang_as_words():
    positions = dict(enumerate([receives(1), receives(0), BUSY]))
    assert describe_culprits([2], positions) == "rank 2 makes no progress at iteration 5, data, in read (data.py:3)"
    line = describe_culprits([0, 1], positions)
    assert line.startswith("ranks 0, 1 wait for each other: rank 0 at iteration 5, layer 1, forward of ring, step 2, ")
    assert "waiting for rank 1 on channel ring; rank 1 at" in line
    many = describe_culprits(list(range(9)), {rank: receives((rank + 1) % 9) for rank in range(9)})
    assert many.startswith("ranks 0, 1, 2, 3 ... wait for each other:") and "rank 4" not in many.partition(":")[0]


def heard(rank: int, position: Position = BUSY, *, ago: float = 0.0, still: float = 0.0, ended: str = "") -> RankStatus:
    """A rank in its second iteration; `ago`: since its last message or its end."""
    process = RankProcess(rank, 4, 100 + rank, "host", "job")
    return RankStatus(process, NOW - (0 if ended else ago), NOW - still, position, ended, NOW - ago)


def verdict(*ranks: RankStatus, by=judge):
    return by({each.process.rank: each for each in ranks}, NOW, LIMITS)


def test_nobody_is_to_blame():
    assert verdict(heard(0), heard(1)) is None
    assert verdict(heard(0), heard(1, ended="left", ago=50)) is None
    assert verdict(heard(0), heard(1, ago=29)) is None
    assert verdict(heard(0, still=31), heard(1, still=29)) is None
    saving = replace(heard(1, still=31), position=Position(1, 1, 5, "save"))
    assert verdict(heard(0, receives(1), still=31), saving) is None
    idle = heard(0, Position(9, 3, 4, "idle"), still=999)  # a server without requests
    assert verdict(idle, heard(1, receives(0), still=999)) is None
    starting = heard(1, Position(), ago=99, still=99)
    assert verdict(heard(0, Position(), still=99), starting) is None


def test_a_monitor_tells_who_is_silent():
    monitor = Monitor("127.0.0.1", "job", 0, 3, LIMITS, print)
    monitor.listener.close()
    now = time.monotonic()
    for rank, ago in enumerate((0.0, SILENT + 1, SILENT / 2)):
        monitor.ranks[rank] = replace(heard(rank), heard=now - ago)
    assert monitor.silent_ranks() == [1]


def test_the_dead_rank_is_to_blame_and_not_those_that_lost_it():
    found = verdict(heard(0, ended="lost", ago=2), heard(1, receives(2), ended="died", ago=1), heard(2))
    assert (
        found.line == "rank 1 died at iteration 5, layer 1, forward of ring, step 2, waiting for rank 2 on channel ring"
    )
    assert (found.ranks, found.silent, found.stopped) == ([1], [1], [])


def test_the_first_own_error_is_to_blame():
    found = verdict(heard(0, ended="lost", ago=0.5), heard(1, ended="died", ago=0.1), heard(2, ended="failed", ago=0.6))
    assert (found.ranks, found.line, found.silent) == ([2], "", [])


def test_a_usage_error_of_all_ranks_is_said_by_rank_0():
    assert verdict(heard(0), heard(1, ended="usage", ago=GRACE / 2)) is None
    assert verdict(heard(0, ended="usage", ago=0.1), heard(1, ended="usage", ago=0.2)).ranks == [0]
    assert verdict(heard(0), heard(1, ended="usage", ago=GRACE + 1)).ranks == [1]


def test_a_signal_to_one_rank_is_named_and_one_to_all_is_not():
    assert verdict(heard(0), heard(1, ended="SIGTERM", ago=SIGNAL_GRACE / 2)) is None
    assert verdict(heard(0), heard(1, ended="SIGTERM", ago=1)).line.startswith("rank 1 was ended by SIGTERM at iter")


def test_a_silent_rank_stopped():
    found = verdict(heard(0), heard(1, ago=31), heard(2, receives(1)))
    assert found.line == "rank 1 stopped responding at iteration 5, data, in read (data.py:3)"
    assert found.stopped == [1]
    first = BUSY._replace(done=0)
    assert verdict(heard(0, first), heard(1, first, ago=31)) is None  # in the first iteration it may take longer
    assert verdict(heard(0), heard(1, first, ago=31)).ranks == [1]  # the first is done, which it could not tell
    suspected = heard(1, ago=SILENT + 1)
    assert verdict(heard(0), suspected) is None
    assert verdict(heard(0, ended="lost", ago=2), suspected).ranks == [1]


def test_a_collective_that_timed_out_has_a_culprit():
    waiting = heard(0, receives(1), ended="timeout", ago=2)
    assert verdict(waiting, heard(1), heard(2, receives(1))).line.startswith("rank 1 makes no progress at iteration 5")
    assert verdict(heard(0, receives(1), ended="timeout", ago=GRACE / 2), heard(1)) is None


def test_a_rank_that_does_not_come_is_waited_for_and_named():
    assert judge_absent({2, 3}, waited=599, limit=600) is None
    assert judge_absent(set(), waited=601, limit=600) is None
    line = judge_absent({2, 3}, waited=601, limit=600).line
    assert line.startswith("ranks 2, 3 did not join within --distributed-timeout-minutes 10:")
    assert judge_absent(set(range(1, 99)), 601, 600).line.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 ... did not join")


def test_a_rank_of_another_host_that_is_gone_may_live():
    gone = heard(2, ended="gone", ago=SILENT + 1)
    late = heard(2, ended="gone", ago=GRACE + 1)
    assert verdict(heard(0), late) is None  # it may connect anew
    assert verdict(heard(0, ended="lost", ago=GRACE / 2), late).ranks == [2]  # another rank misses a peer as well
    assert verdict(heard(0), gone).line.startswith("rank 2 on host died or was cut off at iteration 5")
    assert verdict(replace(gone, process=RankProcess(0, 4, 1, "host", "job")), by=judge_first).ranks == [0]


def test_a_connection_made_anew_is_to_blame_only_if_ranks_lost_each_other():
    anew = replace(heard(2), cut=NOW - 5)
    assert verdict(heard(0), anew) is None
    lost = heard(1, ended="lost", ago=2)
    assert verdict(heard(0), lost, anew).line.startswith("rank 2 lost its connections at iteration 5")
    assert verdict(heard(0), lost, replace(anew, cut=NOW - 500)).ranks == [1]


def test_a_judge_that_hears_nobody_is_cut_off_itself():
    silent = [heard(rank, ago=31) for rank in (1, 2, 3)]
    assert verdict(heard(0), *silent).line.startswith("rank 0 is cut off: it receives nothing from the other ranks at ")
    assert verdict(heard(0), heard(1), *silent[1:]).ranks == [2]
    assert verdict(heard(0), heard(1, ago=31), heard(2, ago=3), heard(3, ago=2)).ranks == [1]  # the others are late
    assert verdict(heard(0), heard(1, ago=31), heard(2, ended="left", ago=31)).ranks == [1]
    assert verdict(heard(0, ago=31), heard(1, ago=31)).ranks == [0]  # it hears not even itself


def test_a_deputy_that_hears_nobody_is_cut_off_itself():
    silent = [heard(rank, ago=31) for rank in (0, 2, 3)]
    line = "rank 1 is cut off: it receives nothing from the other ranks at "
    assert verdict(silent[0], heard(1), *silent[1:], by=judge_first).line.startswith(line)
    assert verdict(silent[0], heard(1, ago=31), *silent[1:], by=judge_first).line.startswith(line)
    assert verdict(silent[0], heard(1, ago=31), by=judge_first).line.startswith(line)  # of two, not even itself
    assert verdict(silent[0], heard(1), heard(2), heard(3), by=judge_first).ranks == [0]


def test_a_deputy_whose_connections_break_does_not_blame_rank_0():
    ranks = [heard(rank, ended="cut off", ago=SILENT + 1) for rank in range(4)]
    assert verdict(*ranks, by=judge_first).line.startswith("rank 1 lost its connections at ")
    assert verdict(ranks[0], heard(1), *ranks[2:], by=judge_first).line.startswith("rank 0 lost its connections at ")
    replaced = replace(heard(1), cut=NOW - 1)
    assert verdict(ranks[0], replaced, *ranks[2:], by=judge_first).line.startswith("rank 1 lost its connections at ")


def test_a_hang_has_a_culprit():
    found = verdict(heard(0, receives(1), still=31), heard(1, still=31), heard(2, receives(0), still=31))
    assert found.ranks == [1]


def test_a_broken_connection_between_living_ranks_is_said_by_the_first():
    found = verdict(heard(0), heard(1, ended="lost", ago=2), heard(2, ended="lost", ago=3))
    assert (found.ranks, found.line) == ([2], "")
    assert verdict(heard(0), heard(1, ended="lost", ago=GRACE / 2)) is None


def test_the_deputy_judges_only_rank_0():
    assert verdict(heard(0), heard(1, ended="died"), by=judge_first) is None
    assert verdict(heard(0, ended="failed"), heard(1), by=judge_first) is None
    assert verdict(heard(0), heard(1, ago=50), by=judge_first) is None
    assert verdict(heard(0, ended="died"), heard(1), by=judge_first).line.startswith("rank 0 died at iteration 5")
    assert verdict(heard(0, ago=31), heard(1), by=judge_first).line.startswith("rank 0 stopped responding")
    assert verdict(heard(0, ended="SIGINT", ago=1), heard(1), by=judge_first).line.startswith(
        "rank 0 was ended by SIGI"
    )


# --------------------------------------------------------------------------------------------------- monitors


class Link:
    """A proxy in front of a monitor that delays messages, and sometimes drops all of them for a while."""

    def __init__(self, port: int, delay: float = 0.0, losses: float = 0.0, pause: float = 0.0) -> None:
        self.port, self.delay, self.losses, self.pause = port, delay, losses, pause
        self.random, self.open = random.Random(0), True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[1]
        self.ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.port))
                self.ends += near, far
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                time.sleep(self.delay + (self.pause if self.random.random() < self.losses else 0))
                other.sendall(data)
            other.close()

    def drop(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()


class Far:
    """A rank that only sends where it is, through a link."""

    def __init__(self, rank: int, link: Link) -> None:
        self.process, self.link, self.notes = RankProcess(rank, 3, 1000 + rank, f"host{rank} 0", "job"), link, 0
        self.connect()

    def connect(self) -> None:
        self.connection = Connection(socket.create_connection(("127.0.0.1", self.link.address)))
        self.connection.send(asdict(self.process))

    def beat(self) -> None:
        self.notes += 1
        self.connection.send({"at": repr(tuple(Position(self.notes, 1, 5, "data")))})


@pytest.fixture
def monitor(monkeypatch):
    """The monitor of rank 0 of three, with short limits: a silence of one second, and half a second of grace."""
    monkeypatch.setattr(monitors, "BEAT", 0.05)
    monkeypatch.setattr(judges, "GRACE", 0.5)
    monkeypatch.setattr(judges, "SILENT", 0.5)
    said: list[str] = []
    found = Monitor("127.0.0.1", "job", 0, 3, (1.0, 1.0), lambda verdict: said.append(verdict.line))
    found.said = said
    found.thread.start()
    yield found
    found.verdict = None
    found.close()


def beat(ranks: list[Far], times: int, monitor: Monitor) -> str:
    """The verdict, if there is one before all ranks have sent so many messages."""
    for _ in range(times):
        for rank in ranks:
            rank.beat()
        time.sleep(0.05)
        if monitor.said:
            return monitor.said[0]
    return ""


def test_a_slow_and_lossy_link_is_no_fault(monitor):
    links = [Link(monitor.port), *(Link(monitor.port, delay=0.2, losses=0.1, pause=0.4) for _ in range(2))]
    ranks = [Far(rank, link) for rank, link in enumerate(links)]
    assert beat(ranks, 40, monitor) == ""
    assert monitor.ranks[2].position.notes > 1


def test_a_dropped_connection_that_is_made_anew_is_no_fault(monitor):
    ranks = [Far(rank, Link(monitor.port)) for rank in range(3)]
    assert beat(ranks, 5, monitor) == ""
    ranks[2].link.drop()
    ranks[2].connect()
    assert beat(ranks, 15, monitor) == ""
    ranks[2].link.drop()
    assert beat(ranks, 100, monitor).startswith("rank 2 on host2 died or was cut off at iteration 5, data")


def test_a_link_that_passes_nothing_is_a_fault(monitor):
    ranks = [Far(rank, Link(monitor.port)) for rank in range(3)]
    beat(ranks, 3, monitor)
    ranks[1].link.delay = 100
    assert beat(ranks, 100, monitor).startswith("rank 1 stopped responding at iteration 5, data")


def has_come(what) -> bool:
    """Whether the condition becomes true within some seconds."""
    deadline = time.monotonic() + 10
    while not (come := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(come)


def heard_ends(rank: Far) -> list[dict]:
    rank.messages = getattr(rank, "messages", []) + (rank.connection.read() or [])
    return [message for message in rank.messages if "end" in message]


def test_of_thousands_that_stopped_a_rank_is_told_those_of_its_host(monitor):
    far = [Far(rank, Link(monitor.port)) for rank in range(3)]
    assert has_come(lambda: len(monitor.ranks) == 3)
    silent = {}
    for rank in range(3, 3000):
        process = RankProcess(rank, 3000, 1000 + rank, "host1 0" if rank in (3, 7) else "elsewhere 0", "job")
        silent[rank] = RankStatus(process, time.monotonic() - 9, time.monotonic(), BUSY)
    monitor.ranks = monitor.ranks | silent
    assert beat(far, 100, monitor).startswith("rank 3 stopped responding at iteration 5, data")
    assert has_come(lambda: all([heard_ends(rank) for rank in far]))
    assert [heard_ends(rank)[0]["kill"] for rank in far] == [[], [["host1 0", 1003], ["host1 0", 1007]], []]


def failing(monitor, kind: str) -> tuple[Far, Far]:
    """Ranks 0 and 1 fail; rank 0 has been told to say it."""
    first, other = [Far(rank, Link(monitor.port)) for rank in (0, 1)]
    assert has_come(lambda: len(monitor.ranks) == 2)
    first.connection.send({"ended": kind})
    assert has_come(lambda: monitor.ranks[0].ended)
    other.connection.send({"ended": kind})
    assert has_come(lambda: heard_ends(first)) and heard_ends(first)[0] == {"end": "", "speak": True, "kill": []}
    return first, other


@pytest.mark.parametrize("kind", ["usage", "failed"])
def test_nobody_leaves_before_the_rank_that_is_to_speak_has_spoken(monitor, kind):
    first, other = failing(monitor, kind)
    late = Far(2, Link(monitor.port))
    assert has_come(lambda: 2 in monitor.ranks)
    time.sleep(0.2)
    assert not heard_ends(other) and not heard_ends(late)
    first.connection.send({"ended": "left"})
    assert has_come(lambda: heard_ends(other) and heard_ends(late))
    assert heard_ends(other) == heard_ends(late) == [{"end": "", "speak": False, "kill": []}]
    assert monitor.said == [""]


def test_others_leave_without_a_rank_that_takes_too_long_to_speak(monitor, monkeypatch):
    monkeypatch.setattr(monitors, "_SECONDS_TO_SPEAK", 0.3)
    _, other = failing(monitor, "usage")
    assert has_come(lambda: heard_ends(other))


@pytest.mark.parametrize("kind", ["usage", "failed"])
def test_a_rank_that_ends_before_it_speaks_is_named_by_the_monitor(monitor, kind):
    first, other = failing(monitor, kind)
    first.link.drop()
    assert has_come(lambda: heard_ends(other))
    line = "rank 0 failed at joining, and ended before it reported why"
    assert heard_ends(other)[0]["end"] == line and monitor.said == ["", line]


@pytest.mark.parametrize("kind", ["usage", "failed"])
def test_a_deputy_names_rank_0_that_failed_and_ended_without_a_word(monitor, kind):
    monitor.rank = 1
    first = Far(0, Link(monitor.port))
    first.connection.send({"ended": kind})
    assert has_come(lambda: monitor.ranks and monitor.ranks[0].ended == kind)
    first.link.drop()
    assert has_come(lambda: monitor.said)
    assert monitor.said == ["rank 0 on host0 died or was cut off at joining"]


def watch_of(rank: int, monkeypatch, folder: Path) -> Watch:
    """A watch without threads: what it sends is in `sent`."""
    found = Watch.__new__(Watch)
    found.args, found.monitor, found.sent = SimpleNamespace(rank=rank, world_size=2, save=folder), None, []
    found._failed, found._notes, found._monitors, found._speaks = {}, -1, {0: None}, False
    found._said, found._answered = threading.Event(), threading.Event()
    found._tell = found.sent.append
    found.leave = lambda: found.sent.append({"ended": "left"})
    monkeypatch.setattr(crash, "linger", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [UsageError("a wrong flag"), ValueError("broken")])
@pytest.mark.parametrize("answer", ["speak", "be still", "none", "nobody is there"])
def test_a_rank_speaks_unless_another_is_to(rank, error, answer, monkeypatch, capsys, tmp_path):
    watch = watch_of(rank, monkeypatch, tmp_path)
    monkeypatch.setattr(watches, "_SECONDS_TO_ANSWER", 0.05)
    watch._speaks = answer == "speak"
    if answer in ("speak", "be still"):
        watch._answered.set()
    if answer == "nobody is there":
        watch._monitors = {}
    at_exit = []
    monkeypatch.setattr(crash.atexit, "register", at_exit.append)
    with pytest.raises((SystemExit, UsageError)) as left:
        crash.leave_after(watch.args, error, watch)
    raised = left.type is UsageError  # the program prints it, and leaves then
    assert raised == (answer != "be still" and rank == 0 and isinstance(error, UsageError))
    assert bool(at_exit) == raised == (watch.sent[-1] != {"ended": "left"})
    assert watch._said.is_set() == (not raised)  # until then no signal ends it
    words = capsys.readouterr().err
    assert raised or (str(error) in words) == (answer != "be still")


def test_a_rank_that_lingers_leaves_after_a_sigterm_that_came_before(monkeypatch):
    """Or to another thread: `multiprocessing` lifts the mask when it starts a helper by "spawn"."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(lifetime, "_sigterm", [signal.SIGTERM])
    monkeypatch.setattr(signal, "sigtimedwait", lambda *given: pytest.fail("it waits"))
    crash_log.linger()


def test_a_rank_that_is_alone_raises_a_usage_error_again_and_leaves(monkeypatch, tmp_path):
    watch, at_exit = watch_of(0, monkeypatch, tmp_path), []
    watch.args.world_size = 1
    monkeypatch.setattr(crash.atexit, "register", at_exit.append)
    with pytest.raises(UsageError):
        crash.leave_after(watch.args, UsageError("a wrong flag"), watch)
    assert watch.sent == [{"ended": "left"}] and not at_exit


def test_a_rank_that_is_alone_waits_for_nobody(monkeypatch, capfd):
    monkeypatch.setattr(monitors, "SECONDS_OF_PATIENCE", 0.0)
    limits = {"distributed_timeout_minutes": 0.001, "distributed_timeout_seconds_after_init": 0}
    watch = Watch(SimpleNamespace(rank=0, world_size=1, save=None, **limits), dist.HashStore())
    watch.meet(dist.HashStore())
    time.sleep(0.5)
    assert watch.silent_ranks() == []
    watch.leave()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["usage", "failed"])
def test_a_signal_waits_for_a_rank_that_is_to_speak(kind, monkeypatch, tmp_path):
    watch = watch_of(1, monkeypatch, tmp_path)
    watch.fail(kind)
    signals = threading.Thread(target=watch.fail, args=("SIGTERM",), daemon=True)
    signals.start()
    signals.join(0.2)
    assert signals.is_alive()
    watch.said()
    signals.join(10)
    assert not signals.is_alive()
    assert [message["ended"] for message in watch.sent] == [kind]  # and it does not say that the signal was it


def test_a_signal_ends_a_rank_that_lost_a_peer_at_once(monkeypatch, tmp_path):
    watch = watch_of(1, monkeypatch, tmp_path)
    watch.fail("lost")
    watch.fail("SIGTERM")
    assert watch.sent[-1]["ended"] == "SIGTERM"


def test_a_monitor_waits_for_all_and_tells_when_they_are_there(monitor):
    first = [Far(rank, Link(monitor.port)) for rank in (0, 1)]
    assert beat(first, 3, monitor) == "" and monitor.absent == {2}
    late = Far(2, Link(monitor.port))
    describe_culprits: list[dict] = []
    while not any("met" in message for message in describe_culprits):
        describe_culprits += late.connection.read() or []
        time.sleep(0.01)
    assert monitor.absent == set()


def test_a_monitor_names_who_never_comes(monitor):
    ranks = [Far(rank, Link(monitor.port)) for rank in (0, 2)]
    assert beat(ranks, 100, monitor).startswith("rank 1 did not join within --distributed-timeout-minutes 0.01")


def test_what_a_stalled_link_does_not_take_is_sent_later():
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, reader = Connection(near), Connection(far)
    for number in range(1000):  # more than it takes
        sender.send({"number": number})
    came = [message["number"] for message in drain(reader)]
    assert 0 < len(came) < 1000
    while -1 not in came:
        sender.send({"number": -1})
        came += [message["number"] for message in drain(reader)]
    whole = came[: came.index(-1)]
    assert whole == list(range(len(whole)))


def drain(reader: Connection) -> list[dict]:
    found = []
    while some := reader.read():
        found += some
    return found


# ------------------------------------------------------------------------------------------------- rank files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_file.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(stuck, "_LOOK", 0.0)
    return tmp_path


def test_a_file_tells_where_its_rank_is(folder):
    file = RankFile(3, 4, "job")
    try:
        rank_file.recorder.enter("optimizer", 12)
        process, position = read_rank_file(rank_files()[0])
        assert process == RankProcess(3, 4, os.getpid(), file.process.host, "job")
        assert str(position) == "iteration 12, optimizer"
        code = file.look_up(set()).code
        assert code and str(read_rank_file(rank_files()[0])[1]).endswith(f"iteration 12, optimizer, in {code}")
        rank_file.recorder.enter("save", 12)  # what was looked up is of the past
        assert str(read_rank_file(rank_files()[0])[1]) == "iteration 12, save"
        assert (folder / f"megatron-context-parallel-{os.getuid()}").stat().st_mode & 0o77 == 0
    finally:
        file.remove()
    assert not rank_files()


def test_a_folder_that_cannot_be_written_does_not_stop_a_job(folder, capsys):
    (folder / f"megatron-context-parallel-{os.getuid()}").write_text("no folder")
    file = RankFile(2, 4, "job")
    rank_file.recorder.enter("save", 12)
    assert b"'save'" in file.memory[:512]
    assert capsys.readouterr().err.startswith("rank 2: cp-stuck cannot see it: ")


def test_a_new_rank_removes_the_files_of_dead_processes(folder):
    RankFile(0, 1, "job").remove()
    dead = rank_file.file_of(2**22 + 1)  # above the largest process number
    dead.write_text("")
    file = RankFile(0, 1, "job")
    file.remove()
    assert not dead.exists()


def test_a_damaged_file_is_no_rank(folder):
    file = RankFile(0, 1, "job")
    file.remove()
    for content in (b"", b"\xff" * 4096, b"x" * 4096):
        file.path.write_bytes(content)
        with pytest.raises(ValueError):
            read_rank_file(file.path)


def test_stuck_shows_a_circle(folder, capsys, monkeypatch):
    file = RankFile(0, 2, "job")
    try:
        of_peer = {RankProcess(1, 2, os.getpid(), "host", "job"): (receives(0), "sleeping")}
        mine = {file.process: (receives(1), "sleeping")}
        monkeypatch.setattr(stuck, "_read", lambda: mine | of_peer)
        stuck.main(["--image", str(folder / "waits.png")])
    finally:
        file.remove()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 2 ranks are on this host"
    assert all(len(line) <= 80 for line in lines[:-1])
    assert [line.split()[:3] for line in lines[2:3]] == [["0", "waits", "5"]]
    assert "ranks 0, 1 wait for each other" in lines
    assert "0 -> 1 -> 0" in lines
    assert (folder / "waits.png").stat().st_size > 1000


def test_stuck_without_a_job(folder):
    with pytest.raises(stuck.UsageError, match="no job is running"):
        stuck.main([])


def test_rank_0_that_ends_while_a_rank_connects_is_named(monkeypatch, capfd):
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    closing = threading.Thread(target=lambda: [end.close() for end in (listener.accept()[0], listener)])
    closing.start()  # it answers once
    args = SimpleNamespace(world_size=2, rank=1, distributed_timeout_minutes=1 / 60)
    args.distributed_timeout_seconds_after_init = None
    with pytest.raises(UsageError, match=r"^rank 0 did not join within --distributed-timeout-minutes"):
        setup.open_store(args)
    closing.join()
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------------------- real ranks


@pytest.fixture(scope="module", autouse=True)
def jobs(tmp_path_factory) -> Iterator[subprocess.Popen]:
    """Two jobs that run beside the other tests: one whose rank 1 is killed, and one whose rank 0 is stopped."""
    case = Path(__file__).parents[1] / "support" / "watch_case.py"
    command = [sys.executable, case, tmp_path_factory.mktemp("watch")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def outcomes(jobs) -> dict:
    """The outcomes of the two jobs."""
    printed, errors = jobs.communicate(timeout=300)
    assert jobs.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


def test_the_first_line_after_a_death_names_the_dead_rank(outcomes):
    killed = outcomes["killed"]
    assert killed["lines"][0].startswith("rank 1 died at iteration 2, layer 1, forward of ring, step 0; details in ")
    assert len(killed["lines"]) == 1
    assert killed["statuses"] == {"0": 1, "1": -9} and not killed["left"]
    assert "forward of ring, step 1, waiting for KV chunk 1 from rank 1" in killed["logs"]["rank-0.log"]
    assert "launch ring: receive from rank 1, send to rank 1 (iteration 2, layer 1" in killed["logs"]["rank-0.log"]
    assert "rank 1 died at iteration 2" in killed["logs"]["rank-1.log"]


def test_the_first_line_after_a_stall_names_the_stopped_rank(outcomes):
    stopped = outcomes["stopped"]
    assert stopped["lines"][0].startswith("rank 0 stopped responding at iteration 3, layer 2, backward of ring, step 2")
    assert len(stopped["lines"]) == 1
    assert stopped["statuses"] == {"0": -9, "1": 1} and not stopped["left"]
    table = stopped["table"]
    assert "0     stopped  3" in table and "culprit: rank 0" in table and "1 -> 0 (stopped)" in table
