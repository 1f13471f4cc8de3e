# SPDX-License-Identifier: Apache-2.0
"""This side's memory: pools by placement, regions, and the making of caches in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..errors import ParamInvalid
from ..memory.grid import Grid
from ..memory.layout import CacheLayout, Division, divide
from ..memory.live import Keeper, live_ranges
from ..memory.pool import MemoryPool, PoolStats
from ..memory.region import Region
from ..settings import Settings
from ..transfer.regions import RegionTable
from ..types import LLMStatusCode, Placement
from .cache import Cache
from .desc import CacheDesc
from .table import CacheEntry

#: Never used twice in a process: a peer with an old id is refused, not served from other memory.
_grid_ids = itertools.count(1)
_region_ids = itertools.count(1)
_cache_ids = itertools.count(1)

_POOL_OPTION = {Placement.DEVICE: "mem_pool_cfg", Placement.HOST: "host_mem_pool_cfg"}


def next_grid_id() -> int:
    return next(_grid_ids)


def next_region_id() -> int:
    return next(_region_ids)


class CacheStore:
    """Makes and frees the memory of caches. Thread-safe."""

    def __init__(self, settings: Settings, regions: RegionTable) -> None:
        self._regions = regions
        #: How to give up each cache from the pools that was not given up yet, by cache id.
        self._releases: dict[int, Callable[[], None]] = {}
        code = LLMStatusCode.LLM_OUT_OF_MEMORY if settings.v2 else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        self._pools = {
            placement: MemoryPool(
                pool.memory_size_bytes,
                placement,
                next_region_id(),
                pool.page_shift,
                out_of_memory_code=code,
                size_option=f"{_POOL_OPTION[placement]} memory_size",
                huge_pages=pool.huge_pages,
            )
            for placement, pool in settings.pools.items()
        }
        for pool in self._pools.values():
            regions.add(pool.region)

    def pool_stats(self, placement: Placement) -> PoolStats:
        """Use of one pool. ParamInvalid if it was not configured."""
        return self._pool(placement).stats()

    def allocate(self, desc: CacheDesc, is_blocks_cache: bool) -> CacheEntry:
        """A cache in the pool of its placement: one allocation, tensors one behind the other. Not in the table yet."""
        desc.check_usable()
        division = divide_desc(desc, is_blocks_cache)
        pool = self._pool(desc.placement)
        allocation = pool.allocate(desc.num_tensors * desc.size)
        offsets = [allocation.offset_bytes + i * desc.size for i in range(desc.num_tensors)]
        addresses = [pool.region.address + offset for offset in offsets]
        cache_id = next(_cache_ids)
        keeper = Keeper(lambda: pool.free_from_finalizer(allocation), f"cache_id={cache_id}")
        ranges = [live_ranges.add(address, desc.size, keeper.hold) for address in addresses]

        def release() -> None:
            self._releases.pop(cache_id, None)
            for one in ranges:
                live_ranges.remove(one)
            pool.mark_lingering(allocation)
            keeper.drop()

        self._releases[cache_id] = release
        grids = tuple(_grid(pool.region, offset, division) for offset in offsets)
        cache = Cache(cache_id, desc, addresses, is_blocks_cache, hold=keeper.hold)
        layout = _layout(grids, desc, division, is_blocks_cache)
        return CacheEntry(cache, layout, True, False, release, keys_hold=not is_blocks_cache)

    def register(self, desc: CacheDesc, addrs: Sequence[int], is_blocks_cache: bool, accessible: bool) -> CacheEntry:
        """A cache over the caller's memory. What lies in one of our pools is reached as part of that pool.

        Not in the table yet.
        """
        division = divide_desc(desc, is_blocks_cache)
        # What lies in a pool of ours stays in use until this cache, and the last view of it, is gone.
        below = [live_ranges.keep(address, desc.size, f"addrs[{i}]") for i, address in enumerate(addrs)]
        cache_id = next(_cache_ids)
        keeper = Keeper(below.clear, f"cache_id={cache_id}")
        own_regions: list[Region] = []

        def release() -> None:
            self._releases.pop(cache_id, None)
            while own_regions:
                self._regions.remove(own_regions.pop().region_id)
            keeper.drop()

        try:
            grids = tuple(self._locate(address, desc, division, own_regions, accessible) for address in addrs)
        except BaseException:
            release()
            raise
        self._releases[cache_id] = release
        cache = Cache(cache_id, desc, list(addrs), is_blocks_cache, hold=keeper.hold)
        return CacheEntry(cache, _layout(grids, desc, division, is_blocks_cache), accessible, True, release)

    def close(self) -> None:
        """Give the pools up, with all caches in them. Views that users hold keep their mapping."""
        for pool in self._pools.values():
            self._regions.remove(pool.region.region_id)
            pool.close()
        for release in list(self._releases.values()):  # else `live_ranges` would keep them, and so the mapping
            release()

    def _locate(
        self, address: int, desc: CacheDesc, division: Division, own_regions: list[Region], accessible: bool
    ) -> Grid:
        for pool in self._pools.values():
            if pool.region.contains(address, desc.size):
                return _grid(pool.region, address - pool.region.address, division)
        region = Region(next_region_id(), address, desc.size, Placement.HOST, for_peers=accessible)
        self._regions.add(region)
        own_regions.append(region)
        return _grid(region, 0, division)

    def _pool(self, placement: Placement) -> MemoryPool:
        pool = self._pools.get(placement)
        if pool is None:
            raise ParamInvalid(
                f"cache_desc.placement={placement.name} has no memory pool: set {_POOL_OPTION[placement]} before init"
            )
        return pool


def divide_desc(desc: CacheDesc, is_blocks_cache: bool) -> Division:
    return divide(desc.shape, desc.data_type.item_bytes, desc.batch_dim_index, is_blocks_cache)


def _grid(region: Region, offset_bytes: int, division: Division) -> Grid:
    size = division.item_bytes
    return Grid(next_grid_id(), region.region_id, offset_bytes, size, size, division.num_items)


def _layout(grids: tuple[Grid, ...], desc: CacheDesc, division: Division, is_blocks_cache: bool) -> CacheLayout:
    return CacheLayout(grids, is_blocks_cache, division, desc.data_type.name)
