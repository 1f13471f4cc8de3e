# SPDX-License-Identifier: Apache-2.0
"""What an `LLMDataDist` consists of between `init` and `finalize`, and in which order it is made and taken apart."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from .cache.cache import Cache
from .cache.desc import CacheDesc
from .cache.integrity import Integrity
from .cache.manager import CacheManager
from .cache.rules import Rules
from .cache.serving import BEACON_CACHE_ID, CacheServer
from .cache.store import CacheStore, next_grid_id, next_region_id
from .cache.table import CacheEntry, CacheTable
from .errors import LLMException, PeerLost
from .forks import process_token
from .link.communicator import CommunicatorTable
from .link.handshake import LocalEnd
from .link.manager import LinkManager
from .link.probe import BEACON_BYTES, BeaconMemory
from .memory.layout import CacheLayout, divide
from .services import ServiceTable
from .settings import Settings
from .transfer.backend import BackendContext
from .transfer.checksum import Checksummer
from .transfer.engine import TransferEngine
from .transfer.regions import RegionTable
from .types import DataType, LLMRole, Placement

logger = logging.getLogger(__name__)


class Parts:
    """Made by `init`, closed by `finalize`. Its attributes are what the public methods work with.

    Args:
        role: what the role is now.
        check_open: raises ClosedError once `finalize` was called.
    """

    def __init__(
        self, cluster_id: int, settings: Settings, role: Callable[[], LLMRole], check_open: Callable[[], None]
    ) -> None:
        self.settings = settings
        self.table = CacheTable()
        self.engine = TransferEngine()
        self.services = ServiceTable()
        self.checksummer = Checksummer()
        self.on_link_lost: list[Callable[[int, LLMException], None]] = []
        self.engine.open(settings.transfer_backend, self._context(cluster_id), settings.backend_options)
        try:
            self._build(cluster_id, settings, role, check_open)
        except BaseException:
            self.close()
            raise

    def _build(
        self, cluster_id: int, settings: Settings, role: Callable[[], LLMRole], check_open: Callable[[], None]
    ) -> None:
        self.regions = RegionTable(list(self.engine.backends.values()))
        # Asked only by peers, and so after `_build`.
        self.server = CacheServer(
            cluster_id,
            self.table,
            self.regions,
            self.checksummer,
            lambda key, of: self.cache_manager.keeper.drop_key(key, of),
        )
        self.store = CacheStore(settings, self.regions)
        self.beacon_memory = BeaconMemory(next_region_id(), next_grid_id())
        exported = self.regions.add(self.beacon_memory.pool.region)
        self.table.add(_beacon_entry(self.beacon_memory))
        local = LocalEnd(
            cluster_id=cluster_id,
            incarnation=secrets.token_bytes(16),
            v2=settings.v2,
            software=_software(),
            beacon=self.beacon_memory.beacon(exported),
            memory=self.beacon_memory,
            role=role,
            heartbeat_s=settings.heartbeat_s,
        )
        self.links = LinkManager(local, settings, self.engine, self.server, self.services.serve, self._report_link_lost)
        self.communicators = CommunicatorTable(cluster_id, self.links, self.services, settings.link_total_time_s)
        rules = Rules(settings, role, check_open)
        integrity = Integrity(settings.integrity == "checksum", self.checksummer, self.regions)
        self.cache_manager = CacheManager(
            cluster_id, settings, rules, self.engine, self.store, self.table, self.links, integrity
        )
        if settings.listen is not None:  # last: peers may come at once
            self.links.listeners.move(settings.listen)

    def close(self) -> None:
        """Links first (nobody may still reach us), then backends, then the memory."""
        if hasattr(self, "communicators"):
            self.communicators.close()
        if hasattr(self, "links"):
            self.links.close()
        self.checksummer.close()
        self.engine.close()
        if hasattr(self, "store"):
            self.store.close()
        if hasattr(self, "beacon_memory"):
            self.beacon_memory.pool.close()

    def _context(self, cluster_id: int) -> BackendContext:
        return BackendContext(
            # Both are asked only once links exist, and so after `_build`.
            serve_grid=lambda grid_id, op: self.server.serve_grid(grid_id, op),
            local_region=lambda region_id: self.regions.region(region_id),
            listen_host=self.settings.listen.host if self.settings.listen else None,
            process_token=process_token(),
            security=self.settings.security,
            report_peer_lost=self._data_path_broke,
        )

    def _data_path_broke(self, peer_id: int, error: LLMException) -> None:
        link = self.links.by_link_id(peer_id)
        if link is not None and link.is_up:  # while unlinking, the peer's end of the data path goes first
            link.close(PeerLost(f"the data path to cluster {link.peer.cluster_id} broke: {error}"))

    def _report_link_lost(self, cluster_id: int, error: LLMException) -> None:
        for callback in list(self.on_link_lost):
            try:
                callback(cluster_id, error)
            except Exception:  # the user's own code: the others must still be told
                logger.exception("an on_link_lost callback failed")


def _beacon_entry(memory: BeaconMemory) -> CacheEntry:
    """The beacon as an entry of the cache table, so that two-sided backends serve it like any other grid."""
    desc = CacheDesc(1, (1, BEACON_BYTES), DataType.DT_UINT8, Placement.HOST)
    cache = Cache(BEACON_CACHE_ID, desc, [memory.address], is_blocks_cache=True)
    division = divide(desc.shape, desc.data_type.item_bytes, desc.batch_dim_index, is_blocks=True)
    layout = CacheLayout((memory.grid,), True, division, desc.data_type.name)
    return CacheEntry(cache, layout, True, False, lambda: None)


def _software() -> str:
    try:
        return f"vllm-datadist {version('vllm-datadist')}"
    except PackageNotFoundError:
        return "vllm-datadist (not installed)"
