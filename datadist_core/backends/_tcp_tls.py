# SPDX-License-Identifier: Apache-2.0
"""A connection under TLS, with the part of a socket's methods that the rest of the tcp backend uses.

TLS itself works on memory alone here (`ssl.MemoryBIO`): what it wants sent goes to the socket as far as that takes it,
and what has come is given to it. So the socket is readable and writable when a socket is, nothing has to be tried
again with the same bytes, and no call waits for the other direction. Two things differ from a socket and have to be
looked after by who watches it:

- what was taken from a caller may not have got to the socket yet (`unflushed`): watch for writing, then `flush`;
- what has come may have left the socket and not been read by anybody yet (`buffered`): it will not become readable
  for that.

Both ends show a certificate; the handshake goes on in whatever call comes first. The end of the stream without TLS's
own goodbye is the end of the stream: frames have lengths, so nothing can be cut short unnoticed.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

from ..errors import ParamInvalid, Unreachable
from ..security import Security

TAKE_BYTES = 256 << 10
"""How much is encrypted, or taken from the socket, at a time."""
_MORE = int(socket.MSG_MORE)


class TlsStream:
    """One end of a TLS connection over a connected socket, which it owns. Blocks where the socket does.

    All methods raise OSError (`ssl.SSLError` is one) when the connection is broken or the handshake fails; those that
    move bytes raise BlockingIOError when nothing can be moved now. Owned by one thread at a time.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._ready = False
        self._ended = False
        self.drained = True
        """Nothing is buffered. Anybody may look at this."""
        self._held = b""
        self._unsent = memoryview(b"")

    @property
    def unflushed(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._unsent)

    @property
    def buffered(self) -> bool:
        """Whether there may be something to receive although the socket has nothing."""
        return not self.drained and bool(self._incoming.pending or self._tls.pending())

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    # Sending

    def flush(self) -> bool:
        """Send what waits. Whether all of it is through."""
        self._send_unsent()
        return not self._unsent

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """As of a socket. With MSG_MORE it may be held back until the next call without."""
        if flags & _MORE:
            self._held += data
            return len(data)
        return self._take(data)

    def sendall(self, data: bytes) -> None:
        """Only on a blocking socket."""
        while data:
            data = data[self.send(data) :]
        while not self.flush():
            continue

    def _take(self, data: bytes | memoryview) -> int:
        """Encrypt what can be sent at a time, and send what the socket takes. Returns how much was encrypted."""
        self._finish_handshake()
        if not self.flush():
            raise BlockingIOError
        if self._held:
            self._tls.write(self._held)
            self._held = b""
        data = data[:TAKE_BYTES]
        self._tls.write(data)
        self._send_unsent()
        return len(data)

    def _send_unsent(self) -> None:
        """Send what TLS wants sent, as far as the socket takes it."""
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return
            try:
                sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    # Receiving

    def recv(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, view: memoryview) -> int:
        """As of a socket: 0 at the end of the stream."""
        self._finish_handshake()
        while not self._ended:
            try:
                return cast("int", self._tls.read(len(view), view))  # with a buffer it is a number
            except ssl.SSLWantReadError:
                self._fill()
            except ssl.SSLZeroReturnError:
                self._ended = True
        return 0

    def receive_what_there_is(self, view: memoryview) -> int:
        """Several records, if they have come. 0 at the end of the stream."""
        got = self.recv_into(view)
        with suppress(BlockingIOError):
            while 0 < got < len(view) and (more := self.recv_into(view[got:])):
                got += more
        return got

    def _fill(self) -> None:
        """Give TLS what has come. It may have answers of its own to send, too."""
        self.drained = True
        self._send_unsent()
        data = self._sock.recv(TAKE_BYTES)
        if data:
            self._incoming.write(data)
            self.drained = False
        else:
            self._ended = True

    def _finish_handshake(self) -> None:
        while not self._ready:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._fill()
                if self._ended:
                    raise ConnectionResetError("the peer closed the connection during the TLS handshake") from None
            except ssl.SSLError:
                self._send_unsent()  # the alert: the peer shall hear why
                raise
            else:
                self._ready = True
                self._send_unsent()


Wire: TypeAlias = socket.socket | TlsStream
"""What frames travel on."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The contexts for all connections of a backend."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, security: Security) -> Tls | None:
        """None if connections are not encrypted. Raises ParamInvalid if the files cannot be read (any more)."""
        try:
            server, client = security.server_context(), security.client_context()
        except (OSError, ValueError) as error:
            raise ParamInvalid(f"the files for TLS of tcp data connections cannot be used: {error}") from error
        return None if server is None or client is None else cls(server, client)


def check_both_or_none(here: Tls | None, peer_has_tls: bool) -> None:
    """Raise Unreachable unless both ends encrypt, or neither."""
    if peer_has_tls != (here is not None):
        mine, theirs = ("off", "on") if peer_has_tls else ("on", "off")
        raise Unreachable(
            f"TLS for tcp data is {mine} at this end and {theirs} at the peer; give both ends the files for tls in "
            "their security option, or neither"
        )
