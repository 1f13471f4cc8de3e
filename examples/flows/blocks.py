# SPDX-License-Identifier: Apache-2.0
"""Paged attention: blocks of the prompt's KV cache into blocks of the decoder's, first pulled, then pushed.

    python -m examples.flows.blocks

or in two terminals:

    python -m examples.flows.blocks --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.blocks --role decoder --connect 127.0.0.1:26000
"""

from __future__ import annotations

import datadist_core as llm_datadist

from ._ends import DECODER, POOL_CONFIG, PROMPT, End, fill, main, pattern

# Two layers, each a K and a V tensor of 16 blocks. With an accelerator the placement would be DEVICE.
DESC = llm_datadist.CacheDesc(
    num_tensors=4,
    shape=[16, 128, 64],
    data_type=llm_datadist.DataType.DT_FLOAT,
    placement=llm_datadist.Placement.HOST,
)


def prompt(end: End) -> None:
    config = llm_datadist.LLMConfig()
    config.enable_cache_manager = True
    config.transfer_backend = end.backend
    config.host_mem_pool_cfg = POOL_CONFIG  # '{"memory_size": 67108864}'
    config.listen_ip_info = end.listen  # "127.0.0.1:26000"
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        manager = prompt.cache_manager
        # The key is the name under which the decoder finds this cache.
        cache = manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(PROMPT))
        fill(cache, pattern(DESC, end.seed))
        notes.tell(DECODER, "filled")
        notes.wait(DECODER, "pulled")

        manager.push_blocks(llm_datadist.BlocksCacheKey(DECODER), cache, src_blocks=[5, 6], dst_blocks=[8, 12])
        end.say("pushed blocks [5, 6] to the decoder's [8, 12]")
        notes.tell(DECODER, "pushed")
        notes.wait_unlinked(DECODER)
        manager.deallocate_blocks_cache(cache)


def decoder(end: End) -> None:
    config = llm_datadist.LLMConfig()
    config.enable_cache_manager = True
    config.transfer_backend = end.backend
    config.host_mem_pool_cfg = POOL_CONFIG
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(config.generate_options())
        manager = decoder.cache_manager
        cache = manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(DECODER))
        fill(cache, pattern(DESC, end.seed + 1))

        cluster = llm_datadist.LLMClusterInfo()
        cluster.remote_cluster_id = PROMPT
        cluster.append_remote_ip_info(end.connect[0].host, end.connect[0].port)
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))
        notes.wait(PROMPT, "filled")

        report = manager.pull_blocks(llm_datadist.BlocksCacheKey(PROMPT), cache, [0, 1], [2, 3])
        end.say(f"pulled the prompt's blocks [0, 1] to [2, 3]: {report.num_bytes} bytes over {report.backend}")
        check_blocks(end, cache, {2: 0, 3: 1})

        notes.tell(PROMPT, "pulled")
        notes.wait(PROMPT, "pushed")
        check_blocks(end, cache, {2: 0, 3: 1, 8: 5, 12: 6})

        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))
        manager.deallocate_blocks_cache(cache)


def check_blocks(end: End, cache: llm_datadist.Cache, came_from: dict[int, int]) -> None:
    """Every byte of the decoder's cache: the blocks that came from the prompt, and that no other block changed."""
    expected = pattern(DESC, end.seed + 1)
    for tensor, source in zip(expected, pattern(DESC, end.seed), strict=True):
        for dst, src in came_from.items():
            tensor[dst] = source[src]
    end.check(f"blocks {list(came_from)} came from the prompt, no other changed", cache.numpy(), expected)


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
