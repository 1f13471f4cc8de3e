# SPDX-License-Identifier: Apache-2.0
"""The memory pool: never overlaps, gives everything back, stays valid while anybody looks at it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from datadist_core.errors import ClosedError, FeatureNotEnabled, OutOfMemory, ParamInvalid
from datadist_core.memory.pool import Allocation, MemoryPool, PoolStats
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.parallel import require_all
from datadist_core.types import LLMStatusCode, Placement

MIB = 1 << 20


def make_pool(size_bytes: int = 4 * MIB, page_shift: int = 16, **more: object) -> MemoryPool:
    return MemoryPool(size_bytes, Placement.HOST, 9, page_shift=page_shift, **more)


def backed_bytes(pool: MemoryPool) -> int:
    return os.fstat(pool.mapping.fd).st_blocks * 512


def bytes_of(pool: MemoryPool, allocation: Allocation) -> np.ndarray:
    return pool.mapping.view(allocation.offset_bytes, allocation.size_bytes)


class PoolMachine(RuleBasedStateMachine):
    """Random life of a pool against a plain list of what is in use."""

    allocations = Bundle("allocations")

    @initialize(page_shift=st.sampled_from([10, 12, 16]), num_pages=st.integers(4, 40))
    def open(self, page_shift: int, num_pages: int) -> None:
        self.page = 1 << page_shift
        self.pool = make_pool(num_pages << page_shift, page_shift)
        self.used: dict[int, Allocation] = {}
        self.high_water = 0
        self.stamp = 0

    @rule(target=allocations, pages=st.integers(0, 12), rest=st.integers(1, 1024))
    def allocate(self, pages: int, rest: int) -> Allocation | None:
        num_bytes = pages * self.page + rest
        largest = self.pool.stats().largest_free_bytes
        if self.rounded(num_bytes) > largest:
            with pytest.raises(OutOfMemory, match=f"no free range of {num_bytes} bytes.*largest range is {largest}"):
                self.pool.allocate(num_bytes)
            return None
        allocation = self.pool.allocate(num_bytes)
        self.stamp = self.stamp % 255 + 1
        bytes_of(self.pool, allocation)[:] = self.stamp
        self.used[self.stamp] = allocation
        assert allocation.size_bytes == num_bytes
        return allocation

    @rule(allocation=consumes(allocations))
    def free(self, allocation: Allocation | None) -> None:
        if allocation is None:
            return
        self.pool.free(allocation)
        self.used = {stamp: other for stamp, other in self.used.items() if other is not allocation}
        with pytest.raises(ParamInvalid, match="not in use"):
            self.pool.free(allocation)

    @invariant()
    def nothing_overlaps(self) -> None:
        ranges = sorted((a.offset_bytes, a.offset_bytes + self.rounded(a.size_bytes)) for a in self.used.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert all(start >= 0 and end <= self.pool.region.size_bytes for start, end in ranges)

    @invariant()
    def nobody_writes_into_what_is_in_use(self) -> None:
        for stamp, allocation in self.used.items():
            assert (bytes_of(self.pool, allocation) == stamp).all()

    @invariant()
    def addresses_are_aligned(self) -> None:
        for allocation in self.used.values():
            assert allocation.address % self.page == 0
            assert allocation.address == self.pool.region.address + allocation.offset_bytes

    @invariant()
    def stats_are_right(self) -> None:
        total = self.pool.region.size_bytes
        used = sum(self.rounded(a.size_bytes) for a in self.used.values())
        self.high_water = max(self.high_water, used)
        assert self.pool.stats() == PoolStats(total, used, total - used, self.largest_gap(), self.high_water)

    def largest_gap(self) -> int:
        """Also says that free neighbours are one range: the pool knows no larger and no smaller one."""
        edges = sorted((a.offset_bytes, a.offset_bytes + self.rounded(a.size_bytes)) for a in self.used.values())
        starts = [start for start, _ in edges] + [self.pool.region.size_bytes]
        ends = [0] + [end for _, end in edges]
        return max(start - end for start, end in zip(starts, ends, strict=True))

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.page) * self.page

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for allocation in self.used.values():
            self.pool.free(allocation)
        stats = self.pool.stats()
        assert (stats.used_bytes, stats.largest_free_bytes) == (0, stats.total_bytes), "not one free range again"
        self.pool.close()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_large_pool_costs_nothing() -> None:
    pool = make_pool(64 << 30)
    assert pool.stats().total_bytes == 64 << 30
    assert backed_bytes(pool) == 0
    far = pool.mapping.view((64 << 30) - 8, 8)
    far[:] = 1
    assert 0 < backed_bytes(pool) <= 4 * MIB
    pool.close()


def test_freed_memory_goes_back_to_the_system() -> None:
    pool = make_pool(64 * MIB)
    allocation = pool.allocate(32 * MIB)
    bytes_of(pool, allocation)[:] = 1
    assert backed_bytes(pool) == 32 * MIB
    pool.free(allocation)
    assert backed_bytes(pool) == 0


def test_small_ranges_go_back_together() -> None:
    """Each too small to be worth a system call; what is left behind stays under the limit."""
    pool = make_pool(64 * MIB)
    small = [pool.allocate(64 << 10) for _ in range(512)]
    for allocation in small:
        bytes_of(pool, allocation)[:] = 1
    for allocation in small:
        pool.free(allocation)
    assert backed_bytes(pool) < MIB


def test_giving_back_spares_the_neighbours() -> None:
    pool = make_pool(8 * MIB)
    before, middle, after = (pool.allocate(2 * MIB) for _ in range(3))
    for stamp, allocation in enumerate((before, middle, after), start=1):
        bytes_of(pool, allocation)[:] = stamp
    pool.free(middle)
    assert (bytes_of(pool, before) == 1).all()
    assert (bytes_of(pool, middle) == 0).all()
    assert (bytes_of(pool, after) == 3).all()


def test_best_fit_spares_the_large_range() -> None:
    pool = make_pool(16 * MIB)
    hole, _fence = pool.allocate(MIB), pool.allocate(MIB)
    pool.free(hole)
    assert pool.allocate(MIB).offset_bytes == hole.offset_bytes
    assert pool.stats().largest_free_bytes == 14 * MIB


def test_region_describes_the_whole_pool() -> None:
    pool = make_pool(5 * MIB + 1)
    region = pool.region
    assert (region.region_id, region.placement) == (9, Placement.HOST)
    assert region.size_bytes == 5 * MIB + (64 << 10)
    assert region.mapping is not None
    assert os.fstat(region.mapping.fd).st_size == region.mapping.offset_bytes + region.size_bytes


def test_another_mapping_of_the_file_sees_the_bytes() -> None:
    """What a peer on this host does."""
    pool = make_pool()
    allocation = pool.allocate(100)
    bytes_of(pool, allocation)[:] = np.arange(100)
    fd = os.open(f"/proc/self/fd/{pool.region.mapping.fd}", os.O_RDWR)
    try:
        assert os.pread(fd, 100, allocation.offset_bytes) == bytes(range(100))
    finally:
        os.close(fd)


def test_the_file_cannot_change_its_size() -> None:
    """A peer that mapped it never gets SIGBUS."""
    pool = make_pool()
    for size in (0, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.mapping.fd, size)


def test_views_outlive_the_pool() -> None:
    with nothing_left_behind():
        _use_after_close()


def _use_after_close() -> None:
    pool = make_pool()
    torch = pytest.importorskip("torch")
    allocation = pool.allocate(MIB)
    array, fd = bytes_of(pool, allocation), pool.mapping.fd
    tensor = torch.from_numpy(array).view(torch.float32)
    tensor[:] = 0.5
    pool.close()
    pool.close()
    del pool, array
    gc.collect()
    tensor += 1
    assert tensor.sum().item() == 1.5 * (MIB // 4)
    os.fstat(fd)
    del tensor
    gc.collect()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_the_region_keeps_the_memory() -> None:
    pool = make_pool()
    region, view = pool.region, pool.mapping.view(0, 10)
    view[:] = 3
    pool.close()
    del pool, view
    gc.collect()
    assert (region.owner.view(0, 10) == 3).all()


def test_closed_pool_refuses_and_forgives() -> None:
    pool = make_pool()
    allocation = pool.allocate(1)
    pool.close()
    with pytest.raises(ClosedError):
        pool.allocate(1)
    pool.free(allocation)
    pool.free(allocation)


def test_exhausted_pool_says_what_would_help() -> None:
    pool = make_pool(MIB, out_of_memory_code=LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, size_option="mem_pool_cfg")
    first, _second = pool.allocate(512 << 10), pool.allocate(256 << 10)
    pool.free(first)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(600_000)
    assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    for named in ("HOST", "600000", str(768 << 10), str(MIB), str(512 << 10), "mem_pool_cfg"):
        assert named in str(caught.value)


def test_default_code_of_exhaustion() -> None:
    with pytest.raises(OutOfMemory) as caught:
        make_pool(MIB).allocate(MIB + 1)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_sizes_must_be_positive(num_bytes: int) -> None:
    pool = make_pool()
    with pytest.raises(ParamInvalid, match=str(num_bytes)):
        pool.allocate(num_bytes)
    with pytest.raises(ParamInvalid, match=str(num_bytes)):
        make_pool(num_bytes)


@pytest.mark.parametrize("page_shift", [9, 31])
def test_page_shift_has_limits(page_shift: int) -> None:
    with pytest.raises(ParamInvalid, match=r"10\.\.30"):
        make_pool(page_shift=page_shift)


def test_huge_pages_of_the_allocator_are_aligned() -> None:
    pool = make_pool(1, page_shift=30)
    assert pool.region.address % (1 << 30) == 0
    assert pool.region.size_bytes == 1 << 30


def test_impossible_size_is_refused_and_leaves_nothing() -> None:
    with nothing_left_behind(), pytest.raises(OutOfMemory, match="pool of"):
        make_pool(1 << 62)


def test_another_pools_allocation_is_refused() -> None:
    pool, other = make_pool(), make_pool()
    mine, theirs = pool.allocate(1), other.allocate(1)
    with pytest.raises(ParamInvalid, match="not in use"):
        pool.free(theirs)
    pool.free(mine)


def test_stale_allocation_does_not_free_its_successor() -> None:
    pool = make_pool()
    stale = pool.allocate(1)
    pool.free(stale)
    successor = pool.allocate(1)
    assert successor.offset_bytes == stale.offset_bytes
    with pytest.raises(ParamInvalid, match="not in use"):
        pool.free(stale)
    assert pool.stats().used_bytes == 64 << 10


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (4 * MIB, 1), (0, 4 * MIB + 1)])
def test_view_stays_inside(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        make_pool().mapping.view(offset, size)


def test_without_memfd_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(FeatureNotEnabled, match="memfd_create"):
        make_pool()


def test_threads_share_a_pool() -> None:
    pool = make_pool(16 * MIB, page_shift=12)
    start = threading.Barrier(4)

    def churn(stamp: int) -> None:
        start.wait(30)
        for round_ in range(60):
            mine = [pool.allocate(1 + 5000 * i) for i in range(1 + round_ % 5)]
            for allocation in mine:
                bytes_of(pool, allocation)[:] = stamp
            for allocation in mine:
                assert (bytes_of(pool, allocation) == stamp).all()
                pool.free(allocation)

    require_all([lambda stamp=stamp: churn(stamp) for stamp in range(1, 5)])
    assert pool.stats().largest_free_bytes == pool.stats().total_bytes
