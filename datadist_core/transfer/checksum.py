# SPDX-License-Identifier: Apache-2.0
"""Checksums of items where they lie in memory: what both ends of a transfer compare when they do not trust the way.

A checksum is XXH3 (64 bits) over a *unit*: some items of a list, one behind the other, all parts of them. It is made by
the compiled kernel, with the interpreter's lock released once for all of them; without the kernel by the `xxhash`
library, item by item. It finds faults. It is no protection against somebody who wants to deceive: whoever can change
the bytes can choose them so that the number stays.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .._copy import native_library
from .._copy.helpers import helpers_for
from ..errors import ClosedError
from .item_copy import StopFlag
from .plan import Items

Sums: TypeAlias = npt.NDArray[np.uint64]
_Function: TypeAlias = "Callable[..., int]"


@dataclass(frozen=True, slots=True)
class Part:
    """`num_bytes` from `offset_bytes` of every item."""

    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the items of one grid lie in this process: address of item 0, and how far apart they are."""

    address: int
    stride_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What is summed in every grid: `items_per_sum` of `items` at a time, the parts of each."""

    items: Items
    parts: tuple[Part, ...]
    items_per_sum: int

    @property
    def num_sums(self) -> int:
        """Of one grid."""
        return -(-len(self.items) // self.items_per_sum)

    @property
    def num_bytes(self) -> int:
        """Of one grid."""
        return len(self.items) * sum(part.num_bytes for part in self.parts)


class Checksummer:
    """Makes the checksums of one LLMDataDist, until it is closed: then nothing reads memory that is about to go.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._stop = StopFlag()
        self._changed = threading.Condition()
        self._num_running = 0

    def sums(self, extents: Sequence[Extent], units: Units) -> Sums:
        """Of each extent, one number per unit: shape (len(extents), units.num_sums).

        The caller vouches that all parts of all items are memory that stays. Raises ClosedError once `close` is called.
        """
        with self._running():
            sums = self._native(extents, units) if native_library() is not None else self._in_python(extents, units)
            self._check_open()
            return sums

    def close(self) -> None:
        """End what is running and wait for it. Idempotent."""
        self._stop.set()
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._stop.is_set:
            raise ClosedError("finalize was called")

    def _native(self, extents: Sequence[Extent], units: Units) -> Sums:
        columns = [
            np.array([extent.address for extent in extents], dtype=np.int64),
            np.array([extent.stride_bytes for extent in extents], dtype=np.int64),
            np.array([part.offset_bytes for part in units.parts], dtype=np.int64),
            np.array([part.num_bytes for part in units.parts], dtype=np.int64),
        ]
        plan = _Plan(len(extents), len(units.parts), units.items_per_sum, *(one.ctypes.data for one in columns))
        items = np.ascontiguousarray(units.items, dtype=np.int64)
        sums = np.zeros((len(extents), units.num_sums), dtype=np.uint64)
        helpers = helpers_for(len(extents) * units.num_bytes)
        address = ctypes.addressof(plan)
        _function()(address, items.ctypes.data, len(items), helpers, self._stop.address, sums.ctypes.data)
        return sums

    def _in_python(self, extents: Sequence[Extent], units: Units) -> Sums:
        sums = np.zeros((len(extents), units.num_sums), dtype=np.uint64)
        items = units.items.tolist()
        for row, extent in enumerate(extents):
            for column in range(units.num_sums):
                if self._stop.is_set:
                    return sums
                first = column * units.items_per_sum
                sums[row, column] = _sum_in_python(extent, items[first : first + units.items_per_sum], units.parts)
        return sums


def _sum_in_python(extent: Extent, items: Sequence[int], parts: Sequence[Part]) -> int:
    import xxhash  # only where there is no kernel

    state = xxhash.xxh3_64()
    for item in items:
        for part in parts:
            address = extent.address + item * extent.stride_bytes + part.offset_bytes
            state.update((ctypes.c_char * part.num_bytes).from_address(address))
    return int(state.intdigest())


class _Plan(ctypes.Structure):
    """`sum_plan` of checksum.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_grids", "num_parts", "items_per_sum")),
        *((name, ctypes.c_void_p) for name in ("address", "stride", "part_offset", "part_bytes")),
    )


@functools.cache
def _function() -> _Function:
    library = native_library()
    if library is None:
        raise OSError("there is no kernel")
    function: _Function = library.datadist_checksum_items
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    function.argtypes = [pointer, pointer, number, ctypes.c_int, pointer, pointer]  # type: ignore[attr-defined]
    return function
