# SPDX-License-Identifier: Apache-2.0
"""What the tests of the public API share: ends with a pool, filled caches, links between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from datadist_core.tests.patience import LINK_MS

POOL_BYTES = 64 << 20
_cluster_ids = itertools.count(1000)


def config(backend: str = "auto", listen: str | None = None, v2: bool = True, timeout_ms: int = LINK_MS) -> LLMConfig:
    made = LLMConfig()
    made.transfer_backend = backend
    made.enable_cache_manager = v2
    made.sync_kv_timeout = timeout_ms
    made.host_mem_pool_cfg = f'{{"memory_size": {POOL_BYTES}}}'
    made.mem_pool_cfg = f'{{"memory_size": {POOL_BYTES}}}'
    if listen is not None:
        made.listen_ip_info = listen
    return made


def make_end(
    backend: str = "auto",
    listen: str | None = None,
    role: LLMRole = LLMRole.MIX,
    v2: bool = True,
    cluster_id: int | None = None,
) -> LLMDataDist:
    end = LLMDataDist(role, next(_cluster_ids) if cluster_id is None else cluster_id)
    end.init(config(backend, listen, v2))
    return end


def cluster_info(end: LLMDataDist) -> LLMClusterInfo:
    address = end.listen_address
    assert address is not None
    return remote_info(end.cluster_id, address.host, address.port)


def remote_info(cluster_id: int, host: str, port: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_remote_ip_info(host, port)
    return info


def must_link(client: LLMDataDist, *servers: LLMDataDist, timeout: int = LINK_MS) -> None:
    overall, each = client.link_clusters([cluster_info(s) for s in servers], timeout=timeout)
    assert overall is LLMStatusCode.LLM_SUCCESS, (each, [client.link_failure(s.cluster_id) for s in servers])


@contextmanager
def linked(backend: str = "auto", v2: bool = True) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    """(P, D): P listens, D has linked to it."""
    with (
        make_end(backend, "127.0.0.1:0", LLMRole.PROMPT, v2) as prompt,
        make_end(backend, role=LLMRole.DECODER, v2=v2) as decoder,
    ):
        must_link(decoder, prompt)
        yield prompt, decoder


def desc(num_tensors: int = 4, num_blocks: int = 16, block: int = 256) -> CacheDesc:
    return CacheDesc(num_tensors, (num_blocks, block), DataType.DT_FLOAT, Placement.HOST)


def manager(end: LLMDataDist):
    return end._open().cache_manager


def filled_cache(end: LLMDataDist, seed: int, model_id: int = 0, the_desc: CacheDesc | None = None) -> Cache:
    cache = manager(end).allocate_blocks_cache(the_desc or desc(), BlocksCacheKey(end.cluster_id, model_id))
    fill(cache, seed)
    return cache


def plain_cache(end: LLMDataDist, seed: int, the_desc: CacheDesc | None = None) -> Cache:
    cache = manager(end).allocate_blocks_cache(the_desc or desc())
    fill(cache, seed)
    return cache


def fill(cache: Cache, seed: int) -> None:
    random = np.random.default_rng(seed)
    for tensor in cache.numpy():
        tensor[:] = random.random(tensor.shape, dtype=np.float32)
