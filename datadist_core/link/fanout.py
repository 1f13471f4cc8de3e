# SPDX-License-Identifier: Apache-2.0
"""Many blocking calls at once, in daemon threads.

Not in a thread each: a call that names a thousand clusters must not start a thousand threads. Not in a fixed number of
threads either: the last clusters of a call would wait behind dead ones. So the calls share some threads, and whenever
none of these gets on for a moment, there are twice as many, up to a limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from ..types import Deadline

T = TypeVar("T")

#: So many threads are started at once. Few: while much is to be done they all compete with the one that has heartbeats
#: to send, and Python runs only one of them at a time.
MIN_THREADS = 8
#: And never more than these: backends let about as many peers wait at their door (shm: 128), and the clusters of one
#: call must not turn one another away.
MAX_THREADS = 120
#: If no call has ended within this time, there are more.
STALLED_S = 0.1


def run_all(name: str, calls: Sequence[Callable[[], T]], deadline: Deadline, late: T) -> list[T]:
    """Run all at the same time; one result each, in order, or `late` for those that do not end by the deadline."""
    return _Crew(name, calls).results(deadline, late)


class _Crew(Generic[T]):
    """The threads of one `run_all`."""

    def __init__(self, name: str, calls: Sequence[Callable[[], T]]) -> None:
        self._name = f"datadist-{name}"
        self._changed = threading.Condition()
        self._futures: list[Future[T]] = [Future() for _ in calls]
        self._waiting = deque(zip(calls, self._futures, strict=True))
        self._num_ended = 0
        self._num_threads = 0
        self._start(MIN_THREADS)

    def results(self, deadline: Deadline, late: T) -> list[T]:
        with self._changed:
            while self._num_ended < len(self._futures) and not deadline.expired:
                before = self._num_ended
                self._changed.wait(min(STALLED_S, deadline.remaining_s()) if self._waiting else deadline.timeout())
                if self._num_ended == before:
                    self._start(self._num_threads)
            self._waiting.clear()
        return [future.result() if future.done() else late for future in self._futures]

    def _start(self, most: int) -> None:
        """So many more threads, but not more than there are calls that wait for one."""
        for _ in range(min(most, len(self._waiting), MAX_THREADS - self._num_threads)):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                call, future = self._waiting.popleft()
            _run(call, future)
            with self._changed:
                self._num_ended += 1
                if not self._waiting:
                    self._changed.notify_all()


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
