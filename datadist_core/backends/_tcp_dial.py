# SPDX-License-Identifier: Apache-2.0
"""Dialling: the initiator's side of making a link, in the thread of whoever calls `connect`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ..errors import ClosedError, LLMException, ProtocolError, TimedOut, Unreachable
from ..types import Deadline
from ._attempts import Attempt
from ._tcp_address import Endpoint, Identity
from ._tcp_frames import (
    HEADER_BYTES,
    Hello,
    Kind,
    decode_header,
    decode_heard,
    decode_proof,
    encode_hello,
    encode_proof,
)
from ._tcp_options import TcpOptions, suit_path, tune
from ._tcp_proof import LinkKey, Meeting, new_nonce
from ._tcp_tls import Tls, TlsStream, Wire, check_both_or_none

_MAX_SHARE_S = 2.0
"""For reaching one of several hosts: packets may vanish there, or something else may listen and never answer."""


class Dialler:
    """Makes the connections of new links. `close` ends attempts that are under way. Thread-safe."""

    def __init__(self, options: TcpOptions, tls: Tls | None) -> None:
        self._options, self._tls = options, tls
        self._lock = threading.Lock()
        self._dialling: set[Wire] = set()
        self._closed = False

    def dial(self, identity: Identity, key: LinkKey, deadline: Deadline, attempt: Attempt) -> list[Wire]:
        """Connections to the peer, all of them welcomed. Raises Unreachable, TimedOut, ProtocolError, ClosedError."""
        check_both_or_none(self._tls, identity.tls)
        if not identity.endpoints:
            raise Unreachable("the peer's tcp backend does not listen (no listen_ip_info there)")
        failures: list[str] = []
        for position, endpoint in enumerate(identity.endpoints):
            share = _share(deadline, len(identity.endpoints) - position)
            try:
                return self._dial_endpoint(endpoint, identity.instance, key, share, deadline, attempt)
            except (OSError, ValueError, LLMException) as error:  # ValueError: no host name at all
                self._check_wanted(attempt)
                failures.append(f"{endpoint.host} port {endpoint.port}: {error}")
        if deadline.expired:
            raise TimedOut(f"no tcp connection to the peer in time; {'; '.join(failures)}")
        raise Unreachable(f"no tcp connection to the peer; {'; '.join(failures)}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            _shut(self._dialling)

    def _dial_endpoint(
        self,
        endpoint: Endpoint,
        instance: bytes,
        key: LinkKey,
        share: Deadline,
        deadline: Deadline,
        attempt: Attempt,
    ) -> list[Wire]:
        """Connections to that endpoint. Reaching the peer must not take longer than `share`."""
        with self._collected() as wires:
            attempt.when_ended(lambda _: _shut(list(wires)))
            meetings: list[Meeting] = []
            for stream in range(self._options.streams):
                wire = self._connect(endpoint, share, wires, attempt)
                hello = Hello(instance, new_nonce(), stream, self._options.streams)
                wire.sendall(encode_hello(hello))
                meeting = Meeting(hello, decode_heard(_await_frame(wire, Kind.HEARD, share)))
                wire.sendall(encode_proof(Kind.PROOF, meeting.prove(key, Kind.PROOF)))
                meetings.append(meeting)
            for wire, meeting in zip(wires, meetings, strict=True):
                _await_welcome(wire, meeting, key, deadline)
                wire.setblocking(False)
        return wires

    @contextmanager
    def _collected(self) -> Iterator[list[Wire]]:
        """Connections in the making: reachable for `close` meanwhile, closed if it does not work out."""
        wires: list[Wire] = []
        try:
            yield wires
        except BaseException:
            with self._lock:
                self._dialling.difference_update(wires)
            for wire in wires:
                wire.close()
            raise
        with self._lock:
            self._dialling.difference_update(wires)

    def _connect(self, endpoint: Endpoint, deadline: Deadline, wires: list[Wire], attempt: Attempt) -> Wire:
        """A connection to the first address of the host that answers, added to `wires`."""
        host, port = endpoint.host, endpoint.port
        last: OSError = OSError(f"host {host!r} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            wire: Wire = sock if self._tls is None else TlsStream(sock, self._tls.client, server_side=False)
            self._add(wire, wires, attempt)
            try:
                tune(sock, self._options)
                _set_timeout(sock, deadline)
                sock.connect(address)
                suit_path(sock, self._options)
            except OSError as error:
                last = error
                self._drop(wire, wires, attempt)
            else:
                return wire
        raise last

    def _add(self, wire: Wire, wires: list[Wire], attempt: Attempt) -> None:
        wires.append(wire)
        with self._lock:
            self._dialling.add(wire)
        self._check_wanted(attempt)

    def _drop(self, wire: Wire, wires: list[Wire], attempt: Attempt) -> None:
        wires.remove(wire)
        with self._lock:
            self._dialling.discard(wire)
        wire.close()
        self._check_wanted(attempt)

    def _check_wanted(self, attempt: Attempt) -> None:
        if self._closed:
            raise ClosedError("the tcp backend was closed during connect")
        attempt.check_wanted()


def _shut(wires: Iterable[Wire]) -> None:
    """Whoever waits for something to come on them waits no more."""
    for wire in wires:
        with suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)


def _await_welcome(wire: Wire, meeting: Meeting, key: LinkKey, deadline: Deadline) -> None:
    proof = decode_proof(_await_frame(wire, Kind.WELCOME, deadline))
    if not meeting.is_proved(key, Kind.WELCOME, proof):
        raise ProtocolError("whoever listens there does not know the link's token; that is not the peer")


def _await_frame(wire: Wire, kind: Kind, deadline: Deadline) -> bytes:
    """The body of the next frame, which must be of that kind."""
    header = decode_header(_exactly(wire, HEADER_BYTES, deadline))
    if header.kind is not kind:
        raise ProtocolError(f"expected {kind.name} from the peer, got {header.kind.name}")
    return _exactly(wire, header.body_bytes, deadline)


def _exactly(wire: Wire, num_bytes: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        _set_timeout(wire, deadline)
        part = wire.recv(num_bytes - len(data))
        if not part:
            raise Unreachable("whoever listens there refused the link")
        data += part
    return bytes(data)


def _set_timeout(wire: Wire, deadline: Deadline) -> None:
    if deadline.expired:
        raise TimedOut("no answer in time")
    wire.settimeout(deadline.timeout())


def _share(deadline: Deadline, num_left: int) -> Deadline:
    """The part of `deadline` for reaching one of the hosts that are left."""
    if num_left == 1:
        return deadline
    return deadline.earlier(min(deadline.remaining_s() / num_left, _MAX_SHARE_S))
