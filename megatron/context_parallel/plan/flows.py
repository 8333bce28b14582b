"""Tasks that share resources: each runs at its max-min fair part of the slowest resource that it uses.

A message uses the links that it crosses, a block the compute of its rank.
"""

import heapq
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy

USES = 4  # resources that a task may use
SAME = 1e-9  # parts of a size, or of a time, that count as nothing


class Task(NamedTuple):
    """Work on resources.

    Attributes:
        what: what `Flows.advance` returns when it is done.
        size: in units of the resources that it uses; in seconds if it uses none.
        uses: numbers of resources, `USES` at most.
        ranks: of a block its rank, of a message its sender and receiver.
    """

    what: Any
    size: float
    uses: Sequence[int] = ()
    ranks: tuple[int, ...] = ()


class Flows:
    """Runs tasks on a clock, with the same numbers on every run.

    Args:
        slowdown: of blocks while their rank sends or receives, and of messages while one of their ranks computes. With
            0.5, what takes 1 second alone takes 1.5.
    """

    def __init__(self, slowdown: tuple[float, float] = (0.0, 0.0)) -> None:
        self.now = 0.0
        self._slowdown = slowdown
        self._numbers: dict[Hashable, int] = {}
        self._capacity = [numpy.inf]  # of resource 0, which stands for no other one
        self._timed: list[tuple[float, int, Task, bool]] = []  # time, order, task, whether it starts then
        self._order = 0
        self._new: list[Task] = []
        self._tasks: list[Task] = []
        self._size = self._left = self._rate = numpy.empty(0)
        self._uses = numpy.empty((0, USES), numpy.int64)

    def resource(self, name: Hashable, capacity: float) -> int:
        """The number of a resource that does `capacity` units a second. It is made at its first use."""
        number = self._numbers.setdefault(name, len(self._capacity))
        if number == len(self._capacity):
            self._capacity.append(capacity)
        return number

    def add(self, task: Task, delay: float = 0.0) -> None:
        """Starts a task, after `delay` seconds."""
        if task.uses and not delay:
            self._new.append(task)
            return
        self._order += 1
        time = self.now + delay + (0.0 if task.uses else task.size)
        heapq.heappush(self._timed, (time, self._order, task, bool(task.uses)))

    def advance(self) -> list[Any]:
        """Goes on to the next time at which tasks end. Returns `what` of each; nothing if no task runs."""
        done: list[Any] = []
        while not done and (self._timed or self._new or self._tasks):
            if self._new:
                self._start()
            ends = float((self._left / self._rate).min()) if self._tasks else numpy.inf
            timed = self._timed[0][0] - self.now if self._timed else numpy.inf
            step = min(ends, timed)
            self._left -= self._rate * step
            self.now = self.now + step if ends <= timed else self._timed[0][0]
            if ends <= timed * (1 + SAME):
                done += self._finish()
            while self._timed and self._timed[0][0] <= self.now + SAME * step:
                *_, task, starts = heapq.heappop(self._timed)
                if starts:
                    self._new.append(task)
                else:
                    done.append(task.what)
        return done

    def _start(self) -> None:
        size = numpy.array([task.size for task in self._new])
        uses = numpy.array([(*task.uses, *(0,) * (USES - len(task.uses))) for task in self._new], numpy.int64)
        self._tasks += self._new
        self._size, self._left = (numpy.concatenate((x, size)) for x in (self._size, self._left))
        self._uses = numpy.concatenate((self._uses, uses))
        self._new = []
        self._share()

    def _finish(self) -> list[Any]:
        keep = self._left > SAME * self._size
        done = [self._tasks[i].what for i in numpy.flatnonzero(~keep)]
        self._tasks = [self._tasks[i] for i in numpy.flatnonzero(keep)]
        self._size, self._left, self._uses = self._size[keep], self._left[keep], self._uses[keep]
        self._share()
        return done

    def _share(self) -> None:
        """Sets the rate of each task. The tightest resource is shared out equally, then the next, and so on."""
        left, rate, waiting = numpy.array(self._capacity), numpy.empty(len(self._tasks)), numpy.arange(len(self._tasks))
        while len(waiting):
            uses = self._uses[waiting]
            share = left / numpy.maximum(numpy.bincount(uses.ravel(), minlength=len(left)), 1)
            tightest = share[uses].min(1)
            full = tightest <= tightest.min() * (1 + SAME)
            rate[waiting[full]] = tightest[full]
            taken = numpy.bincount(uses[full].ravel(), numpy.repeat(tightest[full], USES), minlength=len(left))
            left, waiting = numpy.maximum(left - taken, 0.0), waiting[~full]
        self._rate = self._slowed(rate) if any(self._slowdown) else rate

    def _slowed(self, rate: numpy.ndarray) -> numpy.ndarray:
        ranks = [task.ranks for task in self._tasks]
        computes = {r[0] for r in ranks if len(r) == 1}
        moves = {rank for r in ranks if len(r) == 2 for rank in r}
        blocks, messages = self._slowdown
        slower = [
            1 + (blocks * (r[0] in moves) if len(r) == 1 else messages * any(rank in computes for rank in r))
            for r in ranks
        ]
        return rate / numpy.array(slower)
