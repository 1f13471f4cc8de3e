# SPDX-License-Identifier: Apache-2.0
"""Runs D's offers: does what `handoff.offer` says, with calls to P's workers, and reports to vLLM.

An offer waits for P's prefill, which may take long, and there are as many as requests. So none holds a thread while it
waits: for a link, for P's notice, for a pause or the fence it is only noted, and goes on in a thread of the pool when
what it waits for has come. Threads are held for calls only, which end by CALL_TIMEOUT_S; and so that a P that does not
answer holds up no other, few calls to one peer are made at a time, and the others wait for their turn without a thread.

A job has one offer for each worker of P that this worker needs (`handoff.parts`), and is reported once. If P has not
confirmed by the deadline that it writes no more, the request is reported as failed all the same, and its blocks are
settled later: see `scheduler.settling`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from datadist_core.errors import Cancelled, LLMException, RemoteError, TimedOut
from datadist_core.types import Deadline

from ..counts import Awaited, Mode
from ..handoff.load import LINK_BROKEN
from ..handoff.offer import OfferMachine
from ..handoff.offer_heirs import Heirs
from ..handoff.parts import GroupEnd, PartTable
from ..messages import (
    Announce,
    AnnounceJob,
    Endpoint,
    OfferAnswer,
    OfferJob,
    OfferRef,
    OfferState,
    PushSource,
    RequestKey,
    WithdrawJob,
)
from .later import WorkPool
from .lease_calls import CALL_TIMEOUT_S, Caller
from .load_book import LoadBook, Stopwatch, place
from .notices import FoundWorkers, OfferNotices, OfferParts, Question, Sources, ask
from .offer_run import OfferRun
from .peer_pool import PeerPool
from .peers import PeerDirectory
from .pulls import Moved

#: Between two attempts to find P's workers.
FIND_PAUSE_S = 0.3
#: A job is given up so long after its deadline, within which P is asked to stop.
GRACE_S = 2.0
#: P may be starting, or its workers may not have been told of each other.
_MAY_COME = (*LINK_BROKEN, TimedOut, RemoteError)
#: To one peer, at the same time; and to all.
CALLS_PER_PEER, NUM_CALL_THREADS = 2, 16


class Fences(Protocol):
    def is_fenced(self, cluster_id: int, timeout_s: float) -> bool:
        """Whether no link to that cluster, present or former, can be written over by it. Waits at most so long."""
        ...


@dataclass(frozen=True, slots=True)
class OfferEnds:
    """`ends`: jobs to report. `settled`: jobs whose blocks nobody writes any more; each after, or with, its end."""

    ends: tuple[GroupEnd, ...]
    settled: tuple[RequestKey, ...]


@dataclass(slots=True)
class _Finding:
    """A job whose workers of P are looked for until `limit`. `trouble`: of the latest look-up."""

    job: OfferJob
    deadline: Deadline
    limit: Deadline
    trouble: LLMException | None = None


class OfferRunner:
    """Thread-safe.

    Args:
        timeout_s: from when a job is given to when it is taken back.
        num_threads: for what takes no time. Calls have their own.
    """

    def __init__(
        self,
        peers: PeerDirectory,
        caller: Caller,
        sources: Sources,
        fences: Fences,
        timeout_s: float,
        link_timeout_s: float,
        num_threads: int,
        log: logging.Logger,
        book: LoadBook | None = None,
    ) -> None:
        self._book = book or LoadBook()
        self.peers = peers
        self._caller = caller
        self._sources = sources
        self.fences = fences
        self._timeout_s = timeout_s
        self.link_timeout_s = link_timeout_s
        self.log = log
        self.lock = threading.Lock()
        self._table: PartTable[OfferMachine] = PartTable()
        self._runs: dict[OfferMachine, OfferRun] = {}
        self._finding: dict[RequestKey, _Finding] = {}
        self._heirs = Heirs()
        self.pool = WorkPool("offer", num_threads, log)
        self.calls = PeerPool("offer-call", NUM_CALL_THREADS, CALLS_PER_PEER, log)
        self.notices = OfferNotices(peers, caller, sources, link_timeout_s, self.pool, log, self.heir_of)

    # --- from the engine's thread -----------------------------------------------------------------------------

    def announce(self, job: AnnounceJob) -> None:
        """Tell P that an offer will come, so that it keeps its blocks meanwhile."""
        with self.lock:
            self._heirs.note(job.key, job.source, time.monotonic() + self._timeout_s)
        self.notices.announce(job, self._timeout_s)

    def submit(self, job: OfferJob) -> None:
        """Offer our blocks. The same key again, while it is under way, changes nothing."""
        deadline = Deadline.after(self._timeout_s)
        finding = _Finding(job, deadline, deadline.earlier(self.link_timeout_s))
        with self.lock:
            if job.key in self._finding or self._table.running(job.key):
                return
            self._finding[job.key] = finding
            self._heirs.note(job.key, job.source, deadline.at_s)
        self.pool.now(lambda: self._find(finding))

    def cancel(self, key: RequestKey) -> None:
        """Nobody wants it any more: it is taken back, and reported all the same."""
        with self.lock:
            self._heirs.forget(key)
            finding = self._finding.pop(key, None)
            if finding is not None:
                self._table.fail(key, Cancelled("the request is gone"))
            cancelled = self._table.cancel(key)
        if finding is not None:
            # Others of our workers may have offered: P is told of as many as they tell it of.
            self.notices.withdraw_parts(WithdrawJob(key, finding.job.source))
        self._end_early(cancelled)

    def withdraw(self, job: WithdrawJob) -> None:
        """Tell P that nothing is needed."""
        with self.lock:
            self._heirs.forget(job.key)
        self.notices.withdraw(job)

    def take_ends(self) -> OfferEnds:
        """What has ended since the last call; each exactly once."""
        with self.lock:
            self._give_up_finding(time.monotonic())
            cancelled = self._table.give_up(time.monotonic())
            ends = OfferEnds(tuple(self._table.take_ends()), tuple(self._table.take_settled()))
            for end in ends.ends:
                self._heirs.forget(end.key)
        self._end_early(cancelled)
        return ends

    def heir_of(self, key: RequestKey, source: PushSource) -> Announce | None:
        """Which request the transfer is for, when this one lets go of it."""
        with self.lock:
            return self._heirs.of(key, source, time.monotonic())

    def num_open(self) -> int:
        with self.lock:
            return len(self._table) + len(self._finding)

    def close(self) -> None:
        """End all threads. Idempotent."""
        with self.lock:
            self._finding.clear()
            cancelled = self._table.cancel_all()
        self._end_early(cancelled)
        deadline = Deadline.after(self.link_timeout_s)
        for pool in (self.pool, self.calls, self.notices):
            pool.close(deadline.remaining_s())

    # --- from the core's threads ------------------------------------------------------------------------------

    def stands(self, cluster_id: int, ref: OfferRef) -> bool:
        """P asks whether it may begin to write."""
        with self.lock:
            return any(machine.stands(cluster_id, ref, time.monotonic()) for machine in self._runs)

    def told(self, cluster_id: int, ref: OfferRef, state: OfferState, reason: str, moved: Sequence[Moved] = ()) -> bool:
        """P's notice. Whether it was about an offer of ours that has not ended."""
        with self.lock:
            heard = [run for machine, run in self._runs.items() if machine.told(cluster_id, ref, state, reason)]
        for run in heard:
            run.watch.heard_moved(moved)
            run.wake()
        return bool(heard)

    def link_lost(self, cluster_id: int, error: LLMException) -> None:
        with self.lock:
            hit = [run for machine, run in self._runs.items() if machine.endpoint.cluster_id == cluster_id]
            for run in hit:
                run.machine.lose()
        for run in hit:
            run.lose(error)

    # --- in the pool ------------------------------------------------------------------------------------------

    def _find(self, finding: _Finding) -> None:
        """Find out which workers of P to offer to, and begin. P may still be starting: tried until the link timeout."""
        try:
            future = self._sources.find(finding.job.source, self.link_timeout_s)
        except Exception as error:
            self._not_found(finding, error)
        else:
            future.add_done_callback(lambda found: self.pool.now(lambda: self._found(finding, found)))

    def _found(self, finding: _Finding, found: Future[FoundWorkers]) -> None:
        if not self._is_finding(finding):
            return  # cancelled or given up meanwhile
        try:
            self._begin(finding, found.result(), self._sources.parts(found.result()))
        except Exception as error:
            self._not_found(finding, error)

    def _not_found(self, finding: _Finding, error: Exception) -> None:
        """Whatever it is: vLLM must not be left waiting for the request."""
        if not isinstance(error, LLMException):
            self.log.exception("request %s: unexpected error in a push", finding.job.key.request_id)
            error = LLMException(f"unexpected error: {error!r}")
        if isinstance(error, _MAY_COME) and finding.limit.remaining_s() > FIND_PAUSE_S:
            finding.trouble = error
            self.pool.at(time.monotonic() + FIND_PAUSE_S, lambda: self._find_again(finding))
            return
        with self.lock:
            self._fail(finding, error)

    def _find_again(self, finding: _Finding) -> None:
        if self._is_finding(finding):
            self._find(finding)

    def _is_finding(self, finding: _Finding) -> bool:
        with self.lock:
            return self._finding.get(finding.job.key) is finding

    def _give_up_finding(self, now_s: float) -> None:
        """With the lock held. The look-ups should have ended them; nothing may keep vLLM waiting for ever."""
        for finding in [one for one in self._finding.values() if now_s > one.limit.at_s + GRACE_S]:
            source, trouble = finding.job.source, finding.trouble or "no answer"
            self._fail(finding, TimedOut(f"P's workers were not found by {source.host}:{source.port} ({trouble})"))

    def _fail(self, finding: _Finding, error: LLMException) -> None:
        """With the lock held. Nothing has been offered."""
        key = finding.job.key
        if self._finding.get(key) is finding:
            del self._finding[key]
            self._table.fail(key, error)
            self.log.error("request %s: push failed: %s", key.request_id, error)

    def _begin(self, finding: _Finding, named: FoundWorkers, found: OfferParts) -> None:
        job, deadline, parts = finding.job, finding.deadline, found.parts
        begun_s = deadline.at_s - self._timeout_s
        machines = [OfferMachine(job, p.endpoint, p.num_offers, begun_s, self._timeout_s) for p in parts]
        watches = [Stopwatch(job.key, Mode.PUSH, job.source.transfer_id, place(p.endpoint), begun_s) for p in parts]
        runs = [OfferRun(machine, self, watch, named) for machine, watch in zip(machines, watches, strict=True)]
        with self.lock:
            if self._finding.get(job.key) is not finding:
                return  # cancelled or given up meanwhile
            del self._finding[job.key]
            self._table.add(job.key, machines, deadline.at_s + GRACE_S)
            self._book.open(job.key, watches)
            self._runs.update(zip(machines, runs, strict=True))
        for run in runs:
            self.pool.now(partial(self._start, run))
        if found.unread:
            self.notices.withdraw_from(WithdrawJob(job.key, job.source), found.unread)

    def _start(self, run: OfferRun) -> None:
        with self.lock:
            is_ours = self._table.take(run.machine)
        if is_ours:
            run.start()

    def _end_early(self, cancelled: Sequence[OfferMachine]) -> None:
        """Cancelled parts: who waits goes on; one that nobody has begun ends here and now."""
        for machine in cancelled:
            with self.lock:
                run, has_not_begun = self._runs.get(machine), self._table.take(machine)
            if run is None:
                continue  # it has ended by itself
            if has_not_begun:
                run.start()
            else:
                run.wake()

    def ended(self, run: OfferRun) -> None:
        machine = run.machine
        run.watch.lap(Awaited.PREFILL)
        if machine.error is not None:
            run.watch.failed(machine.error)
        with self.lock:
            del self._runs[machine]
            cancelled = self._table.ended(machine)
        if machine.error is not None and not machine.is_cancelled:
            self.log.error("request %s: push failed: %s", machine.key.request_id, machine.error)
        self._end_early(cancelled)

    def ask(self, endpoint: Endpoint, name: str, question: Question) -> OfferAnswer:
        return ask(self._caller, endpoint, name, question, Deadline.after(CALL_TIMEOUT_S))
