# SPDX-License-Identifier: Apache-2.0
"""`CacheManager`: allocate, register, pull, push, copy and send caches. V1's `KvCacheManager` is the stricter view.

The public face only: types are checked here, the work is done by `keeper` (caches and keys), `mover` (pull and push),
`local_copy` and `sending` (layer by layer). Ranges are checked against both descriptors before anything moves, and once
more at the end that serves them, because a peer is not trusted.

"Layer" means `tensor_num_per_layer` consecutive tensors; layer ranges are Python ranges with step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import NoneType

from ..checks import check_type
from ..errors import ParamInvalid
from ..link.manager import LinkManager
from ..memory.pool import PoolStats
from ..settings import Settings
from ..transfer.engine import TransferEngine
from ..transfer.plan import Op
from ..types import Memtype, Placement
from .args import DEFAULT_TENSORS_PER_LAYER, WHOLE_ENTRY, block_items, check_equally_long, check_size, layers_arg
from .cache import Cache, cache_tensors
from .desc import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, MemInfo
from .integrity import Integrity
from .keeper import CacheKeeper
from .layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from .local_copy import LocalCopier, check_contiguous
from .mover import Mover, check_managed, check_movable_blocks
from .planners import blocks_planner, entries_planner, slices_arg
from .report import TransferReport
from .routes import signature_of
from .rules import RemoteKey, Rules
from .sending import Sending, block_lists, check_configs, check_link_id, start_sending
from .store import CacheStore
from .table import CacheTable
from .views import Tensor


class CacheManager:
    """Allocates, registers and moves the caches of one `LLMDataDist`, whose property it is. Thread-safe.

    All methods raise TypeError for an argument of a wrong type, ParamInvalid (LLM_PARAM_INVALID) for a value that
    cannot work, both naming the argument, and ClosedError (LLM_ENGINE_FINALIZED) after `finalize`.
    """

    def __init__(
        self,
        cluster_id: int,
        settings: Settings,
        rules: Rules,
        engine: TransferEngine,
        store: CacheStore,
        table: CacheTable,
        links: LinkManager,
        integrity: Integrity,
    ) -> None:
        self._settings = settings
        self._rules = rules
        self._store = store
        self._table = table
        self.keeper = CacheKeeper(cluster_id, rules, store, table, links)
        self._mover = Mover(engine, table, links, rules, integrity)
        self._copier = LocalCopier(table)

    def is_initialized(self) -> bool:
        """Whether caches can be used: True until `finalize`."""
        return self._rules.is_open()

    # -- contiguous caches

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """A contiguous cache from the pool of its placement, held by its id and by each key.

        Args:
            cache_keys: what peers name batch entries by, the i-th key entry i; of this cluster's own id. A key with
                neither req_id nor prefix_id fills an unused entry; trailing ones may be left out. A key that is
                repeated, or that another cache had, names what it was given last. In V1 for PROMPT only. Peers can
                pull by a key from now on: tell them of a request only when its entry is filled.

        Raises:
            ParamInvalid: no pool of that placement (naming the option), or a descriptor that cannot be laid out.
            OutOfMemory: the pool has no free range that large (LLM_OUT_OF_MEMORY; V1 LLM_DEVICE_OUT_OF_MEMORY).
        """
        self._rules.check_open()
        keys = self.keeper.batch_keys(cache_desc, cache_keys)
        return self.keeper.allocate(cache_desc, keys, is_blocks_cache=False)

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Use the caller's memory as a contiguous cache; arguments as for `allocate_cache` and `register_blocks_cache`.

        Its keys hold nothing: after `unregister_cache` nothing here touches that memory.
        """
        self._rules.check_open()
        keys = self.keeper.batch_keys(cache_desc, cache_keys)
        return self.keeper.register(cache_desc, addrs, keys, False, remote_accessible)

    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the hold of the cache's id: the handle is of no use any more. Twice is a no-op.

        The memory is freed once no key holds it either: keys go with `remove_cache_key`, and when a peer has pulled
        them. A blocks cache is freed at once. Linked peers end their transfers on it first.
        """
        self._rules.check_open()
        check_type("cache", cache, Cache)
        self.keeper.drop_id(cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Drop a key; the memory is freed if nothing else holds the cache. An unknown key is a no-op."""
        self._rules.check_open()
        check_type("cache_key", cache_key, CacheKey)
        self.keeper.drop_key(cache_key)

    def unregister_cache(self, cache_id: int) -> None:
        """Undo `register_cache` or `register_blocks_cache`. Twice is a no-op.

        After it returns, nothing here touches that memory: transfers end first. TimedOut if one does not.
        """
        self._rules.check_open()
        check_type("cache_id", cache_id, int)
        self.keeper.unregister(cache_id)

    def get_cache_tensors(self, cache: Cache, tensor_index: int = 0) -> list[Tensor]:
        """Tensor `tensor_index` of a cache, in a list of one (one per device): a zero-copy view, see `Cache.numpy`."""
        self._rules.check_open()
        return cache_tensors(cache, tensor_index)

    # -- blocks caches

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """A paged cache of `cache_desc.shape[0]` blocks per tensor from the pool of its placement.

        Args:
            blocks_cache_key: what peers name it by; of this cluster's own id. It does not hold the memory.

        Raises:
            As `allocate_cache`.
        """
        self._rules.check_open()
        check_type("cache_desc", cache_desc, CacheDesc)
        return self.keeper.allocate(cache_desc, self.keeper.blocks_keys(blocks_cache_key), is_blocks_cache=True)

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
        self._rules.check_open()
        keys = self.keeper.blocks_keys(blocks_cache_key)
        return self.keeper.register(cache_desc, addrs, keys, True, remote_accessible)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free a blocks cache: linked peers forget it and end their transfers on it first. Twice is a no-op."""
        self._rules.check_open()
        check_type("cache", cache, Cache)
        self.keeper.drop_id(cache.cache_id)

    def pool_stats(self, placement: Placement = Placement.DEVICE) -> PoolStats:
        """Use of the pool of one placement, in bytes. (An extension.)"""
        self._rules.check_open()
        check_type("placement", placement, Placement)
        return self._store.pool_stats(placement)

    def remap_registered_memory(self, mem_infos: Sequence[MemInfo] | MemInfo) -> None:
        """Accepted for DEVICE memory; without an accelerator there is nothing to do."""
        self._rules.check_open()
        check_type("mem_infos", mem_infos, list, tuple, MemInfo)
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        if not infos:
            raise ParamInvalid("mem_infos is empty; name at least one range of memory")
        for i, info in enumerate(infos):
            check_type(f"mem_infos[{i}]", info, MemInfo)
            if info.mem_type is not Memtype.MEM_TYPE_DEVICE:
                raise ParamInvalid(f"mem_infos[{i}].mem_type={info.mem_type.name}: only DEVICE memory can be remapped")

    # -- moving contiguous caches

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = WHOLE_ENTRY,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> TransferReport:
        """The batch entry of a peer that `cache_key` names into entry `batch_index` of ours.

        Returns when the data is there. After an error the destination is undefined. A CacheKey is dropped by its
        owner when the pull has succeeded.

        Args:
            size: bytes of every tensor, from the entry's start; -1 for all of one batch entry.
            src_layer_range, dst_layer_range: equally long ranges of layers; None for all.

        Raises:
            NotYetLinked, CacheNotExist, ParamInvalid, PeerLost, TimedOut (in V1 with LLM_WAIT_PROCESS_TIMEOUT), or,
            with `LLMConfig.integrity`, IntegrityError.
        """
        self._rules.check_open()
        self._rules.check_may_pull()
        check_type("cache_key", cache_key, CacheKey, CacheKeyByIdAndIndex)
        self._rules.check_pull_key(cache_key)
        check_type("cache", cache, Cache)
        check_contiguous("cache", cache, "pull_blocks")
        check_type("batch_index", batch_index, int)
        check_size(size)
        local_layers = layers_arg("dst_layer_range", dst_layer_range, tensor_num_per_layer)
        remote_layers = layers_arg("src_layer_range", src_layer_range, tensor_num_per_layer)
        plan = entries_planner("cache_key", "batch_index", batch_index, local_layers, remote_layers, size)
        return self._rules.in_time(None, partial(self._mover.pull, "cache_key", cache_key, cache, plan, None))

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = WHOLE_ENTRY,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> TransferReport:
        """Entry `src_batch_index` of ours into the batch entry of a peer that `dst_cache_key` names.

        Arguments, result and errors as for `pull_cache`.
        """
        self._rules.check_open()
        self._rules.check_may_push()
        check_type("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        check_type("src_cache", src_cache, Cache)
        check_contiguous("src_cache", src_cache, "push_blocks")
        check_type("src_batch_index", src_batch_index, int)
        check_size(size)
        local_layers = layers_arg("src_layer_range", src_layer_range, tensor_num_per_layer)
        remote_layers = layers_arg("dst_layer_range", dst_layer_range, tensor_num_per_layer)
        plan = entries_planner("dst_cache_key", "src_batch_index", src_batch_index, local_layers, remote_layers, size)
        return self._rules.in_time(None, partial(self._mover.push, dst_cache_key, src_cache, plan, None, None))

    # -- moving blocks

    def pull_blocks(
        self,
        src_cache_key: RemoteKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
        slices: Sequence[tuple[int, int, int]] | None = None,
        deadline_s: float | None = None,
    ) -> TransferReport:
        """Blocks `src_blocks[i]` of the peer's cache into blocks `dst_blocks[i]` of ours, of every tensor.

        Where the key names a contiguous cache, `src_blocks` is empty: its batch entry is cut into consecutive blocks.
        Returns when the data is there. After an error the destination blocks are undefined.

        Args:
            src_layer_range, dst_layer_range: equally long ranges of layers (`tensor_num_per_layer` tensors each).
            slices: (dst_offset, src_offset, num_bytes) within each block, instead of whole blocks (an extension).
            deadline_s: instead of `sync_kv_timeout` (an extension).

        Raises:
            NotYetLinked, CacheNotExist, ParamInvalid, PeerLost, TimedOut (in V1 with LLM_WAIT_PROCESS_TIMEOUT), or,
            with `LLMConfig.integrity`, IntegrityError.
        """
        self._rules.check_open()
        self._rules.check_may_pull()
        layers = dst_layer_range, src_layer_range, tensor_num_per_layer
        way = signature_of(Op.READ, src_cache_key, dst_cache, *layers, slices)
        report = self._mover.routes.again(way, src_cache_key, dst_blocks, src_blocks, deadline_s)
        if report is not None:
            return report
        check_type("src_cache_key", src_cache_key, CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        self._rules.check_pull_key(src_cache_key)
        check_type("dst_cache", dst_cache, Cache)
        check_movable_blocks("dst_cache", dst_cache, "pull_cache")
        local_layers = layers_arg("dst_layer_range", dst_layer_range, tensor_num_per_layer)
        remote_layers = layers_arg("src_layer_range", src_layer_range, tensor_num_per_layer)
        local = block_items("dst_blocks", dst_blocks)
        remote = block_items("src_blocks", src_blocks, may_be_empty=True)
        if len(remote):
            check_equally_long("dst_blocks", local, "src_blocks", remote)
        else:
            way = None  # from a contiguous cache
        plan = blocks_planner("src_cache_key", local_layers, remote_layers, local, remote, slices_arg(slices))
        return self._rules.in_time(
            deadline_s, partial(self._mover.pull, "src_cache_key", src_cache_key, dst_cache, plan, way)
        )

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
        *,
        slices: Sequence[tuple[int, int, int]] | None = None,
        deadline_s: float | None = None,
        link_id: int | None = None,
    ) -> TransferReport:
        """Blocks `src_blocks[i]` of our cache into blocks `dst_blocks[i]` of the peer's, of every tensor.

        Arguments, result and errors as for `pull_blocks`, but `slices` are (src_offset, dst_offset, num_bytes), and
        `link_id` is an `LLMDataDist.link_id`: over that link, or PeerLost once another has replaced it (an extension).
        """
        self._rules.check_open()
        self._rules.check_may_push()
        check_type("link_id", link_id, int, NoneType)
        layers = src_layer_range, dst_layer_range, tensor_num_per_layer
        way = signature_of(Op.WRITE, dst_cache_key, src_cache, *layers, slices)
        report = self._mover.routes.again(way, dst_cache_key, src_blocks, dst_blocks, deadline_s, link_id)
        if report is not None:
            return report
        check_type("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_type("src_cache", src_cache, Cache)
        check_movable_blocks("src_cache", src_cache, "push_cache")
        local_layers = layers_arg("src_layer_range", src_layer_range, tensor_num_per_layer)
        remote_layers = layers_arg("dst_layer_range", dst_layer_range, tensor_num_per_layer)
        local, remote = block_items("src_blocks", src_blocks), block_items("dst_blocks", dst_blocks)
        check_equally_long("src_blocks", local, "dst_blocks", remote)
        plan = blocks_planner("dst_cache_key", local_layers, remote_layers, local, remote, slices_arg(slices))
        return self._rules.in_time(deadline_s, partial(self._mover.push, dst_cache_key, src_cache, plan, way, link_id))

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
        *,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
        slices: Sequence[tuple[int, int, int]] | None = None,
        link_id: int | None = None,
    ) -> CacheTask:
        """Send layer after layer, each as soon as `layer_synchronizer` releases it, to every destination.

        Returns at once. Destinations are independent: one that fails or is slow does not touch the others.

        Args:
            transfer_configs: one per destination: addresses in its memory, or the key of its cache.
            src_block_indices, dst_block_indices: equally long, from blocks to blocks. From a contiguous source: only
                `dst_block_indices`, into which the batch entry is cut, or neither, for a contiguous destination.
            dst_block_memory_size: bytes of one destination block; needed from an entry to blocks at addresses.
            tensor_num_per_layer: tensors of one layer, at both ends (an extension; the original has two).
            slices: (src_offset, dst_offset, num_bytes) within blocks; from blocks to a key only (an extension).
            link_id: as for `push_blocks`, asked before each layer; for destinations of one cluster (an extension).

        Raises:
            TypeError, ParamInvalid, CacheNotExist: what can be seen from here. What only a destination knows, such
                as an unknown key, is its status in `CacheTask.get_results`.
        """
        self._rules.check_open()
        self._rules.check_may_push()
        check_type("src_cache", src_cache, Cache)
        check_type("layer_synchronizer", layer_synchronizer, LayerSynchronizer)
        check_configs(transfer_configs)
        check_link_id(link_id, transfer_configs)
        layers_arg("tensor_num_per_layer", None, tensor_num_per_layer)
        is_blocks = src_cache.is_blocks_cache
        blocks = block_lists(is_blocks, src_block_indices, dst_block_indices, dst_block_memory_size, slices)
        check_managed("src_cache", src_cache)
        source = self._table.pin(src_cache.cache_id)
        try:
            shared = self._mover, self._rules, source, blocks, tensor_num_per_layer
            sending = Sending(*shared, self._settings.sync_kv_timeout_s, link_id)
            return start_sending(sending, self._table, layer_synchronizer, transfer_configs)
        except BaseException:
            self._table.unpin(source)
            raise

    # -- copies on this side

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = WHOLE_ENTRY,
        req_id: int | None = None,
    ) -> None:
        """Batch entry `src_batch_index` of `src` over entry `dst_batch_index` of `dst`; the descriptors must match.

        Args:
            offset, size: the part of the entry of every tensor, in bytes; size -1 means up to its end.
            req_id: for the original's logs only.
        """
        self._rules.check_open()
        check_type("dst", dst, Cache)
        check_type("src", src, Cache)
        check_type("dst_batch_index", dst_batch_index, int)
        check_type("src_batch_index", src_batch_index, int)
        check_type("offset", offset, int)
        check_size(size)
        if req_id is not None:
            check_type("req_id", req_id, int)
        self._copier.copy_entry(dst, src, dst_batch_index, src_batch_index, offset, size)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy block `src` over each block of `copy_block_info[src]`, in every tensor of one blocks cache.

        All sources are read as they were before the call, also when a block is a source and a target.
        """
        self._rules.check_open()
        check_type("cache", cache, Cache)
        check_type("copy_block_info", copy_block_info, dict)
        self._copier.copy_blocks(cache, copy_block_info)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy block `src` of `src_cache` over block `src_to_dst[src]` of `dst_cache`, of every tensor.

        One of the two is on DEVICE, the other on HOST (`allocate_blocks_cache`, `register_blocks_cache` or
        `Cache.create_cpu_cache`); either direction.
        """
        self._rules.check_open()
        check_type("src_cache", src_cache, Cache)
        check_type("dst_cache", dst_cache, Cache)
        check_type("src_to_dst", src_to_dst, dict)
        self._copier.swap_blocks(src_cache, dst_cache, src_to_dst)


KvCacheManager = CacheManager
