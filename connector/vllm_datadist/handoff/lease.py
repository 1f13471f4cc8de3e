# SPDX-License-Identifier: Apache-2.0
"""P's leases: how long blocks are held for a hand-off, and the proof that they were.

A lease is opened by a step of P's engine and ended by a release or by time, each lease by its own clock. D reads P's
memory without P taking part, so the only proof that it read the right bytes is that the blocks were held until the
release after the read: `release` answers HELD only then, and only to the one who released.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..messages import LeaseState, RequestKey
from .table import Table


class LeasePhase(Enum):
    UNOPENED = "unopened"
    OPEN = "open"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(Enum):
    OPENED = "opened"
    RENEW = "renew"
    RELEASE = "release"
    RELEASE_BY_OTHER = "release by another reader"
    TIME_OVER = "time over"


_P, _E, _A = LeasePhase, LeaseEvent, LeaseState

#: (phase, event) -> (next phase, the answer).
LEASE_TABLE: Table[LeasePhase, LeaseEvent, LeaseState | None] = Table(
    "lease",
    {
        (_P.UNOPENED, _E.OPENED): (_P.OPEN, None),
        (_P.UNOPENED, _E.RENEW): (_P.UNOPENED, _A.UNKNOWN),
        (_P.UNOPENED, _E.RELEASE): (_P.UNOPENED, _A.UNKNOWN),
        (_P.OPEN, _E.OPENED): (_P.OPEN, None),
        (_P.OPEN, _E.RENEW): (_P.OPEN, _A.HELD),
        (_P.OPEN, _E.RELEASE): (_P.RELEASED, _A.HELD),
        (_P.OPEN, _E.TIME_OVER): (_P.EXPIRED, None),
        (_P.RELEASED, _E.OPENED): (_P.RELEASED, None),
        (_P.RELEASED, _E.RENEW): (_P.RELEASED, _A.RELEASED),
        (_P.RELEASED, _E.RELEASE): (_P.RELEASED, _A.HELD),
        (_P.RELEASED, _E.RELEASE_BY_OTHER): (_P.RELEASED, _A.RELEASED),
        (_P.EXPIRED, _E.OPENED): (_P.EXPIRED, None),
        (_P.EXPIRED, _E.RENEW): (_P.EXPIRED, _A.EXPIRED),
        (_P.EXPIRED, _E.RELEASE): (_P.EXPIRED, _A.EXPIRED),
    },
)


#: However often it is renewed, a lease ends after so many times its own time. Two engines that hand off to each other
#: may each hold what the other's queue waits for: without this end, both would renew for ever.
MAX_LEASE_TIMES = 20


@dataclass(frozen=True, slots=True)
class Reader:
    """Who releases: one attempt at one request of one worker of D. `cluster_id` is that worker's."""

    cluster_id: int
    key: RequestKey


@dataclass(slots=True)
class _Lease:
    """`ends_at_s` counts while it is OPEN, and is never after `latest_s`; `reader` is who released it."""

    lease_s: float
    ends_at_s: float
    latest_s: float
    phase: LeasePhase = LeasePhase.UNOPENED
    reader: Reader | None = None


class Leases:
    """All leases of one worker. Not thread-safe; see `worker.saves`.

    Args:
        clock: monotonic seconds.
        max_ended: how many ended leases are remembered, to answer late or repeated calls.
    """

    def __init__(self, clock: Callable[[], float], max_ended: int = 4096) -> None:
        self._clock = clock
        self._max_ended = max_ended
        self._active: dict[RequestKey, _Lease] = {}
        self._ended: OrderedDict[RequestKey, _Lease] = OrderedDict()
        self._finished: list[RequestKey] = []
        self._num_expired = 0
        self._latest_end_s = math.inf

    def open(self, key: RequestKey, lease_s: float) -> None:
        """Hold from now for `lease_s`. Opening twice, or again after the end, changes nothing."""
        lease = self._find(key) or self._new_lease(lease_s)
        self._step(key, lease, LeaseEvent.OPENED)

    def renew(self, keys: Sequence[RequestKey]) -> list[LeaseState]:
        """Start each lease's time again, up to MAX_LEASE_TIMES in all; HELD if it is in force."""
        self._sweep()
        return [self._renew(key) for key in keys]

    def release(self, keys: Sequence[RequestKey], reader: Reader) -> list[LeaseState]:
        """End each lease; HELD if it was in force all the time. Repeating it gives the same reader the same answer."""
        self._sweep()
        return [self._release(key, reader) for key in keys]

    def end_within(self, limit_s: float) -> None:
        """From now on no lease, also none opened or renewed later, lasts longer than until `limit_s` from now."""
        self._latest_end_s = min(self._latest_end_s, self._clock() + limit_s)
        for lease in self._active.values():
            lease.ends_at_s = min(lease.ends_at_s, self._latest_end_s)

    def are_known(self, keys: Iterable[RequestKey]) -> bool:
        """Whether all of them have been opened, and not been forgotten since."""
        return all(key in self._active or key in self._ended for key in keys)

    def take_finished(self) -> list[RequestKey]:
        """Leases that ended since the last call, by release or by time; each exactly once."""
        self._sweep()
        finished, self._finished = self._finished, []
        return finished

    def take_num_expired(self) -> int:
        """Leases that ended by time since the last call."""
        count, self._num_expired = self._num_expired, 0
        return count

    @property
    def num_active(self) -> int:
        return len(self._active)

    def _new_lease(self, lease_s: float) -> _Lease:
        return _Lease(lease_s, self._end_after(lease_s), self._end_after(MAX_LEASE_TIMES * lease_s))

    def _end_after(self, lease_s: float) -> float:
        return min(self._clock() + lease_s, self._latest_end_s)

    def _find(self, key: RequestKey) -> _Lease | None:
        return self._active.get(key) or self._ended.get(key)

    def _renew(self, key: RequestKey) -> LeaseState:
        lease = self._find(key) or _unopened()
        state = self._step(key, lease, LeaseEvent.RENEW)
        if lease.phase is LeasePhase.OPEN:
            lease.ends_at_s = min(self._end_after(lease.lease_s), lease.latest_s)
        return state

    def _release(self, key: RequestKey, reader: Reader) -> LeaseState:
        lease = self._find(key) or _unopened()
        if lease.phase is LeasePhase.RELEASED and lease.reader != reader:
            return self._step(key, lease, LeaseEvent.RELEASE_BY_OTHER)
        if lease.phase is LeasePhase.OPEN:
            lease.reader = reader
        return self._step(key, lease, LeaseEvent.RELEASE)

    def _sweep(self) -> None:
        """End every lease whose time is over, wherever it stands in the table."""
        now_s = self._clock()
        for key, lease in [(key, lease) for key, lease in self._active.items() if lease.ends_at_s <= now_s]:
            self._num_expired += 1
            self._step(key, lease, LeaseEvent.TIME_OVER)

    def _step(self, key: RequestKey, lease: _Lease, event: LeaseEvent) -> LeaseState:
        """Move it on, and to where its new phase belongs. Returns the answer."""
        before = lease.phase
        lease.phase, answer = LEASE_TABLE.next(before, event)
        if lease.phase is not before:
            if lease.phase is LeasePhase.OPEN:
                self._active[key] = lease
            else:
                self._end(key, lease)
        return LeaseState.UNKNOWN if answer is None else answer

    def _end(self, key: RequestKey, lease: _Lease) -> None:
        del self._active[key]
        self._finished.append(key)
        self._ended[key] = lease
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)


def _unopened() -> _Lease:
    return _Lease(0.0, 0.0, 0.0)
