# SPDX-License-Identifier: Apache-2.0
"""Faults of pushes, and of hand-offs between different numbers of workers, put into the real code on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_datadist.handoff.desk import StepDesk
from vllm_datadist.handoff.lease import LEASE_TABLE, LeaseEvent, LeasePhase, Leases
from vllm_datadist.handoff.offer import OFFER_TABLE, OfferEffect, OfferEvent, OfferMachine, OfferPhase
from vllm_datadist.handoff.offer_heirs import Heirs
from vllm_datadist.handoff.parts import GROUP_TABLE, GroupEffect, GroupEvent, GroupState
from vllm_datadist.handoff.push import PUSH_TABLE, PushEffect, PushEvent, PushMachine, PushPhase, Send
from vllm_datadist.handoff.push_ended import Answer
from vllm_datadist.handoff.push_readers import Announcements, ServedBook, request_key
from vllm_datadist.handoff.pushes import PushTable
from vllm_datadist.messages import LeaseState, LoadJob, Offer, OfferRef, OfferState

from .mutation import Mutation, Patch


def _first_reader_ends_the_lease(patch: Patch) -> None:
    row = (LeasePhase.OPEN, LeaseEvent.RELEASE_OF_PART)
    patch.setitem(LEASE_TABLE.rows, row, (LeasePhase.RELEASED, LeaseState.HELD))


def _unread_workers_are_not_released(patch: Patch) -> None:
    def start_load(self: Any, load: LoadJob) -> None:
        self._loader.submit_load(load, self._find_sources(load.remote))

    patch.setattr(StepDesk, "_start_load", start_load)


def _a_failed_part_ends_the_job(patch: Patch) -> None:
    effects = (GroupEffect.CANCEL_OTHERS, GroupEffect.REPORT, GroupEffect.SETTLE)
    patch.setitem(GROUP_TABLE.rows, (GroupState.RUNNING, GroupEvent.PART_FAILED), (GroupState.REPORTED, effects))


def _given_up_counts_as_safe(patch: Patch) -> None:
    effects = (GroupEffect.CANCEL_OTHERS, GroupEffect.REPORT, GroupEffect.SETTLE)
    for state in (GroupState.RUNNING, GroupState.STOPPING):
        patch.setitem(GROUP_TABLE.rows, (state, GroupEvent.GIVEN_UP), (GroupState.REPORTED, effects))


def _p_does_not_ask(patch: Patch) -> None:
    row = (PushPhase.WAITING, PushEvent.WORK)
    patch.setitem(PUSH_TABLE.rows, row, (PushPhase.SENDING, (PushEffect.SEND,)))


def _cancelled_offers_stand(patch: Patch) -> None:
    def lenient(self: OfferMachine, cluster_id: int, ref: OfferRef, now_s: float) -> bool:
        return cluster_id == self.endpoint.cluster_id and ref == self.ref

    patch.setattr(OfferMachine, "stands", lenient)


def _granted_offers_are_dropped(patch: Patch) -> None:
    end = (OfferPhase.ENDED, (OfferEffect.LET_GO, OfferEffect.REPORT))
    for phase in (OfferPhase.OFFERING, OfferPhase.AWAITING, OfferPhase.ASKING):
        patch.setitem(OFFER_TABLE.rows, (phase, OfferEvent.TAKE_BACK), end)


def _the_fence_is_skipped(patch: Patch) -> None:
    end = (OfferPhase.ENDED, (OfferEffect.DROP_LINK, OfferEffect.REPORT))
    for (phase, event), (to, _) in list(OFFER_TABLE.rows.items()):
        if to is OfferPhase.FENCING:
            patch.setitem(OFFER_TABLE.rows, (phase, event), end)


def _withdrawn_is_said_during_a_send(patch: Patch) -> None:
    def state(self: PushMachine) -> OfferState:
        return self.word or OfferState.ACCEPTED

    patch.setattr(PushMachine, "state", property(state))


def _any_notice_is_heard(patch: Patch) -> None:
    told = OfferMachine.told

    def lenient(self: OfferMachine, cluster_id: int, ref: OfferRef, state: OfferState, reason: str) -> bool:
        return told(self, cluster_id, self.ref, state, reason)

    patch.setattr(OfferMachine, "told", lenient)


def _done_before_the_last_chunk(patch: Patch) -> None:
    how_sent = PushMachine._how_sent

    def hasty(self: PushMachine) -> PushEvent:
        event = how_sent(self)
        return PushEvent.SENT_ALL if event is PushEvent.SENT else event

    patch.setattr(PushMachine, "_how_sent", hasty)


def _all_tokens_are_sent(patch: Patch) -> None:
    """As if the first token sent were the prompt's, not the first that D lacks."""
    next_send = PushMachine._next_send

    def from_the_start(self: PushMachine) -> Send:
        send = next_send(self)
        return replace(send, first_token=0)

    patch.setattr(PushMachine, "_next_send", from_the_start)


def _lost_blocks_are_sent(patch: Patch) -> None:
    patch.setattr(PushTable, "void", lambda self, void: None)


def _a_void_send_counts(patch: Patch) -> None:
    row = (PushPhase.SENDING, PushEvent.RETRACTED)
    patch.setitem(PUSH_TABLE.rows, row, (PushPhase.SENDING, ()))


def _freed_under_a_send(patch: Patch) -> None:
    patch.setattr(Leases, "pin", lambda self, key: key in self._active)


def _an_offer_lives_on_at_p(patch: Patch) -> None:
    def sweep(self: Any, now_s: float) -> None:
        for source in list(self._held.values()):
            self._check_lease(source)

    patch.setattr(PushTable, "sweep", sweep)


def _served_before_the_lease_is_forgotten(patch: Patch) -> None:
    serve = PushTable._serve

    def forgetful(self: Any, transfer_id: str, source: Any, *args: Any) -> None:
        if source is not None and source.is_held:
            serve(self, transfer_id, source, *args)

    patch.setattr(PushTable, "_serve", forgetful)


def _void_offers_are_not_let_go(patch: Patch) -> None:
    withdraw = PushTable.withdraw

    def forgetful(self: Any, cluster_id: int, ref: OfferRef, num_offers: int) -> Any:
        found = self.state(cluster_id, ref)
        return (
            found
            if found.state in (OfferState.FAILED, OfferState.WITHDRAWN)
            else withdraw(self, cluster_id, ref, num_offers)
        )

    patch.setattr(PushTable, "withdraw", forgetful)


def _who_has_let_go_counts_for_the_next(patch: Patch) -> None:
    patch.setattr(ServedBook, "keep_only", lambda self, transfer_id, key: None)


def _another_ends_the_lease_of_who_is_announced(patch: Patch) -> None:
    serve = PushTable._serve

    def serve_all(self: Any, *args: Any) -> None:
        announced, self._announced = self._announced, Announcements(0)
        serve(self, *args)
        self._announced = announced

    patch.setattr(PushTable, "_serve", serve_all)


def _announced_offers_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(Announcements, "__iter__", lambda self: iter(()))


def _a_grant_holds_for_any_link(patch: Patch) -> None:
    next_send = PushMachine._next_send

    def over_any(self: PushMachine) -> Send:
        return replace(next_send(self), link_id=None)

    patch.setattr(PushMachine, "_next_send", over_any)
    end = (OfferPhase.ENDED, (OfferEffect.REPORT,))
    patch.setitem(OFFER_TABLE.rows, (OfferPhase.FENCING, OfferEvent.FENCED_AGAIN), end)


def _whoever_comes_later_is_refused(patch: Patch) -> None:
    offer = PushTable.offer

    def strict(self: Any, cluster_id: int, made: Offer, now_s: float) -> Any:
        source = self._sources.get(made.ref.transfer_id)
        if source is not None and source.owner not in (None, request_key(made.ref)):
            return Answer(OfferState.FAILED, "another request has offered for this transfer")
        return offer(self, cluster_id, made, now_s)

    patch.setattr(PushTable, "offer", strict)


def _whoever_comes_later_takes_the_place(patch: Patch) -> None:
    """Arrival decides, although threads and workers of D overtake each other."""
    offer = PushTable.offer

    def hasty(self: Any, cluster_id: int, made: Offer, now_s: float) -> Any:
        source = self._sources.get(made.ref.transfer_id)
        if source is not None and source.owner != request_key(made.ref):
            for push in list(source.pushes):
                self._step(push, PushEvent.GONE, "another request has offered for this transfer")
        return offer(self, cluster_id, made, now_s)

    patch.setattr(PushTable, "offer", hasty)


def _nobodys_turn_comes(patch: Patch) -> None:
    patch.setattr(PushTable, "_begin_turn", lambda self, transfer_id: None)


def _who_lets_go_names_nobody(patch: Patch) -> None:
    patch.setattr(Heirs, "of", lambda self, key, source, now_s: None)


PUSH_MUTATIONS = (
    Mutation(
        "the first of several readers ends the lease", ("lease", "tags", "blocks", "calm"), _first_reader_ends_the_lease
    ),
    Mutation("workers of P that nobody reads are not released", ("calm",), _unread_workers_are_not_released),
    Mutation(
        "a failed part ends the job while another goes on",
        ("blocks", "reserved", "unknown", "fatal"),
        _a_failed_part_ends_the_job,
    ),
    Mutation("a push that is given up counts as safe", ("reserved", "blocks"), _given_up_counts_as_safe, 1.0),
    Mutation("P does not ask whether an offer stands", ("reserved",), _p_does_not_ask, 1.0),
    Mutation("an offer stands without being noted", ("reserved", "complete", "calm"), _cancelled_offers_stand, 1.0),
    Mutation("a granted offer is dropped without P's word", ("reserved", "blocks"), _granted_offers_are_dropped, 1.0),
    Mutation("the fence is skipped", ("reserved", "blocks"), _the_fence_is_skipped, 1.0),
    Mutation("a withdrawal is confirmed during a send", ("reserved", "blocks"), _withdrawn_is_said_during_a_send, 1.0),
    Mutation("any notice of P is heard", ("complete", "reserved", "calm"), _any_notice_is_heard, 1.0),
    Mutation("done is told before the last chunk", ("complete", "blocks"), _done_before_the_last_chunk, 1.0),
    Mutation("tokens that D has are sent too", ("position", "reserved"), _all_tokens_are_sent, 1.0),
    Mutation("blocks that a request has lost are sent", ("source", "tags", "complete"), _lost_blocks_are_sent, 1.0),
    Mutation("a void send counts", ("complete", "tags", "calm"), _a_void_send_counts, 1.0),
    Mutation("blocks are freed under a send", ("source", "tags"), _freed_under_a_send, 1.0),
    Mutation("an offer has no end at P", ("leak", "ends"), _an_offer_lives_on_at_p, 1.0),
    Mutation(
        "who is served before the lease is opened is forgotten", ("calm",), _served_before_the_lease_is_forgotten, 1.0
    ),
    Mutation("an offer that was void is never let go", ("calm",), _void_offers_are_not_let_go, 1.0),
    Mutation("who has let go ends the lease of the next", ("blocks",), _who_has_let_go_counts_for_the_next, 1.0),
    Mutation(
        "another ends the lease of who is announced", ("blocks",), _another_ends_the_lease_of_who_is_announced, 1.0
    ),
    Mutation("an offer that is announced is not waited for", ("calm",), _announced_offers_are_not_waited_for, 1.0),
    Mutation("an offer that overtakes a withdrawal is refused", ("calm",), _whoever_comes_later_is_refused, 1.0),
    Mutation("the offer that arrives last takes the place", ("calm",), _whoever_comes_later_takes_the_place, 1.0),
    Mutation("nobody's turn comes", ("calm",), _nobodys_turn_comes, 1.0),
    Mutation("who lets go does not name the next", ("calm",), _who_lets_go_names_nobody, 1.0),
    Mutation("a grant holds for any link", ("reserved", "blocks"), _a_grant_holds_for_any_link, 1.0),
)
