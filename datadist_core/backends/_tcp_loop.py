# SPDX-License-Identifier: Apache-2.0
"""Who may touch the sockets of a tcp backend and everything that hangs on them: one thread at a time, the owner.

Usually that is an io thread, when an event wakes it. But any thread may become the owner for a moment: what it wants
done (`post`, `call`) it does itself if nobody else is the owner, and otherwise leaves to whoever is, who does it before
it goes. So a request is on the wire without a thread switch, nobody waits for a transfer that is under way, and
nothing below needs a lock of its own. What a call made by another thread did to a transfer (cancel, disconnect) is
true once that call is back.

What may block (an errand: borrowing memory for a peer's request) is done by the io thread that learned of it, while it
is not the owner. Another io thread sleeps on the same events and takes over if the errand lasts: every event is told
to one of them (EPOLLONESHOT), the one that went to sleep last. There is one io thread more than may be on errands.
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
from contextlib import suppress
from typing import TypeVar

from ..errors import ClosedError, TimedOut
from ..types import Deadline

T = TypeVar("T")
Handler = Callable[[int], None]
Command = Callable[[], None]

READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
MAX_AWAY = 4
_STOP_TIMEOUT_S = 30.0
_JOIN_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 30.0


class IoLoop:
    """The right to touch what it watches, and the threads that do so when there is an event.

    Args:
        sweep: called when a point in time that was given to `wake_at` has come; returns the next one (`math.inf`
            for none), which must be the earliest that is still of interest.
        teardown: called once, by the last owner there is.
    """

    def __init__(self, sweep: Callable[[], float], teardown: Callable[[], None]) -> None:
        self._sweep, self._teardown = sweep, teardown
        self._ownership = threading.Lock()
        self._owner = 0
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._errands: deque[Command] = deque()
        self._handlers: dict[int, Handler] = {}
        self._events: dict[int, int] = {}
        self._handled_fd = -1
        self._stopping = False
        self._torn_down = threading.Event()
        self._sweep_at = math.inf
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, READABLE)
        self._threads: list[threading.Thread] = []
        self._num_running = self._num_away = 0
        self._sleepers: dict[int, float] = {}

    def start(self) -> None:
        with self._lock:
            self._start_thread()

    def stop(self) -> None:
        """Finish what was posted, tear down, and wait for that. Idempotent; an io thread or the owner doesn't wait."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._nudge()
        if self.owned or threading.current_thread() in self._threads:
            return
        self._torn_down.wait(_STOP_TIMEOUT_S)
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        for thread in list(self._threads):
            thread.join(deadline.timeout())

    @property
    def owned(self) -> bool:
        """Whether the calling thread is the owner."""
        return self._owner == threading.get_ident()

    def post(self, command: Command) -> None:
        """Have the owner run `command`: this thread, at once, if nobody else is. It must not raise.

        The owner itself comes back to it later. Raises ClosedError after `stop`.
        """
        with self._lock:
            if self._stopping:
                raise ClosedError("the tcp backend is closed")
            self._commands.append(command)
        self._run_commands()

    def call(self, function: Callable[[], T]) -> T:
        """Have the owner run `function`; return what it returns or raise what it raises.

        Raises ClosedError after `stop`.
        """
        if self.owned:
            return function()
        if self._ownership.acquire(blocking=False):
            return self._call_as_owner(function)
        result: Future[T] = Future()
        self.post(lambda: _resolve(result, function))
        try:
            return result.result(_CALL_TIMEOUT_S)
        except FutureTimeoutError:
            raise TimedOut("the tcp backend is stuck, perhaps in a completion callback") from None

    # For the owner

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd], self._events[fd] = handler, events
        self._epoll.register(fd, events | select.EPOLLONESHOT)

    def rewatch(self, fd: int, events: int) -> None:
        self._events[fd] = events
        if fd != self._handled_fd:
            self._epoll.modify(fd, events | select.EPOLLONESHOT)

    def unwatch(self, fd: int) -> None:
        del self._handlers[fd], self._events[fd]
        self._epoll.unregister(fd)

    def wake_at(self, at_s: float) -> None:
        """Have `sweep` called at that time (monotonic) or soon after."""
        self._sweep_at = min(self._sweep_at, at_s)
        self._nudge_unless_somebody_wakes()

    def send_on_errand(self, errand: Command) -> None:
        """Have an io thread run it, not as the owner. It must not raise. After `stop` it may be dropped."""
        self._errands.append(errand)
        if threading.current_thread() not in self._threads:  # they look for errands after every turn
            self._nudge()

    # Becoming the owner

    def _call_as_owner(self, function: Callable[[], T]) -> T:
        """With the ownership acquired."""
        try:
            self._owner = threading.get_ident()
            if self._stopping:
                raise ClosedError("the tcp backend is closed")
            self._run_posted()
            return function()
        finally:
            self._owner = 0
            self._ownership.release()
            self._run_commands()

    def _run_commands(self) -> None:
        """Run what was posted, unless somebody is the owner: who that is looks again after giving it up."""
        if self.owned:
            return
        while self._commands and self._ownership.acquire(blocking=False):
            try:
                self._owner = threading.get_ident()
                self._run_posted()
            finally:
                self._owner = 0
                self._ownership.release()

    def _run_posted(self) -> None:
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _owning(self, act: Command) -> None:
        """In an io thread: wait to be the owner, act, and do what was posted meanwhile."""
        with self._ownership:
            self._owner = threading.get_ident()
            try:
                act()
                self._run_posted()
            finally:
                self._owner = 0
        self._run_commands()

    # The io threads

    def _start_thread(self) -> None:
        """With the lock held."""
        thread = threading.Thread(target=self._run, name="datadist-tcp-io", daemon=True)
        self._num_running += 1
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                ready = self._sleep()
                self._owning(lambda: self._turn(ready))  # noqa: B023 - called at once
                if self._errands:
                    self._run_errands()
        finally:
            with self._lock:
                self._stopping = True
            self._owning(self._finish)
            self._leave()

    def _sleep(self) -> list[tuple[int, int]]:
        me = threading.get_ident()
        self._sleepers[me] = self._sweep_at
        # Once more: whoever has set it since could not know that we would sleep too long.
        self._sleepers[me] = until_s = self._sweep_at
        try:
            return self._epoll.poll(None if math.isinf(until_s) else max(0.0, until_s - time.monotonic()))
        finally:
            del self._sleepers[me]

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for fd, events in ready:
            if fd == self._wake_fd:
                self._on_nudged()
            elif fd in self._handlers:
                self._handle(fd, events)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = math.inf
            self._sweep_at = min(self._sweep_at, self._sweep())

    def _handle(self, fd: int, events: int) -> None:
        # It may be a newcomer under the number of one that was closed a moment ago: nothing is lost by asking it.
        self._handled_fd = fd
        try:
            self._handlers[fd](events)
        finally:
            self._handled_fd = -1
        if fd in self._events:
            self._epoll.modify(fd, self._events[fd] | select.EPOLLONESHOT)

    def _on_nudged(self) -> None:
        if not self._stopping:  # all have to see that
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _run_errands(self) -> None:
        while self._errands and self._go_away():
            try:
                self._run_errand()
            finally:
                with self._lock:
                    self._num_away -= 1

    def _run_errand(self) -> None:
        with suppress(IndexError):  # another thread was quicker
            errand = self._errands.popleft()
            if self._errands:
                self._nudge()
            errand()

    def _go_away(self) -> bool:
        """Whether this thread may go on an errand: one has to stay, or to come in its place."""
        with self._lock:
            if self._stopping or self._num_away == MAX_AWAY:
                return False
            self._num_away += 1
            if self._num_away == self._num_running:
                self._start_thread()
        self._nudge_unless_somebody_wakes()
        return True

    def _nudge_unless_somebody_wakes(self) -> None:
        """See to it that somebody is awake when it is time to sweep. Whoever is awake now will be."""
        if self._sweep_at < min(list(self._sleepers.values()), default=-math.inf):
            self._nudge()

    def _nudge(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _finish(self) -> None:
        if self._torn_down.is_set():
            return
        try:
            self._run_posted()
            self._teardown()
        finally:
            self._torn_down.set()

    def _leave(self) -> None:
        with self._lock:
            self._num_running -= 1
            if self._num_running:
                self._nudge()  # the next one; we may have read what was to wake it
            else:
                self._epoll.close()
                os.close(self._wake_fd)


def _resolve(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
