# SPDX-License-Identifier: Apache-2.0
"""From the checked arguments of a pull or push to its `Planner`, which says what moves once both caches are known.

Pull and push differ in the names of their arguments only: here there is `local` (ours) and `remote` (the peer's).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..checks import check_type
from ..errors import ParamInvalid
from ..memory.layout import CacheLayout
from ..transfer.plan import Items, Slice, check_indices, in_remote_order
from .args import Layers, check_batch_index, check_tensors_per_layer
from .mover import Met, Planner
from .plans import Moves, Side, plan_blocks, plan_entries, plan_entry_to_blocks


def entries_planner(
    key_name: str, index_name: str, batch_index: int, local: Layers, remote: Layers, size: int
) -> Planner:
    """A batch entry here and the one that the key names. `key_name`, `index_name`: the arguments, for errors."""

    def plan(met: Met) -> Moves:
        mine, theirs = met.local.layout, met.remote.layout
        check_tensors_per_layer(local.tensors_per_layer, mine)
        check_batch_index(index_name, batch_index, mine.batch_size)
        _check_kind(key_name, theirs, False, "pull_blocks or push_blocks")
        here = Side(mine, local.tensors(mine), batch_index)
        return plan_entries(here, Side(theirs, remote.tensors(theirs), met.remote_batch_index), size)

    return plan


def blocks_planner(
    key_name: str,
    local: Layers,
    remote: Layers,
    local_items: Items,
    remote_items: Items,
    slices: tuple[Slice, ...] | None,
) -> Planner:
    """Blocks here and there; with no `remote_items`, a contiguous entry there, cut into blocks."""
    here_name, there_name = ("dst", "src") if key_name.startswith("src") else ("src", "dst")

    def plan(met: Met) -> Moves:
        mine, theirs = met.local.layout, met.remote.layout
        check_tensors_per_layer(local.tensors_per_layer, mine)
        check_indices(local_items, mine.grids[0].num_items, f"{here_name}_blocks")
        here = Side(mine, local.tensors(mine))
        there = Side(theirs, remote.tensors(theirs), met.remote_batch_index)
        if len(remote_items):
            _check_kind(key_name, theirs, True, "pull_blocks with an empty src_blocks, or push_cache")
            check_indices(remote_items, theirs.grids[0].num_items, f"{there_name}_blocks")
            return plan_blocks(here, there, local_items, remote_items, slices)
        _check_kind(f"src_blocks is empty, but {key_name}", theirs, False, "pull_blocks with src_blocks")
        if slices is not None:
            raise ParamInvalid("slices must be None where src_blocks is empty: a batch entry is cut into whole blocks")
        return plan_entry_to_blocks(there, here, local_items, entry_is_local=False)

    return plan


def slices_arg(slices: Sequence[tuple[int, int, int]] | None) -> tuple[Slice, ...] | None:
    """(local_offset, remote_offset, num_bytes) each. They come back in the order in which they lie at the peer."""
    if slices is None:
        return None
    check_type("slices", slices, list, tuple)
    if not slices:
        raise ParamInvalid("slices is empty; leave it out to move whole blocks")
    return in_remote_order([_slice(f"slices[{i}]", one) for i, one in enumerate(slices)])


def _slice(name: str, one: tuple[int, int, int]) -> Slice:
    check_type(name, one, list, tuple)
    if len(one) != 3:
        raise ParamInvalid(f"{name}={one} must be (offset here, offset there, number of bytes)")
    for value in one:
        check_type(name, value, int)
    return Slice(*one)


def _check_kind(name: str, theirs: CacheLayout, is_blocks: bool, instead: str) -> None:
    if theirs.is_blocks != is_blocks:
        kind = "blocks" if theirs.is_blocks else "contiguous"
        raise ParamInvalid(f"{name} names a {kind} cache of the peer; for that use {instead}")
