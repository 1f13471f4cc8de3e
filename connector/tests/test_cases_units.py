# SPDX-License-Identifier: Apache-2.0
"""Reports and attempts that come at the wrong time, at both halves of the connector, and what is held afterwards.

The rows of docs/faults.md that are about one request's bookkeeping; nothing may be left in any table at the end.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from connector.tests.case_worker import CaseWorker
from connector.tests.patience import WORK_S
from connector.tests.test_scheduler import Output, Request, _arrived, _blocks, _loading, _side
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.parallel import eventually
from vllm_datadist.messages import BlockTables, LoadJob, RequestKey, StepWork
from vllm_datadist.scheduler.side import SchedulerSide
from vllm_datadist.worker.loads import LoadResult

UNKNOWN = RequestKey("nobody", 77)


def _must_be_empty(side: SchedulerSide) -> None:
    side.take_work()
    assert (len(side._handoffs), len(side._holds)) == (0, 0)
    assert not side.has_work()


def _reports() -> Iterator[tuple[str, ...]]:
    """Which of the four requests a step reports as received, in every combination."""
    names = ("loading", "aborted", "finished", "unknown")
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


@pytest.mark.parametrize("received", list(_reports()), ids="+".join)
def test_b07_ends_are_reported_to_vllm_exactly_once_in_any_mix(received: tuple[str, ...]) -> None:
    """Also when the ends of sends and of loads come in one step, and all of it comes a second time."""
    side = _side()
    loading, aborted = _loading(side, name="loading"), _loading(side, name="aborted")
    side.request_finished(aborted.finished("FINISHED_ABORTED"), ([1, 2, 3],))
    finished = _arrived(side, 10, name="finished")
    side.update_state_after_alloc(finished, _blocks([1, 2, 3]), 0)
    side.request_finished(finished.finished(), ([1, 2, 3],))
    held = Request("held", 10, {"do_remote_decode": True}, num_computed_tokens=10)
    assert side.request_finished(held.finished(), ([7],))[0]

    step = Output(finished_recving=set(received), finished_sending={"held", "unknown"}, failed_recving=set(received))
    side.update_output(step)
    assert step.finished_recving == set(received), "what vLLM waits for, and what another connector may wait for"
    assert step.finished_sending == {"held", "unknown"}
    again = Output(finished_recving={"loading", "aborted"}, finished_sending={"held"})
    side.update_output(again)
    assert again.finished_recving == {"loading", "aborted"} - set(received)
    assert again.finished_sending == set()
    side.request_finished(loading.finished(), ([1, 2, 3],))
    _must_be_empty(side)


@pytest.fixture
def pair() -> Iterator[tuple[CaseWorker, CaseWorker]]:
    """P and D in this process, over tcp. Nothing of them is left afterwards."""
    logging.disable()
    CaseWorker("127.0.0.1", 0, 1).close()  # what a process starts once is there from now on
    with nothing_left_behind():
        p, d = CaseWorker("127.0.0.1", 0, 1), CaseWorker("127.0.0.1", 0, 2)
        try:
            yield p, d
        finally:
            p.close()
            d.close()
            del p, d
            logging.disable(logging.NOTSET)


def _job(remote: Any, attempt: int, source: list[int], target: list[int]) -> LoadJob:
    return LoadJob(RequestKey("d", attempt), remote, (BlockTables(tuple(source), tuple(target)),), 0, 2 * 16)


def test_b09_the_end_of_an_old_attempt_is_not_the_end_of_the_new_one(pair: tuple[CaseWorker, CaseWorker]) -> None:
    """Attempt 1 is given up while it reads, attempt 2 starts and ends, then attempt 1 ends."""
    p, d = pair
    side, reading, gate = d._side, threading.Event(), threading.Event()
    results: list[LoadResult] = []
    pull = side._runner._puller.pull

    def slow_for_the_first(peer: Any, endpoint: Any, job: LoadJob, deadline: Any) -> Any:
        if job.key.attempt == 1:
            reading.set()
            assert gate.wait(WORK_S)
        return pull(peer, endpoint, job, deadline)

    def ended(attempt: int) -> bool:
        results.extend(side.take_results().loads)
        return any(result.key.attempt == attempt for result in results)

    side._runner._puller.pull = slow_for_the_first  # type: ignore[method-assign]
    side.start(StepWork(loads=[_job(p.hold(2 * WORK_S), 1, [3, 4], [5, 6])]))
    assert reading.wait(WORK_S)
    side.start(StepWork(ended=[RequestKey("d", 1), UNKNOWN]))
    side.start(StepWork(loads=[_job(p.hold(2 * WORK_S), 2, [8, 9], [10, 11])]))
    assert eventually(lambda: ended(2))
    assert [result.key.attempt for result in results] == [2]
    assert results[0].error is None
    assert d._is_from(1, [8, 9], [10, 11])
    assert p._side.leases.num_active == 1, "attempt 1 has not let go of its lease"
    gate.set()
    assert eventually(lambda: ended(1))
    assert eventually(lambda: p._side.leases.num_active == 0)
    assert d._is_from(1, [8, 9], [10, 11])
    assert sorted(_attempts(results)) == [1, 2], "each is reported once"
    assert side.take_results().loads == ()


def _attempts(results: list[LoadResult]) -> list[int]:
    return [result.key.attempt for result in results]


def test_b07_the_worker_is_told_of_requests_that_it_does_not_know(pair: tuple[CaseWorker, CaseWorker]) -> None:
    p, d = pair
    for end in (p, d):
        end._side.start(StepWork(ended=[UNKNOWN, UNKNOWN]))
        results = end._side.take_results()
        assert (results.sent, results.received, results.failed) == (set(), set(), set())
    assert d.load(p.hold(2 * WORK_S), 1, [1, 2], [3, 4], WORK_S).error == ""
    assert p.freed(WORK_S)
