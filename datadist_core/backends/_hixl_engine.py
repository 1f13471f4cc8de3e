# SPDX-License-Identifier: Apache-2.0
"""The vendor's object in this process, and our memory registered with it.

Its limits shape what is here: memory can only be registered while there are no links; a call cannot be cancelled and
ends with sync_kv_timeout at the latest; after a transfer that timed out the link is of no use. Nothing is published
about calls from several threads, so at most one call that moves or registers data, and one that makes or ends links,
is under way at a time.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ClosedError, LLMException, TimedOut, Unreachable
from ..transfer.plan import Items, Op
from ..types import Deadline, Placement
from ._hixl_identity import TABLE_MODEL_ID, Identity
from ._hixl_options import Address, CannOptions
from ._hixl_vendor import VendorCache, VendorDataDist, status_name, vendor_errors

logger = logging.getLogger(__name__)

MAX_LINK_S = 60.0
_UNLINK_MS = 3000
_SUCCESS = "LLM_SUCCESS"


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """Memory in the vendor's hands.

    Attributes:
        caches: by block size.
        models: the model id that peers find it by, by block size.
        owner: kept alive for as long.
    """

    address: int
    size_bytes: int
    caches: dict[int, VendorCache]
    models: dict[int, int]
    owner: object = None


class VendorEngine:
    """One LLMDataDist of the vendor, as a V2 end. Thread-safe.

    Args:
        vendor: the vendor's package.
        address: where peers find this end.
        listens: whether to listen there from the start.

    Raises Unreachable with the reason.
    """

    def __init__(self, vendor: Any, options: CannOptions, address: Address, listens: bool) -> None:
        self._vendor = vendor
        self._options = options
        self._linking, self._moving = threading.Lock(), threading.Lock()
        self._model_ids = itertools.count(TABLE_MODEL_ID + 1)
        self.cluster_id = secrets.randbits(63)
        self.address, self.listens = address, listens
        self._dist: VendorDataDist | None = None
        try:
            with vendor_errors("be initialised"):
                role = getattr(self._vendor.LLMRole, options.role)
                dist: VendorDataDist = self._vendor.LLMDataDist(role, self.cluster_id)
                dist.init(self._init_options())
                self._dist, self._role = dist, role
        except LLMException as error:
            raise Unreachable(f"{error} (it allows one LLMDataDist per process)") from error

    def _init_options(self) -> dict[str, str]:
        config = self._vendor.LLMConfig()
        config.device_id = self._options.device_id
        config.sync_kv_timeout = self._options.timeout_ms
        config.enable_cache_manager = True
        if self._options.local_comm_res is not None:
            config.local_comm_res = self._options.local_comm_res
        if self.listens:
            config.listen_ip_info = str(self.address)
        return {**config.generate_options(), **self._options.options}

    def listen(self, address: Address) -> None:
        """Listen from now on. Raises Unreachable: the vendor allows it only while there are no links."""
        try:
            with self._linking, vendor_errors(f"listen at {address}"):
                self._opened().switch_role(self._role, {"llm.listenIpInfo": str(address)})
        except LLMException as error:
            raise Unreachable(str(error)) from error
        self.address, self.listens = address, True

    def close(self) -> None:
        """Links end, memory is released. Idempotent."""
        with self._linking, self._moving:
            dist, self._dist = self._dist, None
            if dist is None:
                return
            try:
                with vendor_errors("finalize"):
                    dist.finalize()
            except LLMException as error:
                logger.warning("%s", error)

    # -- memory

    def register(
        self,
        address: int,
        size_bytes: int,
        placement: Placement,
        block_sizes: Iterable[int],
        for_peers: bool,
        model_id: int | None = None,
    ) -> Registered:
        """Register memory in blocks of each size that fits and that the vendor takes; maybe none.

        Args:
            model_id: instead of a new one, for the only size.
        """
        found = Registered(address, size_bytes, {}, {})
        for block_bytes in block_sizes:
            if block_bytes <= size_bytes:
                number = next(self._model_ids) if model_id is None else model_id
                try:
                    cache = self._register(
                        address, size_bytes // block_bytes, block_bytes, placement, number, for_peers
                    )
                except LLMException as error:
                    logger.info("%d bytes in blocks of %d are left out: %s", size_bytes, block_bytes, error)
                else:
                    found.caches[block_bytes], found.models[block_bytes] = cache, number
        return found

    def register_own(self, size_bytes: int, block_sizes: Iterable[int]) -> Registered:
        """New memory, zeroed, on a page, that is neither a user's nor for peers."""
        memory = np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        found = self.register(int(memory.ctypes.data), size_bytes, Placement.HOST, block_sizes, for_peers=False)
        return replace(found, owner=memory)

    def _register(
        self, address: int, num_blocks: int, block_bytes: int, placement: Placement, model_id: int, for_peers: bool
    ) -> VendorCache:
        vendor = self._vendor
        with self._moving, vendor_errors(f"register {num_blocks * block_bytes} bytes"):
            kind = getattr(vendor.Placement, placement.name)
            desc = vendor.CacheDesc(1, [num_blocks, block_bytes], vendor.DataType.DT_UINT8, kind)
            key = vendor.BlocksCacheKey(self.cluster_id, model_id)
            manager = self._opened().cache_manager
            return manager.register_blocks_cache(desc, [address], key, remote_accessible=for_peers)

    def unregister(self, registered: Registered) -> None:
        """After the call that is under way."""
        for cache in registered.caches.values():
            try:
                with self._moving, vendor_errors("unregister memory"):
                    self._opened().cache_manager.unregister_cache(cache.cache_id)
            except LLMException as error:
                logger.warning("%s", error)

    def move(self, op: Op, peer: Identity, model_id: int, cache: VendorCache, remote: Items, local: Items) -> None:
        """Blocks `remote[i]` of what the peer registered under `model_id` to or from blocks `local[i]` of `cache`."""
        key = self._vendor.BlocksCacheKey(peer.cluster_id, model_id)
        there, here = remote.tolist(), local.tolist()
        with self._moving, vendor_errors(f"move {len(here)} blocks"):
            manager = self._opened().cache_manager
            if op is Op.READ:
                manager.pull_blocks(key, cache, there, here, tensor_num_per_layer=1)
            else:
                manager.push_blocks(key, cache, here, there, tensor_num_per_layer=1)

    # -- links

    def link(self, peer: Identity, deadline: Deadline) -> None:
        """Dial a peer that is not linked. Raises Unreachable or TimedOut."""
        timeout_ms = max(1, math.ceil(min(deadline.remaining_s(), MAX_LINK_S) * 1000))
        with self._linking, vendor_errors(f"link with {peer.address}"):
            status, each = self._opened().link_clusters([self._cluster_info(peer)], timeout=timeout_ms)
        name = status_name(each[0] if each else status)
        if name != _SUCCESS or status_name(status) != _SUCCESS:
            kind = TimedOut if name == "LLM_TIMEOUT" else Unreachable
            raise kind(f"the vendor's library could not link with {peer.address}: {name}")

    def is_linked(self, peer: Identity) -> bool:
        """Whether the vendor moves data between this end and the peer."""
        try:
            with self._linking, vendor_errors("check a link"):
                self._opened().check_link_status(peer.cluster_id)
        except ClosedError:
            raise
        except LLMException:
            return False
        return True

    def unlink(self, peer: Identity) -> None:
        """At this end only: the peer, which may be dead, is not waited for. Unknown peers are a no-op."""
        try:
            with self._linking, vendor_errors("unlink"):
                clusters = [self._cluster_info(peer)]
                status, _ = self._opened().unlink_clusters(clusters, timeout=_UNLINK_MS, force=True)
            logger.debug("unlinking cluster %d: %s", peer.cluster_id, status_name(status))
        except LLMException as error:
            logger.info("%s", error)

    def _cluster_info(self, peer: Identity) -> Any:
        info = self._vendor.LLMClusterInfo()
        info.remote_cluster_id = peer.cluster_id
        info.append_local_ip_info(self.address.host, self.address.port)
        if peer.port:
            info.append_remote_ip_info(peer.host, peer.port)
        return info

    def _opened(self) -> VendorDataDist:
        if self._dist is None:
            raise ClosedError("the cann backend is not open")
        return self._dist
