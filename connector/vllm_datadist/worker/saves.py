# SPDX-License-Identifier: Apache-2.0
"""P's leases among threads: the engine opens and polls, the core's service threads renew and release.

The leases themselves are in `handoff.lease`. D may be faster than P's next step: a call for a lease that has not been
opened yet waits for it, for a bounded time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..handoff.lease import LeaseOutcome, Leases, Reader
from ..messages import LeaseState, RequestKey

#: How long a call waits for a lease that has not been opened yet.
ARRIVAL_WAIT_S = 2.0


class LeaseTable:
    """All leases of one worker. Thread-safe.

    Args:
        clock: monotonic seconds.
        arrival_wait_s: how long a call waits for a lease that has not been opened yet.
        max_ended: how many ended leases are remembered, to answer late or repeated calls.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        arrival_wait_s: float = ARRIVAL_WAIT_S,
        max_ended: int = 4096,
    ) -> None:
        self._arrival_wait_s = arrival_wait_s
        self._changed = threading.Condition()
        self._leases = Leases(clock, max_ended)

    def open(self, key: RequestKey, lease_s: float) -> None:
        """Hold from now for `lease_s`. Opening twice, or again after the end, changes nothing."""
        with self._changed:
            self._leases.open(key, lease_s)
            self._changed.notify_all()

    def renew(self, keys: Sequence[RequestKey]) -> list[LeaseState]:
        """Start each lease's time again; HELD if it is in force."""
        with self._changed:
            self._await_opened(keys)
            return self._leases.renew(keys)

    def release(self, keys: Sequence[RequestKey], reader: Reader, num_readers: int = 1) -> list[LeaseState]:
        """`reader`, one of so many, needs each lease no more; HELD if it was in force all the time. With the last one
        it ends. Repeating it gives the same reader the same answer."""
        with self._changed:
            self._await_opened(keys)
            states = self._leases.release(keys, reader, num_readers)
            self._changed.notify_all()
            return states

    def take_finished(self) -> list[RequestKey]:
        """Leases that ended since the last call, by release or by time; each exactly once."""
        with self._changed:
            return self._leases.take_finished()

    def take_outcomes(self) -> list[LeaseOutcome]:
        """How leases ended since the last call."""
        with self._changed:
            return self._leases.take_outcomes()

    def end_within(self, limit_s: float) -> None:
        """From now on no lease, also none opened or renewed later, lasts longer than until `limit_s` from now."""
        with self._changed:
            self._leases.end_within(limit_s)

    def wait_until_none(self, limit_s: float) -> int:
        """Wait until no lease is in force. Returns how many still are after `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._leases.num_active == 0, timeout=limit_s)
            return self._leases.num_active

    @property
    def lock(self) -> threading.Condition:
        """Guards `unlocked`, and whatever else has to change together with it. Notified when a lease may have ended."""
        return self._changed

    @property
    def unlocked(self) -> Leases:
        """The leases themselves: only with `lock` held."""
        return self._leases

    @property
    def num_active(self) -> int:
        with self._changed:
            return self._leases.num_active

    def _await_opened(self, keys: Sequence[RequestKey]) -> None:
        self._changed.wait_for(lambda: self._leases.are_known(keys), timeout=self._arrival_wait_s)
