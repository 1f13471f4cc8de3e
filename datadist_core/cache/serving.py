# SPDX-License-Identifier: Apache-2.0
"""What peers may learn of our caches, and touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..errors import ParamInvalid, ProtocolError
from ..link.probe import grid_info, region_info
from ..transfer.backend import ServedGrid
from ..transfer.plan import Op
from ..transfer.regions import RegionTable
from ..wire.messages import CacheInfo, Lookup
from .desc import BlocksCacheKey, CacheKey
from .table import CacheTable, KeyedEntry


class CacheServer:
    """Answers peers' look-ups and lends grids to two-sided backends. The peer is not trusted."""

    def __init__(self, cluster_id: int, table: CacheTable, regions: RegionTable) -> None:
        self._cluster_id = cluster_id
        self._table = table
        self._regions = regions

    def lookup(self, query: Lookup, remote_cluster_id: int) -> CacheInfo:
        """The cache a query names. CacheNotExist, or ParamInvalid if peers may not use it or it is not ours."""
        if query.cluster_id != self._cluster_id:
            raise ParamInvalid(f"cluster_id={query.cluster_id} was asked for, but this is cluster {self._cluster_id}")
        found = self._find(query)
        entry, desc = found.entry, found.entry.cache.cache_desc
        if not entry.remote_accessible:
            raise ParamInvalid(f"cache {entry.cache_id} is not accessible to peers (remote_accessible=False)")
        region_ids = dict.fromkeys(grid.region_id for grid in entry.grids)
        return CacheInfo(
            cache_id=entry.cache_id,
            is_blocks_cache=entry.cache.is_blocks_cache,
            num_tensors=desc.num_tensors,
            shape=list(desc.shape),
            data_type=desc.data_type.name,
            batch_dim_index=desc.batch_dim_index,
            grids=[grid_info(grid) for grid in entry.grids],
            regions=[region_info(self._regions.get(region_id)) for region_id in region_ids],
            batch_index=found.batch_index,
        )

    def serve_grid(self, grid_id: int, op: Op) -> AbstractContextManager[ServedGrid]:
        """`BackendContext.serve_grid`: lend one grid, held against freeing meanwhile."""
        return self._serve_grid(grid_id)

    @contextmanager
    def _serve_grid(self, grid_id: int) -> Iterator[ServedGrid]:
        with self._table.pinned_grid(grid_id) as (_, grid):
            yield ServedGrid(grid, self._regions.region(grid.region_id))

    def _find(self, query: Lookup) -> KeyedEntry:
        find = _FINDERS.get(query.kind)
        if find is None:
            raise ProtocolError(f"unknown kind of look-up {query.kind!r}")
        return find(self._table, query)


def _find_by_id(table: CacheTable, query: Lookup) -> KeyedEntry:
    entry = table.by_id(query.cache_id)
    if not entry.cache.is_blocks_cache and query.batch_index >= entry.cache.cache_desc.batch_size:
        raise ParamInvalid(
            f"batch_index={query.batch_index} is out of range 0..{entry.cache.cache_desc.batch_size - 1}"
        )
    return KeyedEntry(entry, query.batch_index)


def _find_blocks(table: CacheTable, query: Lookup) -> KeyedEntry:
    return table.by_key(BlocksCacheKey(query.cluster_id, query.model_id))


def _find_keyed(table: CacheTable, query: Lookup) -> KeyedEntry:
    return table.by_key(CacheKey(query.cluster_id, query.req_id, query.model_id, query.prefix_id))


_FINDERS: dict[str, Callable[[CacheTable, Lookup], KeyedEntry]] = {
    "id": _find_by_id,
    "blocks": _find_blocks,
    "cache": _find_keyed,
}
