# SPDX-License-Identifier: Apache-2.0
"""Runs D's loads: does what `handoff.load` says, in threads and on the real clock.

A load has a part for each worker of P that this worker needs, each a machine of its own (`handoff.parts`). A part runs
in one thread from its start to its end: each effect is performed there, and its outcome is the machine's next event, so
there is no change of threads within it. Every load ends by its deadline and is reported exactly once, whatever happens
to it, because vLLM keeps the request's blocks until then.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from datadist_core.errors import LLMException
from datadist_core.types import Deadline

from ..counts import Awaited, Mode
from ..handoff.desk import Sources
from ..handoff.load import RELINK_PAUSE_S, Effect, LoadMachine
from ..handoff.parts import PartTable
from ..messages import Endpoint, LoadJob, ReleaseJob, RequestKey
from .lease_calls import LeaseCalls
from .load_book import LoadBook, Stopwatch, place
from .peers import Peer, PeerDirectory
from .pulls import Moved
from .releases import ReleaseRunner


class Puller(Protocol):
    def pull(self, peer: Peer, endpoint: Endpoint, job: LoadJob, deadline: Deadline) -> list[Moved]: ...


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
    """Runs loads in its own threads, and releases without a load in others (`releases`). Thread-safe."""

    def __init__(
        self,
        peers: PeerDirectory,
        leases: LeaseCalls,
        puller: Puller,
        limits: LoadLimits,
        log: logging.Logger,
        book: LoadBook | None = None,
    ) -> None:
        self._peers = peers
        self._leases = leases
        self._puller = puller
        self._limits = limits
        self._log = log
        self._book = book or LoadBook()
        self._lock = threading.Lock()
        self._table: PartTable[LoadMachine] = PartTable()
        self._runs: dict[LoadMachine, _LoadRun] = {}
        self._moved: dict[RequestKey, list[Moved]] = {}
        self._closing = threading.Event()
        self._load_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [self._thread(f"datadist-load-{i}", self._load_queue) for i in range(limits.num_threads)]
        self._releases = ReleaseRunner(peers, leases, limits.link_timeout_s, log)

    def submit_load(self, job: LoadJob, sources: Sources) -> None:
        """Start a load. The same key again, while it runs, changes nothing."""
        now_s, timeout_s = time.monotonic(), self._limits.load_timeout_s
        machines = [LoadMachine(job, source.endpoint, now_s, timeout_s, source.num_readers) for source in sources.read]
        runs = [
            _LoadRun(machine, self._peers, self._leases, self._puller, self._log, self._watch(machine))
            for machine in machines
        ]
        with self._lock:
            if not machines:  # a pipeline stage of ours that has no KV cache
                self._table.fail(job.key, None)
                return
            if self._closing.is_set() or not self._table.add(job.key, machines):
                return
            self._book.open(job.key, [run.watch for run in runs])
            self._moved[job.key] = []
            self._runs.update(zip(machines, runs, strict=True))
        for run in runs:
            self._load_queue.put(partial(self._run, run))

    def fail_load(self, job: LoadJob, error: LLMException) -> None:
        """Report a load that cannot even be started."""
        with self._lock:
            self._table.fail(job.key, error)

    def submit_release(self, job: ReleaseJob, endpoint: Endpoint, num_readers: int = 1) -> None:
        """Tell that worker of P that nothing is needed, one of so many workers of ours that do. Never waits."""
        if not self._closing.is_set():
            self._releases.submit(job, endpoint, num_readers)

    def cancel(self, key: RequestKey) -> None:
        """Nobody wants this load any more: it ends soon; now if it waits for a thread. It is reported all the same."""
        with self._lock:
            waiting = self._wake(self._table.cancel(key))
        for run in waiting:
            self._drive(run)  # there is nothing to wait for

    def take_results(self) -> list[LoadResult]:
        """Loads that ended since the last call; each exactly once."""
        with self._lock:
            ends = self._table.take_ends()
            self._table.take_settled()  # a load's blocks are safe when it is reported
            moved = [tuple(self._moved.pop(end.key, ())) for end in ends]
        return [
            LoadResult(end.key, bytes_of if end.error is None else (), end.error)
            for end, bytes_of in zip(ends, moved, strict=True)
        ]

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._closing.set()
        with self._lock:
            for machine in self._table.cancel_all():
                self._runs[machine].cancelled.set()
        for _ in range(self._limits.num_threads):
            self._load_queue.put(None)
        deadline = Deadline.after(self._limits.link_timeout_s)
        self._releases.close(deadline.remaining_s())
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    # --- threads ----------------------------------------------------------------------------------------------

    def _thread(self, name: str, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> threading.Thread:
        thread = threading.Thread(target=self._work_through, args=(jobs,), name=name, daemon=True)
        thread.start()
        return thread

    def _work_through(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            if self._closing.is_set():
                continue
            try:
                job()
            except Exception:
                # A fault of ours, for whoever it was; the thread goes on for the others.
                self._log.exception("unexpected error in %s", threading.current_thread().name)

    def _run(self, run: _LoadRun) -> None:
        with self._lock:
            is_ours = self._table.take(run.machine)
        if is_ours:
            self._drive(run)

    def _drive(self, run: _LoadRun) -> None:
        """To its end; then those parts of the same load that wait for a thread in vain, because this one failed."""
        for waiting in self._driven(run):
            self._driven(waiting)

    def _driven(self, run: _LoadRun) -> list[_LoadRun]:
        job, request_id = run.machine.job, run.machine.job.key.request_id
        try:
            lets_go = run.to_its_end()
            error = run.machine.error
        except Exception as failure:
            # A fault of ours. It must not take the thread along, nor leave vLLM waiting for the request.
            self._log.exception("request %s: unexpected error in a load", request_id)
            lets_go, error = False, LLMException(f"unexpected error: {failure!r}")
            run.machine.error = error
        if error is not None and not run.machine.is_cancelled:
            self._log.error("request %s: load failed: %s", request_id, error)
        if lets_go and not self._closing.is_set():
            self.submit_release(ReleaseJob(job.key, job.remote), run.machine.endpoint, run.machine.num_readers)
        with self._lock:
            del self._runs[run.machine]
            self._moved[job.key] += run.moved
            return self._wake(self._table.ended(run.machine))

    def _watch(self, machine: LoadMachine) -> Stopwatch:
        remote = machine.job.remote
        return Stopwatch(machine.job.key, Mode.PULL, remote.key.request_id, place(machine.endpoint))

    def _wake(self, cancelled: Sequence[LoadMachine]) -> list[_LoadRun]:
        """With the lock held: whoever drives these hears of it. Returns those that nobody drives: the caller does."""
        for machine in cancelled:
            self._runs[machine].cancelled.set()
        return [self._runs[machine] for machine in cancelled if self._table.take(machine)]


class _LoadRun:
    """The driver of one part: performs what the machine asks for, until it has ended."""

    def __init__(
        self,
        machine: LoadMachine,
        peers: PeerDirectory,
        leases: LeaseCalls,
        puller: Puller,
        log: logging.Logger,
        watch: Stopwatch,
    ) -> None:
        self.machine = machine
        self.watch = watch
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
        self.watch.lap(Awaited.THREAD)
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
            self.watch.failed(error)
            return self.machine.failed(error, time.monotonic())

    def _reach(self) -> tuple[Effect, ...]:
        self._peer = self._peers.ready(self.machine.endpoint, self._deadline)
        self.watch.lap(Awaited.LINK)
        return self.machine.linked(time.monotonic())

    def _read(self) -> tuple[Effect, ...]:
        machine = self.machine
        self.moved = self._puller.pull(self._linked_peer(), machine.endpoint, machine.job, self._deadline)
        self.watch.lap_moved(self.moved)
        return self.machine.read(time.monotonic())

    def _ask_release(self) -> tuple[Effect, ...]:
        job, endpoint = self.machine.job, self._linked_peer().endpoint
        readers = self.machine.num_readers
        [state] = self._leases.release(endpoint, [job.remote.key], job.key, self._deadline, readers)
        self.watch.lap(Awaited.CONFIRMATION)
        return self.machine.answered(state, time.monotonic())

    def _pause(self) -> tuple[Effect, ...]:
        request_id, error = self.machine.job.key.request_id, self.machine.error
        self._log.info("request %s: %s; trying once more", request_id, error)
        self.cancelled.wait(RELINK_PAUSE_S)
        self.watch.lap(Awaited.LINK)
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
