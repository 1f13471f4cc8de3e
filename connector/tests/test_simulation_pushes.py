# SPDX-License-Identifier: Apache-2.0
"""The tables of a push by themselves: what no path through them can do, and what no event can upset."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from connector.tests.simulation.coverage import all_rows, counting
from datadist_core.errors import Cancelled, LLMException, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.lease import Leases
from vllm_datadist.handoff.offer import OFFER_TABLE, OfferEffect, OfferEvent, OfferMachine, OfferPhase, PushFailed
from vllm_datadist.handoff.push import PUSH_TABLE, PushAct, PushEffect, PushEvent, PushMachine, PushPhase
from vllm_datadist.handoff.pushes import COME_AGAIN_S, PushTable
from vllm_datadist.messages import (
    Endpoint,
    LeaseRef,
    Offer,
    OfferJob,
    OfferRef,
    OfferState,
    PushChunk,
    PushEnd,
    PushOpen,
    PushSource,
    PushVoid,
    RequestKey,
)

P = Endpoint(0, 0, "p", 1, 7)
JOB = OfferJob(RequestKey("d-1", 1), PushSource("T", "p", 1), ((4, 5),), 0, 8, 8, "digest")
TIMEOUT_S = 10.0
E, S = OfferEffect, OfferPhase
BLOCKING = {E.REACH, E.OFFER, E.AWAIT, E.ASK_STATE, E.WITHDRAW, E.PAUSE, E.FENCE}
UNDER_WAY = {PushEffect.ASK, PushEffect.SEND, PushEffect.TELL}


def _awaiting(granted: bool = True) -> OfferMachine:
    offer = OfferMachine(JOB, P, 1, 0.0, TIMEOUT_S)
    assert offer.started(0.0) == (E.REACH,)
    assert offer.linked(0.0) == (E.OFFER,)
    assert offer.answered(OfferState.ACCEPTED, "", 0.0) == (E.AWAIT,)
    if granted:
        assert offer.stands(P.cluster_id, offer.ref, 0.1)
    return offer


# --- D's offer ---


def test_every_way_to_the_end_reports_once_and_every_other_step_waits_for_one_thing() -> None:
    for (at, event), (to, effects) in OFFER_TABLE.rows.items():
        assert at is not S.ENDED, event
        assert effects.count(E.REPORT) == (to is S.ENDED), (at, event)
        assert len(BLOCKING & set(effects)) == (to is not S.ENDED), (at, event)
        if to is not S.ENDED:
            assert effects[-1] in BLOCKING


def test_what_p_may_write_for_ends_by_its_word_or_the_fence_alone() -> None:
    for (at, event), (to, _) in OFFER_TABLE.rows.items():
        if event in (OfferEvent.CUT_OFF, OfferEvent.TAKE_BACK, OfferEvent.NO_ANSWER):
            assert to in (S.WITHDRAWING, S.FENCING), (at, event)
        elif at in (S.WITHDRAWING, S.FENCING) and to not in (S.WITHDRAWING, S.FENCING):
            word = (OfferEvent.DONE, OfferEvent.NOT_DONE)
            assert event in (*word, OfferEvent.FENCED, OfferEvent.FENCED_AGAIN), (at, event)


def test_done_is_believed_of_what_was_granted_only() -> None:
    granted, other = _awaiting(), _awaiting(granted=False)
    for offer in (granted, other):
        assert offer.told(P.cluster_id, offer.ref, OfferState.DONE, "")
        assert offer.woken(1.0) == (E.REPORT,)
    assert granted.error is None
    assert isinstance(other.error, PushFailed)


@pytest.mark.parametrize("granted", [False, True])
def test_an_offer_that_is_cancelled_waits_for_p_only_if_it_is_granted(granted: bool) -> None:
    offer = _awaiting(granted)
    offer.cancel()
    assert not offer.stands(P.cluster_id, offer.ref, 1.0)
    assert offer.woken(1.0) == ((E.WITHDRAW,) if granted else (E.LET_GO, E.REPORT))
    if granted:
        assert offer.answered(OfferState.WRITING, "", 2.0) == (E.WITHDRAW,)
        assert offer.answered(OfferState.WITHDRAWN, "", 3.0) == (E.REPORT,)
    assert isinstance(offer.error, Cancelled)


def test_p_that_never_confirms_is_fenced() -> None:
    offer = _awaiting()
    assert offer.woken(TIMEOUT_S) == (E.WITHDRAW,)
    assert offer.failed(TimedOut("no answer"), 11.0) == (E.WITHDRAW,)
    assert offer.failed(TimedOut("no answer"), 12.0) == (E.WITHDRAW,)
    assert offer.failed(TimedOut("no answer"), 13.0) == (E.DROP_LINK, E.FENCE)
    assert offer.linked(14.0) == (E.WITHDRAW,)
    assert offer.failed(PeerLost("cut"), 15.0) == (E.DROP_LINK, E.FENCE)
    assert offer.fenced(99.0) == (E.LET_GO, E.REPORT)
    assert isinstance(offer.error, TimedOut)


def test_after_the_fence_it_is_offered_again_once_under_another_number() -> None:
    offer, first = _awaiting(), OfferRef("T", LeaseRef("d-1", 1), 1)
    assert offer.ref == first
    assert offer.failed(PeerLost("cut"), 1.0) == (E.DROP_LINK, E.FENCE)
    assert not offer.stands(P.cluster_id, first, 1.0)
    assert offer.fenced(1.1) == (E.PAUSE,)
    assert offer.pause_over(1.2) == (E.REACH,)
    assert offer.linked(1.3) == (E.OFFER,)
    assert not offer.stands(P.cluster_id, first, 1.4)
    assert not offer.told(P.cluster_id, first, OfferState.DONE, "")
    assert offer.stands(P.cluster_id, offer.ref, 1.4)
    assert offer.failed(PeerLost("cut again"), 2.0) == (E.DROP_LINK, E.FENCE)
    assert offer.fenced(2.1) == (E.LET_GO, E.REPORT)
    assert str(offer.error) == "cut again"


def test_nothing_is_granted_over_a_link_that_was_made_since() -> None:
    offer = _awaiting(granted=False)
    offer.lose()
    assert not offer.stands(P.cluster_id, offer.ref, 0.1)
    assert offer.failed(PeerLost("cut"), 0.2) == (E.DROP_LINK, E.PAUSE)
    offer.pause_over(0.4)
    offer.linked(0.5)
    assert offer.stands(P.cluster_id, offer.ref, 0.6)


def test_a_notice_that_is_late_is_asked_for() -> None:
    offer = _awaiting()
    assert offer.woken(offer.wake_s) == (E.ASK_STATE,)
    assert offer.failed(TimedOut("no answer"), 3.0) == (E.AWAIT,)
    assert offer.woken(5.0) == (E.ASK_STATE,)
    assert offer.answered(OfferState.DONE, "", 5.1) == (E.REPORT,)
    assert offer.error is None


def test_p_that_does_not_know_the_offer_hears_it_again_unless_it_has_begun() -> None:
    new, granted = _awaiting(granted=False), _awaiting()
    assert (new.woken(2.0), granted.woken(2.0)) == ((E.ASK_STATE,), (E.ASK_STATE,))
    assert new.answered(OfferState.UNKNOWN, "", 2.1) == (E.OFFER,)
    assert granted.answered(OfferState.UNKNOWN, "", 2.1) == (E.REPORT,)
    assert new.answered(OfferState.UNKNOWN, "", 2.2) == (E.LET_GO, E.REPORT)
    assert isinstance(new.error, RemoteError)


def test_no_order_of_events_upsets_an_offer() -> None:
    """Whatever its driver may be told, at any time: it goes on, and ends within a bound once it is cancelled."""
    with counting() as met:
        _upset_offers(random.Random(1), 4000)
    assert {row for row in all_rows() if row[0] == "offer"} <= set(met)


def _upset_offers(rng: random.Random, count: int) -> None:
    for _ in range(count):
        offer, now_s, num_events = OfferMachine(JOB, P, 1, 0.0, TIMEOUT_S), 0.0, 0
        if rng.random() < 0.02:
            offer.cancel()
        effects = offer.started(rng.choice((now_s,) * 40 + (TIMEOUT_S,)))
        while E.REPORT not in effects:
            now_s, num_events = now_s + rng.choice((0.0, 0.1, 0.3, 3.0, 5.0)), num_events + 1
            ref = rng.choice(
                (offer.ref, OfferRef("T", LeaseRef("d-1", 1), rng.randint(1, 3)), OfferRef("U", LeaseRef("x", 1)))
            )
            if rng.random() < 0.3:
                offer.stands(P.cluster_id, ref, now_s)
            if rng.random() < 0.1:
                offer.told(rng.choice((P.cluster_id, 8)), ref, rng.choice(list(OfferState)), "")
            if rng.random() < 0.1:
                offer.told(P.cluster_id, offer.ref, rng.choice((OfferState.DONE, OfferState.FAILED)), "")
            if rng.random() < 0.05 or num_events > 60:
                offer.cancel()
            effects = _any_outcome(rng, offer, effects[-1], now_s)
        assert num_events < 200


def _any_outcome(rng: random.Random, offer: OfferMachine, effect: OfferEffect, now_s: float) -> tuple[OfferEffect, ...]:
    errors: list[LLMException] = [PeerLost("cut"), TimedOut("late"), RemoteError("odd")]
    if effect is E.PAUSE:
        return offer.pause_over(now_s)
    if effect is E.FENCE:
        return rng.choice((offer.fenced, offer.fenced, offer.linked))(now_s)
    if effect is E.AWAIT:
        return offer.failed(errors[0], now_s) if rng.random() < 0.3 else offer.woken(now_s)
    if rng.random() < 0.4:
        return offer.failed(rng.choice(errors), now_s)
    if effect is E.REACH:
        return offer.linked(now_s)
    return offer.answered(rng.choice(list(OfferState)), "", now_s)


# --- P's pushes ---


def test_at_most_one_thing_is_under_way_per_push() -> None:
    outcomes = {
        PushEvent.STANDS, PushEvent.STANDS_MORE, PushEvent.VOID, PushEvent.NO_ANSWER, PushEvent.LINK_BROKE,
        PushEvent.SENT, PushEvent.SENT_MORE, PushEvent.SENT_ALL, PushEvent.NOT_SENT, PushEvent.OVER,
        PushEvent.OVER_MORE, PushEvent.TOLD,
    }  # fmt: skip
    idle = (PushPhase.WAITING, PushPhase.READY)
    for (at, event), (_, effects) in PUSH_TABLE.rows.items():
        assert len(UNDER_WAY & set(effects)) <= (at in idle or event in outcomes), (at, event)


def test_the_final_word_is_said_only_when_nothing_is_under_way() -> None:
    for (at, event), (to, effects) in PUSH_TABLE.rows.items():
        if to in (PushPhase.TELLING, PushPhase.ENDED):
            assert PushEffect.SEND not in effects, (at, event)
            if at in (PushPhase.SENDING, PushPhase.RETRACTING, PushPhase.TAKEN_BACK, PushPhase.FAILING):
                ends = (PushEvent.SENT_ALL, PushEvent.NOT_SENT, PushEvent.LINK_BROKE, PushEvent.OVER)
                assert event in ends, (at, event)


KEY, D = RequestKey("p-1", 1), 11


def _offer(number: int = 1, request: str = "d-1", end_token: int = 8, timeout_s: float = TIMEOUT_S) -> Offer:
    return Offer(
        ref=OfferRef("T", LeaseRef(request, 1), number), first_token=0, end_token=end_token, block_ids=[[4, 5]],
        num_prompt_tokens=8, prompt_digest="digest", num_offers=1, timeout_s=timeout_s,
    )  # fmt: skip


class _Engine:
    """A table, and what it wants done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.leases = Leases(lambda: self.now_s)
        self.table = PushTable(self.leases)

    def compute(self, end_token: int) -> None:
        self.table.open(PushOpen(KEY, "T", 8, "digest"))
        self.table.chunk(PushChunk(KEY, 0, end_token, ((1, 2),)))

    def finish(self) -> None:
        self.leases.open(KEY, 30.0)
        self.table.end(PushEnd(KEY))

    def act(self, effect: PushEffect) -> PushAct:
        [act] = self.table.take_acts()
        assert act.effect is effect
        return act


@pytest.mark.parametrize("offer_first", [True, False])
def test_whoever_comes_later_starts_the_push_and_the_lease_ends_when_it_is_served(offer_first: bool) -> None:
    engine = _Engine()
    if offer_first:
        assert engine.table.offer(D, _offer(), 0.0).state is OfferState.ACCEPTED
        assert engine.table.take_acts() == []
    engine.compute(8)
    engine.finish()
    if not offer_first:
        assert engine.table.offer(D, _offer(), 0.0).state is OfferState.ACCEPTED
    engine.table.stands(engine.act(PushEffect.ASK).push, True)
    act = engine.act(PushEffect.SEND)
    assert act.send is not None
    assert (act.send.first_token, act.send.end_token) == (0, 8)
    assert engine.table.is_sending(KEY)
    engine.table.sent(act.push)
    assert engine.act(PushEffect.TELL).push.word is OfferState.DONE
    assert engine.table.state(D, _offer().ref).state is OfferState.DONE
    assert engine.leases.take_finished() == [KEY]
    engine.table.told(act.push)
    assert (len(engine.table), engine.table.state(D, _offer().ref).state) == (0, OfferState.DONE)


OTHER = _offer(request="d-2").ref


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_announced", [True, False])
def test_the_lease_is_kept_for_who_has_announced_an_offer(is_held: bool, is_announced: bool) -> None:
    """A router tries again at another D, which queues; the word of the first one comes late."""
    engine = _Engine()
    engine.compute(8)
    if is_announced:
        engine.table.announce(OTHER, 60.0)
    calls = (engine.finish, lambda: engine.table.withdraw(D, _offer().ref, 1))
    for call in calls if is_held else reversed(calls):
        call()
    assert engine.leases.take_finished() == ([] if is_announced else [KEY])
    assert engine.table.held_keys() == ([KEY] if is_announced else [])
    engine.table.sweep(60.0)
    assert (engine.table.held_keys(), engine.table.num_announced) == ([], 0)


@pytest.mark.parametrize("is_late", [True, False])
def test_an_announcement_that_comes_after_its_offer_is_nothing_to_wait_for(is_late: bool) -> None:
    engine = _Engine()
    engine.table.offer(D, _offer(), 0.0)
    if is_late:
        assert engine.table.offer(12, _offer(request="d-2"), 0.0).state is OfferState.ACCEPTED
    engine.table.announce(OTHER, 60.0)
    assert engine.table.num_announced == (0 if is_late else 1)
    engine.table.withdraw(12, OTHER, 1)
    engine.table.announce(OTHER, 60.0)
    assert engine.table.num_announced == 0


def _sending(engine: _Engine, end_token: int = 8) -> PushMachine:
    engine.table.offer(D, _offer(), 0.0)
    engine.compute(end_token)
    engine.table.stands(engine.act(PushEffect.ASK).push, True)
    return engine.act(PushEffect.SEND).push


def test_a_withdrawal_is_confirmed_when_the_send_has_ended() -> None:
    engine = _Engine()
    push = _sending(engine)
    assert engine.table.withdraw(D, push.ref, 1).state is OfferState.WRITING
    engine.table.sent(push)
    assert engine.table.withdraw(D, push.ref, 1).state is OfferState.WITHDRAWN
    assert engine.table.take_acts() == []
    engine.finish()
    assert engine.leases.take_finished() == [KEY]


def test_what_a_preempted_request_was_sending_is_sent_again_from_the_start() -> None:
    engine = _Engine()
    push = _sending(engine, 4)
    engine.table.void(PushVoid(KEY))
    engine.table.sent(push)
    assert engine.table.take_acts() == []
    engine.table.chunk(PushChunk(KEY, 0, 8, ((2, 3),)))
    act = engine.act(PushEffect.SEND)
    assert act.send is not None
    assert (act.send.first_token, act.send.tables) == (0, ((2, 3),))


def test_what_was_granted_over_a_link_is_void_without_it() -> None:
    engine = _Engine()
    push = _sending(engine, 4)
    engine.table.sent(push)
    engine.table.link_lost(D)
    engine.compute(8)
    assert engine.table.take_acts() == []
    assert engine.table.state(D, push.ref).state is OfferState.FAILED
    assert engine.table.offer(D, _offer(2), 0.0).state is OfferState.ACCEPTED
    assert engine.act(PushEffect.ASK).push.ref.number == 2


def test_another_request_of_d_is_refused_while_the_first_is_served_and_when_nothing_is_left() -> None:
    engine = _Engine()
    push = _sending(engine)
    early, late = _offer(request="d-2"), _offer(request="d-3")
    assert engine.table.offer(12, early, 0.0).state is OfferState.ACCEPTED
    engine.table.sweep(COME_AGAIN_S - 0.1)
    assert engine.table.take_acts() == []
    engine.table.sweep(COME_AGAIN_S)
    told = engine.act(PushEffect.TELL).push
    assert (told.word, told.reason) == (OfferState.FAILED, "another request has offered for this transfer")
    engine.table.told(told)
    engine.finish()
    engine.table.sent(push)
    engine.table.told(engine.act(PushEffect.TELL).push)
    assert engine.table.offer(12, late, 0.0).state is OfferState.ACCEPTED  # P's request may come again
    engine.table.sweep(COME_AGAIN_S)
    told = engine.act(PushEffect.TELL).push
    assert (told.word, told.reason) == (OfferState.FAILED, "P's lease is over")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_digest": "other"}, "prompt digest is other at D and digest at P"),
        ({"num_prompt_tokens": 9}, "number of prompt tokens is 9 at D and 8 at P"),
        ({"end_token": 0}, "tokens 0..0 and num_offers 1 make no offer"),
        ({"num_offers": 0}, "tokens 0..8 and num_offers 0 make no offer"),
        *(({"timeout_s": t}, f"timeout_s {t} is not > 0 and <= 86400.0") for t in (0.0, math.nan, math.inf, 1e9)),
    ],
)
def test_an_offer_that_cannot_be_served_is_refused_with_both_values(change: dict[str, Any], reason: str) -> None:
    engine = _Engine()
    engine.compute(4)
    fields = {name: getattr(_offer(), name) for name in Offer.__struct_fields__}
    refused = engine.table.offer(D, Offer(**{**fields, **change}), 0.0)
    assert (refused.state, refused.reason, len(engine.table)) == (OfferState.FAILED, reason, 0)


def test_no_order_of_events_upsets_the_pushes_of_a_worker() -> None:
    """Calls of D, steps, losses and outcomes in any order: nothing raises, and all has an end."""
    with counting() as met:
        _upset_pushes(random.Random(1), 800)
    assert {row for row in all_rows() if row[0] == "push"} - set(met) <= {("push", "sending", "sent, more to send")}


def _upset_pushes(rng: random.Random, count: int) -> None:
    for _ in range(count):
        engine, now_s = _Engine(), 0.0
        under_way: list[PushAct] = []
        for _ in range(80):
            now_s += rng.choice((0.0, 0.5))
            _any_event(rng, engine, now_s)
            under_way += engine.table.take_acts()
            if under_way and rng.random() < 0.3:
                _any_end(rng, engine, under_way.pop(rng.randrange(len(under_way))))
        engine.table.sweep(now_s + TIMEOUT_S)
        while under_way := under_way + engine.table.take_acts():
            _any_end(rng, engine, under_way.pop())
        assert (len(engine.table), engine.table.num_announced) == (0, 0)
        assert not engine.table._line.transfer_ids()
        assert not engine.table.is_sending(KEY)


def _any_event(rng: random.Random, engine: _Engine, now_s: float) -> None:
    timeout_s = rng.choice((1.0, TIMEOUT_S))
    table, offer = (
        engine.table,
        _offer(rng.choice((1, 1, 1, 1, 2, 3)), rng.choice(("d-1", "d-1", "d-1", "d-2")), rng.choice((4, 8)), timeout_s),
    )
    who = rng.choice((D, D, D, 12))
    rng.choice(
        (
            lambda: table.offer(who, offer, now_s),
            lambda: table.offer(who, offer, now_s),
            lambda: table.state(who, offer.ref),
            lambda: table.announce(offer.ref, now_s + timeout_s),
            lambda: table.withdraw(who, offer.ref, rng.randint(0, 2)),
            lambda: table.withdraw(D, _offer(3).ref, 1),
            lambda: table.open(PushOpen(KEY, "T", 8, "digest")),
            lambda: engine.compute(rng.choice((4, 8))),
            lambda: table.void(PushVoid(KEY)),
            lambda: table.void(PushVoid(KEY)),
            lambda: table.end(PushEnd(KEY, "aborted")),
            engine.finish,
            lambda: table.link_lost(who),
            lambda: table.sweep(now_s),
            lambda: table.sweep(now_s),
        )
    )()


def _any_end(rng: random.Random, engine: _Engine, act: PushAct) -> None:
    if act.effect is PushEffect.TELL:
        engine.table.told(act.push)
    elif rng.random() < 0.3:
        engine.table.failed(act.push, rng.choice((PeerLost("cut"), TimedOut("late"), Cancelled("void"))))
    elif act.effect is PushEffect.ASK:
        engine.table.stands(act.push, rng.random() < 0.8)
    else:
        engine.table.sent(act.push)
