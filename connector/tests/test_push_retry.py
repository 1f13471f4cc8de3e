# SPDX-License-Identifier: Apache-2.0
"""As `test_push_pair`: D gives up a request and asks again in the same step, and P hears of it in the wrong order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from connector.tests.patience import WORK_S
from connector.tests.push_worker import (
    D_KEY,
    PushWorker,
    Start,
    held,
    offer_is_there,
    offered,
    opened,
    source,
    workers_started,
)
from datadist_core.testing.parallel import eventually
from vllm_datadist.handoff import pushes
from vllm_datadist.messages import OFFER, WITHDRAW, AnnounceJob, RequestKey, StepWork, WithdrawJob

NUM_TOKENS = 33
AGAIN = RequestKey("d-2", 2)


@pytest.fixture
def workers() -> Iterator[Start]:
    with workers_started() as start:
        yield start


@contextmanager
def _held_back(monkeypatch: pytest.MonkeyPatch, d: PushWorker, *names: str) -> Iterator[threading.Event]:
    """These calls of D's worker get no further before the block ends. The event: one is on its way."""
    node, call = d.side._node, d.side._node.call
    go_on, has_come = threading.Event(), threading.Event()

    def slow(cluster_id: int, name: str, *rest: Any) -> bytes:
        if name in names:
            has_come.set()
            go_on.wait(WORK_S)
        return bytes(call(cluster_id, name, *rest))

    monkeypatch.setattr(node, "call", slow)
    try:
        yield has_come
    finally:
        go_on.set()


def _again(p: PushWorker) -> StepWork:
    """One step: the first request is aborted, and another wants the same."""
    work = offered(p.endpoint(), 0, NUM_TOKENS, key=AGAIN)
    work.ended.append(D_KEY)
    return work


@pytest.mark.parametrize("is_granted", [True, False])
def test_an_offer_that_overtakes_the_withdrawal_of_the_one_before_is_served(
    workers: Start, monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    """P is computing. If it has begun to write, D waits for its word; else it lets P go without waiting."""
    p, d = workers(), workers()
    if is_granted:
        p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    if is_granted:
        p.step(0, 20)
        assert eventually(lambda: d.holds(0, 20), WORK_S)
    with _held_back(monkeypatch, d, WITHDRAW) as has_come:
        d.tell(_again(p))
        assert has_come.wait(WORK_S)
        assert eventually(lambda: p.num_offers() == 2, WORK_S), "P has refused the second offer"
    assert d.until(lambda reported: "d-1" in reported.received).failed <= {"d-1"}
    offer_is_there(p)
    if is_granted:
        p.step(20, NUM_TOKENS)
    else:
        p.tell(opened(NUM_TOKENS))
        p.step(0, NUM_TOKENS)
    assert "d-2" not in d.until(lambda reported: "d-2" in reported.received).failed
    assert d.holds(0, NUM_TOKENS)
    p.tell(held())
    p.sent()


def test_a_withdrawal_that_overtakes_the_next_offer_leaves_p_its_blocks(
    workers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has computed the prompt, and would free its blocks when the first request says that it needs nothing."""
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    p.step(0, NUM_TOKENS)
    p.tell(held())
    d.tell(StepWork(announcements=[AnnounceJob(D_KEY, source(p.endpoint()))]))
    assert eventually(lambda: p.pushes.num_announced() == 1, WORK_S)
    work = _again(p)
    work.withdrawals.append(WithdrawJob(D_KEY, source(p.endpoint())))
    come = p.pushes._table._announced._come
    with _held_back(monkeypatch, d, OFFER) as has_come:
        d.tell(work)
        assert eventually(lambda: len(come) == 1, WORK_S), "P has not heard the withdrawal"
        assert has_come.wait(WORK_S)
        assert p.side.leases.num_active == 1
        assert not p.poll().sent
    assert not d.received().failed
    assert d.holds(0, NUM_TOKENS)
    p.sent()
    assert eventually(lambda: p.pushes.num_announced() == 0)
    assert len(d.offers._heirs) == 0


def test_of_two_requests_that_stay_the_later_one_is_refused_after_a_while(
    workers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that sends one hand-off twice: the first one is served, whatever the second one says."""
    monkeypatch.setattr(pushes, "COME_AGAIN_S", 0.3)
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, 20)
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS, has_ticket=True, key=AGAIN))
    reported = d.received()
    assert (reported.received, reported.failed) == ({"d-2"}, {"d-2"})
    assert "another request has offered" in reported.errors[0]
    p.step(20, NUM_TOKENS)
    p.tell(held())
    assert d.until(lambda reported: "d-1" in reported.received).failed == {"d-2"}
    assert d.holds(0, NUM_TOKENS)
    p.sent()
