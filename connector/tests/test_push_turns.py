# SPDX-License-Identifier: Apache-2.0
"""D gives up a request and asks again for the same transfer: in whatever order P hears it, the last one is served."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import msgspec
import pytest

from connector.tests.test_simulation_pushes import KEY, TIMEOUT_S, D, _Engine, _offer, _sending
from datadist_core.errors import Cancelled
from vllm_datadist.handoff.offer_heirs import Heirs
from vllm_datadist.handoff.push import PushAct, PushEffect
from vllm_datadist.handoff.pushes import COME_AGAIN_S
from vllm_datadist.messages import (
    Announce,
    LeaseRef,
    Offer,
    OfferRef,
    OfferState,
    PushEnd,
    PushOpen,
    PushSource,
    RequestKey,
    Withdraw,
)

FIRST, AGAIN = "d-1", "d-2"
OTHERS = "another request has offered for this transfer"


def _of_two(request: str) -> Offer:
    return msgspec.structs.replace(_offer(request=request), num_offers=2)


def _serve_all(engine: _Engine, wanted: str) -> list[PushAct]:
    """Do all that there is to do. D says yes to the request that it still wants. What was sent."""
    sends = []
    while acts := engine.table.take_acts():
        for act in acts:
            if act.effect is PushEffect.ASK:
                engine.table.stands(act.push, act.push.ref.request.request_id == wanted)
            elif act.effect is PushEffect.SEND:
                sends.append(act)
                engine.table.sent(act.push)
            else:
                engine.table.told(act.push)
    return sends


def _calls(engine: _Engine, worker: int) -> tuple[Callable[[], object], ...]:
    """What one of D's two workers says: an offer, its withdrawal that names the next request, and that one's offer."""
    first, again = _of_two(FIRST), _of_two(AGAIN)

    def withdraw() -> None:
        engine.table.announce(again.ref, 60.0)
        engine.table.withdraw(worker, first.ref, 2)

    return (
        lambda: engine.table.offer(worker, first, 0.0),
        withdraw,
        lambda: engine.table.offer(worker, again, 0.0),
    )


@pytest.mark.parametrize("is_held", [False, True])
def test_in_whatever_order_two_workers_of_d_are_heard_the_last_request_is_served(is_held: bool) -> None:
    """All 720 orders, also those in which an offer arrives after its own withdrawal. P has finished, or not begun."""
    for order in permutations(range(6)):
        engine = _Engine()
        if is_held:
            engine.compute(8)
            engine.finish()
        calls = (*_calls(engine, 11), *_calls(engine, 12))
        sends = []
        for number in order:
            calls[number]()
            sends += _serve_all(engine, AGAIN)
        if not is_held:
            engine.compute(8)
            engine.finish()
        sends += _serve_all(engine, AGAIN)
        engine.table.sweep(COME_AGAIN_S)  # offers that came after their withdrawal
        sends += _serve_all(engine, AGAIN)
        assert {(act.push.cluster_id, act.push.ref.request.request_id) for act in sends} == {(11, AGAIN), (12, AGAIN)}
        states = [engine.table.state(worker, _offer(request=AGAIN).ref).state for worker in (11, 12)]
        assert states == [OfferState.DONE] * 2, order
        assert engine.leases.take_finished() == [KEY], order
        assert len(engine.table) == 0, order


def test_who_waits_begins_when_the_last_send_of_the_one_before_has_ended() -> None:
    engine = _Engine()
    push = _sending(engine)
    assert engine.table.offer(D, _offer(request=AGAIN), 0.0).state is OfferState.ACCEPTED
    assert engine.table.withdraw(D, push.ref, 1).state is OfferState.WRITING
    assert engine.table.offer(D, _offer(request=AGAIN), 0.0).state is OfferState.ACCEPTED  # asked again: no change
    engine.table.sweep(COME_AGAIN_S + 1)  # it is its turn soon, however long that send takes
    assert engine.table.take_acts() == []
    engine.table.failed(push, Cancelled("nobody wants it any more"))
    asked = engine.act(PushEffect.ASK).push
    assert asked.ref.request.request_id == AGAIN


@pytest.mark.parametrize("how", ["withdrawn", "link lost", "overdue", "offered again"])
def test_who_waits_may_leave_and_changes_nothing_for_the_one_before(how: str) -> None:
    engine = _Engine()
    push = _sending(engine)
    engine.finish()
    again = _offer(request=AGAIN, timeout_s=1.0)
    engine.table.offer(12, again, 0.0)
    if how == "withdrawn":
        assert engine.table.withdraw(12, again.ref, 1).state is OfferState.WITHDRAWN
    elif how == "link lost":
        engine.table.link_lost(12)
    elif how == "overdue":
        engine.table.sweep(1.0)
    else:
        assert engine.table.offer(12, _offer(2, AGAIN), 0.0).state is OfferState.ACCEPTED
        assert engine.table.withdraw(12, _offer(2, AGAIN).ref, 1).state is OfferState.WITHDRAWN
    assert not engine.table._line.transfer_ids()
    assert (engine.table.take_acts(), engine.leases.take_finished()) == ([], [])
    engine.table.sent(push)
    assert engine.act(PushEffect.TELL).push.word is OfferState.DONE
    assert engine.leases.take_finished() == [KEY]


def test_what_does_not_fit_is_said_at_once_and_again_when_it_is_its_turn() -> None:
    """The next request with that transfer id may be for another prompt."""
    engine = _Engine()
    push = _sending(engine)
    other = msgspec.structs.replace(_offer(request=AGAIN), prompt_digest="other")
    assert "prompt digest" in engine.table.offer(12, other, 0.0).reason
    assert engine.table.offer(12, _offer(request=AGAIN), 0.0).state is OfferState.ACCEPTED
    engine.table.end(PushEnd(KEY, "aborted"))
    engine.table.open(PushOpen(RequestKey("p-2", 2), "T", 8, "other"))
    assert "prompt digest is digest at D and other at P" in engine.act(PushEffect.TELL).push.reason
    engine.table.failed(push, Cancelled("nobody wants it any more"))


def test_who_waits_when_p_gives_up_waits_for_p_to_come_again() -> None:
    engine = _Engine()
    engine.table.offer(D, _offer(), 0.0)
    engine.table.offer(12, _offer(request=AGAIN), 0.0)
    engine.compute(4)
    engine.table.take_acts()
    engine.table.end(PushEnd(KEY, "aborted"))
    assert engine.table.state(12, _offer(request=AGAIN).ref).state is OfferState.ACCEPTED
    engine.table.sweep(COME_AGAIN_S)
    told = {act.push.reason for act in engine.table.take_acts() if act.effect is PushEffect.TELL}
    assert told == {"aborted"}


@pytest.mark.parametrize("has_offered", [True, False])
def test_of_several_who_let_go_none_counts_if_another_waits(has_offered: bool) -> None:
    """Else the lease would have a first reader that is gone, and count none of another request."""
    engine = _Engine()
    engine.compute(4)
    for worker in (11, 12):
        engine.table.offer(worker, _of_two(FIRST), 0.0)
    _serve_all(engine, FIRST)
    engine.leases.open(KEY, 30.0)
    engine.table._by_key[KEY].end_token = 8  # computed, not sent yet
    engine.table.end(PushEnd(KEY))
    if has_offered:
        engine.table.offer(11, _of_two(AGAIN), 0.0)
    else:
        engine.table.announce(_offer(request=AGAIN).ref, 60.0)
    for worker in (11, 12):
        engine.table.withdraw(worker, _of_two(FIRST).ref, 2)
    for worker in (11, 12):
        assert engine.leases.take_finished() == []
        engine.table.withdraw(worker, _of_two(AGAIN).ref, 2)
        _serve_all(engine, "")
    assert engine.leases.take_finished() == [KEY]


def test_who_gave_up_an_offer_counts_for_nothing_when_another_offers_before_the_lease() -> None:
    engine = _Engine()
    engine.table.offer(D, _offer(), 0.0)
    engine.table.withdraw(D, _offer().ref, 1)
    assert engine.table.offer(12, _offer(request="d-2"), 0.0).state is OfferState.ACCEPTED
    engine.compute(8)
    engine.finish()
    assert (engine.leases.take_finished(), engine.table.held_keys()) == ([], [KEY])


# --- D: whom a withdrawal names ---

SOURCE = PushSource("T", "p", 1)


def test_a_withdrawal_names_the_latest_other_request_that_still_wants_it() -> None:
    heirs, keys = Heirs(), [RequestKey(f"d-{i}", i) for i in range(4)]
    for number, key in enumerate(keys[:3]):
        heirs.note(key, SOURCE, 10.0 * (number + 1))
    heirs.note(keys[3], PushSource("T", "q", 1), 99.0)  # another P's

    def named(key: RequestKey, now_s: float = 0.0) -> tuple[str, float] | None:
        found = heirs.of(key, SOURCE, now_s)
        return None if found is None else (found.ref.request.request_id, found.timeout_s)

    assert named(keys[0]) == named(RequestKey("d-0", 9)) == ("d-2", 30.0)
    assert named(keys[2], 15.0) == ("d-1", 5.0)
    heirs.forget(keys[2])
    assert named(keys[0]) == ("d-1", 20.0)
    heirs.note(keys[0], SOURCE, 50.0)  # that one comes after all
    assert named(keys[1]) == ("d-0", 50.0)
    for key in keys:
        heirs.forget(key)
        heirs.forget(key)
    assert named(keys[1]) is None
    assert (len(heirs), heirs._by_transfer) == (0, {})


def test_a_withdrawal_without_a_name_can_be_read_as_before() -> None:
    """By those who do not know that it may name somebody, and from them."""

    class Before(msgspec.Struct, frozen=True):
        ref: OfferRef
        num_offers: int

    ref = OfferRef("T", LeaseRef("d-1", 1))
    new = Withdraw(ref, 2, Announce(ref, TIMEOUT_S))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Withdraw) == new
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Before) == Before(ref, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Before(ref, 2)), type=Withdraw) == Withdraw(ref, 2)
