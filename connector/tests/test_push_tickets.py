# SPDX-License-Identifier: Apache-2.0
"""A push whose ticket says of P's workers what is not so. Over the real core, both engines in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from connector.tests.push_worker import LEASE_S, P_KEY, PushWorker, Shape, offered, opened
from vllm_datadist.messages import PushSource, RemoteLease, StepWork

NUM_TOKENS = 33


@pytest.fixture
def workers() -> Iterator[list[PushWorker]]:
    """Two of P, one of the two of D."""
    started: list[PushWorker] = []
    try:
        for rank in (0, 1, 0):
            started.append(PushWorker("auto", 20.0, Shape(tp_size=2, tp_rank=rank)))
        yield started
    finally:
        for worker in started:
            worker.close()


@pytest.mark.parametrize("is_swapped", [False, True])
def test_b32_a_worker_of_p_that_has_not_what_its_ticket_says_is_refused(
    workers: list[PushWorker], is_swapped: bool
) -> None:
    """Else P's worker has nothing to send, is done at once, and D takes for written what nobody wrote."""
    *ps, d = workers
    endpoints = tuple(p.endpoint() for p in ps)
    for p in ps:
        p.side.start(StepWork(workers=endpoints))
        p.tell(opened(NUM_TOKENS))
        p.step(0, NUM_TOKENS)
    if is_swapped:
        endpoints = tuple(replace(endpoint, tp_rank=1 - endpoint.tp_rank) for endpoint in endpoints)
    remote = RemoteLease("engine", P_KEY, LEASE_S, endpoints)
    [job] = offered(endpoints[0], 0, NUM_TOKENS).offers
    d.tell(StepWork(offers=[replace(job, source=PushSource("t", endpoints[0].host, endpoints[0].port, remote))]))
    reported = d.received()
    if not is_swapped:
        assert not reported.failed
        assert d.holds(0, NUM_TOKENS)
        return
    assert reported.failed == {job.key.request_id}
    assert "heads 0..0 should come from P's worker of pp_rank 0 and tp_rank 0, which has none" in reported.errors[0]
