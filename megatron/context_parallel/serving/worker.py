"""The main thread of rank 0: it gets requests from the threads of the server, and runs the steps of the engine."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.context_parallel.inference.faults import log_fault
from megatron.context_parallel.inference.rank_loop import RankLoop
from megatron.context_parallel.inference.request import Request, RequestOutput
from megatron.context_parallel.runtime.comm.flight_recorder import named

from .metrics import Metrics
from .protocol import Refused

Deliver = Callable[[RequestOutput], object]
_IDLE = 0.1  # seconds after which an idle worker checks whether to stop


@dataclass(frozen=True)
class Release:
    """The handoff of this name has ended."""

    handoff: str


class Worker:
    """Connects the server and the engine.

    Args:
        loop: the loop of rank 0.
        most: maximum number of requests that run or wait.
        metrics: the metrics to update.
        silent: returns the ranks that do not respond.
    """

    def __init__(
        self, loop: RankLoop, most: int, metrics: Metrics, silent: Callable[[], Sequence[int]] = tuple
    ) -> None:
        self.loop, self.most, self.metrics, self.silent = loop, most, metrics, silent
        self.draining = False
        self._lock = threading.Lock()
        self._deliver: dict[str, Deliver] = {}
        self._arrived: queue.SimpleQueue[Request | Release | str] = queue.SimpleQueue()
        self._show_state()

    # -- for the threads of the server ------------------------------------------------------------------------------

    def takes_nothing(self) -> str:
        """Why requests are not accepted; "" if they are."""
        if self.draining:
            return "stopping"
        silent = self.silent()
        return f"{named(silent)} silent" if silent else ""

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Queue requests; `deliver` gets their outputs, in the main thread.

        Raises:
            Refused: there are too many, or the server is stopping.
        """
        with self._lock:
            if why := self.takes_nothing():
                raise Refused(503, f"no requests are accepted: {why}", "server_error", headers={"Retry-After": "5"})
            if len(requests) > self.most:
                raise Refused(400, f"{len(requests)} texts at once; request at most {self.most}", param="n")
            if len(self._deliver) + len(requests) > self.most:
                why = f"{len(self._deliver)} of at most {self.most} requests already run or wait"
                raise Refused(429, why, kind="rate_limit_error", headers={"Retry-After": "1"})
            for request in requests:
                self._deliver[request.name] = deliver
                self.metrics.arrived(request.name, len(request.tokens))
                self._arrived.put(request)

    def cancel(self, names: Sequence[str]) -> None:
        """Cancel requests whose client has disconnected."""
        for name in names:
            self._arrived.put(name)

    def release(self, handoff: str) -> None:
        """End the handoff of a sequence, whose decoder needs it no more."""
        self._arrived.put(Release(handoff))

    def fail(self) -> None:
        """Accept no more requests, and end all texts with an error: a rank has failed."""
        with self._lock:
            self.draining = True
            names = [*self._deliver]
        why = "a rank of the server failed before the end of the text"
        for name in names:
            self._hand_over(RequestOutput(name, finish="cancelled", why=why))

    # -- the main thread -----------------------------------------------------------------------------------------------

    def run(self, stops: Callable[[], bool], drain_seconds: float) -> None:
        """Work until `stops()`; then reject new requests, and continue running ones for at most `drain_seconds`.

        An error of a pass ends all texts with an error.
        """
        try:
            self._run(stops, drain_seconds)
        except BaseException:
            self.fail()
            raise

    def _run(self, stops: Callable[[], bool], drain_seconds: float) -> None:
        end = float("inf")
        while not (self.draining and not self._busy) and time.monotonic() < end:
            if not self.draining and stops():
                with self._lock:
                    self.draining = True
                end = time.monotonic() + drain_seconds
            self.turn()
        for name in [*self._deliver]:
            self._hand_over(RequestOutput(name, finish="cancelled"))
        self.loop.end()

    @property
    def _busy(self) -> bool:
        """Whether a text or a handoff has not ended."""
        return bool(self._deliver or self.loop.engine.running or self.loop.engine.pinned)

    def turn(self) -> None:
        """One step of the engine with all new requests; an idle engine briefly waits for one."""
        engine = self.loop.engine
        came = list[Request | Release | str]()
        try:
            came.append(self._arrived.get(timeout=_IDLE if engine.idle or engine.blocked else 0))
            while True:
                came.append(self._arrived.get_nowait())
        except queue.Empty:
            pass
        requests = [x for x in came if isinstance(x, Request)]
        cancelled = [x for x in came if isinstance(x, str)]
        released = [x.handoff for x in came if isinstance(x, Release)]
        if not came and engine.idle:
            return
        before = engine.passes
        for output in self.loop.turn(requests, cancelled, released):
            self._hand_over(output)
        if engine.passes > before:
            self.metrics.passes.labels(getattr(engine.cache, "variant", "")).inc()
        self._show_state()

    def _show_state(self) -> None:
        engine = self.loop.engine
        self.metrics.running.set(len(engine.running))
        self.metrics.waiting.set(len(engine.waiting))
        self.metrics.pinned.set(len(engine.pinned))
        free = engine.cache.room()
        self.metrics.free.set(free)
        self.metrics.used.set(engine.capacity - free)

    def _hand_over(self, output: RequestOutput) -> None:
        with self._lock:
            deliver = self._deliver.pop(output.request, None) if output.finish else self._deliver.get(output.request)
        if deliver:  # `fail` may have removed it
            self.metrics.brought(output)
            try:
                deliver(output)
            except Exception as error:
                log_fault(output.request, error)
                self.cancel([output.request])
