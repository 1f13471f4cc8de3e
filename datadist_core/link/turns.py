# SPDX-License-Identifier: Apache-2.0
"""Long work that peers ask for: a few threads for all of them, and one piece at a time for each.

So no peer can keep the others waiting for longer than its one piece takes, nor occupy the executor that answers
look-ups, and threads do not grow with links.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

from .workers import Workers

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Turns:
    """Thread-safe. Threads start when first needed.

    Args:
        num_threads: pieces of work at the same time, of different keys.
        max_waiting: pieces of one key that may wait besides the one that runs.
    """

    def __init__(self, num_threads: int, max_waiting: int, name: str) -> None:
        self._workers = Workers(num_threads, name)
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        #: A key is here while a piece of it runs, or is about to.
        self._waiting: dict[Hashable, deque[Work]] = {}

    def submit(self, key: Hashable, work: Work) -> bool:
        """Have `work` run, behind what else was asked for under `key`. False if too much waits there already.

        `work` raises nothing. Nothing runs any more after `close`.
        """
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                if len(waiting) >= self._max_waiting:
                    return False
                waiting.append(work)
                return True
            self._waiting[key] = deque()
        self._start(key, work)
        return True

    def close(self) -> None:
        """Start nothing more. What runs is not waited for. Idempotent."""
        self._workers.shutdown(cancel_futures=True)

    def _start(self, key: Hashable, work: Work) -> None:
        try:
            self._workers.submit(self._run, key, work)
        except RuntimeError as error:  # closed, or the system has no thread for it: whoever asked hears nothing
            logger.debug("work for a peer is not done: %s", error)
            with self._lock:
                self._waiting.pop(key, None)

    def _run(self, key: Hashable, work: Work) -> None:
        try:
            work()
        finally:
            self._next(key)

    def _next(self, key: Hashable) -> None:
        """The key's next piece goes behind those of other keys."""
        with self._lock:
            waiting = self._waiting.get(key)
            if not waiting:
                self._waiting.pop(key, None)
                return
            work = waiting.popleft()
        self._start(key, work)
