# SPDX-License-Identifier: Apache-2.0
"""What users can see in vLLM's log and /metrics. Statistics never raise: a value that is missing is not counted.

Tokens and failed loads are counted by the scheduler side, which sees each request once; leases by the first worker;
bytes and seconds by every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._vllm import KVConnectorPromMetrics, KVConnectorStats
from .scheduler.tallies import TokenTally
from .worker.pulls import Moved

_COUNTERS = {
    "remote_tokens": "Prompt tokens of hand-off requests whose KV cache came from the prefill engine.",
    "local_tokens": "Prompt tokens of hand-off requests that this engine had cached or computed itself.",
    "failed_loads": "Hand-offs whose KV cache could not be loaded.",
    "leases_expired": "Hand-offs that nobody fetched in time; their blocks were freed.",
}
_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def _empty() -> dict[str, Any]:
    return {**dict.fromkeys(_COUNTERS, 0), "transfer_bytes": {}, "transfer_seconds": [], "active_leases": None}


class DataDistStats(KVConnectorStats):
    """One interval's counts. `data` is plain and travels between processes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={**_empty(), **(data or {})})

    @classmethod
    def of_scheduler(cls, tally: TokenTally) -> DataDistStats:
        return cls(
            {
                "remote_tokens": tally.num_remote_tokens,
                "local_tokens": tally.num_local_tokens,
                "failed_loads": tally.num_failed_loads,
            }
        )

    def add_moved(self, moved: Sequence[Moved]) -> None:
        """One load's transfers of one worker."""
        by_backend = self.data["transfer_bytes"]
        for part in moved:
            by_backend[part.backend] = by_backend.get(part.backend, 0) + part.num_bytes
        if moved:
            self.data["transfer_seconds"].append(sum(part.seconds for part in moved))

    def add_leases(self, num_expired: int, num_active: int | None) -> None:
        """`num_active`: None if it has not changed."""
        self.data["leases_expired"] += num_expired
        if num_active is not None:
            self.data["active_leases"] = num_active

    def reset(self) -> None:
        self.data = _empty()

    def is_empty(self) -> bool:
        return self.data == _empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        theirs = other.data
        for name in _COUNTERS:
            self.data[name] += theirs.get(name, 0)
        for backend, count in theirs.get("transfer_bytes", {}).items():
            self.data["transfer_bytes"][backend] = self.data["transfer_bytes"].get(backend, 0) + count
        self.data["transfer_seconds"].extend(theirs.get("transfer_seconds", ()))
        if theirs.get("active_leases") is not None:
            self.data["active_leases"] = theirs["active_leases"]
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data["transfer_seconds"]
        num_bytes = sum(self.data["transfer_bytes"].values())
        shown: dict[str, int | float] = {name.replace("_", " "): self.data[name] for name in _COUNTERS}
        shown["transfers"] = len(seconds)
        shown["MiB moved"] = round(num_bytes / 2**20, 3)
        if seconds and sum(seconds) > 0:
            shown["mean transfer (ms)"] = round(1000 * sum(seconds) / len(seconds), 3)
            shown["MiB/s"] = round(num_bytes / 2**20 / sum(seconds), 1)
        return shown


class DataDistPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, one child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Prometheus' own classes or look-alikes of them (Ray); vLLM types all three as the union of the three.
        make_histogram: Any = self._histogram_cls
        make_gauge: Any = self._gauge_cls
        self._counters = {name: self._counter(name, text, labelnames) for name, text in _COUNTERS.items()}
        self._bytes = self._counter(
            "transfer_bytes", "Bytes of KV cache moved, by transfer backend.", [*labelnames, "backend"]
        )
        self._seconds = make_histogram(
            name="vllm:datadist_transfer_seconds",
            documentation="Seconds that the transfers of one load took.",
            buckets=list(_SECONDS_BUCKETS),
            labelnames=labelnames,
        )
        self._active_leases = make_gauge(
            name="vllm:datadist_active_leases",
            documentation="Requests whose blocks are held for a decode engine.",
            labelnames=labelnames,
        )
        self._start_at_zero()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues.get(engine_idx)
        if labels is None:
            return
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name) or 0)
        for backend, count in (transfer_stats_data.get("transfer_bytes") or {}).items():
            self._bytes.labels(*labels, backend).inc(count)
        for seconds in transfer_stats_data.get("transfer_seconds") or ():
            self._seconds.labels(*labels).observe(seconds)
        active = transfer_stats_data.get("active_leases")
        if active is not None:
            self._active_leases.labels(*labels).set(active)

    def _counter(self, name: str, text: str, labelnames: list[str]) -> Any:
        make_counter: Any = self._counter_cls
        return make_counter(name=f"vllm:datadist_{name}", documentation=text, labelnames=labelnames)

    def _start_at_zero(self) -> None:
        """Make every series visible before its first event."""
        for labels in self.per_engine_labelvalues.values():
            for metric in (*self._counters.values(), self._seconds, self._active_leases):
                metric.labels(*labels)
