# SPDX-License-Identifier: Apache-2.0
"""Flows 1, 7 and 8: life of a link, death of either end, change of roles, many prompts; as a user writes them."""

from __future__ import annotations

import socket

import pytest

from datadist_core import LLMRole, LLMStatusCode
from datadist_core.testing.ports import free_port
from datadist_core.tests.flow_checks import (
    BETWEEN_PROCESSES,
    CHEAP,
    EVERY_BACKEND,
    OK,
    Way,
    eventually,
    introduce,
    linked_pair,
    opened,
    refused,
    same,
    start_decoder,
    start_prompt,
    ways,
)
from datadist_core.tests.flow_child import PAGE_BYTES, Failed, Process, content

S = LLMStatusCode
NO_LINK = (S.LLM_NOT_YET_LINK, S.LLM_LINK_FAILED)


def fill_blocks(prompt, seed):
    prompt.run("cache = blocks(BlocksCacheKey(P)); fill(cache, seed)", seed=seed)


def pulls_right(decoder, seed):
    """Pull [0, 1] -> [2, 3] out of the cache that `fill_blocks(prompt, seed)` made, and look at every byte."""
    decoder.run("cache = blocks(); fill(cache, 999)")
    decoder.run("manager.pull_blocks(BlocksCacheKey(P), cache, [0, 1], [2, 3])")
    expected = content(999)
    expected[:, 2048:4096] = content(seed)[:, :2048]
    same(decoder.run("memory(cache)"), expected)


# -- flow 1


def test_the_main_flows_between_two_processes_in_short(processes):
    """The one test with real processes that is not slow: link, three kinds of transfer, a crash, finalize."""
    way = Way("auto", True)
    with linked_pair(processes, way) as (p, d):
        fill_blocks(p, 1)
        pulls_right(d, 1)
        p.run("entries = contiguous([CacheKey(P, 1), CacheKey(P, 2)]); fill(entries, 2)")
        d.run("entries = contiguous(); fill(entries, 3); manager.pull_cache(CacheKey(P, 2), entries, 1)")
        expected = content(3)
        expected[:, 2048:4096] = content(2)[:, 2048:4096]
        same(d.run("memory(entries)"), expected)
        p.run("""
            class Ready(LayerSynchronizer):
                def synchronize_layer(self, layer_index, timeout_in_millis):
                    return True
        """)
        p.run("configs = [TransferConfig(D, addrs)]", addrs=d.run("fill(cache, 4); cache.tensor_addrs"))
        assert p.run("manager.transfer_cache_async(cache, Ready(), configs, [0], [15]).synchronize(20000)") is OK
        expected = content(4)
        expected[:, -1024:] = content(1)[:, :1024]
        same(d.run("memory(cache)"), expected)
        d.process.kill()
        eventually(lambda: _is_unlinked(p, "D"), "P notices")
        again = processes.terminal(way, 1)
        start_decoder(again, way, cluster_id=d.cluster_id)
        introduce(P=p, D=again)
        assert again.link(p) == (OK, [OK])
        pulls_right(again, 1)
        assert again.unlink(p) == (OK, [OK])
        again.close()


def test_link_check_unlink_finalize(processes, way):
    with opened(processes, way, 2) as (p, d):
        start_prompt(p, way)
        start_decoder(d, way)
        introduce(P=p, D=d)
        refused(d, S.LLM_NOT_YET_LINK, "datadist.check_link_status(P)")
        assert d.link(p) == (OK, [OK])
        assert d.run("datadist.check_link_status(P)") is None
        assert p.run("datadist.check_link_status(D)") is None
        assert d.link(p) == (S.LLM_ALREADY_LINK, [S.LLM_ALREADY_LINK])
        d.run("datadist.check_link_status(P)")
        assert d.unlink(p) == (OK, [OK])
        refused(d, S.LLM_NOT_YET_LINK, "datadist.check_link_status(P)")
        refused(p, S.LLM_NOT_YET_LINK, "datadist.check_link_status(D)")
        assert d.unlink(p) == (S.LLM_NOT_YET_LINK, [S.LLM_NOT_YET_LINK])
        assert d.link(p) == (OK, [OK])
        fill_blocks(p, 1)
        pulls_right(d, 1)
        for end in (p, d):
            end.run("datadist.finalize(); datadist.finalize()")
            refused(end, S.LLM_ENGINE_FINALIZED, "datadist.check_link_status(P)")
            refused(end, S.LLM_ENGINE_FINALIZED, "blocks()")


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_finalize_of_one_end_is_noticed_at_the_other(pair):
    p, d = pair
    p.run("datadist.finalize()")
    eventually(lambda: _is_unlinked(d, "P"), "D notices that P has gone")


def _is_unlinked(terminal, other):
    try:
        terminal.run(f"datadist.check_link_status({other})")
    except Failed as failed:
        return failed.status_code is S.LLM_NOT_YET_LINK  # before that, the link may be breaking
    return False


def test_the_listening_side_unlinks(pair):
    p, d = pair
    assert p.unlink(d) == (OK, [OK])
    refused(d, S.LLM_NOT_YET_LINK, "datadist.check_link_status(P)")
    assert d.link(p) == (OK, [OK])
    fill_blocks(p, 2)
    pulls_right(d, 2)


def test_forced_unlink_on_both_sides(pair):
    p, d = pair
    fill_blocks(p, 3)
    pulls_right(d, 3)
    assert d.unlink(p, force=True) == (OK, [OK])
    # P may have noticed before it was told to.
    overall, each = p.unlink(d, force=True)
    assert overall is each[0]
    assert overall in (OK, S.LLM_NOT_YET_LINK)
    for end, other in ((d, "P"), (p, "D")):
        refused(end, S.LLM_NOT_YET_LINK, f"datadist.check_link_status({other})")
    assert d.link(p) == (OK, [OK])
    pulls_right(d, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(*BETWEEN_PROCESSES), indirect=True)
def test_forced_unlink_does_not_wait_for_a_peer_that_hangs(processes, way):
    with linked_pair(processes, way) as (p, d):
        with p.process.stopped():
            assert d.unlink(p, force=True, timeout=500) == (OK, [OK])
        assert d.link(p) == (OK, [OK])
        with p.process.stopped():
            told = S.LLM_NOTIFY_PROMPT_UNLINK_FAILED
            assert d.unlink(p, timeout=500) == (told, [told])
        refused(d, S.LLM_NOT_YET_LINK, "datadist.check_link_status(P)")
        assert d.link(p) == (OK, [OK])
        fill_blocks(p, 4)
        pulls_right(d, 4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(*BETWEEN_PROCESSES), indirect=True)
def test_a_peer_that_hangs_costs_only_its_own_link(processes, way):
    with opened(processes, way, 3) as (p, other, d):
        start_prompt(p, way)
        start_prompt(other, way)
        start_decoder(d, way)
        introduce(P=p, D=d)
        script = "datadist.link_clusters([cluster(*address) for address in addresses], timeout)"
        with p.process.stopped():
            d.begin(script, addresses=[(end.cluster_id, end.port) for end in (p, other)], timeout=50_000)
            eventually(lambda: not _is_unlinked(other, d.cluster_id), "the other one is linked all the same")
        assert d.finish() == (OK, [OK, OK])
        assert d.unlink(p) == (OK, [OK])
        with p.process.stopped():
            found = d.run(script, addresses=[(p.cluster_id, p.port)], timeout=300)
            assert found == (S.LLM_TIMEOUT, [S.LLM_TIMEOUT])
        d.run("datadist.check_link_status(other)", other=other.cluster_id)
        refused(d, S.LLM_NOT_YET_LINK, "datadist.check_link_status(P)")
        assert d.link(p) == (OK, [OK])
        fill_blocks(p, 4)
        pulls_right(d, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cleanup"),
    [(way, "none") for way in BETWEEN_PROCESSES]
    + [(Way("shm", False), "unlink"), (Way("tcp", True), "unlink"), (Way("shm", True), "force")],
    indirect=["way"],
    ids=str,
)
def test_a_killed_decoder_is_replaced_by_one_with_the_same_id(processes, way, cleanup):
    with opened(processes, way, 1) as [p], Process() as first, Process() as second:
        start_prompt(p, way)
        d = first.terminal()
        start_decoder(d, way)
        introduce(P=p, D=d)
        fill_blocks(p, 5)
        assert d.link(p) == (OK, [OK])
        pulls_right(d, 5)
        used = p.run("used()")
        first.kill()
        if cleanup != "none":
            overall, _ = p.unlink(d, force=cleanup == "force")
            assert overall in (OK, S.LLM_NOT_YET_LINK, S.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
        again = second.terminal()
        start_decoder(again, way, cluster_id=d.cluster_id)
        introduce(P=p, D=again)
        assert again.link(p) == (OK, [OK])
        pulls_right(again, 5)
        p.run("datadist.check_link_status(D)")
        assert p.run("used()") == used


@pytest.mark.slow
@pytest.mark.parametrize("way", ways(*BETWEEN_PROCESSES), indirect=True)
def test_a_killed_prompt_comes_back_on_the_same_port(processes, way):
    with opened(processes, way, 1) as [d], Process() as first, Process() as second:
        p = first.terminal()
        start_prompt(p, way, listen=f"127.0.0.1:{free_port()}")
        start_decoder(d, way)
        introduce(P=p, D=d)
        fill_blocks(p, 6)
        assert d.link(p) == (OK, [OK])
        pulls_right(d, 6)
        first.kill()
        refused(d, NO_LINK, "manager.pull_blocks(BlocksCacheKey(P), cache, [0], [0])")
        overall, _ = d.unlink(p, force=True)
        assert overall in (OK, S.LLM_NOT_YET_LINK)
        overall, each = d.link(p)
        assert overall is each[0]
        assert overall is S.LLM_LINK_FAILED  # nobody listens there now
        again = second.terminal()
        start_prompt(again, way, cluster_id=p.cluster_id, listen=f"127.0.0.1:{p.port}")
        introduce(P=again, D=d)
        assert again.port == p.port
        assert d.link(again) == (OK, [OK])
        fill_blocks(again, 7)
        pulls_right(d, 7)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_many_clusters_in_one_call(processes, way):
    """More than the original's 16; each has its own status, in order, and those that failed leave nothing behind."""
    with opened(processes, way, 2) as (_, d):
        prompts = [processes.terminal(way, 0) for _ in range(18)]
        try:
            for prompt in prompts:
                start_prompt(prompt, way)
            start_decoder(d, way)
            addresses = [(prompt.cluster_id, prompt.port) for prompt in prompts]
            addresses[3] = (777_777, prompts[3].port)
            addresses[8] = (prompts[8].cluster_id, free_port())
            link = "datadist.link_clusters([cluster(*address) for address in addresses], 10000)"
            overall, each = d.run(link, addresses=addresses)
            assert overall is not OK
            assert each[3] is S.LLM_PARAM_INVALID
            assert each[8] is S.LLM_LINK_FAILED
            assert [status for i, status in enumerate(each) if i not in (3, 8)] == [OK] * 16
            assert d.link(prompts[3], prompts[8]) == (OK, [OK, OK])
            for prompt in prompts:
                d.run("datadist.check_link_status(cluster_id)", cluster_id=prompt.cluster_id)
            overall, each = d.unlink(*prompts[:5], d, *prompts[5:])
            assert overall is S.LLM_NOT_YET_LINK
            assert each == [OK] * 5 + [S.LLM_NOT_YET_LINK] + [OK] * 13
        finally:
            for prompt in prompts:
                prompt.close()


# -- flow 7

SWITCH = """
datadist.switch_role(role, switch_options)
datadist.listen_address.port if switch_options else 0
"""


def switch(terminal, role, listen=False):
    options = {"llm.listenIpInfo": "127.0.0.1:0"} if listen else None
    terminal.port = terminal.run(SWITCH, role=role, switch_options=options)


def test_switch_roles_after_unlink_and_pull_the_other_way(processes, way):
    with linked_pair(processes, way, enable_switch_role=True, listen=f"127.0.0.1:{free_port()}") as (p, d):
        fill_blocks(p, 8)
        pulls_right(d, 8)
        for end, role in ((p, LLMRole.DECODER), (d, LLMRole.PROMPT)):
            refused(end, S.LLM_EXIST_LINK, "datadist.switch_role(role)", role=role)
        assert d.unlink(p) == (OK, [OK])
        old_port = p.port
        switch(p, LLMRole.DECODER)
        switch(d, LLMRole.PROMPT, listen=True)
        p.run("manager.deallocate_blocks_cache(cache)")
        introduce(P=d, D=p)  # P is who plays the prompt
        fill_blocks(d, 9)
        assert p.link(d) == (OK, [OK])
        pulls_right(p, 9)
        assert p.unlink(d) == (OK, [OK])
        # The listener of the first P is gone.
        p.port = old_port
        assert d.unlink(p)[0] is S.LLM_NOT_YET_LINK
        switch(d, LLMRole.DECODER)
        assert d.link(p) == (S.LLM_LINK_FAILED, [S.LLM_LINK_FAILED])
        # And back again.
        switch(p, LLMRole.PROMPT, listen=True)
        introduce(P=p, D=d)
        assert d.link(p) == (OK, [OK])
        fill_blocks(p, 10)
        pulls_right(d, 10)


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_a_switch_moves_the_listener(processes, way):
    with opened(processes, way, 2) as (p, d):
        start_prompt(p, way, enable_switch_role=True)
        start_decoder(d, way)
        introduce(P=p, D=d)
        before = p.port
        switch(p, LLMRole.PROMPT, listen=True)
        assert d.link(p) == (OK, [OK])
        assert d.unlink(p) == (OK, [OK])
        p.port, moved = before, p.port
        if before != moved:  # the system may hand out the same port again
            assert d.link(p)[0] is S.LLM_LINK_FAILED


def test_a_switch_to_a_taken_port_changes_nothing(processes, way):
    with linked_pair(processes, way, enable_switch_role=True) as (p, d):
        assert d.unlink(p) == (OK, [OK])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            script = "datadist.switch_role(LLMRole.DECODER, {'llm.listenIpInfo': address})"
            with pytest.raises(Failed, match=str(port)):
                p.run(script, address=f"127.0.0.1:{port}")
        assert p.run("datadist.role") is LLMRole.PROMPT
        assert d.link(p) == (OK, [OK])


def test_v1_switches_only_if_enabled(processes, way):
    with opened(processes, way, 1) as [p]:
        start_prompt(p, way)
        if way.v2:
            switch(p, LLMRole.DECODER)
        else:
            refused(p, S.LLM_FEATURE_NOT_ENABLED, "datadist.switch_role(LLMRole.DECODER)")


# -- flow 8

PULL_AT_ONCE = """
caches = [blocks() for _ in sources]
failures = []
start = threading.Barrier(len(sources))

def pull(source, cache):
    try:
        start.wait(50)
        for block in range(16):
            manager.pull_blocks(BlocksCacheKey(source), cache, [block], [15 - block])
    except Exception as error:
        failures.append(repr(error))

threads = [threading.Thread(target=pull, args=both, daemon=True) for both in zip(sources, caches)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(50)
failures, [memory(cache) for cache in caches]
"""


def reversed_blocks(seed):
    return content(seed).reshape(4, 16, 1024)[:, ::-1].reshape(4, -1)


def test_one_decoder_pulls_from_many_prompts_at_once(processes, way):
    """Two processes with four prompts each, and a third one with the decoder; one thread per link."""
    with opened(processes, way, 3) as (_, _, d):
        prompts = [processes.terminal(way, number % 2) for number in range(8)]
        try:
            for seed, prompt in enumerate(prompts):
                start_prompt(prompt, way)
                introduce(P=prompt)
                fill_blocks(prompt, seed)
            start_decoder(d, way)
            assert d.link(*prompts) == (OK, [OK] * 8)
            failures, pulled = d.run(PULL_AT_ONCE, sources=[prompt.cluster_id for prompt in prompts])
            assert failures == []
            for seed, (prompt, got) in enumerate(zip(prompts, pulled, strict=True)):
                same(got, reversed_blocks(seed))
                same(prompt.run("memory(cache)"), content(seed))
                assert prompt.run("used()") == PAGE_BYTES
            assert d.run("used()") == 8 * PAGE_BYTES
        finally:
            for prompt in prompts:
                prompt.close()


def test_threads_pull_on_one_link_at_once(pair):
    p, d = pair
    fill_blocks(p, 11)
    failures, pulled = d.run(PULL_AT_ONCE, sources=[p.cluster_id] * 8)
    assert failures == []
    for got in pulled:
        same(got, reversed_blocks(11))


@pytest.mark.parametrize("way", EVERY_BACKEND, indirect=True)
def test_prompt_and_decoder_in_one_process(processes, way):
    """Several LLMDataDist in one process, linked to one another and to a third one elsewhere."""
    with opened(processes, way, 2) as (p, other):
        d = processes.terminal(way, 0)
        try:
            start_prompt(p, way)
            start_prompt(other, way)
            start_decoder(d, way)
            introduce(P=p, D=d)
            fill_blocks(p, 12)
            assert d.link(p, other) == (OK, [OK, OK])
            pulls_right(d, 12)
            introduce(P=other, D=d)
            fill_blocks(other, 13)
            pulls_right(d, 13)
            p.run("datadist.finalize()")
            d.run("manager.deallocate_blocks_cache(cache)")
            pulls_right(d, 13)
        finally:
            d.close()


# -- the checks themselves


@pytest.mark.parametrize("way", ways(CHEAP[0]), indirect=True)
def test_the_checks_see_a_wrong_byte(pair):
    p, d = pair
    fill_blocks(p, 14)
    with pytest.raises(AssertionError, match="wrong bytes"):
        pulls_right(d, 15)
    p.run("cache.numpy()[3].view(np.uint8)[1, 1023] ^= 1")
    with pytest.raises(AssertionError, match="wrong bytes"):
        pulls_right(d, 14)
