# SPDX-License-Identifier: Apache-2.0
"""Pure planning: a batch says which items go where; `expand` turns it into byte ranges, runs merged.

Nothing here touches memory or a socket, and nothing loops over blocks in Python: a batch of 16,384 blocks is a
handful of NumPy operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..errors import ParamInvalid
from ..memory.grid import Grid
from ..types import Deadline

Items = npt.NDArray[np.int64]

_PIECE_BYTES = 64 << 20  # some ten milliseconds: how soon a copy can be ended early


class Op(IntEnum):
    """READ pulls from the peer into local memory; WRITE pushes local memory to the peer."""

    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of every item that moves: `num_bytes` from `local_offset` / `remote_offset` within the item."""

    local_offset: int
    remote_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GridPair:
    """A grid of this process and the grid of the peer that its items are exchanged with."""

    local: Grid
    remote: Grid


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One transfer with one peer: for every pair, every i and every slice, item `remote_items[i]` of the
    remote grid and item `local_items[i]` of the local one.

    Order on the wire (for backends that stream bytes): pairs, then items, then slices.

    Attributes:
        peer_id: the link's local id, as given to `Backend.connect`.
        local_items, remote_items: int64 arrays of equal length.
        slices: never empty; `whole_item` gives the usual single one.
    """

    peer_id: int
    op: Op
    pairs: tuple[GridPair, ...]
    local_items: Items
    remote_items: Items
    slices: tuple[Slice, ...]
    deadline: Deadline

    @property
    def num_bytes(self) -> int:
        return len(self.pairs) * len(self.local_items) * sum(s.num_bytes for s in self.slices)

    def check(self) -> None:
        """Raise ParamInvalid unless every byte of the batch lies inside its grids."""
        if len(self.local_items) != len(self.remote_items):
            raise ParamInvalid(
                f"{len(self.local_items)} local items but {len(self.remote_items)} remote items; they must pair up"
            )
        # Layers usually differ in their offset only, so that few shapes have to be checked.
        for num_items, item_bytes in {(p.local.num_items, p.local.item_bytes) for p in self.pairs}:
            check_slices(item_bytes, [(s.local_offset, s.num_bytes) for s in self.slices])
            check_indices(self.local_items, num_items)
        for num_items, item_bytes in {(p.remote.num_items, p.remote.item_bytes) for p in self.pairs}:
            check_slices(item_bytes, [(s.remote_offset, s.num_bytes) for s in self.slices])
            check_indices(self.remote_items, num_items)


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """Byte ranges to move: three int64 arrays of equal length. Offsets or addresses, as the caller based them."""

    local: Items
    remote: Items
    num_bytes: Items

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def pieces(self) -> Iterator[CopyList]:
        """The same, cut between two ranges into parts of about `_PIECE_BYTES`. There is at least one part."""
        ends = np.cumsum(self.num_bytes)
        if not len(ends) or ends[-1] <= _PIECE_BYTES:
            yield self
            return
        cuts = np.flatnonzero(np.diff(ends // _PIECE_BYTES)) + 1
        for start, end in zip([0, *cuts], [*cuts, len(ends)], strict=True):
            yield CopyList(self.local[start:end], self.remote[start:end], self.num_bytes[start:end])


def in_remote_order(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """The same parts of an item, so that neighbours at the peer follow each other: there they are few ranges then."""
    return tuple(sorted(slices, key=lambda part: part.remote_offset))


def merge_parts(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in the same order: (offset, num_bytes) of an item, each followed by its neighbour made one."""
    merged: list[tuple[int, int]] = []
    for offset, num_bytes in parts:
        if merged and merged[-1][0] + merged[-1][1] == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + num_bytes)
        else:
            merged.append((offset, num_bytes))
    return merged


def whole_item(item_bytes: int) -> tuple[Slice, ...]:
    return (Slice(0, 0, item_bytes),)


def check_items(items: Items, grid: Grid, slices: Sequence[tuple[int, int]]) -> None:
    """Raise ParamInvalid unless all `items` exist in `grid` and all (offset, num_bytes) lie in an item."""
    check_indices(items, grid.num_items)
    check_slices(grid.item_bytes, slices)


def check_indices(items: Items, num_items: int, name: str = "") -> None:
    """Raise ParamInvalid, naming the first bad one (and the argument `name`), unless all are in 0..num_items-1."""
    # As unsigned numbers negative ones are larger than any: one look finds both kinds.
    if len(items) and np.maximum.reduce(items.view(np.uint64)) >= num_items:
        bad = int(items[(items < 0) | (items >= num_items)][0])
        where = f"{name}: " if name else ""
        raise ParamInvalid(
            f"{where}block index {bad} is out of range: the cache has {num_items} blocks (0..{num_items - 1})"
        )


def check_slices(item_bytes: int, slices: Sequence[tuple[int, int]]) -> None:
    """Raise ParamInvalid unless all (offset, num_bytes) lie in an item of `item_bytes`."""
    for offset, num_bytes in slices:
        if offset < 0 or num_bytes < 1 or offset + num_bytes > item_bytes:
            raise ParamInvalid(
                f"slices: slice of {num_bytes} bytes at {offset} does not lie in an item of {item_bytes} bytes"
            )


_FIRST, _ONE = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)


def merge_runs(local_items: Items, remote_items: Items) -> tuple[Items, Items]:
    """Where runs start and how long they are, a run being consecutive on both sides at once."""
    if len(local_items) == 1:
        return _FIRST, _ONE
    # Prepending something that is no predecessor makes the first item, if there is one, the start of a run.
    breaks = (np.diff(local_items, prepend=local_items[:1] - 2) != 1) | (
        np.diff(remote_items, prepend=remote_items[:1] - 2) != 1
    )
    starts = np.flatnonzero(breaks).astype(np.int64)
    lengths = np.diff(np.concatenate((starts, [len(local_items)])))
    return starts, lengths.astype(np.int64)


def expand(batch: Batch, local_base: dict[int, int], remote_base: dict[int, int]) -> CopyList:
    """All byte ranges of `batch`, in its wire order, runs of neighbouring whole items merged into one range.

    Args:
        batch: a checked batch.
        local_base: region id -> what to add to that region's offsets (an address, usually) on this side.
        remote_base: the same for the peer's regions.
    """
    local = [local_base[pair.local.region_id] + pair.local.offset_bytes for pair in batch.pairs]
    remote = [remote_base[pair.remote.region_id] + pair.remote.offset_bytes for pair in batch.pairs]
    if len(batch.pairs) == 1:
        return _expand_pair(batch, batch.pairs[0], local[0], remote[0])
    # The pairs of a batch nearly always have one shape (the layers of a model): then this is two outer sums.
    shapes = [_pair_shape(pair) for pair in batch.pairs]
    of_shape = {shape: _expand_pair(batch, pair) for shape, pair in dict(zip(shapes, batch.pairs, strict=True)).items()}
    parts = [of_shape[shape] for shape in shapes]
    if len(of_shape) == 1:
        return _outer(parts[0], local, remote)
    return CopyList(
        _concat([part.local + base for part, base in zip(parts, local, strict=True)]),
        _concat([part.remote + base for part, base in zip(parts, remote, strict=True)]),
        _concat([part.num_bytes for part in parts]),
    )


def expand_side(items: Items, grid: Grid, slices: Sequence[tuple[int, int]]) -> tuple[Items, Items]:
    """One side only: (offsets in the region, sizes) in wire order, neighbours merged.

    For whoever serves a streamed request: the bytes are the same whichever way each side merged them.
    """
    slices = merge_parts(slices)
    if is_whole(grid, slices):
        starts, lengths = merge_runs(items, items)
        return grid.offset_bytes + items[starts] * grid.stride_bytes, lengths * grid.item_bytes
    offsets = np.array([offset for offset, _ in slices], dtype=np.int64)
    sizes = np.array([size for _, size in slices], dtype=np.int64)
    ranges = grid.offset_bytes + items[:, None] * grid.stride_bytes + offsets[None, :]
    return ranges.ravel(), np.tile(sizes, len(items))


def _pair_shape(pair: GridPair) -> tuple[int, int, int, int]:
    """What the ranges of a pair depend on, but for where its two grids start."""
    return pair.local.stride_bytes, pair.local.item_bytes, pair.remote.stride_bytes, pair.remote.item_bytes


def _outer(part: CopyList, local: Sequence[int], remote: Sequence[int]) -> CopyList:
    """The same ranges from each of the starts, one start after the other."""
    return CopyList(
        np.add.outer(np.array(local, dtype=np.int64), part.local).ravel(),
        np.add.outer(np.array(remote, dtype=np.int64), part.remote).ravel(),
        np.add.outer(np.zeros(len(local), dtype=np.int64), part.num_bytes).ravel(),  # cheaper than np.tile
    )


def _expand_pair(batch: Batch, pair: GridPair, local_start: int = 0, remote_start: int = 0) -> CopyList:
    """Ranges of one pair, whose two grids' first items are there."""
    local_items, remote_items, slices = batch.local_items, batch.remote_items, batch.slices
    local_whole = is_whole(pair.local, [(s.local_offset, s.num_bytes) for s in slices])
    remote_whole = is_whole(pair.remote, [(s.remote_offset, s.num_bytes) for s in slices])
    if local_whole and remote_whole:
        starts, lengths = merge_runs(local_items, remote_items)
        return CopyList(
            local_items[starts] * pair.local.stride_bytes + local_start,
            remote_items[starts] * pair.remote.stride_bytes + remote_start,
            lengths * pair.local.item_bytes,
        )
    local_offsets = np.array([s.local_offset for s in slices], dtype=np.int64) + local_start
    remote_offsets = np.array([s.remote_offset for s in slices], dtype=np.int64) + remote_start
    sizes = np.array([s.num_bytes for s in slices], dtype=np.int64)
    return CopyList(
        (local_items[:, None] * pair.local.stride_bytes + local_offsets[None, :]).ravel(),
        (remote_items[:, None] * pair.remote.stride_bytes + remote_offsets[None, :]).ravel(),
        np.tile(sizes, len(local_items)),
    )


def is_whole(grid: Grid, slices: Sequence[tuple[int, int]]) -> bool:
    """Whether neighbouring items are neighbouring bytes: one slice, all of the item, no gap behind it."""
    return list(slices) == [(0, grid.item_bytes)] and grid.stride_bytes == grid.item_bytes


def _concat(arrays: Sequence[Items]) -> Items:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
