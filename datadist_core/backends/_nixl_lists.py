# SPDX-License-Identifier: Apache-2.0
"""A batch as NIXL wants it: indices into prepared lists, or byte ranges where those are few.

Every (grid pair, slice) of a batch is one row of blocks at equal distance, on both sides. NIXL prepares such rows once,
without a word about the blocks in them, so that a model of 61 layers costs 61 rows, and a later batch over the same
grids only its indices. Where most blocks are neighbours on both sides, a few long ranges are better than
many indices, and there is nothing to keep.

Nothing here loops over blocks in Python. The prepared lists of an agent are bounded; those that are used stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..transfer.plan import Batch, CopyList, GridPair, Items, Slice, expand, merge_runs
from ._nixl_agent import Agent, IndexedPiece, Indices, Piece, Prepared, RangePiece, Rows

#: Between two pieces, a batch can be ended early, and others get their turn: some milliseconds.
PIECE_BYTES = 16 << 20
MAX_PREPARED = 128
_MAX_INDEX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The rows of one kind of batch, prepared, with the index of each row's first block."""

    pairs: tuple[GridPair, ...]
    slices: tuple[Slice, ...]
    local: Prepared
    local_starts: Items
    remote: Prepared
    remote_starts: Items


class PreparedLists:
    """What one agent has prepared, by content. The caller sees to it that one thread at a time is in here."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lists: OrderedDict[tuple[str, bytes], Prepared] = OrderedDict()
        self._layouts: OrderedDict[tuple[str, int], Layout] = OrderedDict()

    def layout(
        self, batch: Batch, peer_name: str, local_base: Mapping[int, int], remote_base: Mapping[int, int]
    ) -> Layout:
        """Found at once for a batch with the very pairs of an earlier one, as those of one cache usually are."""
        key = (peer_name, id(batch.pairs))
        layout = self._layouts.get(key)
        if layout is None or layout.pairs is not batch.pairs or layout.slices != batch.slices:
            layout = self._layouts[key] = self._lay_out(batch, peer_name, local_base, remote_base)
            _bound(self._layouts)
        return layout

    def forget(self, peer_name: str) -> None:
        """Drop what was prepared of one agent's memory; "" for local memory. Requests in progress keep theirs."""
        self._layouts.clear()
        for key in [key for key in self._lists if key[0] == peer_name]:
            del self._lists[key]

    def __len__(self) -> int:
        return len(self._lists)

    def _lay_out(
        self, batch: Batch, peer_name: str, local_base: Mapping[int, int], remote_base: Mapping[int, int]
    ) -> Layout:
        local_rows, remote_rows = [], []
        for pair in batch.pairs:
            here, there = pair.local, pair.remote
            at = local_base[here.region_id] + here.offset_bytes
            of = remote_base[there.region_id] + there.offset_bytes
            for part in batch.slices:
                local_rows.append((at + part.local_offset, part.num_bytes, 0, here.stride_bytes, here.num_items))
                remote_rows.append((of + part.remote_offset, part.num_bytes, 0, there.stride_bytes, there.num_items))
        local, local_starts = self._get("", local_rows)
        remote, remote_starts = self._get(peer_name, remote_rows)
        return Layout(batch.pairs, batch.slices, local, local_starts, remote, remote_starts)

    def _get(self, peer_name: str, rows: Sequence[tuple[int, ...]]) -> tuple[Prepared, Items]:
        """The rows prepared, and the index of each row's first block."""
        array = np.array(rows, dtype=np.uint64)
        counts = array[:, 4].astype(np.int64)
        key = (peer_name, array.tobytes())
        prepared = self._lists.get(key)
        if prepared is None:
            prepared = self._lists[key] = self._agent.prepare(peer_name, array)
            _bound(self._lists)
        else:
            self._lists.move_to_end(key)
        return prepared, np.cumsum(counts) - counts


def _bound(kept: OrderedDict[Any, Any]) -> None:
    if len(kept) > MAX_PREPARED:
        kept.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is the same in all batches over the same pairs and slices. Without a layout, good for ranges only.

    Attributes:
        local_base, remote_base: region id -> address.
    """

    pairs: tuple[GridPair, ...]
    slices: tuple[Slice, ...]
    peer_name: str
    local_base: Mapping[int, int]
    remote_base: Mapping[int, int]
    layout: Layout | None

    def pieces(self, batch: Batch) -> Sequence[Piece]:
        """Pieces of about `PIECE_BYTES` that together are the whole of a checked batch over these pairs and slices."""
        if not len(batch.local_items) or not batch.pairs:
            return ()
        if self.layout is not None and not _mostly_runs(batch):
            return _indexed_pieces(batch, self.layout)
        return tuple(range_pieces(expand(batch, dict(self.local_base), dict(self.remote_base)), self.peer_name))


def make_plan(
    batch: Batch,
    lists: PreparedLists,
    peer_name: str,
    local_base: Mapping[int, int],
    remote_base: Mapping[int, int],
) -> Plan:
    """The plan of a checked batch. Lists are prepared if the batch itself needs them."""
    wants_indices = len(batch.local_items) and batch.pairs and _fits_indices(batch) and not _mostly_runs(batch)
    layout = lists.layout(batch, peer_name, local_base, remote_base) if wants_indices else None
    return Plan(batch.pairs, batch.slices, peer_name, local_base, remote_base, layout)


def range_pieces(ranges: CopyList, peer_name: str) -> Iterator[RangePiece]:
    """`ranges` (absolute addresses) in pieces. A range that is larger than a piece is cut."""
    ranges = _cut_long(ranges)
    local, remote = _rows_of(ranges.local, ranges.num_bytes), _rows_of(ranges.remote, ranges.num_bytes)
    for start, end in _cuts(ranges.num_bytes):
        yield RangePiece(peer_name, local[start:end], remote[start:end])


def _fits_indices(batch: Batch) -> bool:
    """Blocks of prepared lists cannot be cut, and their indices are 32 bit wide."""
    num_rows = len(batch.pairs) * len(batch.slices)
    most_items = max(max(pair.local.num_items, pair.remote.num_items) for pair in batch.pairs)
    return num_rows * most_items <= _MAX_INDEX and max(part.num_bytes for part in batch.slices) <= PIECE_BYTES


def _mostly_runs(batch: Batch) -> bool:
    """Whether merging neighbouring blocks at least halves their number."""
    num_items, first = len(batch.local_items), batch.pairs[0]
    if num_items < 2 or len(batch.slices) > 1:
        return False
    item_bytes = batch.slices[0].num_bytes
    if any(grid.stride_bytes != item_bytes for grid in (first.local, first.remote)):
        return False
    return 2 * len(merge_runs(batch.local_items, batch.remote_items)[0]) <= num_items


def _indexed_pieces(batch: Batch, layout: Layout) -> Sequence[IndexedPiece]:
    local = _indices(layout.local_starts, batch.local_items)
    remote = _indices(layout.remote_starts, batch.remote_items)
    if batch.num_bytes <= PIECE_BYTES:
        return (IndexedPiece(layout.local, local, layout.remote, remote),)
    sizes = np.array([part.num_bytes for part in batch.slices], dtype=np.int64)
    sizes = np.repeat(np.tile(sizes, len(batch.pairs)), len(batch.local_items))
    return tuple(
        IndexedPiece(layout.local, local[start:end], layout.remote, remote[start:end]) for start, end in _cuts(sizes)
    )


def _indices(starts: Items, items: Items) -> Indices:
    """Index of every item in every row, one row after the other."""
    if len(starts) == 1:
        return items.astype(np.int32)
    return np.add.outer(starts, items).ravel().astype(np.int32)


def _rows_of(addresses: Items, num_bytes: Items) -> Rows:
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = num_bytes
    return rows


def _cut_long(ranges: CopyList) -> CopyList:
    """The same bytes in ranges of at most `PIECE_BYTES`."""
    if not len(ranges.num_bytes) or int(ranges.num_bytes.max()) <= PIECE_BYTES:
        return ranges
    parts = -(-ranges.num_bytes // PIECE_BYTES)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    offsets = (np.arange(len(first), dtype=np.int64) - first) * PIECE_BYTES
    left = np.repeat(ranges.num_bytes, parts) - offsets
    return CopyList(
        np.repeat(ranges.local, parts) + offsets,
        np.repeat(ranges.remote, parts) + offsets,
        np.minimum(left, PIECE_BYTES),
    )


def _cuts(num_bytes: Items) -> Iterator[tuple[int, int]]:
    """Where to cut, between two ranges, so that the parts have at most about `PIECE_BYTES`."""
    ends = np.cumsum(num_bytes)
    if not len(ends):
        return
    if ends[-1] <= PIECE_BYTES:
        yield 0, len(ends)
        return
    cuts = (np.flatnonzero(np.diff(ends // PIECE_BYTES)) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(ends)], strict=True)
