# SPDX-License-Identifier: Apache-2.0
"""As `test_push_pair`, when a peer does not answer, asks for what cannot be, or has another link than before."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from connector.tests.patience import WORK_S
from connector.tests.push_worker import (
    TARGET_TABLE,
    PushWorker,
    Start,
    chunk,
    held,
    offer_is_there,
    offered,
    opened,
    workers_started,
)
from datadist_core.errors import PeerLost
from datadist_core.testing.parallel import eventually
from vllm_datadist.handoff.push import PushPhase
from vllm_datadist.handoff.pushes import PushTable
from vllm_datadist.messages import (
    OFFER_STANDS,
    LeaseRef,
    OfferRef,
    OfferState,
    RequestKey,
    StepWork,
)
from vllm_datadist.worker.pushes import NUM_CALLERS

NUM_TOKENS = 33


@pytest.fixture
def workers() -> Iterator[Start]:
    with workers_started() as start:
        yield start


def test_one_d_that_does_not_answer_holds_up_no_other(workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep P from renewing the leases that others wait for."""
    p, silent, d = workers(), workers(), workers()
    silent_id, call, is_over = silent.endpoint().cluster_id, p.pushes._links.call, threading.Event()

    def never_answered(cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        if cluster_id == silent_id:
            is_over.wait(4 * WORK_S)
        return bytes(call(cluster_id, name, body, timeout_s))

    monkeypatch.setattr(p.pushes._links, "call", never_answered)
    names = [f"t{i}" for i in range(NUM_CALLERS + 4)]
    try:
        for number, name in enumerate(names):
            key = RequestKey(f"p-{name}", number)
            p.tell(opened(NUM_TOKENS, key, name=name))
            job = replace(offered(p.endpoint(), 0, NUM_TOKENS, key=RequestKey(f"d-{name}", 1)).offers[0])
            silent.tell(StepWork(offers=[replace(job, source=replace(job.source, transfer_id=name))]))
        assert eventually(lambda: p.num_offers() == len(names))
        for number, name in enumerate(names):
            p.tell(chunk(0, NUM_TOKENS, key=RequestKey(f"p-{name}", number)))
        passed = p.age_leases(3.0)
        p.tell(held(RequestKey("p-t0", 0), lease_s=0.6))
        p.tell(opened(NUM_TOKENS))
        p.step(0, NUM_TOKENS)
        p.tell(held())
        d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
        assert not d.received().failed
        assert d.holds(0, NUM_TOKENS)
        assert passed.wait(WORK_S)
        assert p.sent().sent == {"p-1"}, "the silent one's offer holds the lease of t0"
    finally:
        is_over.set()


def test_a_sweep_that_fails_is_not_the_last(workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one comes when the offer's time is over."""
    p, d, sweep, fails = workers(), workers(), PushTable.sweep, [True]

    def once_at_fault(self: PushTable, now_s: float) -> None:
        if fails and fails.pop():
            raise RuntimeError("a fault of ours")
        sweep(self, now_s + WORK_S)

    monkeypatch.setattr(PushTable, "sweep", once_at_fault)
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    assert d.received().failed
    assert eventually(lambda: p.num_offers() == 0)
    assert not fails


def test_sources_of_p_go_with_their_leases_when_nobody_offers(workers: Start) -> None:
    p = workers()
    p.tell(opened(NUM_TOKENS))
    p.step(0, NUM_TOKENS)
    p.tell(held(lease_s=0.1))
    assert eventually(lambda: p.pushes._table.is_idle and not p.pushes._table._sources)
    p.sent()


def test_a_table_that_is_too_short_is_refused(workers: Start) -> None:
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    job = offered(p.endpoint(), 0, NUM_TOKENS).offers[0]
    d.tell(StepWork(offers=[replace(job, tables=(TARGET_TABLE[:-1],))]))
    assert "has 8 blocks of 4 tokens, too few for 33 tokens" in d.received().errors[0]


@pytest.mark.parametrize("timeout_s", [math.nan, 0.0, -math.inf])
def test_an_announcement_needs_a_time(workers: Start, timeout_s: float) -> None:
    p = workers()
    assert p.pushes.announce(OfferRef("t", LeaseRef("d-1", 1)), timeout_s).state is OfferState.FAILED
    assert p.pushes.num_announced() == 0


def test_a_grant_is_used_over_its_link_only(workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """P hears of the loss after D's next link is there: nothing goes over that one without another grant."""
    p, d = workers(), workers()
    node, d_id = p.pushes._links, d.endpoint().cluster_id
    exchange, asked, call = p.side._exchange, [], node.call

    def noted(cluster_id: int, name: str, *rest: Any) -> bytes:
        asked.append((name, _notes(p)))
        return bytes(call(cluster_id, name, *rest))

    monkeypatch.setattr(node, "call", noted)
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, 20)
    assert eventually(lambda: d.holds(0, 20))
    [machine] = p.pushes._table._active.values()
    first = node.link_id(d_id)
    assert machine.link_id == first
    assert asked[0] == (OFFER_STANDS, [first])  # noted before
    machine.link_id = first + 1000  # as if the link had been made anew since
    description = exchange._description_of(d_id)
    p.step(20, NUM_TOKENS)
    p.tell(held())
    assert eventually(lambda: machine.phase is PushPhase.ENDED)
    assert machine.word is OfferState.FAILED
    assert d.received().failed
    assert not d.holds(20, NUM_TOKENS)
    exchange.link_lost(d_id, PeerLost("told late"))
    assert exchange._description_of(d_id) is description


def _notes(p: PushWorker) -> list[int | None]:
    return [push.link_id for push in p.pushes._table._active.values()]
