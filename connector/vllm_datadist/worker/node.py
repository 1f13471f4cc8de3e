# SPDX-License-Identifier: Apache-2.0
"""This worker's LLMDataDist: its pool, its registered caches, its links. The only file that drives datadist_core."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferReport,
)

from ..messages import Endpoint
from .kv_layout import LocalCache
from .memory import PoolMemory
from .peers import link_failed
from .topology import BlockPairs, BlockSlice

_PAGE_SHIFT = 16
_LINKED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)


class ListenError(RuntimeError):
    """The address to listen on cannot be used. The text names it and the remedy."""


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
        """Let peers read these blocks, under their model id."""
        desc = CacheDesc(len(local.addresses), (local.num_blocks, local.block_bytes), DataType.DT_INT8, Placement.HOST)
        key = BlocksCacheKey(self.cluster_id, local.description.model_id)
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

    def pull(
        self,
        cluster_id: int,
        model_id: int,
        target: Cache,
        pairs: BlockPairs,
        slices: Sequence[BlockSlice] | None,
        deadline_s: float,
    ) -> TransferReport:
        """Blocks of a peer's cache into ours. Returns when they are there; raises LLMException."""
        return self._datadist.cache_manager.pull_blocks(
            BlocksCacheKey(cluster_id, model_id),
            target,
            pairs.source,
            pairs.target,
            tensor_num_per_layer=1,
            slices=None if slices is None else [(s.target_offset, s.source_offset, s.num_bytes) for s in slices],
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """Idempotent. Links end, the pool is unmapped."""
        self._datadist.finalize()


def _info(endpoint: Endpoint) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = endpoint.cluster_id
    info.append_remote_ip_info(endpoint.host, endpoint.port)
    return info


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
