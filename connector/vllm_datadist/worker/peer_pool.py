# SPDX-License-Identifier: Apache-2.0
"""Threads for work that waits for peers: one peer that does not answer gets some of them, never all."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from .later import Work, WorkPool


@dataclass(slots=True)
class _Peer:
    num_running: int = 0
    waiting: deque[Work] = field(default_factory=deque)


class PeerPool:
    """Thread-safe.

    Args:
        name, num_threads, starts_now: see `WorkPool`.
        num_of_one: at most so many work for one peer at the same time; what is more waits for its turn.
    """

    def __init__(
        self, name: str, num_threads: int, num_of_one: int, log: logging.Logger, starts_now: bool = False
    ) -> None:
        self._pool = WorkPool(name, num_threads, log, starts_now)
        self._num_of_one = num_of_one
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}

    def now(self, cluster_id: int, work: Work) -> None:
        """Never waits. After `close` nothing is done."""
        with self._lock:
            peer = self._peers.setdefault(cluster_id, _Peer())
            if peer.num_running >= self._num_of_one:
                peer.waiting.append(work)
                return
            peer.num_running += 1
        self._pool.now(partial(self._run, cluster_id, work))

    def close(self, timeout_s: float) -> None:
        """Drop what has not begun, and wait for what has. Idempotent."""
        self._pool.close(timeout_s)
        with self._lock:
            self._peers.clear()

    def _run(self, cluster_id: int, work: Work) -> None:
        try:
            work()
        finally:
            following = self._next(cluster_id)
            if following is not None:
                self._pool.now(partial(self._run, cluster_id, following))

    def _next(self, cluster_id: int) -> Work | None:
        with self._lock:
            peer = self._peers.get(cluster_id)
            if peer is None:
                return None
            if peer.waiting:
                return peer.waiting.popleft()
            peer.num_running -= 1
            if not peer.num_running:
                del self._peers[cluster_id]
            return None
