"""The metrics of the server for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from megatron.context_parallel.inference.engine import RequestOutput
from megatron.context_parallel.integration.vllm.wire import Report

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts and times of a server. Prometheus derives rates from them (tokens per second, cache hits)."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.ttft = Histogram("ttft_seconds", "time to first token", registry=r, buckets=_SECONDS)
        self.ttit = Histogram("ttit_seconds", "time to incremental token", registry=r, buckets=_SECONDS)
        self.prompt_tokens = Counter("prompt_tokens", "prompt tokens", registry=r)
        self.reused_tokens = Counter("prompt_tokens_cached", "prompt tokens found in the cache", registry=r)
        self.generated_tokens = Counter("generated_tokens", "generated tokens", registry=r)
        self.requests = Counter("requests", "finished texts, by finish reason", ["finish"], registry=r)
        self.refused = Counter("requests_refused", "refused HTTP requests, by status", ["status"], registry=r)
        self.passes = Counter("passes", "forward passes, by variant", ["variant"], registry=r)
        self.running = Gauge("requests_running", "running texts", registry=r)
        self.waiting = Gauge("requests_waiting", "texts waiting for cache space", registry=r)
        self.used = Gauge("cache_tokens_used", "tokens in the cache, including kept prefixes", registry=r)
        self.free = Gauge("cache_tokens_free", "free tokens in the cache", registry=r)
        self.handoffs = Counter("handoffs", "handed sequences, by how their lease ended", ["end"], registry=r)
        self.pinned = Gauge("handoffs_pinned", "prefilled sequences that wait for their decoder", registry=r)
        self.handed_rows = Counter("handoff_rows", "rows that decoders received, of all ranks", registry=r)
        self.handed_bytes = Counter("handoff_bytes", "bytes of these rows", registry=r)
        self.handoff_seconds = Histogram("handoff_seconds", "time of a transfer", registry=r, buckets=_SECONDS)
        self.handoff_failures = Counter("handoff_failures", "transfers that a decoder gave up", registry=r)
        self._last: dict[str, float] = {}  # the time of each request's arrival or last token

    def arrived(self, name: str, tokens: int) -> None:
        self._last[name] = time.monotonic()
        self.prompt_tokens.inc(tokens)

    def brought(self, output: RequestOutput) -> None:
        """Record the output of a step for a request."""
        now = time.monotonic()
        before = self._last.get(output.request)
        if output.tokens and before is not None:
            # The first output of a request has its first token and the number of reused tokens.
            (self.ttft if output.first else self.ttit).observe(now - before)
            self._last[output.request] = now
        self.reused_tokens.inc(output.reused)
        self.generated_tokens.inc(len(output.tokens))
        if output.finish:
            self._last.pop(output.request, None)
            self.requests.labels(output.finish).inc()

    def handed(self, report: Report) -> None:
        """Record the report of a decoder's worker."""
        self.handed_rows.inc(report.rows)
        self.handed_bytes.inc(report.nbytes)
        self.handoff_seconds.observe(report.seconds)
        if report.error:
            self.handoff_failures.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
