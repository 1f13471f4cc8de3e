# SPDX-License-Identifier: Apache-2.0
"""This worker's LLMDataDist: its pool, its registered caches, its links. The only file that drives datadist_core."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferReport,
    TransferWithCacheKeyConfig,
)

from ..messages import Endpoint
from .kv_layout import LocalCache
from .memory import PoolMemory
from .peers import link_failed
from .planner import BlockCopy, BlockPairs

_PAGE_SHIFT = 16
#: Longest time for one layer of a push to one worker.
_LAYER_TIMEOUT_MS = 60_000
_LINKED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)


class ListenError(RuntimeError):
    """The address to listen on cannot be used. The text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A `BlockCopy` from a peer's cache into ours, in the words of the core. `slices` None = whole pages."""

    source: BlocksCacheKey
    target: Cache
    source_layers: range
    target_layers: range
    slices: tuple[tuple[int, int, int], ...] | None


class DataDistNode:
    """One LLMDataDist for one worker, named anew each time it starts.

    Args:
        host, port: where to listen; port 0 = any free one, see `port`.
        backend, backend_options: the core's `transfer_backend` and `global_resource_config`.
        pool_bytes: how much memory `allocate` may hand out; it costs nothing until used. 0 = no pool.
        huge_pages: the pool lies in the system's huge pages, reserved at once.
        integrity: the core's `integrity`, for what this worker pulls.
        security: the core's `security`, as an object.

    Raises:
        ListenError: the address cannot be bound.
        LLMException: LLM_OUT_OF_MEMORY: no pool of that size, or too few huge pages; the text says the remedy.
    """

    def __init__(
        self,
        host: str,
        port: int,
        backend: str,
        pool_bytes: int,
        backend_options: Mapping[str, Any] = MappingProxyType({}),
        huge_pages: bool = False,
        integrity: str = "off",
        security: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.host = host
        self.cluster_id = secrets.randbits(63) + 1
        self._datadist = LLMDataDist(LLMRole.MIX, self.cluster_id)
        config = LLMConfig()
        config.enable_cache_manager = True
        config.local_comm_res = ""
        config.listen_ip_info = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config.transfer_backend = backend
        config.global_resource_config = json.dumps(dict(backend_options))
        config.integrity = integrity
        config.sync_kv_timeout = _LAYER_TIMEOUT_MS
        if security:
            config.security = json.dumps(dict(security))
        if pool_bytes > 0:
            pool = {"memory_size": _whole_pages(pool_bytes), "page_shift": _PAGE_SHIFT, "huge_pages": huge_pages}
            config.host_mem_pool_cfg = json.dumps(pool)
        try:
            self._datadist.init(config.generate_options())
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY:
                raise  # it names the option and the remedy
            _explain_listen(host, port, error)
        address = self._datadist.listen_address
        if address is None:
            raise ListenError(f"nothing listens on {host}:{port}")
        self.port = address.port

    def allocate(self, size_bytes: int) -> PoolMemory:
        """Pool memory that no peer can reach until `register` names it."""
        desc = CacheDesc(1, (1, size_bytes), DataType.DT_INT8, Placement.HOST)
        raw = self._datadist.cache_manager.allocate_blocks_cache(desc)
        return PoolMemory(raw.tensor_addrs[0], size_bytes, raw)

    def register(self, local: LocalCache) -> Cache:
        """Let peers read these pages, under their model id."""
        described = local.description
        shape = described.num_pages, described.page_bytes
        desc = CacheDesc(described.num_tensors, shape, DataType.DT_INT8, Placement.HOST)
        key = BlocksCacheKey(self.cluster_id, described.model_id)
        return self._datadist.cache_manager.register_blocks_cache(
            desc, list(local.addresses), key, remote_accessible=True
        )

    def serve(self, name: str, handler: Callable[[int, bytes], bytes]) -> None:
        self._datadist.register_service(name, handler)

    def on_link_lost(self, callback: Callable[[int, LLMException], None]) -> None:
        self._datadist.on_link_lost(callback)

    def link(self, endpoint: Endpoint, timeout_s: float) -> str:
        """Link; returns which backend it got, and why not a better one."""
        _, [status] = self._datadist.link_clusters([_info(endpoint)], timeout=_ms(timeout_s))
        if status not in _LINKED:
            reason = self._datadist.link_failure(endpoint.cluster_id)
            raise link_failed(endpoint, str(reason) if reason else status.name)
        found = self._datadist.link_info(endpoint.cluster_id)
        why_not = "; ".join(f"not {name}: {reason}" for name, reason in found.rejected.items())
        return f"over {found.backend}" + (f" ({why_not})" if why_not else "")

    def unlink(self, endpoint: Endpoint) -> None:
        self._datadist.unlink_clusters([_info(endpoint)], timeout=1000, force=True)

    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        return self._datadist.call(cluster_id, name, body, timeout_s)

    def prepare(self, cluster_id: int, copy: BlockCopy, target: Cache) -> Pull:
        """What all pulls of that copy have in common."""
        key, slices = BlocksCacheKey(cluster_id, copy.source_model_id), None
        if copy.slices is not None:
            slices = tuple((s.target_offset, s.source_offset, s.num_bytes) for s in copy.slices)
        return Pull(key, target, copy.source_tensors, copy.target_tensors, slices)

    def pull(self, pull: Pull, pairs: BlockPairs, deadline_s: float) -> TransferReport:
        """Pages of a peer's cache into ours. Returns when they are there; raises LLMException."""
        return self._datadist.cache_manager.pull_blocks(
            pull.source,
            pull.target,
            pairs.source,
            pairs.target,
            src_layer_range=pull.source_layers,
            dst_layer_range=pull.target_layers,
            tensor_num_per_layer=1,
            slices=pull.slices,
            deadline_s=deadline_s,
        )

    def push(
        self,
        cluster_id: int,
        copy: BlockCopy,
        tensors: range,
        source: Cache,
        pairs: BlockPairs,
        deadline_s: float,
        link_id: int | None = None,
    ) -> TransferReport:
        """Pages of `tensors`, some or all source tensors of `copy`, into a peer's cache; over no other link than
        `link_id`, if it is given.

        Returns when they are there; raises LLMException.
        """
        shift = copy.target_tensors.start - copy.source_tensors.start
        return self._datadist.cache_manager.push_blocks(
            BlocksCacheKey(cluster_id, copy.target_model_id),
            source,
            pairs.source,
            pairs.target,
            src_layer_range=tensors,
            dst_layer_range=range(tensors.start + shift, tensors.stop + shift),
            tensor_num_per_layer=1,
            slices=_push_slices(copy),
            deadline_s=deadline_s,
            link_id=link_id,
        )

    def push_layers(
        self,
        cluster_id: int,
        copy: BlockCopy,
        layers: LayerSynchronizer,
        source: Cache,
        pairs: BlockPairs,
        link_id: int | None = None,
    ) -> CacheTask:
        """As `push`, each tensor when `layers` releases it. Returns at once; raises LLMException."""
        key = BlocksCacheKey(cluster_id, copy.target_model_id)
        return self._datadist.cache_manager.transfer_cache_async(
            source,
            layers,
            [TransferWithCacheKeyConfig(key, copy.source_tensors, copy.target_tensors)],
            pairs.source,
            pairs.target,
            tensor_num_per_layer=1,
            slices=_push_slices(copy),
            link_id=link_id,
        )

    @property
    def num_links(self) -> int:
        """Links that are up, from either side."""
        return self._datadist.num_links

    def link_id(self, cluster_id: int) -> int | None:
        """Which link to that peer is up; None without one. A link that is made anew has another."""
        return self._datadist.link_id(cluster_id)

    def backend_of(self, cluster_id: int) -> str:
        """How bytes move to or from that peer. Raises LLMException."""
        return self._datadist.link_info(cluster_id).backend

    def find_cluster(self, host: str, port: int, timeout_s: float) -> int:
        """The cluster id of who listens there. Raises LLMException."""
        return self._datadist.find_cluster(host, port, timeout_s)

    def is_fenced(self, cluster_id: int, timeout_s: float) -> bool:
        """Whether, in time, no link to that cluster that is gone can be written over by it any more."""
        return self._datadist.wait_fenced(cluster_id, timeout_s)

    def close(self) -> None:
        """Idempotent. Links end, the pool is unmapped."""
        self._datadist.finalize()


def _info(endpoint: Endpoint) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = endpoint.cluster_id
    info.append_remote_ip_info(endpoint.host, endpoint.port)
    return info


def _push_slices(copy: BlockCopy) -> list[tuple[int, int, int]] | None:
    return None if copy.slices is None else [(s.source_offset, s.target_offset, s.num_bytes) for s in copy.slices]


def _whole_pages(size_bytes: int) -> int:
    """The pool's size: whole pages, and one more for alignment."""
    return ((size_bytes >> _PAGE_SHIFT) + 2) << _PAGE_SHIFT


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _explain_listen(host: str, port: int, error: LLMException) -> NoReturn:
    raise ListenError(
        f"the connector cannot start on {host}:{port}: {error}. Set kv_connector_extra_config "
        '{"host": "an address of this machine that the other engines reach", "port": 0 or a free port}'
    ) from error
