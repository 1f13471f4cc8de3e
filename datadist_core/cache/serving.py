# SPDX-License-Identifier: Apache-2.0
"""What peers may learn of our caches, and touch."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ..errors import CacheNotExist, ParamInvalid, ProtocolError
from ..link.probe import grid_info, region_info
from ..transfer.backend import ServedGrid
from ..transfer.checksum import Checksummer
from ..transfer.plan import Op
from ..transfer.regions import RegionTable
from ..wire.messages import AskChecksums, CacheInfo, Consume, Lookup, Place
from .args import check_batch_index
from .desc import BlocksCacheKey, CacheKey
from .integrity import ChecksumAnswers
from .table import CacheEntry, CacheTable, KeyedEntry, check_accessible

#: The beacon's place in the table; no peer may have it as a cache.
BEACON_CACHE_ID = 0


@dataclass(frozen=True, slots=True)
class LocatedCaches:
    """Where addresses lie, in their order, and the caches they lie in."""

    places: list[Place]
    caches: list[CacheInfo]


class CacheServer:
    """Answers peers' look-ups and lends grids to two-sided backends. The peer is not trusted."""

    def __init__(
        self,
        cluster_id: int,
        table: CacheTable,
        regions: RegionTable,
        checksummer: Checksummer,
        drop_key: Callable[[CacheKey, int], None],
    ) -> None:
        self._cluster_id = cluster_id
        self._checksums = ChecksumAnswers(checksummer, self.serve_grid)
        self._drop_key = drop_key
        self._table = table
        self._regions = regions

    def lookup(self, query: Lookup) -> CacheInfo:
        """The cache a query names. CacheNotExist, or ParamInvalid if peers may not use it or it is not ours."""
        if query.cluster_id != self._cluster_id:
            raise ParamInvalid(f"cluster_id={query.cluster_id} was asked for, but this is cluster {self._cluster_id}")
        found = self._find(query)
        return self._info(found.entry, found.batch_index)

    def locate(self, addresses: Sequence[int]) -> LocatedCaches:
        """The caches in which the addresses lie. ParamInvalid for an address that is in none that peers may use."""
        tensors = sorted(self._tensors(), key=lambda tensor: tensor.address)
        farthest = list(itertools.accumulate(tensors, _reaches_farther))
        found = [_covering(tensors, farthest, address) for address in addresses]
        places = [
            Place(tensor.entry.cache_id, tensor.index, address - tensor.address)
            for tensor, address in zip(found, addresses, strict=True)
        ]
        entries = {tensor.entry.cache_id: tensor.entry for tensor in found}
        return LocatedCaches(places, [self._info(entry, 0) for entry in entries.values()])

    def consume(self, consumed: Consume) -> None:
        """A peer has pulled what this key stands for."""
        key = _cache_key(self._cluster_id, consumed.req_id, consumed.model_id, consumed.prefix_id)
        self._drop_key(key, consumed.cache_id)

    def checksums(self, asked: AskChecksums) -> bytes:
        """What our memory holds, for a peer that has moved bytes from or to it."""
        return self._checksums.answer(asked)

    def serve_grid(self, grid_id: int, op: Op) -> AbstractContextManager[ServedGrid]:
        """`BackendContext.serve_grid`: lend one grid, held against freeing meanwhile."""
        return self._serve_grid(grid_id, op)

    @contextmanager
    def _serve_grid(self, grid_id: int, op: Op) -> Iterator[ServedGrid]:
        with self._table.pinned_grid(grid_id) as (entry, grid):
            if op is Op.WRITE and entry.cache_id == BEACON_CACHE_ID:
                raise ParamInvalid(f"grid {grid_id} may be read only")
            yield ServedGrid(grid, self._regions.region(grid.region_id))

    def _find(self, query: Lookup) -> KeyedEntry:
        find = _FINDERS.get(query.kind)
        if find is None:
            raise ProtocolError(f"unknown kind of look-up {query.kind!r}")
        return find(self._table, query)

    def _tensors(self) -> Iterator[_Tensor]:
        for entry in self._table.entries():
            if entry.remote_accessible and entry.cache_id != BEACON_CACHE_ID:
                size_bytes = entry.cache.cache_desc.size
                for index, address in enumerate(entry.cache.tensor_addrs):
                    yield _Tensor(address, address + size_bytes, entry, index)

    def _info(self, entry: CacheEntry, batch_index: int) -> CacheInfo:
        check_accessible(entry)
        with self._table.pinned_entry(entry):
            return self._describe(entry, batch_index)

    def _describe(self, entry: CacheEntry, batch_index: int) -> CacheInfo:
        desc = entry.cache.cache_desc
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
            batch_index=batch_index,
        )


@dataclass(frozen=True, slots=True)
class _Tensor:
    address: int
    end_address: int
    entry: CacheEntry
    index: int


def _reaches_farther(one: _Tensor, other: _Tensor) -> _Tensor:
    return one if one.end_address > other.end_address else other


def _covering(tensors: Sequence[_Tensor], farthest: Sequence[_Tensor], address: int) -> _Tensor:
    """The tensor that an address lies in; where caches overlap, the one with the most room behind it.

    Args:
        tensors: by address.
        farthest: of each and those before it, the one that ends last.
    """
    num_before = bisect.bisect_right(tensors, address, key=lambda tensor: tensor.address)
    if num_before and address < farthest[num_before - 1].end_address:
        return farthest[num_before - 1]
    raise ParamInvalid(f"address {address:#x} is in no cache of this cluster that peers may use")


def _find_by_id(table: CacheTable, query: Lookup) -> KeyedEntry:
    if query.cache_id == BEACON_CACHE_ID:
        raise CacheNotExist(f"cache_id={query.cache_id} is no cache")
    entry = table.by_id(query.cache_id)
    check_batch_index("batch_index", query.batch_index, entry.layout.batch_size)
    return KeyedEntry(entry, query.batch_index)


def _find_blocks(table: CacheTable, query: Lookup) -> KeyedEntry:
    try:
        key = BlocksCacheKey(query.cluster_id, query.model_id)
    except ValueError as error:
        raise ProtocolError(f"malformed key from the peer: {error}") from error
    return table.by_key(key)


def _find_keyed(table: CacheTable, query: Lookup) -> KeyedEntry:
    return table.by_key(_cache_key(query.cluster_id, query.req_id, query.model_id, query.prefix_id))


def _cache_key(cluster_id: int, req_id: int, model_id: int, prefix_id: int) -> CacheKey:
    try:
        return CacheKey(cluster_id, req_id, model_id, prefix_id)
    except ValueError as error:
        raise ProtocolError(f"malformed key from the peer: {error}") from error


_FINDERS: dict[str, Callable[[CacheTable, Lookup], KeyedEntry]] = {
    "id": _find_by_id,
    "blocks": _find_blocks,
    "cache": _find_keyed,
}
