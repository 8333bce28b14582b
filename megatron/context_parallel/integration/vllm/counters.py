"""Counts of the connector for vLLM's log and its /metrics."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .wire import Report

_COUNTS = {
    "loads": "prompts whose keys and values were fetched, by each worker",
    "rows": "rows that came",
    "bytes": "bytes of these rows",
    "seconds": "seconds that loads took",
    "failures": "loads of which rows are missing, which vLLM computes or refuses",
}


@dataclass
class PullCounts(KVConnectorStats):
    """Counts since the last report; vLLM adds those of its workers."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, int | float] = dict.fromkeys(_COUNTS, 0)

    def add(self, report: Report) -> None:
        """Count a load."""
        failures = int(bool(report.error))
        self._add({"loads": 1, "rows": report.rows, "bytes": report.nbytes, "failures": failures})
        self._add({"seconds": report.seconds})

    def aggregate(self, other: KVConnectorStats) -> "PullCounts":
        self._add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data["loads"]

    def _add(self, counts: dict[str, int | float]) -> None:
        for name, count in counts.items():
            self.data[name] += count


class PullMetrics(KVConnectorPromMetrics):
    """`vllm:context_parallel_rows_total` and the others."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters = {name: self._counter(name, told) for name, told in _COUNTS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)

    def _counter(self, name: str, told: str) -> dict[int, Any]:
        counter = self._counter_cls(
            name=f"vllm:context_parallel_{name}", documentation=told, labelnames=self._labelnames
        )
        return {engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
