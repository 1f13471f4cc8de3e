# SPDX-License-Identifier: Apache-2.0
"""Where this end can be reached, and what it tells its peers about that.

A listener on a wildcard address has no address that it could tell. Then the identity lists the addresses of this
host's interfaces, loopback last, and the peer tries them in turn. It may well reach something else at one of them,
its own loopback for instance; the random instance in the identity, repeated in HELLO, finds that out at once.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from ..errors import ProtocolError, Unreachable
from ._tcp_frames import INSTANCE_BYTES, VERSION

_MAX_ENDPOINTS = 16
_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"

Host = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    host: Host
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to dial: where to try, the likeliest first. None at an end that does not listen.

    `tls`: whether that end's connections are encrypted, all of them.
    """

    version: int
    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
    endpoints: Annotated[list[Endpoint], msgspec.Meta(max_length=_MAX_ENDPOINTS)]
    tls: bool = False


def encode_identity(instance: bytes, endpoints: Sequence[Endpoint] = (), tls: bool = False) -> bytes:
    return msgspec.msgpack.encode(Identity(VERSION, instance, list(endpoints[:_MAX_ENDPOINTS]), tls))


def decode_identity(data: bytes) -> Identity:
    """Raises ProtocolError for garbage or another version."""
    try:
        identity = msgspec.msgpack.decode(data, type=Identity)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"this is not the identity of a tcp backend: {error}") from error
    if identity.version != VERSION:
        raise ProtocolError(f"the peer's tcp backend speaks protocol version {identity.version}, this one {VERSION}")
    return identity


def listen(host: str, port: int, rcvbuf_bytes: int | None, backlog: int) -> socket.socket:
    """A non-blocking listener on the first address of `host` that allows it. Raises Unreachable with the reason."""
    last: OSError = OSError("it has no address")
    try:
        candidates = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        candidates, last = [], error
    for family, kind, protocol, _, address in candidates:
        try:
            return _listen_on(socket.socket(family, kind, protocol), address, rcvbuf_bytes, backlog)
        except OSError as error:
            last = error
    raise Unreachable(f"cannot listen on host {host!r}, port {port}: {last}") from last


def _listen_on(sock: socket.socket, address: Any, rcvbuf_bytes: int | None, backlog: int) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if rcvbuf_bytes is not None:  # the window's scale is settled during the TCP handshake
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf_bytes)
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def reachable_at(listener: socket.socket, advertise_host: str | None) -> list[Endpoint]:
    """Where peers may find `listener`, the likeliest first."""
    port = listener.getsockname()[1]
    return [Endpoint(host, port) for host in _reachable_hosts(listener, advertise_host)]


def _reachable_hosts(listener: socket.socket, advertise_host: str | None) -> list[str]:
    if advertise_host is not None:
        return [advertise_host]
    bound = str(listener.getsockname()[0])
    if not ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
        return [bound]
    found = [*_ipv4_addresses()]
    if listener.family == socket.AF_INET6:
        found += _ipv6_addresses()
    return sorted(dict.fromkeys(found), key=lambda host: ipaddress.ip_address(host).is_loopback)


def _ipv4_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(reply[20:24])


def _ipv6_addresses() -> Iterator[str]:
    """Global addresses, and loopback: a link-local one means nothing without the peer's name of the interface."""
    with suppress(FileNotFoundError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, _, _, scope, *_ = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if scope == _GLOBAL_SCOPE or address.is_loopback:
                yield str(address)
