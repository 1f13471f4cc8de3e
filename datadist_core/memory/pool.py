# SPDX-License-Identifier: Apache-2.0
"""A memory pool: aligned ranges out of one region that other processes on this host can map.

One region for everything that is allocated means that a peer maps once, at link time, however many caches come
and go. The address space is reserved at once; pages are backed when first touched, and given back when a large
enough range becomes free, so a generous pool costs nothing.

Best fit: of the free ranges that are large enough the smallest is split, ties broken by the lowest offset.
Neighbouring free ranges are always merged. Both lookups are O(log n) in the number of free ranges.

The memory of a freed cache stays in use while views of it live (`mark_lingering`). The last view may die anywhere, so
it gives the memory back with `free_from_finalizer`, which never waits: if the pool is busy, whoever keeps it busy
finds the allocation in a queue and frees it.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sortedcontainers import SortedDict, SortedList

from ..errors import ClosedError, OutOfMemory, ParamInvalid
from ..types import LLMStatusCode, Placement
from ._mapping import PoolMapping, huge_page_bytes
from .region import Region, SharedMapping

# Below this, giving memory back costs more system calls than it is worth.
_DISCARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """`size_bytes` (as asked for) at `address`, which is `offset_bytes` into the pool's region. Not zeroed."""

    address: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Use of one pool, in bytes, in whole pages of the allocator. (An extension.)

    Attributes:
        total_bytes: the size of the pool.
        used_bytes: in caches, or kept by views of freed ones.
        free_bytes: the rest.
        largest_free_bytes: the longest free range: the largest cache that can be allocated.
        high_water_bytes: the most that was ever in use at once.
        lingering_bytes: the part of `used_bytes` whose caches are freed; it comes back with the last view of them.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int
    high_water_bytes: int
    lingering_bytes: int = 0


class MemoryPool:
    """`size_bytes` of lazily backed memory of one placement, handed out in aligned ranges.

    Args:
        size_bytes: rounded up to whole pages of the allocator.
        placement: recorded in the region; both placements are CPU memory here.
        region_id: id of the one region that covers the pool.
        page_shift: 10..30; allocations are aligned to, and rounded up to, `1 << page_shift` bytes.
        out_of_memory_code: status code of the OutOfMemory that `allocate` raises.
        size_option: the option that a user would raise to get a larger pool; only for messages.
        huge_pages: lie in the system's huge pages, all reserved at once and never given back before the end.
        peers_only_read: peers that map it can read it only.

    Raises:
        ParamInvalid: a size that cannot work.
        OutOfMemory: the system refuses a pool of this size.
        FeatureNotEnabled: the system has no memfd_create.

    Thread-safe.
    """

    def __init__(
        self,
        size_bytes: int,
        placement: Placement,
        region_id: int,
        page_shift: int = 16,
        out_of_memory_code: LLMStatusCode = LLMStatusCode.LLM_OUT_OF_MEMORY,
        size_option: str = "memory_size",
        huge_pages: bool = False,
        peers_only_read: bool = False,
    ) -> None:
        _check_sizes(size_bytes, page_shift)
        self._page_bytes = 1 << page_shift
        self._out_of_memory_code = out_of_memory_code
        self._size_option = size_option
        align_bytes = max(self._page_bytes, huge_page_bytes() if huge_pages else mmap.PAGESIZE)
        total = -(-size_bytes // align_bytes) * align_bytes
        self._mapping = _map(total, align_bytes, huge_pages, size_option, out_of_memory_code, peers_only_read)
        shared = SharedMapping(self._mapping.fd, 0)
        self._region = Region(region_id, self._mapping.address, total, placement, self._mapping, shared)
        self._lock = threading.Lock()
        self._free = _FreeRanges(total)
        self._allocated: dict[int, Allocation] = {}
        self._lingering: set[Allocation] = set()
        self._left_by_finalizers: deque[Allocation] = deque()
        self._used_bytes = 0
        self._lingering_bytes = 0
        self._high_water_bytes = 0
        self._closed = False

    @property
    def region(self) -> Region:
        """The region that covers the whole pool. Its owner keeps the memory mapped, also after `close`."""
        return self._region

    @property
    def mapping(self) -> PoolMapping:
        """The memory itself; `mapping.view(offset_bytes, size_bytes)` makes arrays that keep it alive."""
        return self._mapping

    def allocate(self, num_bytes: int) -> Allocation:
        """A free range of at least `num_bytes`.

        Raises:
            ParamInvalid: `num_bytes` is not positive.
            OutOfMemory: no free range is large enough.
            ClosedError: the pool is closed.
        """
        if num_bytes < 1:
            raise ParamInvalid(f"cannot allocate {num_bytes} bytes: the size must be at least 1")
        size = self._round_up(num_bytes)
        with self._locked():
            self._check_open()
            offset = self._free.take(size)
            if offset is None:
                raise self._exhausted(num_bytes)
            allocation = Allocation(self._region.address + offset, offset, num_bytes)
            self._allocated[offset] = allocation
            self._used_bytes += size
            self._high_water_bytes = max(self._high_water_bytes, self._used_bytes)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Take a range back. After `close` this does nothing: the memory goes with its last owner.

        Raises:
            ParamInvalid: this very allocation is not in use: freed before, or another pool's.
        """
        with self._locked():
            if self._closed:
                return
            if not self._in_use(allocation):
                raise ParamInvalid(f"{allocation} is not in use in this pool; was it freed before?")
            self._take_back(allocation)

    def free_from_finalizer(self, allocation: Allocation) -> None:
        """`free` for finalizers: never waits for the pool, and does nothing if `allocation` is not in use."""
        self._left_by_finalizers.append(allocation)
        self._serve_finalizers()

    def mark_lingering(self, allocation: Allocation) -> None:
        """The cache in it is freed, but somebody still looks at it: counted apart until it is freed.

        Does nothing if `allocation` is not in use.
        """
        with self._locked():
            if self._in_use(allocation) and allocation not in self._lingering:
                self._lingering.add(allocation)
                self._lingering_bytes += self._round_up(allocation.size_bytes)

    def stats(self) -> PoolStats:
        with self._locked():
            total, used, largest = self._region.size_bytes, self._used_bytes, self._free.largest_bytes()
            return PoolStats(total, used, total - used, largest, self._high_water_bytes, self._lingering_bytes)

    def close(self) -> None:
        """Refuse further allocations. Idempotent.

        The memory is unmapped when nothing refers to `region.owner` any more, so views stay valid.
        """
        with self._locked():
            self._closed = True
            self._allocated.clear()
            self._lingering.clear()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The pool's state, to oneself; with everything that finalizers gave back before."""
        try:
            with self._lock:
                self._take_back_left()
                yield
        finally:
            self._serve_finalizers()

    def _serve_finalizers(self) -> None:
        """Take back what finalizers left, unless somebody holds the lock, who will then do it.

        Whoever holds the lock calls this after letting go of it, so nothing stays in the queue.
        """
        while self._left_by_finalizers and self._lock.acquire(blocking=False):
            try:
                self._take_back_left()
            finally:
                self._lock.release()

    def _take_back_left(self) -> None:
        while self._left_by_finalizers:
            allocation = self._left_by_finalizers.popleft()
            if self._in_use(allocation):
                self._take_back(allocation)

    def _in_use(self, allocation: Allocation) -> bool:
        return self._allocated.get(allocation.offset_bytes) is allocation

    def _take_back(self, allocation: Allocation) -> None:
        del self._allocated[allocation.offset_bytes]
        size = self._round_up(allocation.size_bytes)
        self._used_bytes -= size
        if allocation in self._lingering:
            self._lingering.remove(allocation)
            self._lingering_bytes -= size
        # Under the lock, so that nobody gets the range while its pages are being discarded.
        unused = self._free.give(allocation.offset_bytes, size)
        if unused is not None:
            self._mapping.discard(unused.offset_bytes, unused.size_bytes)

    def _round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self._page_bytes) * self._page_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the memory pool is closed")

    def _exhausted(self, num_bytes: int) -> OutOfMemory:
        lingering, remedy = "", "deallocate caches"
        if self._lingering_bytes:
            lingering = f", and {self._lingering_bytes} bytes are of freed caches that views still keep"
            remedy = "drop those views, deallocate caches"
        return OutOfMemory(
            f"the {self._region.placement.name} memory pool has no free range of {num_bytes} bytes: "
            f"{self._region.size_bytes - self._used_bytes} of {self._region.size_bytes} bytes are free, the largest "
            f"range is {self._free.largest_bytes()} bytes{lingering}; {remedy} or raise {self._size_option}",
            self._out_of_memory_code,
        )


@dataclass(frozen=True, slots=True)
class _FreeRange:
    """`touched_bytes` of it may still be backed by pages; an upper bound."""

    offset_bytes: int
    size_bytes: int
    touched_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


class _FreeRanges:
    """The free ranges, by offset (to merge neighbours) and by size (to find the best fit). Not thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._by_offset: SortedDict[int, _FreeRange] = SortedDict()
        self._by_size: SortedList[tuple[int, int]] = SortedList()
        self._insert(_FreeRange(0, total_bytes, 0))

    def largest_bytes(self) -> int:
        return int(self._by_size[-1][0]) if self._by_size else 0

    def take(self, size_bytes: int) -> int | None:
        """Offset of a range of exactly `size_bytes`, which is no longer free; None if there is none."""
        index = self._by_size.bisect_left((size_bytes, 0))
        if index == len(self._by_size):
            return None
        found = self._remove(self._by_size[index][1])
        rest_bytes = found.size_bytes - size_bytes
        if rest_bytes:
            rest_touched = min(found.touched_bytes, rest_bytes)
            self._insert(_FreeRange(found.offset_bytes + size_bytes, rest_bytes, rest_touched))
        return found.offset_bytes

    def give(self, offset_bytes: int, size_bytes: int) -> _FreeRange | None:
        """Make a range free. Returns the range around it if that is worth giving back to the system."""
        merged = self._merge(_FreeRange(offset_bytes, size_bytes, size_bytes))
        if merged.touched_bytes < _DISCARD_BYTES:
            self._insert(merged)
            return None
        self._insert(_FreeRange(merged.offset_bytes, merged.size_bytes, 0))
        return merged

    def _merge(self, freed: _FreeRange) -> _FreeRange:
        """`freed` with the neighbours that touch it, which are taken out of the indexes."""
        index = self._by_offset.bisect_left(freed.offset_bytes)
        after = self._by_offset.peekitem(index)[1] if index < len(self._by_offset) else None
        before = self._by_offset.peekitem(index - 1)[1] if index else None
        if after is not None and after.offset_bytes == freed.end_bytes:
            freed = _join(freed, self._remove(after.offset_bytes))
        if before is not None and before.end_bytes == freed.offset_bytes:
            freed = _join(self._remove(before.offset_bytes), freed)
        return freed

    def _insert(self, free: _FreeRange) -> None:
        self._by_offset[free.offset_bytes] = free
        self._by_size.add((free.size_bytes, free.offset_bytes))

    def _remove(self, offset_bytes: int) -> _FreeRange:
        free: _FreeRange = self._by_offset.pop(offset_bytes)
        self._by_size.remove((free.size_bytes, free.offset_bytes))
        return free


def _join(left: _FreeRange, right: _FreeRange) -> _FreeRange:
    return _FreeRange(left.offset_bytes, left.size_bytes + right.size_bytes, left.touched_bytes + right.touched_bytes)


def _map(
    size_bytes: int,
    align_bytes: int,
    huge_pages: bool,
    size_option: str,
    code: LLMStatusCode,
    peers_only_read: bool,
) -> PoolMapping:
    try:
        return PoolMapping(size_bytes, align_bytes, huge_pages, peers_only_read=peers_only_read)
    except OutOfMemory as error:
        remedy = "ask for less"
        if huge_pages:
            num_pages = size_bytes // huge_page_bytes()
            remedy = f"huge_pages takes {num_pages} free huge pages: raise vm.nr_hugepages, or leave huge_pages out"
        raise OutOfMemory(f"{size_option}: {error}; {remedy}", code) from error


def _check_sizes(size_bytes: int, page_shift: int) -> None:
    if size_bytes < 1:
        raise ParamInvalid(f"a memory pool of {size_bytes} bytes is not possible: the size must be at least 1")
    if not 10 <= page_shift <= 30:
        raise ParamInvalid(f"page_shift={page_shift} is out of range: it must be 10..30 (1 KiB to 1 GiB)")
