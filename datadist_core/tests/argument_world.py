# SPDX-License-Identifier: Apache-2.0
"""What the rows of the argument table are tried on: a linked pair with caches of every kind, and an end without links.

Bad calls change nothing, so all rows share a world. `check_alive` proves after each that the ends still work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from datadist_core.tests.core_ends import LINK_MS, cluster_info, config, must_link

NUM_TENSORS = 4
NUM_BLOCKS = 16
BATCH_SIZE = 4
#: Floats. An entry of the contiguous caches is as large as four blocks.
BLOCK, ENTRY = 64, 256
BLOCK_BYTES, ENTRY_BYTES = BLOCK * 4, ENTRY * 4
ALIVE_MODEL = 99
#: A cluster that nobody links with, and ids that no cache has.
STRANGER = 777_777
NO_CACHE = 2**40
UNSET = 2**64 - 1
_cluster_ids = itertools.count(500_000)


def blocks_desc(num_tensors: int = NUM_TENSORS, block: int = BLOCK, where: Placement = Placement.HOST) -> CacheDesc:
    return CacheDesc(num_tensors, (NUM_BLOCKS, block), DataType.DT_FLOAT, where)


def plain_desc(num_tensors: int = NUM_TENSORS, entry: int = ENTRY, where: Placement = Placement.HOST) -> CacheDesc:
    return CacheDesc(num_tensors, (BATCH_SIZE, entry), DataType.DT_FLOAT, where)


class AlwaysReady(LayerSynchronizer):
    """Every layer is there already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@dataclass(slots=True)
class World:
    """`prompt` (listens) and `decoder` (has linked to it) with their managers `p` and `d`; `lone` has no link and only
    a host pool. `source_*` caches live at the prompt, `target_*` at the decoder."""

    prompt: LLMDataDist
    decoder: LLMDataDist
    lone: LLMDataDist
    p: CacheManager
    d: CacheManager
    lonely: CacheManager
    memory: np.ndarray = field(default_factory=lambda: np.zeros((NUM_TENSORS, NUM_BLOCKS, BLOCK), np.float32))
    synchronizer: LayerSynchronizer = field(default_factory=AlwaysReady)
    turn: int = 0
    #: Arguments by name of the callable, made before the ends lost the state to make them.
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    source_blocks: Cache = field(init=False)
    target_blocks: Cache = field(init=False)
    #: Contiguous; `source` carries the keys `keys`.
    source: Cache = field(init=False)
    target: Cache = field(init=False)
    keys: list[CacheKey] = field(init=False)
    #: Like `target_blocks`, but in the other pool; not reachable for peers; with other shapes; freed.
    target_device_blocks: Cache = field(init=False)
    source_private: Cache = field(init=False)
    target_small_blocks: Cache = field(init=False)
    target_few_blocks: Cache = field(init=False)
    target_small: Cache = field(init=False)
    target_few: Cache = field(init=False)
    target_freed: Cache = field(init=False)
    target_freed_blocks: Cache = field(init=False)
    target_freed_device_blocks: Cache = field(init=False)
    source_freed: Cache = field(init=False)
    source_freed_blocks: Cache = field(init=False)
    cpu_cache: Cache = field(init=False)
    task: CacheTask = field(init=False)
    alive_source: Cache = field(init=False)
    alive_target: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.prompt.register_service("echo", lambda remote_cluster_id, body: body)
        self._make_source_caches()
        self._make_target_caches()
        self._make_freed_caches()
        self.cpu_cache = Cache.create_cpu_cache(blocks_desc(), self.addrs)
        self.alive_source = self.p.allocate_blocks_cache(blocks_desc(), self.blocks_key(ALIVE_MODEL))
        self.alive_target = self.d.allocate_blocks_cache(blocks_desc())
        self.check_alive()

    def _make_source_caches(self) -> None:
        self.source_blocks = self.p.allocate_blocks_cache(blocks_desc(), self.blocks_key(0))
        self.keys = [CacheKey(self.prompt.cluster_id, req) for req in range(BATCH_SIZE - 1)]
        self.source = self.p.allocate_cache(plain_desc(), self.keys)
        self.source_private = self.p.register_blocks_cache(
            blocks_desc(), [m.ctypes.data for m in self.memory], self.blocks_key(1), remote_accessible=False
        )

    def _make_target_caches(self) -> None:
        allocate_blocks, allocate = self.d.allocate_blocks_cache, self.d.allocate_cache
        self.target_blocks = allocate_blocks(blocks_desc())
        self.target_device_blocks = allocate_blocks(blocks_desc(where=Placement.DEVICE))
        self.target_small_blocks = allocate_blocks(blocks_desc(block=BLOCK // 2))
        self.target_few_blocks = allocate_blocks(blocks_desc(num_tensors=2))
        self.target = allocate(plain_desc())
        self.target_small = allocate(plain_desc(entry=ENTRY // 2))
        self.target_few = allocate(plain_desc(num_tensors=2))

    def _make_freed_caches(self) -> None:
        self.target_freed, self.source_freed = self.d.allocate_cache(plain_desc()), self.p.allocate_cache(plain_desc())
        self.target_freed_blocks = self.d.allocate_blocks_cache(blocks_desc())
        self.target_freed_device_blocks = self.d.allocate_blocks_cache(blocks_desc(where=Placement.DEVICE))
        self.source_freed_blocks = self.p.allocate_blocks_cache(blocks_desc())
        self.d.deallocate_cache(self.target_freed)
        self.p.deallocate_cache(self.source_freed)
        self.d.deallocate_blocks_cache(self.target_freed_blocks)
        self.d.deallocate_blocks_cache(self.target_freed_device_blocks)
        self.p.deallocate_blocks_cache(self.source_freed_blocks)

    # -- arguments

    @property
    def addrs(self) -> list[int]:
        return [tensor.ctypes.data for tensor in self.memory]

    def blocks_key(self, model_id: int = 0) -> BlocksCacheKey:
        return BlocksCacheKey(self.prompt.cluster_id, model_id)

    def source_key(self, batch_index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.prompt.cluster_id, self.source.cache_id, batch_index)

    def target_key(self, batch_index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.decoder.cluster_id, self.target.cache_id, batch_index)

    def target_blocks_key(self) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.decoder.cluster_id, self.target_blocks.cache_id)

    def prompt_info(self) -> LLMClusterInfo:
        return cluster_info(self.prompt)

    # -- proof of life

    def check_alive(self) -> None:
        """Pull new content over the link and compare it."""
        self.turn += 1
        for tensor in self.alive_source.numpy():
            tensor[1] = self.turn
        self.d.pull_blocks(self.blocks_key(ALIVE_MODEL), self.alive_target, [1], [2])
        for tensor in self.alive_target.numpy():
            np.testing.assert_array_equal(tensor[2], np.full(BLOCK, self.turn, np.float32))

    def check_lone_listens(self) -> None:
        """Link to `lone`, use the link and end it."""
        must_link(self.decoder, self.lone)
        self.decoder.check_link_status(self.lone.cluster_id)
        overall, _ = self.decoder.unlink_clusters([cluster_info(self.lone)], timeout=LINK_MS)
        assert overall is LLMStatusCode.LLM_SUCCESS

    def finalize(self) -> None:
        """What the rows "after finalize" find."""
        for end in (self.decoder, self.prompt, self.lone):
            end.finalize()


def _end(role: LLMRole, made: LLMConfig) -> LLMDataDist:
    end = LLMDataDist(role, next(_cluster_ids))
    end.init(made)
    return end


@contextmanager
def world(v2: bool = True, by_id_only: bool = False) -> Iterator[World]:
    """A world that is taken down in the end."""
    configs = [config(listen=listen, v2=v2) for listen in ("127.0.0.1:0", None, "127.0.0.1:0")]
    for made in configs:
        made.enable_remote_cache_accessible = by_id_only
    options = configs[2].generate_options()
    del options["llm.MemPoolConfig"]
    with ExitStack() as stack:
        prompt = stack.enter_context(_end(LLMRole.PROMPT, configs[0]))
        decoder = stack.enter_context(_end(LLMRole.DECODER, configs[1]))
        lone = stack.enter_context(LLMDataDist(LLMRole.PROMPT, next(_cluster_ids)))
        lone.init(options)
        must_link(decoder, prompt)
        managers = [end.cache_manager if v2 else end.kv_cache_manager for end in (prompt, decoder, lone)]
        yield World(prompt, decoder, lone, *managers)
