# SPDX-License-Identifier: Apache-2.0
"""Runs D's loads: does what `handoff.load` says, in threads and on the real clock.

A load runs in one thread from its start to its end: each effect is performed there, and its outcome is the machine's
next event, so there is no change of threads within a load. Every load ends by its deadline and is reported exactly
once, whatever happens to it, because vLLM keeps the request's blocks until then.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from datadist_core.errors import LLMException
from datadist_core.types import Deadline

from ..handoff.load import RELINK_PAUSE_S, Effect, LoadEnd, LoadMachine, LoadTable
from ..messages import Endpoint, LoadJob, ReleaseJob, RequestKey
from .lease_calls import LeaseCalls
from .peers import Peer, PeerDirectory
from .pulls import Moved


class Puller(Protocol):
    def pull(self, peer: Peer, job: LoadJob, deadline: Deadline) -> list[Moved]: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended. `error` is None if the blocks hold P's KV cache."""

    key: RequestKey
    moved: tuple[Moved, ...]
    error: LLMException | None


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
        self._table = LoadTable()
        self._runs: dict[RequestKey, _LoadRun] = {}
        self._moved: dict[RequestKey, tuple[Moved, ...]] = {}
        self._closing = threading.Event()
        self._load_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._release_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [self._thread(f"datadist-load-{i}", self._load_queue) for i in range(limits.num_threads)]
        self._threads.append(self._thread("datadist-release", self._release_queue))

    def submit_load(self, job: LoadJob, endpoint: Endpoint) -> None:
        """Start a load. The same key again, while it runs, changes nothing."""
        machine = LoadMachine(job, endpoint, time.monotonic(), self._limits.load_timeout_s)
        run = _LoadRun(machine, self._peers, self._leases, self._puller, self._log)
        with self._lock:
            if self._closing.is_set() or not self._table.add(machine):
                return
            self._runs[job.key] = run
        self._load_queue.put(lambda: self._run(run))

    def fail_load(self, job: LoadJob, error: LLMException) -> None:
        """Report a load that cannot even be started."""
        self._report(LoadEnd(job.key, error), ())

    def submit_release(self, job: ReleaseJob, endpoint: Endpoint) -> None:
        self._release_queue.put(lambda: self._release_unused(job, endpoint))

    def cancel(self, key: RequestKey) -> None:
        """Nobody wants this load any more: it ends soon; now if it waits for a thread. It is reported all the same."""
        with self._lock:
            load = self._table.cancel(key)
            if load is None:
                return
            run = self._runs[key]
            run.cancelled.set()
            has_not_begun = self._table.take(load)
        if has_not_begun:
            self._drive(run)  # there is nothing to wait for

    def take_results(self) -> list[LoadResult]:
        """Loads that ended since the last call; each exactly once."""
        with self._lock:
            return [LoadResult(end.key, self._moved.pop(end.key, ()), end.error) for end in self._table.take_ends()]

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._closing.set()
        with self._lock:
            for load in self._table.cancel_all():
                self._runs[load.job.key].cancelled.set()
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

    def _run(self, run: _LoadRun) -> None:
        with self._lock:
            is_ours = self._table.take(run.machine)
        if is_ours:
            self._drive(run)

    def _drive(self, run: _LoadRun) -> None:
        job, request_id = run.machine.job, run.machine.job.key.request_id
        try:
            lets_go = run.to_its_end()
            error = run.machine.error
        except Exception as failure:
            # A fault of ours. It must not take the thread along, nor leave vLLM waiting for the request.
            self._log.exception("request %s: unexpected error in a load", request_id)
            lets_go, error = False, LLMException(f"unexpected error: {failure!r}")
        if error is not None and not run.machine.is_cancelled:
            self._log.error("request %s: load failed: %s", request_id, error)
        if lets_go and not self._closing.is_set():
            self.submit_release(ReleaseJob(job.key, job.remote), run.machine.endpoint)
        self._report(LoadEnd(job.key, error), tuple(run.moved) if error is None else ())

    def _report(self, end: LoadEnd, moved: tuple[Moved, ...]) -> None:
        with self._lock:
            self._runs.pop(end.key, None)
            self._moved[end.key] = moved
            self._table.report(end)

    def _release_unused(self, job: ReleaseJob, endpoint: Endpoint) -> None:
        deadline = Deadline.after(self._limits.link_timeout_s)
        try:
            with self._peers.linked(endpoint, deadline):
                self._leases.release(endpoint, [job.remote.key], job.key, deadline)
        except LLMException as error:
            self._log.info(
                "request %s: P was not told that nothing is needed (%s); its lease ends by itself",
                job.key.request_id,
                error,
            )


class _LoadRun:
    """One load's driver: performs what the machine asks for, until it has ended."""

    def __init__(
        self, machine: LoadMachine, peers: PeerDirectory, leases: LeaseCalls, puller: Puller, log: logging.Logger
    ) -> None:
        self.machine = machine
        self.cancelled = threading.Event()
        self.moved: list[Moved] = []
        self._peers = peers
        self._leases = leases
        self._puller = puller
        self._log = log
        self._deadline = Deadline(machine.deadline_s)
        self._peer: Peer | None = None

    def to_its_end(self) -> bool:
        """Whether P shall be told that nothing is needed."""
        effects = self.machine.started(time.monotonic())
        while Effect.REPORT not in effects:
            self._perform_at_once(effects)
            effects = self._outcome(effects[-1])
        self._perform_at_once(effects)
        return Effect.LET_GO in effects

    def _perform_at_once(self, effects: tuple[Effect, ...]) -> None:
        if Effect.DROP_LINK in effects and self._peer is not None:
            self._peers.drop(self._peer)

    def _outcome(self, effect: Effect) -> tuple[Effect, ...]:
        """Perform what takes time, and tell the machine how it ended."""
        try:
            return _PERFORM[effect](self)
        except LLMException as error:
            return self.machine.failed(error, time.monotonic())

    def _reach(self) -> tuple[Effect, ...]:
        self._peer = self._peers.ready(self.machine.endpoint, self._deadline)
        return self.machine.linked(time.monotonic())

    def _read(self) -> tuple[Effect, ...]:
        self.moved = self._puller.pull(self._linked_peer(), self.machine.job, self._deadline)
        return self.machine.read(time.monotonic())

    def _ask_release(self) -> tuple[Effect, ...]:
        job, endpoint = self.machine.job, self._linked_peer().endpoint
        [state] = self._leases.release(endpoint, [job.remote.key], job.key, self._deadline)
        return self.machine.answered(state, time.monotonic())

    def _pause(self) -> tuple[Effect, ...]:
        request_id, error = self.machine.job.key.request_id, self.machine.error
        self._log.info("request %s: %s; trying once more", request_id, error)
        self.cancelled.wait(RELINK_PAUSE_S)
        return self.machine.pause_over(time.monotonic())

    def _linked_peer(self) -> Peer:
        if self._peer is None:
            raise RuntimeError("the machine of a load went on without a link")
        return self._peer


_PERFORM: dict[Effect, Callable[[_LoadRun], tuple[Effect, ...]]] = {
    Effect.REACH: _LoadRun._reach,
    Effect.READ: _LoadRun._read,
    Effect.ASK_RELEASE: _LoadRun._ask_release,
    Effect.PAUSE: _LoadRun._pause,
}
