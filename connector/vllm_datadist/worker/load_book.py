# SPDX-License-Identifier: Apache-2.0
"""What one worker notes of its loads and pushes, for the metrics, the line per request and the trace.

Whoever runs a part of a load (from one worker of P) has a stopwatch: each `lap` says what the time since the one before
was spent on. When the load is reported, `close` makes one report of all its parts. Nothing here raises or waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from datadist_core.errors import (
    CacheNotExist,
    Cancelled,
    ClosedError,
    IntegrityError,
    LinkBusy,
    LinkFailed,
    NotYetLinked,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    RemoteError,
    TimedOut,
    Unreachable,
)

from .. import trace
from ..counts import Awaited, Counts, Failure, Mode
from ..description import Incompatible
from ..handoff.load import LeaseLost
from ..handoff.offer import PushFailed
from ..messages import Endpoint, LoadReport, RequestKey
from ..newest import Newest
from .pulls import Moved
from .topology import PlanError

#: Of loads that are never reported, which there should be none of.
_MAX_OPEN = 4096
_FAILURES: Sequence[tuple[tuple[type[BaseException], ...], Failure]] = (
    ((LeaseLost,), Failure.LEASE_LOST),
    ((IntegrityError,), Failure.INTEGRITY),
    ((Cancelled, ClosedError), Failure.CANCELLED),
    ((TimedOut,), Failure.TIMED_OUT),
    ((Incompatible, PlanError, ParamInvalid, CacheNotExist), Failure.REFUSED),
    ((PushFailed, RemoteError, ProtocolError), Failure.PEER),
    ((PeerLost, LinkFailed, NotYetLinked, Unreachable, LinkBusy), Failure.LINK),
)


def failure_of(error: BaseException) -> Failure:
    """Its kind, for a label."""
    return next((failure for classes, failure in _FAILURES if isinstance(error, classes)), Failure.OTHER)


class Stopwatch:
    """One part of a load. Used by one thread at a time.

    Args:
        begun_s: when the first lap began; None: now.
    """

    def __init__(self, key: RequestKey, mode: Mode, trace_key: str, peer: str, begun_s: float | None = None) -> None:
        self.key = key
        self.mode = mode
        self.trace_key = trace_key
        self.peer = peer
        self.waits_s: dict[Awaited, float] = {}
        self.moved: list[Moved] = []
        self.transfer_s = 0.0
        self._lap_s = time.monotonic() if begun_s is None else begun_s

    def lap(self, awaited: Awaited) -> None:
        """The time since the lap before was spent on waiting for this."""
        begun_s, now_s = self._next()
        self.waits_s[awaited] = self.waits_s.get(awaited, 0.0) + now_s - begun_s
        self._record(f"await {awaited.value}", begun_s, now_s)

    def lap_moved(self, moved: Iterable[Moved]) -> None:
        """It was spent on moving this."""
        found = list(moved)
        begun_s, now_s = self._next()
        self.moved += found
        self.transfer_s += sum(part.seconds for part in found)
        self._record(
            "transfer", begun_s, now_s, num_bytes=sum(part.num_bytes for part in found), backend=_backends(found)
        )

    def heard_moved(self, moved: Iterable[Moved]) -> None:
        """P has moved this, as it says. It counts it itself."""
        found = list(moved)
        self.moved += found
        self.transfer_s += sum(part.seconds for part in found)

    def failed(self, error: BaseException) -> None:
        """It led to this."""
        begun_s, now_s = self._next()
        self._record("failed", begun_s, now_s, error=str(error))

    def _next(self) -> tuple[float, float]:
        begun_s, self._lap_s = self._lap_s, time.monotonic()
        return begun_s, self._lap_s

    def _record(self, name: str, begun_s: float, now_s: float, **args: object) -> None:
        trace.record(
            name, self.trace_key, begun_s, now_s, "loads", mode=self.mode.value, peer=self.peer,
            request=self.key.request_id, **args,
        )  # fmt: skip


class LoadBook:
    """One worker's. Thread-safe.

    Args:
        rank: the worker's place among those of its engine.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()  # held for moments only, so that callers may hold theirs
        self._open: Newest[RequestKey, list[Stopwatch]] = Newest(_MAX_OPEN)
        self._counts = Counts()

    def open(self, key: RequestKey, watches: Sequence[Stopwatch]) -> None:
        """These parts of a load begin."""
        with self._lock:
            self._open.setdefault(key, []).extend(watches)

    def close(self, key: RequestKey, mode: Mode, error: BaseException | None) -> LoadReport:
        """The load is reported; its numbers are counted."""
        with self._lock:
            watches = self._open.pop(key, [])
            waits_s: dict[str, float] = {}
            for watch in watches:
                for awaited, seconds in watch.waits_s.items():
                    waits_s[awaited.value] = max(waits_s.get(awaited.value, 0.0), seconds)
            moved = [part for watch in watches for part in watch.moved]
            transfer_s = max((watch.transfer_s for watch in watches), default=0.0)
            failure = None if error is None else failure_of(error)
            self._count(mode, moved if mode is Mode.PULL else (), transfer_s, waits_s, failure)
        return LoadReport(
            key=key,
            peers=tuple(dict.fromkeys(watch.peer for watch in watches)),
            backends=tuple(sorted({part.backend for part in moved})),
            num_bytes=sum(part.num_bytes for part in moved),
            transfer_s=transfer_s,
            waits_s=waits_s,
            failure=failure,
        )

    def sent(self, moved: Sequence[Moved]) -> None:
        """P has pushed this."""
        with self._lock:
            self._count(Mode.PUSH, moved, sum(part.seconds for part in moved), {}, None)

    def not_sent(self, error: BaseException) -> None:
        """P has not, for this reason."""
        with self._lock:
            self._counts.count("transfer_failures", 1, failure_of(error), Mode.PUSH, self._rank)

    def take_counts(self) -> Counts:
        with self._lock:
            counts, self._counts = self._counts, Counts()
            return counts

    def _count(
        self, mode: Mode, moved: Sequence[Moved], transfer_s: float, waits_s: dict[str, float], failure: Failure | None
    ) -> None:
        for part in moved:
            self._counts.count("transfer_bytes", part.num_bytes, part.backend, mode, self._rank)
        if moved:
            self._counts.time("transfer_seconds", transfer_s, mode, self._rank)
        for awaited, seconds in waits_s.items():
            self._counts.time("wait_seconds", seconds, awaited, mode, self._rank)
        if failure is not None:
            self._counts.count("transfer_failures", 1, failure, mode, self._rank)


class LayerSpans:
    """The layers of one push, one after the other: how long each was moved, without the waits in between.

    One thread calls it, that of the transfer.
    """

    def __init__(self, trace_key: str, peer: str, backend: str, layer_bytes: int) -> None:
        self._trace_key = trace_key
        self._peer = peer
        self._backend = backend
        self._layer_bytes = layer_bytes
        self._open: _OpenLayer | None = None
        self.seconds = 0.0

    def begin(self, layer_name: str) -> None:
        """From now on this layer is moved."""
        self._open = _OpenLayer(layer_name, time.monotonic())

    def end(self) -> None:
        """It has arrived; if one was being moved."""
        layer, self._open = self._open, None
        if layer is None:
            return
        now_s = time.monotonic()
        self.seconds += now_s - layer.begun_s
        trace.record(
            "transfer", self._trace_key, layer.begun_s, now_s, "transfers", mode="push", layer=layer.name,
            peer=self._peer, backend=self._backend, num_bytes=self._layer_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OpenLayer:
    name: str
    begun_s: float


def place(endpoint: Endpoint) -> str:
    """How a peer is shown."""
    return f"{endpoint.host}:{endpoint.port}"


def _backends(moved: Iterable[Moved]) -> str:
    return "+".join(sorted({part.backend for part in moved}))
