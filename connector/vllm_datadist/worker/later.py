# SPDX-License-Identifier: Apache-2.0
"""A few threads for work that is due now or later: who waits for something holds no thread meanwhile."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from datadist_core.types import Deadline

Work = Callable[[], None]


class WorkPool:
    """Thread-safe.

    Args:
        name: of the threads: "datadist-NAME-0", ..., and "datadist-NAME-clock" for what is due later.
        num_threads: work done at the same time.
        starts_now: the threads are there from the beginning; else from the first work on.
    """

    def __init__(self, name: str, num_threads: int, log: logging.Logger, starts_now: bool = False) -> None:
        self._name = name
        self._num_threads = num_threads
        self._log = log
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._later: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closed = False
        if starts_now:
            with self._changed:
                self._start()

    def now(self, work: Work) -> None:
        """Never waits. After `close` nothing is done."""
        with self._changed:
            if self._closed:
                return
            self._start()
        self._queue.put(work)

    def at(self, when_s: float, work: Work) -> None:
        """At this time of `time.monotonic`, or as soon after it as a thread is free."""
        with self._changed:
            if self._closed:
                return
            self._start()
            heapq.heappush(self._later, (when_s, next(self._order), work))
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Drop what has not begun, and wait for what has. Idempotent."""
        with self._changed:
            self._closed = True
            self._later.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        deadline = Deadline.after(timeout_s)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining_s())

    def _start(self) -> None:
        """If the process may have no more threads now, those that there are do the work, and it is tried again."""
        while (number := len(self._threads) - 1) < self._num_threads:
            name, run = ("clock", self._tick) if number < 0 else (str(number), self._work)
            thread = threading.Thread(target=run, name=f"datadist-{self._name}-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._log.error("%s cannot be started (%s): end other threads, or raise the limit", thread.name, error)
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._closed:
                continue
            try:
                work()
            except Exception:
                # A fault of ours, for whoever it was; the thread goes on for the others.
                self._log.exception("unexpected error in %s", threading.current_thread().name)

    def _tick(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                while self._later and self._later[0][0] <= now_s:
                    self._queue.put(heapq.heappop(self._later)[2])
                self._changed.wait(self._later[0][0] - now_s if self._later else None)
