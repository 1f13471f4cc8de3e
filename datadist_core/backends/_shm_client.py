# SPDX-License-Identifier: Apache-2.0
"""The asking end of the exchange in `_shm_protocol`: our connection to one peer's server."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import PeerLost, ProtocolError, TimedOut, Unreachable
from ..types import Deadline
from ._shm_protocol import (
    MAX_PACKET_BYTES,
    Bye,
    Fetch,
    Granted,
    Hello,
    Message,
    Refused,
    Welcome,
    decode,
    encode,
    prove,
)


@dataclass(frozen=True, slots=True)
class _Packet:
    message: Message
    fd: int | None

    def drop_fd(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


class RegionClient:
    """Our connection to the server of one peer. Thread-safe."""

    def __init__(self, address: bytes) -> None:
        """Dial. Raises Unreachable with the reason."""
        self._address = address
        self._request_lock = threading.Lock()
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _dial_error(error) from error
        self._socket.setblocking(False)  # waiting is done with a deadline, in `_receive`
        try:
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise _dial_error(error) from error

    def greet(self, token: bytes, deadline: Deadline) -> None:
        """Prove that we know the link's token, and have the peer prove it, who may still have to learn it.

        Raises TimedOut, ProtocolError; PeerLost if the connection ends.
        """
        with self._exclusively(deadline):
            self._send(Hello(prove(token, Hello, self._address)))
            packet = self._receive(deadline)
        packet.drop_fd()
        expected = prove(token, Welcome, self._address)
        if not isinstance(packet.message, Welcome) or not hmac.compare_digest(packet.message.proof, expected):
            raise ProtocolError("the peer's shared-memory socket is served by somebody who does not know the link")

    def fetch(self, region_id: int, deadline: Deadline) -> int:
        """A descriptor, now the caller's, of the file behind a region. Raises Unreachable, TimedOut, PeerLost."""
        with self._exclusively(deadline):
            self._send(Fetch(region_id))
            return self._granted(region_id, deadline)

    def fileno(self) -> int:
        """The connection's descriptor, which hangs up when the peer has gone; negative once it is closed here."""
        return self._socket.fileno()

    def is_up(self) -> bool:
        """Whether the peer's end still exists. One system call."""
        fd = self._socket.fileno()
        if fd < 0:
            return False
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)  # POLLHUP and POLLERR are reported without being asked for
        return not poller.poll(0)

    def hang_up(self) -> None:
        """Ask for no more; whoever waits for an answer gets PeerLost. The peer notices nothing yet. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Say goodbye, which tells the peer that its memory is touched no more. Idempotent."""
        self.hang_up()
        with contextlib.suppress(PeerLost):
            self._send(Bye())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with self._request_lock:  # free as soon as the waiting thread has seen the shutdown
            self._socket.close()

    @contextlib.contextmanager
    def _exclusively(self, deadline: Deadline) -> Iterator[None]:
        """One request at a time."""
        timeout = deadline.timeout()
        if not self._request_lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimedOut("the peer has not answered an earlier request on its shared-memory socket")
        try:
            yield
        finally:
            self._request_lock.release()

    def _granted(self, region_id: int, deadline: Deadline) -> int:
        while True:
            packet = self._receive(deadline)
            message = packet.message
            if isinstance(message, Granted) and message.region_id == region_id:
                if packet.fd is None:
                    raise Unreachable(f"the descriptor of region {region_id} was lost: too many open files here?")
                return packet.fd
            packet.drop_fd()
            if isinstance(message, Refused) and message.region_id == region_id:
                raise Unreachable(message.reason)
            if not isinstance(message, Granted | Refused):
                raise ProtocolError(f"the peer answered a fetch with {type(message).__name__}")
            # Otherwise it is the answer to an earlier request that timed out.

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(encode(message))
        except OSError as error:
            raise PeerLost(f"the peer's shared-memory connection is gone: {error}") from error

    def _receive(self, deadline: Deadline) -> _Packet:
        _wait_readable(self._socket, deadline)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"the peer's shared-memory connection is gone: {error}") from error
        if not data:
            raise PeerLost("the peer closed its shared-memory connection")
        fd = fds[0] if fds else None
        try:
            return _Packet(decode(data), fd)
        except ProtocolError:
            if fd is not None:
                os.close(fd)
            raise


def _wait_readable(sock: socket.socket, deadline: Deadline) -> None:
    timeout = deadline.timeout()
    poller = select.poll()
    try:
        poller.register(sock, select.POLLIN)
    except ValueError as error:
        raise PeerLost("the shared-memory connection was closed") from error
    if not poller.poll(None if timeout is None else timeout * 1000):
        raise TimedOut("the peer did not answer on its shared-memory socket in time")


def _dial_error(error: OSError) -> Unreachable:
    if isinstance(error, ConnectionRefusedError):
        return Unreachable("nobody listens on the peer's shared-memory socket: its process or backend has ended")
    if isinstance(error, BlockingIOError):
        return Unreachable("too many processes are waiting for the peer's shared-memory socket")
    if isinstance(error, PermissionError):
        return Unreachable(f"a security policy of this host forbids the peer's shared-memory socket: {error}")
    return Unreachable(f"the peer's shared-memory socket cannot be reached: {error}")
