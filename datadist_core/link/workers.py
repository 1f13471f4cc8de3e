# SPDX-License-Identifier: Apache-2.0
"""Threads for what may block: as many as are needed at a moment, up to a limit, and none when nothing is to be done.

Like `ThreadPoolExecutor`, but threads that are idle end, so that a burst (hundreds of peers that link at once) leaves
none behind; and they are daemons, so that a call that is stuck does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

#: A thread without work ends after this time.
IDLE_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    future: Future[Any]
    call: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Workers(Executor):
    """Thread-safe."""

    def __init__(self, max_threads: int, name: str, idle_s: float = IDLE_S) -> None:
        self._max_threads = max_threads
        self._name = name
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        #: Threads that wait for a job and that no job was put for yet; never too many.
        self._num_idle = 0
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """RuntimeError after `shutdown`, and if the system has no thread for it; then `fn` is never called."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers have been shut down")
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_threads < self._max_threads:
                self._start()
            self._jobs.put(_Job(future, partial(fn, *args, **kwargs)))  # once it is sure that somebody comes to it
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Start nothing new. Never waits for what runs: it may be stuck. Idempotent."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in range(self._num_threads):
                self._jobs.put(None)

    @property
    def num_threads(self) -> int:
        """Right now."""
        with self._lock:
            return self._num_threads

    def _start(self) -> None:
        self._num_threads += 1
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # the system has no more; those that run will come to it
            self._num_threads -= 1
            if not self._num_threads:
                raise

    def _cancel_waiting(self) -> None:
        try:
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()
        except queue.Empty:
            return

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            del job  # what it holds must not live as long as an idle thread

    def _next(self) -> _Job | None:
        """None: this thread is to end."""
        while True:
            with self._lock:
                try:
                    return self._counted(self._jobs.get_nowait())
                except queue.Empty:
                    self._num_idle += 1
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if self._num_idle:  # else a job was put for us at the last moment
                        self._num_idle -= 1
                        self._num_threads -= 1
                        return None
            else:
                with self._lock:
                    return self._counted(job)

    def _counted(self, job: _Job | None) -> _Job | None:
        """With the lock held."""
        self._num_threads -= job is None
        return job
