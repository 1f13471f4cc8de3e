# SPDX-License-Identifier: Apache-2.0
"""Statistics add up over workers, scheduler and intervals, survive the way between processes, and never raise."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_datadist.counts import (
    ACCEPTED,
    MAX_BACKENDS,
    METRICS,
    Awaited,
    Counts,
    Failure,
    HoldOutcome,
    Kind,
    Metric,
    Mode,
    Outcome,
    Reason,
    all_values,
    label_name,
)

prometheus = pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.slow
NUM_RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def _stats() -> None:
    """Not imported with this file, which every worker of pytest-xdist collects: vLLM takes ten seconds."""
    global DataDistPromMetrics, DataDistStats, PROM
    pytest.importorskip("vllm")
    from vllm_datadist.stats import DataDistPromMetrics, DataDistStats

    PROM = Prom()


# -- adding up


def _worker_counts(rank: int) -> Counts:
    counts = Counts()
    counts.count("transfer_bytes", 100, "shm", Mode.PULL, rank)
    counts.count("transfer_bytes", 50, "shm", Mode.PULL, rank)
    counts.count("transfer_bytes", 8, "tcp", Mode.PUSH, rank)
    counts.time("transfer_seconds", 0.5, Mode.PULL, rank)
    counts.count("transfer_failures", 1, Failure.LINK, Mode.PULL, rank)
    counts.gauge("links", 2 + rank, rank)
    return counts


def test_empty_until_something_happened() -> None:
    stats = DataDistStats()
    assert stats.is_empty()
    counts = Counts()
    counts.count("remote_tokens", 0, Mode.PULL)
    assert counts.is_empty()
    counts.gauge("active_leases", 0)
    assert not counts.is_empty(), "no lease any more is something to say"
    stats = DataDistStats(counts.data)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert DataDistStats(stats.to_dict()).is_empty()


@pytest.mark.parametrize(
    "way",
    [
        lambda stats: DataDistStats(json.loads(json.dumps(stats.to_dict()))),
        lambda stats: DataDistStats(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))),
        lambda stats: pickle.loads(pickle.dumps(stats)),
    ],
    ids=["json", "msgpack", "pickle"],
)
def test_ranks_stay_apart_and_survive_the_way(way: Any) -> None:
    total = way(DataDistStats(_worker_counts(0).data))
    total.aggregate(way(DataDistStats(_worker_counts(1).data)))
    assert total.data["counters"]["transfer_bytes"] == {
        "shm|pull|0": 150, "tcp|push|0": 8, "shm|pull|1": 150, "tcp|push|1": 8,
    }  # fmt: skip
    assert total.data["times"]["transfer_seconds"] == {"pull|0": [0.5], "pull|1": [0.5]}
    assert total.data["gauges"]["links"] == {"0": 2, "1": 3}
    assert total.reduce()["transfers"] == 2


def test_sums_over_ranks_and_intervals_equal_what_was_moved() -> None:
    """Random moves at four ranks, reported in random intervals, added up in vLLM's order: worker by worker, then the
    scheduler, then the front end's ten seconds. Nothing is lost, nothing counts twice."""
    choose = random.Random(7)
    truth: Counter[tuple[str, str]] = Counter()
    num_tokens, observed = 0, DataDistStats()
    for _ in range(60):
        step: DataDistStats | None = None
        for rank in range(NUM_RANKS):
            counts = Counts()
            for _ in range(choose.randrange(4)):
                backend, mode = choose.choice(["shm", "tcp"]), choose.choice(list(Mode))
                num_bytes = choose.randrange(1, 2**40)
                truth[f"{backend}|{mode.value}", str(rank)] += num_bytes
                counts.count("transfer_bytes", num_bytes, backend, mode, rank)
            mine = DataDistStats(counts.data)
            step = mine if step is None else step.aggregate(mine)  # type: ignore[assignment]
        tokens = choose.randrange(1000)
        num_tokens += tokens
        of_scheduler = Counts()
        of_scheduler.count("remote_tokens", tokens, Mode.PUSH)
        assert step is not None
        step.aggregate(DataDistStats(of_scheduler.data))
        observed.aggregate(DataDistStats(msgspec.msgpack.decode(msgspec.msgpack.encode(step.to_dict()))))
    assert observed.data["counters"]["transfer_bytes"] == {
        f"{backend}|{rank}": count for (backend, rank), count in truth.items()
    }
    assert observed.data["counters"]["remote_tokens"] == {"push": num_tokens}


# -- Prometheus


class Prom:
    """Our metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        kinds = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
        types = {kind: self._in_registry(kind) for kind in kinds}
        config = SimpleNamespace(kv_transfer_config=None)
        engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
        self.metrics = DataDistPromMetrics(config, types, ["model", "engine"], engines)

    def _in_registry(self, kind: Any) -> Any:
        return lambda **keywords: kind(registry=self.registry, **keywords)

    def value(self, name: str, engine: str = "0", **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:datadist_{name}", {"model": "m", "engine": engine, **labels})

    def num_series(self) -> int:
        return sum(len(family.samples) for family in self.registry.collect())


def test_the_metrics_that_users_see() -> None:
    prom = Prom()
    assert prom.value("remote_tokens_total", mode="pull") == 0
    counts = _worker_counts(3)
    counts.count("remote_tokens", 70, Mode.PULL)
    counts.count("recomputed_tokens", 30, Reason.LOAD_LINK)
    counts.count("requests", 1, Mode.PULL, Outcome.LOADED)
    counts.count("handoffs", 1, Mode.PUSH, HoldOutcome.EXPIRED)
    counts.time("wait_seconds", 0.25, Awaited.PREFILL, Mode.PUSH, 3)
    counts.gauge("active_leases", 3)
    for _ in range(2):
        prom.metrics.observe(DataDistStats(counts.data).to_dict(), 0)
    assert prom.value("transfer_bytes_total", backend="shm", mode="pull", rank="3") == 300
    assert prom.value("transfer_bytes_total", backend="tcp", mode="push", rank="3") == 16
    assert prom.value("transfer_seconds_count", mode="pull", rank="3") == 2
    assert prom.value("transfer_seconds_sum", mode="pull", rank="3") == 1.0
    assert prom.value("transfer_failures_total", kind="link", mode="pull", rank="3") == 2
    assert prom.value("remote_tokens_total", mode="pull") == 140
    assert prom.value("recomputed_tokens_total", reason="load_failed_link") == 60
    assert prom.value("requests_total", mode="pull", outcome="loaded") == 2
    assert prom.value("handoffs_total", mode="push", outcome="expired") == 2
    assert prom.value("wait_seconds_sum", awaited="prefill", mode="push", rank="3") == 0.5
    assert (prom.value("active_leases"), prom.value("links", rank="3")) == (3, 5)
    assert prom.value("remote_tokens_total", "1", mode="pull") == 0


def test_names_are_what_prometheus_wants() -> None:
    for metric in METRICS.values():
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        is_time = metric.kind is Kind.HISTOGRAM
        assert metric.name.endswith("_seconds") == is_time, metric.name
        assert metric.text.endswith("."), metric.name
        shown = [label_name(label) for label in metric.labels]
        assert len(set(shown)) == len(shown)
        assert not {"le", "quantile", "engine", "model_name"} & set(shown)
    #: Dashboards and rules of users have these.
    stable = {"remote_tokens", "local_tokens", "failed_loads", "leases_expired", "transfer_bytes", "transfer_seconds"}
    assert stable | {"active_leases"} <= METRICS.keys()


def test_unknown_engines_are_not_counted() -> None:
    prom = Prom()
    prom.metrics.observe(_worker_counts(0).data, 9)
    assert prom.value("transfer_bytes_total", backend="shm", mode="pull", rank="0") is None


def test_labels_stay_within_bounds() -> None:
    prom = Prom()
    for number in range(3 * MAX_BACKENDS):
        counts = Counts()
        counts.count("transfer_bytes", 1, f"plugin{number}", Mode.PULL, 0)
        counts.count("transfer_bytes", 1, f"request {number} failed: no such peer", Mode.PULL, 0)
        counts.count("transfer_failures", 1, f"text {number}", Mode.PULL, 0)
        counts.count("recomputed_tokens", 1, f"reason {number}")
        counts.count("remote_tokens", 1, f"mode {number}")
        counts.count("transfer_bytes", 1, "shm", Mode.PULL, 10**6 + number)
        prom.metrics.observe(counts.data, 0)
    families = {family.name.removeprefix("vllm:datadist_"): family for family in prom.registry.collect()}
    backends = {sample.labels["backend"] for sample in families["transfer_bytes"].samples}
    assert len(backends) <= MAX_BACKENDS + 1
    assert "other" in backends
    assert {sample.labels["kind"] for sample in families["transfer_failures"].samples} == {"other"}
    assert {sample.labels["mode"] for sample in families["remote_tokens"].samples} == {"pull", "push"}
    assert {sample.labels["rank"] for sample in families["transfer_bytes"].samples} == {"0"}
    total = sum(s.value for s in families["transfer_bytes"].samples if s.name.endswith("_total"))
    assert total == 6 * MAX_BACKENDS, "what has no name of its own is counted all the same"


# -- never raises

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**63, 2**64, 10**400, float("nan"), float("inf"), -0.5, 1e308]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
)
_names = st.sampled_from(sorted(METRICS))
_joined = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "pull", "pull|0", "shm|pull|0", "shm|push|1", "link|pull|0", "blocks|push|scheduler", "|||"]),
    _scalars,
)
_values = st.one_of(
    _scalars, st.lists(_scalars, max_size=4), st.dictionaries(st.text(max_size=3), _scalars, max_size=2)
)
_series = st.one_of(_scalars, st.lists(_scalars, max_size=2), st.dictionaries(_joined, _values, max_size=4))
_by_name = st.one_of(_scalars, st.dictionaries(st.one_of(_names, st.text(max_size=6)), _series, max_size=4))
_anything = st.one_of(
    _scalars,
    st.dictionaries(st.sampled_from(["counters", "times", "gauges", "remote_tokens", "other"]), _by_name, max_size=5),
    # What an older version sent.
    st.fixed_dictionaries(
        {"remote_tokens": _scalars, "transfer_bytes": _series, "transfer_seconds": _values, "active_leases": _scalars}
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(first=_anything, second=_anything)
def test_whatever_comes_in_nothing_raises(first: Any, second: Any) -> None:
    stats = DataDistStats(first)
    stats.aggregate(SimpleNamespace(data=second))  # type: ignore[arg-type]
    stats.aggregate(None)  # type: ignore[arg-type]
    stats.reduce()
    encoded = msgspec.msgpack.encode(stats.to_dict())
    again = DataDistStats(msgspec.msgpack.decode(encoded))
    assert again.data == stats.data
    PROM.metrics.observe(first, 0)
    PROM.metrics.observe(stats.to_dict(), 1)
    PROM.metrics.observe(second, 7)
    again.reset()
    assert again.is_empty()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(name=st.one_of(_names, _scalars), value=_values, labels=st.lists(_scalars, max_size=4))
def test_whatever_is_counted_nothing_raises(name: Any, value: Any, labels: list[Any]) -> None:
    counts = Counts()
    counts.count(name, value, *labels)
    counts.time(name, value, *labels)
    counts.gauge(name, value, *labels)
    PROM.metrics.observe(counts.data, 0)


@pytest.mark.parametrize("value", [-1, -0.5, None, True, float("nan"), float("inf"), "5", b"5", [1], {}, 1j])
def test_what_is_no_number_from_0_on_is_not_counted(value: Any) -> None:
    counts = Counts()
    for metric in METRICS.values():
        labels = _some_labels(metric)
        if metric.kind is Kind.HISTOGRAM:
            counts.time(metric.name, value, *labels)
        else:
            counts.count(metric.name, value, *labels)
            counts.gauge(metric.name, value, *labels)
        data = {metric.kind.value: {metric.name: {"|".join(labels): [value] if value == [1] else value}}}
        if metric.kind is not Kind.HISTOGRAM:
            counts.add(data)
    assert counts.is_empty()
    PROM.metrics.observe(counts.data, 0)


def test_what_is_huge_is_counted_as_much() -> None:
    counts = Counts()
    for _ in range(2):
        counts.count("remote_tokens", 10**400, Mode.PULL)
        counts.time("load_seconds", 1e308, Mode.PULL)
    again = Counts(msgspec.msgpack.decode(msgspec.msgpack.encode(counts.data)))
    assert again.total("remote_tokens") == 2**62
    assert again.data["times"]["load_seconds"] == {"pull": [1e9, 1e9]}
    PROM.metrics.observe(again.data, 0)


def _some_labels(metric: Metric) -> list[str]:
    some = {"backend": "shm", "rank": "0"}
    known = {label: next(iter(sorted(ACCEPTED[label]))) for label in metric.labels if label not in some}
    return [{**some, **known}[label] for label in metric.labels]


def test_afterwards_there_are_no_more_series_than_labels_allow() -> None:
    """Of what was thrown at it above: every series that there is has accepted labels."""
    for metric in METRICS.values():
        assert len(all_values(metric)) <= 64, metric.name
    assert PROM.num_series() < 4000
