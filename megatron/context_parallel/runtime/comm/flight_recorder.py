"""The flight recorder: the current position of this process, and its last transport operations.

The executor and the transport record their operations. A trainer adds iteration, phase and layer. A crash log, another
thread or, through `memory`, another process reads it. A process has one recorder, because it is one rank.
"""

from ast import literal_eval
from collections import deque
from collections.abc import Iterable
from time import localtime, strftime, time
from typing import Any, NamedTuple, Protocol, cast

KEPT = 50  # operations
_FORGOTTEN = 2  # complete waits on a GPU, at most, for each new one: their number stays small, and few are asked for
_FEW = 16  # ranks that a text names one by one
Ends = list[tuple[str, int]]  # "receive", "send" or "gather", and the rank at the other end


class Position(NamedTuple):
    """The position of a rank in its program. Ranks are world ranks."""

    notes: int = 0  # number so far; if it does not change, the rank makes no progress
    done: int = 0  # iterations completed by this process
    iteration: int = 0  # 0: before the first
    phase: str = ""
    layer: int = 0  # 0: in none
    plan: str = ""  # the running plan; "": none
    backward: bool = False
    step: int = -1  # -1: before the first
    needs: tuple[str, int, int] | None = None  # a tensor, its chunk, and the rank that sends it
    waits: tuple[str, str, tuple[int, ...]] | None = None  # the kind of operation, its channel, the ranks it waits for
    code: str = ""  # the line in the source, if it was looked up

    @classmethod
    def read(cls, text: str) -> "Position":
        """A position from its text.

        Raises:
            ValueError, SyntaxError, TypeError: another text.
        """
        at = cls(*literal_eval(text))
        if not at.waits:
            return at
        kind, channel, parts = cast(Any, at.waits)
        ranks = [rank for part in parts for rank in (range(*part) if isinstance(part, tuple) else (part,))]
        return at._replace(waits=(kind, channel, tuple(ranks)))

    @property
    def text(self) -> str:
        """What `read` reads. It stays short if the rank waits for thousands."""
        return _text_of(self)

    def __str__(self) -> str:
        """In words: "iteration 118, layer 7, forward of mesh, step 3, waiting for KV chunk 5 from rank 1"."""
        way = "backward" if self.backward else "forward"
        words = [f"iteration {self.iteration}"] if self.iteration else []
        words += [self.phase] if self.phase and not (self.plan and self.phase == way) else []
        words += [f"layer {self.layer}"] if self.layer else []
        words += [f"{way} of {self.plan}"] if self.plan else []
        words += [f"step {self.step}"] if self.plan and self.step >= 0 else []
        words += [f"waiting {self.awaited}"] if self.waits else [f"in {self.code}"] if self.code else []
        return ", ".join(words)

    @property
    def awaited(self) -> str:
        """What the rank waits for, as words after "waiting"."""
        if not self.waits:
            return ""
        kind, channel, ranks = self.waits
        if kind == "receive" and self.needs and ranks == self.needs[2:]:
            return "for {} chunk {} from rank {}".format(*self.needs)
        words = {"receive": "for", "send": "to send to", "gather": "to gather with"}.get(kind, f"in {kind} for")
        return f"{words} {named(ranks, _FEW)}" + (f" on channel {channel}" if channel else "")


def _text_of(fields: tuple) -> str:
    """The `repr` of the fields of a position. Many ranks that it waits for are (first, end, distance) each."""
    waits = fields[_WAITS]
    if waits is None or len(waits[2]) <= _FEW:
        return repr(tuple(fields))
    runs: list[list[int]] = []  # first, last, distance
    for rank in waits[2]:
        before = runs[-1] if runs else [rank, rank, 1]
        if rank > before[1] and before[2] in (0, rank - before[1]):
            before[1:] = rank, rank - before[1]
        else:
            runs.append([rank, rank, 0])
    ranks = tuple([(first, last + 1, distance or 1) for first, last, distance in runs])
    return repr((*fields[:_WAITS], (*waits[:2], ranks), *fields[_WAITS + 1 :]))


def named(ranks: Iterable[int], most: int | None = None) -> str:
    """As words: "rank 3", "ranks 0, 1"; "ranks 0, 1 ..." if there are more than `most`."""
    ranks = list(ranks)
    shown = ranks[:most]
    return f"rank{'s' * (len(shown) > 1)} {', '.join(map(str, shown))}" + " ..." * (len(shown) < len(ranks))


_WAITS = list(Position.__annotations__).index("waits")


class Memory(Protocol):
    """Bytes that outlive the process: a file mapped into memory."""

    def __setitem__(self, where: slice, content: bytes) -> None: ...


class Event(Protocol):
    """As `torch.cuda.Event`: whether a GPU has reached a place in its queue. Any thread may ask."""

    def query(self) -> bool: ...


class Recorder:
    """The recorder of this process. A note takes a few microseconds and no lock.

    On a GPU, the host only queues a wait and goes on. So an event follows each wait there, and the oldest one that the
    GPU has not reached tells where it is.

    Attributes:
        now: the position of this process, the fields of a `Position` except the last.
        memory: each note is also written here, so that it outlives the process.
        size: the size of `memory`, in bytes.
    """

    def __init__(self) -> None:
        self.now: tuple = tuple(Position()[:-1])
        self.memory: Memory | None = None
        self.size = 0
        self._operations: deque[tuple[float, tuple, str, str, Ends]] = deque(maxlen=KEPT)
        self._queued: deque[tuple[Event, tuple]] = deque()  # waits on a GPU, with the position of each

    @property
    def position(self) -> Position:
        return Position(*self.now)

    @property
    def awaited_by_gpu(self) -> Position | None:
        """The position of the oldest wait that the GPU has not passed; None if it has passed all of them."""
        return next((Position(*at) for event, at in list(self._queued) if not _passed(event)), None)

    def _note(self, now: tuple) -> None:
        self.now = now
        if self.memory is not None:
            self.memory[: self.size] = _text_of(now).encode()[: self.size].ljust(self.size)

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """A phase of training begins, by default in the same iteration."""
        notes, done, before = self.now[:3]
        iteration = before if iteration is None else iteration
        done += bool(before and iteration != before)
        self._note((notes + 1, done, iteration, phase, 0, "", False, -1, None, None))

    def at_layer(self, layer: int) -> None:
        """The following operations belong to `layer`, counted from 1."""
        notes, done, iteration, phase, _, *rest = self.now
        self._note((notes + 1, done, iteration, phase, layer, *rest))

    def begin(self, plan: str, backward: bool) -> None:
        """A plan begins to run."""
        notes, *where = self.now[:5]
        self._note((notes + 1, *where, plan, backward, -1, None, None))

    def at_step(self, step: int) -> None:
        notes, done, iteration, phase, layer, plan, backward, *_ = self.now  # unrolled, because it is called often
        self._note((notes + 1, done, iteration, phase, layer, plan, backward, step, None, None))

    def end(self) -> None:
        """The plan has ended. A plan that fails does not end: its position remains."""
        self.begin("", False)

    def need(self, tensor: str, chunk: int, rank: int) -> None:
        """The plan needs a chunk that `rank` sends."""
        notes, done, iteration, phase, layer, plan, backward, step, *_ = self.now
        needs = str(tensor), chunk, rank
        self._note((notes + 1, done, iteration, phase, layer, plan, backward, step, needs, None))

    def launch(self, channel: str, ends: Ends) -> None:
        """An operation starts."""
        self._operations.append((time(), self.now, "launch", channel, ends))

    def wait(self, channel: str, ends: Ends) -> None:
        """The wait for an operation, or a part of it, begins."""
        self._operations.append((time(), self.now, "wait", channel, ends))
        notes, *where = self.now[:9]
        self._note((notes + 1, *where, (ends[0][0], channel, tuple(dict.fromkeys([rank for _, rank in ends])))))

    def waited(self, channel: str, ends: Ends, event: Event | None = None) -> None:
        """An operation is complete; on a GPU, once it has reached `event`."""
        if event is not None:
            self._queued.append((event, self.now))
            for _ in range(_FORGOTTEN):
                if self._queued and _passed(self._queued[0][0]):
                    self._queued.popleft()
        notes, *where = self.now[:8]
        self._note((notes + 1, *where, None, None))
        self._operations.append((time(), self.now, "done", channel, ends))

    def operations(self) -> list[str]:
        """The last transport operations, one per line, oldest first."""
        return [
            f"{strftime('%H:%M:%S', localtime(at))}.{int(at % 1 * 1000):03} {what:6} {channel}: {_told(ends)} "
            f"({Position(*now)._replace(waits=None)})"
            for at, now, what, channel, ends in list(self._operations)
        ]


def _passed(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the GPU failed
        return False


def _told(ends: Ends) -> str:
    ranks: dict[str, dict[int, None]] = {}
    for kind, rank in ends:
        ranks.setdefault(kind, {})[rank] = None
    words = {"receive": "receive from", "send": "send to", "gather": "gather with"}
    return ", ".join(f"{words[kind]} {named(peers)}" for kind, peers in ranks.items())


recorder = Recorder()
