# SPDX-License-Identifier: Apache-2.0
"""Which memory of our pools is in use, and who keeps it.

A view (an ndarray, a torch tensor, or anything made from one) holds a *token*: an object without content whose
existence keeps the memory. NumPy and torch pass references on from view to view, so Python's own reference counts
say when the last one is gone. `Keeper` makes the tokens of one piece of memory; `live_ranges` finds the keeper of an
address, for callers who know nothing but the address.

A token may die at any moment in any thread, even inside a garbage collection that interrupts our own code while it
holds a lock. So what runs when it dies must never wait for a lock: see `MemoryPool.free_from_finalizer`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from ..errors import CacheNotExist, ParamInvalid

#: Returns a token; raises CacheNotExist once the memory has been given up.
Hold = Callable[[], object]


class Keeper:
    """Memory with an owner and any number of views: `release` is called once, when all of them are gone.

    Args:
        release: gives the memory back. Runs in whatever thread lets go last, maybe inside a garbage collection:
            it must not wait for a lock, and must not raise.
        what: names the memory in errors, e.g. "cache_id=7".

    Thread-safe, without locks.
    """

    def __init__(self, release: Callable[[], None], what: str) -> None:
        self._what = what
        self._token: _Token | None = _Token()
        # Not at interpreter exit: the memory goes with the process.
        weakref.finalize(self._token, release).atexit = False

    def hold(self) -> object:
        """A token: the memory stays for as long as anybody refers to it. CacheNotExist after `drop`."""
        token = self._token
        if token is None:
            raise CacheNotExist(f"{self._what} has been freed")
        return token

    def drop(self) -> None:
        """The owner lets go: no more tokens are given out; `release` runs now or with the last token. Idempotent."""
        self._token = None


class _Token:
    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class LiveRange:
    """`size_bytes` from `address` that are in use; `hold` keeps them so."""

    address: int
    size_bytes: int
    hold: Hold

    @property
    def end_address(self) -> int:
        return self.address + self.size_bytes


class LiveRanges:
    """The ranges in use of all pools in this process, by address. Thread-safe; not for use in finalizers.

    Look-ups are O(log n) in the number of ranges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: SortedDict[int, LiveRange] = SortedDict()
        # End address by start. Changed by single operations only, so that `remove_pool` needs no lock.
        self._pools: dict[int, int] = {}

    def add(self, address: int, size_bytes: int, hold: Hold) -> LiveRange:
        """Make a range known; give what this returns to `remove` when the range is freed."""
        added = LiveRange(address, size_bytes, hold)
        with self._lock:
            self._by_address[address] = added
        return added

    def remove(self, live_range: LiveRange) -> None:
        """Forget a range, before its memory can be handed out again. Twice is a no-op."""
        with self._lock:
            if self._by_address.get(live_range.address) is live_range:
                del self._by_address[live_range.address]

    def __len__(self) -> int:
        return len(self._by_address)

    def add_pool(self, address: int, size_bytes: int) -> None:
        """Memory that is ours: only what `add` made known may be looked at."""
        self._pools[address] = address + size_bytes

    def remove_pool(self, address: int) -> None:
        """The pool at `address` is about to be unmapped. Safe in a finalizer."""
        self._pools.pop(address, None)

    def find(self, address: int, size_bytes: int, name: str = "address") -> LiveRange | None:
        """The range in use that covers `size_bytes` at `address`; None for memory that is in none of our pools.

        Raises:
            ParamInvalid: part of it is in a pool of ours, but not all of it in one range in use. The text calls
                the address `name`.
        """
        with self._lock:
            index = self._by_address.bisect_right(address) - 1
            found: LiveRange | None = self._by_address.peekitem(index)[1] if index >= 0 else None
        if found is not None and address < found.end_address:
            if address + size_bytes <= found.end_address:
                return found
            raise ParamInvalid(
                f"{name}={address:#x}: {size_bytes} bytes run past the end of the cache tensor there, which has "
                f"{found.end_address - address} bytes from that address on"
            )
        self._check_foreign(address, size_bytes, name)
        return None

    def keep(self, address: int, size_bytes: int, name: str = "address") -> object:
        """A token that keeps `size_bytes` at `address`; None for memory that is in none of our pools.

        Raises ParamInvalid as `find` does, also if the memory is being freed right now.
        """
        found = self.find(address, size_bytes, name)
        if found is None:
            return None
        try:
            return found.hold()
        except CacheNotExist as error:
            raise _not_in_use(address, name) from error

    def _check_foreign(self, address: int, size_bytes: int, name: str) -> None:
        # A copy is one step. `tuple(items())` makes objects on the way, which may start a garbage collection, and with
        # it a finalizer that takes a pool out of what is being looped over.
        for start, end in self._pools.copy().items():
            if start <= address < end:
                raise _not_in_use(address, name)
            if address < start < address + size_bytes:
                raise ParamInvalid(f"{name}={address:#x}: {size_bytes} bytes run into a memory pool at {start:#x}")


#: Of this process.
live_ranges = LiveRanges()


def bytes_at(address: int, size_bytes: int, owner: object) -> npt.NDArray[np.uint8]:
    """Writable bytes over raw memory; whoever refers to the array, or to a view of it, keeps `owner` alive."""
    return np.asarray(_RawBytes(address, size_bytes, owner))


class _RawBytes:
    """What NumPy needs to make an array over raw memory, with a reference to the memory's owner."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size_bytes,), "data": (address, False)}


def _not_in_use(address: int, name: str) -> ParamInvalid:
    return ParamInvalid(
        f"{name}={address:#x} is in a memory pool, but in no cache (freed or never allocated); "
        "use the tensor_addrs of a cache that exists"
    )
