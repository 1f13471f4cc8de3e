# SPDX-License-Identifier: Apache-2.0
"""`counts` as vLLM wants it: connector statistics, a line in its log, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._vllm import KVConnectorPromMetrics, KVConnectorStats
from .counts import MAX_BACKENDS, METRICS, OTHER, Counts, Kind, Labels, Metric, all_values, label_name

_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: In the line that vLLM logs every ten seconds.
_SHOWN = ("remote_tokens", "cached_tokens", "recomputed_tokens", "failed_loads", "leases_expired")


class DataDistStats(KVConnectorStats):
    """One interval's counts. `data` is plain and travels between processes."""

    def __init__(self, data: object = None) -> None:
        self._counts = Counts(data)
        super().__init__(data=self._counts.data)

    def reset(self) -> None:
        self._counts = Counts()
        self.data = self._counts.data

    def is_empty(self) -> bool:
        return self._counts.is_empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self._counts.add(getattr(other, "data", None))
        return self

    def reduce(self) -> dict[str, int | float]:
        counts = self._counts
        shown: dict[str, int | float] = {name.replace("_", " "): counts.total(name) for name in _SHOWN}
        num_bytes = counts.total("transfer_bytes")
        seconds = [one for name, _, times in counts.of(Kind.HISTOGRAM) if name == "transfer_seconds" for one in times]
        shown["transfers"] = len(seconds)
        shown["MiB moved"] = round(num_bytes / 2**20, 3)
        if sum(seconds) > 0:
            shown["mean transfer (ms)"] = round(1000 * sum(seconds) / len(seconds), 3)
            shown["MiB/s"] = round(num_bytes / 2**20 / sum(seconds), 1)
        return shown


class DataDistPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, one child per engine and labels. Whatever it is given, it does not raise."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._make(metric, labelnames) for metric in METRICS.values()}
        self._backends: set[str] = set()
        self._start_at_zero()

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues.get(engine_idx)
        if engine is None:
            return
        counts = Counts(transfer_stats_data)
        for kind, observe in _OBSERVE.items():
            for name, labels, value in counts.of(kind):
                observe(self._metrics[name].labels(*engine, *self._bounded(METRICS[name], labels)), value)

    def _make(self, metric: Metric, labelnames: list[str]) -> Any:
        # Prometheus' own classes or look-alikes of them (Ray); vLLM types all three as the union of the three.
        make: Any = {
            Kind.COUNTER: self._counter_cls,
            Kind.HISTOGRAM: self._histogram_cls,
            Kind.GAUGE: self._gauge_cls,
        }[metric.kind]
        return make(
            name=f"vllm:datadist_{metric.name}",
            documentation=metric.text,
            labelnames=[*labelnames, *map(label_name, metric.labels)],
            **_MAKE_WITH.get(metric.kind, {}),
        )

    def _bounded(self, metric: Metric, labels: Labels) -> Labels:
        """No more backends than MAX_BACKENDS over all the time either."""
        if not metric.labels or metric.labels[0] != "backend":
            return labels
        if len(self._backends) < MAX_BACKENDS:
            self._backends.add(labels[0])
        return labels if labels[0] in self._backends else (OTHER, *labels[1:])

    def _start_at_zero(self) -> None:
        """Make every series visible before its first event, but for those of ranks and backends."""
        for engine in self.per_engine_labelvalues.values():
            for metric in METRICS.values():
                for labels in all_values(metric):
                    self._metrics[metric.name].labels(*engine, *labels)


#: Several API servers: the value is that of the one that heard last.
_MAKE_WITH: Mapping[Kind, Mapping[str, Any]] = {
    Kind.HISTOGRAM: {"buckets": list(_SECONDS_BUCKETS)},
    Kind.GAUGE: {"multiprocess_mode": "mostrecent"},
}


def _observe_all(child: Any, times: list[float]) -> None:
    for seconds in times:
        child.observe(seconds)


_OBSERVE: Mapping[Kind, Any] = {
    Kind.COUNTER: lambda child, value: child.inc(value),
    Kind.HISTOGRAM: _observe_all,
    Kind.GAUGE: lambda child, value: child.set(value),
}
