# SPDX-License-Identifier: Apache-2.0
"""Statistics add up over workers and scheduler, survive the way between processes, and become Prometheus metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

prometheus = pytest.importorskip("prometheus_client")
pytest.importorskip("vllm")

from vllm_datadist.scheduler.tallies import TokenTally  # noqa: E402
from vllm_datadist.stats import DataDistPromMetrics, DataDistStats  # noqa: E402
from vllm_datadist.worker.pulls import Moved  # noqa: E402


def _worker_stats() -> DataDistStats:
    stats = DataDistStats()
    stats.add_moved([Moved(100, "shm", 0.25), Moved(50, "shm", 0.25)])
    stats.add_moved([Moved(8, "tcp", 0.5)])
    stats.add_leases(2, 3)
    return stats


def test_empty_until_something_happened() -> None:
    stats = DataDistStats()
    assert stats.is_empty()
    stats.add_leases(0, None)
    stats.add_moved([])
    assert stats.is_empty()
    stats.add_leases(0, 0)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_workers_and_scheduler_add_up_and_survive_the_way() -> None:
    total = DataDistStats()
    total.aggregate(_worker_stats()).aggregate(_worker_stats())
    total.aggregate(DataDistStats.of_scheduler(TokenTally(70, 30, 1)))
    data = DataDistStats(json.loads(json.dumps(total.to_dict()))).data
    assert (data["remote_tokens"], data["local_tokens"], data["failed_loads"], data["leases_expired"]) == (70, 30, 1, 4)
    assert data["transfer_bytes"] == {"shm": 300, "tcp": 16}
    assert (data["transfer_seconds"], data["active_leases"]) == ([0.5, 0.5, 0.5, 0.5], 3)
    reduced = total.reduce()
    assert (reduced["transfers"], reduced["mean transfer (ms)"]) == (4, 500.0)


def test_what_does_not_say_how_many_leases_there_are_leaves_the_number() -> None:
    stats = _worker_stats()
    stats.aggregate(DataDistStats())
    assert stats.data["active_leases"] == 3


@pytest.fixture
def metrics() -> tuple[DataDistPromMetrics, Any]:
    registry = prometheus.CollectorRegistry()
    kinds = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
    types = {kind: _in(kind, registry) for kind in kinds}
    config = SimpleNamespace(kv_transfer_config=None)
    return DataDistPromMetrics(config, types, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]}), registry


def _in(kind: Any, registry: Any) -> Any:
    return lambda **keywords: kind(registry=registry, **keywords)


def _value(registry: Any, name: str, engine: str = "0", **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:datadist_{name}", {"model": "m", "engine": engine, **labels})


def test_the_metrics_that_users_see(metrics: tuple[DataDistPromMetrics, Any]) -> None:
    prom, registry = metrics
    assert _value(registry, "remote_tokens_total") == 0
    for _ in range(2):
        prom.observe(_worker_stats().to_dict(), 0)
    prom.observe(DataDistStats.of_scheduler(TokenTally(7, 3, 1)).to_dict(), 1)
    assert _value(registry, "transfer_bytes_total", backend="shm") == 300
    assert _value(registry, "transfer_bytes_total", backend="tcp") == 16
    assert (_value(registry, "transfer_seconds_count"), _value(registry, "transfer_seconds_sum")) == (4, 2.0)
    assert (_value(registry, "leases_expired_total"), _value(registry, "active_leases")) == (4, 3)
    assert (_value(registry, "remote_tokens_total", "1"), _value(registry, "local_tokens_total", "1")) == (7, 3)
    assert _value(registry, "failed_loads_total", "1") == 1


def test_unknown_engines_and_missing_values_are_not_counted(metrics: tuple[DataDistPromMetrics, Any]) -> None:
    prom, registry = metrics
    prom.observe(_worker_stats().to_dict(), 9)
    prom.observe({}, 0)
    assert _value(registry, "leases_expired_total") == 0
