# SPDX-License-Identifier: Apache-2.0
"""One connection: frames in and out of a non-blocking socket, in turns that are bounded.

Outgoing, whole small frames go first, then the sources of data take turns, one data frame each; so a small transfer
does not wait for a large one, and a CANCEL waits for at most one data frame. Incoming, bodies of small frames are
collected, and data goes straight to where the owner says. The connection reads whatever it has to write: two ends
that send to each other never wait for one another.

A thread that waits for an answer may borrow the receiving side: the loop does not look for incoming data then, the
thread sleeps on the socket itself, and no switch to it is needed when the answer comes.

Under TLS (`_tcp_tls`) what has come may wait where the socket does not show it. Then the loop is woken by the socket
being writable, which it is as soon as the peer reads; so others get their turn, as with what waits in a socket.

Everything here is done by the loop's owner, but for `wait_readable`.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..errors import LLMException, PeerLost, ProtocolError
from ._tcp_frames import HEADER_BYTES, Header, Kind, decode_header, encode_header
from ._tcp_loop import READABLE, WRITABLE, IoLoop
from ._tcp_rate import RateLimit
from ._tcp_tls import TlsStream, Wire

_ALL, _MORE_FOLLOWS = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_MORE)
CHUNK_BYTES = 2 << 20
TURN_BYTES = 4 << 20
"""What one connection may move before others get their turn."""
MAX_SMALL_FRAMES = 4096
"""Answers to a peer that asks but does not read: beyond this it is cut off."""


class Source(Protocol):
    """Data to send for one request."""

    kind: Kind
    request_id: int
    aborted: bool

    @property
    def remaining(self) -> int: ...

    def send(self, sock: Wire, budget: int) -> int: ...

    def on_sent(self) -> None:
        """Called once, when everything was handed to the socket or, after an abort, the last begun frame was."""


class Sink(Protocol):
    """Where the data frames of one request go. Never asked for more than the frame's length."""

    def receive(self, sock: Wire, budget: int) -> int: ...

    def on_frame_end(self) -> None: ...


class Owner(Protocol):
    """What a connection belongs to. Errors raised here, ProtocolError first of all, break the connection."""

    def on_header(self, connection: Connection, header: Header) -> Sink | None:
        """May this frame come? Where its body goes if it is data, None for a body that `on_frame` gets."""

    def on_frame(self, connection: Connection, header: Header, body: bytearray) -> None: ...

    def on_broken(self, connection: Connection, error: LLMException) -> None:
        """The connection is closed. Not called when `close` was."""


class Connection:
    """A connected, non-blocking socket that the loop watches until `close` or until it breaks.

    Whoever makes one, or takes one over, sets `owner` before the loop's next turn.
    """

    owner: Owner
    limit: RateLimit | None = None
    """Of the data that is sent."""

    def __init__(self, loop: IoLoop, sock: Wire) -> None:
        self._loop, self._sock = loop, sock
        self._tls = sock if isinstance(sock, TlsStream) else None
        self._closed = False
        self._events = READABLE
        self._blocked = False
        self._borrowed = False
        self._incoming = select.poll()
        self._incoming.register(sock.fileno(), select.POLLIN)
        self._small: deque[bytes] = deque()
        self._sources: deque[Source] = deque()
        self._head = memoryview(b"")
        self._source: Source | None = None
        self._chunk_left = 0
        self._pumping = False
        self._in_line = False
        self._paused = False
        self._expect_header()
        loop.watch(sock.fileno(), self._events, self._on_events)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def encrypted(self) -> bool:
        return self._tls is not None

    def send_frame(self, frame: bytes) -> None:
        """Queue a whole frame."""
        if len(self._small) >= MAX_SMALL_FRAMES:
            self._break(ProtocolError("the peer keeps asking but does not read the answers"))
            return
        self._small.append(frame)
        self._pump_guarded()

    def add_source(self, source: Source) -> None:
        self._sources.append(source)
        self._pump_guarded()

    def abort(self, source: Source) -> None:
        """Send no more of `source` than the data frame that has begun. `on_sent` follows, or comes within."""
        source.aborted = True
        if source is not self._source and source in self._sources:
            self._sources.remove(source)
            source.on_sent()

    def close(self) -> None:
        """Idempotent. Nothing is read into or sent from anybody's memory any more."""
        if self._closed:
            return
        self._closed = True
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()

    def borrow(self) -> bool:
        """Leave it to the calling thread to look for incoming data. Whether it may."""
        if self._closed or self._borrowed:
            return False
        self._borrowed = True
        self._watch()
        return True

    def wait_readable(self, timeout_s: float) -> None:
        """For the borrower, who need not be the owner: sleep until something has come, at most `timeout_s`."""
        if self._tls is None or self._tls.drained:
            self._incoming.poll(1000 * timeout_s)

    def read_borrowed(self, enough: Callable[[], bool]) -> bool:
        """For the borrower: take in what has come until `enough`, then give back. Whether it was given back."""
        self._guarded(lambda: self._read(enough))
        if enough() or self._closed:
            self.give_back()
            return True
        return False

    def give_back(self) -> None:
        self._borrowed = False
        if not self._closed:
            self._watch()

    def pause(self) -> None:
        """End the turn of reading that is under way: there is something to do for what has come."""
        self._paused = True

    def _on_events(self, events: int) -> None:
        # Whoever borrowed it reads; but a broken connection would wake the loop again and again.
        readable = events & READABLE or self._buffered
        if events & ~(READABLE | WRITABLE) or (readable and not self._borrowed):
            self._guarded(self._read)
        if events & WRITABLE and not self._closed:
            self._guarded(self._pump)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        if self._closed:
            return
        self.close()
        self.owner.on_broken(self, translated(error))

    def _pump_guarded(self) -> None:
        # Once blocked it is the loop that goes on, so that a small request does not get to send a large one's data.
        if not (self._closed or self._pumping or self._blocked):
            self._guarded(self._pump)

    # Outgoing

    def _pump(self) -> None:
        self._pumping = True
        try:
            self._blocked = self._write() or self._unflushed()
        finally:
            self._pumping = False
        if not self._closed:
            self._watch()

    def _write(self) -> bool:
        """Send for one turn. Returns whether something is left to send."""
        budget = TURN_BYTES
        while not self._closed and (self._head or self._chunk_left or self._begin_next()):
            if budget <= 0:
                return True
            wanted, sent = self._send_head() if self._head else self._send_chunk(budget)
            if sent < wanted:
                return True
            budget -= sent
        return False

    def _begin_next(self) -> bool:
        if self._small:
            self._head = memoryview(b"".join(self._small))
            self._small.clear()
            return True
        if not self._sources:
            return False
        chunk = min(self._sources[0].remaining, CHUNK_BYTES)
        if self.limit is not None:
            chunk = 0 if self._in_line else self.limit.take(chunk, self._go_on)
            self._in_line = not chunk
            if not chunk:
                return False
        source = self._source = self._sources.popleft()
        self._chunk_left = chunk
        self._head = memoryview(encode_header(source.kind, source.request_id, self._chunk_left))
        return True

    def _go_on(self) -> None:
        """More data may be sent."""
        self._in_line = False
        self._pump_guarded()

    def _send_head(self) -> tuple[int, int]:
        wanted = len(self._head)
        try:
            sent = self._sock.send(self._head, _MORE_FOLLOWS if self._chunk_left else _ALL)
        except BlockingIOError:
            sent = 0
        self._head = self._head[sent:]
        return wanted, sent

    def _send_chunk(self, budget: int) -> tuple[int, int]:
        source = self._source
        if source is None:
            raise LLMException("a data frame without a source")
        wanted = min(self._chunk_left, budget)
        sent = source.send(self._sock, wanted)
        self._chunk_left -= sent
        if not self._chunk_left:
            self._end_chunk(source)
        return wanted, sent

    def _end_chunk(self, source: Source) -> None:
        self._source = None
        if source.remaining and not source.aborted:
            self._sources.append(source)
        else:
            source.on_sent()

    @property
    def _buffered(self) -> bool:
        return self._tls is not None and self._tls.buffered

    def _unflushed(self) -> bool:
        return self._tls is not None and not self._closed and not self._tls.flush()

    def _watch(self) -> None:
        events = 0 if self._borrowed else READABLE
        if self._blocked or (self._tls is not None and (self._tls.unflushed or (events and self._tls.buffered))):
            events |= WRITABLE
        if events != self._events:
            self._events = events
            self._loop.rewatch(self._sock.fileno(), events)

    # Incoming

    def _expect_header(self) -> None:
        self._header: Header | None = None
        self._sink: Sink | None = None
        self._expect(bytearray(HEADER_BYTES))

    def _expect(self, buffer: bytearray) -> None:
        self._buffer, self._filled = buffer, 0
        self._left = len(buffer)

    def _read(self, enough: Callable[[], bool] = lambda: False) -> None:
        try:
            self._take_in(enough)
        finally:
            if self._tls is not None and not self._closed:
                self._watch()

    def _take_in(self, enough: Callable[[], bool]) -> None:
        budget = TURN_BYTES
        self._paused = False
        while budget > 0 and not self._closed and not self._paused and not enough():
            wanted = min(self._left, budget)
            got = self._receive(wanted)
            self._left -= got
            budget -= max(got, 1)
            if not self._left:
                self._on_complete()
            elif got < wanted:
                return

    def _receive(self, wanted: int) -> int:
        if self._sink is not None:
            return self._sink.receive(self._sock, wanted)
        view = memoryview(self._buffer)[self._filled : self._filled + wanted]
        try:
            got = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        self._filled += got
        return got

    def _on_complete(self) -> None:
        """A header, a body or the data of a frame is there in full."""
        if self._sink is not None:
            sink = self._sink
            self._expect_header()
            sink.on_frame_end()
        elif self._header is None:
            self._on_header(decode_header(self._buffer))
        else:
            self._on_body(self._header)

    def _on_header(self, header: Header) -> None:
        self._header = header
        self._sink = self.owner.on_header(self, header)
        if self._sink is not None:
            if not header.body_bytes:
                raise ProtocolError("an empty data frame")
            self._left = header.body_bytes
        elif header.body_bytes:
            self._expect(bytearray(header.body_bytes))
        else:
            self._expect(bytearray())
            self._on_body(header)

    def _on_body(self, header: Header) -> None:
        body = self._buffer
        self._expect_header()
        self.owner.on_frame(self, header, body)


def translated(error: Exception) -> LLMException:
    """What went wrong with a connection, in terms of this package."""
    if isinstance(error, LLMException):
        return error
    if isinstance(error, OSError):
        lost = PeerLost(f"the connection to the peer broke: {error}")
    else:
        lost = PeerLost(f"the connection was given up because of an unexpected {error!r}")
    lost.__cause__ = error
    return lost


class Discard:
    """Reads data that nobody wants any more."""

    _scratch = bytearray(256 << 10)  # its content means nothing, so all may share it

    def receive(self, sock: Wire, budget: int) -> int:
        total = 0
        while total < budget:
            view = memoryview(self._scratch)[: budget - total]
            try:
                got = sock.recv_into(view)
            except BlockingIOError:
                break
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            total += got
        return total
