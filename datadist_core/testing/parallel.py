# SPDX-License-Identifier: Apache-2.0
"""Running a few calls at once and waiting for things to become true, always within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..errors import TimedOut
from ..types import Deadline

WAIT_S = 30.0
"""How long anything here waits before the test fails. Generous: it is a bound, never a measurement."""


def run_all(calls: Sequence[Callable[[], object]], timeout_s: float = 2 * WAIT_S) -> list[BaseException | None]:
    """Run all `calls` at once, each in a thread; what each of them raised, None for those that returned.

    Raises TimedOut if one is still running after `timeout_s`. Its thread is left behind, but never keeps the
    process from ending.
    """
    tasks = [_Task(call) for call in calls]
    deadline = Deadline.after(timeout_s)
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(deadline.timeout())
        if task.is_alive():
            raise TimedOut(f"{task.call} did not return within {timeout_s} s")
    return [task.error for task in tasks]


def require_all(calls: Sequence[Callable[[], object]], timeout_s: float = 2 * WAIT_S) -> None:
    """`run_all`, raising the first error."""
    for error in run_all(calls, timeout_s):
        if error is not None:
            raise error


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether `condition` becomes true within `timeout_s`. For things that nobody announces."""
    deadline = Deadline.after(timeout_s)
    pause = threading.Event()
    while not condition():
        if deadline.expired:
            return False
        pause.wait(0.005)
    return True


class _Task(threading.Thread):
    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(name="datadist-test-task", daemon=True)
        self.call = call
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.call()
        except BaseException as error:
            self.error = error
