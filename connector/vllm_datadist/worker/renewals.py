# SPDX-License-Identifier: Apache-2.0
"""Keeps P's leases alive while their requests queue or load at D, whether or not the engine makes steps.

One thread renews each watched lease at once, then every third of its time, all leases at one peer with one call. It
never waits for a link: a link is asked for when a lease is first watched, which also takes that work out of the load
itself, and the thread looks again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from datadist_core.errors import LLMException
from datadist_core.types import Deadline

from ..messages import Endpoint, LeaseState, RemoteLease, RequestKey
from .lease_calls import CALL_TIMEOUT_S, LeaseCalls
from .peers import PeerDirectory

#: How soon to look again for a link that is not there yet.
LINK_POLL_S = 0.5
_ENDED = (LeaseState.EXPIRED, LeaseState.RELEASED)


@dataclass(slots=True)
class _Watched:
    key: RequestKey
    remote: RemoteLease
    endpoint: Endpoint
    due_s: float

    @property
    def period_s(self) -> float:
        return self.remote.lease_s / 3


class Renewals:
    """Thread-safe. Its thread starts with the first lease."""

    def __init__(self, peers: PeerDirectory, leases: LeaseCalls, log: logging.Logger) -> None:
        self._peers = peers
        self._leases = leases
        self._log = log
        self._changed = threading.Condition()
        self._watched: dict[RequestKey, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint) -> None:
        """Renew now and from now on, until `unwatch` or the lease's end."""
        with self._changed:
            if self._closed:
                return
            self._watched[key] = _Watched(key, remote, endpoint, time.monotonic())
            self._start()
            self._changed.notify_all()
        self._peers.prepare(endpoint)

    def unwatch(self, key: RequestKey) -> None:
        with self._changed:
            self._watched.pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._watched.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CALL_TIMEOUT_S)

    def num_watched(self) -> int:
        with self._changed:
            return len(self._watched)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="datadist-renew", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (due := self._await_due()) is not None:
            for endpoint, watched in due.items():
                self._renew(endpoint, watched)

    def _look_again_soon(self, watched: list[_Watched]) -> None:
        """The link is being made, or could not be made this time."""
        soon_s = time.monotonic() + LINK_POLL_S
        with self._changed:
            for lease in watched:
                lease.due_s = min(lease.due_s, soon_s)

    def _await_due(self) -> dict[Endpoint, list[_Watched]] | None:
        """Leases to renew now, by peer; None when closed."""
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                due: defaultdict[Endpoint, list[_Watched]] = defaultdict(list)
                for watched in self._watched.values():
                    if watched.due_s <= now_s:
                        watched.due_s = now_s + watched.period_s
                        due[watched.endpoint].append(watched)
                if due:
                    return dict(due)
                next_s = min((watched.due_s for watched in self._watched.values()), default=None)
                self._changed.wait(None if next_s is None else max(0.0, next_s - now_s))
        return None

    def _renew(self, endpoint: Endpoint, watched: list[_Watched]) -> None:
        future = self._peers.prepare(endpoint)
        if not future.done() or future.exception() is not None:
            self._look_again_soon(watched)
            return
        try:
            states = self._leases.renew(endpoint, [w.remote.key for w in watched], Deadline.after(CALL_TIMEOUT_S))
        except LLMException as error:
            self._log.info("leases at %s:%d were not renewed: %s", endpoint.host, endpoint.port, error)
            return
        for lease, state in zip(watched, states, strict=True):
            if state in _ENDED:
                self._log.debug("request %s: P's lease is %s", lease.key.request_id, state.value)
                self.unwatch(lease.key)
