# SPDX-License-Identifier: Apache-2.0
"""Two worker sides in one process over the real core: a hand-off from P's memory to D's, and all that can go wrong."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch

from connector.tests.patience import LINK_S, WORK_S
from datadist_core import LLMStatusCode
from datadist_core.errors import LLMException
from datadist_core.testing.parallel import eventually
from vllm_datadist.description import PROTOCOL_VERSION, Description
from vllm_datadist.groups import GroupInfo
from vllm_datadist.handoff.lease import LeaseOutcome, LeasePhase
from vllm_datadist.messages import (
    BlockTables,
    LeaseOpen,
    LoadJob,
    ReleaseJob,
    RemoteLease,
    RequestKey,
    StepWork,
    Watch,
)
from vllm_datadist.worker.kv_layout import HeadShare, describe_caches
from vllm_datadist.worker.loads import LoadLimits
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import StepResults, WorkerPlace, WorkerSide

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 16, 2, 4, 8
LAYERS = ("layers.0", "layers.1")
GROUP = GroupInfo(0, TOKENS, None, LAYERS)
LAYER_BYTES = NUM_BLOCKS * HEADS * TOKENS * CONTENT * 4
LIMITS = LoadLimits(load_timeout_s=WORK_S, link_timeout_s=LINK_S, num_threads=2)
LEASE_S = 2 * WORK_S
ALONE = WorkerPlace(0, 0, 1, 1)
log = logging.getLogger("test")


@dataclass
class Worker:
    side: WorkerSide
    tensors: dict[str, torch.Tensor]

    def blocks(self, ids: list[int]) -> torch.Tensor:
        return torch.stack([self.tensors[name][ids] for name in LAYERS])


def _describe(**changes: object) -> Description:
    fields: dict[str, object] = {
        "version": PROTOCOL_VERSION, "model": "tiny", "revision": None, "quantization": None, "dtype": "float32",
        "cache_dtype": "auto", "use_mla": False, "speculative": "none", "tp_size": 1, "pp_size": 1, "tp_rank": 0,
        "pp_rank": 0, "model_config": {"hidden_size": "64"}, "caches": [],
    }  # fmt: skip
    return Description(**{**fields, **changes})


def _start(
    backend: str = "auto",
    in_pool: bool = True,
    limits: LoadLimits = LIMITS,
    place: WorkerPlace = ALONE,
    **changes: object,
) -> Worker:
    node = DataDistNode("127.0.0.1", 0, backend, len(LAYERS) * LAYER_BYTES)
    side = WorkerSide(node, place, limits, log)
    size = len(LAYERS) * LAYER_BYTES
    if in_pool:
        with side.place_kv_cache(size):
            raw = torch.zeros(size, dtype=torch.int8, device="cpu")
    else:
        raw = torch.zeros(size, dtype=torch.int8)
    views = raw.view(torch.float32).view(len(LAYERS), NUM_BLOCKS, HEADS, TOKENS, CONTENT)
    tensors = dict(zip(LAYERS, views, strict=True))
    caches = describe_caches(tensors, [GROUP], ["full_attention"], NUM_BLOCKS, HeadShare(0, 1, HEADS))
    described = _describe(caches=[cache.description for cache in caches])
    side.register(tensors, caches, msgspec.structs.replace(described, **changes))
    return Worker(side, tensors)


@pytest.fixture
def workers() -> Iterator[Callable[..., Worker]]:
    """Starts workers and ends them all, also when the test fails."""
    started: list[Worker] = []

    def start(*args: object, **kwargs: object) -> Worker:
        started.append(_start(*args, **kwargs))
        return started[-1]

    yield start
    for worker in started:
        worker.side.close()


def _fill(worker: Worker) -> None:
    for i, name in enumerate(LAYERS):
        tensor = worker.tensors[name]
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + i * 1e6 + 1)


def _lease(worker: Worker, name: str = "p-1", attempt: int = 1) -> RemoteLease:
    return RemoteLease("engine", RequestKey(name, attempt), LEASE_S, (worker.side.endpoint,))


def _job(remote: RemoteLease, source: list[int], target: list[int], name: str = "d-1") -> LoadJob:
    tables = BlockTables(tuple(source), tuple(target))
    return LoadJob(RequestKey(name, 1), remote, (tables,), 0, len(target) * TOKENS)


def _results(worker: Worker, done: Callable[[StepResults], bool]) -> StepResults:
    """Poll as the engine does until a report satisfies `done`; fails when it takes too long."""
    until_s = time.monotonic() + 2 * WORK_S
    while time.monotonic() < until_s:
        results = worker.side.take_results()
        if done(results):
            return results
        threading.Event().wait(0.002)
    raise AssertionError("nothing was reported in time")


def _hand_off(p: Worker, d: Worker, source: list[int], target: list[int], attempt: int = 1) -> StepResults:
    remote = _lease(p, attempt=attempt)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.side.start(StepWork(watches=[Watch(RequestKey("d-1", 1), remote)]))
    d.side.start(StepWork(loads=[_job(remote, source, target)]))
    return _results(d, lambda results: bool(results.received))


@pytest.mark.parametrize("in_pool", [True, False])
@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_the_blocks_arrive_and_p_is_told(workers: Callable[..., Worker], backend: str, in_pool: bool) -> None:
    p, d = workers(backend, in_pool), workers(backend, in_pool)
    _fill(p)
    results = _hand_off(p, d, [3, 9, 1], [7, 8, 2])
    assert (results.received, results.failed) == ({"d-1"}, set())
    assert torch.equal(d.blocks([7, 8, 2]), p.blocks([3, 9, 1]))
    untouched = [i for i in range(NUM_BLOCKS) if i not in (7, 8, 2)]
    assert not d.blocks(untouched).any()
    moved = results.loads[0].moved
    assert sum(part.num_bytes for part in moved) == 3 * len(LAYERS) * HEADS * TOKENS * CONTENT * 4
    assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}
    assert (p.side.leases.num_active, p.side.take_results().sent, d.side.take_results().received) == (0, set(), set())


def test_a_release_without_a_load_frees_p_at_once(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    remote = _lease(p)
    d.side.start(StepWork(releases=[ReleaseJob(RequestKey("d-1", 1), remote)]))
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}
    assert p.side.leases.take_outcomes() == [LeaseOutcome(remote.key, LeasePhase.RELEASED)]


def test_a_load_of_an_ended_lease_fails(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    remote = _lease(p)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, 0.001)]))
    _results(p, lambda results: bool(results.sent))
    d.side.start(StepWork(loads=[_job(remote, [1], [1])]))
    results = _results(d, lambda results: bool(results.received))
    assert results.failed == {"d-1"}
    assert "expired" in str(results.loads[0].error)


def test_a_lease_that_ends_during_the_read_fails_the_load(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    _fill(p)
    remote = _lease(p)
    pull = d.side._runner._puller.pull

    def slow_pull(*args: object) -> object:
        moved = pull(*args)
        p.side.leases._leases._active[remote.key].ends_at_s = 0.0
        return moved

    d.side._runner._puller.pull = slow_pull
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.side.start(StepWork(loads=[_job(remote, [1], [1])]))
    results = _results(d, lambda results: bool(results.received))
    assert results.failed == {"d-1"}
    assert "expired when the blocks had been read" in str(results.loads[0].error)


def test_a_second_reader_with_the_same_ticket_is_not_told_that_the_lease_held(workers: Callable[..., Worker]) -> None:
    """A router may try again elsewhere with a ticket that was used: P's blocks may hold something else by then."""
    p, d, second = workers(), workers(), workers()
    assert not _hand_off(p, d, [1], [1]).failed
    second.side.start(StepWork(loads=[_job(_lease(p), [1], [1])]))
    results = _results(second, lambda results: bool(results.received))
    assert results.failed == {"d-1"}
    assert "released" in str(results.loads[0].error)


def test_engines_that_do_not_fit_are_refused_with_both_values(workers: Callable[..., Worker]) -> None:
    """B35."""
    p, d = workers(), workers(model="other", cache_dtype="fp8")
    results = _hand_off(p, d, [1], [1])
    assert results.failed == {"d-1"}
    for text in ("model", "'tiny'", "'other'", "cache_dtype", "'auto'", "'fp8'"):
        assert text in str(results.loads[0].error)


def test_a_dead_p_fails_the_load_in_time_and_a_new_one_serves(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    _fill(p)
    assert not _hand_off(p, d, [1], [1]).failed
    p.side.close()
    results = _hand_off(p, d, [2], [2])
    assert results.failed == {"d-1"}
    successor = workers()
    _fill(successor)
    assert not _hand_off(successor, d, [5], [5]).failed
    assert torch.equal(d.blocks([5]), successor.blocks([5]))


def test_a_lost_link_is_made_again_for_the_next_load(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    _fill(p)
    assert not _hand_off(p, d, [1], [1]).failed
    p.side._node._datadist.unlink_clusters([_unlink_info(d)], force=True)
    assert not _hand_off(p, d, [2], [2], attempt=2).failed
    assert torch.equal(d.blocks([2]), p.blocks([2]))


def _unlink_info(worker: Worker) -> object:
    from vllm_datadist.worker.node import _info

    return _info(worker.side.endpoint)


def test_after_the_read_only_the_release_is_repeated(workers: Callable[..., Worker]) -> None:
    """The link breaks when P has released but D has not heard: P's blocks may be reused, so no second read."""
    p, d = workers(), workers()
    _fill(p)
    remote = _lease(p)
    release, calls = d.side._lease_calls.release, []

    def release_and_lose_the_answer(*args: object) -> object:
        states = release(*args)
        calls.append(states)
        if len(calls) == 1:
            p.tensors[LAYERS[0]][1] = -1.0
            raise LLMException_lost()
        return states

    d.side._lease_calls.release = release_and_lose_the_answer
    want = p.blocks([1]).clone()
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    d.side.start(StepWork(loads=[_job(remote, [1], [1])]))
    assert not _results(d, lambda results: bool(results.received)).failed
    assert len(calls) == 2
    assert torch.equal(d.blocks([1]), want)


def LLMException_lost() -> LLMException:
    from datadist_core.errors import PeerLost

    return PeerLost("the answer was lost")


def test_a_cancelled_load_is_reported_and_p_is_let_go(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    remote = _lease(p)
    job = _job(remote, [1], [1])
    d.side.start(StepWork(loads=[job]))
    d.side.start(StepWork(ended=[job.key]))
    results = _results(d, lambda results: bool(results.received))
    assert results.failed == {"d-1"}
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}


def test_a_load_ends_by_its_deadline_when_p_never_opens_the_lease(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers(limits=replace(LIMITS, load_timeout_s=0.5))
    d.side.start(StepWork(loads=[_job(_lease(p), [1], [1])]))
    results = _results(d, lambda results: bool(results.received))
    assert results.failed == {"d-1"}


def test_a_load_reads_before_p_opens_the_lease_and_ends_after(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    _fill(p)
    remote = _lease(p)
    d.side.start(StepWork(loads=[_job(remote, [1], [2])]))
    assert eventually(lambda: torch.equal(d.blocks([2]), p.blocks([1])))
    assert not d.side.take_results().received
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    assert not _results(d, lambda results: bool(results.received)).failed
    assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}


def test_blocks_that_p_does_not_have_fail_the_load(workers: Callable[..., Worker]) -> None:
    p, d = workers(), workers()
    assert _hand_off(p, d, [NUM_BLOCKS + 5], [1]).failed == {"d-1"}


def test_a_watched_lease_outlives_its_time(workers: Callable[..., Worker]) -> None:
    """P's time passes before each renewal, and only then: most of the lease's."""
    p, d = workers(), workers()
    now_s, renewed, renew = [0.0], threading.Event(), p.side.leases.renew
    p.side.leases.unlocked._clock = lambda: now_s[0]

    def after_a_while(keys: object) -> object:
        if now_s[0] < 3.0:
            now_s[0] += 0.5
        states = renew(keys)
        if now_s[0] >= 3.0:
            renewed.set()
        return states

    p.side.leases.renew = after_a_while
    remote = replace(_lease(p), lease_s=0.6)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, 0.6)]))
    d.side.start(StepWork(watches=[Watch(RequestKey("d-1", 1), remote)]))
    assert renewed.wait(WORK_S)
    assert not p.side.take_results().sent
    assert p.side.leases.num_active == 1
    d.side.start(StepWork(ended=[RequestKey("d-1", 1)]))
    now_s[0] = 100.0
    assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}


def test_a_lease_is_renewed_when_it_is_first_watched(workers: Callable[..., Worker]) -> None:
    """The ticket may have been on its way for long: the lease's time starts again."""
    p, d = workers(), workers()
    remote = replace(_lease(p), lease_s=600.0)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, 600.0)]))
    renewed = threading.Event()
    renew = p.side.leases.renew
    p.side.leases.renew = lambda keys: [renewed.set(), renew(keys)][1]
    d.side.start(StepWork(watches=[Watch(RequestKey("d-1", 1), remote)]))
    assert renewed.wait(30)


def _ranks(workers: Callable[..., Worker], count: int) -> list[Worker]:
    return [workers(place=WorkerPlace(0, rank, count, count), tp_size=count, tp_rank=rank) for rank in range(count)]


def test_each_rank_loads_from_its_counterpart(workers: Callable[..., Worker]) -> None:
    ps, ds = _ranks(workers, 2), _ranks(workers, 2)
    for rank, p in enumerate(ps):
        _fill(p)
        p.tensors[LAYERS[0]].mul_(rank + 1)
    remote = replace(_lease(ps[0]), workers=tuple(p.side.endpoint for p in reversed(ps)))
    for p in ps:
        p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    for d in ds:
        d.side.start(StepWork(loads=[_job(remote, [4], [6])]))
    for p, d in zip(ps, ds, strict=True):
        assert not _results(d, lambda results: bool(results.received)).failed
        assert torch.equal(d.blocks([6]), p.blocks([4]))
        assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}
    assert not torch.equal(ds[0].blocks([6]), ds[1].blocks([6]))


@pytest.mark.parametrize(("num_p", "num_d"), [(3, 1), (1, 2)])
def test_all_ranks_of_p_are_released_however_many_d_has(workers: Callable[..., Worker], num_p: int, num_d: int) -> None:
    ps, ds = _ranks(workers, num_p), _ranks(workers, num_d)
    remote = replace(_lease(ps[0]), workers=tuple(p.side.endpoint for p in ps))
    for p in ps:
        p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    for d in ds:
        d.side.start(StepWork(releases=[ReleaseJob(RequestKey("d-1", 1), remote)]))
    # A rank of another layout is refused by its description, but a link is all that a release needs.
    for p in ps:
        assert _results(p, lambda results: bool(results.sent)).sent == {"p-1"}


def test_closing_leaves_no_thread(workers: Callable[..., Worker]) -> None:
    before = set(threading.enumerate())
    p, d = workers(), workers()
    _fill(p)
    assert not _hand_off(p, d, [1], [1]).failed
    for worker in (p, d):
        worker.side.close()
        worker.side.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()


def test_too_few_huge_pages_are_named_with_the_remedy() -> None:
    """And not as something that is wrong with the address."""
    with pytest.raises(LLMException, match=r"vm\.nr_hugepages") as caught:
        DataDistNode("127.0.0.1", 0, "shm", 1 << 45, huge_pages=True)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
