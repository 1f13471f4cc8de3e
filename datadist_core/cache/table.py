# SPDX-License-Identifier: Apache-2.0
"""The table of this side's caches: by id, by key, by grid; who holds one, and who is using it right now.

Life of a cache: it is *held* by its id and by its keys; when the last hold is dropped it is *retired* (no look-up finds
it, no new use starts); when the last use (pin) ends as well, its memory is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import CacheNotExist, ParamInvalid
from ..memory.grid import Grid
from .cache import Cache
from .desc import BlocksCacheKey, CacheKey

Key = CacheKey | BlocksCacheKey


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cache with its grids (one per tensor) and what to do when nobody uses it any more.

    `key_to_index` maps each key to the batch entry it stands for (0 for a blocks cache).
    """

    cache: Cache
    grids: tuple[Grid, ...]
    remote_accessible: bool
    release_memory: Callable[[], None]
    key_to_index: dict[Key, int] = field(default_factory=dict)
    num_pins: int = 0
    retired: bool = False

    @property
    def cache_id(self) -> int:
        return self.cache.cache_id


@dataclass(frozen=True, slots=True)
class KeyedEntry:
    """What a key names: a cache and a batch entry in it."""

    entry: CacheEntry
    batch_index: int


class CacheTable:
    """Thread-safe; never calls `release_memory` with its lock held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, CacheEntry] = {}
        self._by_key: dict[Key, CacheEntry] = {}
        self._by_grid: dict[int, CacheEntry] = {}

    def add(self, entry: CacheEntry) -> None:
        """Make a cache known. A key that named another cache before names this one from now on."""
        with self._lock:
            self._by_id[entry.cache_id] = entry
            for key in entry.key_to_index:
                if (previous := self._by_key.get(key)) is not None:
                    previous.key_to_index.pop(key, None)
                self._by_key[key] = entry
            for grid in entry.grids:
                self._by_grid[grid.grid_id] = entry

    def by_id(self, cache_id: int) -> CacheEntry:
        with self._lock:
            entry = self._by_id.get(cache_id)
        if entry is None:
            raise CacheNotExist(f"cache_id={cache_id} does not exist here (never allocated, or freed)")
        return entry

    def by_key(self, key: Key) -> KeyedEntry:
        with self._lock:
            entry = self._by_key.get(key)
            if entry is not None:
                return KeyedEntry(entry, entry.key_to_index[key])
        raise CacheNotExist(f"{key!r} names no cache here (never set, or dropped)")

    def retire(self, cache_id: int) -> CacheEntry | None:
        """Take a cache out of all look-ups. None if it is not there (any more). Memory stays until `settle`."""
        with self._lock:
            entry = self._by_id.pop(cache_id, None)
            if entry is None:
                return None
            for key in entry.key_to_index:
                self._by_key.pop(key, None)
            for grid in entry.grids:
                self._by_grid.pop(grid.grid_id, None)
            # Counts as a use until `settle`, so that an unpin in between does not free the memory.
            entry.num_pins += 1
            entry.retired = True
            return entry

    def settle(self, entry: CacheEntry) -> None:
        """The last step of freeing a retired cache: its memory goes back once no pin is left."""
        self._unpin(entry)

    @contextmanager
    def pinned(self, cache_id: int) -> Iterator[CacheEntry]:
        """Use a cache: its memory is not given back within the block."""
        entry = self._pin(lambda: self._by_id.get(cache_id), f"cache_id={cache_id} does not exist here")
        try:
            yield entry
        finally:
            self._unpin(entry)

    @contextmanager
    def pinned_grid(self, grid_id: int) -> Iterator[tuple[CacheEntry, Grid]]:
        """Use the grid that a peer named. CacheNotExist if it is gone, ParamInvalid if peers may not touch it."""
        entry = self._pin(lambda: self._by_grid.get(grid_id), f"grid {grid_id} does not exist here (cache freed?)")
        try:
            if not entry.remote_accessible:
                raise ParamInvalid(f"cache {entry.cache_id} is not accessible to peers (remote_accessible=False)")
            yield entry, next(g for g in entry.grids if g.grid_id == grid_id)
        finally:
            self._unpin(entry)

    def _pin(self, find: Callable[[], CacheEntry | None], missing: str) -> CacheEntry:
        with self._lock:
            entry = find()
            if entry is None:
                raise CacheNotExist(missing)
            entry.num_pins += 1
            return entry

    def _unpin(self, entry: CacheEntry) -> None:
        with self._lock:
            entry.num_pins -= 1
            free_now = entry.retired and entry.num_pins == 0
        if free_now:
            entry.release_memory()
