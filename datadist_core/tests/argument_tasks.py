# SPDX-License-Identifier: Apache-2.0
"""Rows for transfer_cache_async and the task it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from datadist_core import (
    BlocksCacheKey,
    CacheTask,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from datadist_core.tests.argument_rows import (
    FREED,
    INVALID,
    NOT_INT,
    NOT_LINKED,
    NOT_LIST,
    NOT_OURS,
    UNKNOWN_KEY,
    Callee,
    Fault,
    Row,
    Where,
    flat,
)
from datadist_core.tests.argument_world import BATCH_SIZE, BLOCK_BYTES, NUM_BLOCKS, NUM_TENSORS, STRANGER, World


def by_address(w: World) -> list[TransferConfig]:
    return [TransferConfig(w.decoder.cluster_id, w.target_blocks.tensor_addrs)]


def by_key(w: World) -> list[TransferWithCacheKeyConfig]:
    return [TransferWithCacheKeyConfig(w.target_blocks_key())]


def _blocks(w: World) -> dict[str, object]:
    return {
        "src_cache": w.source_blocks,
        "layer_synchronizer": w.synchronizer,
        "transfer_configs": by_address(w),
        "src_block_indices": [0, 1],
        "dst_block_indices": [2, 3],
        "dst_block_memory_size": BLOCK_BYTES,
    }


def _contiguous(w: World) -> dict[str, object]:
    """A batch entry into blocks at addresses."""
    return _blocks(w) | {"src_cache": w.source, "src_block_indices": None, "dst_block_indices": [0, 1, 2, 3]}


TRANSFER = Callee("CacheManager.transfer_cache_async", lambda w: w.p.transfer_cache_async, _blocks)
FROM_CONTIGUOUS = replace(TRANSFER, good=_contiguous)
BY_KEY = replace(TRANSFER, good=lambda w: _blocks(w) | {"transfer_configs": by_key(w), "dst_block_memory_size": None})
SYNCHRONIZE = Callee("CacheTask.synchronize", lambda w: w.task.synchronize, lambda w: {"timeout_in_millis": 5000})
GET_RESULTS = Callee("CacheTask.get_results", lambda w: w.task.get_results, lambda w: {"timeout_in_millis": 5000})


def task_rows() -> list[Row]:
    return flat(
        _sources(),
        _configs(),
        _indices(),
        _memory_size(),
        _layers_and_slices(),
        _statuses(),
        replace(TRANSFER, bind=lambda w: w.d.transfer_cache_async, where=Where.V1).state_row(
            Fault.ROLE, INVALID, "PROMPT"
        ),
        replace(TRANSFER, where=Where.BY_ID_ONLY).refused(
            "transfer_configs", Fault.KIND, by_address, "TransferWithCacheKeyConfig"
        ),
        *(one.type_rows("timeout_in_millis", *NOT_INT) for one in (SYNCHRONIZE, GET_RESULTS)),
        *(one.refused("timeout_in_millis", Fault.RANGE, v) for one in (SYNCHRONIZE, GET_RESULTS) for v in (0, -1)),
    )


def _sources() -> list[Row]:
    return flat(
        TRANSFER.type_rows("src_cache", *NOT_OURS, None),
        TRANSFER.refused("src_cache", Fault.FREED, lambda w: w.source_freed_blocks, FREED, UNKNOWN_KEY),
        TRANSFER.type_rows("layer_synchronizer", *NOT_OURS, object(), print, None),
    )


def _configs() -> list[Row]:
    addresses = lambda n: lambda w: [TransferConfig(w.decoder.cluster_id, w.target_blocks.tensor_addrs[:n])]  # noqa: E731
    layers = lambda r: lambda w: [TransferConfig(w.decoder.cluster_id, w.target_blocks.tensor_addrs, r)]  # noqa: E731
    entry = lambda w: [TransferConfig(w.decoder.cluster_id, w.target_blocks.tensor_addrs, None, BATCH_SIZE)]  # noqa: E731
    return flat(
        TRANSFER.type_rows("transfer_configs", *NOT_LIST, [5], [None], BlocksCacheKey(1), [BlocksCacheKey(1)], None),
        [TRANSFER.refused("transfer_configs", Fault.LENGTH, value) for value in ([], ())],
        [TRANSFER.refused("transfer_configs", Fault.LENGTH, addresses(n), "dst_addrs") for n in (0, 1, 3)],
        [TRANSFER.refused("transfer_configs", Fault.RANGE, layers(r), "src_layer_range")
         for r in (range(3), range(1, 3))],
        TRANSFER.refused("transfer_configs", Fault.LENGTH, layers(range(1)), "dst_addrs"),
        FROM_CONTIGUOUS.refused("transfer_configs", Fault.RANGE, entry, "src_batch_index"),
    )  # fmt: skip


def _indices() -> list[Row]:
    names = ("src_block_indices", "dst_block_indices")
    wrong = ([0.5, 1.5], ["0", "1"], [True, False], [None, 0])
    return flat(
        *(TRANSFER.type_rows(name, *NOT_LIST, *wrong) for name in names),
        *(TRANSFER.refused(name, Fault.LENGTH, value) for name in names for value in ([], [0], [0, 1, 2])),
        *(TRANSFER.refused(name, Fault.MISSING, None) for name in names),
        TRANSFER.refused("src_block_indices", Fault.RANGE, [0, NUM_BLOCKS], "src_block_indices"),
        [TRANSFER.refused(name, Fault.RANGE, [0, -1]) for name in names],
        FROM_CONTIGUOUS.refused("src_block_indices", Fault.KIND, [0, 1, 2, 3]),
    )


def _memory_size() -> list[Row]:
    return flat(
        TRANSFER.type_rows("dst_block_memory_size", *NOT_INT),
        [TRANSFER.refused("dst_block_memory_size", Fault.RANGE, value) for value in (0, -1)],
        FROM_CONTIGUOUS.refused("dst_block_memory_size", Fault.MISSING, None),
        FROM_CONTIGUOUS.refused("dst_block_memory_size", Fault.RANGE, 0),
    )


def _to_two(w: World) -> list[TransferWithCacheKeyConfig]:
    return [*by_key(w), TransferWithCacheKeyConfig(BlocksCacheKey(STRANGER))]


def _layers_and_slices() -> list[Row]:
    wide = [(0, 0, BLOCK_BYTES + 1)]
    bad = ([(0, 0, 0)], [(-1, 0, 4)], wide, [(BLOCK_BYTES, 0, 1)], [(0, 0)], [])
    some = [(0, 0, 8)]
    return flat(
        TRANSFER.type_rows("tensor_num_per_layer", *NOT_INT, None),
        [TRANSFER.refused("tensor_num_per_layer", Fault.RANGE, value) for value in (0, -1, 3, NUM_TENSORS + 1)],
        TRANSFER.type_rows("link_id", *NOT_INT),
        BY_KEY.with_arguments("link_id", Fault.CONTENT, "link_id=1.*clusters?", link_id=1, transfer_configs=_to_two),
        BY_KEY.type_rows("slices", *NOT_LIST, [5], [(0, 0, 1.5)], [("0", 0, 4)]),
        [BY_KEY.refused("slices", Fault.CONTENT, value) for value in bad],
        TRANSFER.refused("slices", Fault.KIND, some, "slices.*TransferWithCacheKeyConfig"),
        FROM_CONTIGUOUS.refused("slices", Fault.KIND, some, "slices.*contiguous"),
        _status_of("slices", Fault.CONTENT, slices=[(0, BLOCK_BYTES - 4, 8)]),
    )


def _status_of(parameter: str, fault: Fault, **arguments: object) -> Row:
    """Only the destination knows: it ends with LLM_PARAM_INVALID."""

    def call(w: World) -> object:
        task = BY_KEY.call(w, **arguments)
        assert isinstance(task, CacheTask)
        if task.synchronize(10_000) is not LLMStatusCode.LLM_SUCCESS:
            raise task.errors[0]
        return task

    return Row(BY_KEY.name, parameter, fault, call, LLMException, INVALID, parameter, BY_KEY.where, "status")


def _statuses() -> list[Row]:
    """What only the destination knows is its status; the call itself does not raise."""
    elsewhere = lambda w: [TransferConfig(w.decoder.cluster_id, [4096, 8192, 12288, 16384])]  # noqa: E731
    stranger = lambda w: [TransferConfig(STRANGER, w.target_blocks.tensor_addrs)]  # noqa: E731
    unknown = lambda w: [TransferWithCacheKeyConfig(BlocksCacheKey(w.decoder.cluster_id, 5))]  # noqa: E731
    small = lambda w: [TransferConfig(w.decoder.cluster_id, w.target_small_blocks.tensor_addrs)]  # noqa: E731
    return [
        _status_row(Fault.RANGE, elsewhere, INVALID),
        _status_row(Fault.RANGE, small, INVALID),
        _status_row(Fault.UNLINKED, stranger, NOT_LINKED),
        _status_row(Fault.UNKNOWN, unknown, UNKNOWN_KEY),
    ]


def _status_row(fault: Fault, bad: Callable[[World], list[object]], code: LLMStatusCode) -> Row:
    """The bad destination fails, the good one beside it does not."""

    def call(w: World) -> object:
        task = TRANSFER.call(w, transfer_configs=[*bad(w), *by_address(w)], dst_block_indices=[NUM_BLOCKS - 1, 0])
        assert isinstance(task, CacheTask)
        results = task.get_results(10_000)
        if results != [LLMStatusCode.LLM_SUCCESS] * 2:
            assert results == [code, LLMStatusCode.LLM_SUCCESS]
            assert task.synchronize(10_000) is code
            raise LLMException(str(task.errors[0]), code)
        return results

    return Row(TRANSFER.name, "transfer_configs", fault, call, LLMException, code, "", TRANSFER.where)
