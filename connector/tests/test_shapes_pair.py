# SPDX-License-Identifier: Apache-2.0
"""Worker sides of engines of different shapes over the real core: bytes, leases, and what one part that fails does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch

from connector.tests.patience import LINK_S, WORK_S
from connector.tests.shaped_engine import Layers, Rank, Shape, check, engine
from datadist_core.testing.parallel import eventually
from datadist_core.types import Deadline
from vllm_datadist.handoff.lease import LeasePhase
from vllm_datadist.messages import BlockTables, LeaseOpen, LoadJob, ReleaseJob, RemoteLease, RequestKey, StepWork, Watch
from vllm_datadist.worker.loads import LoadLimits
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import StepResults, WorkerPlace, WorkerSide

END, LEASE_S = 141, 2 * WORK_S
LIMITS = LoadLimits(load_timeout_s=WORK_S, link_timeout_s=LINK_S, num_threads=2)
log = logging.getLogger("test")


@dataclass
class Worker:
    rank: Rank
    side: WorkerSide


@dataclass
class Engine:
    workers: list[Worker]

    @property
    def ranks(self) -> list[Rank]:
        return [worker.rank for worker in self.workers]

    def start(self, work: StepWork) -> None:
        for worker in self.workers:
            worker.side.start(work)

    def lease(self, attempt: int = 1) -> RemoteLease:
        endpoints = tuple(worker.side.endpoint for worker in self.workers)
        return RemoteLease("engine", RequestKey("p-1", attempt), LEASE_S, endpoints)

    def close(self) -> None:
        for worker in self.workers:
            worker.side.close()


def _start(shape: Shape, seed: int, backend: str, integrity: str = "off", **changes: object) -> Engine:
    return Engine([_worker(rank, backend, integrity, changes) for rank in engine(shape, END, seed)])


def _worker(rank: Rank, backend: str, integrity: str, changes: dict[str, object]) -> Worker:
    size = rank.raw.numel()
    node = DataDistNode("127.0.0.1", 0, backend, size, integrity=integrity)
    place = WorkerPlace(rank.pp_rank, rank.tp_rank, rank.shape.tp_size, rank.shape.tp_size * len(rank.shape.stages))
    side = WorkerSide(node, place, LIMITS, log)
    with side.place_kv_cache(size):
        raw = torch.zeros(size, dtype=torch.int8, device="cpu")
    rank.move_to(raw)
    side.register(rank.views, rank.caches, msgspec.structs.replace(rank.description, **changes))
    return Worker(rank, side)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines and ends them all, also when the test fails."""
    started: list[Engine] = []

    def start(*args: object, **kwargs: object) -> Engine:
        started.append(_start(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _load(p: Engine, d: Engine, remote: RemoteLease, first: int, end: int) -> LoadJob:
    """P's and D's tables are the same at all workers of each."""
    tables = zip(p.ranks[0].tables, d.ranks[0].tables, strict=True)
    groups = tuple(BlockTables(tuple(source), tuple(target)) for source, target in tables)
    return LoadJob(RequestKey("d-1", remote.key.attempt), remote, groups, first, end)


def _hand_off(p: Engine, d: Engine, first: int = 0, end: int = END, attempt: int = 1) -> list[StepResults]:
    """As vLLM does: P's workers open a lease, D's watch it and load. What each of D's workers reports."""
    remote = p.lease(attempt)
    p.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.start(StepWork(watches=[Watch(RequestKey("d-1", attempt), remote)]))
    d.start(StepWork(loads=[_load(p, d, remote, first, end)]))
    return [_results(worker, lambda results: bool(results.received)) for worker in d.workers]


def _results(worker: Worker, done: Callable[[StepResults], bool]) -> StepResults:
    until_s = time.monotonic() + 2 * WORK_S
    while time.monotonic() < until_s:
        results = worker.side.take_results()
        if done(results):
            return results
        threading.Event().wait(0.002)
    raise AssertionError("nothing was reported in time")


def _check_free(p: Engine, d: Engine) -> None:
    """All of P's workers have reported the end of their lease, none by time, and nobody has anything left."""
    for worker in p.workers:
        assert _results(worker, lambda results: bool(results.sent)).sent == {"p-1"}
        assert worker.side.leases.num_active == 0
        assert [ended.phase for ended in worker.side.leases.take_outcomes()] == [LeasePhase.RELEASED]
    for worker in d.workers:
        assert worker.side.take_results().received == set()
        assert eventually(lambda worker=worker: worker.side._renewals.num_watched() == 0)


TWO_STAGES = (0, 2)
CASES = {
    "TP 2->1": (Shape(2), Shape(1)),
    "TP 1->2": (Shape(1), Shape(2)),
    "TP 4->2, more ranks than heads": (Shape(4, total_heads=2), Shape(2, total_heads=2)),
    "TP 2->4, more ranks than heads": (Shape(2, total_heads=2), Shape(4, total_heads=2)),
    "PP 2->1": (Shape(1, stages=TWO_STAGES), Shape(1)),
    "PP 1->2, TP 2->1": (Shape(2), Shape(1, stages=TWO_STAGES)),
    "block 32->64": (Shape(1, 32), Shape(1, 64)),
    "block 64->32": (Shape(1, 64), Shape(1, 32)),
    "block 48->32, kernel blocks": (Shape(1, 48), Shape(1, 32, pages_per_block=2)),
    "layouts BLHNC->LBNHC": (Shape(1, 16, "BLHNC"), Shape(1, 16, "LBNHC")),
    "layouts LHBNC->BHLNC, TP 2->1": (Shape(2, 16, "LHBNC"), Shape(1, 32, "BHLNC")),
    "MLA 2->1": (Shape(2, total_heads=1, use_mla=True), Shape(1, 32, total_heads=1, use_mla=True)),
    "hybrid 32->16": (
        Shape(2, (32, 64), groups=(Layers((0, 2)), Layers((1, 3)))),
        Shape(1, (16, 32), groups=(Layers((0, 2)), Layers((1, 3)))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_where_a_gather_puts_it(start: Callable[..., Engine], case: str) -> None:
    backend = "tcp" if len(case) % 2 else "shm"
    p, d = (start(shape, seed, backend, integrity="checksum") for seed, shape in enumerate(CASES[case], start=1))
    for rank in p.ranks:
        rank.fill(rank.tables, END)
    first = 64 if "hybrid" not in case else 0
    for results in _hand_off(p, d, first):
        assert results.failed == set(), results.loads[0].error
    for rank in d.ranks:
        check(rank, first, END)
    _check_free(p, d)


@pytest.mark.parametrize("tp_sizes", [(1, 2), (4, 1)], ids=str)
def test_a_release_without_a_load_frees_all_of_p(start: Callable[..., Engine], tp_sizes: tuple[int, int]) -> None:
    p, d = start(Shape(tp_sizes[0]), 1, "shm"), start(Shape(tp_sizes[1]), 2, "shm")
    remote = p.lease()
    p.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.start(StepWork(watches=[Watch(RequestKey("d-1", 1), remote)]))
    d.start(StepWork(releases=[ReleaseJob(RequestKey("d-1", 1), remote)]))
    _check_free(p, d)


@contextmanager
def _counted_releases(worker: Worker) -> Iterator[list[int]]:
    seen: list[int] = []
    release = worker.side.leases.release

    def counting(keys: Sequence[RequestKey], reader: object, num_readers: int = 1) -> object:
        seen.append(num_readers)
        return release(keys, reader, num_readers)

    worker.side.leases.release = counting
    yield seen


def test_a_lease_of_p_waits_for_all_its_readers(start: Callable[..., Engine]) -> None:
    """The first of D's two ranks has read everything, the second has not begun: P still holds the blocks."""
    p, d = start(Shape(1), 1, "shm"), start(Shape(2), 2, "shm")
    p.ranks[0].fill(p.ranks[0].tables, END)
    remote = p.lease()
    p.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    job = _load(p, d, remote, 0, END)
    with _counted_releases(p.workers[0]) as num_readers:
        for index, worker in enumerate(d.workers):
            assert p.workers[0].side.leases.num_active == 1, f"let go before reader {index}"
            worker.side.start(StepWork(loads=[job]))
            assert not _results(worker, lambda results: bool(results.received)).failed
            check(worker.rank, 0, END)
    assert num_readers == [2, 2]
    _check_free(p, d)


def test_one_part_that_fails_fails_the_load_once_and_lets_the_others_go(start: Callable[..., Engine]) -> None:
    p, d = start(Shape(2), 1, "shm"), start(Shape(1), 2, "shm")
    assert not _hand_off(p, d)[0].failed
    _check_free(p, d)
    p.workers[1].side.close()
    [results] = _hand_off(p, d, attempt=2)
    assert (results.received, results.failed, len(results.loads)) == ({"d-1"}, {"d-1"}, 1)
    assert _results(p.workers[0], lambda results: bool(results.sent)).sent == {"p-1"}
    assert d.workers[0].side.take_results().received == set()


def test_a_cancelled_load_lets_all_workers_of_p_go(start: Callable[..., Engine]) -> None:
    p, d = start(Shape(4), 1, "shm"), start(Shape(1), 2, "shm")
    remote = p.lease()
    job = _load(p, d, remote, 0, END)
    d.start(StepWork(loads=[job]))
    d.start(StepWork(ended=[job.key]))
    [results] = [_results(worker, lambda results: bool(results.received)) for worker in d.workers]
    assert results.failed == {"d-1"}
    p.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    _check_free(p, d)


def test_b35_a_worker_of_p_that_does_not_fit_is_named(start: Callable[..., Engine]) -> None:
    p, d = start(Shape(2), 1, "shm"), start(Shape(1), 2, "shm", dtype="bfloat16")
    [results] = _hand_off(p, d)
    assert "dtype is 'float32' here and 'bfloat16' at the peer" in str(results.loads[0].error), "in P's words"
    _check_free(p, d)


def test_b32_a_ticket_whose_ranks_are_not_what_they_say_is_refused(start: Callable[..., Engine]) -> None:
    """Two workers of P that both hold heads 0 and 1: by the ticket's ranks, one of them should have 2 and 3."""
    p, d = start(Shape(2), 1, "shm"), start(Shape(1), 2, "shm")
    remote = p.lease()
    first, second = remote.workers
    remote = replace(remote, workers=(replace(first, tp_rank=1), replace(second, tp_rank=0)))
    p.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.start(StepWork(loads=[_load(p, d, remote, 0, END)]))
    results = _results(d.workers[0], lambda results: bool(results.received))
    assert "should come from P's worker of pp_rank 0 and tp_rank" in str(results.loads[0].error)
    _check_free(p, d)


def test_b32_each_ticket_is_checked_by_what_it_says_of_a_worker_that_is_linked_already(
    start: Callable[..., Engine],
) -> None:
    """Ours and another hand-off may have called the same worker of P by other ranks."""
    p, d = start(Shape(2), 1, "shm"), start(Shape(2), 2, "shm")
    first, second = p.lease().workers
    d.workers[0].side._peers.ready(second, Deadline.after(LINK_S))
    d.workers[1].side._peers.ready(replace(second, tp_rank=0), Deadline.after(LINK_S))
    assert not any(results.failed for results in _hand_off(p, d)), "linked under a wrong name; this ticket is right"
    swapped = replace(p.lease(2), workers=(replace(first, tp_rank=1), replace(second, tp_rank=0)))
    p.start(StepWork(leases=[LeaseOpen(swapped.key, LEASE_S)]))
    d.workers[0].side.start(StepWork(loads=[_load(p, d, swapped, 0, END)]))
    results = _results(d.workers[0], lambda results: bool(results.received))
    assert "should come from P's worker of pp_rank 0 and tp_rank 0, which has none" in str(results.loads[0].error)
