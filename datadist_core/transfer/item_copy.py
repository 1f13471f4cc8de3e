# SPDX-License-Identifier: Apache-2.0
"""`ItemCopy`: a copy between grids in this address space, prepared once and run for any lists of items.

All that does not depend on the lists is worked out beforehand. A run is one call of the compiled kernel, which goes
from indices to bytes by itself; without the kernel the lists are expanded with NumPy and copied range by range.
"""

from __future__ import annotations

import ctypes
import functools
import select
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .._copy import native_library, scatter_copy
from .._copy.helpers import MAX_THREADS, helpers_for
from ..errors import Cancelled
from ..types import Deadline
from .plan import Batch, GridPair, Items, Op, Slice, check_indices, expand, is_whole

#: Block indices as callers hand them on: an int64 `array('q')` is cheapest for few, a contiguous ndarray for many.
ItemList: TypeAlias = "array[int] | Items"

_Function: TypeAlias = "Callable[..., int]"

_STOPPED, _BAD_LOCAL_ITEM, _BAD_REMOTE_ITEM, _HUNG_UP = 1, 2, 3, 4
#: So little is copied sooner than the interpreter's lock is given away and got back.
_QUICK_BYTES = 256 << 10
_FEW_ITEMS = 512


class StopFlag:
    """Ends a running copy early, between two pieces of it. Set once, from any thread."""

    __slots__ = ("_value", "address")

    def __init__(self) -> None:
        self._value = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._value)

    def set(self) -> None:
        self._value.value = 1

    @property
    def is_set(self) -> bool:
        return bool(self._value.value)


class _Plan(ctypes.Structure):
    """`item_plan` of items.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_pairs", "num_slices", "bytes_per_item")),
        *((name, ctypes.c_int64) for name in ("num_local_items", "num_remote_items")),
        *((name, ctypes.c_void_p) for name in ("local", "remote", "local_stride", "remote_stride", "mergeable")),
        *((name, ctypes.c_void_p) for name in ("slice_local", "slice_remote", "slice_bytes")),
    )


class ItemCopy:
    """Copies items of `pairs` and the slices of them.

    Args:
        local_base, remote_base: region id -> address of that region here, for both ends of every pair.
        max_threads: that may be at one copy, with the caller's.

    The caller vouches for the addresses for as long as a copy runs. Thread-safe.
    """

    def __init__(
        self,
        pairs: Sequence[GridPair],
        slices: tuple[Slice, ...],
        local_base: Mapping[int, int],
        remote_base: Mapping[int, int],
        max_threads: int = MAX_THREADS,
    ) -> None:
        self._pairs, self._slices = tuple(pairs), slices
        self._bases = dict(local_base), dict(remote_base)
        self._max_threads = max_threads
        self._num_local_items = min(pair.local.num_items for pair in pairs)
        self._num_remote_items = min(pair.remote.num_items for pair in pairs)
        #: Bytes of one item of all pairs.
        self.bytes_of_one = len(pairs) * sum(s.num_bytes for s in slices)
        self._function, self._quick_function = _functions()
        self._arrays = self._plan_arrays()
        self._plan = self._make_plan()
        self._plan_address = ctypes.addressof(self._plan)

    def run(
        self,
        op: Op,
        local_items: ItemList,
        remote_items: ItemList,
        stop: StopFlag | None = None,
        connection: int = -1,
    ) -> bool:
        """Copy items `local_items[i]` and `remote_items[i]` of every pair: into the local grids if `op` is READ.

        Args:
            connection: descriptor of a socket to the process whose memory the remote grids are.

        Returns whether the other end of `connection` was still there when the copy had ended. Raises ParamInvalid,
        before anything is copied, for an index out of range; Cancelled when `stop` was set.
        """
        num_items = len(local_items)
        num_bytes = num_items * self.bytes_of_one
        function = self._quick_function if num_bytes <= _QUICK_BYTES else self._function
        if function is None:
            self._run_in_python(op, as_items(local_items), as_items(remote_items), stop)
            return connection < 0 or not _has_hung_up(connection)
        helpers = helpers_for(num_bytes, self._max_threads)
        status = function(
            self._plan_address,
            op is Op.READ,
            _address_of(local_items),
            _address_of(remote_items),
            num_items,
            helpers,
            stop.address if stop is not None else None,
            connection,
        )
        if status == _HUNG_UP:
            return False
        if status:
            self._raise(status, local_items, remote_items)
        return True

    def _raise(self, status: int, local_items: ItemList, remote_items: ItemList) -> None:
        if status == _BAD_LOCAL_ITEM:
            check_indices(as_items(local_items), self._num_local_items)
        if status == _BAD_REMOTE_ITEM:
            check_indices(as_items(remote_items), self._num_remote_items)
        raise Cancelled("the copy was stopped")

    def _run_in_python(self, op: Op, local_items: Items, remote_items: Items, stop: StopFlag | None) -> None:
        check_indices(local_items, self._num_local_items)
        check_indices(remote_items, self._num_remote_items)
        batch = Batch(0, op, self._pairs, local_items, remote_items, self._slices, Deadline.never())
        ranges = expand(batch, *self._bases)
        for piece in ranges.pieces():
            if stop is not None and stop.is_set:
                raise Cancelled("the copy was stopped")
            if op is Op.READ:
                scatter_copy(piece.local, piece.remote, piece.num_bytes)
            else:
                scatter_copy(piece.remote, piece.local, piece.num_bytes)

    def _plan_arrays(self) -> tuple[npt.NDArray[np.int64], ...]:
        """In the order of the plan's pointers; they must live as long as it does."""
        local_base, remote_base = self._bases
        local_whole = [(s.local_offset, s.num_bytes) for s in self._slices]
        remote_whole = [(s.remote_offset, s.num_bytes) for s in self._slices]
        per_pair = [
            (
                local_base[local.region_id] + local.offset_bytes,
                remote_base[remote.region_id] + remote.offset_bytes,
                local.stride_bytes,
                remote.stride_bytes,
                is_whole(local, local_whole) and is_whole(remote, remote_whole),
            )
            for local, remote in ((pair.local, pair.remote) for pair in self._pairs)
        ]
        per_slice = [(s.local_offset, s.remote_offset, s.num_bytes) for s in self._slices]
        return (*_columns(per_pair), *_columns(per_slice))

    def _make_plan(self) -> _Plan:
        return _Plan(
            len(self._pairs),
            len(self._slices),
            sum(s.num_bytes for s in self._slices),
            self._num_local_items,
            self._num_remote_items,
            *(column.ctypes.data for column in self._arrays),
        )


def _has_hung_up(connection: int) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)  # POLLHUP and POLLERR are reported without being asked for
    return bool(poller.poll(0))


def _columns(rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
    return [np.ascontiguousarray(column) for column in np.array(rows, dtype=np.int64).T]


def _address_of(items: ItemList) -> int:
    if type(items) is array:
        return items.buffer_info()[0]
    address: int = items.__array_interface__["data"][0]  # type: ignore[union-attr]
    return address


def as_items(items: ItemList) -> Items:
    """The same as an ndarray, without a copy."""
    return items if isinstance(items, np.ndarray) else np.frombuffer(items, dtype=np.int64)


def item_list(items: Items) -> ItemList:
    """The same in the form that is cheapest to hand on many times."""
    return array("q", items.tobytes()) if len(items) <= _FEW_ITEMS else items


@functools.cache
def _functions() -> tuple[_Function | None, _Function | None]:
    """The kernel's function, if there is a kernel: one that lets other threads run meanwhile, one that does not."""
    library = native_library()
    if library is None:
        return None, None
    return _declared(library), _declared(ctypes.PyDLL(library._name))


def _declared(library: ctypes.CDLL) -> _Function:
    function = library.datadist_copy_items
    function.restype = ctypes.c_int
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, pointer, pointer, ctypes.c_int64, number, pointer, number]
    typed: _Function = function
    return typed
