# SPDX-License-Identifier: Apache-2.0
"""Calls of `connect` that are under way, so that `disconnect` ends them.

A link may end while it is made. Whoever waits for its peer then would wait in vain, perhaps for long, and what is
connected after the `disconnect` would stay behind. So each `connect` is an attempt, and asks it before it takes effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import Unreachable


class Attempt:
    """One `connect`. Thread-safe."""

    def __init__(self, peer_id: int) -> None:
        self._peer_id = peer_id
        self._lock = threading.Lock()
        self._ended = False
        self._then: list[Callable[[Unreachable], None]] = []

    def check_wanted(self) -> None:
        """Raise Unreachable if the peer was disconnected since."""
        if self._ended:
            raise self._error()

    def when_ended(self, then: Callable[[Unreachable], None]) -> None:
        """Call `then`, with the reason, when the peer is disconnected; at once if it was already. It must not wait."""
        with self._lock:
            if not self._ended:
                self._then.append(then)
                return
        then(self._error())

    def end(self) -> None:
        """Idempotent."""
        with self._lock:
            self._ended = True
            then, self._then = self._then, []
        for one in then:
            one(self._error())

    def _error(self) -> Unreachable:
        return Unreachable(f"peer {self._peer_id} was disconnected while it was being connected")


class Attempts:
    """Of one backend. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_peer: dict[int, set[Attempt]] = {}

    @contextmanager
    def begin(self, peer_id: int) -> Iterator[Attempt]:
        """Around a `connect`."""
        attempt = Attempt(peer_id)
        with self._lock:
            self._of_peer.setdefault(peer_id, set()).add(attempt)
        try:
            yield attempt
        finally:
            with self._lock:
                others = self._of_peer[peer_id]
                others.discard(attempt)
                if not others:
                    del self._of_peer[peer_id]

    def end(self, peer_id: int) -> None:
        """That peer is disconnected. Before what is connected already is taken down, so that nothing is missed."""
        with self._lock:
            attempts = list(self._of_peer.get(peer_id, ()))
        for attempt in attempts:
            attempt.end()
