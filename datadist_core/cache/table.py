# SPDX-License-Identifier: Apache-2.0
"""The table of this side's caches: by id, by key, by grid; who holds one, and who is using it right now.

Life of a cache: it is *held* by its id and, if it is a contiguous one from the pool, by each of its CacheKeys; when the
last hold is dropped it is *retired* (no look-up finds it, no new use starts); when the last use (pin) ends as well, its
memory is given up (views that users still have keep it even then, see `memory.live`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import CacheNotExist, ParamInvalid
from ..memory.grid import Grid
from ..memory.layout import CacheLayout
from ..types import Deadline
from .cache import Cache
from .desc import BlocksCacheKey, CacheKey

Key = CacheKey | BlocksCacheKey


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cache with its layout and what to do when nobody uses it any more.

    `key_to_index` maps each key to the batch entry it stands for (0 for a blocks cache). `keys_hold` says whether
    the keys keep the cache once its id's hold is dropped.
    """

    cache: Cache
    layout: CacheLayout
    remote_accessible: bool
    is_registered: bool
    release_memory: Callable[[], None]
    key_to_index: dict[Key, int] = field(default_factory=dict)
    keys_hold: bool = False
    held_by_id: bool = True
    num_pins: int = 0
    #: Of the pins, those of peers that are being served.
    num_served: int = 0
    retired: bool = False
    released: bool = False

    @property
    def cache_id(self) -> int:
        return self.cache.cache_id

    @property
    def grids(self) -> tuple[Grid, ...]:
        return self.layout.grids

    @property
    def is_held(self) -> bool:
        return self.held_by_id or (self.keys_hold and bool(self.key_to_index))


@dataclass(frozen=True, slots=True)
class KeyedEntry:
    """What a key names: a cache and a batch entry in it."""

    entry: CacheEntry
    batch_index: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A cache that has lost a hold. `retired`: it was the last one; whoever dropped it calls `CacheTable.settle`."""

    entry: CacheEntry
    retired: bool


class CacheTable:
    """Thread-safe; never calls `release_memory` with its lock held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unpinned = threading.Condition(self._lock)
        self._alive: dict[int, CacheEntry] = {}  # all, also those that only their keys hold
        self._by_id: dict[int, CacheEntry] = {}
        self._by_key: dict[Key, CacheEntry] = {}
        self._by_grid: dict[int, tuple[CacheEntry, Grid]] = {}

    def add(self, entry: CacheEntry) -> list[Dropped]:
        """Make a cache known. Returns the caches that lost a key to it: a key names the cache that has it last."""
        lost: dict[int, CacheEntry] = {}
        with self._lock:
            self._alive[entry.cache_id] = entry
            self._by_id[entry.cache_id] = entry
            for key in entry.key_to_index:
                if (previous := self._by_key.get(key)) is not None:
                    previous.key_to_index.pop(key, None)
                    lost[previous.cache_id] = previous
                self._by_key[key] = entry
            for grid in entry.grids:
                self._by_grid[grid.grid_id] = entry, grid
            return [self._retire_unless_held(previous) for previous in lost.values()]

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

    def entries(self) -> list[CacheEntry]:
        """All caches, also those that only their keys hold."""
        with self._lock:
            return list(self._alive.values())

    def drop_id(self, cache_id: int) -> Dropped | None:
        """The id stands for nothing from now on. None if it did not before."""
        with self._lock:
            entry = self._by_id.pop(cache_id, None)
            if entry is None:
                return None
            entry.held_by_id = False
            entry.cache.invalidate()
            return self._retire_unless_held(entry)

    def drop_key(self, key: Key, of_cache_id: int | None = None) -> Dropped | None:
        """The key names nothing from now on. None if it did not before, or names another cache than that one."""
        with self._lock:
            entry = self._by_key.get(key)
            if entry is None or of_cache_id not in (None, entry.cache_id):
                return None
            del self._by_key[key]
            entry.key_to_index.pop(key, None)
            return self._retire_unless_held(entry)

    def settle(self, entry: CacheEntry, deadline: Deadline) -> bool:
        """The last step of freeing a retired cache: its memory is given up once no pin is left.

        Waits until it is given up or, for memory of our own pools, until only transfers of this end keep it; False
        if the deadline came first.
        """
        self._unpin(entry)
        with self._unpinned:
            return self._unpinned.wait_for(lambda: _is_settled(entry), deadline.timeout())

    def serve_retired(self, entry: CacheEntry) -> None:
        """Count a peer that may still use a retired cache, until `end_serving`. Before `settle`."""
        with self._lock:
            entry.num_pins += 1
            entry.num_served += 1

    def end_serving(self, entry: CacheEntry) -> None:
        self._unpin(entry, served=True)

    @contextmanager
    def pinned(self, cache_id: int) -> Iterator[CacheEntry]:
        """Use a cache: its memory is not given up within the block."""
        entry = self.pin(cache_id)
        try:
            yield entry
        finally:
            self._unpin(entry)

    def pin(self, cache_id: int) -> CacheEntry:
        """Use a cache until `unpin`. CacheNotExist if it is freed."""
        missing = f"cache_id={cache_id} does not exist here (never allocated or registered, or freed)"
        return self._pin(lambda: self._by_id.get(cache_id), missing)

    def pin_held(self, entry: CacheEntry) -> bool:
        """Use a cache until `unpin`, if its id still stands for it."""
        with self._lock:
            if not entry.held_by_id:
                return False
            entry.num_pins += 1
            return True

    def unpin(self, entry: CacheEntry) -> None:
        self._unpin(entry)

    @contextmanager
    def pinned_entry(self, entry: CacheEntry) -> Iterator[None]:
        """Use a cache that was found just now. CacheNotExist if it has been freed since."""
        missing = f"cache_id={entry.cache_id} does not exist here any more (freed)"
        self._pin(lambda: None if entry.retired else entry, missing)
        try:
            yield
        finally:
            self._unpin(entry)

    @contextmanager
    def pinned_grid(self, grid_id: int) -> Iterator[tuple[CacheEntry, Grid]]:
        """Use the grid that a peer named. CacheNotExist if it is gone, ParamInvalid if peers may not touch it."""
        with self._lock:
            found = self._by_grid.get(grid_id)
            if found is None:
                raise CacheNotExist(f"grid {grid_id} does not exist here (cache freed?)")
            entry, _ = found
            entry.num_pins += 1
            entry.num_served += 1
        try:
            check_accessible(entry)
            yield found
        finally:
            self.end_serving(entry)

    def _retire_unless_held(self, entry: CacheEntry) -> Dropped:
        """With the lock held."""
        if entry.is_held or entry.retired:
            return Dropped(entry, retired=False)
        del self._alive[entry.cache_id]
        for key in entry.key_to_index:
            self._by_key.pop(key, None)
        entry.key_to_index.clear()
        for grid in entry.grids:
            self._by_grid.pop(grid.grid_id, None)
        # Counts as a use until `settle`, so that an unpin in between does not free the memory.
        entry.num_pins += 1
        entry.retired = True
        return Dropped(entry, retired=True)

    def _pin(self, find: Callable[[], CacheEntry | None], missing: str) -> CacheEntry:
        with self._lock:
            entry = find()
            if entry is None:
                raise CacheNotExist(missing)
            entry.num_pins += 1
            return entry

    def _unpin(self, entry: CacheEntry, served: bool = False) -> None:
        with self._lock:
            entry.num_pins -= 1
            entry.num_served -= served
            free_now = entry.retired and entry.num_pins == 0
        if free_now:
            entry.release_memory()
        if entry.retired:
            with self._unpinned:
                entry.released = entry.released or free_now
                self._unpinned.notify_all()


def _is_settled(entry: CacheEntry) -> bool:
    only_used_here = entry.num_pins > 0 and entry.num_served == 0
    return entry.released or (only_used_here and not entry.is_registered)


def check_accessible(entry: CacheEntry) -> None:
    """Raise ParamInvalid unless peers may use the cache."""
    if not entry.remote_accessible:
        raise ParamInvalid(f"cache {entry.cache_id} is not accessible to peers (remote_accessible=False)")
