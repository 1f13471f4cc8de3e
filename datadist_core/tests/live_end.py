# SPDX-License-Identifier: Apache-2.0
"""An LLMDataDist in a process of its own that can die, stop and hang in all the ways processes do."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Iterator

import numpy as np

from datadist_core import BlocksCacheKey, LLMDataDist, LLMRole
from datadist_core.testing.lossy_network import in_namespace
from datadist_core.testing.remote import RemoteObject
from datadist_core.tests.core_ends import LINK_MS, config, filled_cache, manager, remote_info

ANSWER_TIMEOUT_S = 60.0


def live_end(cluster_id: int, listen: str | None, heartbeat_ms: int = 4000, backend: str = "auto") -> LLMDataDist:
    made = config(backend, listen)
    made.heartbeat_interval = heartbeat_ms
    end = LLMDataDist(LLMRole.MIX, cluster_id)
    end.init(made)
    return end


class LiveEnd:
    """What lives in the process; its cache is filled with `seed`."""

    def __init__(
        self, cluster_id: int, listen: str | None, heartbeat_ms: int = 4000, backend: str = "auto", seed: int = 1
    ) -> None:
        self.end = live_end(cluster_id, listen, heartbeat_ms, backend)
        self.cache = filled_cache(self.end, seed)
        self.lost: list[tuple[float, int, str]] = []
        self.end.on_link_lost(lambda cluster, error: self.lost.append((time.monotonic(), cluster, str(error))))

    def address(self) -> tuple[str, int]:
        address = self.end.listen_address
        assert address is not None
        return address.host, address.port

    def link(self, cluster_id: int, host: str, port: int, timeout_ms: int = LINK_MS) -> tuple[str, str]:
        _, each = self.end.link_clusters([remote_info(cluster_id, host, port)], timeout=timeout_ms)
        return each[0].name, str(self.end.link_failure(cluster_id))

    def links(self) -> set[int]:
        return {link.peer.cluster_id for link in self.end._open().links.links()}

    def losses(self) -> list[tuple[float, int, str]]:
        """When (monotonic, the same clock in all processes of a host), which cluster, why."""
        return self.lost

    def pull(self, cluster_id: int, block: int) -> np.ndarray:
        manager(self.end).pull_blocks(BlocksCacheKey(cluster_id), self.cache, [block], [block])
        return self.cache.numpy()[0][block].copy()

    def fork(self) -> int:
        """A child as `multiprocessing` makes it by default: it holds what this process has open, and lives on."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def fork_in_c(self) -> int:
        """As `fork`, but by a library that Python knows nothing of."""
        pid: int = ctypes.CDLL(None).fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def hang(self, path: str) -> None:
        """Let no Python thread run, as a library that keeps the interpreter lock does, until that file is unlocked."""
        with open(path) as file:
            ctypes.PyDLL(None).flock(file.fileno(), fcntl.LOCK_EX)

    def be_patient(self) -> None:
        """Give nobody up for being silent."""
        self.end._open().links._heartbeats._most_silent_looks = lambda link: 1 << 30

    def finalize(self) -> float:
        """How long it took."""
        started_s = time.monotonic()
        self.end.finalize()
        return time.monotonic() - started_s


def hold_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@contextlib.contextmanager
def started(cluster_id: int, listen: str | None = "127.0.0.1:0", *more: object) -> Iterator[RemoteObject]:
    """A `LiveEnd` in a process of its own; SIGKILLed at the end."""
    remote = RemoteObject(LiveEnd, (cluster_id, listen, *more), ANSWER_TIMEOUT_S, forkserver=True)
    try:
        yield remote
    finally:
        remote.kill()


@contextlib.contextmanager
def started_in(namespace: str, cluster_id: int, listen: str | None, *more: object) -> Iterator[RemoteObject]:
    """The same, in a network namespace."""
    remote = RemoteObject(
        in_namespace, (namespace, LiveEnd, (cluster_id, listen, *more)), ANSWER_TIMEOUT_S, forkserver=True
    )
    try:
        yield remote
    finally:
        remote.kill()


@contextlib.contextmanager
def stopped(remote: RemoteObject) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block."""
    os.kill(remote.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(remote.pid, signal.SIGCONT)
