# SPDX-License-Identifier: Apache-2.0
"""Many blocking calls at once, each in a daemon thread of its own.

A pool of threads would make the last clusters of a call wait behind dead ones, and would hold up the end of the
process until the slowest call is through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from ..types import Deadline

T = TypeVar("T")


def start(name: str, call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread "datadist-NAME"; the future has its result or its exception."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"datadist-{name}", daemon=True).start()
    return future


def run_all(name: str, calls: Sequence[Callable[[], T]], deadline: Deadline, late: T) -> list[T]:
    """Run all at the same time; one result each, in order, or `late` for those that do not end by the deadline."""
    futures = [start(name, call) for call in calls]
    return [_result(future, deadline, late) for future in futures]


def _result(future: Future[T], deadline: Deadline, late: T) -> T:
    try:
        return future.result(deadline.timeout())
    except FutureTimeout:
        return late
