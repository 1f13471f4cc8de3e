# SPDX-License-Identifier: Apache-2.0
"""P's leases: how long blocks are held for a hand-off, and the proof that they were.

A lease is opened by a step of P's engine and ended by D's release or by time, each lease by its own clock. D reads
P's memory without P taking part, so the only proof that it read the right bytes is that the blocks were held until the
release after the read: `release` answers HELD only then. D may be faster than P's next step: a call for a lease that
has not been opened yet waits for it, for a bounded time.

Thread-safe: the engine opens and polls, the core's service threads renew and release.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..messages import LeaseState, RequestKey


@dataclass(slots=True)
class _Lease:
    lease_s: float
    ends_at_s: float


class LeaseTable:
    """All leases of one worker.

    Args:
        clock: monotonic seconds.
        arrival_wait_s: how long a call waits for a lease that has not been opened yet.
        max_ended: how many ended leases are remembered, to answer late or repeated calls.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, arrival_wait_s: float = 2.0, max_ended: int = 4096
    ) -> None:
        self._clock = clock
        self._arrival_wait_s = arrival_wait_s
        self._max_ended = max_ended
        self._changed = threading.Condition()
        self._active: dict[RequestKey, _Lease] = {}
        self._ended: OrderedDict[RequestKey, LeaseState] = OrderedDict()
        self._finished: list[RequestKey] = []
        self._num_expired = 0

    def open(self, key: RequestKey, lease_s: float) -> None:
        """Hold from now for `lease_s`. Opening twice, or again after the end, changes nothing."""
        with self._changed:
            if key not in self._active and key not in self._ended:
                self._active[key] = _Lease(lease_s, self._clock() + lease_s)
                self._changed.notify_all()

    def renew(self, keys: Sequence[RequestKey]) -> list[LeaseState]:
        """Start each lease's time again; HELD if it is in force."""
        with self._changed:
            self._await_opened(keys)
            return [self._renew(key) for key in keys]

    def release(self, keys: Sequence[RequestKey]) -> list[LeaseState]:
        """End each lease; HELD if it was in force all the time. Repeating it gives the same answer."""
        with self._changed:
            self._await_opened(keys)
            return [self._release(key) for key in keys]

    def take_finished(self) -> list[RequestKey]:
        """Leases that ended since the last call, by release or by time; each exactly once."""
        with self._changed:
            self._sweep()
            finished, self._finished = self._finished, []
            return finished

    def take_num_expired(self) -> int:
        """Leases that ended by time since the last call."""
        with self._changed:
            count, self._num_expired = self._num_expired, 0
            return count

    @property
    def num_active(self) -> int:
        with self._changed:
            return len(self._active)

    def _await_opened(self, keys: Sequence[RequestKey]) -> None:
        self._changed.wait_for(
            lambda: all(key in self._active or key in self._ended for key in keys), timeout=self._arrival_wait_s
        )
        self._sweep()

    def _renew(self, key: RequestKey) -> LeaseState:
        lease = self._active.get(key)
        if lease is not None:
            lease.ends_at_s = self._clock() + lease.lease_s
            return LeaseState.HELD
        ended = self._ended.get(key, LeaseState.UNKNOWN)
        return LeaseState.RELEASED if ended is LeaseState.HELD else ended

    def _release(self, key: RequestKey) -> LeaseState:
        if key in self._active:
            self._end(key, LeaseState.HELD)
        return self._ended.get(key, LeaseState.UNKNOWN)

    def _sweep(self) -> None:
        """End every lease whose time is over, wherever it stands in the table."""
        now_s = self._clock()
        for key in [key for key, lease in self._active.items() if lease.ends_at_s <= now_s]:
            self._num_expired += 1
            self._end(key, LeaseState.EXPIRED)

    def _end(self, key: RequestKey, state: LeaseState) -> None:
        del self._active[key]
        self._finished.append(key)
        self._ended[key] = state
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
