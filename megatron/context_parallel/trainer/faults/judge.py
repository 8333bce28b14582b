"""Decides which rank broke a job, from the states of its ranks. Pure data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron.context_parallel.runtime.comm.flight_recorder import Position, named

from .rank_file import RankProcess

BEAT = 0.5  # seconds between two messages of a rank
SILENT = 6 * BEAT  # without a message, of a rank whose peers lost it or whose connections broke
GRACE = 1.0  # seconds in which the cause of a failure may become visible
SIGNAL_GRACE = 0.2  # seconds in which a signal to all ranks reaches each of them
_RECENT = 60  # seconds in which ranks notice that one of their connections broke
TOLD = 8  # ranks named in a line
_ANY_TIME = ("", "save", "idle")  # phases of unlimited duration: only their collectives have a limit


@dataclass
class RankStatus:
    """The known state of a rank. Times are those of `time.monotonic`.

    Attributes:
        heard: when it last sent a message.
        moved: when its position last changed.
        ended: how it ended; "" if it did not. "left": normally; "died": without a message; "cut off": but alive;
            "gone": died or cut off, on another host; "failed": its own error; "usage": a UsageError, which other ranks
            may raise too; "lost": a peer; "timeout": of a collective; otherwise the name of the signal that ends it.
        at: when it ended.
        cut: when its connection to the monitor last broke and was replaced.
        spoke: whether it sent how it ends after that; a rank that ends without doing so died.
    """

    process: RankProcess
    heard: float
    moved: float
    position: Position = field(default_factory=lambda: Position(phase="joining"))  # until it sends a position
    ended: str = ""
    at: float = 0.0
    cut: float = float("-inf")
    spoke: bool = False

    @property
    def disconnected(self) -> bool:
        """Whether all its connections broke and nothing else is known about it."""
        return self.ended in ("cut off", "gone")

    @property
    def settled(self) -> bool:
        """Whether it has completed an iteration."""
        return self.position.done > 0


@dataclass(frozen=True)
class Verdict:
    """The ranks that broke the job."""

    ranks: list[int]
    line: str  # to print; "": the first of the ranks prints its own error
    silent: list[int] = field(default_factory=list)  # ranks that cannot print: dead or stopped
    stopped: list[int] = field(default_factory=list)  # those of them that are alive


def judge(ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float]) -> Verdict | None:
    """The ranks that broke the job, or None if no rank did or the cause is not clear yet.

    Args:
        ranks: all ranks that have ever sent a message.
        now: the current time.
        limits: seconds without a message, or without progress of any rank, before and after the end of the first
            iteration.
    """
    to_connect = _seconds_to_connect(ranks)
    for rank in sorted(ranks, key=lambda rank: ranks[rank].at):
        status = ranks[rank]
        if status.ended == "died":
            return Verdict([rank], f"rank {rank} died at {status.position}", [rank])
        if status.ended == "failed":
            return Verdict([rank], "")
        if status.ended.startswith("SIG") and now - status.at > SIGNAL_GRACE:
            return Verdict([rank], f"rank {rank} was ended by {status.ended} at {status.position}", [rank])
        if status.disconnected and now - status.at > to_connect:
            return _cut_off(ranks, now)
        if status.ended == "usage":
            if 0 in ranks and ranks[0].ended == "usage":  # rank 0 prints an error that all of them may raise
                return Verdict([0], "")
            if now - status.at > GRACE:
                return Verdict([rank], "")
    return _silent(ranks, now, limits, 0) or _lost(ranks, now) or _hang(ranks, now, limits[1])


def judge_first(
    ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float], deputy: int = 1
) -> Verdict | None:
    """Whether rank 0, the judge, died or stopped, or whether the deputy that asks is cut off itself."""
    if 0 not in ranks:
        return None
    if ranks[0].ended.startswith("SIG"):
        return judge({0: ranks[0]}, now, limits)
    if ranks[0].disconnected:
        if now - ranks[0].at <= _seconds_to_connect(ranks):
            return None
        own = ranks.get(deputy)
        # Its connection to its own monitor broke too, and may already be replaced.
        itself = own and (own.disconnected or now - own.cut < _RECENT)
        blamed = deputy if itself else 0
        return _cut_off({blamed: ranks[blamed]}, now)
    if ranks[0].ended == "died":
        return Verdict([0], f"rank 0 died at {ranks[0].position}", [0])
    if ranks[0].ended:
        return None
    verdict = _silent(ranks, now, limits, deputy)
    judged = verdict and (verdict.ranks == [0] or not verdict.silent)  # not silent: the deputy is cut off
    return verdict if judged else None


def judge_absent(absent: Collection[int], waited: float, limit: float) -> Verdict | None:
    """The verdict if the job must not wait longer for ranks that have not joined; `waited` and `limit` in seconds."""
    return Verdict(sorted(absent), never_came(absent, limit)) if absent and waited > limit else None


def never_came(ranks: Collection[int], limit: float) -> str:
    """One line: these ranks did not join within `limit` seconds."""
    return (
        f"{named(sorted(ranks), TOLD)} did not join within --distributed-timeout-minutes {limit / 60:g}: "
        "not started, already ended, or unable to reach rank 0"
    )


def _seconds_to_connect(ranks: Mapping[int, RankStatus]) -> float:
    """Seconds for a rank to reconnect: a busy host is slow, unless other ranks miss a peer as well."""
    return GRACE if any(status.ended in ("lost", "timeout") for status in ranks.values()) else SILENT


def _cut_off(ranks: Mapping[int, RankStatus], now: float) -> Verdict:
    """The first rank whose connection broke is to blame. If rank 0 is cut off, it loses all connections."""
    lost = [rank for rank in sorted(ranks) if ranks[rank].disconnected]
    blamed = min(lost + [rank for rank in ranks if now - ranks[rank].cut < _RECENT])
    status = ranks[blamed]
    if status.ended == "gone":
        host = status.process.host.split()[0]
        return Verdict([blamed], f"rank {blamed} on {host} died or was cut off at {status.position}", [blamed], lost)
    return Verdict([blamed], f"rank {blamed} lost its connections at {status.position}", [], lost)


def _silent(ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float], me: int) -> Verdict | None:
    suspicion = any(_for_long(status, now, "lost", "timeout") for status in ranks.values())
    settled = any(status.settled for status in ranks.values())  # no rank completes an iteration without the others
    limit = SILENT if suspicion else limits[settled]
    silent = {
        rank: status
        for rank, status in ranks.items()
        if status.ended in ("", "lost", "timeout") and now - status.heard > limit
    }
    if not silent:
        return None
    if me in ranks and _is_alone(me, ranks, now):
        line = f"rank {me} is cut off: it receives nothing from the other ranks at {ranks[me].position}"
        return Verdict([me], line, [], [*silent])
    rank = min(silent, key=lambda rank: silent[rank].heard)
    return Verdict([rank], f"rank {rank} stopped responding at {ranks[rank].position}", [*silent], [*silent])


def _is_alone(me: int, ranks: Mapping[int, RankStatus], now: float) -> bool:
    """Whether the others fell silent at the same time, several of them or this rank too: its network is to blame."""
    silences = {rank: now - status.heard for rank, status in ranks.items() if status.ended in ("", "lost", "timeout")}
    mine = silences.pop(me, 0.0)
    if not silences or (len(silences) == 1 and mine <= SILENT):
        return False
    return min(silences.values()) > max(2 * BEAT, max(silences.values()) / 2)


def _lost(ranks: Mapping[int, RankStatus], now: float) -> Verdict | None:
    """A connection broke, but both ends are alive: the rank that noticed it first reports it."""
    lost = [rank for rank, status in ranks.items() if _for_long(status, now, "lost")]
    if not lost or any(status.ended == "timeout" for status in ranks.values()):
        return None
    if any(now - status.cut < _RECENT for status in ranks.values()):
        return _cut_off(ranks, now)
    return Verdict([min(lost, key=lambda rank: ranks[rank].at)], "")


def _hang(ranks: Mapping[int, RankStatus], now: float, limit: float) -> Verdict | None:
    there = {rank: status for rank, status in ranks.items() if status.ended != "left"}
    waited = any(_for_long(status, now, "timeout") for status in there.values())
    still = all(
        status.settled and now - status.moved > limit and status.position.phase not in _ANY_TIME
        for status in there.values()
    )
    if not there or not (waited or still):
        return None
    from .wait_graph import culprits, describe_culprits  # takes a third of a second to import

    positions = {rank: status.position for rank, status in there.items()}
    blamed = culprits(positions)
    return Verdict(blamed, describe_culprits(blamed, positions))


def _for_long(status: RankStatus, now: float, *ended: str) -> bool:
    return status.ended in ended and now - status.at > GRACE
