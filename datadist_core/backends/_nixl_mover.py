# SPDX-License-Identifier: Apache-2.0
"""The agent that moves bytes, with what was registered, learned and prepared for it.

It is another one than the agent that peers know (the serving one), because it must be possible to destroy it: that is
the only certain end of a transfer with a peer that has stopped (see `_nixl_agent`). Peers do not notice; a successor
learns what it needs at the first batch that needs it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LLMException
from ..memory.region import Region
from ..transfer.plan import Batch, CopyList
from ._nixl_agent import Agent, Piece
from ._nixl_link import Descriptor, Identity, Link
from ._nixl_lists import Plan, PreparedLists, make_plan, range_pieces
from ._nixl_options import NixlOptions
from ._nixl_transfer import Transfer

_numbers = itertools.count()


def agent_name(kind: str) -> str:
    """Unique, and short: it is part of everything that peers are sent."""
    return f"{kind}{next(_numbers):x}-{os.urandom(6).hex()}"


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """Local memory that the agent knows. Holds the region, and with it the memory, until it is deregistered."""

    region: Region
    registered: Any


class Mover:
    """Thread-safe. `running` and `retired_at_s` belong to the runtime and are guarded by its lock."""

    def __init__(self, options: NixlOptions, find_region: Callable[[int], Region]) -> None:
        self.running: dict[int, Transfer] = {}
        self.retired_at_s: float | None = None
        self.agent = Agent(agent_name("m"), options)
        self._find_region = find_region
        self._lock = threading.RLock()
        self._lists = PreparedLists(self.agent)
        self._locals: dict[int, _Local] = {}
        self._loaded: dict[str, set[bytes]] = {}
        self._leaving_regions: set[int] = set()
        self._leaving_peers: set[str] = set()
        self._scratch = np.zeros(64, dtype=np.uint8)
        self.agent.register(self._scratch.ctypes.data, self._scratch.nbytes)

    def greet(self, peer: Identity, note: bytes) -> None:
        """Send a note to a peer's serving agent."""
        with self._lock:
            self._load(peer.name, peer.connection)
            self.agent.notify(peer.name, note)

    def plan(self, batch: Batch, link: Link, remote: Mapping[int, Descriptor]) -> Plan:
        """The plan of a batch. Raises ParamInvalid unless its local grids lie in registered memory."""
        with self._lock:
            local_base = self._local_bases(batch)
            self._learn(link.identity, remote.values())
            remote_base = {region_id: region.address for region_id, region in remote.items()}
            return make_plan(batch, self._lists, link.identity.name, local_base, remote_base)

    def plan_probe(self, peer: Identity, region: Descriptor) -> Sequence[Piece]:
        """Read the last bytes of a region into a place that nobody looks at."""
        with self._lock:
            self._learn(peer, [region])
        num_bytes = min(region.size_bytes, self._scratch.nbytes)
        here, there = self._scratch.ctypes.data, region.address + region.size_bytes - num_bytes
        ranges = CopyList(*(np.array([value], dtype=np.int64) for value in (here, there, num_bytes)))
        return tuple(range_pieces(ranges, peer.name))

    @property
    def has_leaving(self) -> bool:
        """Whether there is anything for `sweep` to do."""
        return bool(self._leaving_regions or self._leaving_peers)

    def drop_region(self, region_id: int) -> None:
        """Deregister a local region as soon as no transfer uses it."""
        with self._lock:
            self._leaving_regions.add(region_id)

    def drop_peer(self, peer_name: str) -> None:
        """Forget all about an agent as soon as no transfer uses it. What is still wanted is learned again."""
        with self._lock:
            self._leaving_peers.add(peer_name)

    def sweep(self, list_running: Callable[[], Sequence[Transfer]]) -> None:
        """Carry out what `drop_region` and `drop_peer` asked for, as far as running transfers allow.

        They are listed with our lock held: one that begins later plans later, and learns again what it needs.
        """
        with self._lock:
            if self.agent.closed:
                return
            running = list_running()
            for region_id in self._leaving_regions.difference(*(t.region_ids for t in running)):
                self._leaving_regions.discard(region_id)
                with contextlib.suppress(LLMException):  # an agent that is being closed deregisters by itself
                    self._deregister(region_id)
            for peer_name in self._leaving_peers - {t.peer_name for t in running}:
                self._leaving_peers.discard(peer_name)
                with contextlib.suppress(LLMException):  # NIXL may have forgotten a peer that died
                    self._unload(peer_name)

    def _local_bases(self, batch: Batch) -> dict[int, int]:
        bases: dict[int, int] = {}
        for pair in batch.pairs:
            region_id = pair.local.region_id
            if region_id not in bases:
                bases[region_id] = self._register(region_id).address
            pair.local.check_inside(self._locals[region_id].region.size_bytes)
        return bases

    def _register(self, region_id: int) -> Region:
        region = self._find_region(region_id)
        known = self._locals.get(region_id)
        if known is None:
            self._locals[region_id] = _Local(region, self.agent.register(region.address, region.size_bytes))
        return region

    def _deregister(self, region_id: int) -> None:
        known = self._locals.pop(region_id, None)
        if known is not None:
            self._lists.forget("")
            self.agent.deregister(known.registered)

    def _learn(self, peer: Identity, regions: Any) -> None:
        self._load(peer.name, peer.connection)
        for region in regions:
            self._load(peer.name, region.metadata)

    def _load(self, peer_name: str, metadata: bytes) -> None:
        loaded = self._loaded.setdefault(peer_name, set())
        if metadata not in loaded:
            self.agent.load(peer_name, metadata)
            self._lists.forget(peer_name)
            loaded.add(metadata)

    def _unload(self, peer_name: str) -> None:
        self._lists.forget(peer_name)
        if self._loaded.pop(peer_name, None):
            self.agent.unload(peer_name)
