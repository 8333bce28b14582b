"""Tasks that share resources: each runs at its max-min fair share of the slowest resource that it uses.

A message uses the links that it crosses, a block the compute of its rank.
"""

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

SAME = 1e-9  # fractions of a rate or a time that count as 0
MANY = 128  # tasks that share resources; the rates of more are computed as arrays, of all that run
NO_RESOURCE = 0
KNOWN = 4096  # groups of tasks whose rates are kept


class Task(NamedTuple):
    """Work on resources.

    Attributes:
        size: in units of the resources that it uses; in seconds if it uses none.
        uses: the numbers of its resources, without duplicates.
        ranks: the rank of a block, or the sender and the receiver of a message.
        pair: the same for all messages of a pair of ranks that crowd a resource.
    """

    size: float
    uses: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    pair: Hashable = None


class _Running:
    """A task that uses resources. `left` is the remaining work at the time `since`."""

    __slots__ = ("end", "left", "order", "pair", "ranks", "rate", "row", "since", "uses", "what")

    def __init__(self, what: Any, task: Task, uses: tuple[int, ...], now: float, order: int) -> None:
        self.what, self.ranks, self.pair, self.uses, self.order = what, task.ranks, task.pair, uses, order
        self.left = task.size
        self.since = now
        self.rate = 0.0
        self.end = math.inf
        self.row = 0  # in the `_Table`


class _Table:
    """All running tasks as arrays, a row for each: the numbers of its resources, and its rate.

    Rows of ended tasks use no resource, and are used again.
    """

    def __init__(self, running: Iterable[_Running]) -> None:
        self.tasks: list[_Running | None] = []
        self.uses = np.zeros((0, 1), np.int64)
        self.rates = np.zeros(0)
        self.free: list[int] = []
        for one in running:
            self.add(one)

    def add(self, running: _Running) -> None:
        if not self.free:
            self._grow(max(64, 2 * len(self.tasks)), self.uses.shape[1])
        if len(running.uses) > self.uses.shape[1]:
            self._grow(len(self.tasks), len(running.uses))
        running.row = self.free.pop()
        self.tasks[running.row] = running
        self.uses[running.row, : len(running.uses)] = running.uses
        self.rates[running.row] = running.rate

    def remove(self, running: _Running) -> None:
        self.tasks[running.row] = None
        self.uses[running.row] = NO_RESOURCE
        self.rates[running.row] = 0.0
        self.free.append(running.row)

    def _grow(self, rows: int, width: int) -> None:
        before = self.uses
        self.uses = np.full((rows, width), NO_RESOURCE, np.int64)
        self.uses[: len(before), : before.shape[1]] = before
        self.rates = np.append(self.rates, np.zeros(rows - len(before)))
        self.free += range(rows - 1, len(before) - 1, -1)
        self.tasks += [None] * (rows - len(before))

    def share(self, capacity: list[float]) -> tuple[list[_Running], list[float]]:
        """The tasks whose rate is another now, and their rates: max-min fair for all tasks.

        In each turn every resource is divided equally that gives each of its tasks no more than their others do.
        """
        rows = np.flatnonzero(self.uses.any(1))
        uses = self.uses[rows]
        left = np.array(capacity)
        count = np.bincount(uses.ravel(), minlength=len(left))
        rates = np.zeros(len(rows))
        waiting = np.arange(len(rows))
        while len(waiting):
            used = uses[waiting]  # [tasks, resources of each]
            share = left / np.maximum(count, 1)  # of each resource, for one of its tasks
            tightest = share[used].min(1)  # of each task
            least = np.full(len(left), math.inf)  # that a task of a resource gets at its tightest
            np.minimum.at(least, used.ravel(), np.repeat(tightest, used.shape[1]))
            full = share <= least * (1 + SAME)
            full[NO_RESOURCE] = False
            fixed = full[used].any(1)
            rates[waiting[fixed]] = tightest[fixed]
            freed = used[fixed].ravel()
            taken = np.bincount(freed, np.repeat(tightest[fixed], used.shape[1]), len(left))
            left = np.maximum(left - np.where(left < math.inf, taken, 0.0), 0.0)
            count -= np.bincount(freed, minlength=len(left))
            waiting = waiting[~fixed]
        changed = rates != self.rates[rows]
        tasks = [running for row in rows[changed].tolist() if (running := self.tasks[row])]
        return tasks, rates[changed].tolist()


class Flows:
    """Runs tasks on a simulated clock. Every run gives the same numbers.

    When a task starts or ends, only the rates of tasks change that share resources with it, directly or indirectly.

    Args:
        slowdown: of blocks while their rank sends or receives, and of messages while one of their ranks computes. With
            0.5, a task that takes 1 second alone takes 1.5.
    """

    def __init__(self, slowdown: tuple[float, float] = (0.0, 0.0)) -> None:
        self.now = 0.0
        self._slowdown = slowdown
        self._slows = any(slowdown)
        self._numbers: dict[Hashable, int] = {}
        self._capacity: list[float] = []
        self._crowding: list[tuple[float, int]] = []
        self._users: list[dict[_Running, None]] = []  # for each resource, in the order of their start
        self._changed: dict[int, None] = {}  # resources whose users have changed
        self._timed: list[tuple[float, int, Any, Task | None]] = []  # time, order, what ends, or the task that starts
        self._ends: list[tuple[float, int, _Running]] = []  # may include tasks that have ended or whose end changed
        self._order = 0
        self._table: _Table | None = None  # once many tasks share resources
        self._known: dict[tuple[tuple[int, ...], ...], list[float]] = {}  # rates of tasks by the resources of each
        self._alone = not self._slows  # a rate depends on nothing but the resources
        self.resource(None, math.inf)  # NO_RESOURCE

    def resource(self, name: Hashable, capacity: float, crowding: float = 0.0, groups: int = 1) -> int:
        """The number of a resource with `capacity` units per second. It is created at its first use.

        It is the part of one of `groups` that do the same. With tasks between k pairs of ranks of all groups, it is
        divided by 1 + `crowding` (k - 1).
        """
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._capacity)
            self._capacity.append(capacity)
            self._crowding.append((crowding, groups))
            self._alone &= not crowding
            self._users.append({})
        return number

    def computing(self, resource: int) -> int:
        """The number of ranks that currently compute with a resource."""
        return sum(len(running.ranks) == 1 for running in self._users[resource])

    def add(self, what: Any, task: Task, delay: float = 0.0) -> None:
        """Starts a task, after `delay` seconds. `advance` returns `what` when it ends."""
        if not task.uses:
            self._order += 1
            heapq.heappush(self._timed, (self.now + delay + task.size, self._order, what, None))
        elif delay:
            self._order += 1
            heapq.heappush(self._timed, (self.now + delay, self._order, what, task))
        else:
            self._start(what, task)

    def advance(self) -> list[Any]:
        """Advances to the next time at which tasks end. Returns `what` of each; nothing if no task runs."""
        done: list[Any] = []
        ends, timed = self._ends, self._timed
        while not done:
            if self._changed:
                self._share()
            while ends and ends[0][0] != ends[0][2].end:
                heapq.heappop(ends)
            end = ends[0][0] if ends else math.inf
            time = min(end, timed[0][0]) if timed else end
            if time == math.inf:
                break
            soon = time + SAME * (time - self.now)
            self.now = time
            while ends and ends[0][0] <= soon:
                end, _, running = heapq.heappop(ends)
                if end == running.end:
                    done.append(self._finish(running))
            while timed and timed[0][0] <= soon:
                _, _, what, task = heapq.heappop(timed)
                if task:
                    self._start(what, task)
                else:
                    done.append(what)
        return done

    def _start(self, what: Any, task: Task) -> None:
        uses = task.uses
        if self._slows:  # computation and communication of a rank slow each other down
            uses = (*uses, *(self.resource(("rank", rank), math.inf) for rank in dict.fromkeys(task.ranks)))
        self._order += 1
        running = _Running(what, task, uses, self.now, self._order)
        if self._table:
            self._table.add(running)
        for resource in uses:
            self._users[resource][running] = None
            self._changed[resource] = None

    def _finish(self, running: _Running) -> Any:
        running.end = -1.0
        if self._table:
            self._table.remove(running)
        for resource in running.uses:
            del self._users[resource][running]
            self._changed[resource] = None
        return running.what

    def _share(self) -> None:
        """Sets the rates of all tasks that a change affects."""
        for together in self._concerned():
            if self._alone and len(together) > MANY:
                self._table = self._table or _Table(dict.fromkeys(one for users in self._users for one in users))
                together, rates = self._table.share(self._capacity)
            else:
                rates = self._rates(together)
            if self._slows:
                rates = self._slowed(together, rates)
            for running, rate in zip(together, rates, strict=True):
                if rate != running.rate:
                    self._set_rate(running, rate)
        self._changed = {}

    def _set_rate(self, running: _Running, rate: float) -> None:
        now = self.now
        if self._table:
            self._table.rates[running.row] = rate
        running.left -= running.rate * (now - running.since)
        running.since = now
        running.rate = rate
        running.end = now + max(running.left, 0.0) / rate
        heapq.heappush(self._ends, (running.end, running.order, running))

    def _concerned(self) -> Iterator[list[_Running]]:
        """The tasks that use changed resources, directly or indirectly, in groups that share resources."""
        found: set[int] = set()
        for first in self._changed:
            users = self._users[first]
            if not users or first in found:
                continue
            running = next(iter(users))
            if max([len(self._users[use]) for use in running.uses]) == 1:  # it shares nothing
                found.update(running.uses)
                yield [running]
                continue
            together, is_all = self._sharing_with(first, found)
            yield together
            if not is_all:
                return  # `_share` sets the rates of all tasks

    def _sharing_with(self, first: int, found: set[int]) -> tuple[list[_Running], bool]:
        """The tasks that use resource `first`, or share others with these, directly or indirectly; whether that is all.

        The search stops where they are too many to compute their rates one by one. `found` gets their resources.
        """
        found.add(first)
        together = dict[_Running, None]()
        resources = [first]
        for resource in resources:  # grows meanwhile
            if self._alone and len(together) > MANY:
                return list(together), False
            for running in self._users[resource]:
                if running not in together:
                    together[running] = None
                    new = [use for use in running.uses if use not in found]
                    found.update(new)
                    resources += new
        return list(together), True

    def _rates(self, tasks: list[_Running]) -> list[float]:
        """The fair rate of each task. Where it depends on nothing but the resources, it is computed once."""
        if not self._alone:
            return self._fair(tasks)
        if len(tasks) == 1:
            return [min([self._capacity[use] for use in tasks[0].uses])]
        key = tuple([running.uses for running in tasks])
        if key not in self._known:
            if len(self._known) == KNOWN:
                self._known.clear()
            self._known[key] = self._fair(tasks)
        return self._known[key]

    def _fair(self, tasks: list[_Running]) -> list[float]:
        """The rate of each task. The tightest resource is divided equally, then the next, and so on."""
        users = {use: len(self._users[use]) for running in tasks for use in running.uses}
        left = {use: self._capacity[use] / self._crowd(use) for use in users}
        rates = [0.0] * len(tasks)
        waiting = list(range(len(tasks)))
        while waiting:
            share = {use: left[use] / count for use, count in users.items() if count}
            tightest = []
            for i in waiting:
                tightest.append(min([share[use] for use in tasks[i].uses]))
            full = min(tightest) * (1 + SAME)
            more: list[int] = []
            for i, rate in zip(waiting, tightest, strict=True):
                if rate > full:
                    more.append(i)
                    continue
                rates[i] = rate
                for use in tasks[i].uses:
                    left[use] = max(left[use] - rate, 0.0)
                    users[use] -= 1
            waiting = more
        return rates

    def _crowd(self, resource: int) -> float:
        """The factor by which a resource is slower than for one pair of ranks."""
        crowding, groups = self._crowding[resource]
        if not crowding:
            return 1.0
        return 1 + crowding * (groups * len({running.pair for running in self._users[resource]}) - 1)

    def _slowed(self, tasks: list[_Running], rates: list[float]) -> list[float]:
        """The rates of tasks, reduced if a rank computes while it sends or receives."""
        compute, move = set[int](), set[int]()
        for running in tasks:
            (compute if len(running.ranks) == 1 else move).update(running.ranks)
        of_block, of_message = self._slowdown
        slowed = []
        for running, rate in zip(tasks, rates, strict=True):
            ranks = running.ranks
            by = of_block * (ranks[0] in move) if len(ranks) == 1 else of_message * (not compute.isdisjoint(ranks))
            slowed.append(rate / (1 + by))
        return slowed
