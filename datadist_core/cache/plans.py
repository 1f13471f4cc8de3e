# SPDX-License-Identifier: Apache-2.0
"""Pure: which items of which grids move, for every kind of transfer between a cache here and one at a peer.

`Side` is one end's cache as a transfer sees it: which of its tensors and, of a contiguous cache, which batch entry.
Errors say `here` and `there`; the caller's argument names are in the texts where one argument is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ParamInvalid
from ..memory.grid import Grid
from ..memory.layout import CacheLayout
from ..transfer.plan import GridPair, Items, Slice, whole_item
from .args import WHOLE_ENTRY


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a transfer."""

    layout: CacheLayout
    tensors: range
    batch_index: int = 0

    def grids(self) -> list[Grid]:
        return [self.layout.grids[tensor] for tensor in self.tensors]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """For every pair of grids, every i and every slice: item `remote_items[i]` and item `local_items[i]`."""

    pairs: list[GridPair]
    local_items: Items
    remote_items: Items
    slices: tuple[Slice, ...]


def plan_blocks(here: Side, there: Side, local: Items, remote: Items, slices: tuple[Slice, ...] | None) -> Moves:
    """Block `remote[i]` and block `local[i]` of all tensors; parts of blocks if `slices` says so."""
    _check_tensors(here, there)
    if slices is None:
        _check_alike(here, there)
        if here.layout.item_bytes != there.layout.item_bytes:
            raise ParamInvalid(
                f"a block has {here.layout.item_bytes} bytes here but {there.layout.item_bytes} at the peer; the two "
                "descriptors (shape, data_type) must match"
            )
    return Moves(_pairs(here.grids(), there.grids()), local, remote, slices or whole_item(here.layout.item_bytes))


def plan_entries(here: Side, there: Side, size: int) -> Moves:
    """One batch entry each: `size` bytes of every tensor from its start, or all of it."""
    _check_tensors(here, there)
    _check_alike(here, there)
    mine, theirs = here.layout, there.layout
    if size == WHOLE_ENTRY and mine.entry_bytes != theirs.entry_bytes:
        raise ParamInvalid(
            f"a batch entry has {mine.entry_bytes} bytes here but {theirs.entry_bytes} at the peer; give size, or make "
            "the two descriptors (shape, data_type) match"
        )
    if size > min(mine.entry_bytes, theirs.entry_bytes):
        raise ParamInvalid(
            f"size={size} is more than a batch entry has: {mine.entry_bytes} bytes here, {theirs.entry_bytes} there"
        )
    part = _part_of_item(mine, theirs, size)
    items = mine.division.entry_items(here.batch_index), theirs.division.entry_items(there.batch_index)
    return Moves(_pairs(here.grids(), there.grids()), *items, (part,))


def plan_entry_to_blocks(entry: Side, blocks: Side, block_items: Items, entry_is_local: bool) -> Moves:
    """A batch entry, cut into consecutive blocks: the i-th and block `block_items[i]`, of every tensor."""
    _check_tensors(entry, blocks)
    _check_alike(entry, blocks)
    block_bytes = blocks.layout.item_bytes
    cut = [entry.layout.entry_as_blocks(tensor, entry.batch_index, block_bytes) for tensor in entry.tensors]
    check_num_blocks(len(block_items), cut[0])
    consecutive = np.arange(len(block_items), dtype=np.int64)
    if entry_is_local:
        return Moves(_pairs(cut, blocks.grids()), consecutive, block_items, whole_item(block_bytes))
    return Moves(_pairs(blocks.grids(), cut), block_items, consecutive, whole_item(block_bytes))


def check_num_blocks(num_blocks: int, cut: Grid, name: str = "dst_blocks") -> None:
    if num_blocks > cut.num_items:
        raise ParamInvalid(
            f"{name} has {num_blocks} indices, but a batch entry of the source holds {cut.num_items} blocks of "
            f"{cut.item_bytes} bytes"
        )


def _part_of_item(mine: CacheLayout, theirs: CacheLayout, size: int) -> Slice:
    if mine.division.num_outer != theirs.division.num_outer:
        raise ParamInvalid("batch_dim_index of the two caches must match: their batch entries lie in different ways")
    if size == WHOLE_ENTRY or size == mine.entry_bytes == theirs.entry_bytes:
        return Slice(0, 0, mine.item_bytes)
    if mine.division.num_outer != 1:
        raise ParamInvalid(
            f"size={size} must be -1: with dimensions before batch_dim_index a batch entry is not contiguous"
        )
    return Slice(0, 0, size)


def _pairs(local: Sequence[Grid], remote: Sequence[Grid]) -> list[GridPair]:
    return [GridPair(mine, theirs) for mine, theirs in zip(local, remote, strict=True)]


def _check_tensors(here: Side, there: Side) -> None:
    if len(here.tensors) != len(there.tensors):
        raise ParamInvalid(
            f"{len(here.tensors)} tensors here but {len(there.tensors)} at the peer; num_tensors or the layer ranges "
            "(src_layer_range, dst_layer_range) of the two ends must match"
        )


def _check_alike(here: Side, there: Side) -> None:
    if here.layout.data_type != there.layout.data_type:
        raise ParamInvalid(
            f"data_type is {here.layout.data_type} here but {there.layout.data_type} at the peer; they must match"
        )
