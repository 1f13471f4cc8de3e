# SPDX-License-Identifier: Apache-2.0
"""Log lines that strangers can cause: no more than a few in a while, so that nobody can fill a disk by connecting."""

from __future__ import annotations

import logging
import threading
import time

LINES = 10
WINDOW_S = 10.0


class LimitedLog:
    """`LINES` lines in `WINDOW_S` seconds; the last of them says that more are left out. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._started_s = float("-inf")
        self._count = 0

    def log(self, level: int, text: str, *args: object) -> None:
        with self._lock:
            left_out = self._begin_window() if time.monotonic() - self._started_s > WINDOW_S else 0
            self._count += 1
            count = self._count
        if left_out:
            self._logger.log(level, "%d lines about strangers were left out", left_out)
        if count <= LINES:
            more = f" (more such lines are left out for {WINDOW_S:.0f} s)" if count == LINES else ""
            self._logger.log(level, text + more, *args)

    def _begin_window(self) -> int:
        left_out = max(0, self._count - LINES)
        self._started_s, self._count = time.monotonic(), 0
        return left_out
