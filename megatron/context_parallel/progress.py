"""The progress of a task that takes long, as lines of the log."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)

FIRST, EVERY = 2.0, 10.0  # seconds before the first line, and between lines

Item = TypeVar("Item")


def is_first_rank() -> bool:
    """Whether this process is the first rank, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def gigabytes(count: int) -> str:
    """As in "3.2 GB"."""
    return f"{count / 1e9:.1f} GB"


class Progress:
    """Logs on the first rank how much of a task is done, and about how long the rest takes.

    The first line comes after 2 seconds, then one every 10 seconds. A program shows them if it shows the log at INFO.

    Args:
        task: what is done, such as "simulating plans".
        total: the amount of work, in the unit of `advance`.
        show: an amount as text.
        clock: the time in seconds.
    """

    def __init__(
        self,
        task: str,
        total: int,
        show: Callable[[int], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task, self.total, self.show, self.clock = task, total, show, clock
        self.done = 0
        self.start = clock()
        self.next_line = self.start + FIRST

    def advance(self, amount: int = 1) -> None:
        """Count finished work."""
        self.done += amount
        now = self.clock()
        if now < self.next_line or self.done >= self.total or not is_first_rank():
            return
        self.next_line = now + EVERY
        left = (now - self.start) * (self.total - self.done) / self.done
        logger.info("%s: %s of %s, about %.0f s left", self.task, self.show(self.done), self.show(self.total), left)


def tracked(items: Collection[Item], task: str) -> Iterator[Item]:
    """Yields `items`, and logs the progress of the loop over them."""
    progress = Progress(task, len(items))
    for item in items:
        yield item
        progress.advance()
