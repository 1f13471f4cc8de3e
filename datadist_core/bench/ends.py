# SPDX-License-Identifier: Apache-2.0
"""The ends of the transfers: each holds memory, and the far one usually lives in a process of its own.

Every end has an outbox, filled once, that transfers read, and an inbox that they write. Which of its two ends a
transfer is started from is the contender's business.
"""

from __future__ import annotations

import functools
import json
import mmap
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.cache import Cache
from ..cache.desc import BlocksCacheKey, CacheDesc
from ..checks import HostPort
from ..cluster import LLMClusterInfo
from ..config import LLMConfig
from ..datadist import LLMDataDist
from ..errors import LLMException
from ..types import DataType, LLMRole, LLMStatusCode, Placement
from .blocks import BlockLists, Blocks, fill, matches
from .contract import PULL, TRANSFER_TIMEOUT_S, time_each
from .plain_ends import HOST, Bytes

ANSWER_TIMEOUT_S = 120.0
LINK_TIMEOUT_MS = 30_000
_SLACK_BYTES = 4 << 20
_LONG_LIST = 64


@dataclass(frozen=True, slots=True)
class Traced:
    """Memory that Python's allocators, NumPy's included, have given out: now, and at most since asked last."""

    now_bytes: int
    peak_bytes: int


class End:
    """An LLMDataDist with an inbox and an outbox. Usually it lives in a process of its own.

    Args:
        seed: of the outbox's content.
        cache_bytes: of the largest inbox that will be asked for.
        registered: both boxes are memory of our own that is registered; otherwise they come from the pool.
        options: of the backend.
        huge_pages: the pool lies in huge pages of the system.
        integrity: as in `LLMConfig`.
        heartbeat_ms: between two heartbeats on its links.
    """

    OUTBOX, INBOX = 0, 1  # model ids, by which the other end names the caches

    def __init__(
        self,
        backend: str,
        cluster_id: int,
        seed: int,
        cache_bytes: int,
        listen: bool = False,
        registered: bool = False,
        options: Mapping[str, Any] | None = None,
        huge_pages: bool = False,
        integrity: str = "off",
        heartbeat_ms: int = 4000,
    ) -> None:
        self.seed = seed
        self.dist = LLMDataDist(LLMRole.MIX, cluster_id)
        self._memory = [anonymous_memory(cache_bytes) for _ in range(2)] if registered else []
        pool_bytes = _SLACK_BYTES + (0 if registered else 2 * cache_bytes)
        pool = {"memory_size": pool_bytes, "huge_pages": huge_pages}
        config = _config(backend, pool, listen, options or {})
        config.integrity = integrity
        config.heartbeat_interval = heartbeat_ms
        self.dist.init(config)
        self._caches: list[Cache] = []

    @property
    def outbox(self) -> Cache:
        return self._caches[self.OUTBOX]

    @property
    def inbox(self) -> Cache:
        return self._caches[self.INBOX]

    def address(self) -> HostPort:
        address = self.dist.listen_address
        if address is None:
            raise LLMException("this end does not listen")
        return address

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        """Make both boxes anew, for blocks of this size."""
        self._drop_caches()
        desc = CacheDesc(1, (num_cache_blocks, block_bytes), DataType.DT_UINT8, Placement.HOST)
        manager = self.dist.cache_manager
        for model_id in (self.OUTBOX, self.INBOX):
            key = BlocksCacheKey(self.dist.cluster_id, model_id)
            if self._memory:
                addresses = [self._memory[model_id].ctypes.data]
                self._caches.append(manager.register_blocks_cache(desc, addresses, key, remote_accessible=True))
            else:
                self._caches.append(manager.allocate_blocks_cache(desc, key))
        fill(view(self.outbox), self.seed)
        self.clear()

    def clear(self) -> None:
        view(self.inbox)[:] = 0

    def matches(self, seed: int, lists: BlockLists) -> bool:
        """Whether the inbox holds what `lists` takes out of the outbox of `seed`, and nothing else."""
        return matches(view(self.inbox), seed, lists)

    def move_each(self, peer_id: int, op: str, moves: Sequence[BlockLists], repeats: int) -> list[float]:
        """Pull from the outbox of that end, or push to its inbox. See `Contender.move_each`."""
        return time_each([self._mover(peer_id, op, lists) for lists in moves], repeats)

    def link(self, cluster_id: int, address: HostPort) -> float:
        """The seconds it took. Raises LLMException with the reason if the link cannot be made."""
        return time_each([functools.partial(self._link, cluster_id, address)], 1)[0]

    def unlink(self, cluster_id: int, address: HostPort) -> None:
        overall, _ = self.dist.unlink_clusters([_info(cluster_id, address)], timeout=LINK_TIMEOUT_MS)
        if overall is not LLMStatusCode.LLM_SUCCESS:
            raise LLMException(f"cannot unlink: {overall.name}", overall)

    def backend_to(self, cluster_id: int) -> str:
        """The backend that the link to that end uses."""
        return self.dist.link_info(cluster_id).backend

    def cpu_s(self) -> float:
        """Processor time that this process has used."""
        return time.process_time()

    def traced(self) -> Traced:
        """Asking makes everything slow until `stop_tracing`."""
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        now_bytes, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        return Traced(now_bytes, peak_bytes)

    def stop_tracing(self) -> None:
        tracemalloc.stop()

    def close(self) -> None:
        self.dist.finalize()

    def _link(self, cluster_id: int, address: HostPort) -> None:
        overall, _ = self.dist.link_clusters([_info(cluster_id, address)], timeout=LINK_TIMEOUT_MS)
        if overall is not LLMStatusCode.LLM_SUCCESS:
            raise self.dist.link_failure(cluster_id) or LLMException(f"cannot link: {overall.name}", overall)

    def _mover(self, peer_id: int, op: str, lists: BlockLists) -> Callable[[], object]:
        """All that a caller has before the request comes is made beforehand: the key, and the lists.

        The signatures want sequences of int; arrays are what callers with long lists hand over.
        """
        box = self.OUTBOX if op == PULL else self.INBOX
        is_long = lists.num_blocks > _LONG_LIST
        src: Any = lists.src if is_long else lists.src.tolist()
        dst: Any = lists.dst if is_long else lists.dst.tolist()
        manager = self.dist.cache_manager
        move, cache = (manager.pull_blocks, self.inbox) if op == PULL else (manager.push_blocks, self.outbox)
        return functools.partial(move, BlocksCacheKey(peer_id, box), cache, src, dst, deadline_s=TRANSFER_TIMEOUT_S)

    def _drop_caches(self) -> None:
        manager = self.dist.cache_manager
        while self._caches:
            cache = self._caches.pop()
            if self._memory:
                manager.unregister_cache(cache.cache_id)
            else:
                manager.deallocate_blocks_cache(cache)


def view(cache: Cache) -> Blocks:
    """The blocks of a cache, one row each."""
    return cache.numpy()[0]


def _config(backend: str, pool: Mapping[str, Any], listen: bool, options: Mapping[str, Any]) -> LLMConfig:
    config = LLMConfig()
    config.transfer_backend = backend
    config.enable_cache_manager = True
    config.global_resource_config = json.dumps({backend: dict(options)} if options else {})
    config.host_mem_pool_cfg = json.dumps(pool)
    if listen:
        config.listen_ip_info = f"{HOST}:0"
    return config


def _info(cluster_id: int, address: HostPort) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_remote_ip_info(address.host, address.port)
    return info


def anonymous_memory(num_bytes: int) -> Bytes:
    """Zeroed pages that are no file, as a program's own memory usually is."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
