# SPDX-License-Identifier: Apache-2.0
"""Flow 4: `transfer_cache_async`, layers released one by one by another thread, to one or several destinations.

The prompt computes a layer only just before it releases it. So a layer that was sent too early arrives with the wrong
bytes, and a destination that has more than the released layers is seen as well.
"""

from __future__ import annotations

import pytest

from datadist_core import LLMStatusCode
from datadist_core.tests.flow_checks import (
    CHEAP,
    EVERY_BACKEND,
    OK,
    V1_AND_V2,
    V2_ONLY,
    entry,
    eventually,
    introduce,
    linked_pair,
    refused,
    same,
    start_decoder,
    ways,
)
from datadist_core.tests.flow_child import PAGE_BYTES, content

S = LLMStatusCode
#: 4 layers of 2 tensors of 8 KiB: 16 blocks of 512 bytes, or 4 batch entries of 2048 bytes.
NUM_LAYERS = 4
TENSOR_BYTES = 8192
BLOCK_BYTES = 512
SYNCHRONIZER = """
class Layers(LayerSynchronizer):
    def __init__(self):
        self.asked = []
        self.released = [threading.Event() for _ in range(4)]

    def synchronize_layer(self, layer_index, timeout_in_millis):
        self.asked.append(layer_index)
        return self.released[layer_index].wait(timeout_in_millis / 1000)

def compute(layer, seed=1):
    rows = content(seed, 8, 8192)
    for tensor in (2 * layer, 2 * layer + 1):
        cache.numpy()[tensor].view(np.uint8).reshape(-1)[:] = rows[tensor]

sync = Layers()
"""
BLOCKS = "cache = blocks(num_tensors=8, shape=(16, 256)); fill(cache, seed)"
ENTRIES = "cache = contiguous(num_tensors=8, shape=(4, 1024)); fill(cache, seed)"


@pytest.fixture
def pair(processes, way):
    with linked_pair(processes, way) as ends:
        prepare(*ends)
        yield ends


def prepare(p, d):
    p.run(SYNCHRONIZER)
    p.run(BLOCKS, seed=1000)
    d.run(BLOCKS, seed=3)


@pytest.fixture
def two_decoders(processes, way):
    """(P, D, D2), in three processes; D2 has linked to P as well. P knows them as D and D2."""
    with linked_pair(processes, way) as (p, d):
        second = processes.terminal(way, 2)
        try:
            start_decoder(second, way)
            introduce(P=p, D=d, D2=second)
            assert second.link(p) == (OK, [OK])
            prepare(p, d)
            second.run(BLOCKS, seed=4)
            yield p, d, second
        finally:
            second.close()


def source():
    """What P computes."""
    return content(1, 8, TENSOR_BYTES)


def before(seed=3):
    """What a decoder has before."""
    return content(seed, 8, TENSOR_BYTES)


def block(index):
    return entry(index, BLOCK_BYTES)


def with_layers(expected, moved, layers):
    """`expected` after (target bytes, source bytes) pairs of the tensors of these layers were put in."""
    expected = expected.copy()
    for layer in layers:
        for tensor in (2 * layer, 2 * layer + 1):
            for target, origin in moved:
                expected[tensor, target] = source()[tensor, origin]
    return expected


def release_one_by_one(p, d, moved, expected, layers=range(NUM_LAYERS)):
    """Compute and release a layer, wait until D has it; then D must have that and no other byte more."""
    for layer in layers:
        p.run("compute(layer); sync.released[layer].set()", layer=layer)
        expected = with_layers(expected, moved, [layer])
        tensors = slice(2 * layer, 2 * layer + 2)
        eventually(lambda: (d.run("memory(cache)") == expected)[tensors].all(), f"layer {layer} is at D")  # noqa: B023
        same(d.run("memory(cache)"), expected)
    return expected


TWO_BLOCKS = [(block(2), block(0)), (block(3), block(1))]
SEND_BLOCKS = "task = manager.transfer_cache_async(cache, sync, configs, [0, 1], [2, 3])"
BY_ADDRESS = "configs = [TransferConfig(D, addrs)]"


def test_layers_arrive_one_by_one(pair):
    p, d = pair
    addrs = d.run("cache.tensor_addrs")
    p.run(BY_ADDRESS, addrs=addrs)
    p.run(SEND_BLOCKS)
    release_one_by_one(p, d, TWO_BLOCKS, before())
    assert p.run("task.synchronize(), task.get_results(), sync.asked") == (OK, [OK], [0, 1, 2, 3])
    assert p.run("task.synchronize(1000), task.get_results(1000)") == (OK, [OK])
    same(p.run("memory(cache)"), source())
    assert (p.run("used()"), d.run("used()")) == (PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_a_layer_released_early_waits_for_those_before_it(pair):
    p, d = pair
    p.run(BY_ADDRESS, addrs=d.run("cache.tensor_addrs"))
    p.run(SEND_BLOCKS)
    p.run("compute(2); sync.released[2].set()")
    expected = release_one_by_one(p, d, TWO_BLOCKS, before(), range(1))
    p.run("compute(1); compute(3); sync.released[1].set(); sync.released[3].set()")
    assert p.run("task.synchronize(20000)") is OK
    same(d.run("memory(cache)"), with_layers(expected, TWO_BLOCKS, [1, 2, 3]))


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_a_range_of_layers_needs_only_their_addresses(pair):
    p, d = pair
    p.run("configs = [TransferConfig(D, addrs, range(1, 3))]", addrs=d.run("cache.tensor_addrs[2:6]"))
    p.run(SEND_BLOCKS)
    release_one_by_one(p, d, TWO_BLOCKS, before(), range(1, 3))
    assert p.run("task.synchronize(20000), sync.asked") == (OK, [1, 2])
    too_many = "manager.transfer_cache_async(cache, sync, [TransferConfig(D, addrs, range(1, 3))], [0], [0])"
    refused(p, S.LLM_PARAM_INVALID, too_many, match="dst_addrs", addrs=d.run("cache.tensor_addrs"))


@pytest.mark.parametrize("way", V2_ONLY, indirect=True)
def test_blocks_by_cache_key(pair):
    p, d = pair
    d.run("manager.deallocate_blocks_cache(cache)")
    d.run("cache = blocks(BlocksCacheKey(D), 8, (16, 256)); fill(cache, 3)")
    p.run("configs = [TransferWithCacheKeyConfig(BlocksCacheKey(D))]")
    p.run(SEND_BLOCKS)
    expected = release_one_by_one(p, d, TWO_BLOCKS, before())
    assert p.run("task.synchronize(20000)") is OK
    # The upper half of the layers of P into the lower half of D's.
    ranges = "src_layer_range=range(2, 4), dst_layer_range=range(0, 2)"
    p.run(f"configs = [TransferWithCacheKeyConfig(BlocksCacheKey(D), {ranges})]")
    p.run("manager.transfer_cache_async(cache, sync, configs, [7], [9]).synchronize(20000)")
    expected[:4, block(9)] = source()[4:, block(7)]
    same(d.run("memory(cache)"), expected)


@pytest.mark.parametrize("by_address", [True, False], ids=["address", "key"])
def test_contiguous_to_contiguous(pair, by_address):
    """Entry 3 of P into entry 1 of D."""
    p, d = pair
    p.run(ENTRIES, seed=1000)
    cache_id, addrs = d.run(ENTRIES + "; cache.cache_id, [a + 2048 for a in cache.tensor_addrs]", seed=3)
    if by_address:
        p.run("configs = [TransferConfig(D, addrs, src_batch_index=3)]", addrs=addrs)
    else:
        key = "CacheKeyByIdAndIndex(D, cache_id, 1)"
        p.run(f"configs = [TransferWithCacheKeyConfig({key}, src_batch_index=3)]", cache_id=cache_id)
    p.run("task = manager.transfer_cache_async(cache, sync, configs)")
    release_one_by_one(p, d, [(entry(1), entry(3))], before())
    assert p.run("task.synchronize(20000), task.get_results(20000)") == (OK, [OK])


def test_contiguous_to_blocks_by_address(pair):
    """Entry 2 of P (2048 bytes) is four blocks of D."""
    p, d = pair
    p.run(ENTRIES, seed=1000)
    p.run("configs = [TransferConfig(D, addrs, src_batch_index=2)]", addrs=d.run("cache.tensor_addrs"))
    to_blocks = "dst_block_indices=[9, 2, 15, 0]"
    refused(p, S.LLM_PARAM_INVALID, f"manager.transfer_cache_async(cache, sync, configs, {to_blocks})")
    p.run(f"task = manager.transfer_cache_async(cache, sync, configs, {to_blocks}, dst_block_memory_size=512)")
    moved = [(block(target), block(8 + i)) for i, target in enumerate([9, 2, 15, 0])]
    release_one_by_one(p, d, moved, before())
    assert p.run("task.synchronize(20000)") is OK


@pytest.mark.parametrize("way", V2_ONLY, indirect=True)
def test_contiguous_to_blocks_by_cache_key(pair):
    p, d = pair
    p.run(ENTRIES, seed=1000)
    d.run("manager.deallocate_blocks_cache(cache)")
    d.run("cache = blocks(BlocksCacheKey(D, 3), 8, (16, 256)); fill(cache, 3)")
    p.run("configs = [TransferWithCacheKeyConfig(BlocksCacheKey(D, 3), src_batch_index=1)]")
    p.run("task = manager.transfer_cache_async(cache, sync, configs, None, [3, 4, 5, 6])")
    moved = [(block(3 + i), block(4 + i)) for i in range(4)]
    release_one_by_one(p, d, moved, before())
    assert p.run("task.synchronize(20000)") is OK


# -- several destinations


def test_destinations_fail_and_succeed_on_their_own(two_decoders):
    """Of seven destinations two are good; the others are unknown, wrong or gone, each in its own way."""
    p, d, d2 = two_decoders
    d.run("neighbour = blocks(num_tensors=8, shape=(16, 256)); fill(neighbour, 5)")
    addrs, addrs2 = d.run("cache.tensor_addrs"), d2.run("cache.tensor_addrs")
    cache_id = d.run(
        "gone = blocks(num_tensors=8, shape=(16, 256)); manager.deallocate_blocks_cache(gone); gone.cache_id"
    )
    p.run(
        """
        configs = [
            TransferConfig(D, addrs),
            TransferConfig(999_999, addrs),
            TransferConfig(D, [a + (1 << 40) for a in addrs]),
            TransferConfig(D2, addrs2),
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(D2, 999_999)),
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(D, gone)),
            TransferConfig(D, [addrs[-1] + 7000] * 8),  # the end of block 3 would be behind the end of the cache
        ]
        """,
        addrs=addrs,
        addrs2=addrs2,
        gone=cache_id,
    )
    p.run(SEND_BLOCKS)
    release_one_by_one(p, d, TWO_BLOCKS, before())
    overall, each = p.run("task.synchronize(20000), task.get_results(20000)")
    missing = S.LLM_KV_CACHE_NOT_EXIST
    assert each == [OK, S.LLM_NOT_YET_LINK, S.LLM_PARAM_INVALID, OK, missing, missing, S.LLM_PARAM_INVALID]
    assert overall is S.LLM_NOT_YET_LINK
    same(d2.run("memory(cache)"), with_layers(before(4), TWO_BLOCKS, range(NUM_LAYERS)))
    same(d.run("memory(neighbour)"), before(5))
    for end in ("D", "D2"):
        p.run(f"datadist.check_link_status({end})")


@pytest.mark.slow
@pytest.mark.parametrize("way", [w for w in V1_AND_V2 if w.marks], indirect=True)
@pytest.mark.parametrize("moment", ["before", "between two layers"])
def test_a_destination_that_dies_does_not_disturb_the_other(two_decoders, moment):
    p, d, d2 = two_decoders
    addrs, addrs2 = d.run("cache.tensor_addrs"), d2.run("cache.tensor_addrs")
    p.run("configs = [TransferConfig(D2, addrs2), TransferConfig(D, addrs)]", addrs=addrs, addrs2=addrs2)
    if moment == "before":
        d2.process.kill()
    p.run(SEND_BLOCKS)
    expected = release_one_by_one(p, d, TWO_BLOCKS, before(), range(1))
    if moment != "before":
        at_d2 = with_layers(before(4), TWO_BLOCKS, [0])
        eventually(lambda: (d2.run("memory(cache)") == at_d2).all(), "layer 0 is at D2")
        d2.process.kill()
    release_one_by_one(p, d, TWO_BLOCKS, expected, range(1, NUM_LAYERS))
    overall, each = p.run("task.synchronize(20000), task.get_results(20000)")
    assert each[0] in (S.LLM_NOT_YET_LINK, S.LLM_LINK_FAILED)
    assert each[1] is OK
    assert overall is each[0]
    p.run("datadist.check_link_status(D)")


def test_results_when_time_runs_out(two_decoders):
    """None: not started. LLM_TIMEOUT: started, not ended. The task goes on all the same."""
    p, d, d2 = two_decoders
    addrs, addrs2 = d.run("cache.tensor_addrs"), d2.run("cache.tensor_addrs[4:]")
    p.run("configs = [TransferConfig(D, addrs), TransferConfig(D2, addrs2, range(2, 4))]", addrs=addrs, addrs2=addrs2)
    p.run(SEND_BLOCKS)
    assert p.run("task.get_results(30), task.synchronize(30)") == ([None, None], S.LLM_TIMEOUT)
    expected = release_one_by_one(p, d, TWO_BLOCKS, before(), range(1))
    assert p.run("task.get_results(30), task.synchronize(30)") == ([S.LLM_TIMEOUT, None], S.LLM_TIMEOUT)
    expected = release_one_by_one(p, d, TWO_BLOCKS, expected, range(1, 3))
    assert p.run("task.get_results(30)[0]") is S.LLM_TIMEOUT
    release_one_by_one(p, d, TWO_BLOCKS, expected, range(3, 4))
    assert p.run("task.get_results(20000), task.synchronize()") == ([OK, OK], OK)
    same(d2.run("memory(cache)"), with_layers(before(4), TWO_BLOCKS, [2, 3]))


# -- the synchroniser


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("return False", S.LLM_FAILED),
        ("raise ValueError('no such stream')", S.LLM_FAILED),
        ("raise LLMException('late', LLMStatusCode.LLM_TIMEOUT)", S.LLM_TIMEOUT),
    ],
)
def test_a_synchroniser_that_fails_ends_the_task(pair, answer, status):
    """Layers 0 and 1 were released and arrive; 2 and 3 do not."""
    p, d = pair
    p.run(f"""
        class Failing(LayerSynchronizer):
            def synchronize_layer(self, layer_index, timeout_in_millis):
                if layer_index < 2:
                    compute(layer_index)
                    return True
                {answer}
    """)
    p.run(BY_ADDRESS, addrs=d.run("cache.tensor_addrs"))
    p.run("task = manager.transfer_cache_async(cache, Failing(), configs, [0, 1], [2, 3])")
    assert p.run("task.synchronize(20000), task.get_results(20000)") == (status, [status])
    same(d.run("memory(cache)"), with_layers(before(), TWO_BLOCKS, [0, 1]))
    p.run("for event in sync.released: event.set()")
    p.run("compute(2); compute(3)")
    p.run(SEND_BLOCKS)
    assert p.run("task.synchronize(20000)") is OK
    same(d.run("memory(cache)"), with_layers(before(), TWO_BLOCKS, range(NUM_LAYERS)))


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_the_source_stays_until_the_task_has_ended(pair):
    p, d = pair
    p.run(BY_ADDRESS, addrs=d.run("cache.tensor_addrs"))
    p.run("fill(cache, 1)")
    p.run(SEND_BLOCKS)
    p.run("sync.released[0].set()")
    expected = with_layers(before(), TWO_BLOCKS, [0])
    eventually(lambda: (d.run("memory(cache)") == expected).all(), "layer 0 is at D")
    p.run("manager.deallocate_blocks_cache(cache)")
    assert p.run("used()") == PAGE_BYTES
    p.run("for event in sync.released: event.set()")
    assert p.run("task.synchronize(20000), used()") == (OK, 0)
    same(d.run("memory(cache)"), with_layers(before(), TWO_BLOCKS, range(NUM_LAYERS)))


# -- who may


def test_in_v1_only_a_prompt_sends_layers(pair, way):
    p, d = pair
    d.run(SYNCHRONIZER)
    script = "task = manager.transfer_cache_async(cache, sync, [TransferConfig(P, addrs)], [0, 1], [2, 3])"
    addrs = p.run("cache.tensor_addrs")
    if not way.v2:
        refused(d, S.LLM_PARAM_INVALID, script, addrs=addrs)
        same(p.run("memory(cache)"), content(1000, 8, TENSOR_BYTES))
        return
    d.run(script, addrs=addrs)
    release_one_by_one(d, p, TWO_BLOCKS, content(1000, 8, TENSOR_BYTES))
    assert d.run("task.synchronize(20000)") is OK


@pytest.mark.parametrize("way", V2_ONLY, indirect=True)
def test_with_remote_cache_accessible_only_cache_keys(processes, way):
    with linked_pair(processes, way, enable_remote_cache_accessible=True) as (p, d):
        prepare(p, d)
        p.run(BY_ADDRESS, addrs=d.run("cache.tensor_addrs"))
        refused(p, S.LLM_PARAM_INVALID, SEND_BLOCKS, match="TransferWithCacheKeyConfig")
        p.run(ENTRIES, seed=1000)
        cache_id = d.run(ENTRIES + "; cache.cache_id", seed=3)
        p.run("configs = [TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(D, i, 1))]", i=cache_id)
        p.run("task = manager.transfer_cache_async(cache, sync, configs)")
        release_one_by_one(p, d, [(entry(1), entry(0))], before())
        assert p.run("task.synchronize(20000)") is OK


# -- the checks themselves


@pytest.mark.parametrize("way", ways(CHEAP[0]), indirect=True)
def test_the_checks_see_a_layer_that_was_sent_too_early(pair):
    p, d = pair
    p.run(BY_ADDRESS, addrs=d.run("cache.tensor_addrs"))
    p.run("sync.released[1].set()")  # although layer 1 is not computed yet
    p.run(SEND_BLOCKS)
    p.run("compute(0); sync.released[0].set()")
    wrong = with_layers(before(), TWO_BLOCKS, [0])
    wrong[2:4, 1024:2048] = content(1000, 8, TENSOR_BYTES)[2:4, :1024]
    eventually(lambda: (d.run("memory(cache)") == wrong).all(), "layers 0 and 1 are at D")
    with pytest.raises(AssertionError, match=r"first at \[tensor, byte\] = \[2, 1024\]"):
        same(d.run("memory(cache)"), with_layers(before(), TWO_BLOCKS, [0]))
    with pytest.raises(AssertionError, match="wrong bytes"):
        same(d.run("memory(cache)"), with_layers(before(), TWO_BLOCKS, [0, 1]))
    p.run("for event in sync.released: event.set()")
    assert p.run("task.synchronize(20000)") is OK
