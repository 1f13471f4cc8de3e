# SPDX-License-Identifier: Apache-2.0
"""SIGTERM with hand-offs outstanding: they are finished first, as far as vLLM gives the time.

What vLLM does (0.32). The API server gets the signal and sends SIGTERM to the engine core.
- `--shutdown-timeout 0`, the default: it kills the engine core and its workers at once, with SIGKILL. Nothing of ours
  runs any more; whoever reads from this engine finds the link gone, and fails or recomputes. The log says so at start.
- `--shutdown-timeout N`: the engine core refuses new requests, finishes those it has, and goes on as long as a request
  of its own or blocks held for a hand-off are left. Then it ends its workers in order, by the connector's `shutdown`.
  After N seconds it is killed like above.
So with N > 0 a hand-off is only cut if its lease is still in force after N seconds. `DrainNotice` sees the signal and
ends all leases a little before that (`drain_limit_s`), so that also then everything is closed in order, and D is told
that the lease is over instead of losing the link.

A worker may also be ended by itself: by Ctrl-C, which reaches all processes of a terminal, or because its engine core
was killed. vLLM calls its `shutdown` then, and waits VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS (5) before it forces it.
`close` of the worker side waits for the leases within that time: the memory is still what it was.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

#: From the end of the last lease to the end of the engine: the step that learns of it, and closing in order.
CLOSING_S = 3.0
#: vLLM forces a worker after 5 s; what is not done by then is cut.
WORKER_LIMIT_S = 4.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def drain_limit_s(wanted_s: float, shutdown_timeout_s: float) -> float:
    """How long after the signal hand-offs may go on: what is wanted (0 = all there is), within vLLM's own limit.

    A limit of 0 s is the API server's; an engine core that got the signal from somebody else is not killed.
    """
    allowed_s = max(shutdown_timeout_s / 2, shutdown_timeout_s - CLOSING_S) if shutdown_timeout_s else WORKER_LIMIT_S
    return min(wanted_s, allowed_s) if wanted_s > 0 else allowed_s


class DrainNotice:
    """Sees this process's SIGTERM, and leaves it to whoever handled it before.

    Args:
        limit_s: from the signal to the end of the last lease.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._end_s: float | None = None
        self._is_told = False

    def listen(self) -> None:
        """Where signals cannot be handled (not the main thread), or nobody handles them, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            return
        _listening.add(self)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if callable(before) and not isinstance(before, _Handler):
                signal.signal(number, _Handler(before))

    def note(self) -> None:
        """The signal has come. Only the first one counts."""
        if self._end_s is None:
            self._end_s = self._clock() + self._limit_s

    def take_limit_s(self) -> float | None:
        """Once after the signal: how many seconds are left to the leases. Else None."""
        if self._end_s is None or self._is_told:
            return None
        self._is_told = True
        return max(0.0, self._end_s - self._clock())


#: Of this process, as long as their engines are there.
_listening: WeakSet[DrainNotice] = WeakSet()


@dataclass(frozen=True, slots=True)
class _Handler:
    """In front of the one that was there before; shared by all engines that are made in this process."""

    before: Callable[[int, Any], Any]

    def __call__(self, number: int, frame: Any) -> None:
        for notice in list(_listening):
            notice.note()
        self.before(number, frame)
