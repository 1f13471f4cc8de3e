# SPDX-License-Identifier: Apache-2.0
"""A plan moves exactly the bytes that a naive copy, item by item, moves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datadist_core.errors import ParamInvalid
from datadist_core.memory.grid import Grid
from datadist_core.testing.pair import naive_copy
from datadist_core.transfer import plan
from datadist_core.transfer.plan import (
    Batch,
    CopyList,
    GridPair,
    Op,
    Slice,
    check_items,
    expand,
    expand_side,
    in_remote_order,
    merge_parts,
    merge_runs,
)
from datadist_core.types import Deadline

LOCAL_REGION, REMOTE_REGION = 1, 2


@dataclass(frozen=True, slots=True)
class Scene:
    """A batch and how large the two regions must be."""

    batch: Batch
    local_bytes: int
    remote_bytes: int


@st.composite
def scenes(draw: st.DrawFn, whole_only: bool = False) -> Scene:
    op = draw(st.sampled_from(Op))
    num_pairs = draw(st.integers(1, 3))
    num_local, num_remote = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    local_bytes_, remote_bytes_ = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if whole_only or draw(st.booleans()):
        remote_bytes_ = local_bytes_
        slices = (Slice(0, 0, local_bytes_),)
    else:
        slices = draw(_slices(op, local_bytes_, remote_bytes_))
    locals_, local_end = draw(_grids(LOCAL_REGION, num_pairs, num_local, local_bytes_))
    remotes, remote_end = draw(_grids(REMOTE_REGION, num_pairs, num_remote, remote_bytes_))
    local_items, remote_items = draw(_items(op, num_local, num_remote))
    pairs = tuple(GridPair(mine, theirs) for mine, theirs in zip(locals_, remotes, strict=True))
    batch = Batch(7, op, pairs, local_items, remote_items, slices, Deadline.never())
    batch.check()
    return Scene(batch, local_end, remote_end)


@st.composite
def _grids(draw: st.DrawFn, region_id: int, count: int, num_items: int, item_bytes: int) -> tuple[list[Grid], int]:
    """Grids of one shape one behind the other, with gaps within and between; and where the last one ends."""
    stride = item_bytes + draw(st.sampled_from([0, 0, 1, 5]))
    at, grids = 0, []
    for number in range(count):
        grid = Grid(region_id * 100 + number, region_id, at + draw(st.integers(0, 3)), stride, item_bytes, num_items)
        at = grid.end_bytes
        grids.append(grid)
    return grids, at


@st.composite
def _slices(draw: st.DrawFn, op: Op, local_bytes: int, remote_bytes: int) -> tuple[Slice, ...]:
    """Parts of an item that do not overlap at the destination."""
    parts, at = [], 0
    dst_bytes, src_bytes = (local_bytes, remote_bytes) if op is Op.READ else (remote_bytes, local_bytes)
    while at < dst_bytes and len(parts) < 3:
        size = draw(st.integers(1, min(dst_bytes - at, src_bytes)))
        source = draw(st.integers(0, src_bytes - size))
        parts.append(Slice(at, source, size) if op is Op.READ else Slice(source, at, size))
        at += size + draw(st.integers(0, 2))
    return tuple(draw(st.permutations(parts)))


@st.composite
def _items(draw: st.DrawFn, op: Op, num_local: int, num_remote: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of items, each at most once at the destination; runs are likely."""
    num_dst, num_src = (num_local, num_remote) if op is Op.READ else (num_remote, num_local)
    dst = draw(_runs(num_dst, unique=True))
    src = draw(_runs(num_src, unique=False))
    count = min(len(dst), len(src))
    chosen = np.array(dst[:count], dtype=np.int64), np.array(src[:count], dtype=np.int64)
    return chosen if op is Op.READ else chosen[::-1]


@st.composite
def _runs(draw: st.DrawFn, num_items: int, unique: bool) -> list[int]:
    items: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(0, num_items - 1))
        items += range(first, min(num_items, first + draw(st.integers(1, 6))))
    return list(dict.fromkeys(items)) if unique else items


def memories(scene: Scene) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """The two regions, every byte of both different from most others."""
    random = np.random.default_rng(5)
    local = random.integers(0, 256, scene.local_bytes, dtype=np.uint8)
    remote = random.integers(0, 256, scene.remote_bytes, dtype=np.uint8)
    return {LOCAL_REGION: local}, {REMOTE_REGION: remote}


def carry_out(ranges: CopyList, op: Op, local: np.ndarray, remote: np.ndarray) -> None:
    for here, there, size in zip(ranges.local, ranges.remote, ranges.num_bytes, strict=True):
        if op is Op.READ:
            local[here : here + size] = remote[there : there + size]
        else:
            remote[there : there + size] = local[here : here + size]


def moves_like_naive_copy(scene: Scene, planner=expand) -> bool:
    local, remote = memories(scene)
    expected_local, expected_remote = memories(scene)
    naive_copy(scene.batch, expected_local, expected_remote)
    ranges = planner(scene.batch, {LOCAL_REGION: 0}, {REMOTE_REGION: 0})
    carry_out(ranges, scene.batch.op, local[LOCAL_REGION], remote[REMOTE_REGION])
    same_local = np.array_equal(local[LOCAL_REGION], expected_local[LOCAL_REGION])
    return same_local and np.array_equal(remote[REMOTE_REGION], expected_remote[REMOTE_REGION])


def naive_stream(scene: Scene, side: str) -> list[int]:
    """Offsets of the bytes of one side in wire order: pairs, then items, then slices."""
    batch = scene.batch
    items = batch.local_items if side == "local" else batch.remote_items
    stream: list[int] = []
    for pair in batch.pairs:
        grid = pair.local if side == "local" else pair.remote
        for item in items.tolist():
            for part in batch.slices:
                offset = part.local_offset if side == "local" else part.remote_offset
                start = grid.offset_bytes + item * grid.stride_bytes + offset
                stream += range(start, start + part.num_bytes)
    return stream


def stream_of(offsets: np.ndarray, sizes: np.ndarray) -> list[int]:
    return [byte for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True) for byte in range(at, at + size)]


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(scenes())
def test_expand_moves_exactly_the_bytes(scene: Scene) -> None:
    assert moves_like_naive_copy(scene)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(scenes())
def test_both_sides_stream_in_the_same_order(scene: Scene) -> None:
    """The n-th byte of `expand` is, on either side, the n-th byte of a naive loop; so is that of `expand_side`."""
    batch = scene.batch
    ranges = expand(batch, {LOCAL_REGION: 0}, {REMOTE_REGION: 0})
    for side, offsets in (("local", ranges.local), ("remote", ranges.remote)):
        assert stream_of(offsets, ranges.num_bytes) == naive_stream(scene, side)
    for side, items in (("local", batch.local_items), ("remote", batch.remote_items)):
        parts = [
            (part.local_offset if side == "local" else part.remote_offset, part.num_bytes) for part in batch.slices
        ]
        grids = [pair.local if side == "local" else pair.remote for pair in batch.pairs]
        sides = [expand_side(items, grid, parts) for grid in grids]
        assert [byte for side_ranges in sides for byte in stream_of(*side_ranges)] == naive_stream(scene, side)


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(scenes(), st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_bases_are_added(scene: Scene, local_base: int, remote_base: int) -> None:
    plain = expand(scene.batch, {LOCAL_REGION: 0}, {REMOTE_REGION: 0})
    based = expand(scene.batch, {LOCAL_REGION: local_base}, {REMOTE_REGION: remote_base})
    assert np.array_equal(based.local, plain.local + local_base)
    assert np.array_equal(based.remote, plain.remote + remote_base)
    assert np.array_equal(based.num_bytes, plain.num_bytes)
    assert based.local.dtype == based.remote.dtype == based.num_bytes.dtype == np.int64
    assert based.total_bytes == scene.batch.num_bytes


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(scenes(whole_only=True))
def test_runs_are_merged_maximally(scene: Scene) -> None:
    """No two neighbouring ranges of one pair could have been one; without gaps, that is."""
    batch = scene.batch
    dense = all(
        pair.local.stride_bytes == pair.local.item_bytes and pair.remote.stride_bytes == pair.remote.item_bytes
        for pair in batch.pairs
    )
    for pair in batch.pairs:
        ranges = expand(replace(batch, pairs=(pair,)), {LOCAL_REGION: 0}, {REMOTE_REGION: 0})
        joined_here = ranges.local[:-1] + ranges.num_bytes[:-1] == ranges.local[1:]
        joined_there = ranges.remote[:-1] + ranges.num_bytes[:-1] == ranges.remote[1:]
        if dense:
            assert not (joined_here & joined_there).any()
        else:
            assert len(ranges.local) == len(batch.local_items)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_merge_runs_cuts_without_gaps_or_overlaps(pairs: list[tuple[int, int]]) -> None:
    local, remote = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    starts, lengths = merge_runs(local, remote)
    assert [i for s, n in zip(starts, lengths, strict=True) for i in range(s, s + n)] == list(range(len(pairs)))
    for start, length in zip(starts, lengths, strict=True):
        assert np.array_equal(local[start : start + length], np.arange(local[start], local[start] + length))
        assert np.array_equal(remote[start : start + length], np.arange(remote[start], remote[start] + length))


def test_one_run_of_many_blocks_is_one_range() -> None:
    items = np.arange(16384, dtype=np.int64)
    grid = Grid(1, LOCAL_REGION, 64, 4096, 4096, 16384)
    far = replace(grid, region_id=REMOTE_REGION)
    batch = Batch(7, Op.READ, (GridPair(grid, far),), items, items, (Slice(0, 0, 4096),), Deadline.never())
    ranges = expand(batch, {LOCAL_REGION: 0}, {REMOTE_REGION: 0})
    assert (ranges.local.tolist(), ranges.num_bytes.tolist()) == ([64], [16384 * 4096])


def _shifted(batch: Batch, local_base: dict[int, int], remote_base: dict[int, int]) -> CopyList:
    ranges = expand(batch, local_base, remote_base)
    return CopyList(ranges.local, np.roll(ranges.remote, 1), ranges.num_bytes)


def _shortened(batch: Batch, local_base: dict[int, int], remote_base: dict[int, int]) -> CopyList:
    ranges = expand(batch, local_base, remote_base)
    return CopyList(ranges.local[:-1], ranges.remote[:-1], ranges.num_bytes[:-1])


def _without_stride(batch: Batch, local_base: dict[int, int], remote_base: dict[int, int]) -> CopyList:
    pairs = tuple(GridPair(replace(p.local, stride_bytes=p.local.item_bytes), p.remote) for p in batch.pairs)
    return expand(replace(batch, pairs=pairs), local_base, remote_base)


def _merged_by_one_side(batch: Batch, local_base: dict[int, int], remote_base: dict[int, int]) -> CopyList:
    """Takes a run of destination items for a run of both."""
    assumed = batch.remote_items[:1] + np.arange(len(batch.local_items))
    return expand(replace(batch, remote_items=assumed), local_base, remote_base)


@pytest.mark.parametrize("planner", [_shifted, _shortened, _without_stride, _merged_by_one_side])
def test_broken_planner_is_caught(planner) -> None:
    """The negative control of the property test above."""
    mine, theirs = Grid(1, LOCAL_REGION, 2, 9, 8, 6), Grid(2, REMOTE_REGION, 3, 8, 8, 6)
    items = np.array([0, 1, 3], dtype=np.int64), np.array([2, 1, 3], dtype=np.int64)
    batch = Batch(7, Op.READ, (GridPair(mine, theirs),), *items, (Slice(0, 0, 8),), Deadline.never())
    scene = Scene(batch, mine.end_bytes + 32, theirs.end_bytes + 32)
    assert moves_like_naive_copy(scene)
    assert not moves_like_naive_copy(scene, planner)


GRID = Grid(1, LOCAL_REGION, 0, 16, 16, 10)
FAR_GRID = Grid(2, REMOTE_REGION, 0, 16, 16, 10)


def checked(local: list[int], remote: list[int], part: Slice = Slice(0, 0, 16)) -> None:  # noqa: B008 - immutable
    items = np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64)
    Batch(7, Op.READ, (GridPair(GRID, FAR_GRID),), *items, (part,), Deadline.never()).check()


def test_check_accepts_the_limits() -> None:
    checked([0, 9], [9, 0])
    checked([], [])
    checked([9], [0], Slice(15, 0, 1))


@pytest.mark.parametrize(
    ("local", "remote", "named"),
    [
        ([0, 10], [0, 1], "10"),
        ([0, 1], [0, 10], "10"),
        ([-1], [0], "-1"),
        ([0], [-3], "-3"),
        ([0, 1], [0], "2 local items but 1 remote"),
    ],
)
def test_check_refuses_items(local: list[int], remote: list[int], named: str) -> None:
    with pytest.raises(ParamInvalid, match=named):
        checked(local, remote)


@pytest.mark.parametrize(
    "part", [Slice(0, 0, 17), Slice(1, 0, 16), Slice(0, 1, 16), Slice(-1, 0, 4), Slice(0, -1, 4), Slice(0, 0, 0)]
)
def test_check_refuses_slices(part: Slice) -> None:
    with pytest.raises(ParamInvalid, match="does not lie in an item of 16 bytes"):
        checked([0], [0], part)


@given(st.lists(st.integers(-3, 12), max_size=8))
def test_check_items_agrees_with_a_loop(items: list[int]) -> None:
    array = np.array(items, dtype=np.int64)
    if all(0 <= item < GRID.num_items for item in items):
        check_items(array, GRID, [(0, 16)])
    else:
        with pytest.raises(ParamInvalid, match=r"the cache has 10 blocks \(0\.\.9\)"):
            check_items(array, GRID, [(0, 16)])


@pytest.mark.parametrize("sizes", [[], [1], [10] * 7, [100, 1, 1, 100, 30, 30, 30], [1, 500, 1], [0, 0, 99, 0, 2]])
def test_pieces_are_the_whole(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_PIECE_BYTES", 100)
    values = np.array(sizes, dtype=np.int64)
    places = np.arange(len(sizes), dtype=np.int64)
    pieces = list(CopyList(places, places + 1000, values).pieces())
    assert all(piece.total_bytes < 100 + max(sizes) or len(piece.num_bytes) == 1 for piece in pieces if sizes)
    for name, whole in (("local", places), ("remote", places + 1000), ("num_bytes", values)):
        np.testing.assert_array_equal(np.concatenate([getattr(piece, name) for piece in pieces]), whole)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12))
def test_merged_parts_name_the_same_bytes_in_the_same_order(parts: list[tuple[int, int]]) -> None:
    def places(of: list[tuple[int, int]]) -> list[int]:
        return [offset + i for offset, size in of for i in range(size)]

    merged = merge_parts(parts)
    assert places(merged) == places(parts)
    assert all(first[0] + first[1] != second[0] for first, second in itertools.pairwise(merged))


def test_a_permuting_plan_is_few_ranges_at_the_peer() -> None:
    """What an end serves is whole items in runs, whichever way the asking end has them."""
    parts = [Slice((token * 4 + head) * 16, (head * 8 + token) * 16, 16) for token in range(8) for head in range(4)]
    ordered = in_remote_order(parts)
    assert sorted(ordered, key=repr) == sorted(parts, key=repr)
    there = [(part.remote_offset, part.num_bytes) for part in ordered]
    assert merge_parts(there) == [(0, 512)]
    offsets, sizes = expand_side(np.arange(3, 11), Grid(1, 1, 64, 512, 512, 20), there)
    assert (offsets.tolist(), sizes.tolist()) == ([64 + 3 * 512], [8 * 512])
