# SPDX-License-Identifier: Apache-2.0
"""This side's memory: pools by placement, regions, and the making of caches in them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from ..config import Settings
from ..errors import ParamInvalid
from ..memory.grid import Grid
from ..memory.pool import MemoryPool, PoolStats
from ..memory.region import Region
from ..transfer.regions import RegionTable
from ..types import LLMStatusCode, Placement
from .cache import Cache
from .desc import CacheDesc
from .table import CacheEntry, CacheTable, Key

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

    def __init__(self, settings: Settings, regions: RegionTable, table: CacheTable) -> None:
        self._regions = regions
        self._table = table
        self._lock = threading.Lock()
        code = LLMStatusCode.LLM_OUT_OF_MEMORY if settings.v2 else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        self._pools = {
            placement: MemoryPool(
                pool.memory_size_bytes,
                placement,
                next_region_id(),
                pool.page_shift,
                out_of_memory_code=code,
                size_option=f"{_POOL_OPTION[placement]} memory_size",
            )
            for placement, pool in settings.pools.items()
        }
        for pool in self._pools.values():
            regions.add(pool.region)

    def pool_stats(self, placement: Placement) -> PoolStats:
        """Use of one pool. ParamInvalid if it was not configured."""
        return self._pool(placement).stats()

    def allocate(self, desc: CacheDesc, keys: dict[Key, int], is_blocks_cache: bool) -> Cache:
        """A cache in the pool of its placement: one allocation, tensors one behind the other."""
        desc.check_usable()
        pool = self._pool(desc.placement)
        allocation = pool.allocate(desc.num_tensors * desc.size)
        offsets = [allocation.offset_bytes + i * desc.size for i in range(desc.num_tensors)]
        addresses = [pool.region.address + offset for offset in offsets]
        cache = Cache(next(_cache_ids), desc, addresses, is_blocks_cache, owner=pool.region.owner)
        grids = [_grid(pool.region, offset, desc) for offset in offsets]
        self._table.add(CacheEntry(cache, tuple(grids), True, lambda: pool.free(allocation), keys))
        return cache

    def register(
        self, desc: CacheDesc, addrs: Sequence[int], keys: dict[Key, int], is_blocks_cache: bool, accessible: bool
    ) -> Cache:
        """A cache over the caller's memory. What lies in one of our pools is reached as part of that pool."""
        cache = Cache(next(_cache_ids), desc, list(addrs), is_blocks_cache)
        own_regions: list[Region] = []
        grids = [self._locate(address, desc, own_regions) for address in addrs]

        def release() -> None:
            for region in own_regions:
                self._regions.remove(region.region_id)

        self._table.add(CacheEntry(cache, tuple(grids), accessible, release, keys))
        return cache

    def region_address(self, region_id: int) -> int:
        """Where a region of ours starts."""
        return self._regions.region(region_id).address

    def close(self) -> None:
        """Give the pools up. Views that users hold keep their mapping."""
        for pool in self._pools.values():
            self._regions.remove(pool.region.region_id)
            pool.close()

    def _locate(self, address: int, desc: CacheDesc, own_regions: list[Region]) -> Grid:
        for pool in self._pools.values():
            if pool.region.contains(address, desc.size):
                return _grid(pool.region, address - pool.region.address, desc)
        region = Region(next_region_id(), address, desc.size, Placement.HOST)
        self._regions.add(region)
        own_regions.append(region)
        return _grid(region, 0, desc)

    def _pool(self, placement: Placement) -> MemoryPool:
        pool = self._pools.get(placement)
        if pool is None:
            raise ParamInvalid(
                f"cache_desc.placement={placement.name} has no memory pool: set {_POOL_OPTION[placement]} before init"
            )
        return pool


def _grid(region: Region, offset_bytes: int, desc: CacheDesc) -> Grid:
    return Grid(next_grid_id(), region.region_id, offset_bytes, desc.block_bytes, desc.block_bytes, desc.shape[0])
