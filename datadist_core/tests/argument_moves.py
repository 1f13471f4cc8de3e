# SPDX-License-Identifier: Apache-2.0
"""Rows for what moves bytes at once: pull, push, copy, swap."""

from __future__ import annotations

from dataclasses import replace

from datadist_core import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from datadist_core.tests.argument_rows import (
    FREED,
    INVALID,
    NOT_DICT,
    NOT_INT,
    NOT_LINKED,
    NOT_LIST,
    NOT_OURS,
    NOT_RANGE,
    UNKNOWN_KEY,
    Callee,
    Fault,
    Row,
    Where,
    flat,
)
from datadist_core.tests.argument_world import (
    BATCH_SIZE,
    BLOCK_BYTES,
    ENTRY_BYTES,
    NO_CACHE,
    NUM_BLOCKS,
    NUM_TENSORS,
    STRANGER,
    UNSET,
    World,
)

TIMEOUT = LLMStatusCode.LLM_TIMEOUT
NO_SUCH_LINK = LLMStatusCode.LLM_LINK_FAILED

PULL_CACHE = Callee(
    "CacheManager.pull_cache",
    lambda w: w.d.pull_cache,
    lambda w: {"cache_key": w.source_key(), "cache": w.target, "batch_index": 1, "size": -1},
)
PUSH_CACHE = Callee(
    "CacheManager.push_cache",
    lambda w: w.p.push_cache,
    lambda w: {"dst_cache_key": w.target_key(2), "src_cache": w.source, "src_batch_index": 1, "size": -1},
)
PULL_BLOCKS = Callee(
    "CacheManager.pull_blocks",
    lambda w: w.d.pull_blocks,
    lambda w: {
        "src_cache_key": w.blocks_key(),
        "dst_cache": w.target_blocks,
        "src_blocks": [0, 1],
        "dst_blocks": [2, 3],
    },
)
PUSH_BLOCKS = Callee(
    "CacheManager.push_blocks",
    lambda w: w.d.push_blocks,
    lambda w: {
        "dst_cache_key": w.blocks_key(),
        "src_cache": w.target_blocks,
        "src_blocks": [0, 1],
        "dst_blocks": [2, 3],
    },
)
COPY_CACHE = Callee(
    "CacheManager.copy_cache",
    lambda w: w.p.copy_cache,
    lambda w: {"dst": w.source, "src": w.source, "dst_batch_index": 3, "src_batch_index": 0, "offset": 0, "size": -1},
)
COPY_BLOCKS = Callee(
    "CacheManager.copy_blocks",
    lambda w: w.d.copy_blocks,
    lambda w: {"cache": w.target_blocks, "copy_block_info": {0: [4, 5]}},
)
SWAP_BLOCKS = Callee(
    "CacheManager.swap_blocks",
    lambda w: w.d.swap_blocks,
    lambda w: {"src_cache": w.target_device_blocks, "dst_cache": w.target_blocks, "src_to_dst": {0: 1, 2: 3}},
)
MOVES = [PULL_CACHE, PUSH_CACHE, PULL_BLOCKS, PUSH_BLOCKS, COPY_CACHE, COPY_BLOCKS, SWAP_BLOCKS]


def move_rows() -> list[Row]:
    return flat(
        _pull_cache(),
        _push_cache(),
        _pull_blocks(),
        _push_blocks(),
        *(_layer_rows(one) for one in (PULL_CACHE, PUSH_CACHE, PULL_BLOCKS, PUSH_BLOCKS)),
        *(_extension_rows(one) for one in (PULL_BLOCKS, PUSH_BLOCKS)),
        _copy_cache(),
        _copy_blocks(),
        _swap_blocks(),
        _roles(),
        _v1_time_out(),
        _by_id_only(),
    )


def _pull_cache() -> list[Row]:
    one = PULL_CACHE
    return flat(
        _key_rows(one, "cache_key", BlocksCacheKey(1)),
        _request_key_rows(one, "cache_key"),
        one.refused("cache_key", Fault.RANGE, lambda w: w.source_key(BATCH_SIZE), "batch_index"),
        one.refused("cache_key", Fault.KIND, _id_of_blocks, "pull_blocks"),
        _handle_rows(one, "cache", lambda w: w.target_freed),
        one.refused("cache", Fault.KIND, lambda w: w.target_blocks, "pull_blocks"),
        one.refused("cache", Fault.CONTENT, lambda w: w.target_few, "tensors"),
        one.refused("cache", Fault.CONTENT, lambda w: w.target_small, "bytes"),
        _batch_index_rows(one, "batch_index"),
        _size_rows(one),
    )


def _push_cache() -> list[Row]:
    one = PUSH_CACHE
    return flat(
        _key_rows(one, "dst_cache_key", BlocksCacheKey(1), CacheKey(1, 2)),
        one.refused("dst_cache_key", Fault.UNKNOWN, _unknown_target, str(NO_CACHE), UNKNOWN_KEY),
        one.refused("dst_cache_key", Fault.RANGE, lambda w: w.target_key(BATCH_SIZE), "batch_index"),
        one.refused("dst_cache_key", Fault.KIND, lambda w: w.target_blocks_key(), "push_blocks"),
        _handle_rows(one, "src_cache", lambda w: w.source_freed),
        one.refused("src_cache", Fault.KIND, lambda w: w.source_blocks, "push_blocks"),
        _batch_index_rows(one, "src_batch_index"),
        _size_rows(one),
    )


def _pull_blocks() -> list[Row]:
    one = PULL_BLOCKS
    request = lambda w: CacheKey(w.prompt.cluster_id, 0)  # noqa: E731
    return flat(
        _key_rows(one, "src_cache_key"),
        _request_key_rows(one, "src_cache_key"),
        one.refused("src_cache_key", Fault.UNKNOWN, lambda w: w.blocks_key(5), "model_id=5", UNKNOWN_KEY),
        one.refused("src_cache_key", Fault.KIND, lambda w: w.blocks_key(1), "remote_accessible"),
        one.with_arguments("src_blocks", Fault.KIND, "src_blocks", src_cache_key=request),
        one.with_arguments(
            "dst_blocks", Fault.LENGTH, "dst_blocks", src_cache_key=request, src_blocks=[], dst_blocks=[0] * 5
        ),
        _handle_rows(one, "dst_cache", lambda w: w.target_freed_blocks),
        one.refused("dst_cache", Fault.KIND, lambda w: w.target, "pull_cache"),
        one.refused("dst_cache", Fault.CONTENT, lambda w: w.target_few_blocks, "tensors"),
        one.refused("dst_cache", Fault.CONTENT, lambda w: w.target_small_blocks, "bytes"),
        _block_list_rows(one),
    )


def _push_blocks() -> list[Row]:
    one = PUSH_BLOCKS
    return flat(
        _key_rows(one, "dst_cache_key", CacheKey(1, 2), CacheKeyByIdAndIndex(1, 2)),
        one.refused("dst_cache_key", Fault.UNKNOWN, lambda w: w.blocks_key(5), "model_id=5", UNKNOWN_KEY),
        one.refused("dst_cache_key", Fault.KIND, lambda w: w.blocks_key(1), "remote_accessible"),
        one.type_rows("link_id", *NOT_INT),
        [one.refused("link_id", Fault.UNLINKED, value, f"link_id={value}", NO_SUCH_LINK) for value in (-1, 0, 2**70)],
        _handle_rows(one, "src_cache", lambda w: w.target_freed_blocks),
        one.refused("src_cache", Fault.KIND, lambda w: w.target, "push_cache"),
        one.refused("src_cache", Fault.CONTENT, lambda w: w.target_few_blocks, "tensors"),
        one.refused("src_cache", Fault.CONTENT, lambda w: w.target_small_blocks, "bytes"),
        _block_list_rows(one),
    )


def _unknown_target(w: World) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(w.decoder.cluster_id, NO_CACHE)


def _id_of_blocks(w: World) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(w.prompt.cluster_id, w.source_blocks.cache_id)


def _key_rows(one: Callee, name: str, *other_keys: object) -> list[Row]:
    """Types, and a cluster without a link; `other_keys` are keys that this call does not take."""
    stranger = CacheKeyByIdAndIndex(STRANGER, 1) if one in (PULL_CACHE, PUSH_CACHE) else BlocksCacheKey(STRANGER)
    return flat(
        one.type_rows(name, *NOT_OURS, *other_keys, None),
        one.refused(name, Fault.UNLINKED, stranger, str(STRANGER), NOT_LINKED),
    )


def _request_key_rows(one: Callee, name: str) -> list[Row]:
    """For the two pulls: keys that are wrong in themselves, and keys that the prompt does not know."""
    key = lambda req_id, prefix_id=UNSET: lambda w: CacheKey(w.prompt.cluster_id, req_id, 0, prefix_id)  # noqa: E731
    by_id = lambda w: CacheKeyByIdAndIndex(w.prompt.cluster_id, NO_CACHE)  # noqa: E731
    return flat(
        [one.refused(name, Fault.CONTENT, bad, "req_id.*prefix_id") for bad in (key(1, 2), key(UNSET))],
        one.refused(name, Fault.UNKNOWN, key(4711), "4711", UNKNOWN_KEY),
        one.refused(name, Fault.UNKNOWN, key(UNSET, 4712), "4712", UNKNOWN_KEY),
        one.refused(name, Fault.UNKNOWN, by_id, str(NO_CACHE), UNKNOWN_KEY),
        one.refused(name, Fault.UNLINKED, CacheKey(STRANGER, 1), str(STRANGER), NOT_LINKED),
    )


def _handle_rows(one: Callee, name: str, freed: object) -> list[Row]:
    return flat(
        one.type_rows(name, *NOT_OURS, None),
        one.refused(name, Fault.FREED, freed, FREED, UNKNOWN_KEY),
        () if one is COPY_BLOCKS else one.refused(name, Fault.KIND, lambda w: w.cpu_cache),
    )


def _batch_index_rows(one: Callee, name: str) -> list[Row]:
    return flat(
        one.type_rows(name, *NOT_INT, None), [one.refused(name, Fault.RANGE, value) for value in (-1, BATCH_SIZE)]
    )


def _size_rows(one: Callee) -> list[Row]:
    bad = (0, -2, ENTRY_BYTES + 1, 2**70)
    return flat(one.type_rows("size", *NOT_INT, None), [one.refused("size", Fault.RANGE, value) for value in bad])


def _layer_rows(one: Callee) -> list[Row]:
    bad = (range(0), range(3), range(1, 3), range(-1, 1), range(0, 2, 2), range(1, -1, -1), range(2**70))
    return flat(
        *(one.type_rows(name, *NOT_RANGE) for name in ("src_layer_range", "dst_layer_range")),
        *(one.with_arguments(name, Fault.RANGE, rf"\b{name}\b|tensor_num_per_layer", **{name: value, other: range(1)})
          for name, other in (("src_layer_range", "dst_layer_range"), ("dst_layer_range", "src_layer_range"))
          for value in bad),
        one.with_arguments("src_layer_range", Fault.LENGTH, "src_layer_range", src_layer_range=range(1)),
        one.with_arguments("dst_layer_range", Fault.LENGTH, "dst_layer_range", dst_layer_range=range(1)),
        one.with_arguments(
            "dst_layer_range", Fault.LENGTH, "dst_layer_range", src_layer_range=range(2), dst_layer_range=range(1)
        ),
        one.type_rows("tensor_num_per_layer", *NOT_INT, None),
        [one.refused("tensor_num_per_layer", Fault.RANGE, value) for value in (0, -1, NUM_TENSORS + 1)],
        one.with_arguments(
            "tensor_num_per_layer", Fault.CONTENT, "tensor_num_per_layer", src_layer_range=range(1),
            dst_layer_range=range(1), tensor_num_per_layer=3,
        ),
    )  # fmt: skip


def _block_list_rows(one: Callee) -> list[Row]:
    wrong = ([0.5, 1.5], ["0", "1"], [True, False], [None, 0], [[0, 1]])
    bad = ([-1, 0], [0, NUM_BLOCKS], [0, 2**63], [0, 2**70])
    names = ("src_blocks", "dst_blocks")
    return flat(
        *(one.type_rows(name, *NOT_LIST, *wrong, None) for name in names),
        *(one.refused(name, Fault.LENGTH, value) for name in names for value in ([], [0], [0, 1, 2])),
        *(one.refused(name, Fault.RANGE, value) for name in names for value in bad),
        one.with_arguments("src_blocks", Fault.LENGTH, "(src|dst)_blocks is empty", src_blocks=[], dst_blocks=[]),
    )


def _extension_rows(one: Callee) -> list[Row]:
    bad = ([(0, 0, 0)], [(-1, 0, 4)], [(0, -1, 4)], [(0, 0, BLOCK_BYTES + 1)], [(BLOCK_BYTES, 0, 1)], [(0, 0)], [])
    return flat(
        one.type_rows("slices", *NOT_LIST, [5], [(0, 0, 1.5)], [("0", 0, 4)]),
        [one.refused("slices", Fault.CONTENT, value) for value in bad],
        one.type_rows("deadline_s", "1", True, [1]),
        [one.refused("deadline_s", Fault.RANGE, value, "time|deadline", TIMEOUT) for value in (0, -1.0)],
    )


def _copy_cache() -> list[Row]:
    one = COPY_CACHE
    on_decoder = replace(one, bind=lambda w: w.d.copy_cache, good=lambda w: {"dst": w.target, "src": w.target})
    return flat(
        *(one.type_rows(name, *NOT_OURS, None) for name in ("dst", "src")),
        *(one.refused(name, Fault.FREED, lambda w: w.source_freed, FREED, UNKNOWN_KEY) for name in ("dst", "src")),
        *(one.refused(name, Fault.KIND, lambda w: w.source_blocks, "copy_blocks") for name in ("dst", "src")),
        *(on_decoder.refused(name, Fault.CONTENT, lambda w: w.target_few, "num_tensors|desc")
          for name in ("dst", "src")),
        *(_batch_index_rows(one, name) for name in ("dst_batch_index", "src_batch_index")),
        one.type_rows("offset", *NOT_INT, None),
        [one.refused("offset", Fault.RANGE, value) for value in (-1, ENTRY_BYTES, 2**70)],
        _size_rows(one),
        one.with_arguments("size", Fault.RANGE, "size", offset=4, size=ENTRY_BYTES),
        one.type_rows("req_id", *NOT_INT),
    )  # fmt: skip


def _copy_blocks() -> list[Row]:
    one = COPY_BLOCKS
    wrong = ({"0": [1]}, {0: 1}, {0: "1"}, {0: [1.5]}, {0: [True]}, {True: [1]}, {0: None}, {None: [1]})
    bad = ({}, {0: []}, {0: [NUM_BLOCKS]}, {NUM_BLOCKS: [0]}, {-1: [0]}, {0: [-1]}, {0: [1], 2: [1]}, {0: [2**70]})
    return flat(
        _handle_rows(one, "cache", lambda w: w.target_freed_blocks),
        one.refused("cache", Fault.KIND, lambda w: w.target, "copy_cache"),
        one.type_rows("copy_block_info", *NOT_DICT, *wrong, None),
        [one.refused("copy_block_info", Fault.CONTENT, value) for value in bad],
    )


def _swap_blocks() -> list[Row]:
    one = SWAP_BLOCKS
    wrong = ({"0": 1}, {0: "1"}, {0: [1]}, {0: True}, {True: 0}, {0: None}, {0: 1.5})
    bad = ({}, {NUM_BLOCKS: 0}, {0: NUM_BLOCKS}, {-1: 0}, {0: -1}, {0: 1, 2: 1}, {0: 2**70})
    same = {"src_cache": lambda w: w.target_device_blocks, "dst_cache": lambda w: w.target_blocks}
    return flat(
        *(one.type_rows(name, *NOT_OURS, None) for name in same),
        one.refused("src_cache", Fault.FREED, lambda w: w.target_freed_device_blocks, FREED, UNKNOWN_KEY),
        one.refused("dst_cache", Fault.FREED, lambda w: w.target_freed_blocks, FREED, UNKNOWN_KEY),
        *(one.refused(name, Fault.KIND, lambda w: w.target, "") for name in same),
        one.refused("src_cache", Fault.KIND, lambda w: w.target_blocks, "HOST|placement"),
        one.refused("dst_cache", Fault.KIND, lambda w: w.target_device_blocks, "DEVICE|placement"),
        one.refused("dst_cache", Fault.CONTENT, lambda w: w.target_few_blocks, "match.*num_tensors"),
        one.refused("dst_cache", Fault.CONTENT, lambda w: w.target_small_blocks, "match.*shape"),
        one.type_rows("src_to_dst", *NOT_DICT, *wrong, None),
        [one.refused("src_to_dst", Fault.CONTENT, value) for value in bad],
    )


def _roles() -> list[Row]:
    """V1: only DECODER pulls, only PROMPT pushes."""
    callees = [
        replace(PULL_CACHE, bind=lambda w: w.p.pull_cache),
        replace(PULL_BLOCKS, bind=lambda w: w.p.pull_blocks),
        replace(PUSH_CACHE, bind=lambda w: w.d.push_cache),
        replace(PUSH_BLOCKS, bind=lambda w: w.d.push_blocks),
    ]
    return [replace(one, where=Where.V1).state_row(Fault.ROLE, INVALID, "DECODER|PROMPT") for one in callees]


def _v1_time_out() -> Row:
    code = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    return replace(PULL_BLOCKS, where=Where.V1).refused("deadline_s", Fault.RANGE, 0, "time|deadline", code)


def _by_id_only() -> list[Row]:
    """With enable_remote_cache_accessible, pull_cache takes CacheKeyByIdAndIndex only."""
    pull = replace(PULL_CACHE, where=Where.BY_ID_ONLY)
    return [pull.refused("cache_key", Fault.KIND, lambda w: w.keys[0], "CacheKeyByIdAndIndex")]
