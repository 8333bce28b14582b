"""The metrics of the server for Prometheus. Those that mean the same as one of vLLM have its name."""

import time
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from megatron.context_parallel.inference.request import RequestOutput
from megatron.context_parallel.integration.vllm.wire import Report

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REASONS = {"cancelled": "abort"}  # vLLM's word

Kind = TypeVar("Kind", bound=MetricWrapperBase)


class Metrics:
    """Counts and times of a server. Prometheus derives rates from them (tokens per second, cache hits).

    Args:
        model: the model name in the API, a label of vLLM's metrics.
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self.registry = r = CollectorRegistry()
        seconds = {"buckets": _SECONDS}
        self.ttft = self._as_vllm(Histogram, "time_to_first_token_seconds", "time to first token", **seconds)
        self.itl = self._as_vllm(Histogram, "inter_token_latency_seconds", "time to each further token", **seconds)
        self.latency = self._as_vllm(Histogram, "e2e_request_latency_seconds", "time to the end of a text", **seconds)
        self.prompt_tokens = self._as_vllm(Counter, "prompt_tokens", "prompt tokens")
        self.reused_tokens = self._as_vllm(Counter, "prompt_tokens_cached", "prompt tokens found in the cache")
        self.generated_tokens = self._as_vllm(Counter, "generation_tokens", "generated tokens")
        self.running = self._as_vllm(Gauge, "num_requests_running", "running texts")
        self.waiting = self._as_vllm(Gauge, "num_requests_waiting", "texts waiting for cache space")
        labels = ["model_name", "finished_reason"]
        self.requests = Counter("vllm:request_success", "finished texts, by finish reason", labels, registry=r)
        self.refused = Counter("requests_refused", "refused HTTP requests, by status", ["status"], registry=r)
        self.passes = Counter("passes", "forward passes, by variant", ["variant"], registry=r)
        self.used = Gauge("cache_tokens_used", "tokens in the cache, including kept prefixes", registry=r)
        self.free = Gauge("cache_tokens_free", "free tokens in the cache", registry=r)
        self.handoffs = Counter("handoffs", "handed sequences, by how their lease ended", ["end"], registry=r)
        self.pinned = Gauge("handoffs_pinned", "prefilled sequences that wait for their decoder", registry=r)
        self.handed_rows = Counter("handoff_rows", "rows that decoders received, of all ranks", registry=r)
        self.handed_bytes = Counter("handoff_bytes", "bytes of these rows", registry=r)
        self.handoff_seconds = Histogram("handoff_seconds", "time of a transfer", registry=r, buckets=_SECONDS)
        self.handoff_failures = Counter("handoff_failures", "transfers that a decoder gave up", registry=r)
        self._arrived: dict[str, float] = {}  # the time of each request's arrival
        self._prompts: dict[str, int] = {}  # the tokens of prompts of which nothing was computed yet
        self._last: dict[str, float] = {}  # the time of its arrival or last token

    def _as_vllm(self, kind: type[Kind], name: str, what: str, **more: Any) -> Kind:
        return kind(f"vllm:{name}", what, ["model_name"], registry=self.registry, **more).labels(self.model)

    def arrived(self, name: str, tokens: int) -> None:
        self._arrived[name] = self._last[name] = time.monotonic()
        self._prompts[name] = tokens

    def brought(self, output: RequestOutput) -> None:
        """Record the output of a step for a request."""
        now = time.monotonic()
        before = self._last.get(output.request)
        prompt = self._prompts.pop(output.request, 0)
        if output.finish not in ("cancelled", "error"):
            self.prompt_tokens.inc(prompt)
        if output.tokens and before is not None:
            # The first output of a request has its first token and the number of reused tokens.
            (self.ttft if output.first else self.itl).observe(now - before)
            self._last[output.request] = now
        self.reused_tokens.inc(output.reused)
        self.generated_tokens.inc(len(output.tokens))
        if output.finish:
            if self._last.pop(output.request, None) is not None:
                self.latency.observe(now - self._arrived.pop(output.request))
            self.requests.labels(self.model, _REASONS.get(output.finish, output.finish)).inc()

    def handed(self, report: Report) -> None:
        """Record the report of a decoder's worker."""
        self.handed_rows.inc(report.rows)
        self.handed_bytes.inc(report.nbytes)
        self.handoff_seconds.observe(report.seconds)
        if report.error:
            self.handoff_failures.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
