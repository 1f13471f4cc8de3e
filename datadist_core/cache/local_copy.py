# SPDX-License-Identifier: Apache-2.0
"""Copies within this process: between batch entries, between blocks of one cache, between two blocks caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .._copy import scatter_copy
from ..checks import check_type
from ..errors import ParamInvalid
from ..memory.layout import Division
from ..transfer.plan import CopyList, Items, check_indices
from ..types import Placement
from .args import WHOLE_ENTRY, block_items, check_batch_index
from .cache import LOCAL_CACHE_ID, Cache
from .store import divide_desc
from .table import CacheTable


@dataclass(frozen=True, slots=True)
class _Local:
    """A cache of this process as a copy sees it: where its tensors are, and the items they consist of."""

    addresses: list[int]
    division: Division


class LocalCopier:
    """Thread-safe, as far as the caller keeps overlapping copies apart."""

    def __init__(self, table: CacheTable) -> None:
        self._table = table

    def copy_entry(self, dst: Cache, src: Cache, dst_index: int, src_index: int, offset: int, size: int) -> None:
        """`CacheManager.copy_cache`, its types checked."""
        check_contiguous("dst", dst, "copy_blocks")
        check_contiguous("src", src, "copy_blocks")
        _check_alike("dst", dst, "src", src)
        with self._use(dst) as to, self._use(src) as of:
            check_batch_index("dst_batch_index", dst_index, to.division.batch_size)
            check_batch_index("src_batch_index", src_index, of.division.batch_size)
            part = _part(to.division, offset, size)
            _copy(_expand(to, to.division.entry_items(dst_index), of, of.division.entry_items(src_index), part))

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """`CacheManager.copy_blocks`, its types checked."""
        check_blocks("cache", cache, "copy_cache")
        sources, targets = _flatten(copy_block_info)
        with self._use(cache) as local:
            self._copy_items("copy_block_info", local, targets, local, sources)

    def swap_blocks(self, src: Cache, dst: Cache, src_to_dst: dict[int, int]) -> None:
        """`CacheManager.swap_blocks`, its types checked."""
        check_blocks("src_cache", src, "copy_cache")
        check_blocks("dst_cache", dst, "copy_cache")
        _check_opposite(src, dst)
        _check_alike("src_cache", src, "dst_cache", dst)
        sources = block_items("src_to_dst", list(src_to_dst))
        targets = block_items("src_to_dst", list(src_to_dst.values()))
        with self._use(src) as of, self._use(dst) as to:
            self._copy_items("src_to_dst", to, targets, of, sources)

    @contextmanager
    def _use(self, cache: Cache) -> Iterator[_Local]:
        """A cache, held against being freed; one that only the caller knows is the caller's to hold."""
        local = _Local(cache.tensor_addrs, divide_desc(cache.cache_desc, cache.is_blocks_cache))
        if cache.cache_id == LOCAL_CACHE_ID:
            yield local
        else:
            with self._table.pinned(cache.cache_id):
                yield local

    def _copy_items(self, name: str, to: _Local, targets: Items, of: _Local, sources: Items) -> None:
        check_indices(sources, of.division.num_items, name)
        check_indices(targets, to.division.num_items, name)
        if len(np.unique(targets)) != len(targets):
            raise ParamInvalid(f"{name} names a target block twice; each can be written once")
        _copy(_expand(to, targets, of, sources, _Part(0, to.division.item_bytes)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Of every item."""

    offset_bytes: int
    size_bytes: int


def check_contiguous(name: str, cache: Cache, instead: str) -> None:
    if cache.is_blocks_cache:
        raise ParamInvalid(f"{name} is a blocks cache, but a contiguous one is needed here; for blocks use {instead}")


def check_blocks(name: str, cache: Cache, instead: str) -> None:
    if not cache.is_blocks_cache:
        raise ParamInvalid(f"{name} is a contiguous cache, but a blocks cache is needed here; otherwise use {instead}")


def _check_alike(first_name: str, first: Cache, second_name: str, second: Cache) -> None:
    """Raise unless items of one fit in the place of items of the other."""
    one, other = first.cache_desc, second.cache_desc
    fields = [
        ("num_tensors", one.num_tensors, other.num_tensors),
        ("data_type", one.data_type.name, other.data_type.name),
        ("batch_dim_index", one.batch_dim_index, other.batch_dim_index),
    ]
    axis = 0 if first.is_blocks_cache else one.batch_dim_index
    fields.append(("shape", _without(one.shape, axis), _without(other.shape, axis)))
    for field, mine, theirs in fields:
        if mine != theirs:
            what = f"{field} (but for dimension {axis})" if field == "shape" else field
            raise ParamInvalid(f"{first_name} and {second_name} do not match: {what} is {mine} and {theirs}")


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _check_opposite(src: Cache, dst: Cache) -> None:
    placements = {src.cache_desc.placement, dst.cache_desc.placement}
    if placements != {Placement.DEVICE, Placement.HOST}:
        raise ParamInvalid(
            f"src_cache and dst_cache are both {src.cache_desc.placement.name}: swap_blocks goes between a DEVICE and "
            "a HOST cache; within one cache use copy_blocks"
        )


def _part(division: Division, offset: int, size: int) -> _Part:
    """`offset` and `size` of copy_cache, which are within a batch entry, as a part of every item of it."""
    entry_bytes = division.entry_bytes
    if not 0 <= offset < entry_bytes:
        raise ParamInvalid(f"offset={offset} is out of range 0..{entry_bytes - 1}, the bytes of a batch entry")
    rest = entry_bytes - offset
    if size > rest:
        raise ParamInvalid(f"size={size} is more than the {rest} bytes that a batch entry has from offset={offset} on")
    size = rest if size == WHOLE_ENTRY else size
    if division.num_outer == 1:
        return _Part(offset, size)
    if size != entry_bytes:
        raise ParamInvalid(
            f"offset={offset}, size={size}: with dimensions before batch_dim_index a batch entry is not contiguous, "
            "and can be copied as a whole only (offset=0, size=-1)"
        )
    return _Part(0, division.item_bytes)


def _expand(to: _Local, targets: Items, of: _Local, sources: Items, part: _Part) -> CopyList:
    """All byte ranges, as addresses: `local` is where to, `remote` where from."""
    dst = np.add.outer(np.array(to.addresses, dtype=np.int64), targets * to.division.item_bytes + part.offset_bytes)
    src = np.add.outer(np.array(of.addresses, dtype=np.int64), sources * of.division.item_bytes + part.offset_bytes)
    return CopyList(dst.ravel(), src.ravel(), np.full(dst.size, part.size_bytes, dtype=np.int64))


def _copy(ranges: CopyList) -> None:
    """As if all sources were read before anything is written."""
    if _may_overlap(ranges):
        _copy_through_buffer(ranges)
    else:
        scatter_copy(ranges.local, ranges.remote, ranges.num_bytes)


def _may_overlap(ranges: CopyList) -> bool:
    """Whether a target shares bytes with a source; all ranges are of one size."""
    size = int(ranges.num_bytes[0])
    sources = np.sort(ranges.remote)
    following = np.searchsorted(sources, ranges.local)
    after = sources[np.minimum(following, len(sources) - 1)]
    before = sources[np.maximum(following - 1, 0)]
    return bool((np.abs(after - ranges.local) < size).any() or (np.abs(before - ranges.local) < size).any())


def _copy_through_buffer(ranges: CopyList) -> None:
    buffer = np.empty(ranges.total_bytes, dtype=np.uint8)
    staged = buffer.ctypes.data + np.concatenate(([0], np.cumsum(ranges.num_bytes)[:-1]))
    scatter_copy(staged, ranges.remote, ranges.num_bytes)
    scatter_copy(ranges.local, staged, ranges.num_bytes)


def _flatten(copy_block_info: dict[int, list[int]]) -> tuple[Items, Items]:
    """(sources, targets), checked."""
    sources: list[int] = []
    targets: list[int] = []
    for source, one in copy_block_info.items():
        check_type("copy_block_info key", source, int)
        check_type(f"copy_block_info[{source}]", one, list, tuple)
        sources += [source] * len(one)
        targets += one
    return block_items("copy_block_info", sources), block_items("copy_block_info", targets)
