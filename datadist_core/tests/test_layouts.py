# SPDX-License-Identifier: Apache-2.0
"""Every way to move a part of a cache, held against plain NumPy: shapes, types, ranges, sizes and indices at random.

A test works out with NumPy what all tensors of both caches must hold afterwards, and compares every byte: what should
have moved, and what should not have been touched. Elements are unique as far as their type can tell them apart.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    Placement,
)
from datadist_core.cache.local_copy import _copy
from datadist_core.errors import ParamInvalid
from datadist_core.memory.grid import Grid
from datadist_core.tests.core_ends import linked, manager
from datadist_core.transfer.plan import CopyList

TYPES = (
    DataType.DT_FLOAT,
    DataType.DT_BF16,
    DataType.DT_INT8,
    DataType.DT_BOOL,
    DataType.DT_FLOAT8_E4M3,
    DataType.DT_INT64,
    DataType.DT_UINT16,
)
quickly = settings(
    max_examples=settings.default.max_examples * 3 // 5,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
dims = st.integers(1, 5)


@pytest.fixture(scope="module", params=["loopback", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    with linked(request.param) as both:
        yield both


@contextmanager
def caches(*wanted: tuple[LLMDataDist, CacheDesc, bool]) -> Iterator[list[Cache]]:
    """Full of distinct elements; (end, descriptor, whether it is a blocks cache) each."""
    made: list[tuple[LLMDataDist, Cache]] = []
    try:
        for end, desc, is_blocks in wanted:
            m = manager(end)
            key = BlocksCacheKey(end.cluster_id)
            cache = m.allocate_blocks_cache(desc, key) if is_blocks else m.allocate_cache(desc)
            made.append((end, cache))
            fill(cache, len(made))
        yield [cache for _, cache in made]
    finally:
        for end, cache in made:
            manager(end).deallocate_cache(cache)


def fill(cache: Cache, number: int) -> None:
    """Unique in one cache and, for elements of more than one byte, in two."""
    desc = cache.cache_desc
    item_bytes, count = desc.data_type.item_bytes, math.prod(desc.shape)
    for i, tensor in enumerate(raw(cache)):
        start = (number * 64 + i) * count
        if item_bytes == 1:
            elements = np.random.default_rng(start).integers(0, 256, count, dtype=np.uint8)
        else:
            elements = np.arange(start, start + count).astype(f"<u{item_bytes}").view(np.uint8)
        tensor[:] = elements.reshape(tensor.shape)


def raw(cache: Cache) -> list[np.ndarray]:
    """The memory of each tensor as bytes, in the tensor's shape: the last dimension goes over an element's bytes."""
    desc = cache.cache_desc
    shape = (*desc.shape, desc.data_type.item_bytes)
    return [
        np.frombuffer((ctypes.c_uint8 * desc.size).from_address(address), dtype=np.uint8).reshape(shape)
        for address in cache.tensor_addrs
    ]


def contents(cache: Cache) -> list[np.ndarray]:
    return [tensor.copy() for tensor in raw(cache)]


def same(cache: Cache, expected: list[np.ndarray]) -> None:
    for i, (tensor, right) in enumerate(zip(raw(cache), expected, strict=True)):
        assert np.array_equal(tensor, right), f"tensor {i} is wrong at {np.argwhere(tensor != right)[:3].tolist()}"


def entry(tensor: np.ndarray, axis: int, index: int) -> np.ndarray:
    """A view of `tensor[index]` along `axis`."""
    return np.moveaxis(tensor, axis, 0)[index]


def shape_with(rest: list[int], axis: int, batch_size: int) -> tuple[int, ...]:
    return (*rest[:axis], batch_size, *rest[axis:])


@st.composite
def layer_choices(draw: Any) -> dict[str, Any]:
    """Tensors per layer, the numbers of tensors at both ends, and equally long ranges of layers (or None for all)."""
    per_layer = draw(st.integers(1, 3))
    count = draw(st.integers(1, 3))
    chosen: dict[str, Any] = {"per_layer": per_layer}
    for side in ("src", "dst"):
        start = draw(st.integers(0, 2))
        num_layers = start + count + draw(st.integers(0, 2))
        all_of_it = draw(st.booleans())
        if all_of_it:
            start, num_layers = 0, count
        chosen[side] = None if all_of_it else range(start, start + count)
        chosen[f"{side}_tensors"] = range(start * per_layer, (start + count) * per_layer)
        chosen[f"{side}_num"] = num_layers * per_layer
    return chosen


def range_arguments(layers: dict[str, Any]) -> dict[str, Any]:
    return {
        "src_layer_range": layers["src"],
        "dst_layer_range": layers["dst"],
        "tensor_num_per_layer": layers["per_layer"],
    }


def pairs(layers: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(layers["src_tensors"], layers["dst_tensors"], strict=True))


def desc_of(num: int, shape: tuple[int, ...], kind: DataType, axis: int = 0, placement: Placement = Placement.HOST):
    return CacheDesc(num, shape, kind, placement, batch_dim_index=axis)


@given(st.booleans(), layer_choices(), st.sampled_from(TYPES), st.lists(dims, min_size=2, max_size=3), st.data())
@quickly
def test_pull_and_push_of_batch_entries(ends, push, layers, kind, rest, data) -> None:
    p, d = ends
    axis = data.draw(st.integers(0, 2), "batch_dim_index")
    batch_sizes = data.draw(st.tuples(dims, dims), "batch sizes")
    of, to = (data.draw(st.integers(0, size - 1)) for size in batch_sizes)
    src, dst = (
        (end, desc_of(layers[f"{side}_num"], shape_with(rest, axis, size), kind, axis), False)
        for end, side, size in zip((p, d), ("src", "dst"), batch_sizes, strict=True)
    )
    with caches(src, dst) as (source, target):
        unchanged, expected = contents(source), contents(target)
        for s, t in pairs(layers):
            entry(expected[t], axis, to)[:] = entry(unchanged[s], axis, of)
        if push:
            key = CacheKeyByIdAndIndex(d.cluster_id, target.cache_id, to)
            manager(p).push_cache(key, source, of, **range_arguments(layers))
        else:
            key = CacheKeyByIdAndIndex(p.cluster_id, source.cache_id, of)
            manager(d).pull_cache(key, target, to, **range_arguments(layers))
        same(target, expected)
        same(source, unchanged)


@given(st.booleans(), layer_choices(), st.sampled_from(TYPES), st.tuples(dims, dims, dims, dims), st.data())
@quickly
def test_the_first_bytes_of_batch_entries(ends, push, layers, kind, shape, data) -> None:
    """With `size`, the entries of the two ends may differ in shape; dimensions of 1 in front do no harm."""
    p, d = ends
    axes = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)), "batch_dim_index")
    of, to = (data.draw(st.integers(0, size - 1)) for size in shape[:2])
    shapes = [(1,) * axis + (batch, width, 3) for axis, batch, width in zip(axes, shape[:2], shape[2:], strict=True)]
    size = data.draw(st.integers(1, min(shape[2:]) * 3 * kind.item_bytes), "size")
    src, dst = (
        (end, desc_of(layers[f"{side}_num"], one, kind, axis), False)
        for end, side, one, axis in zip((p, d), ("src", "dst"), shapes, axes, strict=True)
    )
    with caches(src, dst) as (source, target):
        unchanged, expected = contents(source), contents(target)
        for s, t in pairs(layers):
            into = entry(expected[t], axes[1], to).reshape(-1)
            into[:size] = entry(unchanged[s], axes[0], of).reshape(-1)[:size]
        if push:
            key = CacheKeyByIdAndIndex(d.cluster_id, target.cache_id, to)
            manager(p).push_cache(key, source, of, size=size, **range_arguments(layers))
        else:
            key = CacheKeyByIdAndIndex(p.cluster_id, source.cache_id, of)
            manager(d).pull_cache(key, target, to, size, **range_arguments(layers))
        same(target, expected)
        same(source, unchanged)


@given(layer_choices(), st.sampled_from(TYPES), st.data())
@quickly
def test_a_batch_entry_cut_into_blocks(ends, layers, kind, data) -> None:
    """Also where the blocks do not divide the entry: what is left at its end stays where it is."""
    p, d = ends
    block = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)), "a block")
    batch_size, num_blocks = data.draw(st.tuples(dims, st.integers(1, 6)), "numbers of entries and blocks")
    num_moved = data.draw(st.integers(1, num_blocks), "how many blocks move")
    left_over = data.draw(st.integers(0, math.prod(block) * 2), "elements behind the last block")
    width = num_moved * math.prod(block) + left_over
    axis = data.draw(st.integers(0, 2), "batch_dim_index")
    of = data.draw(st.integers(0, batch_size - 1), "entry")
    to = data.draw(st.permutations(range(num_blocks)), "blocks")[:num_moved]
    src = p, desc_of(layers["src_num"], (1,) * axis + (batch_size, width), kind, axis), False
    dst = d, desc_of(layers["dst_num"], (num_blocks, *block), kind), True
    with caches(src, dst) as (source, target):
        unchanged, expected = contents(source), contents(target)
        for s, t in pairs(layers):
            elements = entry(unchanged[s], axis, of).reshape(-1, kind.item_bytes)
            for i, index in enumerate(to):
                first = i * math.prod(block)
                expected[t][index] = elements[first : first + math.prod(block)].reshape(*block, kind.item_bytes)
        key = CacheKeyByIdAndIndex(p.cluster_id, source.cache_id, of)
        manager(d).pull_blocks(key, target, (), to, **range_arguments(layers))
        same(target, expected)
        same(source, unchanged)


@given(st.booleans(), layer_choices(), st.sampled_from(TYPES), st.data())
@quickly
def test_pull_and_push_of_blocks(ends, push, layers, kind, data) -> None:
    p, d = ends
    block = tuple(data.draw(st.lists(dims, max_size=2), "a block"))
    numbers = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), "numbers of blocks")
    to = data.draw(st.permutations(range(numbers[1])), "to")[: data.draw(st.integers(1, numbers[1]), "how many")]
    of = data.draw(st.lists(st.integers(0, numbers[0] - 1), min_size=len(to), max_size=len(to)), "of")
    src, dst = (
        (end, desc_of(layers[f"{side}_num"], (number, *block), kind), True)
        for end, side, number in zip((p, d), ("src", "dst"), numbers, strict=True)
    )
    with caches(src, dst) as (source, target):
        unchanged, expected = contents(source), contents(target)
        for s, t in pairs(layers):
            expected[t][to] = unchanged[s][of]
        if push:
            manager(p).push_blocks(BlocksCacheKey(d.cluster_id), source, of, to, **range_arguments(layers))
        else:
            manager(d).pull_blocks(BlocksCacheKey(p.cluster_id), target, of, to, **range_arguments(layers))
        same(target, expected)
        same(source, unchanged)


@pytest.fixture(scope="module")
def end() -> Iterator[LLMDataDist]:
    with linked("loopback") as (p, _):
        yield p


@given(st.sampled_from(TYPES), st.lists(dims, min_size=2, max_size=3), st.booleans(), st.integers(1, 3), st.data())
@quickly
def test_copy_cache(end, kind, rest, within_one, num_tensors, data) -> None:
    """Within one cache too, also onto itself; a part of an entry where entries are contiguous."""
    axis = data.draw(st.integers(0, 2), "batch_dim_index")
    batch_sizes = data.draw(st.tuples(dims, dims), "batch sizes")
    if within_one:
        batch_sizes = (batch_sizes[0],) * 2
    of, to = (data.draw(st.integers(0, size - 1)) for size in batch_sizes)
    src, dst = ((end, desc_of(num_tensors, shape_with(rest, axis, size), kind, axis), False) for size in batch_sizes)
    entry_bytes, is_contiguous = math.prod(rest) * kind.item_bytes, math.prod(rest[:axis]) == 1
    offset = data.draw(st.integers(0, entry_bytes - 1), "offset") if is_contiguous else 0
    size = data.draw(st.integers(1, entry_bytes - offset) | st.just(-1), "size") if is_contiguous else -1
    with caches(src, dst) as (source, target):
        target = source if within_one else target
        unchanged, expected = contents(source), contents(target)
        for before, after in zip(unchanged, expected, strict=True):
            if is_contiguous:
                stop = entry_bytes if size == -1 else offset + size
                into = entry(after, axis, to).reshape(-1)
                into[offset:stop] = entry(before, axis, of).reshape(-1)[offset:stop]
            else:
                entry(after, axis, to)[:] = entry(before, axis, of)
        manager(end).copy_cache(target, source, to, of, offset, size)
        same(target, expected)
        if not within_one:
            same(source, unchanged)


@given(st.sampled_from(TYPES), st.lists(dims, max_size=2), st.integers(1, 9), st.integers(1, 3), st.data())
@quickly
def test_copy_blocks(end, kind, block, num_blocks, num_tensors, data) -> None:
    """A block may be a source and a target; sources are read as they were before."""
    targets = data.draw(st.permutations(range(num_blocks)))[: data.draw(st.integers(1, num_blocks))]
    info: dict[int, list[int]] = {}
    for index in targets:
        info.setdefault(data.draw(st.integers(0, num_blocks - 1)), []).append(index)
    with caches((end, desc_of(num_tensors, (num_blocks, *block), kind), True)) as (cache,):
        before, expected = contents(cache), contents(cache)
        for old, new in zip(before, expected, strict=True):
            for source, into in info.items():
                new[into] = old[source]
        manager(end).copy_blocks(cache, info)
        same(cache, expected)


@given(st.sampled_from(TYPES), st.lists(dims, max_size=2), st.booleans(), st.booleans(), st.data())
@quickly
def test_swap_blocks(end, kind, block, outwards, own_memory, data) -> None:
    numbers = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), "numbers of blocks")
    count = data.draw(st.integers(1, min(numbers)), "how many")
    of, to = (data.draw(st.permutations(range(number)))[:count] for number in numbers)
    placements = (Placement.DEVICE, Placement.HOST) if outwards else (Placement.HOST, Placement.DEVICE)
    descs = [desc_of(2, (n, *block), kind, 0, where) for n, where in zip(numbers, placements, strict=True)]
    memory = [np.zeros(descs[outwards].size, dtype=np.uint8) for _ in range(2)]
    with caches((end, descs[0], True), (end, descs[1], True)) as made:
        if own_memory:
            made[outwards] = Cache.create_cpu_cache(descs[outwards], [int(part.ctypes.data) for part in memory])
            fill(made[outwards], 5)
        source, target = made
        unchanged, expected = contents(source), contents(target)
        for old, new in zip(unchanged, expected, strict=True):
            new[to] = old[of]
        manager(end).swap_blocks(source, target, dict(zip(of, to, strict=True)))
        same(target, expected)
        same(source, unchanged)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=8))
@settings(max_examples=3 * settings.default.max_examples, deadline=None, database=None)
def test_overlapping_ranges_are_copied_as_if_all_were_read_first(size, ranges) -> None:
    memory = np.arange(200, dtype=np.uint8)
    sources = np.array([source for source, _ in ranges], dtype=np.int64)
    # Targets must not overlap one another, as the caller makes sure.
    gaps = np.array([gap for _, gap in ranges], dtype=np.int64)
    targets = np.cumsum(gaps) + np.arange(len(ranges)) * size
    expected = memory.copy()
    for source, target in zip(sources, targets, strict=True):
        expected[target : target + size] = memory[source : source + size]
    base = int(memory.ctypes.data)
    _copy(CopyList(targets + base, sources + base, np.full(len(ranges), size, dtype=np.int64)))
    assert np.array_equal(memory, expected)


int64s = st.integers(-20, 200) | st.integers(-(2**63), 2**63 - 1)


@given(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(1, 6)), st.tuples(int64s, int64s, int64s, int64s))
@settings(max_examples=3 * settings.default.max_examples, deadline=None, database=None)
def test_a_division_that_the_owner_accepts_lies_in_its_grid(owner, claimed) -> None:
    offset, item, count = owner
    grid = Grid(7, 3, offset, item, item, count)
    try:
        cut = grid.recut(Grid(7, 99, *claimed))
    except ParamInvalid:
        assert claimed != grid.division
        return
    items = np.arange(cut.num_items, dtype=object)
    assert cut.region_id == 3
    assert min(cut.offset_bytes + items * cut.stride_bytes) >= offset
    assert max(cut.offset_bytes + items * cut.stride_bytes + cut.item_bytes) <= offset + item * count


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 6), st.data())
@settings(max_examples=2 * settings.default.max_examples, deadline=None, database=None)
def test_every_division_within_the_grid_is_accepted(offset, item, count, data) -> None:
    total = item * count
    start = data.draw(st.integers(0, total - 1))
    part = data.draw(st.integers(1, total - start))
    stride = data.draw(st.integers(part, total))
    number = 1 + data.draw(st.integers(0, (total - start - part) // stride))
    claimed = Grid(7, 3, offset + start, stride, part, number)
    assert Grid(7, 3, offset, item, item, count).recut(claimed) == claimed
