# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth of one backend of a link, by reading only.

Every end has 64 known bytes that its peers may read (`link.probe`). Latency is that of reading them once. For bandwidth
a test end has some MiB; of any other end the same 64 bytes are read again and again with one request, which moves as
much but in small pieces, so that the figure is a lower bound. Nothing is ever written there, no user's data is read.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cache.store import next_region_id
from ..datadist import LLMDataDist
from ..errors import ParamInvalid, ProtocolError, RemoteError
from ..link.link import Link
from ..link.probe import BEACON_BYTES, attach_region, grid_of
from ..memory.grid import Grid
from ..memory.pool import MemoryPool
from ..transfer.backend import Backend
from ..transfer.plan import Batch, GridPair, Items, Op, whole_item
from ..types import Deadline, Placement
from ..wire import messages as m
from .scratch import BLOCK_BYTES, NUM_BLOCKS, SCRATCH_SERVICE, Scratch, decode_scratch, pattern

_ROOM_BYTES = BLOCK_BYTES * NUM_BLOCKS
#: One request for a beacon moves this much; a production peer is not to be kept busy longer than by a usual transfer.
_BEACON_READS = (2 << 20) // BEACON_BYTES
_LATENCY_S, _BANDWIDTH_S = 0.15, 0.25
_MAX_ROUNDS = 500
_MAX_BEACON_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """`piece_bytes`: of one item of a large read. `bytes_per_s`: of the median round."""

    backend: str
    latency_s: float
    bytes_per_s: float
    piece_bytes: int


class Reader:
    """Reads from one linked peer into memory of its own. Not thread-safe.

    Args:
        end: has the link.
        link: of `end`, up.
        scratch: what the peer serves, None if it is no test end.
        timeout_s: of everything with one backend.
    """

    def __init__(self, end: LLMDataDist, link: Link, scratch: Scratch | None, timeout_s: float) -> None:
        self._parts, self._link, self._timeout_s = end._open(), link, timeout_s
        self._deadline = Deadline.after(timeout_s)
        self._pool = MemoryPool(_ROOM_BYTES, Placement.HOST, next_region_id())
        self._parts.regions.add(self._pool.region)
        self._scratch = scratch
        self._cache = self._find(scratch) if scratch is not None else None

    def measure(self, backend: Backend) -> Measured:
        """Raises what the backend raises; ProtocolError if other bytes come than the peer has."""
        beacon = self._beacon()
        self._deadline = Deadline.after(self._timeout_s)
        with self._link.transferring():
            once = self._batch(beacon.grid, beacon.region, np.zeros(1, dtype=np.int64))
            latency_s = _median_s(lambda: self._run(backend, once), _LATENCY_S, _MAX_ROUNDS)
            large, rounds = self._large(backend, beacon)
            seconds = _median_s(lambda: self._run(backend, large), _BANDWIDTH_S, rounds)
            self._verify()
        return Measured(backend.name, latency_s, large.num_bytes / seconds, large.pairs[0].local.item_bytes)

    def close(self) -> None:
        self._parts.regions.remove(self._pool.region.region_id)
        self._pool.close()

    def _beacon(self) -> m.Beacon:
        beacon = self._link.peer.beacon
        if beacon is None:
            raise ProtocolError("the peer has no beacon")
        return beacon

    def _large(self, backend: Backend, beacon: m.Beacon) -> tuple[Batch, int]:
        """The largest read that the peer offers, and how often it may be repeated."""
        if self._cache is None:
            return self._batch(beacon.grid, beacon.region, np.zeros(_BEACON_READS, dtype=np.int64)), _MAX_BEACON_ROUNDS
        [region], [grid] = self._cache.regions, self._cache.grids
        attach_region(backend, self._link.link_id, region, self._deadline)
        return self._batch(grid, region, np.arange(NUM_BLOCKS, dtype=np.int64)), _MAX_ROUNDS

    def _batch(self, grid: m.GridInfo, region: m.RegionInfo, remote_items: Items) -> Batch:
        remote = grid_of(grid, region.size_bytes)
        num_items = len(remote_items)
        if num_items * remote.item_bytes > _ROOM_BYTES:
            raise ProtocolError(f"the peer serves items of {remote.item_bytes} bytes, which is no test memory")
        local = Grid(0, self._pool.region.region_id, 0, remote.item_bytes, remote.item_bytes, num_items)
        items = np.arange(num_items, dtype=np.int64)
        slices = whole_item(remote.item_bytes)
        batch = Batch(
            self._link.link_id, Op.READ, (GridPair(local, remote),), items, remote_items, slices, self._deadline
        )
        batch.check()
        return batch

    def _run(self, backend: Backend, batch: Batch) -> None:
        self._parts.engine.run(backend, batch)

    def _verify(self) -> None:
        """What the last read brought is what the peer has."""
        expected = (
            self._beacon().value * _BEACON_READS if self._scratch is None else pattern(self._scratch.seed).tobytes()
        )
        if ctypes.string_at(self._pool.region.address, len(expected)) != expected:
            raise ProtocolError("other bytes came than the peer has")

    def _find(self, scratch: Scratch) -> m.CacheInfo:
        key = m.Lookup(0, "blocks", self._link.peer.cluster_id, scratch.model_id)
        cache = self._link.peer_caches.find(key, self._deadline).cache.info
        if (cache.num_tensors, cache.shape) != (1, [NUM_BLOCKS, BLOCK_BYTES]) or len(cache.regions) != 1:
            raise ProtocolError(f"the test end serves {cache.num_tensors} x {cache.shape}; use one release on both")
        return cache


def scratch_of(end: LLMDataDist, cluster_id: int, timeout_s: float) -> Scratch | None:
    """What the peer serves for tests; None of an end that is no test end. Raises PeerLost, TimedOut."""
    try:
        return decode_scratch(end.call(cluster_id, SCRATCH_SERVICE, b"", timeout_s))
    except (ParamInvalid, RemoteError):
        return None


def control_round_trip_s(end: LLMDataDist, cluster_id: int, timeout_s: float) -> float:
    """Of a question over the control connection, whatever the answer. Raises PeerLost, TimedOut."""
    return _median_s(lambda: scratch_of(end, cluster_id, timeout_s), _LATENCY_S, 20)


def plain_copy_bytes_per_s() -> float:
    """Of one memmove of as much memory, within this process: what no transfer on this host can beat with one thread."""
    source, target = np.ones(_ROOM_BYTES, dtype=np.uint8), np.zeros(_ROOM_BYTES, dtype=np.uint8)
    seconds = _median_s(lambda: np.copyto(target, source), _LATENCY_S, _MAX_ROUNDS)
    return _ROOM_BYTES / seconds


def _median_s(act: Callable[[], object], at_most_s: float, max_rounds: int) -> float:
    """The median time of a round: one to warm up, then for that long, at least one."""
    act()
    times: list[float] = []
    ends = time.perf_counter() + at_most_s
    while not times or (time.perf_counter() < ends and len(times) < max_rounds):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
