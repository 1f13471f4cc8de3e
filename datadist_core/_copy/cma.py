# SPDX-License-Identifier: Apache-2.0
"""Moving many byte ranges between this process's memory and another process's, by process_vm_readv and _writev.

The loop is in `cma.c`; without the compiled library the same loop runs here, over the C library's functions. Both
release the GIL during a system call, and both tie every call to a proof, see `RemoteProcess`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import native_library

__all__ = ["PROOF_BYTES", "Fault", "ProofGone", "RemoteCopy", "RemoteProcess", "read_remote"]

Int64s = npt.NDArray[np.int64]

PROOF_BYTES = 32
_MAX_IOVECS = 1024  # what the kernel takes in one call
_PROOF_GONE = -1


class ProofGone(Exception):
    """The process with that number no longer has the proof: it is another process, another program, or gave it up."""


class Fault(Exception):
    """The other process lives, but a range is not mapped, or not with the right access, on one of the two sides.

    Attributes:
        local_address, remote_address: the first bytes that could not be moved.
    """

    def __init__(self, local_address: int, remote_address: int) -> None:
        super().__init__(f"cannot move bytes between {local_address:#x} here and {remote_address:#x} there")
        self.local_address = local_address
        self.remote_address = remote_address


class _ProcessStruct(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_int64),
        ("proof_address", ctypes.c_int64),
        ("proof", ctypes.c_ubyte * PROOF_BYTES),
    ]


class _CursorStruct(ctypes.Structure):
    _fields_ = [
        ("local", ctypes.c_void_p),
        ("remote", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    ]


class RemoteProcess:
    """A process by its number, and by bytes that only the memory of the right one has. Immutable, thread-safe.

    A number may be given to another process, and a process may run another program. What is read is therefore used
    only if the proof was read with it, in one system call; and the proof is read before every write.

    Args:
        pid: as this process knows it.
        proof_address: a multiple of `PROOF_BYTES` there, so that the proof lies within one page.
        proof: `PROOF_BYTES` bytes.
    """

    def __init__(self, pid: int, proof_address: int, proof: bytes) -> None:
        self.pid = pid
        self.proof_address = proof_address
        self.proof = proof
        self.struct = _ProcessStruct(pid, proof_address, (ctypes.c_ubyte * PROOF_BYTES)(*proof))

    def check(self) -> None:
        """Raise ProofGone, or OSError with what the kernel says, unless it is still the right process."""
        native = _native()
        if native is not None:
            _raise_error(native.check(ctypes.byref(self.struct)))
            return
        try:
            seen = read_remote(self.pid, self.proof_address, PROOF_BYTES)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise ProofGone from error
            raise
        if seen != self.proof:
            raise ProofGone


class RemoteCopy:
    """One list of ranges on its way from, or to, another process. For one thread.

    Args:
        local, remote, num_bytes: contiguous int64 arrays of equal length: addresses on both sides, sizes of at
            least 1. The caller vouches for the local addresses. A wrong remote address is no danger to this process.
        writing: local to remote; otherwise remote to local.
    """

    def __init__(self, process: RemoteProcess, local: Int64s, remote: Int64s, num_bytes: Int64s, writing: bool) -> None:
        self._process = process
        self._arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (local, remote, num_bytes)]
        pointers = [array.ctypes.data for array in self._arrays]
        self._cursor = _CursorStruct(*pointers, len(num_bytes), 0, 0)
        self._writing = writing

    @property
    def exhausted(self) -> bool:
        """Whether all is moved."""
        return bool(self._cursor.index >= self._cursor.n)

    def move(self, budget: int) -> None:
        """Move the next `budget` bytes, or what is left.

        Raises:
            ProofGone: it is not the right process any more; what was read in this call must not be used.
            Fault: a range is not mapped on one side.
            OSError: what the kernel says else: ESRCH, EPERM, ...
        """
        native = _native()
        if native is None:
            self._move_in_python(budget)
            return
        error = ctypes.c_int32()
        native.move(
            ctypes.byref(self._process.struct), ctypes.byref(self._cursor), budget, self._writing, ctypes.byref(error)
        )
        self._raise(error.value)

    def _raise(self, error: int) -> None:
        if error == errno.EFAULT:
            local, remote, _ = self._arrays
            index, offset = self._cursor.index, self._cursor.offset
            raise Fault(int(local[index]) + offset, int(remote[index]) + offset)
        _raise_error(error)

    def _move_in_python(self, budget: int) -> None:
        while budget > 0 and not self.exhausted:
            moved = self._move_once(budget)
            budget -= moved
            self._advance(moved)

    def _move_once(self, budget: int) -> int:
        self._process.check()
        local, remote, sizes = self._next_ranges(budget)
        function = _libc().process_vm_writev if self._writing else _libc().process_vm_readv
        try:
            moved = _call(function, self._process.pid, _iovecs(local, sizes), _iovecs(remote, sizes))
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            moved = 0
        if not self._writing:
            self._process.check()
        if not moved:
            self._raise(errno.EFAULT)
        return moved

    def _next_ranges(self, budget: int) -> tuple[Int64s, Int64s, Int64s]:
        """The next ranges, of which there are not too many for one call, `budget` bytes in all or less."""
        index, offset = self._cursor.index, self._cursor.offset
        local, remote, sizes = (array[index : index + _MAX_IOVECS].copy() for array in self._arrays)
        local[0] += offset
        remote[0] += offset
        sizes[0] -= offset
        ends = np.cumsum(sizes)
        num_ranges = int(np.searchsorted(ends, budget)) + 1
        if num_ranges <= len(sizes):
            sizes[num_ranges - 1] -= max(0, int(ends[num_ranges - 1]) - budget)
        return local[:num_ranges], remote[:num_ranges], sizes[:num_ranges]

    def _advance(self, moved: int) -> None:
        ends = np.cumsum(self._arrays[2][self._cursor.index : self._cursor.index + _MAX_IOVECS])
        position = self._cursor.offset + moved
        num_done = int(np.searchsorted(ends, position, side="right"))
        self._cursor.offset = position - (int(ends[num_done - 1]) if num_done else 0)
        self._cursor.index += num_done


def read_remote(pid: int, address: int, num_bytes: int) -> bytes:
    """Bytes of a process's memory, whichever process that is. Raises OSError, with EFAULT if not all are mapped."""
    buffer = np.empty(num_bytes, dtype=np.uint8)
    here, there = np.array([buffer.ctypes.data]), np.array([address], dtype=np.int64)
    size = np.array([num_bytes], dtype=np.int64)
    moved = _call(_libc().process_vm_readv, pid, _iovecs(here, size), _iovecs(there, size))
    if moved < num_bytes:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    return buffer.tobytes()


@dataclass(frozen=True, slots=True)
class _Native:
    move: Any
    check: Any


@functools.cache
def _native() -> _Native | None:
    library = native_library()
    if library is None:
        return None
    native = _Native(library.datadist_remote_move, library.datadist_remote_check)
    pointer = ctypes.c_void_p
    native.move.restype = ctypes.c_int64
    native.move.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)]
    native.check.restype = ctypes.c_int32
    native.check.argtypes = [pointer]
    return native


@functools.cache
def _libc() -> ctypes.CDLL:
    """Raises OSError (ENOSYS) where the C library lacks the two functions."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    try:
        for function in (libc.process_vm_readv, libc.process_vm_writev):
            function.restype = ctypes.c_ssize_t
            function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "the C library has no process_vm_readv") from error
    return libc


def _iovecs(addresses: Int64s, sizes: Int64s) -> npt.NDArray[np.uint64]:
    """`struct iovec` entries, neighbours merged."""
    starts = np.flatnonzero(np.concatenate(([True], addresses[1:] != addresses[:-1] + sizes[:-1])))
    merged = np.stack([addresses[starts], np.add.reduceat(sizes, starts)], axis=1)
    return np.ascontiguousarray(merged, dtype=np.uint64)


def _call(function: Any, pid: int, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> int:
    while True:
        moved: int = function(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        if moved >= 0:
            return moved
        _raise_error(0 if ctypes.get_errno() == errno.EINTR else ctypes.get_errno())


def _raise_error(error: int) -> None:
    if error == _PROOF_GONE:
        raise ProofGone
    if error:
        raise OSError(error, os.strerror(error))
