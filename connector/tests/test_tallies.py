# SPDX-License-Identifier: Apache-2.0
"""The scheduler's book: every way a request can go ends in one line, one outcome, and a split of its tokens."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.tests import test_scheduler as scheduler
from vllm_datadist.counts import Awaited, Failure, HoldOutcome, Mode, Outcome, Reason
from vllm_datadist.messages import HoldReport, LoadReport, RequestKey, WorkerNotes
from vllm_datadist.scheduler.side import SchedulerSide
from vllm_datadist.scheduler.tallies import Ledger

PROMPT = 100


class Book:
    """A ledger on a clock of its own, and its lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 1000.0
        self.log = logging.getLogger("test.ledger")
        caplog.set_level(logging.DEBUG, self.log.name)
        self._caplog = caplog
        self.ledger = Ledger(self.log, lambda: self.now_s)
        self.totals: dict[str, dict[str, float]] = {}

    def lines(self, request_id: str = "d") -> list[str]:
        start = f"request {request_id}: "
        debug = [record.getMessage() for record in self._caplog.records if record.levelno == logging.DEBUG]
        return [text for text in debug if text.startswith(start)]

    def counters(self) -> dict[str, dict[str, float]]:
        for name, series in self.ledger.take_counts().data["counters"].items():
            for labels, value in series.items():
                mine = self.totals.setdefault(name, {})
                mine[labels] = mine.get(labels, 0) + value
        return self.totals

    def arrive(self, request_id: str = "d", attempt: int = 1, **fields: object) -> None:
        self.ledger.arrived(RequestKey(request_id, attempt), PROMPT, **fields)  # type: ignore[arg-type]


@pytest.fixture
def book(caplog: pytest.LogCaptureFixture) -> Iterator[Book]:
    book = Book(caplog)
    yield book
    assert book.ledger.num_open() == 0, "a page was never concluded"


def _blocks(book: Book, num_cached: int, num_remote: int) -> None:
    book.ledger.looked_up("d", num_cached, num_remote)
    book.ledger.allocated("d", num_remote)


def _loaded(book: Book) -> None:
    _blocks(book, 32, 60)
    book.ledger.load_ended("d", failed=False)


def _needs_nothing(book: Book) -> None:
    _blocks(book, 96, 0)


def _window_gone(book: Book) -> None:
    book.ledger.looked_up("d", 32, 0, Reason.WINDOW_GONE)
    book.ledger.allocated("d", 0)


def _follower(book: Book) -> None:
    book.ledger.looked_up("d", 0, None, Reason.FOLLOWER)
    book.ledger.looked_up("d", 96, 0, Reason.FOLLOWER)
    book.ledger.allocated("d", 0)


def _other_connector(book: Book) -> None:
    book.ledger.looked_up("d", 32, 68)
    book.ledger.allocated("d", 0)


def _recomputed(book: Book) -> None:
    _blocks(book, 32, 68)
    report = LoadReport(RequestKey("d", 1), failure=Failure.LEASE_LOST)
    cancelled = LoadReport(RequestKey("d", 1), failure=Failure.CANCELLED)
    book.ledger.heard(WorkerNotes(loads=[cancelled]).aggregate(WorkerNotes(loads=[report])))
    book.ledger.load_ended("d", failed=True)
    assert book.lines() == [], "nobody knows yet what is cached now"
    _blocks(book, 64, 0)


def _failed(book: Book) -> None:
    """With the policy "fail" vLLM finishes the request first, and then passes on the end of the load."""
    _blocks(book, 32, 68)
    book.ledger.finished("d", is_aborted=False)
    book.ledger.load_ended("d", failed=True)


def _failed_then_finished(book: Book) -> None:
    _blocks(book, 32, 68)
    book.ledger.load_ended("d", failed=True)
    book.ledger.finished("d", is_aborted=False)


def _aborted_in_queue(book: Book) -> None:
    book.ledger.looked_up("d", 32, 68)
    book.ledger.finished("d", is_aborted=True)


def _aborted_while_loading(book: Book) -> None:
    _blocks(book, 32, 68)
    book.ledger.finished("d", is_aborted=True)
    assert book.lines() == []
    book.ledger.load_ended("d", failed=True)


def _aborted_but_loaded(book: Book) -> None:
    _blocks(book, 32, 68)
    book.ledger.finished("d", is_aborted=True)
    book.ledger.load_ended("d", failed=False)


def _refused(book: Book) -> None:
    book.arrive(attempt=2, reason=Reason.TICKET_PROMPT)  # the same id again: the attempt before is over
    _blocks(book, 32, 0)


Way = Callable[[Book], None]


@pytest.mark.parametrize(
    ("way", "outcome", "remote", "cached", "recomputed"),
    [
        (_loaded, Outcome.LOADED, 60, 32, {"beyond_ticket": 8}),
        (_needs_nothing, Outcome.NOT_NEEDED, 0, 96, {"nothing_needed": 4}),
        (_window_gone, Outcome.REFUSED, 0, 32, {"window_gone": 68}),
        (_follower, Outcome.FOLLOWED, 0, 96, {"follower": 4}),
        (_other_connector, Outcome.NOT_NEEDED, 0, 32, {"other_connector": 68}),
        (_recomputed, Outcome.FAILED, 0, 64, {"load_failed_lease_lost": 36}),
        (_failed, Outcome.FAILED, 0, 0, {}),
        (_failed_then_finished, Outcome.FAILED, 0, 0, {}),
        (_aborted_in_queue, Outcome.ABORTED, 0, 0, {}),
        (_aborted_while_loading, Outcome.ABORTED, 0, 0, {}),
        (_aborted_but_loaded, Outcome.ABORTED, 0, 0, {}),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_every_way_ends_in_one_line_and_one_outcome(
    book: Book, way: Way, outcome: Outcome, remote: int, cached: int, recomputed: dict[str, int]
) -> None:
    book.arrive(source="p-engine")
    way(book)
    book.ledger.load_ended("d", failed=False)
    book.ledger.allocated("d", 0)  # back from preemption
    book.ledger.finished("d", is_aborted=False)
    [line] = book.lines()
    assert f": {outcome.value} (pull): of 100 prompt tokens {remote} from P p-engine, {cached} cached here, " in line
    for reason, num_tokens in recomputed.items():
        assert f"{num_tokens} computed here because {reason}" in line
    counters = book.counters()
    assert counters["requests"] == {f"pull|{outcome.value}": 1}
    assert counters.get("remote_tokens", {}) == ({"pull": remote} if remote else {})
    assert counters.get("cached_tokens", {}) == ({"": cached} if cached else {})
    assert counters.get("recomputed_tokens", {}) == recomputed
    local = cached + sum(recomputed.values())
    assert counters.get("local_tokens", {}) == ({"": local} if local else {})
    failed = outcome is Outcome.FAILED
    assert counters.get("failed_loads", {}) == ({"pull": 1} if failed else {})


def test_the_same_id_again_concludes_the_attempt_before(book: Book) -> None:
    book.arrive()
    _refused(book)
    first, second = book.lines()
    assert ": aborted (pull)" in first
    assert ": refused (pull): of 100 prompt tokens 0 from P, 32 cached here, 68 computed here because ticket_" in second
    assert book.counters()["requests"] == {"pull|aborted": 1, "pull|refused": 1}


def test_the_line_says_peers_bytes_and_times(book: Book) -> None:
    book.arrive(mode=Mode.PUSH, source="p-engine")
    book.now_s += 0.25
    _blocks(book, 0, 100)
    for rank, seconds in ((0, 0.010), (1, 0.030)):
        waits = {Awaited.PREFILL.value: 10 * seconds, Awaited.LINK.value: 0.001}
        peers = (f"10.0.0.{rank}:7000",)
        report = LoadReport(RequestKey("d", 1), peers, ("tcp",), 1_000_000, seconds, waits)
        book.ledger.heard(WorkerNotes(loads=[report]))
    book.ledger.heard(WorkerNotes(loads=[LoadReport(RequestKey("d", 9), num_bytes=5)]))  # of an older attempt
    book.ledger.heard("something else")
    book.now_s += 0.5
    book.ledger.load_ended("d", failed=False)
    [line] = book.lines()
    assert line == (
        "request d: loaded (push): of 100 prompt tokens 100 from P p-engine, 0 cached here, 0 computed here; 250.0 ms "
        "for blocks, 500.0 ms to load: 2000000 bytes in 30.0 ms over tcp from 10.0.0.0:7000, 10.0.0.1:7000, waited "
        "300.0 ms for prefill, 1.0 ms for link"
    )
    times = book.ledger.take_counts().data["times"]
    assert times["wait_seconds"] == {"blocks|push|scheduler": [0.25]}
    assert times["load_seconds"] == {"push": [0.5]}


@pytest.mark.parametrize(
    ("reported", "outcome"),
    [
        ([HoldOutcome.RELEASED, HoldOutcome.RELEASED], "released"),
        ([HoldOutcome.RELEASED, HoldOutcome.EXPIRED], "expired"),
        ([HoldOutcome.ABANDONED, HoldOutcome.EXPIRED], "expired"),
        ([], "unknown"),
    ],
)
def test_a_handoff_of_p_ends_once_however_many_workers(book: Book, reported: list[HoldOutcome], outcome: str) -> None:
    book.ledger.held(RequestKey("p", 4), 64, Mode.PUSH)
    book.ledger.heard(WorkerNotes(holds=[HoldReport(RequestKey("p", 3), HoldOutcome.EXPIRED)]))  # another attempt
    for one in reported:
        book.ledger.heard(WorkerNotes(holds=[HoldReport(RequestKey("p", 4), one)]))
    book.now_s += 2
    book.ledger.hold_ended("p")
    book.ledger.hold_ended("p")
    assert book.lines("p") == [f"request p: handed off 64 tokens (push): {outcome} after 2000.0 ms"]
    counts = book.ledger.take_counts().data
    assert counts["counters"]["handoffs"] == {f"push|{outcome}": 1}
    assert counts["times"]["lease_seconds"] == {"push": [2.0]}


def test_in_any_order_whatever_happens_each_request_has_one_line(book: Book) -> None:
    """vLLM's calls at random, also those that make no sense: nothing raises, no line is missing, none is double."""
    choose = random.Random(11)
    num_arrived = 0
    for step in range(3000):
        request_id = str(choose.randrange(8))
        match choose.randrange(7):
            case 0:
                num_arrived += 1
                book.ledger.arrived(RequestKey(request_id, step), choose.randrange(64))
            case 1:
                book.ledger.looked_up(request_id, choose.randrange(99), choose.choice([None, 0, 7]))
            case 2:
                book.ledger.allocated(request_id, choose.choice([0, 7]))
            case 3:
                book.ledger.load_ended(request_id, choose.random() < 0.5)
            case 4:
                book.ledger.finished(request_id, choose.random() < 0.5)
            case 5:
                book.ledger.looked_up(request_id, 3, 0, choose.choice(list(Reason)))
            case _:
                book.ledger.heard(WorkerNotes(loads=[LoadReport(RequestKey(request_id, step), failure=Failure.LINK)]))
    for request_id in map(str, range(8)):
        book.ledger.finished(request_id, is_aborted=True)
        book.ledger.load_ended(request_id, failed=True)
    lines = [line for request_id in map(str, range(8)) for line in book.lines(request_id)]
    assert len(lines) == num_arrived == sum(book.counters()["requests"].values())
    split = [re.search(r"of (\d+) prompt tokens (\d+) from P, (\d+) cached here, (\d+) computed", one) for one in lines]
    for found in split:
        assert found is not None
        total, *parts = map(int, found.groups())
        assert sum(parts) in (0, total)


# -- through the scheduler side itself


def _malformed(side: SchedulerSide) -> scheduler.Request:
    return scheduler._arrived(side, 10, {**scheduler._ticket(10), "remote_num_tokens": "many"})


def _other_prompt(side: SchedulerSide) -> scheduler.Request:
    params = scheduler._ticket(10)
    params["datadist"]["prompt_digest"] = "0" * 32
    return scheduler._arrived(side, 10, params)


def _other_groups(side: SchedulerSide) -> scheduler.Request:
    params = scheduler._ticket(10)
    params["remote_block_ids"] = [*params["remote_block_ids"], [1]]
    return scheduler._arrived(side, 10, params)


def _followed(side: SchedulerSide) -> scheduler.Request:
    params = scheduler._ticket(10)
    leader = scheduler._arrived(side, 10, params, "leader")
    follower = scheduler._arrived(side, 10, params)
    assert side.num_new_matched_tokens(leader, 0) == (10, True)
    side.update_state_after_alloc(leader, scheduler._blocks([1, 2, 3]), 10)
    assert side.num_new_matched_tokens(follower, 0) == (None, False)
    side.update_output(scheduler.Output(finished_recving={"leader"}))
    return follower


@pytest.mark.parametrize(
    ("come", "reason", "outcome"),
    [
        (_malformed, Reason.TICKET_MALFORMED, Outcome.REFUSED),
        (_other_prompt, Reason.TICKET_PROMPT, Outcome.REFUSED),
        (_other_groups, Reason.TICKET_GROUPS, Outcome.REFUSED),
        (_followed, Reason.FOLLOWER, Outcome.FOLLOWED),
        (lambda side: scheduler._arrived(side, 10), Reason.NOTHING_NEEDED, Outcome.NOT_NEEDED),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_the_scheduler_side_says_why_nothing_is_loaded(
    come: Callable[[SchedulerSide], scheduler.Request], reason: Reason, outcome: Outcome, book: Book
) -> None:
    side = SchedulerSide(scheduler.FACTS, book.log)
    side.set_workers([scheduler.WORKER])
    request = come(side)
    side.take_counts()
    num_cached = 10 if reason is Reason.NOTHING_NEEDED else 4
    side.num_new_matched_tokens(request, num_cached)
    side.update_state_after_alloc(request, scheduler._blocks([1, 2, 3]), 0)
    side.request_finished(request.finished(), ([],))
    counters = side.take_counts().data["counters"]
    assert counters["requests"] == {f"pull|{outcome.value}": 1}
    assert counters.get("recomputed_tokens", {}) == ({reason.value: 6} if num_cached == 4 else {})
    assert (counters["cached_tokens"], counters["local_tokens"]) == ({"": num_cached}, {"": 10})
    [line] = book.lines("d-1")
    assert f" because {reason.value}" in line


@pytest.mark.parametrize(
    ("num_shared", "reason", "outcome"),
    [(0, Reason.TICKET_PROMPT, Outcome.REFUSED), (4, Reason.BEYOND_TICKET, Outcome.NOT_NEEDED)],
)
def test_a_turn_that_departs_from_the_conversation_says_what_is_computed_again(
    num_shared: int, reason: Reason, outcome: Outcome, book: Book
) -> None:
    """Nothing is loaded, but not because nothing was needed."""
    side = SchedulerSide(scheduler.FACTS, book.log)
    side.set_workers([scheduler.WORKER])
    turn = scheduler.Request("p-1", 8, {"do_remote_decode": True}, num_computed_tokens=11)
    vars(turn).update(all_token_ids=[*range(12)])
    _, ticket = side.request_finished(turn.finished(), ([7, 8, 9],))
    other = scheduler.Request("d-1", 16, ticket)
    vars(other).update(all_token_ids=[*range(num_shared), *range(50, 66 - num_shared)])
    side.on_new_request(other)
    assert side.num_new_matched_tokens(other, 4) == (0, False)
    side.update_state_after_alloc(other, scheduler._blocks([1, 2, 3, 4]), 0)
    side.request_finished(other.finished(), ([],))
    counters = side.take_counts().data["counters"]
    assert counters["requests"] == {f"pull|{outcome.value}": 1}
    assert counters["recomputed_tokens"] == {reason.value: 12}


def test_a_producer_that_gets_a_ticket_says_so(book: Book) -> None:
    side = SchedulerSide(replace(scheduler.FACTS, is_consumer=False), book.log)
    request = scheduler._arrived(side, 10)
    side.update_state_after_alloc(request, scheduler._blocks([1, 2, 3]), 0)
    assert side.take_counts().data["counters"]["recomputed_tokens"] == {"role": 10}
    assert len(book.lines("d-1")) == 1


def test_a_handoff_of_p_is_counted_when_the_workers_have_let_go(book: Book) -> None:
    side = SchedulerSide(scheduler.FACTS, book.log)
    side.set_workers([scheduler.WORKER])
    asked = {"do_remote_decode": True}
    done = scheduler.Request("p-1", 10, asked, num_computed_tokens=10)
    gone = scheduler.Request("p-2", 10, asked, num_computed_tokens=10)
    for request in (done, gone):
        side.on_new_request(request)
    side.request_finished(done.finished(), ([7, 8, 9],))
    side.request_finished(gone.finished("FINISHED_ABORTED"), ([7, 8, 9],))
    [lease] = side.take_work().leases
    begun = side.take_counts().data
    assert (begun["counters"], begun["gauges"]) == ({"handoffs": {"pull|abandoned": 1}}, {"active_leases": {"": 1}})
    assert side.take_counts().is_empty(), "only what has changed is told"
    output = scheduler.Output(finished_sending={"p-1"})
    # Only one worker had a reader that did not come.
    outcomes = [HoldReport(lease.key, one) for one in (HoldOutcome.RELEASED, HoldOutcome.EXPIRED)]
    output.kv_connector_worker_meta = WorkerNotes(holds=outcomes)  # type: ignore[attr-defined]
    side.update_output(output)
    ended = side.take_counts().data
    assert ended["counters"] == {"handoffs": {"pull|expired": 1}, "leases_expired": {"": 1}}
    assert ended["gauges"] == {"active_leases": {"": 0}}
