# SPDX-License-Identifier: Apache-2.0
"""A worker's calls to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .network import Answering, Call, LinkEnd

if TYPE_CHECKING:
    from .worker import SimWorker

CALL_TIMEOUT_S = 5.0


def ask(
    worker: SimWorker,
    end: LinkEnd | None,
    perform: Callable[[SimWorker, Answering], None],
    timeout_s: float,
    done: Answering,
) -> None:
    """`perform(worker, answer)` at the other end. `done` hears of the end once, unless the caller has died."""
    call = Call(worker.network, end, lambda outcome: worker.act(lambda: done(outcome)))
    call.start(perform, lambda end_it: worker.wake_after(timeout_s, end_it))
