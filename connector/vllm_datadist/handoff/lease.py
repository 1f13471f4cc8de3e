# SPDX-License-Identifier: Apache-2.0
"""P's leases: how long blocks are held for a hand-off, and the proof that they were.

A lease is opened by a step of P's engine and ended by a release or by time, each lease by its own clock. D reads P's
memory without P taking part, so the only proof that it read the right bytes is that the blocks were held until the
release after the read: `release` answers HELD only then, and only to those who released.

One worker of P may be read by several workers of D (it has more of them, or other cuts): each releases when it has
read, and says how many there are. The lease is RELEASED with the last of them. All belong to one attempt at one request
of D, the one that released first; another D with the same ticket is told RELEASED, and changes nothing.

While this worker itself sends from the blocks (a push), they are pinned: the lease ends as it would, but vLLM hears of
the end only when nothing is being sent any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..messages import LeaseState, RequestKey
from ..newest import Newest
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
    RELEASE_OF_PART = "release by one of several readers"
    RELEASE_BY_OTHER = "release by another reader"
    MISCOUNTED = "release with another number of readers"
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
        (_P.OPEN, _E.RELEASE_OF_PART): (_P.OPEN, _A.HELD),
        (_P.OPEN, _E.RELEASE_BY_OTHER): (_P.OPEN, _A.RELEASED),
        (_P.OPEN, _E.MISCOUNTED): (_P.OPEN, _A.MISCOUNTED),
        (_P.OPEN, _E.TIME_OVER): (_P.EXPIRED, None),
        (_P.RELEASED, _E.OPENED): (_P.RELEASED, None),
        (_P.RELEASED, _E.RENEW): (_P.RELEASED, _A.RELEASED),
        (_P.RELEASED, _E.RELEASE): (_P.RELEASED, _A.HELD),
        (_P.RELEASED, _E.RELEASE_BY_OTHER): (_P.RELEASED, _A.RELEASED),
        (_P.RELEASED, _E.MISCOUNTED): (_P.RELEASED, _A.MISCOUNTED),
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


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """How a lease ended: RELEASED or EXPIRED."""

    key: RequestKey
    phase: LeasePhase


@dataclass(slots=True)
class _Lease:
    """`ends_at_s` counts while it is OPEN, and is never after `latest_s`.

    `readers`: who has released it. `num_readers`: how many will, as the first of them said. `num_pins`: how many sends
    of our own are under way from its blocks.
    """

    lease_s: float
    ends_at_s: float
    latest_s: float
    phase: LeasePhase = LeasePhase.UNOPENED
    readers: set[Reader] = field(default_factory=set)
    num_readers: int = 0
    num_pins: int = 0

    def event_of(self, reader: Reader, num_readers: int) -> LeaseEvent:
        """What a release by `reader` is to this lease."""
        if self.phase is LeasePhase.UNOPENED or self.phase is LeasePhase.EXPIRED:
            return LeaseEvent.RELEASE
        if any(other.key != reader.key for other in self.readers):
            return LeaseEvent.RELEASE_BY_OTHER
        if num_readers < 1 or num_readers != (self.num_readers or num_readers):
            return LeaseEvent.MISCOUNTED
        if self.phase is LeasePhase.RELEASED:
            return LeaseEvent.RELEASE if reader in self.readers else LeaseEvent.RELEASE_BY_OTHER
        is_last = len(self.readers | {reader}) >= num_readers
        return LeaseEvent.RELEASE if is_last else LeaseEvent.RELEASE_OF_PART


class Leases:
    """All leases of one worker. Not thread-safe; see `worker.saves`.

    Args:
        clock: monotonic seconds.
        max_ended: how many ended leases are remembered, to answer late or repeated calls.
    """

    def __init__(self, clock: Callable[[], float], max_ended: int = 4096) -> None:
        self._clock = clock
        self._active: dict[RequestKey, _Lease] = {}
        self._ended: Newest[RequestKey, _Lease] = Newest(max_ended)
        #: Ended, but with a send under way: vLLM has not heard of the end.
        self._pinned: dict[RequestKey, _Lease] = {}
        self._finished: list[RequestKey] = []
        self._outcomes: deque[LeaseOutcome] = deque(maxlen=max_ended)
        self._latest_end_s = math.inf

    def open(self, key: RequestKey, lease_s: float) -> None:
        """Hold from now for `lease_s`. Opening twice, or again after the end, changes nothing."""
        lease = self._find(key) or self._new_lease(lease_s)
        self._step(key, lease, LeaseEvent.OPENED)

    def renew(self, keys: Sequence[RequestKey]) -> list[LeaseState]:
        """Start each lease's time again, up to MAX_LEASE_TIMES in all; HELD if it is in force."""
        self._sweep()
        return [self._renew(key) for key in keys]

    def release(self, keys: Sequence[RequestKey], reader: Reader, num_readers: int = 1) -> list[LeaseState]:
        """`reader` needs each lease no more; HELD if it was in force all the time. With the last one it ends.

        Repeating it gives the same reader the same answer, and counts once.

        Args:
            num_readers: how many workers of D read from this worker and will release. A number that is not > 0, or
                not the one that another reader of the same lease gave, is answered with MISCOUNTED.
        """
        self._sweep()
        return [self._release(key, reader, num_readers) for key in keys]

    def pin(self, key: RequestKey) -> bool:
        """A send from the blocks begins: until `unpin`, `take_finished` keeps back the end of this lease.

        False, and nothing is pinned, unless the lease is in force: there may be something else in the blocks.
        """
        lease = self._in_force(key)
        if lease is not None:
            lease.num_pins += 1
        return lease is not None

    def pin_under_way(self, key: RequestKey) -> None:
        """As `pin`, for a send that began before the lease was opened.

        The lease may have ended by now (when the engine drains, none lasts); but vLLM has not heard of it before the
        next `take_finished`.
        """
        lease = self._active.get(key) or self._pinned.get(key)
        if lease is None and key in self._finished:
            self._finished.remove(key)
            lease = self._pinned[key] = self._ended.get(key) or _unopened()
        if lease is not None:
            lease.num_pins += 1

    def unpin(self, key: RequestKey) -> None:
        """That send has ended."""
        lease = self._active.get(key) or self._pinned.get(key)
        if lease is None or lease.num_pins == 0:
            return
        lease.num_pins -= 1
        if lease.num_pins == 0 and self._pinned.pop(key, None) is not None:
            self._finished.append(key)

    def is_open(self, key: RequestKey) -> bool:
        """Whether it is in force now."""
        return self._in_force(key) is not None

    def end_within(self, limit_s: float) -> None:
        """From now on no lease, also none opened or renewed later, lasts longer than until `limit_s` from now."""
        self._latest_end_s = min(self._latest_end_s, self._clock() + limit_s)
        for lease in self._active.values():
            lease.ends_at_s = min(lease.ends_at_s, self._latest_end_s)

    def are_known(self, keys: Iterable[RequestKey]) -> bool:
        """Whether all of them have been opened, and not been forgotten since."""
        return all(key in self._active or key in self._ended for key in keys)

    def take_finished(self) -> list[RequestKey]:
        """Leases that ended since the last call, by release or by time, and are not pinned; each exactly once."""
        self._sweep()
        finished, self._finished = self._finished, []
        return finished

    def take_outcomes(self) -> list[LeaseOutcome]:
        """How leases ended since the last call; the oldest are forgotten where nobody asks."""
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    @property
    def num_active(self) -> int:
        """Leases whose blocks vLLM must keep."""
        return len(self._active) + len(self._pinned)

    def _new_lease(self, lease_s: float) -> _Lease:
        return _Lease(lease_s, self._end_after(lease_s), self._end_after(MAX_LEASE_TIMES * lease_s))

    def _end_after(self, lease_s: float) -> float:
        return min(self._clock() + lease_s, self._latest_end_s)

    def _in_force(self, key: RequestKey) -> _Lease | None:
        """Looked up without a sweep of all: this is asked for each lease, and often."""
        lease = self._active.get(key)
        return lease if lease is not None and lease.ends_at_s > self._clock() else None

    def _find(self, key: RequestKey) -> _Lease | None:
        return self._active.get(key) or self._ended.get(key)

    def _renew(self, key: RequestKey) -> LeaseState:
        lease = self._find(key) or _unopened()
        state = self._step(key, lease, LeaseEvent.RENEW)
        if lease.phase is LeasePhase.OPEN:
            lease.ends_at_s = min(self._end_after(lease.lease_s), lease.latest_s)
        return state

    def _release(self, key: RequestKey, reader: Reader, num_readers: int) -> LeaseState:
        lease = self._find(key) or _unopened()
        event = lease.event_of(reader, num_readers)
        if event in (LeaseEvent.RELEASE, LeaseEvent.RELEASE_OF_PART):
            lease.readers.add(reader)
            lease.num_readers = num_readers
        return self._step(key, lease, event)

    def _sweep(self) -> None:
        """End every lease whose time is over, wherever it stands in the table."""
        now_s = self._clock()
        for key, lease in [(key, lease) for key, lease in self._active.items() if lease.ends_at_s <= now_s]:
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
        self._outcomes.append(LeaseOutcome(key, lease.phase))
        if lease.num_pins:
            self._pinned[key] = lease
        else:
            self._finished.append(key)
        self._ended[key] = lease


def _unopened() -> _Lease:
    return _Lease(0.0, 0.0, 0.0)
