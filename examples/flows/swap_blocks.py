# SPDX-License-Identifier: Apache-2.0
"""Swapping: blocks of a request that has to wait go to host memory and come back, to other places.

    python -m examples.flows.swap_blocks

or in two terminals:

    python -m examples.flows.swap_blocks --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.swap_blocks --role decoder --connect 127.0.0.1:26000
"""

from __future__ import annotations

import numpy as np

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, End, cluster_info, fill, main, pattern

FLOAT, DEVICE, HOST = llm_datadist.DataType.DT_FLOAT, llm_datadist.Placement.DEVICE, llm_datadist.Placement.HOST
# The prompt has room for 8 blocks; the decoder for 4 on its device, and for 8 more in host memory.
PROMPT_DESC = llm_datadist.CacheDesc(4, [8, 128, 64], FLOAT, DEVICE)
DEVICE_DESC = llm_datadist.CacheDesc(4, [4, 128, 64], FLOAT, DEVICE)
HOST_DESC = llm_datadist.CacheDesc(4, [8, 128, 64], FLOAT, HOST)


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        cache = prompt.cache_manager.allocate_blocks_cache(PROMPT_DESC, llm_datadist.BlocksCacheKey(PROMPT))
        fill(cache, pattern(PROMPT_DESC, end.seed))
        notes.tell(DECODER, "filled")
        notes.wait_unlinked(DECODER)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(end.config().generate_options())
        manager = decoder.cache_manager
        device_cache = manager.allocate_blocks_cache(DEVICE_DESC)
        # Host memory of our own: it needs no pool, and must live as long as the cache over it.
        host_memory = [np.zeros(HOST_DESC.shape, np.float32) for _ in range(HOST_DESC.num_tensors)]
        host_cache = llm_datadist.Cache.create_cpu_cache(HOST_DESC, [tensor.ctypes.data for tensor in host_memory])

        cluster = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))
        notes.wait(PROMPT, "filled")
        key, theirs = llm_datadist.BlocksCacheKey(PROMPT), pattern(PROMPT_DESC, end.seed)

        manager.pull_blocks(key, device_cache, [0, 1], [0, 1])
        end.say("request A is in blocks 0 and 1 of the device cache")
        manager.swap_blocks(device_cache, host_cache, {0: 4, 1: 5})
        end.check("A in blocks 4 and 5 of the host cache", [t[4:6] for t in host_memory], [t[0:2] for t in theirs])
        end.check("nothing else there", [np.delete(t, [4, 5], 0) for t in host_memory], [t[2:] * 0 for t in theirs])

        manager.pull_blocks(key, device_cache, [2, 3], [0, 1])
        end.say("request B has A's place on the device")
        manager.swap_blocks(host_cache, device_cache, {4: 3, 5: 2})
        expected = [tensor[[2, 3, 1, 0]] for tensor in theirs]
        end.check("B in blocks 0 and 1, A back in blocks 3 and 2", device_cache.numpy(), expected)
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))
        manager.deallocate_blocks_cache(device_cache)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
