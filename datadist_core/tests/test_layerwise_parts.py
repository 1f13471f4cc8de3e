# SPDX-License-Identifier: Apache-2.0
"""`transfer_cache_async` between caches that differ: any number of tensors per layer, and parts of blocks (slices).

Every element of a source is another number, and what must arrive is worked out with NumPy, element by element. Each
task runs twice: the first finds the way, the second goes the short one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from datadist_core.cache.mover import Mover
from datadist_core.cache.routes import Routes
from datadist_core.tests.core_ends import linked, manager

OK = LLMStatusCode.LLM_SUCCESS
WAIT_MS = 20_000
BACKENDS = ["loopback", "shm", "cma", "tcp"]
Slices = list[tuple[int, int, int]]


@dataclass
class Released(LayerSynchronizer):
    """Every layer is ready, once `before` has been told of it."""

    before: Callable[[int], None] = lambda layer: None
    asked: list[int] = field(default_factory=list)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append(layer_index)
        self.before(layer_index)
        return True


@pytest.fixture(scope="module", params=BACKENDS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    with linked(request.param) as pair:
        yield pair


@pytest.fixture
def short_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer sent between blocks, whether it went the short way."""
    seen: list[bool] = []
    again_with = Routes.again_with

    def counted(self: Routes, *arguments: Any) -> bool:
        seen.append(again_with(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(Routes, "again_with", counted)
    return seen


def cache_of(end: LLMDataDist, num_tensors: int, num_blocks: int, block: int, first: int, model_id: int = 0) -> Cache:
    """Its elements are the numbers from `first` on."""
    the_desc = CacheDesc(num_tensors, (num_blocks, block), DataType.DT_UINT16, Placement.HOST)
    cache = manager(end).allocate_blocks_cache(the_desc, BlocksCacheKey(end.cluster_id, model_id))
    numbers = np.arange(first, first + num_tensors * num_blocks * block, dtype=np.uint16)
    for tensor, content in zip(cache.numpy(), numbers.reshape(num_tensors, num_blocks, block), strict=True):
        tensor[:] = content
    return cache


def contents(cache: Cache) -> list[np.ndarray[Any, Any]]:
    return [tensor.copy() for tensor in cache.numpy()]


def sent(task: CacheTask) -> None:
    assert task.synchronize(WAIT_MS) is OK, task.errors


def expected(
    source: Cache, target: Cache, tensors: list[tuple[int, int]], src: list[int], dst: list[int], slices: Slices
) -> list[np.ndarray[Any, Any]]:
    """`target` after `source`'s tensors, blocks and slices have come; offsets and sizes in bytes of uint16."""
    result, mine = contents(target), source.numpy()
    for here, there in tensors:
        for from_block, to_block in zip(src, dst, strict=True):
            for src_offset, dst_offset, num_bytes in slices:
                part = mine[here][from_block][src_offset // 2 : (src_offset + num_bytes) // 2]
                result[there][to_block][dst_offset // 2 : (dst_offset + num_bytes) // 2] = part
    return result


@pytest.mark.parametrize("per_layer", [1, 3])
def test_a_layer_may_have_any_number_of_tensors(ends, short_ways, per_layer: int) -> None:
    p, d = ends
    source = cache_of(p, 3 * per_layer, 8, 64, 1, 11)
    target = cache_of(d, 4 * per_layer, 8, 64, 20_000, 12)
    src, dst = [1, 2, 5], [7, 0, 3]
    config = TransferWithCacheKeyConfig(BlocksCacheKey(d.cluster_id, 12), range(1, 3), range(2, 4))
    tensors = [(per_layer + i, 2 * per_layer + i) for i in range(2 * per_layer)]
    for nth in range(2):
        want = expected(source, target, tensors, src, dst, [(0, 0, 128)])
        layers = Released()
        sent(manager(p).transfer_cache_async(source, layers, [config], src, dst, tensor_num_per_layer=per_layer))
        assert layers.asked == [1, 2]
        np.testing.assert_array_equal(contents(target), want)
        assert short_ways == [False] * 2 + [True] * 2 * nth
        for tensor in source.numpy():
            tensor[:] += 77


@pytest.mark.parametrize("per_layer", [1, 3])
def test_by_address_and_from_an_entry_as_well(ends, per_layer: int) -> None:
    p, d = ends
    source = cache_of(p, 2 * per_layer, 4, 64, 1, 21)
    target = cache_of(d, 2 * per_layer, 4, 64, 20_000, 22)
    config = TransferConfig(d.cluster_id, target.tensor_addrs)
    want = expected(source, target, [(i, i) for i in range(2 * per_layer)], [0, 1], [3, 2], [(0, 0, 128)])
    sent(manager(p).transfer_cache_async(source, Released(), [config], [0, 1], [3, 2], tensor_num_per_layer=per_layer))
    np.testing.assert_array_equal(contents(target), want)

    entries = manager(p).allocate_cache(CacheDesc(per_layer, (2, 128), DataType.DT_UINT16, Placement.HOST))
    for tensor in entries.numpy():
        tensor[:] = 9
    config = TransferConfig(d.cluster_id, target.tensor_addrs[:per_layer], None, 1)
    arguments = {"dst_block_indices": [0, 1], "dst_block_memory_size": 128, "tensor_num_per_layer": per_layer}
    sent(manager(p).transfer_cache_async(entries, Released(), [config], **arguments))
    assert [set(np.unique(tensor[:2])) == {9} for tensor in target.numpy()] == [True] * per_layer + [False] * per_layer
    manager(p).deallocate_cache(entries)


@pytest.mark.parametrize(
    "slices",
    [
        pytest.param([(32, 0, 96)], id="one part"),
        pytest.param([(0, 384, 64), (96, 128, 32)], id="two parts"),
        # Two tokens x 4 heads of 16 bytes, token-major here, head-major with room for 8 tokens there.
        pytest.param([((t * 4 + h) * 16, (h * 8 + t) * 16, 16) for t in range(2) for h in range(4)], id="permuting"),
    ],
)
def test_parts_of_blocks_of_different_sizes(ends, short_ways, slices: Slices) -> None:
    p, d = ends
    source, target = cache_of(p, 4, 6, 64, 1, 31), cache_of(d, 4, 5, 256, 20_000, 32)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(d.cluster_id, 32))
    src, dst = [3, 5], [4, 1]
    for nth in range(2):
        want = expected(source, target, [(i, i) for i in range(4)], src, dst, slices)
        sent(manager(p).transfer_cache_async(source, Released(), [config], src, dst, slices=slices))
        np.testing.assert_array_equal(contents(target), want)
        assert short_ways == [False] * 2 + [True] * 2 * nth
        for tensor in source.numpy():
            tensor[:] += 77
    want = expected(source, target, [(i, i) for i in range(4)], src, dst, [(16, 48, 16)])  # another task, another way
    sent(manager(p).transfer_cache_async(source, Released(), [config], src, dst, slices=[(16, 48, 16)]))
    np.testing.assert_array_equal(contents(target), want)
    want = expected(source, target, [(i, i) for i in range(4)], src, dst, slices)
    task = manager(p).transfer_cache_async(
        source, Released(), [config], src, dst, slices=slices, tensor_num_per_layer=4
    )
    sent(task)
    np.testing.assert_array_equal(contents(target), want)


def test_pulls_and_pushes_of_parts_go_the_short_way_too(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only if the parts are the same, and as they should be."""
    p, d = ends
    source, target = cache_of(p, 2, 6, 64, 1, 41), cache_of(d, 2, 5, 256, 20_000, 42)
    long_ways: list[object] = []
    transfer = Mover._transfer

    def counted(self: Mover, *arguments: Any) -> Any:
        long_ways.append(arguments[0])
        return transfer(self, *arguments)

    monkeypatch.setattr(Mover, "_transfer", counted)
    first, second = [(0, 64, 32), (64, 0, 64)], [(0, 128, 32), (64, 0, 64)]
    for nth, slices in enumerate([first, first, [list(one) for one in first], second, second, first]):
        want = expected(source, target, [(0, 0), (1, 1)], [1, 2], [4, 0], slices)
        report = manager(p).push_blocks(BlocksCacheKey(d.cluster_id, 42), source, [1, 2], [4, 0], slices=slices)
        assert report.num_bytes == 2 * 2 * 96
        np.testing.assert_array_equal(contents(target), want)
        assert len(long_ways) == 1 + (nth >= 3)
        for tensor in source.numpy():
            tensor[:] += 77
    back = [(there, here, size) for here, there, size in first]
    for _ in range(2):
        want = expected(source, target, [(0, 0), (1, 1)], [3, 5], [2, 3], first)
        manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 41), target, [3, 5], [2, 3], slices=back)
        np.testing.assert_array_equal(contents(target), want)
    assert len(long_ways) == 3
    for wrong in ([(0.0, 64, 32), (64, 0, 64)], [(False, 64, 32), (64, 0, 64)]):
        with pytest.raises(TypeError, match=r"slices\[0\]"):
            manager(p).push_blocks(BlocksCacheKey(d.cluster_id, 42), source, [1, 2], [4, 0], slices=wrong)
    with pytest.raises(LLMException, match="slices"):
        manager(p).push_blocks(BlocksCacheKey(d.cluster_id, 42), source, [1, 2], [4, 0], slices=[(0, 2**70, 4)])


def test_the_short_way_does_not_lead_into_another_cache(ends) -> None:
    """The key names a new cache since the first layer; a task like this one ran before, so that there is a route."""
    p, d = ends
    source, target = cache_of(p, 4, 4, 64, 1, 51), cache_of(d, 4, 4, 64, 20_000, 52)
    made: list[Cache] = []

    def take_the_key(layer: int) -> None:
        if layer == 1:
            made.append(cache_of(d, 4, 4, 64, 40_000, 52))

    config = TransferWithCacheKeyConfig(BlocksCacheKey(d.cluster_id, 52))
    sent(manager(p).transfer_cache_async(source, Released(), [config], [0], [3]))
    task = manager(p).transfer_cache_async(source, Released(take_the_key), [config], [0], [3])
    assert task.get_results(WAIT_MS) == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST]
    before = contents(made[0])
    sent(manager(p).transfer_cache_async(source, Released(), [config], [0], [3]))
    want = expected(source, made[0], [(i, i) for i in range(4)], [0], [3], [(0, 0, 128)])
    np.testing.assert_array_equal(contents(made[0]), want)
    assert not np.array_equal(before, want)
    del target
