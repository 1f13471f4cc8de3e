# SPDX-License-Identifier: Apache-2.0
"""Listening sockets of control connections: what is bound, who is let in, and TLS before anything is read.

Everything here runs in the control loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..checks import HostPort
from ..errors import LLMException, ParamInvalid
from ..forks import keep_from_children
from ..security import Security
from .channel import Channel
from .codec import MAX_HELLO_BYTES, MAX_PROOF_BYTES
from .gate import HELLO_TIMEOUT_S, Gate
from .log_limit import LimitedLog

logger = logging.getLogger(__name__)

BACKLOG = 1024
#: With no file descriptor left a listener stays readable: it is asked again after this time.
PAUSE_S = 0.2
_BURST = 16
Accept = Callable[[Channel], None]


@dataclass(eq=False)
class Listener:
    """A bound address that accepts connections, with the real port also when 0 was asked for."""

    address: HostPort
    sockets: list[socket.socket] = field(repr=False)
    is_open: bool = True


class Acceptor:
    """All listeners of one control loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, security: Security, channels: set[Channel]) -> None:
        self._loop = loop
        self._channels = channels
        self._security = security
        self._tls = security.server_context()
        self._log = LimitedLog(logger)
        self._gate = Gate(loop, security.limits, self._log)
        self._listeners: list[Listener] = []
        self._arriving: set[asyncio.Task[None]] = set()

    async def listen(self, address: HostPort, accept: Accept) -> Listener:
        """Bind and accept; `accept` gets each channel before its first message.

        Raises:
            ParamInvalid: naming the address, if it cannot be bound.
        """
        try:
            sockets = await self._bind(address)
        except OSError as error:
            raise ParamInvalid(
                f"cannot listen on {address}: {error.strerror or error}; choose another address, or port 0"
            ) from error
        listener = Listener(HostPort(address.host, sockets[0].getsockname()[1]), sockets)
        keep_from_children(listener, *sockets)
        self._listeners.append(listener)
        for sock in sockets:
            self._watch(listener, sock, accept)
        self._tell(listener)
        return listener

    def close_listener(self, listener: Listener) -> None:
        """The port is free on return. What was accepted stays. Twice is a no-op."""
        if not listener.is_open:
            return
        listener.is_open = False
        self._listeners.remove(listener)
        for sock in listener.sockets:
            self._loop.remove_reader(sock)
            sock.close()

    def close(self) -> None:
        for listener in list(self._listeners):
            self.close_listener(listener)

    # -- binding

    async def _bind(self, address: HostPort) -> list[socket.socket]:
        """One port on all addresses of that host, and on no other; "*" is all interfaces. OSError if there is none."""
        host = None if address.host in ("", "*") else address.host
        found = await self._loop.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        try:
            for family, _, _, _, where in dict.fromkeys(found):
                port = sockets[0].getsockname()[1] if sockets else where[1]
                sock = _bound(family, (*where[:1], port, *where[2:]), optional=bool(sockets))
                if sock is not None:
                    sockets.append(sock)
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        return sockets

    def _tell(self, listener: Listener) -> None:
        bound = ", ".join(str(HostPort(*sock.getsockname()[:2])) for sock in listener.sockets)
        secret = "on" if self._security.secret is not None else "off"
        tls = "off" if self._security.tls is None else "on"
        logger.info("accepting links at %s (secret: %s, TLS: %s)", bound, secret, tls)
        if secret == tls == "off" and listener.address.host in ("", "*", "0.0.0.0", "::"):
            logger.warning("links are accepted at all interfaces of this host, from anybody: set llm.Security")

    # -- accepting

    def _watch(self, listener: Listener, sock: socket.socket, accept: Accept) -> None:
        if listener.is_open:
            self._loop.add_reader(sock, self._on_readable, listener, sock, accept)

    def _on_readable(self, listener: Listener, sock: socket.socket, accept: Accept) -> None:
        for _ in range(_BURST):
            try:
                newcomer, address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.log(logging.WARNING, "cannot accept connections at %s: %s", listener.address, error)
                self._loop.remove_reader(sock)
                self._loop.call_later(PAUSE_S, self._watch, listener, sock, accept)
                return
            self._admit(newcomer, str(HostPort(*address[:2])), accept)

    def _admit(self, sock: socket.socket, who: str, accept: Accept) -> None:
        sock.setblocking(False)
        limit = MAX_HELLO_BYTES if self._security.secret is None else MAX_PROOF_BYTES
        channel = Channel(self._loop, self._channels, limit, self._gate, self._log)
        channel.on_open = partial(accept, channel)
        arriving = self._loop.create_task(self._receive(sock, who, channel))

        def drop(error: LLMException) -> None:
            arriving.cancel()
            channel.abort(error)

        self._arriving.add(arriving)
        arriving.add_done_callback(partial(self._arrived, sock, channel))
        if not self._gate.enter(channel, who, drop):
            arriving.cancel()

    async def _receive(self, sock: socket.socket, who: str, channel: Channel) -> None:
        time_limit_s = None if self._tls is None else HELLO_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: channel, sock, ssl=self._tls, ssl_handshake_timeout=time_limit_s
            )
        except OSError as error:
            self._gate.left(channel)
            sock.close()
            hint = f"; {NO_TLS}" if isinstance(error, ssl.SSLError) and "CERT" not in str(error) else ""
            self._log.log(logging.WARNING, "the TLS handshake with %s failed: %s%s", who, error, hint)

    def _arrived(self, sock: socket.socket, channel: Channel, arriving: asyncio.Task[None]) -> None:
        self._arriving.discard(arriving)
        if arriving.cancelled():  # perhaps before it has begun, so that it could not clean up itself
            self._gate.left(channel)
            sock.close()


NO_TLS = "does the peer have TLS on, as this end has?"


def _bound(family: int, where: tuple[Any, ...], optional: bool) -> socket.socket | None:
    """A listening socket. None if it is `optional` and this host does not have that address after all."""
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        if optional:
            return None
        raise
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if optional and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return sock
