# SPDX-License-Identifier: Apache-2.0
"""The one io thread of a tcp backend: it alone touches the sockets and everything that hangs on them.

Other threads hand it calls with `post`, or `call` if they need the result. Hence nothing below needs a lock, and
whatever a call made by another thread did to a transfer (cancel, disconnect) is true once that call is back.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ..errors import ClosedError, TimedOut

T = TypeVar("T")
Handler = Callable[[int], None]

READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
_JOIN_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 30.0


class IoLoop:
    """An epoll loop in a thread.

    Args:
        sweep: called when a point in time that was given to `wake_at` has come; returns the next one (`math.inf`
            for none), which must be the earliest that is still of interest.
        teardown: called once in the loop's thread, as its last act.
    """

    def __init__(self, sweep: Callable[[], float], teardown: Callable[[], None]) -> None:
        self._sweep, self._teardown = sweep, teardown
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._handlers: dict[int, Handler] = {}
        self._stopping = False
        self._woken = False
        self._sweep_at = math.inf
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, READABLE)
        self._thread = threading.Thread(target=self._run, name="datadist-tcp-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what was posted, tear down, and wait for that. Idempotent; in the loop's thread it doesn't wait."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake_fd, 1)
        if not self._inside:
            self._thread.join(_JOIN_TIMEOUT_S)

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` run in the loop's thread. It must not raise. Raises ClosedError after `stop`."""
        with self._lock:
            if self._stopping:
                raise ClosedError("the tcp backend is closed")
            self._commands.append(command)
            if not self._woken:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the loop's thread and return what it returns or raise what it raises.

        Raises ClosedError after `stop`.
        """
        if self._inside:
            return function()
        result: Future[T] = Future()
        self.post(lambda: _resolve(result, function))
        try:
            return result.result(_CALL_TIMEOUT_S)
        except FutureTimeoutError:
            raise TimedOut("the tcp backend's io thread is stuck, perhaps in a completion callback") from None

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def rewatch(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def wake_at(self, at_s: float) -> None:
        """Have `sweep` called at that time (monotonic) or soon after. Only in the loop's thread."""
        self._sweep_at = min(self._sweep_at, at_s)

    @property
    def _inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            while not (self._stopping and not self._commands):
                self._turn()
        finally:
            self._finish()

    def _turn(self) -> None:
        for fd, events in self._epoll.poll(self._timeout_s()):
            if fd == self._wake_fd:
                self._run_commands()
            elif fd in self._handlers:
                # It may be a newcomer under the number of one that was closed a moment ago: nothing is lost by
                # asking that one as well.
                self._handlers[fd](events)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = math.inf
            self._sweep_at = min(self._sweep_at, self._sweep())

    def _timeout_s(self) -> float | None:
        return None if math.isinf(self._sweep_at) else max(0.0, self._sweep_at - time.monotonic())

    def _run_commands(self) -> None:
        with self._lock:
            os.eventfd_read(self._wake_fd)
            self._woken = False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _finish(self) -> None:
        with self._lock:
            self._stopping = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        self._teardown()
        with self._lock:
            self._epoll.close()
            os.close(self._wake_fd)


def _resolve(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
