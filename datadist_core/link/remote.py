# SPDX-License-Identifier: Apache-2.0
"""What a link knows of the peer's caches: looked up once, used many times, forgotten when the owner says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CacheNotExist
from ..memory.grid import Grid
from ..transfer.backend import Backend
from ..types import Deadline
from ..wire.messages import CacheInfo
from .probe import grid_of


class RemoteCache:
    """A peer's cache. ParamInvalid if what the peer says of it is no sound layout.

    `backend_of` says, per region of it, which backend reaches that region.
    """

    def __init__(self, info: CacheInfo) -> None:
        self.info = info
        region_bytes = {region.region_id: region.size_bytes for region in info.regions}
        self.grids: tuple[Grid, ...] = tuple(grid_of(g, region_bytes.get(g.region_id, 0)) for g in info.grids)
        self.backend_of: dict[int, Backend] = {}
        self._idle = threading.Condition()
        self._num_uses = 0
        self._revoked = False

    @property
    def cache_id(self) -> int:
        return self.info.cache_id

    @property
    def revoked(self) -> bool:
        return self._revoked

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the block the owner does not get its Revoke answered. CacheNotExist if it is revoked already."""
        with self._idle:
            if self._revoked:
                raise CacheNotExist(f"cache {self.cache_id} was freed by its owner")
            self._num_uses += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_uses -= 1
                self._idle.notify_all()

    def revoke(self, deadline: Deadline) -> bool:
        """Allow no new use, then wait for the running ones. False if one is still running at the deadline."""
        with self._idle:
            self._revoked = True
            return self._idle.wait_for(lambda: self._num_uses == 0, deadline.timeout())
