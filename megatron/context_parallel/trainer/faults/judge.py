"""Who broke a job, by what is known of its ranks: pure data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron.context_parallel.runtime.comm.flight_recorder import Position, named

from .rank_file import RankProcess

BEAT = 0.5  # seconds between two messages of a rank
SILENT = 6 * BEAT  # without a message: of a rank whose peers lost it, or whose connections broke
GRACE = 1.0  # seconds in which the cause of a failure may show itself
SIGNAL_GRACE = 0.2  # seconds in which a signal that ends all ranks comes to each
_RECENT = 60  # seconds in which ranks notice that a connection of theirs broke
_TOLD = 8  # ranks of a line
_ANY_TIME = ("", "save", "idle")  # phases that may take any time: only the collectives in them have a limit


@dataclass
class RankStatus:
    """What is known of a rank; times are those of `time.monotonic`.

    Attributes:
        heard: when it last sent a message.
        moved: when its position last changed.
        ended: how it ended; "" if it did not. "left" in order; "died" without a word; "cut off" but alive; "gone": one
            of these two, on another host; "failed" by an error of its own; "usage" by a UsageError, which other ranks
            may raise too; "lost" a peer; "timeout" of a collective; the name of the signal that ends it.
        at: when it ended.
        cut: when its connection to the monitor last broke and was made anew.
        spoke: whether it had its say after that: a rank that ends without it died.
    """

    process: RankProcess
    heard: float
    moved: float
    position: Position = field(default_factory=lambda: Position(phase="joining"))  # until it says more
    ended: str = ""
    at: float = 0.0
    cut: float = float("-inf")
    spoke: bool = False

    @property
    def disconnected(self) -> bool:
        """Whether all its connections broke, and nothing else is known of it."""
        return self.ended in ("cut off", "gone")

    @property
    def settled(self) -> bool:
        """Whether it has done an iteration."""
        return self.position.done > 0


@dataclass(frozen=True)
class Verdict:
    """Who broke the job."""

    ranks: list[int]
    line: str  # to print; "": the first of the ranks says it by itself
    silent: list[int] = field(default_factory=list)  # ranks that can say nothing: dead or stopped
    stopped: list[int] = field(default_factory=list)  # those of them that are alive


def judge(ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float]) -> Verdict | None:
    """Who broke the job, or None if nobody did, or if that is not clear yet.

    Args:
        ranks: all ranks that were ever heard.
        now: the time.
        limits: seconds without a message, or without progress of any rank, before the first iteration is done and
            after.
    """
    to_connect = _seconds_to_connect(ranks)
    for rank in sorted(ranks, key=lambda rank: ranks[rank].at):
        heard = ranks[rank]
        if heard.ended == "died":
            return Verdict([rank], f"rank {rank} died at {heard.position}", [rank])
        if heard.ended == "failed":
            return Verdict([rank], "")
        if heard.ended.startswith("SIG") and now - heard.at > SIGNAL_GRACE:
            return Verdict([rank], f"rank {rank} was ended by {heard.ended} at {heard.position}", [rank])
        if heard.disconnected and now - heard.at > to_connect:
            return _cut_off(ranks, now)
        if heard.ended == "usage":
            if 0 in ranks and ranks[0].ended == "usage":  # it prints what all of them may raise
                return Verdict([0], "")
            if now - heard.at > GRACE:
                return Verdict([rank], "")
    return _silent(ranks, now, limits, 0) or _lost(ranks, now) or _hang(ranks, now, limits[1])


def judge_first(
    ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float], deputy: int = 1
) -> Verdict | None:
    """Whether rank 0, which judges the others, died or stopped, or whether the deputy that asks is cut off itself."""
    if 0 not in ranks:
        return None
    if ranks[0].ended.startswith("SIG"):
        return judge({0: ranks[0]}, now, limits)
    if ranks[0].disconnected:
        if now - ranks[0].at <= _seconds_to_connect(ranks):
            return None
        itself = deputy in ranks and ranks[deputy].disconnected  # its connection to itself broke too
        blamed = deputy if itself else 0
        return _cut_off({blamed: ranks[blamed]}, now)
    if ranks[0].ended == "died":
        return Verdict([0], f"rank 0 died at {ranks[0].position}", [0])
    if ranks[0].ended:
        return None
    verdict = _silent(ranks, now, limits, deputy)
    judged = verdict and (verdict.ranks == [0] or not verdict.silent)  # not silent: the deputy, which is cut off
    return verdict if judged else None


def judge_absent(absent: Collection[int], waited: float, limit: float) -> Verdict | None:
    """Whether the job is to wait no longer for ranks that have not joined; `waited` and `limit` in seconds."""
    return Verdict(sorted(absent), never_came(absent, limit)) if absent and waited > limit else None


def never_came(ranks: Collection[int], limit: float) -> str:
    """In one line, that these ranks did not join within `limit` seconds."""
    return (
        f"{few(ranks)} never came: no word within --distributed-timeout-minutes {limit / 60:g}; "
        "not started, ended before, or without a way to rank 0"
    )


def few(ranks: Collection[int]) -> str:
    """As `named`, but at most so many that a line holds them."""
    return named(sorted(ranks)[:_TOLD]) + " ..." * (len(ranks) > _TOLD)


def _seconds_to_connect(ranks: Mapping[int, RankStatus]) -> float:
    """In which a rank may connect anew: a busy host takes its time, unless other ranks miss a peer as well."""
    return GRACE if any(heard.ended in ("lost", "timeout") for heard in ranks.values()) else SILENT


def _cut_off(ranks: Mapping[int, RankStatus], now: float) -> Verdict:
    """The first whose connection broke is to blame: rank 0 loses the connections of all others with its own."""
    lost = [rank for rank in sorted(ranks) if ranks[rank].disconnected]
    blamed = min(lost + [rank for rank in ranks if now - ranks[rank].cut < _RECENT])
    heard = ranks[blamed]
    if heard.ended == "gone":
        host = heard.process.host.split()[0]
        return Verdict([blamed], f"rank {blamed} on {host} died or was cut off at {heard.position}", [blamed], lost)
    return Verdict([blamed], f"rank {blamed} lost its connections at {heard.position}", [], lost)


def _silent(ranks: Mapping[int, RankStatus], now: float, limits: tuple[float, float], me: int) -> Verdict | None:
    suspicion = any(_for_long(heard, now, "lost", "timeout") for heard in ranks.values())
    settled = any(heard.settled for heard in ranks.values())  # no rank ends an iteration without the others
    limit = SILENT if suspicion else limits[settled]
    silent = {
        rank: heard
        for rank, heard in ranks.items()
        if heard.ended in ("", "lost", "timeout") and now - heard.heard > limit
    }
    if not silent:
        return None
    if me in ranks and _is_alone(me, ranks, now):
        line = f"rank {me} is cut off: it hears nothing from the others at {ranks[me].position}"
        return Verdict([me], line, [], [*silent])
    rank = min(silent, key=lambda rank: silent[rank].heard)
    return Verdict([rank], f"rank {rank} stopped responding at {ranks[rank].position}", [*silent], [*silent])


def _is_alone(me: int, ranks: Mapping[int, RankStatus], now: float) -> bool:
    """Whether the others fell silent all at once, several of them or this rank too: then its network is to blame."""
    silences = {rank: now - heard.heard for rank, heard in ranks.items() if heard.ended in ("", "lost", "timeout")}
    mine = silences.pop(me, 0.0)
    if not silences or (len(silences) == 1 and mine <= SILENT):
        return False
    return min(silences.values()) > max(2 * BEAT, max(silences.values()) / 2)


def _lost(ranks: Mapping[int, RankStatus], now: float) -> Verdict | None:
    """A connection broke, but both ends live: the rank that noticed it first says so."""
    lost = [rank for rank, heard in ranks.items() if _for_long(heard, now, "lost")]
    if not lost or any(heard.ended == "timeout" for heard in ranks.values()):
        return None
    if any(now - heard.cut < _RECENT for heard in ranks.values()):
        return _cut_off(ranks, now)
    return Verdict([min(lost, key=lambda rank: ranks[rank].at)], "")


def _hang(ranks: Mapping[int, RankStatus], now: float, limit: float) -> Verdict | None:
    there = {rank: heard for rank, heard in ranks.items() if heard.ended != "left"}
    waited = any(_for_long(heard, now, "timeout") for heard in there.values())
    still = all(
        heard.settled and now - heard.moved > limit and heard.position.phase not in _ANY_TIME
        for heard in there.values()
    )
    if not there or not (waited or still):
        return None
    from .wait_graph import culprits, describe_culprits  # takes a third of a second to import

    positions = {rank: heard.position for rank, heard in there.items()}
    blamed = culprits(positions)
    return Verdict(blamed, describe_culprits(blamed, positions))


def _for_long(heard: RankStatus, now: float, *ended: str) -> bool:
    return heard.ended in ended and now - heard.at > GRACE
