# SPDX-License-Identifier: Apache-2.0
"""What `transfer_cache_async` sends, and where: one sender per destination, a batch per layer.

A destination is named by addresses in its memory (`TransferConfig`) or by the key of its cache
(`TransferWithCacheKeyConfig`). What only the destination can say, such as an unknown key, is that destination's
failure; everything that can be checked here is checked before the task starts.

From blocks to the blocks of a key each layer leaves a `Route`, so that the next task like this one moves it the short
way: the model computes thousands of chunks, and each of them every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import NoneType

import numpy as np

from ..checks import check_type
from ..errors import CacheNotExist, ParamInvalid, TimedOut
from ..link.link import Link
from ..link.remote import RemoteCache, RemotePlace
from ..memory.grid import Grid
from ..memory.layout import CacheLayout
from ..transfer.backend import Backend
from ..transfer.item_copy import ItemList, item_list
from ..transfer.plan import GridPair, Items, Op, Slice, check_indices, check_slices, whole_item
from ..types import Deadline
from .args import WHOLE_ENTRY, Layers, block_items, check_batch_index, check_equally_long, check_tensors_per_layer
from .layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig, start_task
from .mover import Met, Mover, lookup_of, using
from .planners import slices_arg
from .plans import Moves, Side, check_num_blocks, plan_blocks, plan_entries, plan_entry_to_blocks
from .routes import Signature
from .rules import Rules
from .table import CacheEntry, CacheTable

Config = TransferConfig | TransferWithCacheKeyConfig


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """Which blocks of the source, and of every destination. None: contiguous at that end.

    `block_bytes` is the size of one destination block, where the caller has given it. `slices` are the parts of each
    block that move; None for all of it.
    """

    src: Items | None
    dst: Items | None
    block_bytes: int | None
    slices: tuple[Slice, ...] | None


def check_configs(configs: Sequence[Config]) -> None:
    """The argument `transfer_configs`."""
    check_type("transfer_configs", configs, list, tuple)
    if not configs:
        raise ParamInvalid("transfer_configs is empty; name at least one destination")
    for i, config in enumerate(configs):
        check_type(f"transfer_configs[{i}]", config, TransferConfig, TransferWithCacheKeyConfig)


def block_lists(
    src_is_blocks: bool,
    src_block_indices: Sequence[int] | None,
    dst_block_indices: Sequence[int] | None,
    dst_block_memory_size: int | None,
    slices: Sequence[tuple[int, int, int]] | None,
) -> BlockLists:
    """The arguments of `transfer_cache_async` that say what of a layer moves, checked."""
    src = None if src_block_indices is None else block_items("src_block_indices", src_block_indices)
    dst = None if dst_block_indices is None else block_items("dst_block_indices", dst_block_indices)
    if dst_block_memory_size is not None:
        check_type("dst_block_memory_size", dst_block_memory_size, int)
        if dst_block_memory_size < 1:
            raise ParamInvalid(f"dst_block_memory_size={dst_block_memory_size} must be a number of bytes of 1 or more")
    if src_is_blocks and (src is None or dst is None):
        raise ParamInvalid("src_cache is a blocks cache: src_block_indices and dst_block_indices are both needed")
    if not src_is_blocks and src is not None:
        raise ParamInvalid("src_block_indices must be None: src_cache is contiguous; src_batch_index picks the entry")
    if src is not None and dst is not None:
        check_equally_long("src_block_indices", src, "dst_block_indices", dst)
    if dst is None and dst_block_memory_size is not None:
        raise ParamInvalid("dst_block_memory_size is for destinations with blocks; give dst_block_indices too")
    parts = slices_arg(slices)
    if parts is not None and src is None:
        raise ParamInvalid("slices must be None: src_cache is contiguous; a batch entry is cut into whole blocks")
    return BlockLists(src, dst, dst_block_memory_size, parts)


def check_link_id(link_id: int | None, configs: Sequence[Config]) -> None:
    """The argument `link_id`: a link leads to one cluster."""
    check_type("link_id", link_id, int, NoneType)
    clusters = sorted({config.cluster_id for config in configs})
    if link_id is not None and len(clusters) > 1:
        raise ParamInvalid(f"link_id={link_id} is a link to one cluster, but transfer_configs name {clusters}")


def check_config(config: Config, sending: Sending) -> None:
    """Raise for whatever is wrong with a destination's configuration as seen from here."""
    layout, blocks, per_layer = sending.source.layout, sending.blocks, sending.tensors_per_layer
    layers = source_layers(config, sending)
    if not layout.is_blocks:
        check_batch_index("src_batch_index", config.src_batch_index, layout.batch_size)
    _check_source_blocks(layout, blocks)
    if not isinstance(config, TransferConfig):
        return
    sending.rules.check_address_configs_allowed()
    if blocks.slices is not None:
        raise ParamInvalid("slices are for TransferWithCacheKeyConfig only: an address says nothing of blocks there")
    needed = per_layer * len(layers)
    if len(config.dst_addrs) != needed:
        raise ParamInvalid(
            f"dst_addrs has {len(config.dst_addrs)} addresses for {len(layers)} layers; {needed} are needed, "
            f"{per_layer} per layer"
        )
    if not layout.is_blocks and blocks.dst is not None and blocks.block_bytes is None:
        raise ParamInvalid(
            "dst_block_memory_size is needed to send a contiguous source to blocks at an address: bytes of one block"
        )
    if not layout.is_blocks and blocks.dst is None:
        layout.entry_as_blocks(0, config.src_batch_index, layout.entry_bytes)  # it must be contiguous


def _check_source_blocks(layout: CacheLayout, blocks: BlockLists) -> None:
    """The source has the blocks that are to be sent."""
    if blocks.src is not None:
        if blocks.slices is not None:
            check_slices(layout.item_bytes, [(part.local_offset, part.num_bytes) for part in blocks.slices])
        elif blocks.block_bytes not in (None, layout.item_bytes):
            raise ParamInvalid(
                f"dst_block_memory_size={blocks.block_bytes} must be the bytes of a source block, {layout.item_bytes}"
            )
        check_indices(blocks.src, layout.grids[0].num_items, "src_block_indices")
    elif blocks.dst is not None:
        cut = layout.entry_as_blocks(0, 0, blocks.block_bytes or 1)
        check_num_blocks(len(blocks.dst), cut, "dst_block_indices")


def source_layers(config: Config, sending: Sending) -> range:
    """The layers of the source that a destination gets."""
    num_tensors, per_layer = len(sending.source.grids), sending.tensors_per_layer
    num_layers, rest = divmod(num_tensors, per_layer)
    if rest:
        raise ParamInvalid(f"tensor_num_per_layer={per_layer} does not divide num_tensors={num_tensors} of src_cache")
    layers = config.src_layer_range
    if layers is not None and layers.stop > num_layers:
        raise ParamInvalid(f"src_layer_range={layers} is out of range: src_cache has {num_layers} layers")
    return range(num_layers) if layers is None else layers


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """What all destinations of one task share. `timeout_s` is for one layer to one destination.

    `link_id` is the one link over which anything may be sent; None for whichever there is.
    """

    mover: Mover
    rules: Rules
    source: CacheEntry
    blocks: BlockLists
    tensors_per_layer: int
    timeout_s: float
    link_id: int | None

    def tensors(self, layer: int) -> range:
        """Of the `layer`-th layer of any cache."""
        return range(layer * self.tensors_per_layer, (layer + 1) * self.tensors_per_layer)

    def sender(self, config: Config) -> KeySender | AddressSender:
        return AddressSender(self, config) if isinstance(config, TransferConfig) else KeySender(self, config)


@dataclass(frozen=True, slots=True)
class _Reached:
    link: Link
    deadline: Deadline


class _Sender:
    """What both kinds of destination have in common: the link, and one deadline per layer."""

    def __init__(self, sending: Sending, config: Config) -> None:
        self.layers = source_layers(config, sending)
        self._cluster_id = config.cluster_id
        self._batch_index = config.src_batch_index
        self._sending = sending

    def close(self) -> None:
        """Nothing is held between layers."""

    @contextmanager
    def _reach(self) -> Iterator[_Reached]:
        """Around one layer. A TimedOut leaves it with the status code of this generation."""
        sending = self._sending
        sending.rules.check_open()
        deadline = Deadline.after(sending.timeout_s)
        link = sending.mover.link(self._cluster_id, sending.link_id)
        try:
            with link.transferring():
                yield _Reached(link, deadline)
        except TimedOut as error:
            raise sending.rules.timed_out(error) from error

    def _run(self, reached: _Reached, moves: Moves, backend_of: dict[int, Backend]) -> None:
        sending = self._sending
        sending.mover.run(reached.link, Op.WRITE, sending.source, moves, backend_of, reached.deadline)


class KeySender(_Sender):
    """To the cache that a key names. Looked up for every layer: the link remembers, until the owner frees it."""

    def __init__(self, sending: Sending, config: TransferWithCacheKeyConfig) -> None:
        super().__init__(sending, config)
        self._query = lookup_of(config.cache_key)
        self._cache_id: int | None = None
        self._dst_layers = Layers("dst_layer_range", config.dst_layer_range, sending.tensors_per_layer)
        src, dst = sending.blocks.src, sending.blocks.dst
        #: As something that is quick to compare, however many they are.
        self._slices = repr(sending.blocks.slices)
        #: Of both ends; empty unless it is from blocks to blocks.
        self._items: Sequence[ItemList] = () if src is None or dst is None else (item_list(src), item_list(dst))

    def open(self) -> None:
        """Find the peer's cache, so that an unknown key shows before anything is sent."""
        with self._reach() as reached, using(reached.link, self._query, reached.deadline) as found:
            self._cache_id = found.cache.cache_id
            theirs = self._dst_layers.tensors(found.cache.layout)
            per_layer = self._sending.tensors_per_layer
            if len(theirs) != per_layer * len(self.layers):
                raise ParamInvalid(
                    f"{len(self.layers)} layers are sent, but dst_layer_range (or the destination's cache) has "
                    f"{len(theirs) // per_layer}"
                )

    def send(self, layer_index: int) -> None:
        way = self._way(layer_index)
        sending = self._sending
        sending.rules.check_open()
        to = self._cluster_id, sending.link_id
        if way is not None and sending.mover.routes.again_with(way, *to, *self._items):
            return
        with self._reach() as reached, using(reached.link, self._query, reached.deadline) as found:
            if found.cache.cache_id != self._cache_id:
                raise CacheNotExist("the key names another cache of the destination since layers were sent to it")
            moves = self._plan(layer_index, found.cache, found.batch_index)
            self._run(reached, moves, found.cache.backend_of)
            if way is not None:
                met = Met(reached.link, self._sending.source, found.cache, found.batch_index)
                self._sending.mover.keep_route(way, Op.WRITE, met, moves)

    def _way(self, layer_index: int) -> Signature | None:
        """What the route of a layer depends on, the cache that was found at first among it. None: there is none."""
        if not self._items:
            return None
        nth = layer_index - self.layers.start
        theirs = nth if self._dst_layers.layers is None else self._dst_layers.layers[nth]
        ends = self._sending.source.cache_id, layer_index, self._cache_id, theirs
        return ("layer", *ends, self._sending.tensors_per_layer, self._slices)

    def _plan(self, layer_index: int, remote: RemoteCache, batch_index: int) -> Moves:
        nth = self._sending.tensors(layer_index - self.layers.start)
        theirs = self._dst_layers.tensors(remote.layout)[nth.start : nth.stop]
        here = Side(self._sending.source.layout, self._sending.tensors(layer_index), self._batch_index)
        there = Side(remote.layout, theirs, batch_index)
        blocks = self._sending.blocks
        if blocks.dst is None:
            _check_kind(remote, is_blocks=False)
            return plan_entries(here, there, WHOLE_ENTRY)
        _check_kind(remote, is_blocks=True)
        if blocks.src is not None:
            return plan_blocks(here, there, blocks.src, blocks.dst, blocks.slices)
        if blocks.block_bytes not in (None, remote.layout.item_bytes):
            raise ParamInvalid(
                f"dst_block_memory_size={blocks.block_bytes}, but a block of the destination has "
                f"{remote.layout.item_bytes} bytes"
            )
        return plan_entry_to_blocks(here, there, blocks.dst, entry_is_local=True)


class AddressSender(_Sender):
    """To addresses in the peer's memory, which the peer has found to lie in caches of its."""

    def __init__(self, sending: Sending, config: TransferConfig) -> None:
        super().__init__(sending, config)
        self._addresses = config.dst_addrs
        self._places: list[RemotePlace] = []
        #: That told us of them.
        self._link: Link | None = None

    def open(self) -> None:
        """Ask the peer where the addresses lie."""
        with self._reach() as reached:
            self._places = reached.link.peer_caches.locate(self._addresses, reached.deadline)
            self._link = reached.link

    def send(self, layer_index: int) -> None:
        with self._reach() as reached, ExitStack() as held:
            places = self._held_places(reached.link, layer_index, held, reached.deadline)
            backend_of: dict[int, Backend] = {}
            for place in places:
                backend_of |= place.cache.backend_of
            moves = self._plan(layer_index, places)
            self._run(reached, moves, backend_of)

    def _held_places(self, link: Link, layer_index: int, held: ExitStack, deadline: Deadline) -> list[RemotePlace]:
        """Those of one layer. Asked for anew if the owner has had us forget a cache that it still has, and over another
        link: of what was freed since the old one ended, nobody has told us."""
        if link is self._link:
            with suppress(CacheNotExist):
                return self._hold_places(layer_index, held)
        before = [place.cache.cache_id for place in self._places]
        self._places, self._link = self._locate(link, deadline), link
        if [place.cache.cache_id for place in self._places] != before:
            raise CacheNotExist("dst_addrs are in another cache of the destination since layers were sent to it")
        return self._hold_places(layer_index, held)

    def _locate(self, link: Link, deadline: Deadline) -> list[RemotePlace]:
        try:
            return link.peer_caches.locate(self._addresses, deadline)
        except ParamInvalid as error:
            raise CacheNotExist(f"the destination has freed the cache at dst_addrs: {error}") from error

    def _hold_places(self, layer_index: int, held: ExitStack) -> list[RemotePlace]:
        nth = self._sending.tensors(layer_index - self.layers.start)
        places = self._places[nth.start : nth.stop]
        for place in places:
            held.enter_context(place.cache.hold())
        return places

    def _plan(self, layer_index: int, places: Sequence[RemotePlace]) -> Moves:
        layout, blocks = self._sending.source.layout, self._sending.blocks
        if blocks.src is not None and blocks.dst is not None:
            size = layout.item_bytes
            local = [layout.grids[tensor] for tensor in self._sending.tensors(layer_index)]
            return Moves(_pairs(local, [p.grid(size) for p in places]), blocks.src, blocks.dst, whole_item(size))
        size = layout.entry_bytes if blocks.block_bytes is None else blocks.block_bytes
        tensors = self._sending.tensors(layer_index)
        local = [layout.entry_as_blocks(tensor, self._batch_index, size) for tensor in tensors]
        remote_items = np.zeros(1, dtype=np.int64) if blocks.dst is None else blocks.dst
        check_num_blocks(len(remote_items), local[0], "dst_block_indices")
        local_items = np.arange(len(remote_items), dtype=np.int64)
        return Moves(_pairs(local, [p.grid(size) for p in places]), local_items, remote_items, whole_item(size))


def start_sending(
    sending: Sending, table: CacheTable, synchronizer: LayerSynchronizer, configs: Sequence[Config]
) -> CacheTask:
    """Check the destinations and start the task, which unpins the source when it ends. After an error nothing runs."""
    check_tensors_per_layer(sending.tensors_per_layer, sending.source.layout)
    for config in configs:
        check_config(config, sending)
    return start_task(
        [sending.sender(config) for config in configs],
        synchronizer,
        int(sending.timeout_s * 1000),
        "layers",
        lambda: table.unpin(sending.source),
    )


def _pairs(local: Sequence[Grid], remote: Sequence[Grid]) -> list[GridPair]:
    return [GridPair(mine, theirs) for mine, theirs in zip(local, remote, strict=True)]


def _check_kind(remote: RemoteCache, is_blocks: bool) -> None:
    if remote.layout.is_blocks != is_blocks:
        raise ParamInvalid(
            "the destination's cache is a blocks cache; give dst_block_indices"
            if remote.layout.is_blocks
            else "the destination's cache is contiguous; leave dst_block_indices out"
        )
