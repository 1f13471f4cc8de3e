# SPDX-License-Identifier: Apache-2.0
"""Accepting: the listener, and connections that are not part of a link yet.

A connection must say HELLO soon, and its token must be one that a `connect` of this end waits for. The two may come
in either order, so a connection with an unknown token is kept for a while. Until a connection is matched it can
make us hold one small frame, and there is a limit to how many there are.

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
from ._tcp_frames import Header, Hello, Kind, decode_hello, encode_frame
from ._tcp_loop import READABLE, IoLoop
from ._tcp_options import TcpOptions, suit_path, tune

HELLO_TIMEOUT_S = 5.0
UNKNOWN_TOKEN_TIMEOUT_S = 30.0
MAX_UNMATCHED = 128
_ACCEPTS_PER_TURN = 16
_PAUSE_S = 0.2


class _Newcomer:
    """A connection before it is part of a link."""

    def __init__(self, acceptor: Acceptor, loop: IoLoop, sock: socket.socket) -> None:
        self._acceptor = acceptor
        self.hello: Hello | None = None
        self.expires_at_s = time.monotonic() + HELLO_TIMEOUT_S
        self.connection = Connection(loop, sock)
        self.connection.owner = self

    def on_header(self, connection: Connection, header: Header) -> Sink | None:
        if header.kind is not Kind.HELLO or self.hello is not None:
            raise ProtocolError(f"{header.kind.name} on a connection that no link has yet")
        return None

    def on_frame(self, connection: Connection, header: Header, body: bytearray) -> None:
        self.hello = decode_hello(body)
        self.expires_at_s = time.monotonic() + UNKNOWN_TOKEN_TIMEOUT_S
        self._acceptor.on_hello(self, self.hello)

    def on_broken(self, connection: Connection, error: LLMException) -> None:
        self._acceptor.drop(self)


class Expected:
    """A link that this end waits for. `result` is set when it is up."""

    def __init__(self, token: bytes, on_complete: Callable[[list[Connection]], None]) -> None:
        self.token = token
        self.result: Future[None] = Future()
        self.streams: dict[int, _Newcomer] = {}
        self.on_complete = on_complete

    def add(self, newcomer: _Newcomer, hello: Hello) -> bool:
        """Whether all streams of the link are there. Raises ProtocolError if this one does not fit the others."""
        if hello.stream in self.streams or any(
            n.hello and n.hello.num_streams != hello.num_streams for n in self.streams.values()
        ):
            raise ProtocolError(f"stream {hello.stream} of {hello.num_streams} does not fit those that came before")
        self.streams[hello.stream] = newcomer
        return len(self.streams) == hello.num_streams


class Acceptor:
    """Owns the listeners and all newcomers."""

    def __init__(self, loop: IoLoop, instance: bytes, options: TcpOptions) -> None:
        self._loop = loop
        self._listeners: list[socket.socket] = []
        self._instance, self._options = instance, options
        self._newcomers: set[_Newcomer] = set()
        self._expected: dict[bytes, Expected] = {}
        self._paused_until_s = math.inf

    def add_listener(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._loop.watch(listener.fileno(), READABLE, lambda _: self._on_readable(listener))

    def expect(self, expected: Expected) -> None:
        """Wait for a link; newcomers with its token may be there already."""
        if expected.token in self._expected:
            raise ProtocolError("this link token is in use")
        self._expected[expected.token] = expected
        for newcomer in list(self._newcomers):
            if newcomer.hello is not None and hmac.compare_digest(newcomer.hello.token, expected.token):
                self._match_guarded(newcomer, newcomer.hello, expected)

    def forget(self, expected: Expected) -> None:
        """Wait no more; what has come of the link is closed."""
        if self._expected.pop(expected.token, None) is not None:
            for newcomer in list(expected.streams.values()):
                newcomer.connection.close()

    def on_hello(self, newcomer: _Newcomer, hello: Hello) -> None:
        if not hmac.compare_digest(hello.instance, self._instance):
            raise ProtocolError("HELLO is meant for another listener")
        newcomer.connection.send_frame(encode_frame(Kind.HEARD))
        self._loop.wake_at(newcomer.expires_at_s)
        found: Expected | None = None
        for expected in self._expected.values():
            if hmac.compare_digest(hello.token, expected.token):
                found = expected
        if found is not None and not newcomer.connection.closed:
            self._match(newcomer, hello, found)

    def drop(self, newcomer: _Newcomer) -> None:
        """It is gone, or shall be."""
        newcomer.connection.close()
        self._newcomers.discard(newcomer)
        for expected in self._expected.values():
            if newcomer.hello is not None and expected.streams.get(newcomer.hello.stream) is newcomer:
                del expected.streams[newcomer.hello.stream]

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
            self.forget(expected)
            expected.result.set_exception(error)

    def _match_guarded(self, newcomer: _Newcomer, hello: Hello, expected: Expected) -> None:
        try:
            self._match(newcomer, hello, expected)
        except ProtocolError:
            self.drop(newcomer)

    def _match(self, newcomer: _Newcomer, hello: Hello, expected: Expected) -> None:
        complete = expected.add(newcomer, hello)
        self._newcomers.discard(newcomer)
        if not complete:
            return
        del self._expected[expected.token]
        connections = [expected.streams[stream].connection for stream in range(hello.num_streams)]
        expected.on_complete(connections)
        for connection in connections:
            connection.send_frame(encode_frame(Kind.WELCOME))
        expected.result.set_result(None)

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
        if len(self._newcomers) >= MAX_UNMATCHED:
            self.drop(min(self._newcomers, key=lambda n: (n.hello is not None, n.expires_at_s)))
        newcomer = _Newcomer(self, self._loop, sock)
        self._newcomers.add(newcomer)
        self._loop.wake_at(newcomer.expires_at_s)
