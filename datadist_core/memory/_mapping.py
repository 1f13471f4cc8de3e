# SPDX-License-Identifier: Apache-2.0
"""A memfd mapped once at an aligned address: the memory behind a pool.

The file has no name anywhere, so nothing is left behind when the process dies, and whoever gets the descriptor
(over a Unix socket, or through /proc/PID/fd) can map the same pages. It is sealed against growing and shrinking:
a peer that has mapped it can never get SIGBUS because we truncated it. Pages are backed when first touched.

`mmap.mmap` would do but for the alignment: the allocator promises addresses aligned to its page size, which may
be larger than the processor's. So the address range is reserved first, with room to align, and the file is
mapped over the aligned part.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import FeatureNotEnabled, OutOfMemory
from .live import bytes_at, live_ranges

_log = logging.getLogger(__name__)

# Linux values that the standard library does not name (all of them from the generic headers).
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FALLOC_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_MAP_FAILED = ctypes.c_void_p(-1).value
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: what is mapped stays writable, nobody can map it writable any more


class PoolMapping:
    """`size_bytes` of zeroed shared memory at `address`, a multiple of `align_bytes`.

    In huge pages (both sizes are multiples of one then) a copy of scattered blocks misses the processor's address cache
    less often: 5 to 28 % faster, most with small blocks. All of them are reserved at once, or the mapping fails:
    a page that is missing when it is touched would end the process.

    The mapping and `fd` live until the last reference to this object is gone; there is no close. Whoever hands
    out raw addresses keeps it alive: `Region.owner` does, and arrays made by `view` do.

    With `peers_only_read` whoever else maps it can read it and cannot write it (not before Linux 5.1).
    """

    def __init__(
        self,
        size_bytes: int,
        align_bytes: int,
        huge_pages: bool = False,
        name: str = "datadist-pool",
        peers_only_read: bool = False,
    ) -> None:
        self.size_bytes = size_bytes
        self._huge_pages = huge_pages
        self.fd = _sealed_memfd(name, size_bytes, os.MFD_HUGETLB if huge_pages else 0)
        try:
            self.address = _map_aligned(self.fd, size_bytes, align_bytes, 0 if huge_pages else _MAP_NORESERVE)
            _seal_for_good(self.fd, peers_only_read)
        except BaseException:
            os.close(self.fd)
            raise
        live_ranges.add_pool(self.address, size_bytes)
        # Not at interpreter exit: daemon threads may still be copying then, and the kernel cleans up anyway.
        weakref.finalize(self, _release, self.address, size_bytes, self.fd).atexit = False

    def view(self, offset_bytes: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Writable bytes `offset_bytes..offset_bytes + size_bytes`; the array keeps the mapping alive."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset_bytes} are not inside {self.size_bytes} bytes")
        return bytes_at(self.address + offset_bytes, size_bytes, owner=self)

    def discard(self, offset_bytes: int, size_bytes: int) -> None:
        """Give the pages back to the operating system; they read as zeros then. Huge pages stay as they are."""
        if self._huge_pages:
            return  # what is given back is not reserved any more
        while _libc().fallocate64(self.fd, _FALLOC_PUNCH_HOLE, offset_bytes, size_bytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                # Not an error for whoever freed memory: it stays usable, only resident.
                _log.warning("cannot give %d bytes back to the system: %s", size_bytes, os.strerror(code))
                return


@functools.cache
def huge_page_bytes() -> int:
    """The system's usual size of a huge page. FeatureNotEnabled if it has none."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("Hugepagesize:"):
                return int(line.split()[1]) << 10
    raise FeatureNotEnabled("huge_pages: this system has no huge pages (/proc/meminfo has no Hugepagesize)")


def _sealed_memfd(name: str, size_bytes: int, flags: int = 0) -> int:
    if not hasattr(os, "memfd_create"):
        raise FeatureNotEnabled("this system has no memfd_create, which a memory pool needs (Linux 3.17 or later)")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as error:
        raise FeatureNotEnabled(f"memfd_create, which a memory pool needs, failed: {error}") from error
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise OutOfMemory(f"cannot make a memory pool of {size_bytes} bytes: {error}") from error
    return fd


def _seal_for_good(fd: int, peers_only_read: bool) -> None:
    """Once it is mapped here."""
    if peers_only_read:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _map_aligned(fd: int, size_bytes: int, align_bytes: int, flags: int) -> int:
    """Address of all of `fd`, mapped at a multiple of `align_bytes` (at least the processor's page)."""
    spare = align_bytes - mmap.PAGESIZE if align_bytes > mmap.PAGESIZE else 0
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(0, size_bytes + spare, 0, reserve, -1)
    address = -(-start // align_bytes) * align_bytes
    try:
        shared = mmap.MAP_SHARED | _MAP_FIXED | flags
        _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, shared, fd)
    except OutOfMemory:
        _libc().munmap(start, size_bytes + spare)
        raise
    _trim(start, address)
    _trim(address + size_bytes, start + size_bytes + spare)
    return address


def _trim(start: int, end: int) -> None:
    if end > start:
        _libc().munmap(start, end - start)


def _mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc().mmap64(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OutOfMemory(f"cannot map a memory pool of {size_bytes} bytes: {reason}")
    return mapped


def _release(address: int, size_bytes: int, fd: int) -> None:
    # First: once it is unmapped, others may get the addresses.
    live_ranges.remove_pool(address)
    _libc().munmap(address, size_bytes)
    os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, offset, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
    libc.mmap64.restype = pointer
    libc.mmap64.argtypes = [pointer, size, number, number, number, offset]
    libc.munmap.restype = number
    libc.munmap.argtypes = [pointer, size]
    libc.fallocate64.restype = number
    libc.fallocate64.argtypes = [number, number, offset, offset]
    return libc
