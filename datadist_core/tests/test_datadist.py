# SPDX-License-Identifier: Apache-2.0
"""The public API between two ends in one process, over every built-in backend."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from datadist_core import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from datadist_core.testing.ports import free_port
from datadist_core.tests.core_ends import (
    LINK_MS,
    POOL_BYTES,
    cluster_info,
    config,
    desc,
    fill,
    filled_cache,
    linked,
    make_end,
    manager,
    must_link,
    plain_cache,
    remote_info,
)

BACKENDS = ["loopback", "shm", "cma", "tcp", "auto"]


@pytest.fixture(params=BACKENDS)
def pair(request):
    with linked(request.param) as ends:
        yield ends


def test_pull_moves_the_named_blocks_and_no_others(pair):
    prompt, decoder = pair
    source, target = filled_cache(prompt, 1), plain_cache(decoder, 2)
    before = [t.copy() for t in target.numpy()]
    report = manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [0, 1, 7, 3], [2, 3, 9, 15])
    for src, dst, old in zip(source.numpy(), target.numpy(), before, strict=True):
        np.testing.assert_array_equal(dst[[2, 3, 9, 15]], src[[0, 1, 7, 3]])
        untouched = [i for i in range(16) if i not in (2, 3, 9, 15)]
        np.testing.assert_array_equal(dst[untouched], old[untouched])
    assert report.num_bytes == 4 * 4 * 1024


def test_push_moves_the_named_blocks_and_no_others(pair):
    prompt, decoder = pair
    source, target = plain_cache(prompt, 3), filled_cache(decoder, 4)
    before = [t.copy() for t in target.numpy()]
    manager(prompt).push_blocks(BlocksCacheKey(decoder.cluster_id), source, [5, 6], [0, 1])
    for src, dst, old in zip(source.numpy(), target.numpy(), before, strict=True):
        np.testing.assert_array_equal(dst[:2], src[5:7])
        np.testing.assert_array_equal(dst[2:], old[2:])


def test_layer_ranges_pick_tensors(pair):
    prompt, decoder = pair
    source, target = filled_cache(prompt, 5), plain_cache(decoder, 6)
    before = [t.copy() for t in target.numpy()]
    manager(decoder).pull_blocks(
        BlocksCacheKey(prompt.cluster_id), target, [1], [1], src_layer_range=range(1), dst_layer_range=range(1, 2)
    )
    np.testing.assert_array_equal(target.numpy()[2][1], source.numpy()[0][1])
    np.testing.assert_array_equal(target.numpy()[3][1], source.numpy()[1][1])
    np.testing.assert_array_equal(target.numpy()[0], before[0])
    np.testing.assert_array_equal(target.numpy()[1], before[1])


def test_slices_move_parts_of_blocks(pair):
    prompt, decoder = pair
    source, target = filled_cache(prompt, 7), plain_cache(decoder, 8)
    before = [t.copy() for t in target.numpy()]
    manager(decoder).pull_blocks(
        BlocksCacheKey(prompt.cluster_id), target, [4], [5], slices=[(0, 512, 256), (768, 0, 128)]
    )
    for src, dst, old in zip(source.numpy(), target.numpy(), before, strict=True):
        np.testing.assert_array_equal(dst[5, :64], src[4, 128:192])
        np.testing.assert_array_equal(dst[5, 192:224], src[4, :32])
        np.testing.assert_array_equal(dst[5, 64:192], old[5, 64:192])


def test_both_ends_may_move_in_both_directions(pair):
    prompt, decoder = pair
    here, there = filled_cache(prompt, 9), filled_cache(decoder, 10)
    manager(prompt).pull_blocks(BlocksCacheKey(decoder.cluster_id), here, [0], [1])
    np.testing.assert_array_equal(here.numpy()[0][1], there.numpy()[0][0])
    manager(decoder).push_blocks(BlocksCacheKey(prompt.cluster_id), there, [2], [3])
    np.testing.assert_array_equal(here.numpy()[0][3], there.numpy()[0][2])


@pytest.mark.parametrize("pair", ["loopback", "cma", "tcp", "auto", "shm,cma,tcp", "shm,tcp"], indirect=True)
def test_caller_memory_is_registered_as_it_is(pair):
    prompt, decoder = pair
    memory = np.random.default_rng(11).random((2, 16, 256), dtype=np.float32)
    the_desc = desc(num_tensors=2)
    source = manager(prompt).register_blocks_cache(
        the_desc, [memory[0].ctypes.data, memory[1].ctypes.data], BlocksCacheKey(prompt.cluster_id), True
    )
    target = plain_cache(decoder, 12, the_desc)
    report = manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [3, 4], [0, 1])
    np.testing.assert_array_equal(target.numpy()[1][:2], memory[1, 3:5])
    # This memory cannot be mapped by a peer.
    assert report.backend == next(b for b in decoder.link_info(prompt.cluster_id).backends if b != "shm")
    manager(prompt).unregister_cache(source.cache_id)
    with pytest.raises(LLMException) as caught:
        manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [3], [0])
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_shm_alone_says_that_unmappable_memory_is_out_of_reach():
    with linked("shm") as (prompt, decoder):
        memory = np.zeros((16, 256), dtype=np.float32)
        manager(prompt).register_blocks_cache(
            desc(num_tensors=1), [memory.ctypes.data], BlocksCacheKey(prompt.cluster_id), True
        )
        with pytest.raises(LLMException, match="shm"):
            manager(decoder).pull_blocks(
                BlocksCacheKey(prompt.cluster_id), plain_cache(decoder, 1, desc(num_tensors=1)), [0], [0]
            )


def test_copy_blocks_within_a_cache():
    with make_end() as end:
        cache = plain_cache(end, 13)
        before = [t.copy() for t in cache.numpy()]
        manager(end).copy_blocks(cache, {0: [4, 5], 1: [6]})
        for new, old in zip(cache.numpy(), before, strict=True):
            np.testing.assert_array_equal(new[[4, 5, 6]], old[[0, 0, 1]])
            np.testing.assert_array_equal(new[:4], old[:4])


def test_copy_blocks_reads_all_sources_before_it_writes():
    with make_end() as end:
        cache = plain_cache(end, 13)
        before = [t.copy() for t in cache.numpy()]
        manager(end).copy_blocks(cache, {0: [1], 1: [2], 2: [0]})
        for new, old in zip(cache.numpy(), before, strict=True):
            np.testing.assert_array_equal(new[[1, 2, 0]], old[[0, 1, 2]])
        with pytest.raises(LLMException, match="twice"):
            manager(end).copy_blocks(cache, {0: [5], 1: [5]})


def test_freed_caches_are_forgotten_by_peers_and_their_memory_returns(pair):
    prompt, decoder = pair
    empty = manager(prompt).pool_stats(Placement.HOST).used_bytes
    source, target = filled_cache(prompt, 14), plain_cache(decoder, 15)
    key = BlocksCacheKey(prompt.cluster_id)
    manager(decoder).pull_blocks(key, target, [0], [0])
    manager(prompt).deallocate_blocks_cache(source)
    manager(prompt).deallocate_blocks_cache(source)
    assert manager(prompt).pool_stats(Placement.HOST).used_bytes == empty
    with pytest.raises(LLMException) as caught:
        manager(decoder).pull_blocks(key, target, [0], [0])
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    again = filled_cache(prompt, 16)
    manager(decoder).pull_blocks(key, target, [1], [0])
    np.testing.assert_array_equal(target.numpy()[0][0], again.numpy()[0][1])


def test_a_key_given_to_a_new_cache_names_the_new_one_at_linked_peers(pair):
    prompt, decoder = pair
    filled_cache(prompt, 17)
    target = plain_cache(decoder, 18)
    key = BlocksCacheKey(prompt.cluster_id)
    manager(decoder).pull_blocks(key, target, [0], [0])
    newer = filled_cache(prompt, 19)
    manager(decoder).pull_blocks(key, target, [0], [0])
    np.testing.assert_array_equal(target.numpy()[0][0], newer.numpy()[0][0])


def test_many_threads_on_one_link(pair):
    prompt, decoder = pair
    source = filled_cache(prompt, 20)
    targets = [plain_cache(decoder, 21 + i) for i in range(8)]

    def pull(target):
        for block in range(16):
            manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [block], [15 - block])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pull, targets))
    for target in targets:
        np.testing.assert_array_equal(target.numpy()[3][::-1], source.numpy()[3])


def test_check_link_status_and_unlink(pair):
    prompt, decoder = pair
    decoder.check_link_status(prompt.cluster_id)
    assert decoder.unlink_clusters([cluster_info(prompt)], timeout=LINK_MS)[1] == [LLMStatusCode.LLM_SUCCESS]
    for end, other in ((decoder, prompt), (prompt, decoder)):
        with pytest.raises(LLMException) as caught:
            end.check_link_status(other.cluster_id)
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    must_link(decoder, prompt)
    decoder.check_link_status(prompt.cluster_id)
    prompt.check_link_status(decoder.cluster_id)


def test_forced_unlink_on_one_side_is_noticed_by_the_other(pair):
    prompt, decoder = pair
    lost = threading.Event()
    prompt.on_link_lost(lambda cluster_id, error: lost.set())
    assert decoder.unlink_clusters([cluster_info(prompt)], timeout=LINK_MS, force=True)[0] is LLMStatusCode.LLM_SUCCESS
    assert lost.wait(30)
    must_link(decoder, prompt)


def test_unlink_from_the_listening_side(pair):
    prompt, decoder = pair
    overall, _ = prompt.unlink_clusters([remote_info(decoder.cluster_id, "127.0.0.1", 1)], timeout=LINK_MS)
    assert overall is LLMStatusCode.LLM_SUCCESS
    must_link(decoder, prompt)


def test_services_answer_with_bodies_and_errors(pair):
    prompt, decoder = pair

    def handler(remote_cluster_id, body):
        if body == b"bad":
            raise LLMException("no such lease", LLMStatusCode.LLM_PARAM_INVALID)
        return b"%d:" % remote_cluster_id + body

    prompt.register_service("echo", handler)
    assert decoder.call(prompt.cluster_id, "echo", b"x", 30) == b"%d:x" % decoder.cluster_id
    with pytest.raises(LLMException, match="no such lease"):
        decoder.call(prompt.cluster_id, "echo", b"bad", 30)
    with pytest.raises(LLMException, match="'nothing' does not exist"):
        decoder.call(prompt.cluster_id, "nothing", b"", 30)


def test_auto_takes_the_best_backend_and_says_why_not_the_others():
    with linked("auto") as (prompt, decoder):
        info = decoder.link_info(prompt.cluster_id)
        assert info.backend == "loopback"
        assert info.backends == ("loopback", "shm", "cma", "tcp")
    with make_end("tcp", "127.0.0.1:0") as prompt, make_end("auto") as decoder:
        must_link(decoder, prompt)
        info = decoder.link_info(prompt.cluster_id)
        assert info.backends == ("tcp",)
        assert "does not offer" in info.rejected["shm"]


def test_no_common_backend_is_refused_with_the_reason():
    with make_end("tcp", "127.0.0.1:0") as prompt, make_end("shm") as decoder:
        overall, each = decoder.link_clusters([cluster_info(prompt)], timeout=LINK_MS)
        assert overall is LLMStatusCode.LLM_LINK_FAILED
        assert each == [LLMStatusCode.LLM_LINK_FAILED]
        assert "does not offer" in str(decoder.link_failure(prompt.cluster_id))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("backend", ["tcp", "auto"])
def test_ipv4_ipv6_and_names(host, backend):
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    with make_end(backend, listen) as prompt, make_end(backend) as decoder:
        assert prompt.listen_address.port != 0
        must_link(decoder, prompt)
        source, target = filled_cache(prompt, 30), plain_cache(decoder, 31)
        manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [1], [1])
        np.testing.assert_array_equal(target.numpy()[0][1], source.numpy()[0][1])


def test_link_statuses_come_one_per_cluster_in_order():
    with make_end("auto", "127.0.0.1:0") as one, make_end("auto", "127.0.0.1:0") as two, make_end() as client:
        must_link(client, one)
        wrong_id = remote_info(4242, "127.0.0.1", two.listen_address.port)
        nobody = remote_info(4243, "127.0.0.1", free_port())
        overall, each = client.link_clusters([cluster_info(one), wrong_id, cluster_info(two), nobody], timeout=LINK_MS)
        assert overall is LLMStatusCode.LLM_ALREADY_LINK
        assert each == [
            LLMStatusCode.LLM_ALREADY_LINK,
            LLMStatusCode.LLM_PARAM_INVALID,
            LLMStatusCode.LLM_SUCCESS,
            LLMStatusCode.LLM_LINK_FAILED,
        ]
        assert "4242" in str(client.link_failure(4242))


def test_both_ends_dial_each_other_at_once():
    for _ in range(5):
        with make_end("auto", "127.0.0.1:0") as one, make_end("auto", "127.0.0.1:0") as two:
            with ThreadPoolExecutor(2) as pool:
                first = pool.submit(one.link_clusters, [cluster_info(two)], LINK_MS)
                second = pool.submit(two.link_clusters, [cluster_info(one)], LINK_MS)
                statuses = {first.result()[0], second.result()[0]}
            assert LLMStatusCode.LLM_SUCCESS in statuses
            one.check_link_status(two.cluster_id)
            two.check_link_status(one.cluster_id)


def test_one_decoder_links_to_many_prompts_at_once():
    prompts = [make_end("auto", "127.0.0.1:0") for _ in range(20)]
    try:
        with make_end() as decoder:
            must_link(decoder, *prompts)
            for prompt in prompts:
                decoder.check_link_status(prompt.cluster_id)
    finally:
        for prompt in prompts:
            prompt.finalize()


# -- errors: the documented exception, a text that names argument, value and limit, and an object that lives on


def error_cases():
    key = "BlocksCacheKey(prompt.cluster_id)"
    invalid, missing = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    return [
        (f"pull({key}, target, [16], [0])", invalid, "block index 16 .* 16 blocks"),
        (f"pull({key}, target, [0], [16])", invalid, "block index 16 .* 16 blocks"),
        (f"pull({key}, target, [-1], [0])", invalid, "src_blocks .* -1"),
        (f"pull({key}, target, [0, 1], [0])", invalid, "dst_blocks has 1 .* src_blocks has 2"),
        (f"pull({key}, target, [], [])", invalid, "dst_blocks is empty"),
        (f"pull({key}, target, [0], [0], src_layer_range=range(0, 3))", invalid, "layer"),
        (f"pull({key}, target, [0], [0], dst_layer_range=range(0, 3))", invalid, "dst_layer_range.* 2 layers"),
        (f"pull({key}, target, [0], [0], dst_layer_range=range(0, 2, 2))", invalid, "step 1"),
        (f"pull({key}, target, [0], [0], tensor_num_per_layer=0)", invalid, "tensor_num_per_layer=0"),
        (f"pull({key}, target, [0], [0], slices=[(0, 1000, 100)])", invalid, "slice of 100 bytes at 1000"),
        (f"pull({key}, other_shape, [0], [0])", invalid, "512 bytes here but 1024"),
        (f"pull({key}, fewer_tensors, [0], [0])", invalid, "2 tensors here but 4"),
        ("pull(BlocksCacheKey(prompt.cluster_id, 5), target, [0], [0])", missing, "model_id=5"),
        ("pull(BlocksCacheKey(77), target, [0], [0])", LLMStatusCode.LLM_NOT_YET_LINK, "cluster 77"),
        ("push(BlocksCacheKey(77), target, [0], [0])", LLMStatusCode.LLM_NOT_YET_LINK, "cluster 77"),
        (f"push({key}, target, [0], [99])", invalid, "block index 99"),
        ("copy(target, {0: [16]})", invalid, "block index 16"),
        ("copy(target, {})", invalid, "copy_block_info is empty"),
        ("allocate(CacheDesc(0, (4, 4), DataType.DT_FLOAT))", invalid, "num_tensors=0"),
        ("allocate(CacheDesc(1, (), DataType.DT_FLOAT))", invalid, "shape"),
        ("allocate(CacheDesc(1, (4, 4), DataType.DT_STRING))", invalid, "DT_STRING"),
        ("allocate(desc(num_blocks=POOL_BYTES))", LLMStatusCode.LLM_OUT_OF_MEMORY, "memory_size"),
        ("allocate(desc(), BlocksCacheKey(77))", invalid, "blocks_cache_key.cluster_id=77"),
        ("register(desc(), [1])", invalid, r"addrs has 1 .*num_tensors=4"),
        ("decoder.unlink_clusters([])", invalid, "clusters is empty"),
        ("decoder.link_clusters([cluster_info(prompt)], timeout=0)", invalid, "timeout=0"),
        ("decoder.check_link_status(77)", LLMStatusCode.LLM_NOT_YET_LINK, "cluster 77"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "code", "text"), error_cases())
def test_bad_values_are_named_and_nothing_breaks(shared_pair, call, code, text):
    with pytest.raises(LLMException, match=text) as caught:
        eval(call, globals(), shared_pair)
    assert caught.value.status_code is code
    eval("pull(BlocksCacheKey(prompt.cluster_id), target, [0], [0])", globals(), shared_pair)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("pull(None, target, [0], [0])", "src_cache_key"),
        ("pull(BlocksCacheKey(1), None, [0], [0])", "dst_cache"),
        ("pull(BlocksCacheKey(prompt.cluster_id), target, 'ab', [0])", "src_blocks"),
        ("pull(BlocksCacheKey(prompt.cluster_id), target, [0.5], [0])", "src_blocks"),
        ("pull(BlocksCacheKey(prompt.cluster_id), target, [0], [0], src_layer_range=[0])", "src_layer_range"),
        ("allocate(None)", "cache_desc"),
        ("allocate(desc(), 5)", "blocks_cache_key"),
        ("copy(target, [0])", "copy_block_info"),
        ("copy(target, {0: 1})", "copy_block_info"),
        ("register(desc(), 5)", "addrs"),
        ("decoder.link_clusters(5)", "clusters"),
        ("decoder.link_clusters([5])", r"clusters\[0\]"),
        ("decoder.link_clusters([cluster_info(prompt)], timeout='x')", "timeout"),
        ("decoder.init(5)", "options"),
        ("LLMDataDist(1, 2)", "role"),
        ("LLMDataDist(LLMRole.MIX, 'x')", "cluster_id"),
        ("LLMDataDist(LLMRole.MIX, True)", "cluster_id"),
    ],
)
def test_wrong_types_name_the_argument(shared_pair, call, text):
    with pytest.raises(TypeError, match=text):
        eval(call, globals(), shared_pair)


@pytest.fixture(scope="module")
def shared_pair():
    with linked("auto") as (prompt, decoder):
        filled_cache(prompt, 40)
        decode = manager(decoder)
        yield {
            "prompt": prompt,
            "decoder": decoder,
            "target": filled_cache(decoder, 41),
            "other_shape": plain_cache(decoder, 42, desc(block=128)),
            "fewer_tensors": plain_cache(decoder, 43, desc(num_tensors=2)),
            "pull": decode.pull_blocks,
            "push": decode.push_blocks,
            "copy": decode.copy_blocks,
            "allocate": decode.allocate_blocks_cache,
            "register": decode.register_blocks_cache,
        }


def test_life_of_the_object():
    end = LLMDataDist(LLMRole.MIX, 5)
    with pytest.raises(LLMException, match="init"):
        _ = end.cache_manager
    end.init(config())
    end.init(config())
    kept = end.cache_manager
    with pytest.raises(LLMException, match="V1"):
        _ = end.kv_cache_manager
    end.finalize()
    end.finalize()
    for call in (lambda: end.cache_manager, lambda: kept.allocate_blocks_cache(desc()), lambda: end.init(config())):
        with pytest.raises(LLMException) as caught:
            call()
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    with pytest.raises(ValueError, match="cluster_id"):
        LLMDataDist(LLMRole.MIX, 2**64)


def test_a_taken_port_is_named():
    with make_end(listen="127.0.0.1:0") as first:
        with pytest.raises(LLMException, match=str(first.listen_address.port)):
            make_end(listen=f"127.0.0.1:{first.listen_address.port}")
        with make_end() as client:
            must_link(client, first)


def test_placement_without_a_pool_names_the_option():
    end = LLMDataDist(LLMRole.MIX, 6)
    made = config()
    options = {k: v for k, v in made.generate_options().items() if k != "llm.HostMemPoolConfig"}
    with end:
        end.init(options)
        with pytest.raises(LLMException, match="host_mem_pool_cfg"):
            end.cache_manager.allocate_blocks_cache(desc())


def test_v1_enforces_roles_and_uses_its_own_codes():
    with linked("auto", v2=False) as (prompt, decoder):
        source, target = filled_cache(prompt, 50), plain_cache(decoder, 51)
        decoder.kv_cache_manager.pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [0], [0])
        np.testing.assert_array_equal(target.numpy()[0][0], source.numpy()[0][0])
        with pytest.raises(LLMException, match="only a DECODER"):
            prompt.kv_cache_manager.pull_blocks(BlocksCacheKey(decoder.cluster_id), source, [0], [0])
        with pytest.raises(LLMException, match="only a PROMPT"):
            decoder.kv_cache_manager.push_blocks(BlocksCacheKey(prompt.cluster_id), target, [0], [0])
        with pytest.raises(LLMException, match="PROMPT cluster may hold"):
            filled_cache(decoder, 52)
        with pytest.raises(LLMException, match="DECODER cluster calls link_clusters"):
            prompt.link_clusters([remote_info(1, "127.0.0.1", 1)])
        with pytest.raises(LLMException) as caught:
            prompt.kv_cache_manager.allocate_blocks_cache(
                CacheDesc(1, (POOL_BYTES, 4), DataType.DT_FLOAT, Placement.HOST)
            )
        assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


def test_v1_and_v2_do_not_link():
    with (
        make_end("auto", "127.0.0.1:0", v2=True) as prompt,
        make_end("auto", role=LLMRole.DECODER, v2=False) as decoder,
    ):
        assert decoder.link_clusters([cluster_info(prompt)], timeout=LINK_MS)[0] is LLMStatusCode.LLM_LINK_FAILED
        assert "enable_cache_manager" in str(decoder.link_failure(prompt.cluster_id))


def test_views_outlive_the_manager():
    end = make_end()
    cache = plain_cache(end, 60)
    view = cache.numpy()[0]
    fill(cache, 61)
    kept = view.copy()
    end.finalize()
    del end, cache
    np.testing.assert_array_equal(view, kept)
