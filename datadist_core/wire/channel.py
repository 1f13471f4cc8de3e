# SPDX-License-Identifier: Apache-2.0
"""One control connection: messages in and out. Handlers run in the control loop's thread and must not block."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import termios
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..checks import HostPort
from ..errors import ClosedError, LLMException, PeerLost, ProtocolError
from ..forks import keep_from_children
from .codec import MAX_HELLO_BYTES, PREAMBLE, FrameDecoder, encode
from .gate import Gate
from .log_limit import LimitedLog
from .messages import AnyMessage

logger = logging.getLogger(__name__)

#: A peer that stops reading must not make us buffer without bound.
MAX_UNSENT_BYTES = 64 << 20


class Channel(asyncio.Protocol):
    """One connection. Who uses it is told of messages and of the end, as said at `attach`.

    Args:
        open_channels: this one is in it from when the connection is there until it has ended.
        max_bytes: the limit of one message until `allow` says another.
        gate: where an accepted connection is counted.
        log: for what strangers do.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        open_channels: set[Channel],
        max_bytes: int = MAX_HELLO_BYTES,
        gate: Gate | None = None,
        log: LimitedLog | None = None,
    ) -> None:
        self._loop = loop
        self._open_channels = open_channels
        self._decoder = FrameDecoder(max_bytes)
        self._gate = gate
        self._log = log or LimitedLog(logger)
        #: Called when the connection is there, with TLS if that is on, before anything has come.
        self.on_open: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._close_reason: LLMException | None = None
        self._attaching = threading.Lock()
        self._on_message: Callable[[AnyMessage], None] = lambda message: None
        self._on_closed: Callable[[LLMException], None] = lambda error: None
        self._lost: LLMException | None = None
        self.peer_address = "?"
        self.last_received_s = loop.time()

    # -- any thread

    def attach(self, on_message: Callable[[AnyMessage], None], on_closed: Callable[[LLMException], None]) -> None:
        """From now on call these, in the loop's thread; `on_closed` exactly once, and here if it is closed already."""
        with self._attaching:
            self._on_message, self._on_closed = on_message, on_closed
            lost = self._lost
        if lost is not None:
            on_closed(lost)

    def send(self, message: AnyMessage) -> None:
        """Queue a message; order is kept per caller. Raises ProtocolError if it is too large."""
        frame = encode(message)
        self._in_loop(self._write, frame)

    def close(self, reason: LLMException | None = None) -> None:
        """Send what is queued, then close. `reason` is what `on_closed` will say. Twice is a no-op."""
        with suppress(ClosedError):
            self._in_loop(self._close, reason)

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # the loop has stopped: finalize came first
            raise ClosedError("the control loop has stopped") from error

    # -- loop thread

    def allow(self, max_bytes: int) -> None:
        """The limit of later messages (any thread, before the peer may send them)."""
        self._decoder.allow(max_bytes)

    def known(self) -> None:
        """The peer is no stranger any more."""
        if self._gate is not None:
            self._gate.known(self)

    def abort(self, reason: LLMException) -> None:
        """End it at once; what is queued is lost."""
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a control channel needs a stream transport")
        self._transport = transport
        self._open_channels.add(self)
        if self._close_reason is not None:  # it was given up before it was there
            transport.abort()
            return
        self.peer_address = _address_text(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_from_children(self, sock)
        self.on_open()
        transport.write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        self.last_received_s = self._loop.time()
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self._log.log(logging.WARNING, "closing the control connection with %s: %s", self.peer_address, error)
            self._close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_channels.discard(self)
        if self._gate is not None:
            self._gate.left(self)
        reason = self._close_reason
        if reason is None:
            why = f": {exc}" if exc else ""
            reason = PeerLost(f"{self.peer_address} closed the control connection{why}{self._hint()}")
            reason.__cause__ = exc
        with self._attaching:
            self._lost, on_closed = reason, self._on_closed
        on_closed(reason)

    def _hint(self) -> str:
        """What may be wrong where a dialled end has not said a word."""
        if self._gate is not None or self._decoder.has_begun:
            return ""
        has_tls = self._transport is not None and self._transport.get_extra_info("sslcontext") is not None
        if has_tls:
            return ", before it said anything: has the authority that it trusts signed the certificate of this end?"
        return ", before it said anything: is TLS on there, and not at this end (llm.Security)?"

    def has_unread(self) -> bool:
        """Whether something has come that was not read yet."""
        if self._transport is None or self._transport.is_closing():
            return False
        count = array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.FIONREAD, count)
        return count[0] > 0

    def _write(self, frame: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            self._close(PeerLost(f"{self.peer_address} does not read its control connection"))
            return
        self._transport.write(frame)

    def _close(self, reason: LLMException | None) -> None:
        self._close_reason = self._close_reason or reason or ClosedError("the link was closed here")
        if self._transport is None:
            return
        self._transport.close()
        # close() waits for the peer to take what is buffered; a dead peer never does.
        self._loop.call_later(1.0, self._transport.abort)


def _address_text(peername: Any) -> str:
    return str(HostPort(str(peername[0]), int(peername[1]))) if peername else "?"
