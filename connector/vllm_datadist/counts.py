# SPDX-License-Identifier: Apache-2.0
"""What is counted: the list of all metrics, and a plain container for one interval's numbers.

`stats` shows these to users as vLLM's connector statistics and Prometheus metrics (docs/metrics.md). Who counts what,
so that nothing counts twice: what a request is as a whole, the scheduler side counts, which sees it once; what a
worker does itself, every worker counts under its own rank.

Numbers travel worker -> scheduler -> front end as plain JSON-like data, maybe from another version of this code or
through another connector. So whatever comes in is looked at number by number: what is not a number of a known metric
with known labels is not counted. Nothing here raises. Labels have a bounded set of values, never an id or a text.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Labels = tuple[str, ...]
Number = int | float

#: Sums stay below what a message can carry, and times below what a sum of them can.
MAX_COUNT = 2**62
MAX_SECONDS = 1e9
MAX_RANKS = 4096
MAX_BACKENDS = 16
OTHER = "other"


class Mode(str, Enum):
    """Who moves the bytes: D reads (pull) or P writes (push)."""

    PULL = "pull"
    PUSH = "push"


class Reason(str, Enum):
    """Why D computed prompt tokens of a hand-off itself."""

    TICKET_MALFORMED = "ticket_malformed"
    TICKET_GROUPS = "ticket_groups"
    TICKET_PROMPT = "ticket_prompt"
    TICKET_OTHER = "ticket_other"
    ROLE = "role"
    NOTHING_NEEDED = "nothing_needed"
    BEYOND_TICKET = "beyond_ticket"
    WINDOW_GONE = "window_gone"
    FOLLOWER = "follower"
    OTHER_CONNECTOR = "other_connector"
    LOAD_LINK = "load_failed_link"
    LOAD_TIMED_OUT = "load_failed_timed_out"
    LOAD_LEASE_LOST = "load_failed_lease_lost"
    LOAD_REFUSED = "load_failed_refused"
    LOAD_INTEGRITY = "load_failed_integrity"
    LOAD_PEER = "load_failed_peer"
    LOAD_OTHER = "load_failed_other"


class Failure(str, Enum):
    """Why a load or a push of one worker failed."""

    LINK = "link"
    TIMED_OUT = "timed_out"
    LEASE_LOST = "lease_lost"
    REFUSED = "refused"
    INTEGRITY = "integrity"
    CANCELLED = "cancelled"
    PEER = "peer"
    OTHER = OTHER


class Outcome(str, Enum):
    """How a request that came to D with a ticket got its tokens."""

    LOADED = "loaded"
    FAILED = "failed"
    REFUSED = "refused"
    NOT_NEEDED = "not_needed"
    FOLLOWED = "followed"
    ABORTED = "aborted"


class HoldOutcome(str, Enum):
    """How a hand-off of P ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    UNKNOWN = "unknown"


class Awaited(str, Enum):
    """What a load waited for: blocks of D, one of its threads, a link, P's prefill, or P's word that all is right."""

    BLOCKS = "blocks"
    THREAD = "thread"
    LINK = "link"
    PREFILL = "prefill"
    CONFIRMATION = "confirmation"


class Kind(Enum):
    COUNTER = "counters"
    HISTOGRAM = "times"
    GAUGE = "gauges"


@dataclass(frozen=True, slots=True)
class Metric:
    """`text` is what Prometheus shows; `labels` come after vLLM's own."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


_C, _H, _G = Kind.COUNTER, Kind.HISTOGRAM, Kind.GAUGE
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "remote_tokens",
            _C,
            "Prompt tokens of hand-off requests whose KV came from the prefill engine.",
            ("mode",),
        ),
        Metric("local_tokens", _C, "Prompt tokens of hand-off requests that this engine had cached or computed."),
        Metric("cached_tokens", _C, "The part of local_tokens that was in this engine's own prefix cache."),
        Metric("recomputed_tokens", _C, "The part of local_tokens that this engine computed, by reason.", ("reason",)),
        Metric("requests", _C, "Requests that came with a ticket, by how they got their tokens.", ("mode", "outcome")),
        Metric("failed_loads", _C, "Hand-offs whose KV cache could not be loaded.", ("mode",)),
        Metric("handoffs", _C, "Requests that this engine prefilled and handed off, by end.", ("mode", "hold_outcome")),
        Metric("leases_expired", _C, "Hand-offs that nobody fetched in time; their blocks were freed."),
        Metric("transfer_bytes", _C, "Bytes of KV cache moved by this worker.", ("backend", "mode", "rank")),
        Metric("transfer_failures", _C, "Loads and pushes of this worker that failed.", ("kind", "mode", "rank")),
        Metric("transfer_seconds", _H, "Seconds in which the blocks of one load or push moved.", ("mode", "rank")),
        Metric("load_seconds", _H, "Seconds from a request's blocks to the end of its load.", ("mode",)),
        Metric("wait_seconds", _H, "Seconds that a load waited, by what for.", ("awaited", "mode", "rank")),
        Metric("lease_seconds", _H, "Seconds for which blocks were held after their prefill.", ("mode",)),
        Metric("active_leases", _G, "Requests whose blocks are held for a decode engine."),
        Metric("links", _G, "Links of this worker that are up.", ("rank",)),
    )
}


def _values(*kinds: type[Enum]) -> frozenset[str]:
    return frozenset(str(one.value) for kind in kinds for one in kind)


#: What each label may be. Where something else can come for honest reasons (a newer version), it is "other".
ACCEPTED: Mapping[str, frozenset[str]] = {
    "mode": _values(Mode),
    "reason": _values(Reason) | {OTHER},
    "outcome": _values(Outcome) | {OTHER},
    "hold_outcome": _values(HoldOutcome) | {OTHER},
    "kind": _values(Failure),
    "awaited": _values(Awaited),
    "rank": frozenset([*map(str, range(MAX_RANKS)), "scheduler"]),
}
_BACKEND = re.compile(r"[A-Za-z0-9_.:+-]{1,64}")
_SEPARATOR = "|"


def label_name(label: str) -> str:
    """As users see it."""
    return "outcome" if label == "hold_outcome" else label


def all_values(metric: Metric) -> list[Labels]:
    """All values that its labels can have; none where they depend on the deployment (ranks, backends)."""
    if {"rank", "backend"} & set(metric.labels):
        return []
    return list(itertools.product(*(sorted(ACCEPTED[label]) for label in metric.labels)))


class Counts:
    """One interval's numbers: {"counters" | "times" | "gauges": {metric: {labels, joined by "|": number(s)}}}.

    Args:
        data: what another one's `data` was, or anything at all.
    """

    def __init__(self, data: object = None) -> None:
        self.data: dict[str, dict[str, dict[str, Any]]] = {kind.value: {} for kind in Kind}
        self.add(data)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def count(self, name: str, value: object, *labels: object) -> None:
        """Add to a counter. Zero adds nothing."""
        self._add(Kind.COUNTER, name, _labels(name, labels), value)

    def time(self, name: str, seconds: object, *labels: object) -> None:
        """One observation of a histogram."""
        self._add(Kind.HISTOGRAM, name, _labels(name, labels), [seconds])

    def gauge(self, name: str, value: object, *labels: object) -> None:
        """The value from now on."""
        self._add(Kind.GAUGE, name, _labels(name, labels), value)

    def add(self, data: object) -> None:
        """All numbers of another one's `data`, as far as they are such."""
        for kind in Kind:
            for name, series in _items(_get(data, kind.value)):
                for joined, value in _items(series):
                    if isinstance(joined, str):
                        self._add(kind, name, _labels(name, _split(joined)), value)

    def of(self, kind: Kind) -> Iterable[tuple[str, Labels, Any]]:
        """(metric, its labels, its number or list of numbers)."""
        for name, series in self.data[kind.value].items():
            for joined, value in series.items():
                yield name, _split(joined), value

    def total(self, name: str) -> Number:
        """Over all labels; of a histogram, how many observations."""
        metric = METRICS[name]
        values = self.data[metric.kind.value].get(name, {}).values()
        return sum(len(value) if metric.kind is Kind.HISTOGRAM else value for value in values)

    def _add(self, kind: Kind, name: object, labels: Labels | None, value: object) -> None:
        metric = METRICS.get(name) if isinstance(name, str) else None
        if metric is None or metric.kind is not kind or labels is None:
            return
        series = self.data[kind.value].get(metric.name, {})
        joined = _SEPARATOR.join(_bounded(metric, labels, series))
        if kind is Kind.HISTOGRAM:
            times = [time for item in _sequence(value) if (time := _number(item, MAX_SECONDS)) is not None]
            if times:
                series.setdefault(joined, []).extend(times)
        elif (number := _number(value, MAX_COUNT)) is not None and (number or kind is Kind.GAUGE):
            series[joined] = number if kind is Kind.GAUGE else min(series.get(joined, 0) + number, MAX_COUNT)
        if series:
            self.data[kind.value][metric.name] = series


def _labels(name: object, labels: tuple[object, ...]) -> Labels | None:
    """None unless they are as many as the metric has, and each may be what it is."""
    metric = METRICS.get(name) if isinstance(name, str) else None
    if metric is None or len(labels) != len(metric.labels):
        return None
    values = [_label(label, value) for label, value in zip(metric.labels, labels, strict=True)]
    return None if None in values else tuple(str(value) for value in values)


def _label(label: str, value: object) -> str | None:
    text = str(value.value) if isinstance(value, Enum) else str(value) if type(value) is int else value
    if not isinstance(text, str):
        return None
    if label == "backend":
        return text if _BACKEND.fullmatch(text) else OTHER
    accepted = ACCEPTED[label]
    return text if text in accepted else OTHER if OTHER in accepted else None


def _bounded(metric: Metric, labels: Labels, series: Mapping[str, Any]) -> Labels:
    """A backend may have any name (there are plug-ins), but not any number of names."""
    if not metric.labels or metric.labels[0] != "backend":
        return labels
    known = {_split(joined)[0] for joined in series}
    is_one_too_many = labels[0] not in known and len(known) >= MAX_BACKENDS
    return (OTHER, *labels[1:]) if is_one_too_many else labels


def _split(joined: str) -> Labels:
    return tuple(joined.split(_SEPARATOR)) if joined else ()


def _number(value: object, most: Number) -> Number | None:
    """None for what is no number >= 0."""
    if type(value) is int:
        return min(value, int(most)) if value >= 0 else None
    if isinstance(value, float) and math.isfinite(value) and value >= 0:
        return min(float(value), most)
    return None


def _sequence(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else ()


def _get(data: object, name: str) -> object:
    return data.get(name) if isinstance(data, dict) else None


def _items(data: object) -> list[tuple[object, object]]:
    return list(data.items()) if isinstance(data, dict) else []
