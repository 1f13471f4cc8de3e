# SPDX-License-Identifier: Apache-2.0
"""A STAND-IN for `llm_datadist`, the Python package of Huawei's CANN: for tests of the cann backend, and nothing else.

It is not the vendor's package, contains nothing of it, and says nothing about an Ascend device. It is what the
published API says, as a program: every call is held against the published signatures, types, ranges and order, and
against the limits that the original has (one LLMDataDist per process, memory registered only before linking, at most 16
clusters a call, 512 links and 240 registered addresses, IPv4 only, no use of a link after a transfer that timed out).
What is not published, or not needed by the backend, is complained of: raised, logged, and kept in `complaints`. Bytes
really move, between threads or processes of one host or several, over sockets.

Nothing in the package loads this module by itself. A test names it, as the transfer_backend
"datadist_core.testing.ascend_standin:CannOverStandIn", or as `CannBackend(load=lambda: StandInPackage())`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from ..backends.hixl import CannBackend
from ..types import Deadline
from . import ascend_standin_types as types_
from .ascend_standin_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Published,
    complain,
    complaints,
    published,
    require,
    require_ints,
    require_range,
)
from .ascend_standin_wire import Request, Served, Wire, failure

__all__ = ["CannOverStandIn", "CannOverStrictStandIn", "StandInPackage", "complaints"]

MAX_CLUSTERS_PER_CALL, MAX_LINKS, MAX_ADDRESSES = 16, 512, 240
_CHECK_S = 1.0


class LLMDataDist(Published):
    """V2 only. `_package` is set by the package that it belongs to."""

    _package: StandInPackage

    @published
    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        require("role", role, LLMRole)
        require_range("cluster_id", cluster_id, 0, 2**64 - 1)
        self._role, self._cluster_id = role, cluster_id
        self._wire: Wire | None = None
        self._finalized = False
        self._manager: CacheManager | None = None
        self._needs_local_address = True

    @published
    def init(self, options: dict[str, str]) -> None:
        require("options", options, dict)
        for key, value in options.items():
            require("an option's key", key, str)
            require(f"options[{key!r}]", value, str)
        if self._finalized:
            complain("init after finalize")
        if self._wire is not None:
            return
        if options.get("llm.EnableCacheManager") != "1" and "llm.LocalCommRes" not in options:
            complain("the stand-in is V2 only: set enable_cache_manager or local_comm_res")
        self._package.enter(self)
        wire = Wire(self._cluster_id, int(options.get("llm.SyncKvCacheWaitTime", "1000")) / 1000)
        try:
            if (text := options.get("llm.listenIpInfo")) is not None:
                wire.listen(*_host_port(text))
        except BaseException:
            self._package.leave(self)
            raise
        self._wire, self._manager = wire, CacheManager(self._cluster_id, wire, self._package.overlapping)
        self._needs_local_address = not options.get("llm.LocalCommRes")

    @published
    def finalize(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._finalized = True
            wire.close()
            self._package.leave(self)

    @property
    def cache_manager(self) -> CacheManager:
        self._opened("cache_manager")
        manager = self._manager
        if manager is None:
            complain("cache_manager before init")
        return manager

    @published
    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        wire = self._checked_call("link_clusters", clusters, timeout)
        if wire.num_links + len(clusters) > MAX_LINKS:
            raise failure("LLM_CLUSTER_NUM_EXCEED_LIMIT", f"at most {MAX_LINKS} links")
        deadline = Deadline.after(timeout / 1000)
        return _overall([self._link(wire, cluster, deadline) for cluster in clusters])

    @published
    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        wire = self._checked_call("unlink_clusters", clusters, timeout)
        require("force", force, bool)
        dropped = [wire.drop(cluster.remote_cluster_id, tell=not force) for cluster in clusters]
        return _overall([LLMStatusCode["LLM_SUCCESS" if one else "LLM_NOT_YET_LINK"] for one in dropped])

    @published
    def check_link_status(self, remote_cluster_id: int) -> None:
        require_range("remote_cluster_id", remote_cluster_id, 0, 2**64 - 1)
        self._opened("check_link_status").ask(remote_cluster_id, Request("ping"), timeout_s=_CHECK_S)

    @published
    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        require("role", role, LLMRole)
        require("switch_options", switch_options, dict, type(None))
        wire = self._opened("switch_role")
        if wire.num_links:
            raise failure("LLM_EXIST_LINK", "there are links")
        self._role = role
        text = (switch_options or {}).get("llm.listenIpInfo")
        if text is None:
            wire.stop_listening()
        else:
            wire.listen(*_host_port(text))

    def _link(self, wire: Wire, cluster: LLMClusterInfo, deadline: Deadline) -> LLMStatusCode:
        if not cluster.remote:
            complain("link_clusters: a cluster without append_remote_ip_info")
        if self._needs_local_address and not cluster.local:
            complain("link_clusters: a cluster without append_local_ip_info, and local_comm_res is not set")
        try:
            wire.dial(cluster.remote_cluster_id, cluster.remote[0], max(0.001, deadline.remaining_s()))
        except LLMException as error:
            return error.status_code
        return LLMStatusCode["LLM_SUCCESS"]

    def _checked_call(self, name: str, clusters: Any, timeout: Any) -> Wire:
        require("clusters", clusters, list, tuple)
        for cluster in clusters:
            require("clusters", cluster, LLMClusterInfo)
        if not 1 <= len(clusters) <= MAX_CLUSTERS_PER_CALL:
            complain(f"{name}: {len(clusters)} clusters, not 1..{MAX_CLUSTERS_PER_CALL}")
        require_range("timeout", timeout, 1, 2**31 - 1)
        return self._opened(name)

    def _opened(self, name: str) -> Wire:
        if self._finalized:
            raise failure("LLM_ENGINE_FINALIZED", f"{name} after finalize")
        if self._wire is None:
            complain(f"{name} before init")
        return self._wire


class CacheManager(Published):
    def __init__(self, cluster_id: int, wire: Wire, overlapping: bool) -> None:
        self._cluster_id, self._wire, self._overlapping = cluster_id, wire, overlapping
        self._models: dict[int, int] = {}
        self._busy = threading.Lock()

    @published
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        with self._exclusive("register_blocks_cache"):
            require("cache_desc", cache_desc, CacheDesc)
            require_ints("addrs", addrs)
            require("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
            require("remote_accessible", remote_accessible, bool, type(None))
            return self._register(cache_desc, addrs, blocks_cache_key, remote_accessible)

    def _register(self, desc: CacheDesc, addrs: list[int], key: Any, accessible: bool | None) -> Cache:
        if len(addrs) != desc.num_tensors or desc.num_tensors != 1:
            complain(f"{len(addrs)} addresses for {desc.num_tensors} tensors; the stand-in takes one")
        if key.cluster_id != self._cluster_id or key.model_id in self._models.values():
            complain(f"the key {key.cluster_id}, {key.model_id} is of another cluster, or in use")
        if self._wire.num_links:
            raise failure("LLM_FAILED", "memory can be registered only before linking")
        if self._wire.num_registered >= MAX_ADDRESSES:
            raise failure("LLM_FAILED", f"at most {MAX_ADDRESSES} addresses can be registered")
        if not self._overlapping and self._wire.has_registered(addrs[0]):
            raise failure("LLM_FAILED", "this address is registered already")
        if accessible is None:
            accessible = desc.placement.name == "DEVICE"
        cache = Cache(desc, list(addrs))
        self._wire.register(key.model_id, Served(addrs[0], desc.shape[0], desc.block_bytes, accessible))
        self._models[cache.cache_id] = key.model_id
        return cache

    @published
    def unregister_cache(self, cache_id: int) -> None:
        with self._exclusive("unregister_cache"):
            require("cache_id", cache_id, int)
            if cache_id not in self._models:
                complain(f"cache_id={cache_id} is not registered")
            self._wire.unregister(self._models.pop(cache_id))

    @published
    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        with self._exclusive("pull_blocks"):
            there, view, here = self._sides(src_cache_key, src_blocks, dst_cache, dst_blocks)
            self._check_layers(dst_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
            data = self._wire.ask(src_cache_key.cluster_id, self._request("pull", src_cache_key, there, dst_cache))
            view[here] = np.frombuffer(data, dtype=np.uint8).reshape(len(here), -1)

    @published
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        with self._exclusive("push_blocks"):
            there, view, here = self._sides(dst_cache_key, dst_blocks, src_cache, src_blocks)
            self._check_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
            request = self._request("push", dst_cache_key, there, src_cache)
            self._wire.ask(dst_cache_key.cluster_id, request, view[here].tobytes())

    def _sides(self, key: Any, there: Any, cache: Any, here: Any) -> tuple[Any, Any, Any]:
        require("the key", key, BlocksCacheKey)
        require("the cache", cache, Cache)
        require_ints("the blocks there", there)
        require_ints("the blocks here", here)
        if not here or len(here) != len(there):
            complain(f"{len(here)} blocks here and {len(there)} there: not empty, and equally many")
        if cache.cache_id not in self._models:
            complain(f"cache_id={cache.cache_id} is not registered")
        local = np.array(here, dtype=np.int64)
        view = self._wire.local_view(self._models[cache.cache_id], local, cache.cache_desc.block_bytes)
        return np.array(there, dtype=np.int64), view, local

    def _check_layers(self, cache: Cache, src: Any, dst: Any, tensor_num_per_layer: int) -> None:
        """The default of 2 tensors is more than the caches here have."""
        if src is not None or dst is not None:
            complain("the stand-in moves all layers: no src_layer_range, no dst_layer_range")
        require_range("tensor_num_per_layer", tensor_num_per_layer, 1, cache.cache_desc.num_tensors)

    def _request(self, kind: str, key: BlocksCacheKey, there: Any, cache: Cache) -> Request:
        return Request(kind, key.model_id, cache.cache_desc.block_bytes, there.tobytes())

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Nothing is published about calls from several threads: the backend is to make none at the same time."""
        if not self._busy.acquire(blocking=False):
            complain(f"{name} while another call is under way")
        try:
            yield
        finally:
            self._busy.release()


class StandInPackage(ModuleType):
    """What `import llm_datadist` would give: the published names that the backend needs, and no other.

    Args:
        one_per_process: the original's limit. Without it both ends of a test can live in one process.
        overlapping: whether memory can be registered more than once. The published API does not say.
    """

    def __init__(self, one_per_process: bool = True, overlapping: bool = True) -> None:
        super().__init__("stand_in_for_llm_datadist", __doc__)
        self.overlapping = overlapping
        self._one_per_process = one_per_process
        self._lock = threading.Lock()
        self._open: list[LLMDataDist] = []
        self.LLMDataDist = type("LLMDataDist", (LLMDataDist,), {"_package": self})
        for name in (
            "LLMRole",
            "LLMStatusCode",
            "LLMConfig",
            "LLMClusterInfo",
            "LLMException",
            "DataType",
            "Placement",
        ):
            setattr(self, name, getattr(types_, name))
        self.CacheDesc, self.BlocksCacheKey = CacheDesc, BlocksCacheKey

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        complain(f"llm_datadist.{name} is not published, or not part of the stand-in")

    def enter(self, instance: LLMDataDist) -> None:
        with self._lock:
            if self._one_per_process and self._open:
                raise failure("LLM_FAILED", "there is an LLMDataDist in this process already")
            self._open.append(instance)

    def leave(self, instance: LLMDataDist) -> None:
        with self._lock:
            self._open.remove(instance)


_STRICT, _SEVERAL = StandInPackage(), StandInPackage(one_per_process=False)


class CannOverStandIn(CannBackend):
    """The cann backend over the stand-in; several in one process, so that tests can have both ends in one."""

    def __init__(self) -> None:
        super().__init__(load=lambda: _SEVERAL)


class CannOverStrictStandIn(CannBackend):
    """The cann backend over the stand-in with the original's limit of one per process."""

    def __init__(self) -> None:
        super().__init__(load=lambda: _STRICT)


def _overall(each: list[LLMStatusCode]) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    failed = [status for status in each if status.name != "LLM_SUCCESS"]
    return (LLMStatusCode["LLM_FAILED"] if failed else LLMStatusCode["LLM_SUCCESS"]), each


def _host_port(text: str) -> tuple[str, int]:
    """The original knows IPv4 and takes no port 0."""
    info = LLMClusterInfo()
    host, _, port = text.rpartition(":")
    info.append_local_ip_info(host, int(port) if port.isdigit() else 0)
    return info.local[0]
