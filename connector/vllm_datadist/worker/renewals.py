# SPDX-License-Identifier: Apache-2.0
"""Runs `handoff.renewal` in one thread: asks P for what is due, and looks again when the next lease is.

It never waits for a link: a link is asked for when a lease is first watched, which also takes that work out of the
load itself, and the thread looks again later.
"""

from __future__ import annotations

import logging
import threading
import time

from datadist_core.errors import LLMException
from datadist_core.types import Deadline

from ..handoff.renewal import RenewalTable, Watched
from ..messages import Endpoint, LeaseState, RemoteLease, RequestKey
from .lease_calls import CALL_TIMEOUT_S, LeaseCalls
from .peers import PeerDirectory


class Renewals:
    """Thread-safe. Its thread starts with the first lease."""

    def __init__(self, peers: PeerDirectory, leases: LeaseCalls, log: logging.Logger) -> None:
        self._peers = peers
        self._leases = leases
        self._log = log
        self._changed = threading.Condition()
        self._table = RenewalTable()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint) -> None:
        """Renew at that worker of P now and from now on, until `unwatch` or the lease's end there."""
        with self._changed:
            if self._closed:
                return
            self._table.watch(key, remote, endpoint, time.monotonic())
            self._start()
            self._changed.notify_all()
        self._peers.prepare(endpoint)

    def unwatch(self, key: RequestKey) -> None:
        with self._changed:
            self._table.unwatch(key)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._table.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CALL_TIMEOUT_S)

    def num_watched(self) -> int:
        with self._changed:
            return len(self._table)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="datadist-renew", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (due := self._await_due()) is not None:
            for endpoint, watched in due.items():
                self._renew(endpoint, watched)

    def _await_due(self) -> dict[Endpoint, list[Watched]] | None:
        """Leases to renew now, by peer; None when closed."""
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                due = self._table.take_due(now_s)
                if due:
                    return due
                next_s = self._table.next_due_s()
                self._changed.wait(None if next_s is None else max(0.0, next_s - now_s))
        return None

    def _renew(self, endpoint: Endpoint, watched: list[Watched]) -> None:
        try:
            states = self._ask(endpoint, watched)
        except LLMException as error:
            self._log.info("leases at %s:%d were not renewed: %s", endpoint.host, endpoint.port, error)
            with self._changed:
                self._table.unanswered(watched, time.monotonic())
        except Exception:
            # A fault of ours. The thread goes on for the others, and asks for these again.
            self._log.exception("leases at %s:%d: unexpected error in a renewal", endpoint.host, endpoint.port)
            with self._changed:
                self._table.unanswered(watched, time.monotonic())
        else:
            with self._changed:
                if states is None:
                    self._table.no_link(watched, time.monotonic())
                else:
                    self._table.answered(watched, states, time.monotonic())

    def _ask(self, endpoint: Endpoint, watched: list[Watched]) -> list[LeaseState] | None:
        """None: there is no link yet."""
        future = self._peers.prepare(endpoint)
        if not future.done() or future.exception() is not None:
            return None
        return self._leases.renew(endpoint, [w.remote.key for w in watched], Deadline.after(CALL_TIMEOUT_S))
