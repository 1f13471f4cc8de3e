# SPDX-License-Identifier: Apache-2.0
"""A limit on what an end sends in a second, for KV traffic that shares a network with others (`max_bytes_per_s`).

A token bucket: bytes that may be sent are saved up at the given rate, for a short time at most, and a data frame begins
only when there are enough for it, or for a piece that is worth a frame. Whoever finds too few, or others waiting, gets
in line and is told by the loop's sweep. Frames without data (requests, answers, cancels) are not limited, and do not
wait for data that does.

Everything here is done by the loop's owner. Without a limit there is no `RateLimit`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_SAVED_S = 0.02
"""So much is saved up at most, so that a sweep that comes late costs nothing."""
_PIECE_S = 0.002
_LEAST_SAVED_BYTES, _LEAST_PIECE_BYTES = 64 << 10, 16 << 10


@dataclass(frozen=True, slots=True)
class _Waiting:
    least_bytes: int
    then: Callable[[], None]


class RateLimit:
    """Of one end: all its connections share it.

    Args:
        wake_at: has `sweep` called at that time (monotonic).
    """

    def __init__(
        self, bytes_per_s: int, wake_at: Callable[[float], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._wake_at, self._now = wake_at, now
        self._most = max(_LEAST_SAVED_BYTES, int(bytes_per_s * _SAVED_S))
        self._piece = max(_LEAST_PIECE_BYTES, int(bytes_per_s * _PIECE_S))
        self._saved = float(self._most)
        self._saved_at_s = now()
        self._line: deque[_Waiting] = deque()
        self._called = False
        self._due_s = math.inf

    def take(self, wanted: int, then: Callable[[], None]) -> int:
        """How many of `wanted` bytes may be sent now. 0: `then` is called, once, when it is worth asking again."""
        self._save()
        least = min(wanted, self._piece)
        if (self._line and not self._called) or self._saved < least:
            self._line.append(_Waiting(least, then))
            self._set_due()
            return 0
        self._called = False
        taken = min(wanted, int(self._saved))
        self._saved -= taken
        return taken

    def sweep(self) -> float:
        """Call those in line if it is time. Returns when to look again."""
        if self._now() >= self._due_s:
            self._save()
            while self._line and self._saved >= self._line[0].least_bytes:
                first = self._line.popleft()
                self._called = True  # once: then it gets in line behind the others
                first.then()
                self._called = False
            self._set_due()
        return self._due_s

    def _save(self) -> None:
        now_s = self._now()
        self._saved = min(self._most, self._saved + (now_s - self._saved_at_s) * self._bytes_per_s)
        self._saved_at_s = now_s

    def _set_due(self) -> None:
        """When there is enough for the first in line."""
        self._due_s = math.inf
        if self._line:
            self._due_s = self._saved_at_s + max(0.0, self._line[0].least_bytes - self._saved) / self._bytes_per_s
            self._wake_at(self._due_s)
