# SPDX-License-Identifier: Apache-2.0
"""The memory pool: never overlaps, gives everything back, stays valid while anybody looks at it."""

from __future__ import annotations

import errno
import gc
import itertools
import math
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from sortedcontainers import SortedDict, SortedList

from datadist_core.errors import ClosedError, FeatureNotEnabled, OutOfMemory, ParamInvalid
from datadist_core.memory import pool as pool_module
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
TestPoolMachine = pytest.mark.slow(PoolMachine.TestCase)


def shared_resident_bytes() -> int:
    """Pages of shared memory that this process has, pools among them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem:"))


def test_a_large_pool_costs_nothing_until_used() -> None:
    """Neither backed pages nor resident ones; touched a little it costs that little, and freed nothing again."""
    before = shared_resident_bytes()
    pool = make_pool(64 << 30)
    large, small = pool.allocate(40 << 30), pool.allocate(16 << 30)
    assert pool.stats().used_bytes == 56 << 30
    assert (backed_bytes(pool), pool.region.size_bytes) == (0, 64 << 30)
    assert shared_resident_bytes() - before < MIB
    for allocation in (large, small):
        bytes_of(pool, allocation)[: 4 * MIB] = 1
        bytes_of(pool, allocation)[-4 * MIB :] = 1
    # A system with huge pages for shared memory may back up to 2 MiB more at each of the four places.
    assert 16 * MIB <= backed_bytes(pool) <= 24 * MIB
    assert 15 * MIB < shared_resident_bytes() - before < 25 * MIB
    pool.free(large)
    assert 8 * MIB <= backed_bytes(pool) <= 12 * MIB
    pool.free(small)
    assert backed_bytes(pool) == 0
    assert shared_resident_bytes() - before < MIB
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


@pytest.mark.parametrize("page_shift", [10, 16, 21, 30])
def test_addresses_are_multiples_of_the_page(page_shift: int) -> None:
    page = 1 << page_shift
    pool = make_pool(8 * page, page_shift)
    first, second, third = pool.allocate(1), pool.allocate(page + 1), pool.allocate(page)
    assert [a.address % page for a in (first, second, third)] == [0, 0, 0]
    assert [a.offset_bytes // page for a in (first, second, third)] == [0, 1, 3]
    pool.free(second)
    assert pool.allocate(2 * page).address == second.address
    stats = pool.stats()
    assert (stats.used_bytes, stats.free_bytes, stats.largest_free_bytes) == (4 * page, 4 * page, 4 * page)
    with pytest.raises(OutOfMemory):
        pool.allocate(4 * page + 1)


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


# -- fragmentation


class BestFit:
    """The reference: a plain list of free ranges, searched from end to end."""

    def __init__(self, total: int) -> None:
        self.free: list[tuple[int, int]] = [(0, total)]  # (offset, size), sorted

    def take(self, size: int) -> int | None:
        fitting = [(free_size, offset) for offset, free_size in self.free if free_size >= size]
        if not fitting:
            return None
        free_size, offset = min(fitting)
        self.free.remove((offset, free_size))
        if free_size > size:
            self.free = sorted([*self.free, (offset + size, free_size - size)])
        return offset

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                start, length = merged[-1][0], merged.pop()[1] + length
            merged.append((start, length))
        self.free = merged

    @property
    def largest(self) -> int:
        return max((size for _, size in self.free), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_long_life_at_high_fill(seed: int) -> None:
    """Thousands of random sizes in a pool that is nearly full: every place, and every refusal, is the reference's."""
    page, num_pages, rng = 1 << 12, 2048, random.Random(seed)
    pool, model = make_pool(num_pages * page, 12), BestFit(num_pages * page)
    used: list[Allocation] = []
    num_refused, fills, num_ranges = 0, [], []
    for _ in range(4000):
        # Frees only above 85 %, then down to it: what is left free is scattered.
        if used and rng.random() < (0.6 if pool.stats().free_bytes < 0.15 * num_pages * page else 0.2):
            _free_one(pool, model, used.pop(rng.randrange(len(used))), page)
        else:
            size = page * math.ceil(rng.paretovariate(0.8)) if rng.random() < 0.9 else page * rng.randint(50, 200)
            num_refused += not _take_one(pool, model, used, size)
        stats = pool.stats()
        assert stats.largest_free_bytes == model.largest
        assert stats.free_bytes == sum(size for _, size in model.free)
        fills.append(stats.used_bytes / stats.total_bytes)
        num_ranges.append(len(model.free))
    assert num_refused > 50  # it was full at times,
    assert sorted(fills)[len(fills) // 2] > 0.8  # mostly nearly so,
    assert max(num_ranges) > 20  # and fragmented
    _check_nothing_overlaps(used, page)
    rng.shuffle(used)
    for allocation in used:
        _free_one(pool, model, allocation, page)
    assert pool.stats().largest_free_bytes == pool.stats().total_bytes == model.largest
    assert pool.allocate(num_pages * page).offset_bytes == 0


def _take_one(pool: MemoryPool, model: BestFit, used: list[Allocation], size: int) -> bool:
    expected = model.take(size)
    if expected is None:
        with pytest.raises(OutOfMemory):
            pool.allocate(size)
        return False
    used.append(pool.allocate(size))
    assert used[-1].offset_bytes == expected
    return True


def _free_one(pool: MemoryPool, model: BestFit, allocation: Allocation, page: int) -> None:
    pool.free(allocation)
    model.give(allocation.offset_bytes, -(-allocation.size_bytes // page) * page)


def _check_nothing_overlaps(used: list[Allocation], page: int) -> None:
    ranges = sorted((a.offset_bytes, a.offset_bytes + -(-a.size_bytes // page) * page) for a in used)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


# -- cost, in comparisons of keys


class Comparisons:
    """Counts how often the pool's indexes compare two keys."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


def counted(base: type, counter: Comparisons) -> type:
    """`base`, an int or a tuple, that counts its comparisons."""

    class Counted(base):  # type: ignore[misc]
        def __lt__(self, other: Any) -> bool:
            counter.count += 1
            return bool(base.__lt__(self, other))

        def __gt__(self, other: Any) -> bool:
            counter.count += 1
            return bool(base.__gt__(self, other))

        def __eq__(self, other: object) -> bool:
            counter.count += 1
            return bool(base.__eq__(self, other))

        def __hash__(self) -> int:
            return int(base.__hash__(self))

    return Counted


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    """Pools made in the test count the comparisons of their keys."""
    counter = Comparisons()
    offset, size_and_offset = counted(int, counter), counted(tuple, counter)

    class Sizes(SortedList):  # type: ignore[misc, type-arg]
        def add(self, value: Any) -> None:
            super().add(size_and_offset(value))

        def bisect_left(self, value: Any) -> int:
            return int(super().bisect_left(size_and_offset(value)))

    class Offsets(SortedDict):  # type: ignore[misc, type-arg]
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(offset(key), value)

    monkeypatch.setattr(pool_module, "SortedList", Sizes)
    monkeypatch.setattr(pool_module, "SortedDict", Offsets)
    return counter


def with_holes(num_holes: int) -> tuple[MemoryPool, list[Allocation]]:
    """A full pool but for `num_holes` holes of one to four pages, no two of them side by side; and their fences."""
    rng = random.Random(num_holes)
    sizes = [rng.randint(1, 4) for _ in range(num_holes)]
    pool = make_pool((sum(sizes) + num_holes) << 10, page_shift=10)
    holes, fences = [], []
    for size in sizes:
        holes.append(pool.allocate(size << 10))
        fences.append(pool.allocate(1 << 10))
    assert pool.stats().free_bytes < 1 << 12  # what a pool has more than asked for, in whole pages of the system
    for hole in holes:
        pool.free(hole)
    return pool, fences


def cost(counter: Comparisons, num_holes: int) -> float:
    """Comparisons of one allocation and of one free that merges two neighbours, the worst of many."""
    pool, fences = with_holes(num_holes)
    worst = 0
    for fence in random.Random(1).sample(fences, 50):
        worst = max(worst, counter.of(lambda fence=fence: pool.free(fence)))
        worst = max(worst, counter.of(lambda: pool.allocate(1 << 10)))
        worst = max(worst, counter.of(lambda: pool.allocate(3 << 10)))
    return worst


def test_cost_grows_with_the_logarithm(comparisons: Comparisons) -> None:
    """64 times the free ranges: six halvings more for each of the few look-ups, not 64 times the comparisons."""
    few, many = cost(comparisons, 256), cost(comparisons, 256 * 64)
    assert few >= math.log2(256)  # it does count
    assert many - few <= 12 * math.log2(64)
    assert many <= 12 * math.log2(256 * 64)


def test_the_counter_would_see_a_linear_search(comparisons: Comparisons, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def first_fit(self: Any, size_bytes: int) -> int | None:
        wanted = (size_bytes, 0)
        fitting = next((key for key in self._by_size if not key < wanted), None)
        return None if fitting is None else int(self._remove(fitting[1]).offset_bytes)

    pool, _ = with_holes(4096)
    monkeypatch.setattr(pool_module._FreeRanges, "take", first_fit)
    assert comparisons.of(lambda: pool.allocate(4 << 10)) > 12 * math.log2(4096)


# -- memory that outlives its cache


def test_lingering_memory_is_counted_and_named() -> None:
    pool = make_pool(MIB)
    first, second = pool.allocate(300_000), pool.allocate(300_000)
    rounded = 5 << 16
    pool.mark_lingering(first)
    pool.mark_lingering(first)
    assert pool.stats() == PoolStats(MIB, 2 * rounded, MIB - 2 * rounded, MIB - 2 * rounded, 2 * rounded, rounded)
    with pytest.raises(OutOfMemory, match=rf"{rounded} bytes are of freed caches that views still keep; drop those"):
        pool.allocate(MIB // 2)
    pool.mark_lingering(second)
    pool.free(first)
    assert pool.stats().lingering_bytes == rounded
    pool.free_from_finalizer(second)
    assert pool.stats() == PoolStats(MIB, 0, MIB, MIB, 2 * rounded, 0)


def test_without_lingering_memory_nothing_is_said_of_views() -> None:
    pool = make_pool(MIB)
    stale = pool.allocate(1)
    pool.free(stale)
    pool.mark_lingering(stale)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(2 * MIB)
    assert "views" not in str(caught.value)


def test_free_from_a_finalizer_spares_the_successor() -> None:
    pool = make_pool()
    stale = pool.allocate(1)
    pool.free_from_finalizer(stale)
    successor = pool.allocate(1)
    assert successor.offset_bytes == stale.offset_bytes
    pool.free_from_finalizer(stale)
    assert pool.stats().used_bytes == 1 << 16
    pool.free_from_finalizer(successor)
    assert pool.stats().used_bytes == 0


def test_free_from_a_finalizer_gives_pages_back() -> None:
    pool = make_pool(64 * MIB)
    allocation = pool.allocate(32 * MIB)
    bytes_of(pool, allocation)[:] = 1
    pool.free_from_finalizer(allocation)
    assert backed_bytes(pool) == 0


def test_a_finalizer_of_a_closed_pool_does_nothing() -> None:
    pool = make_pool()
    allocation = pool.allocate(1)
    pool.mark_lingering(allocation)
    pool.close()
    pool.free_from_finalizer(allocation)
    with pytest.raises(ClosedError):
        pool.allocate(1)


def test_what_finalizers_left_is_there_for_the_next_allocation() -> None:
    """Left while the pool was busy, in this thread: as in a garbage collection within a call of the pool."""
    pool = make_pool(MIB)
    whole = pool.allocate(MIB)
    with pool._lock:
        pool.free_from_finalizer(whole)
        assert pool._used_bytes == MIB
    assert pool.allocate(MIB).offset_bytes == 0


def test_a_failed_call_also_serves_finalizers() -> None:
    pool = make_pool(MIB)
    whole = pool.allocate(MIB)
    with pytest.raises(OutOfMemory):
        pool.allocate(_DropsWhenRounded(pool, whole))
    assert pool._used_bytes == 0


class _DropsWhenRounded(int):
    """A size that frees `whole` while the pool, busy with this size, writes the error that it is too large."""

    def __new__(cls, pool: MemoryPool, whole: Allocation) -> _DropsWhenRounded:
        self = super().__new__(cls, MIB)
        self.call = lambda: pool.free_from_finalizer(whole)
        return self

    def __format__(self, spec: str) -> str:
        self.call()
        return super().__format__(spec)
