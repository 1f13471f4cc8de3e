# SPDX-License-Identifier: Apache-2.0
"""Faults put into the real code on purpose: each must be seen by the simulation."""

from __future__ import annotations

from typing import Any

from datadist_core.errors import Cancelled
from vllm_datadist.handoff import lease
from vllm_datadist.handoff.desk import StepDesk, StepEnds
from vllm_datadist.handoff.lease import LEASE_TABLE, LeaseEvent, LeasePhase, Leases
from vllm_datadist.handoff.load import LOAD_TABLE, Effect, LoadEvent, LoadMachine, LoadState
from vllm_datadist.handoff.parts import GroupEnd, PartTable
from vllm_datadist.handoff.renewal import RenewalTable, Watched
from vllm_datadist.handoff.request import REQUEST_TABLE, RequestEvent, RequestState, Tell
from vllm_datadist.messages import LeaseState, RequestKey
from vllm_datadist.scheduler.holds import HoldTable
from vllm_datadist.scheduler.requests import Handoff, HandoffTable
from vllm_datadist.scheduler.side import SchedulerSide

from . import engine
from .mutation import Mutation, Patch
from .mutations_push import PUSH_MUTATIONS


def _expired_answers_held(patch: Patch) -> None:
    patch.setitem(LEASE_TABLE.rows, (LeasePhase.EXPIRED, LeaseEvent.RELEASE), (LeasePhase.EXPIRED, LeaseState.HELD))


def _held_for_any_reader(patch: Patch) -> None:
    row = (LeasePhase.RELEASED, LeaseEvent.RELEASE_BY_OTHER)
    patch.setitem(LEASE_TABLE.rows, row, (LeasePhase.RELEASED, LeaseState.HELD))


def _renewal_reopens(patch: Patch) -> None:
    patch.setitem(LEASE_TABLE.rows, (LeasePhase.EXPIRED, LeaseEvent.RENEW), (LeasePhase.OPEN, LeaseState.HELD))


def _renewal_does_not_prolong(patch: Patch) -> None:
    def renew(self: Any, key: RequestKey) -> LeaseState:
        return LeaseState.HELD if key in self._active else LeaseState.UNKNOWN

    patch.setattr(Leases, "_renew", renew)


def _renewals_never_end(patch: Patch) -> None:
    patch.setattr(lease, "MAX_LEASE_TIMES", 1e9)


def _sweep_stops_at_the_first_live_lease(patch: Patch) -> None:
    def sweep(self: Any) -> None:
        now_s = self._clock()
        for key, held in list(self._active.items()):
            if held.ends_at_s > now_s:
                return
            self._step(key, held, LeaseEvent.TIME_OVER)

    patch.setattr(Leases, "_sweep", sweep)


def _attempt_is_ignored(patch: Patch) -> None:
    def next_key(self: Any, request_id: str) -> RequestKey:
        return RequestKey(request_id, 1)

    patch.setattr(HoldTable, "next_key", next_key)


def _read_is_repeated_after_it_was_done(patch: Patch) -> None:
    for event in (LoadEvent.BROKEN, LoadEvent.LATE):
        _, effects = LOAD_TABLE.rows[LoadState.CONFIRMING, event]
        patch.setitem(LOAD_TABLE.rows, (LoadState.CONFIRMING, event), (LoadState.PAUSED, effects))


def _reported_before_the_read_has_ended(patch: Patch) -> None:
    cancel = PartTable.cancel

    def cancel_and_report(self: PartTable[Any], key: RequestKey) -> list[Any]:
        cancelled = cancel(self, key)
        if cancelled:
            self.fail(key, Cancelled("the request is gone"))
        return cancelled

    patch.setattr(PartTable, "cancel", cancel_and_report)


def _unknown_lease_is_taken_as_held(patch: Patch) -> None:
    event_of = LoadMachine._event_of

    def lenient(self: LoadMachine, state: LeaseState, now_s: float) -> LoadEvent:
        return LoadEvent.HELD if state is LeaseState.UNKNOWN else event_of(self, state, now_s)

    patch.setattr(LoadMachine, "_event_of", lenient)


def _deadline_is_not_observed(patch: Patch) -> None:
    init = LoadMachine.__init__

    def init_for_ever(self: LoadMachine, *args: Any) -> None:
        init(self, *args)
        self.deadline_s = float("inf")

    patch.setattr(LoadMachine, "__init__", init_for_ever)


def _failed_load_is_not_reported(patch: Patch) -> None:
    row = (LoadState.CONFIRMING, LoadEvent.LEASE_OVER)
    patch.setitem(LOAD_TABLE.rows, row, (LoadState.ENDED, ()))


def _failed_load_is_reported_as_good(patch: Patch) -> None:
    def take_ends(self: Any) -> StepEnds[GroupEnd]:
        ends = real(self)
        return StepEnds(ends.sent, ends.received, set(), ends.loads, ends.pushes, ends.notes)

    real = StepDesk.take_ends
    patch.setattr(StepDesk, "take_ends", take_ends)


def _nothing_needed_is_not_told(patch: Patch) -> None:
    for row in ((RequestState.QUEUED, RequestEvent.NO_LOAD), (RequestState.NEW, RequestEvent.REFUSED)):
        patch.setitem(REQUEST_TABLE.rows, row, (RequestState.SETTLED, ()))


def _cancelled_load_does_not_let_go(patch: Patch) -> None:
    for row in [row for row in LOAD_TABLE.rows if row[1] is LoadEvent.CANCELLED]:
        patch.setitem(LOAD_TABLE.rows, row, (LoadState.ENDED, (Effect.REPORT,)))


def _followers_release_too(patch: Patch) -> None:
    def step(self: Handoff, event: RequestEvent) -> tuple[Tell, ...]:
        self.state, tells = REQUEST_TABLE.next(self.state, event)
        return tells

    patch.setattr(Handoff, "step", step)


def _followers_load_too(patch: Patch) -> None:
    patch.setattr(HandoffTable, "lead", lambda self, handoff: None)


def _unwatch_is_forgotten(patch: Patch) -> None:
    patch.setattr(RenewalTable, "unwatch", lambda self, key: None)


def _renewed_only_once(patch: Patch) -> None:
    patch.setattr(Watched, "period_s", 100.0)


def _doubled_report_reaches_vllm(patch: Patch) -> None:
    take_ends = PartTable.take_ends

    def take_twice(self: Any) -> list[GroupEnd]:
        ends = take_ends(self)
        again, self.again = getattr(self, "again", []), ends
        return [*ends, *again]

    patch.setattr(PartTable, "take_ends", take_twice)
    patch.setattr(HandoffTable, "was_reported", lambda self, request_id: False)


def _work_is_forgotten_while_idle(patch: Patch) -> None:
    patch.setattr(SchedulerSide, "has_work", lambda self: False)


def _abandoned_load_is_forgotten(patch: Patch) -> None:
    row = (RequestState.LOADING, RequestEvent.FINISHED)
    patch.setitem(REQUEST_TABLE.rows, row, (RequestState.LOADING, (Tell.END,)))


def _unknown_lease_is_an_error(patch: Patch) -> None:
    patch.delitem(LEASE_TABLE.rows, (LeasePhase.UNOPENED, LeaseEvent.RENEW))


def _restart_keeps_the_cluster_id(patch: Patch) -> None:
    patch.setattr(engine, "cluster_id_of", lambda name, rank, incarnation: 1 + sum(map(ord, name)) * 100 + rank)


MUTATIONS = (
    Mutation("an expired lease answers HELD", ("lease", "tags"), _expired_answers_held),
    Mutation("HELD is said to any reader", ("lease", "tags"), _held_for_any_reader),
    Mutation("a renewal opens an expired lease again", ("lease", "blocks", "leak"), _renewal_reopens),
    Mutation("a renewal does not prolong", ("blocks", "calm"), _renewal_does_not_prolong),
    Mutation("renewals keep a lease for ever", ("ends", "lease"), _renewals_never_end),
    Mutation(
        "the sweep stops at the first live lease", ("lease", "tags", "ends"), _sweep_stops_at_the_first_live_lease
    ),
    Mutation("the attempt number is ignored", ("leak", "ends", "lease"), _attempt_is_ignored),
    Mutation("the read is repeated after it was done", ("lease", "tags"), _read_is_repeated_after_it_was_done),
    Mutation(
        "an aborted load is reported before its read has ended",
        ("blocks", "leak", "lease", "unknown", "tags"),
        _reported_before_the_read_has_ended,
    ),
    Mutation("UNKNOWN is taken as HELD", ("lease", "calm", "leak"), _unknown_lease_is_taken_as_held),
    Mutation("the deadline of a load is not observed", ("ends",), _deadline_is_not_observed),
    Mutation("a load that lost its lease is not reported", ("ends",), _failed_load_is_not_reported),
    Mutation("a failed load is reported as good", ("lease", "tags"), _failed_load_is_reported_as_good),
    Mutation("P is not told that nothing is needed", ("calm",), _nothing_needed_is_not_told),
    Mutation("a cancelled load does not let go", ("calm",), _cancelled_load_does_not_let_go),
    Mutation("followers release their leader's lease", ("calm",), _followers_release_too),
    Mutation("followers load too", ("calm",), _followers_load_too),
    Mutation("unwatch is forgotten", ("ends", "leak"), _unwatch_is_forgotten),
    Mutation("a lease is renewed only once", ("calm",), _renewed_only_once),
    Mutation("a doubled report reaches vLLM", ("unknown", "blocks", "tags"), _doubled_report_reaches_vllm),
    Mutation("work is forgotten while the engine is idle", ("leak", "calm"), _work_is_forgotten_while_idle),
    Mutation("an abandoned load is taken for one that goes on", ("leak", "fatal"), _abandoned_load_is_forgotten),
    Mutation("to ask for an unknown lease is an error", ("fatal",), _unknown_lease_is_an_error),
    Mutation("a restarted worker keeps its cluster id", ("lease", "tags"), _restart_keeps_the_cluster_id),
    *PUSH_MUTATIONS,
)

#: Faults that the code once had, found by the simulation or by reading: the seed of a schedule that sees each.
FOUND = {
    "HELD is said to any reader": 10,
    "renewals keep a lease for ever": 86,
    "an offer that was void is never let go": 30,
    "who has let go ends the lease of the next": 76,
    "another ends the lease of who is announced": 8,
    "a grant holds for any link": 207,
    "an offer that overtakes a withdrawal is refused": 4,
    "who lets go does not name the next": 205,
}
#: The first seed that sees it, where it is not among the very first: where to look first, if it is still so.
LOOK_FIRST = {
    **FOUND,
    "the sweep stops at the first live lease": 60,
    "the read is repeated after it was done": 15,
    "UNKNOWN is taken as HELD": 21,
    "followers release their leader's lease": 15,
    "a restarted worker keeps its cluster id": 50,
    "workers of P that nobody reads are not released": 40,
    "a failed part ends the job while another goes on": 118,
    "a push that is given up counts as safe": 70,
    "the fence is skipped": 16,
    "blocks that a request has lost are sent": 33,
    "a void send counts": 127,
    "blocks are freed under a send": 36,
    "followers load too": 24,
    "an offer that is announced is not waited for": 191,
    "the offer that arrives last takes the place": 211,
}
