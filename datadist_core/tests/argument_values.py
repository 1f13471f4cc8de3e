# SPDX-License-Identifier: Apache-2.0
"""Rows for descriptors, keys, transfer configs and the other values that users make themselves."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
    create_tensors,
    install_as_llm_datadist,
)
from datadist_core.tests.argument_rows import (
    INVALID,
    NOT_INT,
    NOT_LIST,
    NOT_OURS,
    NOT_RANGE,
    NOT_STR,
    Callee,
    Fault,
    Row,
    Where,
    flat,
)
from datadist_core.tests.argument_world import NUM_TENSORS, blocks_desc

UINT64_END = 2**64


def value_rows() -> list[Row]:
    return flat(_cache_desc(), _keys(), _mem_info(), _transfer_configs(), _cpu_cache(), _create_tensors(), _rest())


def _make(kind: type, **good: object) -> Callee:
    return Callee(kind.__name__, lambda w: kind, lambda w: good, Where.NOWHERE)


def _cache_desc() -> list[Row]:
    desc = _make(CacheDesc, num_tensors=2, shape=(4, 8), data_type=DataType.DT_FLOAT)
    return flat(
        desc.type_rows("num_tensors", *NOT_INT, None),
        desc.type_rows("shape", *NOT_LIST, None, [1.5], [True, 4], ("4",), [None]),
        [desc.range_row("shape", shape) for shape in ((0,), (4, -1), (2**63,))],
        desc.type_rows("data_type", *NOT_OURS, "DT_FLOAT", None),
        desc.type_rows("placement", *NOT_OURS, None),
        desc.type_rows("batch_dim_index", *NOT_INT, None),
        [desc.range_row("batch_dim_index", index) for index in (-1, 2)],
        desc.type_rows("seq_len_dim_index", *NOT_INT, None),
        [desc.range_row("seq_len_dim_index", index) for index in (-3, 2)],
        desc.type_rows("kv_tensor_format", *NOT_STR),
    )


def _keys() -> list[Row]:
    cache_key = _make(CacheKey, cluster_id=1, req_id=2)
    by_id = _make(CacheKeyByIdAndIndex, cluster_id=1, cache_id=2)
    blocks = _make(BlocksCacheKey, cluster_id=1)
    return flat(
        *(_uint64_rows(cache_key, name) for name in ("cluster_id", "req_id", "model_id", "prefix_id")),
        *(_uint64_rows(by_id, name) for name in ("cluster_id", "cache_id", "batch_index")),
        *(_uint64_rows(blocks, name) for name in ("cluster_id", "model_id")),
        *_alias_rows(CacheKey, req_id=2),
        *_alias_rows(BlocksCacheKey),
        _missing(CacheKey, "cluster_id"),
        _missing(CacheKey, "cluster_id", req_id=1),
        _missing(CacheKey, "req_id", cluster_id=1),
        _missing(CacheKey, "req_id", prompt_cluster_id=1, prefix_id=3),
        _missing(CacheKeyByIdAndIndex, "cluster_id", cache_id=1),
        _missing(CacheKeyByIdAndIndex, "cache_id", cluster_id=1),
        _missing(BlocksCacheKey, "cluster_id"),
        _missing(BlocksCacheKey, "cluster_id", model_id=1),
        *(_unsupported(key, 1, 2, 3, 4, 5) for key in (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)),
        *(_unsupported(key, 1, nosuch=2) for key in (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)),
        *(_unsupported(key, 1, cluster_id=1) for key in (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)),
        *(_unsupported(key, 1, prompt_cluster_id=1) for key in (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)),
    )


def _uint64_rows(key: Callee, name: str) -> list[Row]:
    return flat(key.type_rows(name, *NOT_INT, None), [key.range_row(name, value) for value in (-1, UINT64_END)])


def _alias_rows(kind: type, **rest: object) -> list[Row]:
    key = _make(kind, **rest)
    name = r"\bcluster_id\b"
    return flat(
        key.type_rows("prompt_cluster_id", *NOT_INT, None, text=name),
        [key.range_row("prompt_cluster_id", value, name) for value in (-1, UINT64_END)],
    )


def _missing(kind: type, parameter: str, **given: int) -> Row:
    return _key_row(kind, parameter, Fault.MISSING, f"{parameter} is required", **given)


def _unsupported(kind: type, *values: int, **given: int) -> Row:
    return _key_row(kind, "", Fault.CONTENT, "Unsupported param", *values, **given)


def _key_row(kind: type, parameter: str, fault: Fault, text: str, *values: int, **given: int) -> Row:
    call = lambda w: kind(*values, **given)  # noqa: E731
    return Row(kind.__name__, parameter, fault, call, LLMException, INVALID, text, Where.NOWHERE)


def _mem_info() -> list[Row]:
    info = _make(MemInfo, mem_type=Memtype.MEM_TYPE_DEVICE, addr=4096, size=64)
    return flat(
        info.type_rows("mem_type", *NOT_OURS, None),
        info.type_rows("addr", *NOT_INT, None),
        [info.range_row("addr", value) for value in (-1, 0, UINT64_END)],
        info.type_rows("size", *NOT_INT, None),
        [info.range_row("size", value) for value in (-1, 0, UINT64_END)],
    )


def _transfer_configs() -> list[Row]:
    by_address = _make(TransferConfig, dst_cluster_id=1, dst_addrs=[4096, 8192])
    by_key = _make(TransferWithCacheKeyConfig, cache_key=BlocksCacheKey(1))
    return flat(
        _uint64_rows(by_address, "dst_cluster_id"),
        by_address.type_rows("dst_addrs", *NOT_LIST, None, [1.5], [True], [None]),
        [by_address.range_row("dst_addrs", value) for value in ([-1], [UINT64_END])],
        by_key.type_rows("cache_key", *NOT_OURS, CacheKey(1, 2), None),
        *(_layer_rows(one, "src_layer_range") for one in (by_address, by_key)),
        _layer_rows(by_key, "dst_layer_range"),
        by_key.with_arguments(
            "dst_layer_range", Fault.LENGTH, "layer_range", src_layer_range=range(2), dst_layer_range=range(1)
        ),
        *(one.type_rows("src_batch_index", *NOT_INT, None) for one in (by_address, by_key)),
        *(one.refused("src_batch_index", Fault.RANGE, -1) for one in (by_address, by_key)),
    )


def _layer_rows(config: Callee, name: str) -> list[Row]:
    bad = (range(0), range(-1, 1), range(0, 4, 2), range(2, 0, -1))
    return flat(config.type_rows(name, *NOT_RANGE), [config.refused(name, Fault.RANGE, layers) for layers in bad])


def _cpu_cache() -> list[Row]:
    cache = Callee(
        "Cache.create_cpu_cache",
        lambda w: Cache.create_cpu_cache,
        lambda w: {"cache_desc": blocks_desc(), "addrs": [4096] * NUM_TENSORS},
        Where.NOWHERE,
    )
    return flat(
        cache.type_rows("cache_desc", *NOT_OURS, None),
        cache.refused("cache_desc", Fault.KIND, blocks_desc(where=Placement.DEVICE)),
        cache.refused("cache_desc", Fault.CONTENT, CacheDesc(0, (4,), DataType.DT_FLOAT, Placement.HOST)),
        cache.refused("cache_desc", Fault.CONTENT, CacheDesc(NUM_TENSORS, (), DataType.DT_FLOAT, Placement.HOST)),
        cache.refused("cache_desc", Fault.CONTENT, CacheDesc(NUM_TENSORS, (4,), DataType.DT_STRING, Placement.HOST)),
        address_rows(cache),
    )


def address_rows(callee: Callee) -> list[Row]:
    """Bad `addrs` of a cache with NUM_TENSORS tensors."""
    rest = [4096] * (NUM_TENSORS - 1)
    bad = ([*rest, 0], [*rest, -1], [*rest, UINT64_END])
    return flat(
        callee.type_rows("addrs", *NOT_LIST, None, [*rest, 1.5], [*rest, True], [*rest, "1"], [*rest, None]),
        [callee.refused("addrs", Fault.LENGTH, value) for value in ([], rest, [*rest, 4096, 4096])],
        [callee.refused("addrs", Fault.RANGE, value) for value in bad],
    )


def _create_tensors() -> list[Row]:
    tensors = Callee(
        "create_tensors",
        lambda w: create_tensors,
        lambda w: {"shape": (16, 64), "dtype": DataType.DT_FLOAT, "addrs": w.addrs},
    )
    return flat(
        tensors.type_rows("shape", *NOT_LIST, None, [1.5], [True], ("4",)),
        tensors.type_rows("dtype", 5, True, [], None),
        tensors.type_rows("addrs", *NOT_LIST, None, [1.5], [True], [None]),
    )


def _rest() -> list[Row]:
    exception = _make(LLMException, message="text", status_code=INVALID)
    vendor = {"llm_datadist": ModuleType("llm_datadist")}

    def install_over_the_original(_: object) -> object:
        with mock.patch.dict(sys.modules, vendor):
            install_as_llm_datadist()
        return "installed"

    return [
        exception.range_row("status_code", 9999, "9999"),
        exception.range_row("status_code", "x", "x"),
        Row(
            "install_as_llm_datadist", "", Fault.STATE, install_over_the_original, RuntimeError, None,
            "llm_datadist is imported already", Where.NOWHERE,
        ),
    ]  # fmt: skip
