# SPDX-License-Identifier: Apache-2.0
"""D's offers when P does not answer, or cannot be found: every request ends, and nobody waits for another's P."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from connector.tests.patience import LINK_S, WORK_S
from connector.tests.push_worker import D_KEY, PushWorker, offered, opened
from datadist_core.testing.parallel import eventually
from vllm_datadist.messages import AnnounceJob, Endpoint, PushSource, RequestKey, StepWork, Withdraw
from vllm_datadist.worker.notices import FoundWorkers, OfferPart, OfferParts
from vllm_datadist.worker.offers import CALLS_PER_PEER, OfferRunner
from vllm_datadist.worker.sources import PushSources

NUM_TOKENS = 33


@pytest.fixture
def workers() -> Iterator[Callable[..., PushWorker]]:
    started: list[PushWorker] = []

    def start(*arguments: object) -> PushWorker:
        started.append(PushWorker(*(arguments or ("tcp",))))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def mute_port() -> Iterator[int]:
    """Takes connections, and says nothing."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1000)
        yield mute.getsockname()[1]


def _offer_to(port: int, number: int) -> StepWork:
    key, at = RequestKey(f"m-{number}", number), PushSource(f"m-{number}", "127.0.0.1", port)
    [job] = offered(Endpoint(0, 0, "127.0.0.1", port, 1), 0, NUM_TOKENS, key=key).offers
    return StepWork(offers=[replace(job, source=at)], announcements=[AnnounceJob(key, at)])


def test_a_p_that_does_not_answer_holds_up_no_other(workers: Callable[..., PushWorker], mute_port: int) -> None:
    """Ten requests to the mute one first. Their look-ups last for the link timeout."""
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    for number in range(10):
        d.tell(_offer_to(mute_port, number))
    begun_s = time.monotonic()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    assert eventually(lambda: p.num_offers() == 1)
    p.step(0, NUM_TOKENS)
    d.until(lambda reported: "d-1" in reported.received)
    assert "d-1" not in d.reported.failed
    assert d.reported.received == {"d-1"}, "the others are still being looked for"
    assert time.monotonic() - begun_s < LINK_S
    assert sum(thread.name == "datadist-find" for thread in threading.enumerate()) == 1


def test_calls_to_one_p_that_are_not_answered_leave_threads_for_others_and_need_not_be_waited_for(
    workers: Callable[..., PushWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P takes the offers and says nothing. Those that have not been sent yet can be taken back at once."""
    p, q, d = workers(), workers(), workers()
    go_on, asked, keys = threading.Event(), threading.Event(), [RequestKey(f"m-{i}", i) for i in range(40)]
    answer = p.pushes.offer

    def answer_late(*arguments: object) -> object:
        asked.set()
        go_on.wait(WORK_S)
        return answer(*arguments)

    monkeypatch.setattr(p.pushes, "offer", answer_late)
    for key in keys:
        d.tell(offered(p.endpoint(), 0, NUM_TOKENS, True, key))
    assert asked.wait(30)
    assert eventually(lambda: d.offers.calls._peers[p.endpoint().cluster_id].waiting)
    d.tell(offered(q.endpoint(), 0, NUM_TOKENS, True))
    assert eventually(lambda: q.num_offers() == 1, LINK_S / 2)
    d.tell(StepWork(ended=keys))
    assert eventually(lambda: len(d.poll().received) >= len(keys) - CALLS_PER_PEER, LINK_S / 2)
    go_on.set()
    d.until(lambda reported: len(reported.received) == len(keys))
    assert d.offers.num_open() == 1


@pytest.mark.parametrize("where", ["look-up", "choice"])
def test_a_fault_in_the_search_for_p_ends_the_request(
    workers: Callable[..., PushWorker], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(PushSources, "_ask" if where == "look-up" else "parts", broken)
    d = workers()
    d.tell(offered(d.endpoint(), 0, NUM_TOKENS, where == "choice"))
    assert "ZeroDivisionError" in d.received().errors[0]
    assert d.offers.num_open() == 0


@dataclass
class _Sources:
    """Two workers of P's, each read by two of D's, found when `found` is set."""

    workers: tuple[Endpoint, ...]
    found: Future[FoundWorkers] = field(default_factory=Future)

    def find(self, source: PushSource, timeout_s: float) -> Future[FoundWorkers]:
        return self.found

    def parts(self, found: FoundWorkers) -> OfferParts:
        return OfferParts((OfferPart(found.workers[0], 2),), (OfferPart(found.workers[1], 1),))

    def share(self, found: FoundWorkers) -> list[OfferPart]:
        return [OfferPart(found.workers[0], 1)]


def _runner(d: PushWorker, sources: _Sources, timeout_s: float) -> OfferRunner:
    log = logging.getLogger("vllm_datadist.push_worker")
    node, peers = d.side._node, d.side._peers
    return OfferRunner(peers, node, sources, node, timeout_s, timeout_s, 2, log)


def test_a_search_that_never_ends_is_given_up(
    workers: Callable[..., PushWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_datadist.worker.offers.GRACE_S", 0.1)
    d = workers()
    runner = _runner(d, _Sources((d.endpoint(),)), 0.2)
    [job] = offered(d.endpoint(), 0, NUM_TOKENS).offers
    runner.submit(job)
    ends = []
    assert eventually(lambda: bool(ends.extend(runner.take_ends().ends) or ends), 10)
    assert "not found" in str(ends[0].error)
    assert (ends[0].key, runner.num_open()) == (D_KEY, 0)
    runner.close()


def test_who_had_not_offered_yet_withdraws_as_those_who_had(workers: Callable[..., PushWorker]) -> None:
    """Else P counts another number of workers of D, or too few."""
    p, q, d = workers(), workers(), workers()
    seen: list[tuple[int, Withdraw]] = []
    sources = _Sources((p.endpoint(), q.endpoint()))
    runner = _runner(d, sources, 5.0)
    call = d.side._node.call

    def spy(cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        if name == "datadist.withdraw":
            seen.append((cluster_id, msgspec.msgpack.decode(body, type=Withdraw)))
        return call(cluster_id, name, body, timeout_s)

    runner.notices._caller = type("Caller", (), {"call": staticmethod(spy)})()
    [job] = offered(p.endpoint(), 0, NUM_TOKENS).offers
    runner.submit(job)
    runner.cancel(job.key)
    sources.found.set_result(FoundWorkers(sources.workers))
    assert eventually(lambda: len(seen) == 2, 10)
    told = {cluster_id: said.num_offers for cluster_id, said in seen}
    assert told == {p.endpoint().cluster_id: 2, q.endpoint().cluster_id: 1}
    assert len(runner.take_ends().ends) == 1
    runner.close()
