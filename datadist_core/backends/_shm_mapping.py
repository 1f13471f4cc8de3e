# SPDX-License-Identifier: Apache-2.0
"""Mapping a memory file that somebody else made and may be lying about."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np

from ..errors import Unreachable

_SEALS_AGAINST_WRITING = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE


@dataclass(frozen=True, slots=True)
class FileKey:
    """Tells one memory file from another, whatever descriptor it came by."""

    device: int
    inode: int


class MappedFile:
    """All of a memory file in our address space, for as long as this object is referred to.

    `writable` unless its owner has it otherwise. There is no unmap: a copy in another thread holds a reference, and the
    mapping goes with the last one.
    """

    def __init__(self, fd: int) -> None:
        """Map; `fd` may be closed afterwards. Raises Unreachable if that is not safe or not possible."""
        seals = _checked_seals(fd)
        self.writable = not seals & _SEALS_AGAINST_WRITING
        self.size_bytes = os.fstat(fd).st_size  # after the check: from here on it cannot shrink
        try:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            mapped = mmap.mmap(fd, self.size_bytes, prot=protection)
            mapped.madvise(mmap.MADV_DONTFORK)  # a forked child must not keep the peer's memory
        except (OSError, ValueError, OverflowError) as error:
            raise Unreachable(f"cannot map {self.size_bytes} bytes of the peer's memory: {error}") from error
        self._view = np.frombuffer(mapped, dtype=np.uint8)
        self.address = self._view.ctypes.data

    def address_of(self, offset_bytes: int, size_bytes: int) -> int:
        """Address of a range. Raises Unreachable if it is not inside the file."""
        if offset_bytes < 0 or size_bytes < 1 or offset_bytes + size_bytes > self.size_bytes:
            raise Unreachable(
                f"the peer's region of {size_bytes} bytes at {offset_bytes} is not inside its memory file "
                f"of {self.size_bytes} bytes"
            )
        return self.address + offset_bytes


def file_key(fd: int) -> FileKey:
    status = os.fstat(fd)
    return FileKey(status.st_dev, status.st_ino)


def _checked_seals(fd: int) -> int:
    """A file that can still shrink under a mapping ends us with SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Unreachable(f"the peer's descriptor is not a memory file: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise Unreachable("the peer's memory file is not sealed against shrinking; mapping it would not be safe")
    return seals
