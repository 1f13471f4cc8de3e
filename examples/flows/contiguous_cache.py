# SPDX-License-Identifier: Apache-2.0
"""Contiguous caches: one request per batch entry, found by its key; and when their memory is given back.

This one is written for V1 (`kv_cache_manager`), where only a PROMPT holds cache keys and only a DECODER pulls.

    python -m examples.flows.contiguous_cache

or in two terminals:

    python -m examples.flows.contiguous_cache --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.contiguous_cache --role decoder --connect 127.0.0.1:26000
"""

from __future__ import annotations

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, End, cluster_info, fill, main, pattern

FLOAT = llm_datadist.DataType.DT_FLOAT
# Two layers, a K and a V tensor each. The first dimension is the batch: 8 requests there, room for 2 here.
PROMPT_DESC = llm_datadist.CacheDesc(num_tensors=4, shape=[8, 256, 64], data_type=FLOAT)
DECODER_DESC = llm_datadist.CacheDesc(num_tensors=4, shape=[2, 256, 64], data_type=FLOAT)
Status = llm_datadist.LLMStatusCode


def config_v1(end: End) -> llm_datadist.LLMConfig:
    config = llm_datadist.LLMConfig()
    config.device_id = 0
    config.transfer_backend = end.backend
    config.sync_kv_timeout = 10_000
    config.ge_options = {"ge.flowGraphMemMaxSize": "67108864"}
    return config


def prompt(end: End) -> None:
    config = config_v1(end)
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        manager = prompt.kv_cache_manager
        before = show_pool(end, manager, "at the start")

        # The cache is held by its id and by each of its keys.
        keys = [llm_datadist.CacheKey(prompt_cluster_id=PROMPT, req_id=i) for i in range(8)]
        cache = manager.allocate_cache(PROMPT_DESC, keys)
        fill(cache, pattern(PROMPT_DESC, end.seed))
        held = show_pool(end, manager, "with the cache")
        notes.tell(DECODER, "filled", cache.cache_id)
        notes.wait(DECODER, "pulled two")

        # Dropping the id's hold is not enough: seven keys are left (the decoder's pull dropped one).
        manager.deallocate_cache(cache)
        end.check("used bytes after deallocate_cache", show_pool(end, manager, "after deallocate_cache"), held)
        notes.tell(DECODER, "deallocated")
        notes.wait(DECODER, "pulled one more")
        for key in keys[:-1]:
            manager.remove_cache_key(key)  # a key that is gone already is no error
        end.check("used bytes while one key is left", show_pool(end, manager, "with one key left"), held)
        manager.remove_cache_key(keys[-1])
        end.check("used bytes without any key", show_pool(end, manager, "without any key"), before)
        notes.tell(DECODER, "freed")
        notes.wait_unlinked(DECODER)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(config_v1(end).generate_options())
        manager = decoder.kv_cache_manager
        cache = manager.allocate_cache(DECODER_DESC)
        cluster = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))
        cache_id = notes.wait(PROMPT, "filled")
        theirs = pattern(PROMPT_DESC, end.seed)

        key = llm_datadist.CacheKey(prompt_cluster_id=PROMPT, req_id=3)
        manager.pull_cache(key, cache, batch_index=1)
        end.check("request 3 in batch entry 1", [t[1] for t in cache.numpy()], [t[3] for t in theirs])
        # A request is pulled once: success drops its key at the prompt.
        end.check_refused("request 3 again", Status.LLM_KV_CACHE_NOT_EXIST, lambda: manager.pull_cache(key, cache))
        # By id and index nothing is dropped.
        manager.pull_cache(llm_datadist.CacheKeyByIdAndIndex(PROMPT, cache_id, batch_index=5), cache, batch_index=0)
        end.check("entry 5 in batch entry 0", [t[0] for t in cache.numpy()], [t[5] for t in theirs])

        notes.tell(PROMPT, "pulled two")
        notes.wait(PROMPT, "deallocated")
        manager.pull_cache(llm_datadist.CacheKey(PROMPT, 4), cache, batch_index=1)
        end.check("request 4 by key, after deallocate_cache", [t[1] for t in cache.numpy()], [t[4] for t in theirs])
        notes.tell(PROMPT, "pulled one more")
        notes.wait(PROMPT, "freed")
        end.check_refused(
            "request 7, whose key was removed",
            Status.LLM_KV_CACHE_NOT_EXIST,
            lambda: manager.pull_cache(llm_datadist.CacheKey(PROMPT, 7), cache),
        )
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))
        manager.deallocate_cache(cache)


def show_pool(end: End, manager: llm_datadist.KvCacheManager, when: str) -> int:
    """Print the pool's statistics (an extension) and return the bytes in use."""
    stats = manager.pool_stats(llm_datadist.Placement.DEVICE)
    end.say(f"pool {when}: {stats.used_bytes} of {stats.total_bytes} bytes used, {stats.high_water_bytes} at most")
    return stats.used_bytes


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
