# SPDX-License-Identifier: Apache-2.0
"""Accepting: the listener, and connections that are not part of a link yet.

A stranger has to name this very listener in a HELLO, which only our peers can, and to show a proof for a link that a
`connect` of this end waits for, all that within `HELLO_TIMEOUT_S` however slowly it speaks, the TLS handshake
included. Proof and `connect` may come in either order, so a connection with a proof that fits no link yet is kept for
a while. Until a connection is matched it can make us hold one small frame at a time.

There are limits to how many of both there are, apart from each other, so that who says nothing of use cannot keep
out who does; and if there are too many, those that have waited longest go.

Everything here is done by the loop's owner.
"""

from __future__ import annotations

import hmac
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future

from ..errors import LLMException, ProtocolError
from ._tcp_connection import Connection, Sink
from ._tcp_frames import Header, Hello, Kind, decode_hello, decode_proof, encode_heard, encode_proof
from ._tcp_loop import READABLE, IoLoop
from ._tcp_options import TcpOptions, suit_path, tune
from ._tcp_proof import LinkKey, Meeting, new_nonce
from ._tcp_tls import Tls, TlsStream

HELLO_TIMEOUT_S = 5.0
UNMATCHED_TIMEOUT_S = 30.0
MAX_STRANGERS = 128
"""That have not named this listener yet."""
MAX_UNMATCHED = 512
"""That have, and belong to no link yet."""
_ACCEPTS_PER_TURN = 16
_PAUSE_S = 0.2


class _Newcomer:
    """A connection before it is part of a link. `meeting` is there after its HELLO, `proof` after its PROOF."""

    def __init__(self, acceptor: Acceptor, loop: IoLoop, sock: socket.socket | TlsStream) -> None:
        self._acceptor = acceptor
        self.meeting: Meeting | None = None
        self.proof: bytes | None = None
        self.expires_at_s = time.monotonic() + HELLO_TIMEOUT_S
        self.connection = Connection(loop, sock)
        self.connection.owner = self

    @property
    def expected_kind(self) -> Kind | None:
        if self.meeting is None:
            return Kind.HELLO
        return Kind.PROOF if self.proof is None else None

    def on_header(self, connection: Connection, header: Header) -> Sink | None:
        if header.kind is not self.expected_kind:
            raise ProtocolError(f"{header.kind.name} on a connection that no link has yet")
        return None

    def on_frame(self, connection: Connection, header: Header, body: bytearray) -> None:
        if self.meeting is None:
            self.meeting = Meeting(decode_hello(body), new_nonce())
            self._acceptor.on_hello(self, self.meeting)
        else:
            self.proof = decode_proof(body)
            self.expires_at_s = time.monotonic() + UNMATCHED_TIMEOUT_S
            self._acceptor.on_proof(self)

    def on_broken(self, connection: Connection, error: LLMException) -> None:
        self._acceptor.drop(self)


class Expected:
    """A link that this end waits for. `result` is set when it is up."""

    def __init__(self, key: LinkKey, on_complete: Callable[[list[Connection]], None]) -> None:
        self.key = key
        self.result: Future[None] = Future()
        self.streams: dict[int, _Newcomer] = {}
        self.on_complete = on_complete

    def is_meant_by(self, newcomer: _Newcomer) -> bool:
        if newcomer.meeting is None or newcomer.proof is None:
            return False
        return newcomer.meeting.is_proved(self.key, Kind.PROOF, newcomer.proof)

    def add(self, newcomer: _Newcomer, hello: Hello) -> bool:
        """Whether all streams of the link are there. Raises ProtocolError if this one does not fit the others."""
        if hello.stream in self.streams or any(
            n.meeting and n.meeting.hello.num_streams != hello.num_streams for n in self.streams.values()
        ):
            raise ProtocolError(f"stream {hello.stream} of {hello.num_streams} does not fit those that came before")
        self.streams[hello.stream] = newcomer
        return len(self.streams) == hello.num_streams


class Acceptor:
    """Owns the listeners and all newcomers."""

    def __init__(self, loop: IoLoop, instance: bytes, options: TcpOptions, tls: Tls | None) -> None:
        self._loop = loop
        self._tls = tls
        self._listeners: list[socket.socket] = []
        self._instance, self._options = instance, options
        self._newcomers: set[_Newcomer] = set()
        self._expected: dict[LinkKey, Expected] = {}
        self._paused_until_s = math.inf

    def add_listener(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._loop.watch(listener.fileno(), READABLE, lambda _: self._on_readable(listener))

    def expect(self, expected: Expected) -> None:
        """Wait for a link; newcomers that prove to be of it may be there already."""
        if expected.key in self._expected:
            raise ProtocolError("this link token is in use")
        self._expected[expected.key] = expected
        for newcomer in list(self._newcomers):
            if expected.is_meant_by(newcomer):
                self._match_guarded(newcomer, expected)

    def forget(self, expected: Expected) -> None:
        """Wait no more; what has come of the link is closed."""
        if self._expected.get(expected.key) is expected:
            del self._expected[expected.key]
            for newcomer in list(expected.streams.values()):
                newcomer.connection.close()

    def give_up(self, expected: Expected, error: LLMException) -> None:
        """The same, and whoever waits for it is told. No-op once the link is up."""
        self.forget(expected)
        if not expected.result.done():
            expected.result.set_exception(error)

    def on_hello(self, newcomer: _Newcomer, meeting: Meeting) -> None:
        if not hmac.compare_digest(meeting.hello.instance, self._instance):
            raise ProtocolError("HELLO is meant for another listener")
        self._limit([n for n in self._newcomers if n.meeting is not None and n is not newcomer], MAX_UNMATCHED)
        newcomer.connection.send_frame(encode_heard(meeting.nonce))

    def on_proof(self, newcomer: _Newcomer) -> None:
        self._loop.wake_at(newcomer.expires_at_s)
        found: Expected | None = None
        for expected in self._expected.values():
            if expected.is_meant_by(newcomer):
                found = expected
        if found is not None:
            self._match(newcomer, found)

    def drop(self, newcomer: _Newcomer) -> None:
        """It is gone, or shall be."""
        newcomer.connection.close()
        self._newcomers.discard(newcomer)
        for expected in self._expected.values():
            for stream in [stream for stream, one in expected.streams.items() if one is newcomer]:
                del expected.streams[stream]

    def sweep(self) -> float:
        """Drop who took too long. Returns when to look again."""
        now = time.monotonic()
        for newcomer in [n for n in self._newcomers if n.expires_at_s <= now]:
            self.drop(newcomer)
        if self._paused_until_s <= now:
            self._paused_until_s = math.inf
            self._rewatch(READABLE)
        return min((self._paused_until_s, *(n.expires_at_s for n in self._newcomers)))

    def close(self, error: LLMException) -> None:
        """Fail all waiting connects with `error`."""
        for listener in self._listeners:
            self._loop.unwatch(listener.fileno())
            listener.close()
        for newcomer in list(self._newcomers):
            self.drop(newcomer)
        for expected in list(self._expected.values()):
            self.give_up(expected, error)

    def _match_guarded(self, newcomer: _Newcomer, expected: Expected) -> None:
        try:
            self._match(newcomer, expected)
        except ProtocolError:
            self.drop(newcomer)

    def _match(self, newcomer: _Newcomer, expected: Expected) -> None:
        """The newcomer has proved to be of that link."""
        if newcomer.meeting is None:
            return
        hello = newcomer.meeting.hello
        complete = expected.add(newcomer, hello)
        self._newcomers.discard(newcomer)
        if not complete:
            return
        del self._expected[expected.key]
        streams = [expected.streams[stream] for stream in range(hello.num_streams)]
        expected.on_complete([stream.connection for stream in streams])
        for stream in streams:
            if stream.meeting is not None:
                proof = stream.meeting.prove(expected.key, Kind.WELCOME)
                stream.connection.send_frame(encode_proof(Kind.WELCOME, proof))
        expected.result.set_result(None)

    def _limit(self, others: list[_Newcomer], most: int) -> None:
        """Make room for one more: who has waited longest goes."""
        if len(others) >= most:
            self.drop(min(others, key=lambda n: n.expires_at_s))

    def _rewatch(self, events: int) -> None:
        for listener in self._listeners:
            self._loop.rewatch(listener.fileno(), events)

    def _on_readable(self, listener: socket.socket) -> None:
        try:
            for _ in range(_ACCEPTS_PER_TURN):
                self._admit(listener.accept()[0])
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor left; the listener stays readable, so don't ask it for a while
            self._rewatch(0)
            self._paused_until_s = time.monotonic() + _PAUSE_S
            self._loop.wake_at(self._paused_until_s)

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            tune(sock, self._options)
            suit_path(sock, self._options)
        except OSError:
            sock.close()
            return
        self._limit([n for n in self._newcomers if n.meeting is None], MAX_STRANGERS)
        wire = sock if self._tls is None else TlsStream(sock, self._tls.server, server_side=True)
        newcomer = _Newcomer(self, self._loop, wire)
        self._newcomers.add(newcomer)
        self._loop.wake_at(newcomer.expires_at_s)
