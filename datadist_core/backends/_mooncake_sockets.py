# SPDX-License-Identifier: Apache-2.0
"""Mooncake's sockets in this process, found by their addresses, to end what Mooncake offers no way to end.

A call into Mooncake cannot be cancelled: it waits for the peer until a time limit of Mooncake's passes. A connection
that is shut down under it lets it fail at once, as if the peer had done it. Only sockets are touched that lead to the
port of a peer's engine, or that one of our own engines listens on. Where /proc does not tell (it does on Linux, which
is all that Mooncake runs on), nothing is found, and the time limits have to do.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENING = "0A"
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A TCP socket of this process, by the descriptor `fd`."""

    fd: int
    local_port: int
    remote_host: str
    remote_port: int
    listens: bool


def own_sockets() -> Iterator[TcpSocket]:
    """The TCP sockets of this process."""
    fds = _fds_by_inode()
    for path in _TABLES:
        with suppress(OSError), open(path) as table:
            for line in table:
                found = _parse(line.split(), fds)
                if found is not None:
                    yield found


def listening_ports() -> set[int]:
    """The ports that this process listens on."""
    return {found.local_port for found in own_sockets() if found.listens}


def shut_listener(port: int) -> None:
    """Wake up whoever waits for connections to `port` of this process."""
    _shut(lambda found: found.listens and found.local_port == port)


def shut_connections(host: str, ports: frozenset[int]) -> int:
    """End this process's connections to `ports` of `host`, also those that are still being made. Returns how many."""
    return _shut(lambda found: not found.listens and found.remote_host == host and found.remote_port in ports)


def _shut(chosen: Callable[[TcpSocket], bool]) -> int:
    num_shut = 0
    for found in own_sockets():
        if chosen(found):
            num_shut += 1
            with suppress(OSError):
                _shut_down(os.dup(found.fd), found.local_port)
    return num_shut


def _shut_down(fd: int, local_port: int) -> None:
    """Takes `fd` over. Its number may have been given to something else meanwhile: that is let alone."""
    try:
        same = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    with same:
        if same.family in (socket.AF_INET, socket.AF_INET6) and same.getsockname()[1] == local_port:
            same.shutdown(socket.SHUT_RDWR)


def _fds_by_inode() -> dict[str, int]:
    fds = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                fds[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    return fds


def _parse(words: list[str], fds: dict[str, int]) -> TcpSocket | None:
    """A line of the kernel's table, if the socket is ours. Columns: local, remote, state; the tenth is the inode."""
    fd = fds.get(f"socket:[{words[9]}]") if len(words) > 9 else None
    if fd is None:
        return None
    remote, _, remote_port = words[2].partition(":")
    local_port = words[1].rpartition(":")[2]
    return TcpSocket(fd, int(local_port, 16), _host(remote), int(remote_port, 16), words[3] == _LISTENING)


def _host(digits: str) -> str:
    """The kernel prints an address as 32-bit words of the machine's byte order."""
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + _WORD_BYTES][::-1] for at in range(0, len(raw), _WORD_BYTES))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
