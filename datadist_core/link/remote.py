# SPDX-License-Identifier: Apache-2.0
"""What a link knows of the peer's caches: looked up once, used many times, forgotten when the owner says so."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..errors import CacheNotExist, ParamInvalid
from ..memory.grid import Grid
from ..memory.layout import CacheLayout, divide
from ..transfer.backend import Backend
from ..types import DataType, Deadline
from ..wire.messages import CacheInfo
from .probe import grid_of

#: Ids travel in 64 bits, signed at places.
_MAX_ID = 2**63 - 1


class RemoteCache:
    """A peer's cache. ParamInvalid if what the peer says of it is no sound layout.

    `backend_of` says, per region of it, which backend reaches that region.

    Args:
        lock: guards its uses; the link's, so that a transfer can begin with one lock for both.
    """

    def __init__(self, info: CacheInfo, lock: threading.Lock | None = None) -> None:
        self.info = info
        region_bytes = {region.region_id: region.size_bytes for region in info.regions}
        grids = tuple(grid_of(g, region_bytes.get(g.region_id, 0)) for g in info.grids)
        self.layout = _layout_of(info, grids)
        self.backend_of: dict[int, Backend] = {}
        self._lock = lock or threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_uses = 0
        self._revoked = False

    @property
    def cache_id(self) -> int:
        return self.info.cache_id

    @property
    def revoked(self) -> bool:
        return self._revoked

    def hold(self) -> RemoteUse:
        """Use it: until the result is closed (or its `with` block left) the owner does not get its Revoke answered.

        CacheNotExist if it is revoked already.
        """
        with self._lock:
            if not self.begin_use_locked():
                raise CacheNotExist(f"cache {self.cache_id} was freed by its owner")
        return RemoteUse(self)

    def begin_use_locked(self) -> bool:
        """With the lock held: as `hold`, but ended by `end_use_locked`, and False where that raises."""
        if self._revoked:
            return False
        self._num_uses += 1
        return True

    def end_use_locked(self) -> None:
        """With the lock held."""
        self._num_uses -= 1
        if self._revoked:
            self._idle.notify_all()

    def end_use(self) -> None:
        with self._lock:
            self.end_use_locked()

    def revoke(self, deadline: Deadline) -> bool:
        """Allow no new use, then wait for the running ones. False if one is still running at the deadline."""
        with self._idle:
            self._revoked = True
            return self._idle.wait_for(lambda: self._num_uses == 0, deadline.timeout())


class RemoteUse:
    """One use of a RemoteCache; a context manager."""

    __slots__ = ("_cache",)

    def __init__(self, cache: RemoteCache) -> None:
        self._cache: RemoteCache | None = cache

    def close(self) -> None:
        """End it. Idempotent."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.end_use()

    def __enter__(self) -> RemoteUse:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class KeyedCache:
    """What a key of a peer names: a cache, and a batch entry in it (0 for a blocks cache)."""

    cache: RemoteCache
    batch_index: int


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where an address of a peer lies: byte `offset_bytes` of a tensor of a cache of it."""

    cache: RemoteCache
    tensor: int
    offset_bytes: int

    def grid(self, item_bytes: int, num_items: int | None = None) -> Grid:
        """The tensor's memory from here on as items; as many as there is room for if `num_items` is None."""
        whole = self.cache.layout.grids[self.tensor]
        room = (whole.end_bytes - whole.offset_bytes - self.offset_bytes) // item_bytes
        return whole.cut(self.offset_bytes, item_bytes, room if num_items is None else num_items)


def _layout_of(info: CacheInfo, grids: tuple[Grid, ...]) -> CacheLayout:
    """The peer's description, held against its own grids: a wrong one is refused, not followed."""
    ids = (info.cache_id, *(grid.grid_id for grid in grids), *(grid.region_id for grid in grids))
    if not 0 <= min(ids) <= max(ids) <= _MAX_ID:
        raise ParamInvalid(f"the peer describes its cache {info.cache_id} with an id that is out of range")
    element_bytes = DataType[info.data_type].item_bytes if info.data_type in DataType.__members__ else 0
    if not info.shape or min(info.shape) < 1 or not 0 <= info.batch_dim_index < len(info.shape) or not element_bytes:
        raise ParamInvalid(f"the peer describes its cache {info.cache_id} as {info.shape} of {info.data_type!r}")
    division = divide(info.shape, element_bytes, info.batch_dim_index, info.is_blocks_cache)
    sizes = {(grid.item_bytes, grid.num_items) for grid in grids}
    if len(grids) != info.num_tensors or sizes != {(division.item_bytes, division.num_items)}:
        raise ParamInvalid(f"the peer's description of its cache {info.cache_id} contradicts its grids")
    return CacheLayout(grids, info.is_blocks_cache, division, info.data_type)
