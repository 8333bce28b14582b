"""Rate-limited log lines on standard error, which protect the disk."""

import json
import logging
import time
from collections.abc import Callable

_MOST = 100_000  # characters per second


class LimitedLines(logging.StreamHandler):
    """Writes lines, at most `most` characters per second; then reports the number of omitted lines."""

    def __init__(self, most: int = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self.most, self.clock = most, clock
        self._second, self._written, self._left_out = 0, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        if (second := int(self.clock())) != self._second:
            left_out, self._second, self._written, self._left_out = self._left_out, second, 0, 0
            if left_out:
                super().emit(logging.makeLogRecord({"msg": json.dumps({"lines_left_out": left_out})}))
        self._written += len(self.format(record))
        if self._written > self.most:
            self._left_out += 1
        else:
            super().emit(record)


def write_log_lines() -> None:
    """Send the log lines of the server, uvicorn and asyncio to standard error."""
    ours = logging.getLogger(__package__)
    if ours.handlers:
        return
    ours.setLevel(logging.INFO)
    handler = LimitedLines()
    for log in (ours, logging.getLogger("uvicorn"), logging.getLogger("asyncio")):
        log.addHandler(handler)
        log.propagate = False
