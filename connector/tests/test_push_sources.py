# SPDX-License-Identifier: Apache-2.0
"""Who P's workers are, as P says or a ticket names them: what cannot be is refused at once, and in no time.

Finding the holders of a head takes time for each rank there is, so the ranks are checked before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from connector.tests.shaped_engine import Shape, engine
from datadist_core.errors import ProtocolError, RemoteError
from vllm_datadist.messages import Endpoint, WorkerAddress, Workers
from vllm_datadist.params import MAX_WORKERS
from vllm_datadist.worker.planner import PlanError
from vllm_datadist.worker.shares import find_sources
from vllm_datadist.worker.sources import read_workers

#: A D with these takes minutes, or all memory, if it looks at every rank up to the largest.
HUGE = 2**40
IMPOSSIBLE = [
    [(0, HUGE)],
    [(0, 0), (0, HUGE)],
    [(0, 0), (HUGE, 0)],
    [(0, -1)],
    [(0, -1), (0, 1)],
    [(-1, 0), (0, 0)],
    [(0, 0), (0, 2)],
]
Ranks = Sequence[tuple[int, int]]


def _reply(ranks: Ranks) -> bytes:
    workers = [WorkerAddress(pp, tp, "10.0.0.1", 7000 + i, i + 1) for i, (pp, tp) in enumerate(ranks)]
    return msgspec.msgpack.encode(Workers(workers))


@pytest.mark.parametrize("ranks", IMPOSSIBLE, ids=str)
def test_ranks_that_so_many_workers_cannot_have_are_refused(ranks: Ranks) -> None:
    [d] = engine(Shape(1), 16, seed=1)
    started_s = time.monotonic()
    workers = [replace(d.endpoint, pp_rank=pp, tp_rank=tp, cluster_id=i + 1) for i, (pp, tp) in enumerate(ranks)]
    with pytest.raises(PlanError, match=r"P's \d workers have (pp|tp)_rank -?\d+\.\.-?\d+"):
        find_sources(d.description, workers)
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("ranks", [*IMPOSSIBLE, [(0, 0), (0, 0)]], ids=str)
def test_a_peer_that_names_such_workers_is_not_believed(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match=r"datadist\.workers: the peer names .* expected one of each pp_rank"):
        read_workers(_reply(ranks))


def test_a_peer_that_names_too_many_workers_or_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_WORKERS + 1} workers, expected 1..{MAX_WORKERS}"):
        read_workers(_reply([(0, rank) for rank in range(MAX_WORKERS + 1)]))
    with pytest.raises(RemoteError, match="has not told its workers of each other yet"):
        read_workers(_reply([]))
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_workers(b"\xc1")


def test_the_workers_of_one_engine_are_found_in_any_order() -> None:
    found = read_workers(_reply([(1, 1), (0, 0), (1, 0), (0, 1)]))
    assert found[0] == Endpoint(1, 1, "10.0.0.1", 7000, 1)
    assert {(one.pp_rank, one.tp_rank) for one in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
