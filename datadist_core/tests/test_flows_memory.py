# SPDX-License-Identifier: Apache-2.0
"""Flow 2, second half: when the memory of contiguous caches is freed, and the caller's own memory."""

from __future__ import annotations

import pytest

from datadist_core import LLMStatusCode
from datadist_core.tests.flow_checks import (
    BETWEEN_PROCESSES,
    CHEAP,
    EIGHT_KEYS,
    OK,
    Way,
    entry,
    eventually,
    introduce,
    linked_pair,
    refused,
    same,
    start_decoder,
    ways,
    with_entries,
)
from datadist_core.tests.flow_child import PAGE_BYTES, Failed, content

S = LLMStatusCode


# -- life of the memory


def test_memory_is_held_by_the_id_and_by_every_key(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    assert p.run("used()") == PAGE_BYTES
    p.run("manager.deallocate_cache(cache); manager.deallocate_cache(cache)")
    assert p.run("used()") == PAGE_BYTES
    refused(p, S.LLM_KV_CACHE_NOT_EXIST, "manager.copy_cache(cache, cache, 0, 1)")
    for i in range(7):  # peers still may
        d.run("manager.pull_cache(CacheKey(P, 100 + i), cache, i)", i=i)
        assert p.run("used()") == PAGE_BYTES
    same(d.run("memory(cache)"), with_entries(3, {i: i for i in range(7)}))
    p.run("manager.remove_cache_key(CacheKey(P, 107))")
    assert p.run("used()") == 0
    p.run("manager.remove_cache_key(CacheKey(P, 107)); manager.deallocate_cache(cache)")
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, 107), cache)")
    stats = p.run("manager.pool_stats(Placement.DEVICE)")
    assert stats.largest_free_bytes == stats.free_bytes == stats.total_bytes
    assert stats.high_water_bytes == PAGE_BYTES


def test_the_last_pull_frees_a_deallocated_cache(pair):
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, 1), CacheKey(P, 2)]); fill(cache, 1); manager.deallocate_cache(cache)")
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 2), cache, 2)")
    assert p.run("used()") == PAGE_BYTES
    d.run("manager.pull_cache(CacheKey(P, 1), cache, 1)")
    assert p.run("used()") == 0  # at once: the key is dropped before the pull returns
    same(d.run("memory(cache)"), with_entries(3, {1: 0, 2: 1}))


def test_the_id_holds_a_cache_whose_keys_are_gone(pair):
    p, d = pair
    cache_id = p.run(EIGHT_KEYS + "; cache.cache_id")
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKey(P, 100), cache, 0)")
    p.run("for i in range(1, 8): manager.remove_cache_key(CacheKey(P, 100 + i))")
    assert p.run("used()") == PAGE_BYTES
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, 103), cache)")
    d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i, 3), cache, 1)", i=cache_id)
    same(d.run("memory(cache)"), with_entries(3, {0: 0, 1: 3}))
    p.run("manager.deallocate_cache(cache)")
    assert p.run("used()") == 0
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKeyByIdAndIndex(P, i, 3), cache)", i=cache_id)


def test_a_deallocated_cache_is_reached_by_its_keys_only(pair):
    """Also by a peer that has used its id before."""
    p, d = pair
    cache_id = p.run(EIGHT_KEYS + "; cache.cache_id")
    d.run("cache = contiguous(); fill(cache, 3)")
    d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i, 3), cache, 1)", i=cache_id)
    p.run("manager.deallocate_cache(cache)")
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKeyByIdAndIndex(P, i, 3), cache, 2)", i=cache_id)
    d.run("manager.pull_cache(CacheKey(P, 107), cache, 4)")
    same(d.run("memory(cache)"), with_entries(3, {1: 3, 4: 7}))


def test_remove_cache_key_before_the_pull(pair):
    p, d = pair
    p.run(EIGHT_KEYS)
    d.run("cache = contiguous(); fill(cache, 3)")
    p.run("manager.remove_cache_key(CacheKey(P, 104)); manager.remove_cache_key(CacheKey(P, 4711))")
    refused(d, S.LLM_KV_CACHE_NOT_EXIST, "manager.pull_cache(CacheKey(P, 104), cache)")
    d.run("manager.pull_cache(CacheKey(P, 105), cache)")
    same(d.run("memory(cache)"), with_entries(3, {0: 5}))


def test_freed_memory_is_used_again_and_peers_see_the_new_content(pair):
    p, d = pair
    d.run("cache = contiguous(); fill(cache, 3)")
    for round_ in range(5):
        p.run("cache = contiguous([CacheKey(P, 1)]); fill(cache, seed)", seed=20 + round_)
        d.run("manager.pull_cache(CacheKey(P, 1), cache, 6)")
        same(d.run("memory(cache)"), with_entries(3, {6: 0}, content(20 + round_)))
        p.run("manager.deallocate_cache(cache)")
        assert p.run("used()") == 0
    assert p.run("manager.pool_stats(Placement.DEVICE).high_water_bytes") == PAGE_BYTES


PULL_ALL = """
pulled, missing = [], []
for request in requests:
    try:
        manager.pull_cache(CacheKey(P, request), cache, request)
        pulled.append(request)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise
        missing.append(request)
pulled, missing
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(Way("shm", False), Way("tcp", False), Way("shm", True)), indirect=True)
def test_two_decoders_race_for_the_same_keys(processes, way):
    """Every key is pulled by one of them at least, what was pulled is right, and all memory comes back."""
    with linked_pair(processes, way) as (p, d):
        other = processes.terminal(way, 2)
        try:
            start_decoder(other, way)
            introduce(P=p, D=d, D2=other)
            assert other.link(p) == (OK, [OK])
            p.run("cache = contiguous([CacheKey(P, i) for i in range(8)]); fill(cache, 1)")
            p.run("manager.deallocate_cache(cache)")
            for end in (d, other):
                end.run("cache = contiguous(); fill(cache, 3)")
            for end, order in ((d, range(8)), (other, range(7, -1, -1))):
                end.begin(PULL_ALL, requests=list(order))
            results = [end.finish() for end in (d, other)]
            assert {request for pulled, _ in results for request in pulled} == set(range(8))
            for end, (pulled, _) in zip((d, other), results, strict=True):
                got = end.run("memory(cache)")
                expected = with_entries(3, {i: i for i in pulled})
                for i in pulled:
                    same(got[:, entry(i)], expected[:, entry(i)])
            assert p.run("used()") == 0
        finally:
            other.close()


PULL_IN_THREADS = """
wrong, gone, failures = [], [], []

def pull(requests):
    cache = contiguous()
    for request in requests:
        try:
            manager.pull_cache(CacheKey(P, request), cache, 5)
        except LLMException as error:
            missing = error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            (gone if missing else failures).append((request, str(error)))
            continue
        if (memory(cache)[:, 10240:12288] != content(request)[:, :2048]).any():
            wrong.append(request)

threads = [threading.Thread(target=pull, args=(range(i, 60, 4),), daemon=True) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(50)
wrong, failures, [request for request, _ in gone]
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(Way("shm", False), Way("shm", True), Way("tcp", False)), indirect=True)
def test_keys_removed_while_threads_pull(pair):
    """A pull gets the right bytes or LLM_KV_CACHE_NOT_EXIST, never those of a cache made in freed memory."""
    p, d = pair
    p.run("""
        for request in range(60):
            cache = contiguous([CacheKey(P, request)])
            fill(cache, request)
            manager.deallocate_cache(cache)
    """)
    d.begin(PULL_IN_THREADS)
    p.run("""
        for request in range(59, 0, -3):
            manager.remove_cache_key(CacheKey(P, request))
            reused = contiguous()
            fill(reused, 1000)
            manager.deallocate_cache(reused)
    """)
    wrong, failures, gone = d.finish()
    assert (wrong, failures) == ([], [])
    assert set(gone) <= set(range(59, 0, -3))
    assert p.run("used()") == 0


ALLOCATE_PULL_FREE = """
wrong, failures = [], []

def come_and_go(thread):
    for round_ in range(12):
        mine = blocks(BlocksCacheKey(me, thread))
        try:
            fill(mine, thread)
            fetched = blocks()
            manager.pull_blocks(BlocksCacheKey(other, 100), fetched, [0, 15], [1, 2])
            if (memory(fetched)[:, 1024:2048] != content(other)[:, :1024]).any():
                wrong.append((thread, round_))
            manager.pull_blocks(BlocksCacheKey(other, thread), fetched, [0], [0])
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                failures.append((thread, round_, str(error)))
        manager.deallocate_blocks_cache(fetched)
        manager.deallocate_blocks_cache(mine)

threads = [threading.Thread(target=come_and_go, args=(i,), daemon=True) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(50)
wrong, failures, [thread.is_alive() for thread in threads], used()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(Way("shm", True), Way("tcp", True), Way("auto", True)), indirect=True)
def test_both_ends_pull_and_free_at_once(pair):
    """Each end frees what the other one may be pulling: nobody waits for the other for ever, no byte is wrong."""
    p, d = pair
    for end in pair:
        end.run("lasting = blocks(BlocksCacheKey(me, 100)); fill(lasting, me)", me=end.cluster_id)
    for end, other in ((p, d), (d, p)):
        end.begin(ALLOCATE_PULL_FREE, other=other.cluster_id)
    for end in pair:
        assert end.finish() == ([], [], [False] * 4, PAGE_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(*BETWEEN_PROCESSES), indirect=True)
def test_a_pull_that_ran_out_of_time_leaves_the_link_usable(processes, way):
    with linked_pair(processes, way, sync_kv_timeout="300") as (p, d):
        cache_id = p.run(EIGHT_KEYS + "; cache.cache_id")
        d.run("cache = contiguous(); fill(cache, 3)")
        pull = "manager.pull_cache(CacheKeyByIdAndIndex(P, i, 4), cache, 2)"
        with p.process.stopped():
            refused(d, S.LLM_TIMEOUT if way.v2 else S.LLM_WAIT_PROCESS_TIMEOUT, pull, i=cache_id)
        d.run("fill(cache, 3); datadist.check_link_status(P)")
        eventually(lambda: _is_in_time(d, pull, i=cache_id), "a pull is in time")
        same(d.run("memory(cache)"), with_entries(3, {2: 4}))
        eventually(lambda: _is_in_time(d, "manager.pull_cache(CacheKey(P, 104), cache, 3)"), "a pull is in time")
        same(d.run("memory(cache)"), with_entries(3, {2: 4, 3: 4}))


def _is_in_time(terminal, pull, **values):
    """Whether it is done within its 300 ms, which on a busy machine it need not be."""
    try:
        terminal.run(pull, **values)
    except Failed as failed:
        if failed.status_code not in (S.LLM_TIMEOUT, S.LLM_WAIT_PROCESS_TIMEOUT):
            raise
        return False
    return True


# -- the caller's own memory

OWN = """
own = np.empty((4, 8, 1024), np.float16)
desc = CacheDesc(4, (8, 1024), DataType.DT_FLOAT16, placement)
addrs = [tensor.ctypes.data for tensor in own]
"""
#: Only in-process and network backends reach memory that lies outside the pools; "auto" falls back to them.
OWN_MEMORY = ways(*CHEAP, Way("tcp", False), Way("tcp", True), Way("auto", True))


@pytest.mark.parametrize("way", OWN_MEMORY, indirect=True)
@pytest.mark.parametrize(
    ("placement", "accessible", "reachable"),
    [("DEVICE", "None", True), ("DEVICE", "False", False), ("HOST", "True", True), ("HOST", "None", False)],
)
def test_register_own_memory(pair, placement, accessible, reachable):
    p, d = pair
    d.run("cache = contiguous(); fill(cache, 3)")
    p.run(OWN.replace("placement", f"Placement.{placement}"))
    p.run(f"cache = manager.register_cache(desc, addrs, [CacheKey(P, 1), CacheKey(P, 2)], {accessible})")
    p.run("fill(cache, 1)")
    same(p.run("own.view(np.uint8).reshape(4, -1)"), content(1))
    pull = "manager.pull_cache(CacheKey(P, 2), cache, batch_index=3)"
    if reachable:
        d.run(pull)
        same(d.run("memory(cache)"), with_entries(3, {3: 1}))
    else:
        refused(d, S.LLM_PARAM_INVALID, pull, match="remote_accessible")
        same(d.run("memory(cache)"), content(3))
    assert p.run("used(), used(Placement.HOST)") == (0, 0)


@pytest.mark.parametrize("way", OWN_MEMORY, indirect=True)
def test_register_and_unregister_after_linking(pair):
    p, d = pair
    # D's target is memory of its own, too.
    d.run(OWN.replace("placement", "Placement.HOST") + "cache = manager.register_cache(desc, addrs); fill(cache, 3)")
    for seed in (11, 12):
        p.run(OWN.replace("placement", "Placement.HOST"))
        cache_id = p.run(
            "cache = manager.register_cache(desc, addrs, [CacheKey(P, 1)], remote_accessible=True);"
            "fill(cache, seed); cache.cache_id",
            seed=seed,
        )
        d.run("manager.pull_cache(CacheKeyByIdAndIndex(P, i, 7), cache, 1)", i=cache_id)
        same(d.run("own.view(np.uint8).reshape(4, -1)"), with_entries(3, {1: 7}, content(seed)))
        p.run("manager.unregister_cache(cache.cache_id); manager.unregister_cache(cache.cache_id)")
        for key in (f"CacheKeyByIdAndIndex(P, {cache_id})", "CacheKey(P, 1)"):
            refused(d, S.LLM_KV_CACHE_NOT_EXIST, f"manager.pull_cache({key}, cache)")
    p.run("fill(cache, 13)")  # the memory is the caller's again
    same(d.run("own.view(np.uint8).reshape(4, -1)"), with_entries(3, {1: 7}, content(12)))


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(Way("shm", True)), indirect=True)
def test_shm_reaches_registered_memory_that_lies_in_a_pool(pair):
    p, d = pair
    p.run("home = contiguous(); view = manager.register_cache(home.cache_desc, home.tensor_addrs, [CacheKey(P, 1)])")
    p.run("fill(home, 1)")
    d.run("cache = contiguous(); fill(cache, 3); manager.pull_cache(CacheKey(P, 1), cache, 2)")
    same(d.run("memory(cache)"), with_entries(3, {2: 0}))
    p.run("manager.unregister_cache(view.cache_id)")
    same(p.run("memory(home)"), content(1))
    p.run(OWN.replace("placement", "Placement.DEVICE") + "own[:] = 1")
    p.run("own_cache = manager.register_cache(desc, addrs, [CacheKey(P, 2)])")
    refused(d, tuple(S), "manager.pull_cache(CacheKey(P, 2), cache)", match="shm")


# -- the checks themselves


@pytest.mark.parametrize("way", ways(CHEAP[0]), indirect=True)
def test_the_checks_see_memory_that_is_freed_too_early_or_not_at_all(pair):
    """A key removed by mistake frees the memory and fails the pull; one forgotten keeps it."""
    p, d = pair
    p.run("cache = contiguous([CacheKey(P, 1), CacheKey(P, 2)]); manager.deallocate_cache(cache)")
    p.run("manager.remove_cache_key(CacheKey(P, 1))")
    with pytest.raises(AssertionError):
        assert p.run("used()") == 0
    p.run("manager.remove_cache_key(CacheKey(P, 2))")
    with pytest.raises(AssertionError):
        assert p.run("used()") == PAGE_BYTES
    with pytest.raises(Failed, match="LLM_KV_CACHE_NOT_EXIST"):
        d.run("manager.pull_cache(CacheKey(P, 2), contiguous())")
