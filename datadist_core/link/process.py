# SPDX-License-Identifier: Apache-2.0
"""Which process a peer on this host is, as the kernel knows it, and being told when it ends.

A process that dies closes its connections, and peers notice at once; but not if a child that it forked still holds
them. So each process has a door: a listening Unix socket with a random name in the abstract namespace, which it tells
its peers. Who can dial it shares kernel and network namespace with it, and the kernel says which process began to
listen there. What a peer says of itself decides nothing: a process number means little in another container, and hosts
that were cloned from one snapshot agree in boot id, namespaces and process numbers.

Where a door cannot be dialled (another host, other network namespaces, no such sockets) or the kernel has no pidfd for
who is behind it, heartbeats alone must do.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from ..forks import keep_from_children
from ..wire.messages import Process

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")  # struct ucred
_SO_PEERPIDFD = 77
_PREFIX = b"\0datadist-process-"


class _Door:
    """The door of one process. Nothing is ever sent through it, and it goes with the process."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(_PREFIX + secrets.token_hex(16).encode())
            self._socket.listen(_BACKLOG)
            keep_from_children(self, self._socket)
        except OSError:
            self._socket.close()
            raise
        self.process = Process(self._socket.getsockname(), started_at(self.pid))

    def clear(self) -> None:
        """Drop whoever has dialled: they know by now who we are, and their places are needed."""
        with suppress(OSError):  # nobody is left
            while True:
                self._socket.accept()[0].close()


_lock = threading.Lock()
_door: _Door | None = None


def this_process() -> Process | None:
    """What this process tells its peers. None where there are no such sockets, or no /proc. Thread-safe."""
    global _door
    with _lock:
        if _door is None or _door.pid != os.getpid():  # a forked child is another process
            try:
                _door = _Door()
            except (OSError, ValueError):
                return None
        _door.clear()
        return _door.process


def open_pidfd(process: Process) -> int | None:
    """A descriptor that becomes readable when that process ends; the caller closes it.

    None if it is this process, or is not to be found from here.
    """
    if not process.door.startswith(_PREFIX):
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            sock.connect(process.door)
            pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            return None if pid == os.getpid() else _pidfd_behind(sock, pid, process.started)
    except (OSError, AttributeError, ValueError):  # no such process, or no descriptor left: its silence will show
        return None


def _pidfd_behind(sock: socket.socket, pid: int, started: int) -> int | None:
    """Raises OSError, or AttributeError where Python or the kernel has no pidfds."""
    with suppress(OSError):  # before Linux 6.5, or the process has ended
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid <= 0:  # in a process namespace that cannot be seen from here
        return None
    pidfd = os.pidfd_open(pid)
    try:
        is_it = started_at(pid) == started
    except BaseException:
        os.close(pidfd)
        raise
    if is_it:
        return pidfd
    os.close(pidfd)  # another process has got that number
    return None


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since boot. Raises OSError or ValueError."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    # Field 22; the second one, in parentheses, may hold anything.
    return int(stat.rpartition(")")[2].split()[19])
