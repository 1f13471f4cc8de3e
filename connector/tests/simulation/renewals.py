# SPDX-License-Identifier: Apache-2.0
"""Drives `RenewalTable` as the thread of `worker.renewals` does: one call at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException
from vllm_datadist.handoff.renewal import RenewalTable, Watched
from vllm_datadist.messages import Endpoint, RemoteLease, RequestKey

from .calls import CALL_TIMEOUT_S, ask

if TYPE_CHECKING:
    from .worker import SimWorker


class SimRenewals:
    """See the module."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table = RenewalTable()
        self._is_asking = False

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint) -> None:
        self.table.watch(key, remote, endpoint, self._worker.clock())
        self._worker.peers.link(endpoint)
        self._worker.later(0.0, self._look)

    def unwatch(self, key: RequestKey) -> None:
        self.table.unwatch(key)

    def _look(self) -> None:
        if self._is_asking:
            return
        due = self.table.take_due(self._worker.clock())
        if due:
            self._is_asking = True
            self._ask_next(deque(due.items()))
            return
        next_s = self.table.next_due_s()
        if next_s is not None:
            self._worker.clock.at(next_s, self._look, self._worker)

    def _ask_next(self, due: deque[tuple[Endpoint, list[Watched]]]) -> None:
        if not due:
            self._is_asking = False
            self._worker.later(0.0, self._look)
            return
        endpoint, watched = due.popleft()
        link = self._worker.peers.link(endpoint)
        if link is None:
            self.table.no_link(watched, self._worker.clock())
            self._ask_next(due)
            return
        keys = [one.remote.key for one in watched]

        def done(outcome: object) -> None:
            now_s = self._worker.clock()
            if isinstance(outcome, LLMException):
                self.table.unanswered(watched, now_s)
            else:
                self.table.answered(watched, outcome, now_s)  # type: ignore[arg-type]
            self._ask_next(due)

        ask(self._worker, link.near, lambda p, answer: p.on_renew(keys, answer), CALL_TIMEOUT_S, done)
