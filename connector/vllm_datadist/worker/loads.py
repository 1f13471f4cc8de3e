# SPDX-License-Identifier: Apache-2.0
"""D's loads: each job links if needed, pulls, and has P confirm that the lease held.

P holds the blocks from before it gives the ticket until the lease ends, and a lease that has ended is never opened
again. So the release after the pull, answered HELD, proves that the blocks were held throughout. `renewals` keeps the
lease alive meanwhile; to wait for a renewal before the pull would prove nothing more, and cost a round trip. If the
link breaks after the pull, only the release is repeated over a fresh link, never the pull: P may have freed the blocks
already. Every job ends by its deadline and is reported exactly once, whatever happens to it, because vLLM keeps the
request's blocks until then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from datadist_core.errors import (
    Cancelled,
    ClosedError,
    LinkFailed,
    LLMException,
    NotYetLinked,
    PeerLost,
    TimedOut,
    Unreachable,
)
from datadist_core.types import Deadline

from ..messages import Endpoint, LeaseState, LoadJob, ReleaseJob, RequestKey
from .lease_calls import LeaseCalls, LeaseLost
from .peers import Peer, PeerDirectory
from .pulls import Moved

#: The link is gone or of no use: a fresh one may work.
LINK_BROKEN = (PeerLost, NotYetLinked, LinkFailed, Unreachable, ClosedError)
#: What trying once more may cure. A late answer alone is no reason to take the link from others who use it.
LINK_TROUBLE = (*LINK_BROKEN, TimedOut)
RELINK_PAUSE_S = 0.2


class Puller(Protocol):
    def pull(self, peer: Peer, job: LoadJob, deadline: Deadline) -> list[Moved]: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended. `error` is None if the blocks hold P's KV cache."""

    key: RequestKey
    moved: tuple[Moved, ...]
    error: LLMException | None


@dataclass(slots=True, eq=False)
class _Load:
    job: LoadJob
    endpoint: Endpoint
    deadline: Deadline
    cancelled: threading.Event = field(default_factory=threading.Event)
    moved: list[Moved] | None = None


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """`load_timeout_s`: per load, from when it was given. `num_threads`: loads at the same time."""

    load_timeout_s: float
    link_timeout_s: float
    num_threads: int


class LoadRunner:
    """Runs loads in its own threads, and releases without a load in one more. Thread-safe."""

    def __init__(
        self, peers: PeerDirectory, leases: LeaseCalls, puller: Puller, limits: LoadLimits, log: logging.Logger
    ) -> None:
        self._peers = peers
        self._leases = leases
        self._puller = puller
        self._limits = limits
        self._log = log
        self._lock = threading.Lock()
        self._loads: dict[RequestKey, _Load] = {}
        self._results: list[LoadResult] = []
        self._closing = threading.Event()
        self._load_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._release_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [self._thread(f"datadist-load-{i}", self._load_queue) for i in range(limits.num_threads)]
        self._threads.append(self._thread("datadist-release", self._release_queue))

    def submit_load(self, job: LoadJob, endpoint: Endpoint) -> None:
        """Start a load. The same key again, while it runs, changes nothing."""
        load = _Load(job, endpoint, Deadline.after(self._limits.load_timeout_s))
        with self._lock:
            if self._closing.is_set() or job.key in self._loads:
                return
            self._loads[job.key] = load
        self._load_queue.put(lambda: self._run(load))

    def fail_load(self, job: LoadJob, error: LLMException) -> None:
        """Report a load that cannot even be started."""
        self._report(LoadResult(job.key, (), error))

    def submit_release(self, job: ReleaseJob, endpoint: Endpoint) -> None:
        self._release_queue.put(lambda: self._release_unused(job, endpoint))

    def cancel(self, key: RequestKey) -> None:
        """Nobody wants this load any more: end it soon. It is reported all the same."""
        with self._lock:
            load = self._loads.get(key)
        if load is not None:
            load.cancelled.set()

    def take_results(self) -> list[LoadResult]:
        """Loads that ended since the last call; each exactly once."""
        with self._lock:
            results, self._results = self._results, []
            return results

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._closing.set()
        with self._lock:
            for load in self._loads.values():
                load.cancelled.set()
        for _ in range(self._limits.num_threads):
            self._load_queue.put(None)
        self._release_queue.put(None)
        deadline = Deadline.after(self._limits.link_timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    # --- threads ----------------------------------------------------------------------------------------------

    def _thread(self, name: str, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> threading.Thread:
        thread = threading.Thread(target=self._work_through, args=(jobs,), name=name, daemon=True)
        thread.start()
        return thread

    def _work_through(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            if not self._closing.is_set():
                job()

    def _run(self, load: _Load) -> None:
        error: LLMException | None = None
        try:
            self._load(load)
        except LLMException as failure:
            error = failure
        except Exception as failure:
            # A fault of ours. It must not take the thread along, nor leave vLLM waiting for the request.
            self._log.exception("request %s: unexpected error in a load", load.job.key.request_id)
            error = LLMException(f"unexpected error: {failure!r}")
        if error is not None and not load.cancelled.is_set():
            self._log.error("request %s: load failed: %s", load.job.key.request_id, error)
        with self._lock:
            self._loads.pop(load.job.key, None)
        self._report(LoadResult(load.job.key, tuple(load.moved or ()) if error is None else (), error))

    def _report(self, result: LoadResult) -> None:
        with self._lock:
            self._results.append(result)

    # --- one load ---------------------------------------------------------------------------------------------

    def _load(self, load: _Load) -> None:
        try:
            self._once_more_on_link_trouble(load, lambda peer: self._load_over(peer, load))
        except Cancelled:
            self._let_go(load)
            raise

    def _load_over(self, peer: Peer, load: _Load) -> None:
        if load.moved is None:
            self._check_wanted(load)
            load.moved = self._puller.pull(peer, load.job, load.deadline)
        state = self._release(peer, load)
        if state is not LeaseState.HELD:
            raise LeaseLost(f"P's lease was {state.value} when the blocks had been read")

    def _release(self, peer: Peer, load: _Load) -> LeaseState:
        """How the lease was when it ended. P may not have come to open it yet, for a while."""
        patience = load.deadline.earlier(load.job.remote.lease_s)
        while True:
            [state] = self._leases.release(peer.endpoint, [load.job.remote.key], load.deadline)
            if state is not LeaseState.UNKNOWN or patience.expired:
                return state
            self._check_wanted(load)

    def _once_more_on_link_trouble(self, load: _Load, use: Callable[[Peer], None]) -> None:
        try:
            self._with_peer(load, use)
        except LINK_TROUBLE as error:
            if load.deadline.expired or load.cancelled.wait(RELINK_PAUSE_S):
                raise
            self._log.info("request %s: %s; trying a fresh link", load.job.key.request_id, error)
            self._with_peer(load, use)

    def _with_peer(self, load: _Load, use: Callable[[Peer], None]) -> None:
        self._check_wanted(load)
        peer = self._peers.ready(load.endpoint, load.deadline)
        try:
            use(peer)
        except LINK_BROKEN:
            self._peers.drop(peer)
            raise

    def _check_wanted(self, load: _Load) -> None:
        if load.cancelled.is_set():
            raise Cancelled("the request is gone")
        if load.deadline.expired:
            raise TimedOut(f"the load did not end within {self._limits.load_timeout_s:g} s")

    def _let_go(self, load: _Load) -> None:
        """The request went away before its blocks were read: P need not wait for the lease's end."""
        if not self._closing.is_set():
            self.submit_release(ReleaseJob(load.job.key, load.job.remote), load.endpoint)

    def _release_unused(self, job: ReleaseJob, endpoint: Endpoint) -> None:
        deadline = Deadline.after(self._limits.link_timeout_s)
        try:
            with self._peers.linked(endpoint, deadline):
                self._leases.release(endpoint, [job.remote.key], deadline)
        except LLMException as error:
            self._log.info(
                "request %s: P was not told that nothing is needed (%s); its lease ends by itself",
                job.key.request_id,
                error,
            )
