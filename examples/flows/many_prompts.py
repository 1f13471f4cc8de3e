# SPDX-License-Identifier: Apache-2.0
"""xPyD: three prompts and two decoders, each decoder linked to all prompts at once.

    python -m examples.flows.many_prompts

or in five terminals:

    python -m examples.flows.many_prompts --role prompt --cluster-id 1 --listen 127.0.0.1:26001
    python -m examples.flows.many_prompts --role prompt --cluster-id 2 --listen 127.0.0.1:26002
    python -m examples.flows.many_prompts --role prompt --cluster-id 3 --listen 127.0.0.1:26003
    python -m examples.flows.many_prompts --role decoder --cluster-id 4 --connect 127.0.0.1:26001 \\
        --connect 127.0.0.1:26002 --connect 127.0.0.1:26003
    python -m examples.flows.many_prompts --role decoder --cluster-id 5 --connect 127.0.0.1:26001 \\
        --connect 127.0.0.1:26002 --connect 127.0.0.1:26003
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import datadist_core as llm_datadist

from ._ends import End, cluster_info, fill, main, pattern

PROMPTS, DECODERS = (1, 2, 3), (4, 5)
DESC = llm_datadist.CacheDesc(4, [16, 128, 64], llm_datadist.DataType.DT_FLOAT, llm_datadist.Placement.HOST)


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, end.cluster_id) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        cache = prompt.cache_manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(end.cluster_id))
        fill(cache, pattern(DESC, end.seed + end.cluster_id))
        for decoder_id in DECODERS:
            notes.tell(decoder_id, "filled")
        for decoder_id in DECODERS:
            blocks = notes.wait(decoder_id, "pulled")
            end.say(f"decoder {decoder_id} has pulled blocks {blocks}")
        for decoder_id in DECODERS:
            notes.wait_unlinked(decoder_id)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, end.cluster_id) as decoder:
        decoder.init(end.config().generate_options())
        cache = decoder.cache_manager.allocate_blocks_cache(DESC)
        expected = pattern(DESC, end.seed)
        fill(cache, expected)
        clusters = [cluster_info(i, address) for i, address in zip(PROMPTS, end.connect, strict=True)]
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters(clusters, timeout=10_000))

        def pull(prompt_id: int) -> None:
            notes.wait(prompt_id, "filled")
            blocks = [prompt_id, prompt_id + 8]
            key = llm_datadist.BlocksCacheKey(prompt_id)
            report = decoder.cache_manager.pull_blocks(key, cache, blocks, blocks)
            end.say(f"pulled blocks {blocks} of prompt {prompt_id} over {report.backend}")
            notes.tell(prompt_id, "pulled", blocks)

        with ThreadPoolExecutor(len(PROMPTS)) as pullers:
            list(pullers.map(pull, PROMPTS))
        for prompt_id in PROMPTS:
            for tensor, source in zip(expected, pattern(DESC, end.seed + prompt_id), strict=True):
                tensor[[prompt_id, prompt_id + 8]] = source[[prompt_id, prompt_id + 8]]
        end.check("blocks of all prompts, no other changed", cache.numpy(), expected)
        end.must_succeed("unlink_clusters", decoder.unlink_clusters(clusters, timeout=10_000))


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder}, ends=["prompt"] * 3 + ["decoder"] * 2)
