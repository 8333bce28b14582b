"""The main thread of rank 0: it takes requests from the threads of the server, and makes the steps of the engine."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from ..engine import Output, Request
from ..rank_loop import RankLoop
from .metrics import Metrics
from .protocol import Refused

Deliver = Callable[[Output], object]
_IDLE = 0.1  # seconds after which an idle worker looks whether it is to stop


class Worker:
    """Between the server and the engine.

    Args:
        loop: of rank 0.
        most: requests that may run or wait.
        metrics: are kept up to date.
    """

    def __init__(self, loop: RankLoop, most: int, metrics: Metrics) -> None:
        self.loop, self.most, self.metrics = loop, most, metrics
        self.draining = False
        self._lock = threading.Lock()
        self._deliver: dict[str, Deliver] = {}
        self._arrived: queue.SimpleQueue[Request | str] = queue.SimpleQueue()

    # -- for the threads of the server ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Let requests join; `deliver` gets their outputs, in the main thread.

        Raises:
            Refused: there are too many, or the server is stopping.
        """
        with self._lock:
            if self.draining:
                raise Refused(503, "the server is stopping", kind="server_error", headers={"Retry-After": "5"})
            if len(requests) > self.most:
                raise Refused(400, f"{len(requests)} texts at once; give {self.most} at most", param="n")
            if len(self._deliver) + len(requests) > self.most:
                why = f"{len(self._deliver)} requests run or wait already, of {self.most} at most"
                raise Refused(429, why, kind="rate_limit_error", headers={"Retry-After": "1"})
            for request in requests:
                self._deliver[request.name] = deliver
                self.metrics.arrived(request.name, len(request.tokens))
                self._arrived.put(request)

    def cancel(self, names: Sequence[str]) -> None:
        """Let requests leave whose outputs nobody waits for any more."""
        for name in names:
            self._arrived.put(name)

    # -- the main thread -----------------------------------------------------------------------------------------------

    def run(self, stops: Callable[[], bool], drain_seconds: float) -> None:
        """Work until `stops()`; then refuse what is new, and go on with the rest for `drain_seconds` at most."""
        end = float("inf")
        while not (self.draining and not self._deliver) and time.monotonic() < end:
            if not self.draining and stops():
                with self._lock:
                    self.draining = True
                end = time.monotonic() + drain_seconds
            self.turn()
        for name in [*self._deliver]:
            self._hand_over(Output(name, finish="cancelled"))
        self.loop.end()

    def turn(self) -> None:
        """One step of the engine with all that has arrived; an idle engine waits a moment for something."""
        engine, came = self.loop.engine, list[Request | str]()
        try:
            came.append(self._arrived.get(timeout=_IDLE if engine.idle else 0))
            while True:
                came.append(self._arrived.get_nowait())
        except queue.Empty:
            pass
        requests = [x for x in came if isinstance(x, Request)]
        if not came and engine.idle:
            return
        for output in self.loop.turn(requests, [x for x in came if isinstance(x, str)]):
            self._hand_over(output)
        self.metrics.passes.labels(getattr(engine.cache, "variant", "")).inc()
        self.metrics.running.set(len(engine.running))
        self.metrics.waiting.set(len(engine.waiting))
        free = engine.cache.room()
        self.metrics.free.set(free)
        self.metrics.used.set(engine.capacity - free)

    def _hand_over(self, output: Output) -> None:
        self.metrics.brought(output)
        with self._lock:
            deliver = self._deliver.pop(output.request) if output.finish else self._deliver[output.request]
        deliver(output)
