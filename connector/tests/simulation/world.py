# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and the ground truth that the code under test never sees."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol

#: A schedule has some hundred.
MAX_EVENTS = 60_000


class Violation(AssertionError):
    """An invariant does not hold. `invariant` is its short name."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Process(Protocol):
    def act(self, call: Callable[[], None]) -> None:
        """Do it: now, when this process goes on, or not at all."""
        ...


class World:
    """One schedule: what happens when. The seed decides everything.

    Args:
        trace_length: how many lines of the trace are kept; 0 = none, which is faster.
    """

    def __init__(self, seed: int, trace_length: int = 120) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None], Process | None]] = []
        self.has_trace = trace_length > 0
        self._trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=trace_length)

    def after(self, seconds: float, call: Callable[[], None], process: Process | None = None) -> None:
        """Done by that process, as it can; by the world itself without one."""
        self.num_events += 1
        heappush(self._heap, (self.now + seconds, self.num_events, call, process))

    def run(self, until_s: float) -> bool:
        """Until nothing is left to happen (True), or until then, or for too many events."""
        heap = self._heap
        while heap:
            if heap[0][0] > until_s or self.num_events > MAX_EVENTS:
                return False
            self.now, _, call, process = heappop(heap)
            if process is None:
                call()
            else:
                process.act(call)
        return True

    def note(self, text: str, *args: Any) -> None:
        """A line of the trace, formatted only if it is shown."""
        if self.has_trace:
            self._trace.append((self.now, text, args))

    def trace(self) -> str:
        return "\n".join(f"{now:9.3f}  {text % args if args else text}" for now, text, args in self._trace)


class Clock:
    """A process's monotonic clock: it may run faster or slower than the world's, and jump forward."""

    def __init__(self, world: World, rate: float) -> None:
        self._world = world
        self._rate = rate
        self._since = world.now
        self._base = world.rng.uniform(0, 1e6)
        self._timers: list[_Timer] = []
        self.is_dead = False

    def __call__(self) -> float:
        return self._base + (self._world.now - self._since) * self._rate

    def at(self, clock_s: float, call: Callable[[], None], process: Process | None = None) -> _Timer:
        """When this clock shows that time or more. Never, if the process has died by then."""
        timer = _Timer(self, clock_s, call, process)
        if len(self._timers) > 64:
            self._timers = [one for one in self._timers if one.call is not None]
        self._timers.append(timer)
        self._arm(timer)
        return timer

    def after(self, seconds: float, call: Callable[[], None], process: Process | None = None) -> _Timer:
        return self.at(self() + seconds, call, process)

    def jump(self, seconds: float) -> None:
        self._base += seconds
        for timer in self._timers:
            if timer.call is not None:
                self._arm(timer)

    def _arm(self, timer: _Timer) -> None:
        self._world.after(max(0.0, timer.at_s - self()) / self._rate, timer.fire)

    def fire(self, timer: _Timer) -> None:
        if timer.call is None or self.is_dead:
            return
        if self() < timer.at_s - 1e-6:
            self._arm(timer)
            return
        call, timer.call = timer.call, None
        if timer.process is None:
            call()
        else:
            timer.process.act(call)


class _Timer:
    __slots__ = ("_clock", "at_s", "call", "process")

    def __init__(self, clock: Clock, at_s: float, call: Callable[[], None], process: Process | None) -> None:
        self._clock = clock
        self.at_s = at_s
        self.call: Callable[[], None] | None = call
        self.process = process

    def fire(self) -> None:
        self._clock.fire(self)

    def cancel(self) -> None:
        self.call = None


@contextmanager
def all_at_once() -> Iterator[None]:
    """No collection of garbage meanwhile: nearly all that a schedule makes lives as long as it does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
