# SPDX-License-Identifier: Apache-2.0
"""The answering end of the exchange in `_shm_protocol`: one socket and one thread per backend.

Nothing here can block on a peer: sockets are non-blocking, and a peer that does not take its answers is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import LLMException, PeerLost, ProtocolError, Unreachable
from ..memory.region import Region
from ._shm_protocol import (
    MAX_PACKET_BYTES,
    MAX_REASON_CHARS,
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

_log = logging.getLogger(__name__)

_MAX_STRANGERS = 128  # connections without a link; for one more, the oldest has to go
_BACKLOG = 1024
_ACCEPT_RETRY_S = 0.1
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A link whose peer may connect, once."""

    peer_id: int
    token: bytes


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection to us, a stranger's until `admission` is set.

    `expelled`: the link has ended here; that the peer closes its end is awaited, for until then it may be copying.
    """

    socket: socket.socket
    proof: bytes = b""
    admission: Admission | None = None
    expelled: Admission | None = None


class RegionServer:
    """Hands out descriptors of our regions to peers that know their link's token. Thread-safe.

    Args:
        find_region: the region with an id; raises Unreachable if there is none. Called by the server's thread.
        on_lost: called by the server's thread when an admitted peer's connection ended; with None after a Bye.
    """

    def __init__(
        self, find_region: Callable[[int], Region], on_lost: Callable[[Admission, LLMException | None], None]
    ) -> None:
        self.address = b"\0datadist-" + secrets.token_hex(16).encode()
        self._find_region = find_region
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._expected: list[Admission] = []
        self._guests: list[_Guest] = []
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="datadist-shm-server", daemon=True)

    def start(self) -> None:
        """Raises Unreachable if this host has no such sockets."""
        try:
            self._listener.bind(self.address)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._release()
            raise Unreachable(f"cannot listen on an abstract Unix socket: {error}") from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    def admit(self, admission: Admission) -> None:
        """Let the peer of a link in, also if it is at the door already."""
        with self._lock:
            self._expected.append(admission)
            for guest in self._guests:
                if guest.proof and guest.admission is None:
                    with contextlib.suppress(OSError):  # it is gone; the server's thread will notice
                        self._try_welcome(guest)

    def expel(self, admission: Admission) -> None:
        """End a link's service; its peer sees the connection end. No `on_lost` follows. Idempotent."""
        with self._lock:
            if admission in self._expected:
                self._expected.remove(admission)
            for guest in self._guests:
                if guest.admission is admission:
                    guest.admission, guest.expelled = None, admission
                    _send_no_more(guest.socket)

    def awaits_end_of(self, peer_id: int) -> bool:
        """Whether a peer that was let in, and perhaps expelled since, has not closed its end yet."""
        with self._lock:
            known = (guest.admission or guest.expelled for guest in self._guests)
            return any(admission is not None and admission.peer_id == peer_id for admission in known)

    def close(self) -> None:
        """Idempotent. The thread is gone afterwards, unless it is the caller."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake_writer.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select():
                    self._attend(key)
        finally:
            self._release()

    def _attend(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, _Guest):
            self._read(key.data)

    def _release(self) -> None:
        with self._lock:
            self._closing = True
            for sock in [self._listener, self._wake_reader, self._wake_writer, *(g.socket for g in self._guests)]:
                sock.close()
            self._guests.clear()
            self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return  # it went away in the meantime
        except OSError as error:
            _log.warning("cannot accept a shared-memory peer now: %s", error)
            self._pause()
            return
        accepted.setblocking(False)
        guest = _Guest(accepted)
        with self._lock:
            self._guests.append(guest)
        self._selector.register(accepted, selectors.EVENT_READ, guest)
        self._limit_strangers()

    def _pause(self) -> None:
        """Without descriptors to accept with, the listener stays ready: do not spin."""
        self._wake_reader.settimeout(_ACCEPT_RETRY_S)
        try:
            self._wake_reader.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return

    def _limit_strangers(self) -> None:
        strangers = [guest for guest in self._guests if guest.admission is None and guest.expelled is None]
        for guest in strangers[:-_MAX_STRANGERS]:
            self._drop(guest)

    def _read(self, guest: _Guest) -> None:
        """One packet of a guest. Descriptors that it sends are discarded by the kernel: there is no room for them."""
        try:
            data = guest.socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError as cause:
            self._part(guest, _broken(cause))
            return
        if not data:
            self._part(guest, PeerLost("the peer's process or its shared-memory backend ended"))
            return
        try:
            message = decode(data)
            if isinstance(message, Bye):
                self._part(guest, None)
            else:
                self._answer(guest, message)
        except (OSError, ProtocolError) as cause:
            self._turn_away(guest, _broken(cause))

    def _part(self, guest: _Guest, error: LLMException | None) -> None:
        """The peer has closed its end, or said goodbye: it copies no more."""
        with self._lock:
            admission, guest.admission = guest.admission, None
        self._drop(guest)
        if admission is not None:
            self._on_lost(admission, error)

    def _turn_away(self, guest: _Guest, error: LLMException) -> None:
        """It cannot be answered, or talks nonsense. A linked one may still be copying: wait for its own end."""
        with self._lock:
            admission, guest.admission = guest.admission, None
            guest.expelled = admission
        if admission is None:
            self._drop(guest)
        else:
            _send_no_more(guest.socket)
            self._on_lost(admission, error)

    def _drop(self, guest: _Guest) -> None:
        with self._lock:
            if guest in self._guests:
                self._guests.remove(guest)
                self._selector.unregister(guest.socket)
                guest.socket.close()

    def _answer(self, guest: _Guest, message: Message) -> None:
        """Raises ProtocolError for what this guest may not say, OSError if it cannot be answered."""
        if guest.expelled is not None:
            return  # sent before it noticed
        if isinstance(message, Fetch) and guest.admission is not None:
            self._grant(guest, message.region_id)
        elif isinstance(message, Hello) and not guest.proof:
            with self._lock:
                guest.proof = message.proof
                self._try_welcome(guest)
        else:
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _try_welcome(self, guest: _Guest) -> None:
        """Admit a guest if its link is known already; the lock is held."""
        for admission in self._expected:
            if hmac.compare_digest(guest.proof, prove(admission.token, Hello, self.address)):
                self._expected.remove(admission)
                guest.admission = admission
                _send(guest.socket, Welcome(prove(admission.token, Welcome, self.address)))
                return

    def _grant(self, guest: _Guest, region_id: int) -> None:
        try:
            region = self._find_region(region_id)
            if region.mapping is None:
                raise Unreachable(f"region {region_id} is not in a mappable pool")
        except Unreachable as error:
            _send(guest.socket, Refused(region_id, str(error)[:MAX_REASON_CHARS]))
            return
        # `region` keeps its owner, and so the descriptor, alive until it is sent.
        socket.send_fds(guest.socket, [encode(Granted(region_id))], [region.mapping.fd])


def _broken(cause: Exception) -> PeerLost:
    error = PeerLost(f"the peer's shared-memory connection broke: {cause}")
    error.__cause__ = cause
    return error


def _send(sock: socket.socket, message: Message) -> None:
    sock.send(encode(message))


def _send_no_more(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_WR)
