# SPDX-License-Identifier: Apache-2.0
"""Drives D's offers on virtual time, as `worker.offers` does on the real clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datadist_core.errors import Cancelled, LinkFailed, LLMException
from vllm_datadist.handoff.load import RELINK_PAUSE_S
from vllm_datadist.handoff.offer import OfferEffect, OfferMachine, OfferPhase
from vllm_datadist.handoff.offer_heirs import Heirs
from vllm_datadist.handoff.parts import GroupEnd, PartTable
from vllm_datadist.handoff.push_ended import Answer
from vllm_datadist.messages import (
    Announce,
    AnnounceJob,
    Endpoint,
    Offer,
    OfferJob,
    OfferRef,
    OfferState,
    PushSource,
    RequestKey,
    WithdrawJob,
    lease_ref,
)

from .calls import CALL_TIMEOUT_S, ask
from .network import Answering, Link, LinkEnd
from .world import Violation

if TYPE_CHECKING:
    from .worker import SimWorker

GRACE_S = 2.0
FIND_PAUSE_S = 0.3
FENCE_POLL_S = 0.25


@dataclass(slots=True)
class OfferEnds:
    """As `worker.offers.OfferEnds`."""

    ends: Sequence[GroupEnd]
    settled: Sequence[RequestKey]


class _Run:
    """One offer: what it waits for. `go_on` is called at most once for each wait."""

    def __init__(self, machine: OfferMachine) -> None:
        self.machine = machine
        self.link: Link | None = None
        self.go_on: Callable[[], None] | None = None
        #: What P may write under, by the simulator's own account.
        self.open_ref: OfferRef | None = None
        self.awaits_since_linked: LinkEnd | None = None


class SimOffers:
    """`may_write` is the truth that P's writes are checked against: which offers D has reserved blocks for, now."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table: PartTable[OfferMachine] = PartTable()
        self.runs: dict[OfferMachine, _Run] = {}
        self._finding: dict[RequestKey, OfferJob] = {}
        self.heirs = Heirs()
        self._num_notices = 0

    def is_busy(self) -> bool:
        return bool(len(self.table) or self.runs or self._finding or self._num_notices or len(self.heirs))

    def may_write(self, ref: OfferRef) -> bool:
        return any(run.open_ref == ref for run in self.runs.values())

    # --- what the desk calls ---

    def announce(self, job: AnnounceJob) -> None:
        """Until the offer comes P keeps its lease alive by itself."""
        ref, timeout_s = OfferRef(job.source.transfer_id, lease_ref(job.key)), self._worker.limits.push_timeout_s
        self.heirs.note(job.key, job.source, self._worker.clock() + timeout_s)
        found = self._workers(job.source)
        for endpoint in () if found is None else self._worker.sources(found).endpoints:
            self._say(endpoint, lambda: lambda p, answer: p.pusher.on_announce(ref, timeout_s, answer))

    def submit(self, job: OfferJob) -> None:
        self._finding[job.key] = job
        limits, now_s = self._worker.limits, self._worker.clock()
        deadline_s = now_s + limits.push_timeout_s
        self.heirs.note(job.key, job.source, deadline_s)
        limit_s = now_s + min(limits.push_timeout_s, limits.link_timeout_s)
        self._worker.later(0.0, lambda: self._find(job, deadline_s, limit_s))

    def cancel(self, key: RequestKey) -> None:
        self.heirs.forget(key)
        job = self._finding.pop(key, None)
        if job is not None:
            self.table.fail(key, Cancelled("the request is gone"))
            self._withdraw_parts(WithdrawJob(key, job.source))
        self._end_early(self.table.cancel(key))

    def withdraw(self, job: WithdrawJob) -> None:
        """As the share of each worker says; P's workers are told by one of D's each."""
        worker = self._worker
        self.heirs.forget(job.key)
        found = self._workers(job.source)
        ref = OfferRef(job.source.transfer_id, lease_ref(job.key))
        for endpoint in [] if found is None else found[worker.place.index :: worker.engine.shape.tp_size]:
            self._tell_withdrawn(job, endpoint, ref, 1)

    def _withdraw_parts(self, job: WithdrawJob) -> None:
        """What this worker was about to offer, as others of D do, and in the words that they use."""
        found = self._workers(job.source)
        if found is not None:
            sources, ref = self._worker.sources(found), OfferRef(job.source.transfer_id, lease_ref(job.key))
            for one in sources.read:
                self._tell_withdrawn(job, one.endpoint, ref, one.num_readers)
            for endpoint in sources.unread:
                self._tell_withdrawn(job, endpoint, ref, 1)

    def take_ends(self) -> OfferEnds:
        if len(self.table):
            self._end_early(self.table.give_up(self._worker.clock()))
        ends = OfferEnds(self.table.take_ends(), self.table.take_settled())
        for end in ends.ends:
            self.heirs.forget(end.key)
        return ends

    # --- who P is ---

    def _workers(self, source: PushSource) -> Sequence[Endpoint] | None:
        """As asked at P's address, or named by its ticket."""
        if source.remote is not None:
            return source.remote.workers
        first = self._worker.network.listening.get((source.host, source.port))
        if first is None or not first.is_alive or first.is_stopped or self._worker.network.is_cut:
            return None
        return [worker.endpoint for worker in first.engine.workers]

    def _find(self, job: OfferJob, deadline_s: float, limit_s: float) -> None:
        """P may be starting: it is looked for until `limit_s`."""
        if self._finding.get(job.key) is not job:
            return
        worker = self._worker
        found = self._workers(job.source)
        if found is not None:
            del self._finding[job.key]
            self._begin(job, found, deadline_s)
        elif worker.clock() + FIND_PAUSE_S < limit_s:
            worker.wake_after(FIND_PAUSE_S, lambda: self._find(job, deadline_s, limit_s))
        else:
            del self._finding[job.key]
            self.table.fail(job.key, LinkFailed("nobody listens there"))

    def _begin(self, job: OfferJob, workers: Sequence[Endpoint], deadline_s: float) -> None:
        worker, sources = self._worker, self._worker.sources(workers)
        now_s = worker.clock()
        machines = [OfferMachine(job, one.endpoint, one.num_readers, now_s, deadline_s - now_s) for one in sources.read]
        gives_up_s = float("inf") if worker.engine.shape.recomputes else deadline_s + GRACE_S
        self.table.add(job.key, machines, gives_up_s)
        for machine in machines:
            self.runs[machine] = _Run(machine)
        ref = OfferRef(job.source.transfer_id, lease_ref(job.key))
        for endpoint in sources.unread:
            self._tell_withdrawn(job, endpoint, ref, 1)
        for machine in machines:
            worker.later(0.0, lambda machine=machine: self._start(machine))  # type: ignore[misc]

    # --- what P calls ---

    def on_stands(self, cluster_id: int, ref: OfferRef, answer: Answering) -> None:
        answer(any(machine.stands(cluster_id, ref, self._worker.clock()) for machine in self.runs))

    def on_pushed(self, cluster_id: int, ref: OfferRef, state: OfferState, reason: str, answer: Answering) -> None:
        for machine in list(self.runs):
            if machine.told(cluster_id, ref, state, reason):
                self._wake(machine)
        answer(True)

    # --- the machines ---

    def _start(self, machine: OfferMachine) -> None:
        if self.table.take(machine):
            self._perform(machine, machine.started(self._worker.clock()))

    def _end_early(self, cancelled: Sequence[OfferMachine]) -> None:
        for machine in cancelled:
            if self.table.take(machine):
                self._perform(machine, machine.started(self._worker.clock()))
            else:
                self._wake(machine)

    def _wake(self, machine: OfferMachine) -> None:
        """Whatever it waits for, it has news."""
        run = self.runs.get(machine)
        if run is not None and run.go_on is not None:
            go_on, run.go_on = run.go_on, None
            self._worker.later(0.0, go_on)

    def _wait(self, run: _Run, go_on: Callable[[], None], until_s: float) -> None:
        run.go_on = go_on

        def time_over() -> None:
            if run.go_on is go_on:
                run.go_on = None
                go_on()

        self._worker.wake_at(until_s, time_over)
        if run.machine.has_news:
            self._wake(run.machine)

    def _perform(self, machine: OfferMachine, effects: tuple[OfferEffect, ...]) -> None:
        worker, run = self._worker, self.runs[machine]
        worker.world.note("%s offer %s.%d -> %s", worker.name, machine.key, machine.ref.number, effects)
        if machine.phase in (OfferPhase.PAUSED, OfferPhase.ENDED):
            run.open_ref = None
        for effect in effects:
            _PERFORM[effect](self, run)
        worker.engine.nemesis(worker, machine)

    def _outcome(self, machine: OfferMachine, outcome: object) -> None:
        now_s = self._worker.clock()
        if isinstance(outcome, LLMException):
            effects = machine.failed(outcome, now_s)
        elif isinstance(outcome, Link):
            self.runs[machine].link = outcome
            outcome.near.on_lost.append(lambda _: machine.lose())
            effects = machine.linked(now_s)
        elif isinstance(outcome, Answer):
            effects = machine.answered(outcome.state, outcome.reason, now_s)
        else:
            raise Violation("model", f"an offer's effect ended with {outcome}")
        self._perform(machine, effects)

    def _reach(self, run: _Run) -> None:
        machine = run.machine
        self._worker.peers.ready(machine.endpoint, machine.deadline_s, lambda end: self._outcome(machine, end))

    def _call(self, run: _Run, perform: Callable[[SimWorker, Answering], None]) -> None:
        end = None if run.link is None else run.link.near
        ask(self._worker, end, perform, CALL_TIMEOUT_S, lambda outcome: self._outcome(run.machine, outcome))

    def _offer(self, run: _Run) -> None:
        machine, job = run.machine, run.machine.job
        offer = Offer(
            ref=machine.ref,
            first_token=job.first_token,
            end_token=job.end_token,
            block_ids=[[block or 0 for block in table] for table in job.tables],
            num_prompt_tokens=job.num_prompt_tokens,
            prompt_digest=job.prompt_digest,
            num_offers=machine.num_offers,
            timeout_s=max(0.0, machine.deadline_s - self._worker.clock()),
        )
        run.open_ref = machine.ref
        who = self._worker.cluster_id
        self._call(run, lambda p, answer: p.pusher.on_offer(who, offer, answer))

    def _ask_state(self, run: _Run) -> None:
        who, ref = self._worker.cluster_id, run.machine.ref
        self._call(run, lambda p, answer: p.pusher.on_state(who, ref, answer))

    def _withdraw(self, run: _Run) -> None:
        who, machine = self._worker.cluster_id, run.machine
        ref, count, instead = machine.ref, machine.num_offers, self._heir_of(machine.job)
        end = self._worker.peers.current(machine.endpoint)
        ask(
            self._worker, end, lambda p, answer: p.pusher.on_withdraw(who, ref, count, instead, answer), CALL_TIMEOUT_S,
            lambda outcome: self._outcome(machine, outcome),
        )  # fmt: skip

    def _await(self, run: _Run) -> None:
        machine, worker = run.machine, self._worker
        end = None if run.link is None else run.link.near
        if end is None or end.is_closed:
            worker.later(0.0, lambda: self._outcome(machine, LinkFailed("the link is gone")))
            return
        go_on = lambda: self._perform(machine, machine.woken(worker.clock()))  # noqa: E731

        def lost(error: LLMException) -> None:
            if run.go_on is go_on:
                run.go_on = None
                late_s = worker.world.rng.choice((0.0, 0.0, 0.05, 1.0)) * worker.world.rng.random()
                late_s += worker.hears_late_s
                worker.later(late_s, lambda: self._outcome(machine, error))

        end.on_lost.append(lost)
        self._wait(run, go_on, machine.wake_s)

    def _pause(self, run: _Run) -> None:
        clock, machine = self._worker.clock, run.machine
        self._wait(run, lambda: self._perform(machine, machine.pause_over(clock())), clock() + RELINK_PAUSE_S)

    def _fence(self, run: _Run) -> None:
        machine, worker = run.machine, self._worker
        if machine.has_word or worker.peers.is_fenced(machine.endpoint.cluster_id):
            worker.later(0.0, lambda: self._perform(machine, machine.fenced(worker.clock())))
        elif worker.peers.current(machine.endpoint) is not None:
            worker.later(0.0, lambda: self._perform(machine, machine.linked(worker.clock())))
        else:
            worker.wake_after(FENCE_POLL_S, lambda: self._fence(run))

    def _drop_link(self, run: _Run) -> None:
        link, run.link = run.link, None
        if link is not None:
            self._worker.peers.drop(link)

    def _let_go(self, run: _Run) -> None:
        self._tell_withdrawn(run.machine.job, run.machine.endpoint, run.machine.ref, run.machine.num_offers)

    def _report(self, run: _Run) -> None:
        del self.runs[run.machine]
        self._end_early(self.table.ended(run.machine))

    def _heir_of(self, job: OfferJob | WithdrawJob) -> Announce | None:
        return self.heirs.of(job.key, job.source, self._worker.clock())

    def _tell_withdrawn(self, job: OfferJob | WithdrawJob, endpoint: Endpoint, ref: OfferRef, count: int) -> None:
        who = self._worker.cluster_id

        def speak() -> Callable[[SimWorker, Answering], None]:
            instead = self._heir_of(job)
            return lambda p, answer: p.pusher.on_withdraw(who, ref, count, instead, answer)

        self._say(endpoint, speak)

    def _say(self, endpoint: Endpoint, speak: Callable[[], Callable[[SimWorker, Answering], None]]) -> None:
        """As `worker.notices`: once, without waiting for the answer. Of several to one worker any may be the first."""
        worker = self._worker
        self._num_notices += 1

        def over(outcome: object) -> None:
            self._num_notices -= 1

        def linked(outcome: Link | LLMException) -> None:
            if isinstance(outcome, Link):
                ask(worker, outcome.near, speak(), CALL_TIMEOUT_S, over)
            else:
                over(outcome)

        worker.peers.ready(endpoint, worker.clock() + worker.limits.link_timeout_s, linked)


_PERFORM: dict[OfferEffect, Callable[[SimOffers, _Run], None]] = {
    OfferEffect.REACH: SimOffers._reach,
    OfferEffect.OFFER: SimOffers._offer,
    OfferEffect.AWAIT: SimOffers._await,
    OfferEffect.ASK_STATE: SimOffers._ask_state,
    OfferEffect.WITHDRAW: SimOffers._withdraw,
    OfferEffect.PAUSE: SimOffers._pause,
    OfferEffect.FENCE: SimOffers._fence,
    OfferEffect.DROP_LINK: SimOffers._drop_link,
    OfferEffect.LET_GO: SimOffers._let_go,
    OfferEffect.REPORT: SimOffers._report,
}
