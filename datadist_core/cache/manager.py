# SPDX-License-Identifier: Apache-2.0
"""`CacheManager`: allocate, register, pull, push and copy caches. V1's `KvCacheManager` is the stricter view of it.

Whoever moves data checks it first: types here, ranges against both descriptors here, and once more at the end that
serves it (`wire` Lookups and backends), because a peer is not trusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._copy import scatter_copy
from ..config import Settings, check_type
from ..errors import CacheNotExist, FeatureNotEnabled, LLMException, ParamInvalid, TimedOut
from ..link.link import Link
from ..link.manager import LinkManager
from ..link.remote import RemoteCache
from ..memory.grid import Grid
from ..memory.pool import PoolStats
from ..transfer.backend import Backend
from ..transfer.engine import TransferEngine
from ..transfer.plan import Batch, CopyList, GridPair, Items, Op, Slice, expand, whole_item
from ..types import Deadline, LLMRole, LLMStatusCode, Placement
from ..wire.messages import Lookup
from .cache import Cache, check_addrs
from .desc import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex
from .store import CacheStore
from .table import CacheEntry, CacheTable, Key

#: When a cache is freed, peers get this long to end their transfers on it.
REVOKE_TIMEOUT_S = 6.0
#: Not a peer: batches that stay in this process.
_NO_PEER = 0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a finished pull or push did."""

    num_bytes: int
    backend: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A checked request: which tensors, which items, which part of each, until when."""

    op: Op
    local_tensors: range
    remote_tensors: range
    local_items: Items
    remote_items: Items
    slices: tuple[Slice, ...] | None
    deadline: Deadline


class CacheManager:
    """Thread-safe. Made by `LLMDataDist.init`; see there."""

    def __init__(
        self,
        cluster_id: int,
        settings: Settings,
        role: Callable[[], LLMRole],
        engine: TransferEngine,
        store: CacheStore,
        table: CacheTable,
        links: LinkManager,
        check_open: Callable[[], None],
    ) -> None:
        self._cluster_id = cluster_id
        self._settings = settings
        self._role = role
        self._engine = engine
        self._store = store
        self._table = table
        self._links = links
        self._check_open = check_open

    # -- memory

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """A paged cache of `cache_desc.shape[0]` blocks per tensor from the pool of its placement.

        Raises:
            ParamInvalid: no pool of that placement (naming the option), or a descriptor that cannot be laid out.
            OutOfMemory: the pool has no free range that large (LLM_OUT_OF_MEMORY; V1 LLM_DEVICE_OUT_OF_MEMORY).
        """
        self._check_open()
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = self._blocks_keys(blocks_cache_key)
        moved = self._caches_named(keys)
        cache = self._store.allocate(cache_desc, keys, is_blocks_cache=True)
        self._revoke(moved)
        return cache

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Use the caller's memory as a paged cache: one address per tensor, each `cache_desc.size` bytes.

        Args:
            remote_accessible: whether peers may read and write it; None means yes for DEVICE, no for HOST.

        The memory must stay valid until `unregister_cache`. Possible at any time, also after linking.
        """
        self._check_open()
        check_type("cache_desc", cache_desc, CacheDesc)
        check_addrs(cache_desc, addrs)
        keys = self._blocks_keys(blocks_cache_key)
        if remote_accessible is None:
            remote_accessible = cache_desc.placement is Placement.DEVICE
        check_type("remote_accessible", remote_accessible, bool)
        moved = self._caches_named(keys)
        cache = self._store.register(cache_desc, addrs, keys, is_blocks_cache=True, accessible=remote_accessible)
        self._revoke(moved)
        return cache

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free a blocks cache: linked peers forget it and end their transfers on it first. Twice is a no-op."""
        check_type("cache", cache, Cache)
        self._free(cache.cache_id)

    def deallocate_cache(self, cache: Cache) -> None:
        """Free a cache, of blocks too. Twice is a no-op."""
        check_type("cache", cache, Cache)
        self._free(cache.cache_id)

    def unregister_cache(self, cache_id: int) -> None:
        """Undo `register_blocks_cache`; after it returns, nothing here touches that memory. Twice is a no-op."""
        check_type("cache_id", cache_id, int)
        self._free(cache_id)

    def pool_stats(self, placement: Placement = Placement.DEVICE) -> PoolStats:
        """Use of the pool of one placement, in bytes."""
        check_type("placement", placement, Placement)
        return self._store.pool_stats(placement)

    # -- moving

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        slices: Sequence[tuple[int, int, int]] | None = None,
        deadline_s: float | None = None,
    ) -> TransferReport:
        """Blocks `src_blocks[i]` of the peer's cache into blocks `dst_blocks[i]` of ours, of every tensor.

        Returns when the data is there. After an error the destination blocks are undefined.

        Args:
            src_layer_range, dst_layer_range: equally long ranges of layers (`tensor_num_per_layer` tensors each).
            slices: (dst_offset, src_offset, num_bytes) within each block, instead of whole blocks (an extension).
            deadline_s: instead of `sync_kv_timeout` (an extension).

        Raises:
            NotYetLinked, CacheNotExist, ParamInvalid, PeerLost, or TimedOut (in V1 with LLM_WAIT_PROCESS_TIMEOUT).
        """
        self._check_open()
        self._check_v1_role(LLMRole.DECODER, "pull")
        check_type("src_cache_key", src_cache_key, CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        check_type("dst_cache", dst_cache, Cache)
        local = tensor_range("dst_layer_range", dst_layer_range, tensor_num_per_layer, dst_cache.cache_desc)
        transfer = self._transfer(
            Op.READ,
            local,
            src_layer_range,
            tensor_num_per_layer,
            dst_blocks,
            src_blocks,
            slices,
            deadline_s,
            "dst",
            "src",
        )
        return self._move(src_cache_key, dst_cache, transfer)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        *,
        slices: Sequence[tuple[int, int, int]] | None = None,
        deadline_s: float | None = None,
    ) -> TransferReport:
        """Blocks `src_blocks[i]` of our cache into blocks `dst_blocks[i]` of the peer's, of every tensor.

        Arguments, result and errors as for `pull_blocks`; `slices` are (src_offset, dst_offset, num_bytes).
        """
        self._check_open()
        self._check_v1_role(LLMRole.PROMPT, "push")
        check_type("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_type("src_cache", src_cache, Cache)
        local = tensor_range("src_layer_range", src_layer_range, tensor_num_per_layer, src_cache.cache_desc)
        transfer = self._transfer(
            Op.WRITE,
            local,
            dst_layer_range,
            tensor_num_per_layer,
            src_blocks,
            dst_blocks,
            slices,
            deadline_s,
            "src",
            "dst",
        )
        return self._move(dst_cache_key, src_cache, transfer)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy block `src` over each block of `copy_block_info[src]`, in every tensor of one blocks cache.

        All sources are read as they were before the call, also when a block is a source and a target.
        """
        self._check_open()
        check_type("cache", cache, Cache)
        check_type("copy_block_info", copy_block_info, dict)
        sources, targets = _flatten_copies(copy_block_info)
        with self._table.pinned(cache.cache_id) as entry:
            if not cache.is_blocks_cache:
                raise ParamInvalid("cache is not a blocks cache; use copy_cache")
            self._copy(entry.grids, block_items("copy_block_info", sources), block_items("copy_block_info", targets))

    # -- inside

    def _move(
        self, key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, cache: Cache, transfer: _Transfer
    ) -> TransferReport:
        started_s = time.perf_counter()
        try:
            link = self._links.get(key.cluster_id)
            with link.transferring(), self._table.pinned(cache.cache_id) as entry:
                backend_names, num_bytes = self._move_on(link, key, entry, transfer)
        except TimedOut as error:
            raise self._timed_out(error) from error
        return TransferReport(num_bytes, "+".join(backend_names), time.perf_counter() - started_s)

    def _move_on(
        self, link: Link, key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, entry: CacheEntry, transfer: _Transfer
    ) -> tuple[list[str], int]:
        with ExitStack() as stack:
            remote = self._use_remote(link, key, transfer.deadline, stack)
            batches = list(_batches(link, entry, remote, transfer))
            for _, batch in batches:
                batch.check()
            for backend, batch in batches:
                self._engine.run(backend, batch)
        return [backend.name for backend, _ in batches], sum(batch.num_bytes for _, batch in batches)

    def _use_remote(self, link: Link, key: Any, deadline: Deadline, stack: ExitStack) -> RemoteCache:
        """The peer's cache, held against its being freed. Looked up once more if it was just freed and remade."""
        query = _query(key)
        remote = link.remote_cache(query, deadline)
        try:
            stack.enter_context(remote.used())
        except CacheNotExist:
            remote = link.remote_cache(query, deadline)
            stack.enter_context(remote.used())
        return remote

    def _transfer(
        self,
        op: Op,
        local_tensors: range,
        remote_layers: range | None,
        tensor_num_per_layer: int,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        slices: Sequence[tuple[int, int, int]] | None,
        deadline_s: float | None,
        local_name: str,
        remote_name: str,
    ) -> _Transfer:
        local_items = block_items(f"{local_name}_blocks", local_blocks)
        remote_items = block_items(f"{remote_name}_blocks", remote_blocks)
        if len(local_items) != len(remote_items):
            raise ParamInvalid(
                f"{local_name}_blocks has {len(local_items)} indices but {remote_name}_blocks has {len(remote_items)}; "
                "they must be equally long"
            )
        remote_tensors = tensor_range(f"{remote_name}_layer_range", remote_layers, tensor_num_per_layer, None)
        deadline = Deadline.after(self._settings.sync_kv_timeout_s if deadline_s is None else deadline_s)
        parts = None if slices is None else tuple(Slice(*one) for one in slices)
        return _Transfer(op, local_tensors, remote_tensors, local_items, remote_items, parts, deadline)

    def _copy(self, grids: Sequence[Grid], src: Items, dst: Items) -> None:
        if len(np.unique(dst)) != len(dst):
            raise ParamInvalid("copy_block_info names a target block twice; each can be written once")
        pairs = tuple(GridPair(local=grid, remote=grid) for grid in grids)
        batch = Batch(_NO_PEER, Op.READ, pairs, dst, src, whole_item(grids[0].item_bytes), Deadline.never())
        batch.check()
        bases = {grid.region_id: self._store.region_address(grid.region_id) for grid in grids}
        ranges = expand(batch, bases, bases)
        if len(np.intersect1d(src, dst)) == 0:
            scatter_copy(ranges.local, ranges.remote, ranges.num_bytes)
        else:
            _copy_through_buffer(ranges)

    def _free(self, cache_id: int) -> None:
        entry = self._table.retire(cache_id)
        if entry is None:
            return
        self._revoke([cache_id])
        self._table.settle(entry)

    def _revoke(self, cache_ids: Iterable[int]) -> None:
        """Have every linked peer forget these caches. A peer that does not answer loses its link: it might still
        be writing, and a link that is down cannot."""
        for cache_id in cache_ids:
            for link in self._links.links():
                try:
                    link.revoke(cache_id, Deadline.after(REVOKE_TIMEOUT_S))
                except LLMException as error:
                    link.close(error)

    def _caches_named(self, keys: Iterable[Key]) -> list[int]:
        """Caches that lose one of `keys` to a new cache; peers that know them by it must ask again."""
        named = []
        for key in keys:
            try:
                named.append(self._table.by_key(key).entry.cache_id)
            except CacheNotExist:
                continue
        return named

    def _blocks_keys(self, key: BlocksCacheKey | None) -> dict[Key, int]:
        if key is None:
            return {}
        check_type("blocks_cache_key", key, BlocksCacheKey)
        if key.cluster_id != self._cluster_id:
            raise ParamInvalid(
                f"blocks_cache_key.cluster_id={key.cluster_id} must be this cluster's own id, {self._cluster_id}"
            )
        if not self._settings.v2 and self._role() is not LLMRole.PROMPT:
            raise ParamInvalid("blocks_cache_key: in V1 only a PROMPT cluster may hold cache keys")
        return {key: 0}

    def _check_v1_role(self, role: LLMRole, what: str) -> None:
        if not self._settings.v2 and self._role() not in (role, LLMRole.MIX):
            raise FeatureNotEnabled(
                f"in V1 only a {role.name} cluster can {what}; this one is {self._role().name}",
                LLMStatusCode.LLM_PARAM_INVALID,
            )

    def _timed_out(self, error: TimedOut) -> TimedOut:
        if self._settings.v2:
            return error
        return TimedOut(str(error), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)


KvCacheManager = CacheManager


def tensor_range(name: str, layers: range | None, per_layer: int, desc: CacheDesc | None) -> range:
    """Tensor indices of a range of layers; `range(0)` stands for "all" where the descriptor is not known yet."""
    check_type("tensor_num_per_layer", per_layer, int)
    if per_layer < 1:
        raise ParamInvalid(f"tensor_num_per_layer={per_layer} must be at least 1")
    if layers is None:
        return range(0) if desc is None else range(desc.num_tensors)
    check_type(name, layers, range)
    if layers.step != 1 or layers.start < 0 or len(layers) == 0:
        raise ParamInvalid(f"{name}={layers} must be a non-empty range with step 1")
    if desc is not None:
        check_tensors(name, layers, per_layer, desc.num_tensors)
    return range(layers.start * per_layer, layers.stop * per_layer)


def check_tensors(name: str, layers: range, per_layer: int, num_tensors: int) -> None:
    """Raise unless the layers exist and `tensor_num_per_layer` divides the number of tensors."""
    if num_tensors % per_layer:
        raise ParamInvalid(f"tensor_num_per_layer={per_layer} does not divide num_tensors={num_tensors}")
    if layers.stop * per_layer > num_tensors:
        raise ParamInvalid(f"{name}={layers} is out of range: the cache has {num_tensors // per_layer} layers")


def block_items(name: str, blocks: Sequence[int]) -> Items:
    """Block indices as an array. TypeError / ParamInvalid naming the argument for anything else."""
    if isinstance(blocks, np.ndarray):
        items = blocks
    else:
        check_type(name, blocks, list, tuple)
        items = np.array(blocks) if len(blocks) else np.empty(0, dtype=np.int64)
    if items.ndim != 1 or items.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold ints only")
    if len(items) == 0:
        raise ParamInvalid(f"{name} is empty; name at least one block")
    if int(items.min()) < 0:
        raise ParamInvalid(f"{name} holds the negative index {int(items.min())}")
    return np.ascontiguousarray(items, dtype=np.int64)


def _copy_through_buffer(ranges: CopyList) -> None:
    """For ranges whose sources and targets overlap."""
    buffer = np.empty(ranges.total_bytes, dtype=np.uint8)
    staged = buffer.ctypes.data + np.concatenate(([0], np.cumsum(ranges.num_bytes)[:-1]))
    scatter_copy(staged, ranges.remote, ranges.num_bytes)
    scatter_copy(ranges.local, staged, ranges.num_bytes)


def _flatten_copies(copy_block_info: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    sources: list[int] = []
    targets: list[int] = []
    for source, one in copy_block_info.items():
        check_type("copy_block_info key", source, int)
        check_type(f"copy_block_info[{source}]", one, list, tuple)
        sources += [source] * len(one)
        targets += one
    return sources, targets


def _query(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> Lookup:
    if isinstance(key, BlocksCacheKey):
        return Lookup(0, "blocks", key.cluster_id, model_id=key.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return Lookup(0, "id", key.cluster_id, cache_id=key.cache_id, batch_index=key.batch_index)
    return Lookup(0, "cache", key.cluster_id, model_id=key.model_id, req_id=key.req_id, prefix_id=key.prefix_id)


def _batches(
    link: Link, entry: CacheEntry, remote: RemoteCache, transfer: _Transfer
) -> Iterable[tuple[Backend, Batch]]:
    """One batch per backend that the regions of the two caches need; usually one in all."""
    by_backend: dict[Backend, list[GridPair]] = {}
    for pair in _pairs(entry, remote, transfer):
        by_backend.setdefault(remote.backend_of[pair.remote.region_id], []).append(pair)
    for backend, pairs in by_backend.items():
        slices = transfer.slices or whole_item(pairs[0].local.item_bytes)
        yield (
            backend,
            Batch(
                link.link_id,
                transfer.op,
                tuple(pairs),
                transfer.local_items,
                transfer.remote_items,
                slices,
                transfer.deadline,
            ),
        )


def _pairs(entry: CacheEntry, remote: RemoteCache, transfer: _Transfer) -> list[GridPair]:
    remote_tensors = transfer.remote_tensors or range(len(remote.grids))
    if len(remote_tensors) != len(transfer.local_tensors):
        raise ParamInvalid(
            f"{len(transfer.local_tensors)} tensors here but {len(remote_tensors)} at the peer; "
            "num_tensors or the layer ranges of the two ends must match"
        )
    if remote_tensors.stop > len(remote.grids):
        raise ParamInvalid(
            f"tensors up to {remote_tensors.stop - 1} were asked for; the peer's cache has {len(remote.grids)}"
        )
    pairs = [
        GridPair(entry.grids[a], remote.grids[b]) for a, b in zip(transfer.local_tensors, remote_tensors, strict=True)
    ]
    if transfer.slices is None:
        _check_same_items(pairs)
    return pairs


def _check_same_items(pairs: Sequence[GridPair]) -> None:
    for pair in pairs:
        if pair.local.item_bytes != pair.remote.item_bytes:
            raise ParamInvalid(
                f"a block has {pair.local.item_bytes} bytes here but {pair.remote.item_bytes} at the peer; the two "
                "descriptors (shape, data_type) must match"
            )
