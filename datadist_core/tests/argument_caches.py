# SPDX-License-Identifier: Apache-2.0
"""Rows for what makes, frees and shows caches: allocate, register, keys, pools."""

from __future__ import annotations

from dataclasses import replace

from datadist_core import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from datadist_core.tests.argument_rows import (
    FREED,
    INVALID,
    NOT_BOOL,
    NOT_INT,
    NOT_LIST,
    NOT_OURS,
    UNKNOWN_KEY,
    Callee,
    Fault,
    Row,
    Where,
    flat,
)
from datadist_core.tests.argument_values import address_rows
from datadist_core.tests.argument_world import (
    BATCH_SIZE,
    NUM_TENSORS,
    STRANGER,
    UNSET,
    World,
    blocks_desc,
    plain_desc,
)
from datadist_core.tests.core_ends import POOL_BYTES

ALLOCATE = Callee(
    "CacheManager.allocate_cache",
    lambda w: w.p.allocate_cache,
    lambda w: {"cache_desc": plain_desc(), "cache_keys": new_keys(w)},
)
REGISTER = Callee(
    "CacheManager.register_cache",
    lambda w: w.p.register_cache,
    lambda w: {"cache_desc": plain_desc(), "addrs": w.addrs, "cache_keys": new_keys(w), "remote_accessible": True},
)
ALLOCATE_BLOCKS = Callee(
    "CacheManager.allocate_blocks_cache",
    lambda w: w.p.allocate_blocks_cache,
    lambda w: {"cache_desc": blocks_desc(), "blocks_cache_key": w.blocks_key(50)},
)
REGISTER_BLOCKS = Callee(
    "CacheManager.register_blocks_cache",
    lambda w: w.p.register_blocks_cache,
    lambda w: {
        "cache_desc": blocks_desc(),
        "addrs": w.addrs,
        "blocks_cache_key": w.blocks_key(51),
        "remote_accessible": True,
    },
)
DEALLOCATE = Callee(
    "CacheManager.deallocate_cache", lambda w: w.p.deallocate_cache, lambda w: {"cache": w.source_freed}
)
DEALLOCATE_BLOCKS = Callee(
    "CacheManager.deallocate_blocks_cache",
    lambda w: w.p.deallocate_blocks_cache,
    lambda w: {"cache": w.source_freed_blocks},
)
UNREGISTER = Callee(
    "CacheManager.unregister_cache",
    lambda w: w.p.unregister_cache,
    lambda w: {"cache_id": w.source_freed_blocks.cache_id},
)
REMOVE_KEY = Callee(
    "CacheManager.remove_cache_key",
    lambda w: w.p.remove_cache_key,
    lambda w: {"cache_key": CacheKey(w.prompt.cluster_id, 4242)},
)
POOL_STATS = Callee("CacheManager.pool_stats", lambda w: w.lonely.pool_stats, lambda w: {"placement": Placement.HOST})
REMAP = Callee(
    "CacheManager.remap_registered_memory",
    lambda w: w.p.remap_registered_memory,
    lambda w: {"mem_infos": [MemInfo(Memtype.MEM_TYPE_DEVICE, w.addrs[0], 4096)]},
)
GET_TENSORS = Callee(
    "CacheManager.get_cache_tensors",
    lambda w: w.p.get_cache_tensors,
    lambda w: {"cache": w.source, "tensor_index": 0},
    Where.V1,
)
CACHES = [
    ALLOCATE, REGISTER, ALLOCATE_BLOCKS, REGISTER_BLOCKS, DEALLOCATE, DEALLOCATE_BLOCKS, UNREGISTER, REMOVE_KEY,
    POOL_STATS, REMAP,
]  # fmt: skip


def new_keys(w: World) -> list[CacheKey]:
    return [CacheKey(w.prompt.cluster_id, 100 + i) for i in range(2)]


def cache_rows() -> list[Row]:
    return flat(
        *(_desc_rows(one) for one in (ALLOCATE, REGISTER, ALLOCATE_BLOCKS, REGISTER_BLOCKS)),
        *(_pool_rows(one) for one in (ALLOCATE, ALLOCATE_BLOCKS)),
        *(_keys_rows(one) for one in (ALLOCATE, REGISTER)),
        *(_blocks_key_rows(one) for one in (ALLOCATE_BLOCKS, REGISTER_BLOCKS)),
        *(address_rows(one) for one in (REGISTER, REGISTER_BLOCKS)),
        *(one.type_rows("remote_accessible", *NOT_BOOL) for one in (REGISTER, REGISTER_BLOCKS)),
        *(one.type_rows("cache", *NOT_OURS, None) for one in (DEALLOCATE, DEALLOCATE_BLOCKS)),
        UNREGISTER.type_rows("cache_id", *NOT_INT, None),
        REMOVE_KEY.type_rows("cache_key", *NOT_OURS, BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 2), None),
        _pool_stats(),
        _remap(),
        _get_tensors(),
    )


def _desc_rows(callee: Callee) -> list[Row]:
    unusable = (
        CacheDesc(0, (BATCH_SIZE, 4), DataType.DT_FLOAT, Placement.HOST),
        CacheDesc(-1, (BATCH_SIZE, 4), DataType.DT_FLOAT, Placement.HOST),
        CacheDesc(NUM_TENSORS, (), DataType.DT_FLOAT, Placement.HOST),
        CacheDesc(NUM_TENSORS, (BATCH_SIZE, 4), DataType.DT_STRING, Placement.HOST),
    )
    return flat(
        callee.type_rows("cache_desc", *NOT_OURS, None),
        [callee.refused("cache_desc", Fault.CONTENT, desc) for desc in unusable],
    )


def _pool_rows(callee: Callee) -> list[Row]:
    huge = CacheDesc(1, (4, POOL_BYTES), DataType.DT_FLOAT, Placement.HOST)
    no_key = {"cache_keys": ()} if callee is ALLOCATE else {"blocks_cache_key": None}
    lone = replace(callee, bind=lambda w: getattr(w.lonely, callee.name.split(".")[1]))
    codes = {Where.V2: LLMStatusCode.LLM_OUT_OF_MEMORY, Where.V1: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY}
    return [
        lone.with_arguments(
            "cache_desc", Fault.STATE, "mem_pool_cfg", cache_desc=plain_desc(where=Placement.DEVICE), **no_key
        ),
        *(
            replace(callee, where=where).refused("cache_desc", Fault.RANGE, huge, "host_mem_pool_cfg", code)
            for where, code in codes.items()
        ),
    ]


def _keys_rows(callee: Callee) -> list[Row]:
    own = lambda req_id, prefix_id=UNSET: lambda w: [CacheKey(w.prompt.cluster_id, req_id, 0, prefix_id)]  # noqa: E731
    too_many = lambda w: [CacheKey(w.prompt.cluster_id, i) for i in range(BATCH_SIZE + 1)]  # noqa: E731
    wrong = (CacheKey(1, 2), [5], [None], [BlocksCacheKey(1)], [CacheKeyByIdAndIndex(1, 2)])
    decoder = replace(callee, bind=lambda w: getattr(w.d, callee.name.split(".")[1]), where=Where.V1)
    return flat(
        callee.type_rows("cache_keys", *NOT_LIST, *wrong, None),
        callee.refused("cache_keys", Fault.CONTENT, [CacheKey(STRANGER, 1)]),
        callee.refused("cache_keys", Fault.CONTENT, own(1, 2)),
        callee.refused("cache_keys", Fault.LENGTH, too_many),
        decoder.refused("cache_keys", Fault.ROLE, lambda w: [CacheKey(w.decoder.cluster_id, 1)], "PROMPT"),
    )


def _blocks_key_rows(callee: Callee) -> list[Row]:
    decoder = replace(callee, bind=lambda w: getattr(w.d, callee.name.split(".")[1]), where=Where.V1)
    return flat(
        callee.type_rows("blocks_cache_key", *NOT_OURS, CacheKey(1, 2)),
        callee.refused("blocks_cache_key", Fault.CONTENT, BlocksCacheKey(STRANGER)),
        decoder.refused("blocks_cache_key", Fault.ROLE, lambda w: BlocksCacheKey(w.decoder.cluster_id), "PROMPT"),
    )


def _pool_stats() -> list[Row]:
    return flat(
        POOL_STATS.type_rows("placement", *NOT_OURS, None),
        POOL_STATS.refused("placement", Fault.STATE, Placement.DEVICE, "mem_pool_cfg"),
    )


def _remap() -> list[Row]:
    host = [MemInfo(Memtype.MEM_TYPE_HOST, 4096, 4096)]
    return flat(
        REMAP.type_rows("mem_infos", *NOT_LIST, [5], [None], None),
        REMAP.refused("mem_infos", Fault.KIND, host),
        REMAP.refused("mem_infos", Fault.LENGTH, []),
    )


def _get_tensors() -> list[Row]:
    return flat(
        GET_TENSORS.type_rows("cache", *NOT_OURS, None),
        GET_TENSORS.refused("cache", Fault.FREED, lambda w: w.source_freed, FREED, UNKNOWN_KEY),
        GET_TENSORS.type_rows("tensor_index", *NOT_INT, None),
        [GET_TENSORS.refused("tensor_index", Fault.RANGE, value, code=INVALID) for value in (-1, NUM_TENSORS)],
    )
