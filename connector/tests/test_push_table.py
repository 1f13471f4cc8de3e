# SPDX-License-Identifier: Apache-2.0
"""The table of P's pushes: transfers that are tried again, ends of leases, limits, links."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connector.tests.test_simulation_pushes import KEY, D, _Engine, _offer, _sending
from datadist_core.errors import PeerLost
from vllm_datadist.handoff import push_readers, pushes
from vllm_datadist.handoff.push import PushEffect
from vllm_datadist.handoff.pushes import COME_AGAIN_S
from vllm_datadist.messages import (
    LeaseRef,
    OfferRef,
    OfferState,
    PushChunk,
    PushEnd,
    PushOpen,
    RequestKey,
)


def test_a_router_that_tries_again_at_another_d_gets_the_push() -> None:
    """What the first D withdrew, before or after the second one's offer, is not said of the second one's lease."""
    engine = _Engine()
    first, second = _offer(), _offer(request="d-2")
    engine.table.offer(D, first, 0.0)
    assert engine.table.withdraw(D, first.ref, 1).state is OfferState.WITHDRAWN
    assert engine.table.offer(12, second, 0.0).state is OfferState.ACCEPTED
    engine.table.withdraw(D, first.ref, 1)
    engine.compute(8)
    engine.table.stands(engine.act(PushEffect.ASK).push, True)
    push = engine.act(PushEffect.SEND).push
    engine.finish()
    engine.table.withdraw(D, first.ref, 1)
    assert engine.leases.is_open(KEY)
    engine.table.sent(push)
    assert engine.act(PushEffect.TELL).push.word is OfferState.DONE
    assert engine.leases.take_finished() == [KEY]


def test_a_send_that_is_pinned_counts_although_the_lease_has_ended() -> None:
    engine = _Engine()
    push = _sending(engine)
    engine.finish()
    engine.now_s = 31.0
    engine.table.sweep(1.0)
    assert (engine.leases.take_finished(), engine.table.take_acts()) == ([], [])
    assert engine.table.offer(D, _offer(2, end_token=4), 1.0).state is OfferState.ACCEPTED
    engine.table.stands(engine.act(PushEffect.ASK).push, True)
    assert "lease is over" in engine.act(PushEffect.TELL).push.reason  # no other is begun
    engine.table.sent(push)
    assert engine.leases.take_finished() == [KEY]
    engine.table.sweep(1.0)
    assert engine.table._held == {}


@pytest.mark.parametrize("comes_again", [True, False])
def test_an_offer_for_an_aborted_transfer_waits_for_p_to_come_again(comes_again: bool) -> None:
    engine = _Engine()
    engine.compute(4)
    engine.table.end(PushEnd(KEY, "aborted"))
    assert engine.table.offer(D, _offer(), 0.0).state is OfferState.ACCEPTED
    if comes_again:
        again = RequestKey("p-2", 2)
        engine.table.open(PushOpen(again, "T", 8, "digest"))
        engine.table.chunk(PushChunk(again, 0, 8, ((1, 2),)))
        engine.act(PushEffect.ASK)
    engine.table.sweep(COME_AGAIN_S)
    assert engine.table.state(D, _offer().ref).reason == ("" if comes_again else "aborted")


def test_sources_that_nobody_asks_for_are_forgotten_with_their_lease() -> None:
    engine = _Engine()
    engine.compute(8)
    engine.finish()
    assert (len(engine.table), engine.table.is_idle) == (0, False)
    engine.now_s = 31.0
    engine.table.sweep(31.0)
    assert engine.table.is_idle
    assert not engine.table._by_key
    assert not engine.table._sources


def test_what_the_engine_waits_for_is_not_the_dearer_the_more_is_held() -> None:
    """Counted, not timed: each look at a lease is one reading of the clock, and a chunk looks at its own pushes."""
    engine = _Engine()
    for number in range(200):
        key = RequestKey("p", number)
        engine.table.open(PushOpen(key, f"T{number}", 8, "digest"))
        engine.leases.open(key, 30.0)
        engine.table.end(PushEnd(key))
    engine.leases._active = _Counted(engine.leases._active)
    engine.table.sweep(0.0)
    assert _Counted.num_scans == 0
    engine.table.offer(D, _offer(), 0.0)
    engine.table._active = _Counted(engine.table._active)
    engine.compute(8)
    assert engine.act(PushEffect.ASK)
    assert _Counted.num_scans == 0


class _Counted(dict[Any, Any]):
    """Counts who goes through all of it."""

    num_scans = 0

    def items(self) -> Any:
        type(self).num_scans += 1
        return super().items()

    def values(self) -> Any:
        type(self).num_scans += 1
        return super().values()


def test_one_worker_of_d_gets_so_many_offers_and_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "MAX_OFFERS_OF_ONE", 3)
    monkeypatch.setattr(push_readers, "MAX_READERS", 3)
    table = _Engine().table
    offers = [msgspec.structs.replace(_offer(), ref=OfferRef(f"T{i}", LeaseRef("d-1", 1))) for i in range(4)]
    states = [table.offer(D, offer, 0.0).state for offer in offers]
    assert states == [OfferState.ACCEPTED] * 3 + [OfferState.FAILED]
    assert table.offer(12, offers[3], 0.0).state is OfferState.ACCEPTED
    table.withdraw(D, offers[0].ref, 1)
    assert table.offer(D, _offer(), 0.0).state is OfferState.ACCEPTED
    for i in range(9):
        table.withdraw(20 + i, OfferRef("V", LeaseRef("d-9", 1)), 9)
    assert len(table._served.take("V")) == 3


def test_all_sends_go_over_the_link_that_was_there_when_d_was_asked() -> None:
    engine = _Engine()
    engine.table.offer(D, _offer(), 0.0)
    engine.compute(4)
    push = engine.act(PushEffect.ASK).push
    push.link_id = 5
    engine.table.stands(push, True)
    act = engine.act(PushEffect.SEND)
    assert act.send is not None
    assert act.send.link_id == 5
    engine.table.sent(push)
    engine.table.link_lost(D, 5)  # a loss before that one, which is told late
    engine.compute(8)
    assert engine.act(PushEffect.SEND).push is push
    engine.table.sent(push)
    engine.table.told(engine.act(PushEffect.TELL).push)
    other = msgspec.structs.replace(_offer(), ref=OfferRef("T", LeaseRef("d-1", 2)))
    engine.table.offer(D, other, 0.0)
    push = engine.act(PushEffect.ASK).push
    push.link_id = 5
    engine.table.link_lost(D, 6)
    engine.table.failed(push, PeerLost("cut"))
    assert engine.table.state(D, other.ref).state is OfferState.FAILED
