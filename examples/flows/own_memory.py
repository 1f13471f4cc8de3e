# SPDX-License-Identifier: Apache-2.0
"""Memory of our own: caches over NumPy arrays and torch tensors, registered while linked.

    python -m examples.flows.own_memory

or in two terminals:

    python -m examples.flows.own_memory --role prompt --listen 127.0.0.1:26000
    python -m examples.flows.own_memory --role decoder --connect 127.0.0.1:26000

What a transfer needs: whoever asks for it (the one that pulls or pushes) can use any memory of its own. The memory at
the other end must be reachable. Over tcp all of it is. shm can reach only a pool's, because other processes can map
nothing else; with `--backend auto` such transfers go over tcp.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

import datadist_core as llm_datadist

from ._ends import DECODER, PROMPT, Array, End, cluster_info, fill, main, pattern

FLOAT, HOST = llm_datadist.DataType.DT_FLOAT, llm_datadist.Placement.HOST
DESC = llm_datadist.CacheDesc(4, [16, 128, 64], FLOAT, HOST)
IN_POOL, OWN = 0, 1  # model ids: the prompt has a cache in its pool and one over its own memory
REQUEST = llm_datadist.CacheKey(PROMPT, req_id=9)


def prompt(end: End) -> None:
    config = end.config()
    config.listen_ip_info = end.listen
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.PROMPT, PROMPT) as prompt:
        prompt.init(config.generate_options())
        notes = end.notes(prompt)
        manager = prompt.cache_manager
        fill(manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(PROMPT, IN_POOL)), pattern(DESC, end.seed))
        fill(manager.allocate_cache(DESC, [REQUEST]), pattern(DESC, end.seed + 2))
        notes.wait(DECODER, "linked")

        # Registered while linked, which is fine at any time. HOST memory is for peers only if we say so.
        memory = pattern(DESC, end.seed + 1)
        own = manager.register_blocks_cache(
            DESC,
            [tensor.ctypes.data for tensor in memory],
            llm_datadist.BlocksCacheKey(PROMPT, OWN),
            remote_accessible=True,
        )
        manager.push_blocks(llm_datadist.BlocksCacheKey(DECODER), own, [0, 1], [6, 7])
        end.say("pushed blocks [0, 1] of our NumPy arrays to the decoder's [6, 7]")
        notes.tell(DECODER, "pushed")
        notes.wait(DECODER, "pulled")
        manager.unregister_cache(own.cache_id)  # from here on the arrays are all ours again
        notes.tell(DECODER, "unregistered")
        notes.wait_unlinked(DECODER)


def decoder(end: End) -> None:
    with llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, DECODER) as decoder:
        decoder.init(end.config().generate_options())
        manager = decoder.cache_manager
        in_pool = manager.allocate_blocks_cache(DESC, llm_datadist.BlocksCacheKey(DECODER))
        cluster = cluster_info(PROMPT, end.connect[0])
        notes = end.notes(decoder)
        end.must_succeed("link_clusters", decoder.link_clusters([cluster], timeout=5000))

        memory, addrs = own_tensors(end)
        own = manager.register_blocks_cache(DESC, addrs)
        notes.tell(PROMPT, "linked")
        notes.wait(PROMPT, "pushed")
        end.check("pushed from NumPy arrays", rows(in_pool.numpy(), 6, 8), rows(pattern(DESC, end.seed + 1), 0, 2))
        manager.pull_blocks(llm_datadist.BlocksCacheKey(PROMPT, IN_POOL), own, [2, 3], [4, 5])
        end.check("pulled into our own memory", rows(memory, 4, 6), rows(pattern(DESC, end.seed), 2, 4))
        pull_own_from_own(end, decoder, own, memory)
        manager.unregister_cache(own.cache_id)

        batch = manager.register_cache(DESC, addrs)  # the same memory as a contiguous cache: a batch of 16
        manager.pull_cache(REQUEST, batch, batch_index=10)
        end.check("batch entry 10 in our own memory", rows(memory, 10, 11), rows(pattern(DESC, end.seed + 2), 0, 1))
        manager.unregister_cache(batch.cache_id)

        notes.tell(PROMPT, "pulled")
        notes.wait(PROMPT, "unregistered")
        end.check_refused(
            "pull from unregistered memory",
            llm_datadist.LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            lambda: manager.pull_blocks(llm_datadist.BlocksCacheKey(PROMPT, OWN), in_pool, [0], [0]),
        )
        end.must_succeed("unlink_clusters", decoder.unlink_clusters([cluster], timeout=5000))


def pull_own_from_own(
    end: End, decoder: llm_datadist.LLMDataDist, own: llm_datadist.Cache, memory: list[Array]
) -> None:
    """Both ends' own memory: everything but shm alone can do it, and that says so."""

    def pull() -> None:
        decoder.cache_manager.pull_blocks(llm_datadist.BlocksCacheKey(PROMPT, OWN), own, [8, 9], [0, 1])

    if decoder.link_info(PROMPT).backends == ("shm",):
        end.check_refused("the prompt's own memory over shm alone", llm_datadist.LLMStatusCode.LLM_LINK_FAILED, pull)
    else:
        pull()
        end.check("from NumPy arrays to our own memory", rows(memory, 0, 2), rows(pattern(DESC, end.seed + 1), 8, 10))


def own_tensors(end: End) -> tuple[list[Array], list[int]]:
    """Memory for DESC and its addresses: torch tensors if torch is there (looked at through NumPy), else arrays."""
    if importlib.util.find_spec("torch") is None:
        end.say("torch is not installed; using NumPy arrays")
        arrays: list[Any] = [np.zeros(DESC.shape, np.float32) for _ in range(DESC.num_tensors)]
        return arrays, [array.ctypes.data for array in arrays]
    import torch

    tensors = [torch.zeros(DESC.shape, dtype=torch.float32) for _ in range(DESC.num_tensors)]
    end.say("using torch tensors")
    return [tensor.numpy() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]


def rows(tensors: list[Array], start: int, stop: int) -> list[Array]:
    return [tensor[start:stop] for tensor in tensors]


if __name__ == "__main__":
    main(__doc__, __file__, {"prompt": prompt, "decoder": decoder})
