# SPDX-License-Identifier: Apache-2.0
"""Flows 3, 5 and 6: blocks between two ends, staging while another cache is in use, swapping; as a user writes them."""

from __future__ import annotations

import pytest

from datadist_core import LLMStatusCode
from datadist_core.tests.flow_checks import (
    CHEAP,
    EVERY_BACKEND,
    Way,
    entry,
    refused,
    same,
    ways,
)
from datadist_core.tests.flow_child import PAGE_BYTES, content

S = LLMStatusCode
#: `blocks()` of the terminals: 4 tensors of 16 blocks of 1024 bytes, one page of the pool in all.
BLOCK_BYTES = 1024
P_BLOCKS = "cache = blocks(BlocksCacheKey(P)); fill(cache, 1)"
D_BLOCKS = "cache = blocks(); fill(cache, 3)"


def block(index):
    return entry(index, BLOCK_BYTES)


def with_blocks(before, source, moved, tensors=None):
    """`before` after blocks of `source` were put in: {target block: source block}, {target tensor: source tensor}."""
    expected = before.copy()
    for target, index in moved.items():
        for to, of in (tensors or {i: i for i in range(len(before))}).items():
            expected[to, block(target)] = source[of, block(index)]
    return expected


# -- flow 3


def test_pull_blocks_and_no_others(pair):
    p, d = pair
    p.run(P_BLOCKS)
    d.run("below, cache, above = blocks(), blocks(), blocks(); fill(below, 2); fill(cache, 3); fill(above, 4)")
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [0, 1], [2, 3])")
    expected = with_blocks(content(3), content(1), {2: 0, 3: 1})
    same(d.run("memory(cache)"), expected)
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, (15, 7, 8, 9), (0, 15, 4, 5))")  # a key that is not used up
    same(d.run("memory(cache)"), with_blocks(expected, content(1), {0: 15, 15: 7, 4: 8, 5: 9}))
    same(p.run("memory(cache)"), content(1))
    same(d.run("memory(below)"), content(2))
    same(d.run("memory(above)"), content(4))


def test_push_blocks(pair, way):
    p, d = pair
    p.run(P_BLOCKS)
    if not way.v2:  # in V1 no decoder holds keys, so nobody can push to it
        refused(d, S.LLM_PARAM_INVALID, "blocks(BlocksCacheKey(D))")
        d.run(D_BLOCKS)
        refused(d, S.LLM_PARAM_INVALID, "manager.push_blocks(BlocksCacheKey(P), cache, [0], [0])")
        refused(p, S.LLM_KV_CACHE_NOT_EXIST, "manager.push_blocks(BlocksCacheKey(D), cache, [0], [0])")
        same(d.run("memory(cache)"), content(3))
        return
    d.run("cache = blocks(BlocksCacheKey(D)); fill(cache, 3)")
    p.run("manager.push_blocks(BlocksCacheKey(D), cache, [0, 1], [2, 3])")
    at_d = with_blocks(content(3), content(1), {2: 0, 3: 1})
    same(d.run("memory(cache)"), at_d)
    p.run("manager.push_blocks(BlocksCacheKey(D), cache, [5], [0], range(0, 1), range(1, 2))")
    at_d = with_blocks(at_d, content(1), {0: 5}, {2: 0, 3: 1})
    same(d.run("memory(cache)"), at_d)
    # And the other way round: D pushes to P, P pulls from D.
    d.run("manager.push_blocks(BlocksCacheKey(P), cache, [9], [10])")
    at_p = with_blocks(content(1), at_d, {10: 9})
    same(p.run("memory(cache)"), at_p)
    p.run("manager.pull_blocks(BlocksCacheKey(D), cache, [11, 12], [12, 11])")
    same(p.run("memory(cache)"), with_blocks(at_p, at_d, {12: 11, 11: 12}))
    same(d.run("memory(cache)"), at_d)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
@pytest.mark.parametrize(
    ("ranges", "tensors"),
    [
        ("src_layer_range=range(0, 1), dst_layer_range=range(1, 2)", {2: 0, 3: 1}),
        ("src_layer_range=range(1, 2), dst_layer_range=range(0, 1), tensor_num_per_layer=2", {0: 2, 1: 3}),
        ("src_layer_range=range(1, 4), dst_layer_range=range(0, 3), tensor_num_per_layer=1", {0: 1, 1: 2, 2: 3}),
    ],
)
def test_layer_ranges(pair, ranges, tensors):
    p, d = pair
    p.run(P_BLOCKS)
    d.run(D_BLOCKS)
    d.run(f"manager.pull_blocks(BlocksCacheKey(P), cache, [6, 2], [1, 0], {ranges})")
    same(d.run("memory(cache)"), with_blocks(content(3), content(1), {1: 6, 0: 2}, tensors))


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_models_have_their_own_blocks(pair):
    p, d = pair
    p.run("one, two = blocks(BlocksCacheKey(P, 0)), blocks(BlocksCacheKey(P, model_id=5)); fill(one, 1); fill(two, 2)")
    d.run(D_BLOCKS)
    d.run("manager.pull_blocks(BlocksCacheKey(prompt_cluster_id=P, model_id=5), cache, [0], [0])")
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [0], [1])")
    same(d.run("memory(cache)"), with_blocks(with_blocks(content(3), content(2), {0: 0}), content(1), {1: 0}))
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_blocks(BlocksCacheKey(P, 6), cache, [0], [0])")


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_indices_are_checked_on_both_ends_and_nothing_moves(pair):
    p, d = pair
    p.run("cache = blocks(BlocksCacheKey(P), shape=(8, 512)); fill(cache, 1)")
    d.run(D_BLOCKS)
    for lists in ("[8], [0]", "[0], [16]", "[0, 1], [0]", "[], []", "[-1], [0]"):
        refused(d, S.LLM_PARAM_INVALID, f"manager.pull_blocks(BlocksCacheKey(P), cache, {lists})")
    same(d.run("memory(cache)"), content(3))
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [7], [15])")
    same(d.run("memory(cache)"), with_blocks(content(3), content(1, 4, 8 * BLOCK_BYTES), {15: 7}))


def test_a_contiguous_source_is_cut_into_consecutive_blocks(pair):
    """Entry 5 (2048 bytes) is two blocks of 1024."""
    p, d = pair
    cache_id = p.run("cache = contiguous([CacheKey(P, i) for i in range(8)]); fill(cache, 1); cache.cache_id")
    d.run(D_BLOCKS)
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_blocks(CacheKey(P, 5), cache, [], [9, 2, 3])")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_blocks(CacheKey(P, 5), cache, [0, 1], [9, 2])")
    same(d.run("memory(cache)"), content(3))
    d.run("manager.pull_blocks(CacheKey(P, 5), cache, [], [9, 2])")
    expected = with_blocks(content(3), content(1), {9: 10, 2: 11})
    same(d.run("memory(cache)"), expected)
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_blocks(CacheKey(P, 5), cache, [], [9, 2])")
    by_id = "manager.pull_blocks(CacheKeyByIdAndIndex(P, i, 3), cache, dst_blocks=blocks_of_entry)"
    for dst_blocks in ([15, 0], [1, 4]):
        d.run(by_id, i=cache_id, blocks_of_entry=dst_blocks)
        expected = with_blocks(expected, content(1), {dst_blocks[0]: 6, dst_blocks[1]: 7})
        same(d.run("memory(cache)"), expected)
    d.run(by_id, i=cache_id, blocks_of_entry=[12])  # a short sequence: the first block of the entry
    expected = with_blocks(expected, content(1), {12: 6})
    same(d.run("memory(cache)"), expected)
    layers = "src_layer_range=range(0, 1), dst_layer_range=range(1, 2)"
    d.run(f"manager.pull_blocks(CacheKey(P, 0), cache, dst_blocks=[13, 14], {layers})")
    same(d.run("memory(cache)"), with_blocks(expected, content(1), {13: 0, 14: 1}, {2: 0, 3: 1}))


def test_blocks_caches_are_freed_at_once_and_their_key_holds_nothing(pair):
    p, d = pair
    p.run(P_BLOCKS)
    d.run(D_BLOCKS)
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [0], [0])")
    assert p.run("used()") == PAGE_BYTES
    p.run("manager.deallocate_blocks_cache(cache); manager.deallocate_blocks_cache(cache)")
    assert p.run("used()") == 0
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_blocks(BlocksCacheKey(P), cache, [0], [0])")
    p.run("cache = blocks(BlocksCacheKey(P)); fill(cache, 7)")
    d.run("fill(cache, 3); manager.pull_blocks(BlocksCacheKey(P), cache, [1], [1])")
    same(d.run("memory(cache)"), with_blocks(content(3), content(7), {1: 1}))
    p.run("manager.deallocate_cache(cache)")  # V1's name for it
    assert p.run("used()") == 0
    assert p.run("manager.pool_stats(Placement.DEVICE).high_water_bytes") == PAGE_BYTES


OWN_BLOCKS = """
own = np.empty((4, 16, 512), np.float16)
desc = CacheDesc(4, (16, 512), DataType.DT_FLOAT16)
cache = manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in own], BlocksCacheKey(P))
fill(cache, seed)
"""


# shm alone cannot reach memory outside the pools.
@pytest.mark.parametrize(
    "way", ways(*CHEAP, Way("tcp", False), Way("tcp", True), Way("auto", False), Way("auto", True)), indirect=True
)
def test_own_blocks_come_and_go_after_linking(pair):
    p, d = pair
    d.run(D_BLOCKS)
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_blocks(BlocksCacheKey(P), cache, [0], [0])")
    for seed in (5, 6):
        p.run(OWN_BLOCKS, seed=seed)
        d.run("fill(cache, 3); manager.pull_blocks(BlocksCacheKey(P), cache, [1, 2], [2, 1])")
        same(d.run("memory(cache)"), with_blocks(content(3), content(seed), {2: 1, 1: 2}))
        p.run("manager.unregister_cache(cache.cache_id)")
        refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_blocks(BlocksCacheKey(P), cache, [0], [0])")


# -- flow 5

PING_PONG = """
stages = [contiguous(shape=(1, 1024)), contiguous(shape=(1, 1024))]
main = contiguous()
fill(main, 3)
failures = []

def pull(key, stage):
    try:
        manager.pull_cache(key, stage)
    except Exception as error:
        failures.append(repr(error))

previous = None
for request in [*range(8), None]:
    thread = None
    if request is not None:
        thread = threading.Thread(target=pull, args=(CacheKey(P, request), stages[request % 2]), daemon=True)
        thread.start()
    if previous is not None:
        manager.copy_cache(main, stages[previous % 2], 7 - previous, 0, size=2048)
    if thread is not None:
        thread.join(50)
    previous = request
failures
"""


def test_ping_pong_between_two_staging_caches(pair):
    """While request n is being pulled into one, request n - 1 is copied out of the other."""
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, i) for i in range(8)]); fill(cache, 1)")
    assert d.run(PING_PONG) == []
    expected = content(1).reshape(4, 8, 2048)[:, ::-1].reshape(4, -1)
    same(d.run("memory(main)"), expected)
    assert d.run("used()") == 3 * PAGE_BYTES
    d.run("for stage in stages: manager.deallocate_cache(stage)")
    assert d.run("used()") == PAGE_BYTES


PING_PONG_BLOCKS = """
cache = blocks()
fill(cache, 3)
failures = []

def pull(source, stage):
    try:
        manager.pull_blocks(BlocksCacheKey(P), cache, [source], [stage])
    except Exception as error:
        failures.append(repr(error))

for request in range(9):
    threads = [threading.Thread(target=pull, args=(request, 14 + request % 2), daemon=True)] if request < 8 else []
    for thread in threads:
        thread.start()
    if request:
        manager.copy_blocks(cache, {14 + (request - 1) % 2: [request - 1]})
    for thread in threads:
        thread.join(50)
failures
"""


def test_ping_pong_between_two_staging_blocks(pair):
    p, d = pair
    p.run(P_BLOCKS)
    assert d.run(PING_PONG_BLOCKS) == []
    moved = {**{i: i for i in range(8)}, 14: 6, 15: 7}
    same(d.run("memory(cache)"), with_blocks(content(3), content(1), moved))


def test_a_common_prefix_is_copied_to_every_request(pair):
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, UNSET, prefix_id=1)]); fill(cache, 1)")
    d.run("""
        prefix, cache = contiguous(), contiguous()
        fill(prefix, 2)
        fill(cache, 3)
        manager.pull_cache(CacheKey(P, UNSET, prefix_id=1), prefix, batch_index=4)
        for request in (0, 1, 7):
            manager.copy_cache(cache, prefix, request, 4, size=600)
        manager.copy_cache(cache, prefix, dst_batch_index=2, src_batch_index=4)
        manager.copy_cache(cache, prefix, 3, 4, offset=1024, size=24, req_id=9)
    """)
    expected = content(3)
    for request in (0, 1, 7):
        expected[:, request * 2048 : request * 2048 + 600] = content(1)[:, :600]
    expected[:, entry(2)] = content(1)[:, entry(0)]
    expected[:, 3 * 2048 + 1024 : 3 * 2048 + 1048] = content(1)[:, 1024:1048]
    same(d.run("memory(cache)"), expected)
    for bad in ("dst_batch_index=8", "src_batch_index=8", "offset=2048", "size=2049", "offset=1024, size=1025"):
        refused(d, S.LLM_PARAM_INVALID, f"manager.copy_cache(cache, prefix, {bad})")
    same(d.run("memory(cache)"), expected)


# -- flow 6

SWAPS = [
    ("host = blocks(placement=Placement.HOST)", PAGE_BYTES),
    (
        """
        own = np.empty((4, 16, 512), np.float16)
        desc = CacheDesc(4, (16, 512), DataType.DT_FLOAT16, Placement.HOST)
        host = Cache.create_cpu_cache(desc, [t.ctypes.data for t in own])
        """,
        0,
    ),
]


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
@pytest.mark.parametrize(("make_host", "host_bytes"), SWAPS, ids=["allocated", "create_cpu_cache"])
def test_swap_blocks_out_to_a_host_cache_and_back(pair, make_host, host_bytes):
    """Blocks pulled from P go out to host memory, are overwritten, and come back to other places."""
    p, d = pair
    p.run(P_BLOCKS)
    d.run(D_BLOCKS)
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [4, 5, 6], [0, 1, 2])")
    d.run(make_host)
    d.run("fill(host, 8)")
    assert d.run("used(Placement.HOST)") == host_bytes
    d.run("manager.swap_blocks(cache, host, {0: 15, 2: 7})")
    on_host = with_blocks(content(8), content(1), {15: 4, 7: 6})
    same(d.run("memory(host)"), on_host)
    same(d.run("memory(cache)"), with_blocks(content(3), content(1), {0: 4, 1: 5, 2: 6}))
    d.run("fill(cache, 9); manager.swap_blocks(host, cache, {15: 3, 7: 0})")
    same(d.run("memory(cache)"), with_blocks(content(9), content(1), {3: 4, 0: 6}))
    same(d.run("memory(host)"), on_host)
    for bad in ("{16: 0}", "{0: 16}"):
        refused(d, S.LLM_PARAM_INVALID, f"manager.swap_blocks(cache, host, {bad})")
    same(d.run("memory(host)"), on_host)


# -- the checks themselves


@pytest.mark.parametrize("way", ways(CHEAP[0]), indirect=True)
def test_the_checks_see_a_wrong_or_missing_block(pair):
    p, d = pair
    p.run(P_BLOCKS)
    d.run(D_BLOCKS)
    expected = with_blocks(content(3), content(1), {2: 0, 3: 1})
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [0], [2])")
    with pytest.raises(AssertionError, match=r"first at \[tensor, byte\] = \[0, 30"):
        same(d.run("memory(cache)"), expected)
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [1], [3])")
    same(d.run("memory(cache)"), expected)
    d.run("manager.pull_blocks(BlocksCacheKey(P), cache, [9], [4])")
    with pytest.raises(AssertionError, match="wrong bytes"):
        same(d.run("memory(cache)"), expected)
