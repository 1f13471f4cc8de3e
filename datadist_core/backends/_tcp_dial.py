# SPDX-License-Identifier: Apache-2.0
"""Dialling: the initiator's side of making a link, in the thread of whoever calls `connect`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import ClosedError, LLMException, ProtocolError, TimedOut, Unreachable
from ..types import Deadline
from ._tcp_address import Endpoint, Identity
from ._tcp_frames import HEADER_BYTES, Hello, Kind, decode_header, encode_hello
from ._tcp_options import TcpOptions, suit_path, tune

_MAX_SHARE_S = 2.0
"""For reaching one of several hosts: packets may vanish there, or something else may listen and never answer."""


class Dialler:
    """Makes the connections of new links. `close` ends attempts that are under way. Thread-safe."""

    def __init__(self, options: TcpOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._dialling: set[socket.socket] = set()
        self._closed = False

    def dial(self, identity: Identity, link_token: bytes, deadline: Deadline) -> list[socket.socket]:
        """Connections to the peer, all of them welcomed. Raises Unreachable, TimedOut, ProtocolError, ClosedError."""
        if not identity.endpoints:
            raise Unreachable("the peer's tcp backend does not listen (no listen_ip_info there)")
        failures: list[str] = []
        for position, endpoint in enumerate(identity.endpoints):
            share = _share(deadline, len(identity.endpoints) - position)
            try:
                return self._dial_endpoint(endpoint, identity.instance, link_token, share, deadline)
            except (OSError, ValueError, LLMException) as error:  # ValueError: no host name at all
                self._check_open()
                failures.append(f"{endpoint.host} port {endpoint.port}: {error}")
        if deadline.expired:
            raise TimedOut(f"no tcp connection to the peer in time; {'; '.join(failures)}")
        raise Unreachable(f"no tcp connection to the peer; {'; '.join(failures)}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._dialling:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _dial_endpoint(
        self, endpoint: Endpoint, instance: bytes, link_token: bytes, share: Deadline, deadline: Deadline
    ) -> list[socket.socket]:
        """Connections to that endpoint. Reaching the peer must not take longer than `share`."""
        with self._collected() as socks:
            for stream in range(self._options.streams):
                sock = self._connect(endpoint, share, socks)
                hello = Hello(instance, link_token, stream, self._options.streams)
                sock.sendall(encode_hello(hello))
                _await_frame(sock, Kind.HEARD, share)
            for sock in socks:
                _await_frame(sock, Kind.WELCOME, deadline)
                sock.setblocking(False)
        return socks

    @contextmanager
    def _collected(self) -> Iterator[list[socket.socket]]:
        """Connections in the making: reachable for `close` meanwhile, closed if it does not work out."""
        socks: list[socket.socket] = []
        try:
            yield socks
        except BaseException:
            with self._lock:
                self._dialling.difference_update(socks)
            for sock in socks:
                sock.close()
            raise
        with self._lock:
            self._dialling.difference_update(socks)

    def _connect(self, endpoint: Endpoint, deadline: Deadline, socks: list[socket.socket]) -> socket.socket:
        """A connection to the first address of the host that answers, added to `socks`."""
        host, port = endpoint.host, endpoint.port
        last: OSError = OSError(f"host {host!r} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            self._add(sock, socks)
            try:
                tune(sock, self._options)
                _set_timeout(sock, deadline)
                sock.connect(address)
                suit_path(sock, self._options)
            except OSError as error:
                last = error
                self._drop(sock, socks)
            else:
                return sock
        raise last

    def _add(self, sock: socket.socket, socks: list[socket.socket]) -> None:
        socks.append(sock)
        with self._lock:
            self._dialling.add(sock)
        self._check_open()

    def _drop(self, sock: socket.socket, socks: list[socket.socket]) -> None:
        socks.remove(sock)
        with self._lock:
            self._dialling.discard(sock)
        sock.close()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the tcp backend was closed during connect")


def _await_frame(sock: socket.socket, kind: Kind, deadline: Deadline) -> None:
    data = bytearray()
    while len(data) < HEADER_BYTES:
        _set_timeout(sock, deadline)
        part = sock.recv(HEADER_BYTES - len(data))
        if not part:
            raise Unreachable("whoever listens there refused the link")
        data += part
    header = decode_header(data)
    if header.kind is not kind:
        raise ProtocolError(f"expected {kind.name} from the peer, got {header.kind.name}")


def _set_timeout(sock: socket.socket, deadline: Deadline) -> None:
    if deadline.expired:
        raise TimedOut("no answer in time")
    sock.settimeout(deadline.timeout())


def _share(deadline: Deadline, num_left: int) -> Deadline:
    """The part of `deadline` for reaching one of the hosts that are left."""
    if num_left == 1:
        return deadline
    return deadline.earlier(min(deadline.remaining_s() / num_left, _MAX_SHARE_S))
