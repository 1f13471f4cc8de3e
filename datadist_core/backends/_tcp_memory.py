# SPDX-License-Identifier: Apache-2.0
"""A batch's memory on one side as a stream of bytes that is sent from, or received into, where it lies.

The ranges of a grid are worked out when the stream reaches it, as NumPy arrays, so that a transfer of millions of
ranges needs the memory for those of a single grid; grids with few ranges are taken together, to move in one call.
The bytes are moved by `_copy/iov.c`; without the compiled library by `sendmsg` and `recvmsg_into` over memory views,
made for at most `_MAX_IOVECS` ranges at a time; under TLS through a stretch of memory in between (`StagedCursor`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from .._copy import native_library, scatter_copy
from ..errors import LLMException
from ..memory.grid import Grid
from ..memory.region import Region
from ..transfer.plan import Batch, Items, expand_side, merge_parts
from ._tcp_frames import Wanted
from ._tcp_tls import TAKE_BYTES, TlsStream, Wire

_MAX_IOVECS = 1024
_END_OF_STREAM = -1
_FEW_RANGES = 4096
_STAGE_FROM = 16 << 10
"""Ranges of this size are worth a call of their own under TLS, which encrypts so much as one."""
_VERY_FEW_RANGES = 16
"""Up to here plain numbers are quicker than arrays."""
_NONE = np.empty(0, dtype=np.int64)

_Numbers: TypeAlias = "Items | ctypes.Array[ctypes.c_int64]"


@dataclass(frozen=True, slots=True)
class GridMemory:
    """A grid and where its region starts."""

    grid: Grid
    base_address: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a stream consists of, in wire order: grids, then items, then slices (offset, num_bytes)."""

    grids: tuple[GridMemory, ...]
    items: Items
    slices: tuple[tuple[int, int], ...]

    @classmethod
    def of_batch(cls, batch: Batch, regions: Sequence[Region]) -> Layout:
        """The local side of `batch`. `regions` are those of its pairs."""
        grids = tuple(GridMemory(p.local, r.address) for p, r in zip(batch.pairs, regions, strict=True))
        parts = merge_parts([(s.local_offset, s.num_bytes) for s in batch.slices])
        return cls(grids, batch.local_items, tuple(parts))

    @classmethod
    def of_request(cls, wanted: Wanted, grids: tuple[GridMemory, ...]) -> Layout:
        return cls(grids, wanted.items, wanted.slices)

    @property
    def num_bytes(self) -> int:
        return len(self.grids) * len(self.items) * sum(size for _, size in self.slices)

    @property
    def num_ranges(self) -> int:
        """Before any are merged."""
        return len(self.grids) * len(self.items) * len(self.slices)


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that the ranges of a grid depend on, but for where it starts."""

    stride_bytes: int
    item_bytes: int

    @classmethod
    def of(cls, grid: Grid) -> _Shape:
        return cls(grid.stride_bytes, grid.item_bytes)


class MemoryStream:
    """Goes once through a layout. Owned by one thread at a time.

    Args:
        encrypted: whether it will be a TLS connection that the bytes go through.
    """

    def __init__(self, layout: Layout, encrypted: bool = False) -> None:
        self._layout = layout
        self._encrypted = encrypted
        self._next_grid = 0
        self._shape: _Shape | None = None
        self._relative = self._sizes = _NONE
        self._cursor: Cursor = _AT_END
        self.remaining = layout.num_bytes

    def prepare(self) -> None:
        """Work out the first grids' ranges now; for a moment at which there is nothing better to do."""
        if self._next_grid == 0 and self._layout.grids:
            self._enter()

    def _enter(self) -> None:
        if self._layout.num_ranges <= _VERY_FEW_RANGES:
            self._cursor = _cursor_of_few(self._layout, self._encrypted)
            self._next_grid = len(self._layout.grids)
        else:
            self._enter_next_grids()

    def send(self, sock: Wire, budget: int) -> int:
        """Send up to `budget` bytes. Fewer than both `budget` and `remaining` means that the socket would block.

        Raises OSError when the connection is broken.
        """
        return self._move(sock, budget, True)

    def receive(self, sock: Wire, budget: int) -> int:
        """The counterpart of `send`. Raises OSError also at the end of the stream."""
        return self._move(sock, budget, False)

    def _move(self, sock: Wire, budget: int, sending: bool) -> int:
        budget = min(budget, self.remaining)
        total = 0
        while total < budget:
            if self._cursor.exhausted:
                self._enter()
            moved = self._cursor.move(sock, budget - total, sending)
            total += moved
            self.remaining -= moved
            if not self._cursor.exhausted:
                break
        return total

    def _enter_next_grids(self) -> None:
        """Point the cursor at the ranges of the next grid, and of those like it behind it while they are few."""
        self._work_out_ranges(self._layout.grids[self._next_grid].grid)
        most = max(1, _FEW_RANGES // len(self._sizes))
        candidates = self._layout.grids[self._next_grid : self._next_grid + most]
        alike = list(itertools.takewhile(lambda memory: _Shape.of(memory.grid) == self._shape, candidates))
        self._next_grid += len(alike)
        starts = np.array([memory.base_address + memory.grid.offset_bytes for memory in alike], dtype=np.int64)
        addresses = np.add.outer(starts, self._relative).ravel()
        sizes = self._sizes if len(alike) == 1 else np.tile(self._sizes, len(alike))
        self._cursor = make_cursor(addresses, sizes, self._encrypted)

    def _work_out_ranges(self, grid: Grid) -> None:
        """The ranges relative to the grid's first item. The grids of a model's layers are alike: once will do."""
        shape = _Shape.of(grid)
        if shape != self._shape:
            at_zero = replace(grid, offset_bytes=0)
            self._relative, self._sizes = expand_side(self._layout.items, at_zero, self._layout.slices)
            self._shape = shape


class Cursor(Protocol):
    """Walks over ranges of memory."""

    @property
    def exhausted(self) -> bool: ...

    def move(self, sock: Wire, budget: int, sending: bool) -> int: ...


def make_cursor(addresses: Items, sizes: Items, encrypted: bool) -> Cursor:
    if encrypted:
        return StagedCursor(addresses, sizes)
    native = _native()
    return PythonCursor(addresses, sizes) if native is None else NativeCursor(native, addresses, sizes)


def _cursor_of_few(layout: Layout, encrypted: bool) -> Cursor:
    addresses: list[int] = []
    sizes: list[int] = []
    items = layout.items.tolist()
    for memory in layout.grids:
        start, stride = memory.base_address + memory.grid.offset_bytes, memory.grid.stride_bytes
        for item in items:
            for offset, size in layout.slices:
                addresses.append(start + item * stride + offset)
                sizes.append(size)
    native = _native()
    if encrypted or native is None:
        return make_cursor(np.array(addresses, dtype=np.int64), np.array(sizes, dtype=np.int64), encrypted)
    kind = ctypes.c_int64 * len(sizes)
    return NativeCursor(native, kind(*addresses), kind(*sizes))


class _CursorStruct(ctypes.Structure):
    _fields_ = [
        ("addresses", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class _Native:
    send: Any
    receive: Any


@functools.cache
def _native() -> _Native | None:
    library = native_library()
    if library is None:
        return None
    native = _Native(library.datadist_send_some, library.datadist_receive_some)
    for function in (native.send, native.receive):
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return native


def _address_of(numbers: _Numbers) -> int:
    return ctypes.addressof(numbers) if isinstance(numbers, ctypes.Array) else numbers.ctypes.data


class NativeCursor:
    """Moves with `_copy/iov.c`, without the GIL."""

    def __init__(self, native: _Native, addresses: _Numbers, sizes: _Numbers) -> None:
        self._native = native
        self._kept = (addresses, sizes)
        self._struct = _CursorStruct(_address_of(addresses), _address_of(sizes), len(sizes), 0, 0)
        self._pointer = ctypes.addressof(self._struct)
        self._error = ctypes.c_int32()
        self._error_pointer = ctypes.addressof(self._error)

    @property
    def exhausted(self) -> bool:
        return bool(self._struct.index >= self._struct.n)

    def move(self, sock: Wire, budget: int, sending: bool) -> int:
        function = self._native.send if sending else self._native.receive
        moved = function(sock.fileno(), self._pointer, budget, self._error_pointer)
        if self._error.value:
            raise _broken(self._error.value)
        return int(moved)


class PythonCursor:
    """Does the same with memory views."""

    def __init__(self, addresses: Items, sizes: Items) -> None:
        self._addresses, self._sizes = addresses, sizes
        self._index = 0
        self._views: list[memoryview] = []

    @property
    def exhausted(self) -> bool:
        return not self._views and self._index >= len(self._sizes)

    def move(self, sock: Wire, budget: int, sending: bool) -> int:
        if isinstance(sock, TlsStream):
            raise LLMException("a cursor for sockets was given a TLS connection")
        total = 0
        while total < budget and not self.exhausted:
            try:
                moved = self._move_once(sock, budget - total, sending)
            except BlockingIOError:
                break
            self._advance(moved)
            total += moved
        return total

    def _move_once(self, sock: socket.socket, budget: int, sending: bool) -> int:
        if not self._views:
            self._make_views()
        views = _limited(self._views, budget)
        if sending:
            return sock.sendmsg(views, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        moved = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        if not moved:
            raise _broken(_END_OF_STREAM)
        return moved

    def _make_views(self) -> None:
        end = self._index + _MAX_IOVECS
        ranges = zip(self._addresses[self._index : end].tolist(), self._sizes[self._index : end].tolist(), strict=True)
        self._views = [memoryview((ctypes.c_char * size).from_address(address)).cast("B") for address, size in ranges]
        self._index += len(self._views)

    def _advance(self, moved: int) -> None:
        done = 0
        while moved and moved >= len(self._views[done]):
            moved -= len(self._views[done])
            done += 1
        del self._views[:done]
        if moved:
            self._views[0] = self._views[0][moved:]


class _Stage(threading.local):
    """Memory to put small ranges together in, or to take them apart from: one per thread, never kept between calls."""

    def __init__(self) -> None:
        self.memory = np.empty(TAKE_BYTES, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.view = self.memory.data


_stage = _Stage()


class StagedCursor:
    """Moves through a TLS connection, which takes one stretch of bytes at a time."""

    def __init__(self, addresses: Items, sizes: Items) -> None:
        self._addresses, self._sizes = addresses, sizes
        self._ends = np.cumsum(sizes)
        self._num_bytes = int(self._ends[-1])
        self._done = self._index = 0

    @property
    def exhausted(self) -> bool:
        return self._done >= self._num_bytes

    def move(self, sock: Wire, budget: int, sending: bool) -> int:
        if not isinstance(sock, TlsStream):
            raise LLMException("a cursor for TLS was given a socket")
        total = 0
        while total < budget and not self.exhausted:
            try:
                moved = self._move_once(sock, budget - total, sending)
            except BlockingIOError:
                break
            if not moved:
                raise _broken(_END_OF_STREAM)
            total += moved
        return total

    def _move_once(self, tls: TlsStream, budget: int, sending: bool) -> int:
        offset = self._done - int(self._ends[self._index] - self._sizes[self._index])
        left = int(self._sizes[self._index]) - offset
        if left >= _STAGE_FROM:
            moved = self._move_whole(tls, int(self._addresses[self._index]) + offset, min(left, budget), sending)
        else:
            moved = self._move_staged(tls, min(budget, TAKE_BYTES, self._num_bytes - self._done), sending)
        self._done += moved
        if moved >= left:
            self._index = int(np.searchsorted(self._ends, self._done, side="right"))
        return moved

    def _move_whole(self, tls: TlsStream, address: int, num_bytes: int, sending: bool) -> int:
        view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        return tls.send(view) if sending else tls.receive_what_there_is(view)

    def _move_staged(self, tls: TlsStream, num_bytes: int, sending: bool) -> int:
        view = _stage.view[:num_bytes]
        if sending:
            self._copy(*self._next(num_bytes), sending)
            return tls.send(view)
        moved = tls.receive_what_there_is(view)
        if moved:
            self._copy(*self._next(moved), sending)
        return moved

    def _next(self, num_bytes: int) -> tuple[Items, Items]:
        """The ranges of the next bytes."""
        first, end = self._index, self._done + num_bytes
        last = int(np.searchsorted(self._ends, end, side="left"))
        addresses, sizes = self._addresses[first : last + 1].copy(), self._sizes[first : last + 1].copy()
        offset = self._done - int(self._ends[first] - self._sizes[first])
        addresses[0] += offset
        sizes[0] -= offset
        sizes[-1] -= int(self._ends[last]) - end
        return addresses, sizes

    def _copy(self, addresses: Items, sizes: Items, sending: bool) -> None:
        staged = _stage.address + np.cumsum(sizes) - sizes
        scatter_copy(staged, addresses, sizes) if sending else scatter_copy(addresses, staged, sizes)


_AT_END = PythonCursor(_NONE, _NONE)


def _limited(views: Sequence[memoryview], budget: int) -> list[memoryview]:
    """The first `budget` bytes of `views`."""
    limited: list[memoryview] = []
    for view in views:
        if budget <= 0:
            break
        limited.append(view[:budget])
        budget -= len(view)
    return limited


def _broken(error: int) -> OSError:
    if error == _END_OF_STREAM:
        return ConnectionResetError("the peer closed the connection")
    return OSError(error, os.strerror(error))
