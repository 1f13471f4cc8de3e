# SPDX-License-Identifier: Apache-2.0
"""Which backends can two ends really use? Asked by reading the peer's beacon through each of them.

A capability flag says what a backend can do in general; another user id, another container, a ptrace restriction or
another host decides what it can do between these two processes. So every offered backend is connected and made to
read 64 known bytes of the peer; only what comes back right counts.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import LLMException, Unreachable
from ..memory.grid import Grid
from ..memory.pool import MemoryPool
from ..transfer.backend import Backend
from ..transfer.engine import TransferEngine
from ..transfer.plan import Batch, GridPair, Op, whole_item
from ..transfer.regions import ExportedRegion
from ..types import Deadline, Placement
from ..wire.messages import BackendOffer, Beacon, GridInfo, RegionInfo

logger = logging.getLogger(__name__)

BEACON_BYTES = 64
_PAGE_SHIFT = 10
#: Offsets are computed in int64; what a peer claims beyond this is no memory of this world.
_MAX_REGION_BYTES = 1 << 56
_ONE_ITEM = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Backend names that work, best first; the reason for each that does not."""

    usable: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)


class BeaconMemory:
    """A small pool of this process: the beacon that peers read, and room to read theirs into."""

    def __init__(self, region_id: int, grid_id: int) -> None:
        # A peer that could write here would make other peers' probes fail, or pass.
        self.pool = MemoryPool(
            1 << 20, Placement.HOST, page_shift=_PAGE_SHIFT, region_id=region_id, peers_only_read=True
        )
        self.value = secrets.token_bytes(BEACON_BYTES)
        self._allocation = self.pool.allocate(BEACON_BYTES)
        ctypes.memmove(self._allocation.address, self.value, BEACON_BYTES)
        self.grid = self._grid(grid_id, self._allocation.offset_bytes)

    @property
    def address(self) -> int:
        return self._allocation.address

    def beacon(self, exported: ExportedRegion) -> Beacon:
        """What peers are told."""
        return Beacon(grid_info(self.grid), region_info(exported), self.value)

    def read(self, engine: TransferEngine, backend: Backend, peer_id: int, beacon: Beacon, deadline: Deadline) -> None:
        """Read the peer's beacon. Raises Unreachable if other bytes come back, or the backend's own error."""
        scratch = self.pool.allocate(BEACON_BYTES)
        try:
            pair = GridPair(self._grid(0, scratch.offset_bytes), grid_of(beacon.grid, beacon.region.size_bytes))
            engine.run(
                backend, Batch(peer_id, Op.READ, (pair,), _ONE_ITEM, _ONE_ITEM, whole_item(BEACON_BYTES), deadline)
            )
            if ctypes.string_at(scratch.address, BEACON_BYTES) != beacon.value:
                raise Unreachable("a test read returned other bytes than the peer has")
        finally:
            self.pool.free(scratch)

    def _grid(self, grid_id: int, offset_bytes: int) -> Grid:
        return Grid(grid_id, self.pool.region.region_id, offset_bytes, BEACON_BYTES, BEACON_BYTES, 1)


def grid_info(grid: Grid) -> GridInfo:
    return GridInfo(grid.grid_id, grid.region_id, grid.offset_bytes, grid.stride_bytes, grid.item_bytes, grid.num_items)


def grid_of(info: GridInfo, region_bytes: int) -> Grid:
    """A peer's grid. ParamInvalid unless it is a sound layout within its region of `region_bytes`."""
    grid = Grid(info.grid_id, info.region_id, info.offset_bytes, info.stride_bytes, info.item_bytes, info.num_items)
    grid.check_inside(min(region_bytes, _MAX_REGION_BYTES))
    return grid


def region_info(exported: ExportedRegion) -> RegionInfo:
    return RegionInfo(exported.region.region_id, exported.region.size_bytes, exported.descriptors)


def probe_backends(
    engine: TransferEngine,
    memory: BeaconMemory,
    peer_id: int,
    offers: Sequence[BackendOffer],
    beacon: Beacon,
    *,
    initiator: bool,
    link_token: bytes,
    deadline: Deadline,
    check_wanted: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Connect and test every backend that both ends have open, in our order of preference.

    What is connected stays so until the handshake is over, also if it is of no use: the peer may be waiting for it.

    Args:
        check_wanted: raises what makes it pointless to go on.
    """
    result = ProbeResult(rejected=dict(engine.unavailable))
    identities = {offer.name: offer.identity for offer in offers}
    for name, backend in engine.backends.items():
        if name not in identities:
            result.rejected[name] = "the peer does not offer it"
            continue
        check_wanted()
        # One backend that hangs must not use up the time of the others.
        share = deadline.earlier(max(0.5, deadline.remaining_s() / 2))
        try:
            backend.connect(peer_id, identities[name], initiator=initiator, link_token=link_token, deadline=share)
            attach_region(backend, peer_id, beacon.region, share)
            memory.read(engine, backend, peer_id, beacon, share)
        except LLMException as error:
            check_wanted()  # the link's end may have been the reason
            result.rejected[name] = str(error)
        else:
            result.usable.append(name)
    return result


def attach_region(backend: Backend, peer_id: int, region: RegionInfo, deadline: Deadline) -> None:
    """Attach a peer's region. Raises Unreachable if the peer cannot export it through this backend."""
    descriptor = region.descriptors.get(backend.name)
    if descriptor is None:
        raise Unreachable(f"the peer's memory region {region.region_id} cannot be reached through {backend.name}")
    backend.attach(peer_id, region.region_id, region.size_bytes, descriptor, deadline)
