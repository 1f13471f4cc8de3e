# SPDX-License-Identifier: Apache-2.0
"""Options of the tcp backend, checked, and what they mean for a socket."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ParamInvalid
from ._tcp_frames import MAX_STREAMS

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 4
_UNANSWERED_MS = 30_000
"""Sent data that long without a sign of life from the peer's host: the connection is dead."""

_FOR_THIS_HOST = "reno"  # part of every Linux kernel

_INTEGERS = {
    "port": (0, 65535),
    "streams": (1, MAX_STREAMS),
    "sndbuf": (4096, 1 << 30),
    "rcvbuf": (4096, 1 << 30),
    "max_bytes_per_s": (0, 1 << 40),
}


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Attributes:
    port: to listen on; 0 lets the system choose.
    streams: connections per link that this end dials. Each has a congestion window of its own, so over a path that is
        long or loses packets several move a large batch faster, unless the congestion control (bbr) copes with that;
        between processes of one host one is best.
    advertise_host: what peers are told to dial, in place of the addresses found here.
    sndbuf, rcvbuf: socket buffers in bytes; None leaves them to the kernel, which adapts them to the path.
    congestion: the congestion control for what this end sends, one of net.ipv4.tcp_available_congestion_control. None:
        the system's; but "reno" to a peer on this host, where there is nothing to be congested and an algorithm that
        spaces packets out, such as bbr, only costs time.
    max_bytes_per_s: how much data this end sends in a second at most, over all links, as the source of pushes and of
        peers' pulls, so that other traffic has its share of the network; 0 for no limit. Headers are not counted. What
        it receives is limited where it is sent.
    """

    port: int = 0
    streams: int = 1
    advertise_host: str | None = None
    sndbuf: int | None = None
    rcvbuf: int | None = None
    congestion: str | None = None
    max_bytes_per_s: int = 0


def parse_options(options: Mapping[str, Any]) -> TcpOptions:
    """Raises ParamInvalid naming the option."""
    for name, value in options.items():
        if name in _INTEGERS:
            _check_integer(name, value)
        elif name == "advertise_host":
            if not isinstance(value, str) or not 1 <= len(value) <= 200:
                raise ParamInvalid(f"tcp option advertise_host={value!r} must be a host name or address")
        elif name == "congestion":
            _check_congestion(value)
        else:
            known = ", ".join(sorted([*_INTEGERS, "advertise_host", "congestion"]))
            raise ParamInvalid(f"tcp option {name!r} is unknown; there are {known}")
    return TcpOptions(**options)


def _check_integer(name: str, value: object) -> None:
    low, high = _INTEGERS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParamInvalid(f"tcp option {name}={value!r} must be an integer in {low}..{high}")


def _check_congestion(value: object) -> None:
    """Find out now, and not when a peer links, that the kernel does not offer it."""
    if not isinstance(value, str) or not value.isascii():
        raise ParamInvalid(f"tcp option congestion={value!r} must be the name of a congestion control")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            _set_congestion(probe, value)
        except OSError as error:
            raise ParamInvalid(
                f"tcp option congestion={value!r} cannot be used here ({error}); this kernel offers those in "
                "/proc/sys/net/ipv4/tcp_available_congestion_control"
            ) from error


def _set_congestion(sock: socket.socket, name: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def suit_path(sock: socket.socket, options: TcpOptions) -> None:
    """Set what depends on where the peer is, once the socket is connected."""
    if options.congestion is not None:
        _set_congestion(sock, options.congestion)
    elif sock.getpeername()[0] == sock.getsockname()[0]:
        _set_congestion(sock, _FOR_THIS_HOST)


def tune(sock: socket.socket, options: TcpOptions) -> None:
    """Set what a connection needs, before it is connected or right after it was accepted."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    if options.sndbuf is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.sndbuf)
    if options.rcvbuf is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.rcvbuf)
