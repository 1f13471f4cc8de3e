# SPDX-License-Identifier: Apache-2.0
"""Ping-pong: the next request is pulled into a staging cache while the one before goes to its place; a common prefix.

    python -m examples.flows.ping_pong

or in two terminals:

    python -m examples.flows.ping_pong --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.ping_pong --role decoder --connect 127.0.0.1:26000
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, Array, End, cluster_info, fill, main, pattern

FLOAT, HOST = llm_datadist.DataType.DT_FLOAT, llm_datadist.Placement.HOST
NUM_REQUESTS, NUM_TOKENS, NUM_PREFIX_TOKENS, TOKEN_BYTES = 4, 256, 64, 64 * 4
PREFIX_BYTES = NUM_PREFIX_TOKENS * TOKEN_BYTES
ENTRY_BYTES = NUM_TOKENS * TOKEN_BYTES
UNSET = 2**64 - 1
PREFIX_KEY = llm_datadist.CacheKey(PROMPT, req_id=UNSET, prefix_id=7)


def desc(num_entries: int) -> llm_datadist.CacheDesc:
    """`num_entries` batch entries, or blocks, of 256 tokens."""
    return llm_datadist.CacheDesc(4, [num_entries, NUM_TOKENS, 64], FLOAT, HOST)


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        manager = prompt.cache_manager
        keys = [llm_datadist.CacheKey(PROMPT, req_id=i) for i in range(NUM_REQUESTS)]
        requests = manager.allocate_cache(desc(NUM_REQUESTS), keys)
        prefix = manager.allocate_cache(desc(1), [PREFIX_KEY])
        blocks = manager.allocate_blocks_cache(desc(8), llm_datadist.BlocksCacheKey(PROMPT))
        fill(requests, pattern(desc(NUM_REQUESTS), end.seed))
        fill(prefix, pattern(desc(1), end.seed + 1))
        fill(blocks, pattern(desc(8), end.seed + 2))
        notes.tell(DECODER, "filled")
        notes.wait_unlinked(DECODER)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(end.config().generate_options())
        cluster = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))
        notes.wait(PROMPT, "filled")
        contiguous(end, decoder.cache_manager)
        paged(end, decoder.cache_manager)
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))


def contiguous(end: End, manager: llm_datadist.CacheManager) -> None:
    """Two staging caches in turn, and `copy_cache` into the batch that the model works on."""
    running = manager.allocate_cache(desc(NUM_REQUESTS))
    staging = [manager.allocate_cache(desc(1)), manager.allocate_cache(desc(1))]
    prefix = manager.allocate_cache(desc(1))
    manager.pull_cache(PREFIX_KEY, prefix, size=PREFIX_BYTES)
    end.say("pulled the common prefix once")

    def pull(request: int) -> int:
        manager.pull_cache(llm_datadist.CacheKey(PROMPT, req_id=request), staging[request % 2])
        return request

    with ThreadPoolExecutor(1) as puller:
        coming = puller.submit(pull, 0)
        for request in range(NUM_REQUESTS):
            here = coming.result()
            if request + 1 < NUM_REQUESTS:
                coming = puller.submit(pull, request + 1)
            end.say(f"request {here} is here; the next one is on its way while this one goes to batch entry {request}")
            manager.copy_cache(running, prefix, dst_batch_index=request, size=PREFIX_BYTES)
            manager.copy_cache(
                running,
                staging[request % 2],
                dst_batch_index=request,
                offset=PREFIX_BYTES,
                size=ENTRY_BYTES - PREFIX_BYTES,
            )
    expected = pattern(desc(NUM_REQUESTS), end.seed)
    for tensor, common in zip(expected, pattern(desc(1), end.seed + 1), strict=True):
        tensor[:, :NUM_PREFIX_TOKENS] = common[0, :NUM_PREFIX_TOKENS]
    end.check("each request: the common prefix, then its own part", running.numpy(), expected)


def paged(end: End, manager: llm_datadist.CacheManager) -> None:
    """The same in a paged cache: blocks 0..3 are for staging, two at a time, the others belong to requests."""
    cache = manager.allocate_blocks_cache(desc(16))
    before = pattern(desc(16), end.seed + 3)
    fill(cache, before)

    def pull(request: int) -> None:
        first = 2 * (request % 2)
        key = llm_datadist.BlocksCacheKey(PROMPT)
        manager.pull_blocks(key, cache, [2 * request, 2 * request + 1], [first, first + 1])

    with ThreadPoolExecutor(1) as puller:
        coming = puller.submit(pull, 0)
        for request in range(NUM_REQUESTS):
            coming.result()
            if request + 1 < NUM_REQUESTS:
                coming = puller.submit(pull, request + 1)
            first, target = 2 * (request % 2), 4 + 2 * request
            manager.copy_blocks(cache, {first: [target], first + 1: [target + 1]})
    manager.copy_blocks(cache, {4: [12, 13, 14]})  # one block for three more requests that begin alike
    end.check("blocks of all requests", cache.numpy(), expected_blocks(end, before))


def expected_blocks(end: End, tensors: list[Array]) -> list[Array]:
    for tensor, source in zip(tensors, pattern(desc(8), end.seed + 2), strict=True):
        tensor[0:4], tensor[4:12], tensor[12:15] = source[4:8], source, source[0]
    return tensors


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
