# SPDX-License-Identifier: Apache-2.0
"""STAND-IN, not the vendor's package: how two ends of `ascend_standin` move bytes, over plain sockets.

A link is two connections, one for the requests of each end, and a thread at each end that serves the other's. That is
all the stand-in says about how the vendor does it: nothing.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from .ascend_standin_types import LLMException, LLMStatusCode

_SIZES = struct.Struct("!IQ")
_HANDSHAKE_S = 1.0
_JOIN_S = 20.0
_MAX_HEADER, _MAX_PAYLOAD = 16 << 20, 64 << 20
Blocks = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Hello(msgspec.Struct, array_like=True):
    """The first message on a connection. `asks`: the one who dialled will send the requests on it."""

    cluster_id: int
    expected_id: int
    nonce: bytes
    asks: bool


class Request(msgspec.Struct, array_like=True):
    """`kind` is "pull", "push", "ping" or "unlink". `blocks` are int64."""

    kind: str
    model_id: int = 0
    block_bytes: int = 0
    blocks: bytes = b""


class Answer(msgspec.Struct, array_like=True):
    """`status` is the name of an LLMStatusCode."""

    status: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """A registered blocks cache, of one tensor."""

    address: int
    num_blocks: int
    block_bytes: int
    accessible: bool

    def view(self, blocks: Blocks, block_bytes: int) -> Bytes:
        """All of it as (num_blocks, block_bytes); LLM_PARAM_INVALID unless that is its shape and has those blocks."""
        if block_bytes != self.block_bytes:
            raise failure("LLM_PARAM_INVALID", f"blocks of {block_bytes} bytes here, {self.block_bytes} there")
        if not len(blocks) or blocks.min() < 0 or blocks.max() >= self.num_blocks:
            raise failure("LLM_PARAM_INVALID", f"a block index is out of range 0..{self.num_blocks - 1}")
        raw = (ctypes.c_uint8 * (self.num_blocks * block_bytes)).from_address(self.address)
        whole: Bytes = np.ctypeslib.as_array(raw).reshape(self.num_blocks, block_bytes)
        return whole


def failure(status: str, text: str) -> LLMException:
    return LLMException(LLMStatusCode[status], text)


@dataclass(slots=True, eq=False)
class Peer:
    """A linked cluster. `ask` is the connection for our requests."""

    nonce: bytes
    serve: socket.socket | None = None
    ask: socket.socket | None = None
    server: threading.Thread | None = None
    broken: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        self.broken = True
        for one in (self.ask, self.serve):
            if one is not None:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        if self.server is not None and self.server is not threading.current_thread():
            self.server.join(_JOIN_S)


class Wire:
    """All links of one end. Thread-safe."""

    def __init__(self, cluster_id: int, timeout_s: float) -> None:
        self._cluster_id = cluster_id
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._memory_lock = threading.Lock()
        self._memory: dict[int, Served] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    @property
    def num_links(self) -> int:
        with self._lock:
            return len(self._peers)

    @property
    def num_registered(self) -> int:
        return len(self._memory)

    def has_registered(self, address: int) -> bool:
        with self._memory_lock:
            return any(served.address == address for served in self._memory.values())

    def register(self, model_id: int, served: Served) -> None:
        with self._memory_lock:
            self._memory[model_id] = served

    def unregister(self, model_id: int) -> None:
        """Nothing of it is being served afterwards."""
        with self._memory_lock:
            self._memory.pop(model_id, None)

    def listen(self, host: str, port: int) -> None:
        self.stop_listening()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise failure("LLM_FAILED", f"cannot listen at {host}:{port}: {error}") from error
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="standin-accept", daemon=True)
        self._acceptor.start()

    def stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and self._acceptor is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            self._acceptor.join(_JOIN_S)

    def close(self) -> None:
        self.stop_listening()
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()

    def dial(self, cluster_id: int, address: tuple[str, int], timeout_s: float) -> None:
        """LLM_ALREADY_LINK, LLM_LINK_FAILED or LLM_TIMEOUT."""
        with self._lock:
            if cluster_id in self._peers:
                raise failure("LLM_ALREADY_LINK", f"cluster {cluster_id} is linked")
        peer = Peer(os.urandom(16))
        try:
            peer.ask = self._greet(cluster_id, address, peer.nonce, True, timeout_s)
            peer.serve = self._greet(cluster_id, address, peer.nonce, False, timeout_s)
        except BaseException:
            peer.close()
            raise
        self._start(cluster_id, peer)

    def drop(self, cluster_id: int, tell: bool) -> bool:
        """Whether there was such a link. `tell`: the peer drops its end too."""
        with self._lock:
            peer = self._peers.get(cluster_id)
        if peer is None:
            return False
        if tell:
            with suppress(LLMException):
                self.ask(cluster_id, Request("unlink"))
        with self._lock:
            self._peers.pop(cluster_id, None)
        peer.close()
        return True

    def ask(self, cluster_id: int, request: Request, payload: bytes = b"", timeout_s: float | None = None) -> bytes:
        """One request to a linked cluster. After one that timed out the link is of no use."""
        with self._lock:
            peer = self._peers.get(cluster_id)
        if peer is None or peer.ask is None:
            raise failure("LLM_NOT_YET_LINK", f"cluster {cluster_id} is not linked")
        with peer.asking:
            if peer.broken:
                raise failure("LLM_LINK_FAILED", f"the link with cluster {cluster_id} broke before")
            try:
                peer.ask.settimeout(timeout_s or self._timeout_s)
                send(peer.ask, request, payload)
                header, data = receive(peer.ask)
            except (OSError, EOFError) as error:
                peer.broken = True
                status = "LLM_TIMEOUT" if isinstance(error, TimeoutError) else "LLM_LINK_FAILED"
                raise failure(status, f"the link with cluster {cluster_id} broke: {error!r}") from error
        return checked(header, data)

    def local_view(self, model_id: int, blocks: Blocks, block_bytes: int) -> Bytes:
        with self._memory_lock:
            served = self._memory.get(model_id)
        if served is None:
            raise failure("LLM_PARAM_INVALID", "the cache is not registered (any more)")
        return served.view(blocks, block_bytes)

    def _greet(
        self, cluster_id: int, address: tuple[str, int], nonce: bytes, asks: bool, timeout_s: float
    ) -> socket.socket:
        try:
            made = socket.create_connection(address, timeout_s)
        except OSError as error:
            status = "LLM_TIMEOUT" if isinstance(error, TimeoutError) else "LLM_LINK_FAILED"
            raise failure(status, f"{address}: {error}") from error
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.settimeout(timeout_s)
            send(made, Hello(self._cluster_id, cluster_id, nonce, asks))
            checked(*receive(made))
            made.settimeout(None)
        except BaseException as error:
            made.close()
            if isinstance(error, (OSError, EOFError)):
                status = "LLM_TIMEOUT" if isinstance(error, TimeoutError) else "LLM_LINK_FAILED"
                raise failure(status, f"{address}: {error!r}") from error
            raise
        return made

    def _start(self, cluster_id: int, peer: Peer) -> None:
        with self._lock:
            older, self._peers[cluster_id] = self._peers.get(cluster_id), peer
        if older is not None:
            older.close()
        peer.server = threading.Thread(target=self._serve, args=(cluster_id, peer), name="standin-serve", daemon=True)
        peer.server.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except OSError:
                return
            try:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                made.settimeout(_HANDSHAKE_S)
                header, _ = receive(made)
                self._welcome(made, msgspec.msgpack.decode(header, type=Hello))
                made.settimeout(None)
            except (OSError, EOFError, msgspec.MsgspecError):
                made.close()

    def _welcome(self, made: socket.socket, hello: Hello) -> None:
        """A new link replaces one with the same cluster, which can only be a dead one."""
        if hello.expected_id != self._cluster_id:
            send(made, Answer("LLM_LINK_FAILED", f"this is not cluster {hello.expected_id}"))
            made.close()
        elif hello.asks:
            self._start(hello.cluster_id, Peer(hello.nonce, serve=made))
            send(made, Answer("LLM_SUCCESS"))
        else:
            self._join(made, hello)

    def _join(self, made: socket.socket, hello: Hello) -> None:
        """The second connection of a link, for our requests: the first may go out as soon as `ask` is set."""
        with self._lock:
            peer = self._peers.get(hello.cluster_id)
            if peer is None or peer.nonce != hello.nonce:
                raise EOFError
            send(made, Answer("LLM_SUCCESS"))
            peer.ask = made

    def _serve(self, cluster_id: int, peer: Peer) -> None:
        served = peer.serve
        while served is not None:
            try:
                header, payload = receive(served)
                request = msgspec.msgpack.decode(header, type=Request)
                with self._carried_out(request, payload) as (answer, data):
                    send(served, answer, data)
            except (OSError, EOFError, msgspec.MsgspecError):
                peer.broken = True
                return
            if request.kind == "unlink":
                with self._lock:
                    if self._peers.get(cluster_id) is peer:
                        del self._peers[cluster_id]
                peer.close()
                return

    @contextmanager
    def _carried_out(self, request: Request, payload: bytes) -> Iterator[tuple[Answer, bytes]]:
        try:
            yield Answer("LLM_SUCCESS"), self._carry_out(request, payload)
        except LLMException as error:
            yield Answer(error.status_code.name, str(error)), b""

    def _carry_out(self, request: Request, payload: bytes) -> bytes:
        if request.kind not in ("pull", "push"):
            return b""
        blocks = np.frombuffer(request.blocks, dtype=np.int64)
        with self._memory_lock:
            served = self._memory.get(request.model_id)
            if served is None or not served.accessible:
                raise failure("LLM_KV_CACHE_NOT_EXIST", f"no cache with model_id {request.model_id}")
            view = served.view(blocks, request.block_bytes)
            if request.kind == "pull":
                return bytes(view[blocks].tobytes())
            view[blocks] = np.frombuffer(payload, dtype=np.uint8).reshape(len(blocks), request.block_bytes)
            return b""


def send(to: socket.socket, header: msgspec.Struct, payload: bytes = b"") -> None:
    encoded = msgspec.msgpack.encode(header)
    to.sendall(_SIZES.pack(len(encoded), len(payload)) + encoded)
    if payload:
        to.sendall(payload)


def receive(of: socket.socket) -> tuple[bytes, bytes]:
    header_bytes, payload_bytes = _SIZES.unpack(_exactly(of, _SIZES.size))
    if header_bytes > _MAX_HEADER or payload_bytes > _MAX_PAYLOAD:
        raise EOFError
    return _exactly(of, header_bytes), _exactly(of, payload_bytes)


def checked(header: bytes, payload: bytes) -> bytes:
    """The payload of an answer, or its failure."""
    answer = msgspec.msgpack.decode(header, type=Answer)
    if answer.status != "LLM_SUCCESS":
        raise failure(answer.status, answer.text)
    return payload


def _exactly(of: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = of.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(received)
