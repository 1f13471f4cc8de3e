# SPDX-License-Identifier: Apache-2.0
"""Flow 2: contiguous caches with a key per batch entry; pulled, pushed, freed when due; as a user writes it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from datadist_core import LLMStatusCode
from datadist_core.tests.flow_checks import (
    CHEAP,
    EIGHT_KEYS,
    EVERY_BACKEND,
    V2_ONLY,
    Way,
    entry,
    linked_pair,
    refused,
    same,
    ways,
    with_entries,
)
from datadist_core.tests.flow_child import PAGE_BYTES, content

S = LLMStatusCode
#: `contiguous()` of the terminals: 4 tensors of 8 batch entries of 2048 bytes, one page of the pool in all.
ENTRY_BYTES = 2048


# -- pull


def test_pull_by_key_into_batch_index_one(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("below, cache, above = contiguous(), contiguous(), contiguous()")
    d.run("fill(below, 2); fill(cache, 3); fill(above, 4)")
    d.run("manager.pull_cache(CacheKey(P, 105), cache, batch_index=1)")
    same(d.run("memory(cache)"), with_entries(3, {1: 5}))
    same(p.run("memory(cache)"), content(1))
    # The neighbours in the pool.
    same(d.run("memory(below)"), content(2))
    same(d.run("memory(above)"), content(4))


def test_every_key_stands_for_its_own_entry(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    for i in range(8):
        d.run("manager.pull_cache(CacheKey(P, 100 + i), cache, batch_index=7 - i)", i=i)
        same(d.run("memory(cache)"), with_entries(3, {7 - j: j for j in range(i + 1)}))


def test_a_pull_drops_its_key_and_a_failed_pull_does_not(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    for bad in ("batch_index=8", "size=2049", "size=0", "dst_layer_range=range(1, 3)", "src_layer_range=range(2, 3)"):
        refused(d, S.LLM_PARAM_INVALID, f"manager.pull_cache(CacheKey(P, 100), cache, {bad})")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 100), contiguous(shape=(8, 512)))")
    same(d.run("memory(cache)"), content(3))
    d.run("manager.pull_cache(CacheKey(P, 100), cache)")
    same(d.run("memory(cache)"), with_entries(3, {0: 0}))
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, 100), cache)")
    d.run("manager.pull_cache(CacheKey(P, 101), cache)")
    same(d.run("memory(cache)"), with_entries(3, {0: 1}))


def test_pulls_by_id_and_index_drop_nothing(pair):
    p, d = pair
    cache_id = p.run(EIGHT_KEYS + "; cache.cache_id")
    d.run("cache = contiguous(); fill(cache, 3)")
    for target in (2, 3):
        d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i, 6), cache, batch_index=t)", i=cache_id, t=target)
    d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i), cache, 4)", i=cache_id)
    same(d.run("memory(cache)"), with_entries(3, {2: 6, 3: 6, 4: 0}))
    d.run("manager.pull_cache(CacheKey(P, 106), cache)")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKeyByIdAndIndex(P, i, 8), cache)", i=cache_id)
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKeyByIdAndIndex(P, 999999), cache)")


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_size_moves_the_first_bytes_only(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 102), cache, batch_index=4, size=100)")
    expected = content(3)
    first = slice(4 * ENTRY_BYTES, 4 * ENTRY_BYTES + 100)
    expected[:, first] = content(1)[:, 2 * ENTRY_BYTES : 2 * ENTRY_BYTES + 100]
    same(d.run("memory(cache)"), expected)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_size_lets_entries_of_different_length_meet(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(shape=(16, 512)); fill(cache, 3)")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 100), cache, 15)", match="size")
    d.run("manager.pull_cache(CacheKey(P, 100), cache, 15, 1024)")
    expected = content(3)
    expected[:, -1024:] = content(1)[:, :1024]
    same(d.run("memory(cache)"), expected)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
@pytest.mark.parametrize(
    ("ranges", "tensors"),
    [
        ("src_layer_range=range(0, 1), dst_layer_range=range(1, 2)", {2: 0, 3: 1}),
        ("src_layer_range=range(1, 2), dst_layer_range=range(1, 2)", {2: 2, 3: 3}),
        ("src_layer_range=range(0, 2), dst_layer_range=range(0, 2)", {0: 0, 1: 1, 2: 2, 3: 3}),
        ("src_layer_range=range(1, 3), dst_layer_range=range(2, 4), tensor_num_per_layer=1", {2: 1, 3: 2}),
        ("src_layer_range=range(0, 1), dst_layer_range=range(0, 1), tensor_num_per_layer=4", {i: i for i in range(4)}),
    ],
)
def test_layer_ranges(pair, ranges, tensors):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run(f"manager.pull_cache(CacheKey(P, 103), cache, batch_index=2, {ranges})")
    expected = content(3)
    for target, source in tensors.items():
        expected[target, entry(2)] = content(1)[source, entry(3)]
    same(d.run("memory(cache)"), expected)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_layer_ranges_pick_from_a_deeper_cache(pair):
    """A decoder with half of the layers."""
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, 1)], num_tensors=8); fill(cache, 1)")
    d.run("cache = contiguous(); fill(cache, 3)")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 1), cache)")
    d.run(
        "manager.pull_cache(CacheKey(P, 1), cache, src_layer_range=range(2, 4), dst_layer_range=range(0, 2), size=-1)"
    )
    same(d.run("memory(cache)"), with_entries(3, {0: 0}, content(1, 8)[4:]))


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_prefix_ids_and_model_ids(pair):
    p, d = pair
    p.run("""
        prefixes = [CacheKey(P, UNSET, 0, 7), CacheKey(P, UNSET, model_id=1, prefix_id=7)]
        cache = contiguous([*prefixes, CacheKey(P, 7), CacheKey(P, 7, 1)])
        fill(cache, 1)
    """)
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 7, 1), cache, 0)")
    d.run("manager.pull_cache(CacheKey(P, UNSET, 1, 7), cache, 1)")
    d.run("manager.pull_cache(CacheKey(prompt_cluster_id=P, req_id=7, model_id=0), cache, 2)")
    d.run("manager.pull_cache(CacheKey(cluster_id=P, req_id=UNSET, prefix_id=7), cache, 3)")
    same(d.run("memory(cache)"), with_entries(3, {0: 3, 1: 1, 2: 2, 3: 0}))
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, UNSET, prefix_id=8), cache)")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 7, 0, 7), cache)")
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, UNSET), cache)")


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_unused_indices_and_missing_trailing_keys(pair):
    p, d = pair
    p.run("unused = CacheKey(P, UNSET); cache = contiguous([unused, CacheKey(P, 1), unused, CacheKey(P, 3)])")
    p.run("fill(cache, 1)")
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 3), cache, 0); manager.pull_cache(CacheKey(P, 1), cache, 1)")
    same(d.run("memory(cache)"), with_entries(3, {0: 3, 1: 1}))
    refused(p, S.LLM_PARAM_INVALID, "contiguous([CacheKey(P, 10 + i) for i in range(9)])")
    assert p.run("used()") == PAGE_BYTES


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_a_repeated_key_names_the_last(pair):
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, 1), CacheKey(P, 2), CacheKey(P, 1)]); fill(cache, 1)")
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 1), cache, 0)")
    same(d.run("memory(cache)"), with_entries(3, {0: 2}))
    p.run("newer = contiguous([CacheKey(P, 2)]); fill(newer, 9)")
    d.run("manager.pull_cache(CacheKey(P, 2), cache, 1)")
    expected = with_entries(3, {0: 2})
    expected[:, entry(1)] = content(9)[:, entry(0)]
    same(d.run("memory(cache)"), expected)
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, 2), cache, 1)")


def test_a_key_taken_over_by_a_new_cache_no_longer_holds_the_old_one(pair):
    p, _ = pair
    p.run("cache = contiguous([CacheKey(P, 1)]); manager.deallocate_cache(cache)")
    assert p.run("used()") == PAGE_BYTES
    p.run("newer = contiguous([CacheKey(P, 1)])")
    assert p.run("used()") == PAGE_BYTES
    p.run("manager.deallocate_cache(newer); manager.remove_cache_key(CacheKey(P, 1))")
    assert p.run("used()") == 0


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_batch_dimension_one(pair):
    """Entry i is tensor[:, i]."""
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, i) for i in range(8)], shape=(4, 8, 256), batch_dim_index=1)")
    p.run("fill(cache, 1)")
    d.run("cache = contiguous(shape=(4, 8, 256), batch_dim_index=1); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 6), cache, batch_index=1)")
    expected = content(3).reshape(4, 4, 8, 512)
    expected[:, :, 1] = content(1).reshape(4, 4, 8, 512)[:, :, 6]
    same(d.run("memory(cache)"), expected.reshape(4, -1))
    d.run("manager.copy_cache(cache, cache, dst_batch_index=7, src_batch_index=1)")
    expected[:, :, 7] = expected[:, :, 1]
    same(d.run("memory(cache)"), expected.reshape(4, -1))
    # The entries of a cache with batch_dim_index 0 lie in one piece; the two do not match.
    refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 3), contiguous())", match="batch_dim_index")
    d.run("manager.pull_cache(CacheKey(P, 3), cache, 0)")


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_from_device_into_host_memory_and_with_views(pair):
    p, d = pair
    p.run("""
        cache = contiguous([CacheKey(P, i) for i in range(8)])
        for index, tensor in enumerate(cache.numpy()):
            tensor[:] = np.arange(8 * 1024).reshape(8, 1024) % 1000 + 1000 * index
    """)
    d.run("cache = contiguous(placement=Placement.HOST, shape=(2, 1024))")
    assert d.run("used(Placement.HOST), used()") == (PAGE_BYTES, 0)
    d.run("manager.pull_cache(CacheKey(P, 2), cache, batch_index=1)")
    for index, tensor in enumerate(d.run("[tensor[1].copy() for tensor in cache.numpy()]")):
        assert tensor.dtype == np.float16
        np.testing.assert_array_equal(tensor, (np.arange(2048, 3072) % 1000 + 1000 * index).astype(np.float16))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("way", ways(Way("shm", False), Way("tcp", True)), indirect=True)
def test_torch_tensors_over_the_caches(pair):
    """As scripts for llm_datadist do it, with create_tensors in place of torchair's create_npu_tensors."""
    p, d = pair
    p.run("""
        import torch
        cache = contiguous([CacheKey(P, i) for i in range(8)])
        tensors = llm_datadist.create_tensors(cache.cache_desc.shape, torch.float16, cache.tensor_addrs)
        for index, tensor in enumerate(tensors):
            tensor.copy_(torch.arange(8 * 1024).view(8, 1024) % 1000 + 1000 * index)
    """)
    d.run("cache = contiguous(); manager.pull_cache(CacheKey(P, 2), cache, batch_index=1)")
    for index, row in enumerate(d.run("[tensor[1].tolist() for tensor in cache.tensors()]")):
        assert row == (np.arange(2048, 3072) % 1000 + 1000 * index).astype(np.float16).tolist()


# -- push


def test_push_by_id_and_index(pair):
    p, d = pair
    cache_id = d.run("cache = contiguous(); fill(cache, 3); cache.cache_id")
    p.run("cache = contiguous(); fill(cache, 1)")
    p.run("manager.push_cache(CacheKeyByIdAndIndex(D, i, 2), cache, src_batch_index=5)", i=cache_id)
    expected = with_entries(3, {2: 5})
    same(d.run("memory(cache)"), expected)
    p.run("manager.push_cache(CacheKeyByIdAndIndex(D, i, 7), cache, 1, size=10)", i=cache_id)
    expected[:, 7 * 2048 : 7 * 2048 + 10] = content(1)[:, 2048 : 2048 + 10]
    same(d.run("memory(cache)"), expected)
    p.run("manager.push_cache(CacheKeyByIdAndIndex(D, i), cache, 0, range(1, 2), range(0, 1))", i=cache_id)
    expected[:2, entry(0)] = content(1)[2:, entry(0)]
    same(d.run("memory(cache)"), expected)
    ranges = "range(3, 4), range(0, 1), tensor_num_per_layer=1"
    p.run(f"manager.push_cache(CacheKeyByIdAndIndex(D, i, 1), cache, 0, {ranges})", i=cache_id)
    expected[0, entry(1)] = content(1)[3, entry(0)]
    same(d.run("memory(cache)"), expected)
    same(p.run("memory(cache)"), content(1))
    refused(p, S.LLM_PARAM_INVALID, "manager.push_cache(CacheKeyByIdAndIndex(D, i, 8), cache)", i=cache_id)
    refused(p, S.LLM_KV_CACHE_NOT_EXIST, "manager.push_cache(CacheKeyByIdAndIndex(D, 999999), cache)")
    same(d.run("memory(cache)"), expected)


def test_push_and_pull_in_the_other_direction_depend_on_the_generation(pair, way):
    p, d = pair
    cache_id = p.run("cache = contiguous(); fill(cache, 1); cache.cache_id")
    d_cache_id = d.run("cache = contiguous(); fill(cache, 3); cache.cache_id")
    push = "manager.push_cache(CacheKeyByIdAndIndex(P, i, 4), cache, 6)"
    pull = "manager.pull_cache(CacheKeyByIdAndIndex(D, i, 5), cache, 0)"
    if way.v2:
        d.run(push, i=cache_id)
        same(p.run("memory(cache)"), with_entries(1, {4: 6}, content(3)))
        p.run(pull, i=d_cache_id)
        same(p.run("memory(cache)"), with_entries(1, {4: 6, 0: 5}, content(3)))
    else:
        refused(d, S.LLM_PARAM_INVALID, push, i=cache_id)
        refused(p, S.LLM_PARAM_INVALID, pull, i=d_cache_id)
        refused(d, S.LLM_PARAM_INVALID, "contiguous([CacheKey(D, 1)])")
        same(p.run("memory(cache)"), content(1))
    assert (p.run("used()"), d.run("used()")) == (PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize("way", V2_ONLY, indirect=True)
def test_with_remote_cache_accessible_only_ids_and_indices(processes, way):
    with linked_pair(processes, way, enable_remote_cache_accessible=True) as (p, d):
        cache_id = p.run(EIGHT_KEYS + "; cache.cache_id")
        d.run("cache = contiguous(); fill(cache, 3)")
        refused(d, S.LLM_PARAM_INVALID, "manager.pull_cache(CacheKey(P, 100), cache)", match="CacheKeyByIdAndIndex")
        d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i, 2), cache, 7)", i=cache_id)
        same(d.run("memory(cache)"), with_entries(3, {7: 2}))


# -- the checks themselves


@pytest.mark.parametrize("way", ways(CHEAP[0]), indirect=True)
@pytest.mark.parametrize("tensor_and_byte", [(0, 0), (3, PAGE_BYTES // 4 - 1), (2, 2048 + 1000)])
def test_the_checks_see_one_wrong_byte(pair, tensor_and_byte):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 105), cache, batch_index=1)")
    expected = with_entries(3, {1: 5})
    same(d.run("memory(cache)"), expected)
    d.run("cache.numpy()[t].view(np.uint8).reshape(-1)[b] ^= 1", t=tensor_and_byte[0], b=tensor_and_byte[1])
    with pytest.raises(AssertionError, match="1 wrong bytes"):
        same(d.run("memory(cache)"), expected)
