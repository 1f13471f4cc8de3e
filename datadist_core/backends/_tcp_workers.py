# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may block and that nobody waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..types import Deadline

_STOP_TIMEOUT_S = 5.0

Task = Callable[[], None]


class Workers:
    """A few threads, started when there is work for them, for calls that may block. Thread-safe."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name, self._max_threads = name, max_threads
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_pending = 0
        self._stopped = False

    def put(self, task: Task) -> None:
        """Have `task`, which must not raise, run in some thread. After `stop` it is dropped."""
        with self._lock:
            if self._stopped:
                return
            self._num_pending += 1
            self._tasks.put(task)
            if len(self._threads) < min(self._num_pending, self._max_threads):
                self._start_thread()

    def stop(self) -> None:
        """Let the threads end when they have done what was put. Waits for them, unless one of them calls it."""
        with self._lock:
            self._stopped = True
            threads, self._threads = self._threads, []
        deadline = Deadline.after(_STOP_TIMEOUT_S)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.timeout())

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                del task  # what it holds must not live as long as an idle thread
                with self._lock:
                    self._num_pending -= 1
