# SPDX-License-Identifier: Apache-2.0
"""Peers of another version, and those that speak something else: refused at once, and nothing they send is run.

B37: neither end waits for one that it cannot understand. B39: there is no byte string that either port would make an
object of; a shared secret is tested in test_security.py.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from datadist_core import LLMDataDist
from datadist_core.backends import _tcp_accept
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.tests.core_ends import filled_cache, linked, make_end, manager, must_link, remote_info
from datadist_core.wire import gate
from datadist_core.wire.codec import MAGIC, PREAMBLE
from datadist_core.wire.messages import PROTOCOL_VERSION

SOON_S, LATER_S = 30.0, 200.0
"""Long before the time for which the calls here, and whoever is called, would wait for more."""


def _preamble(version: int) -> bytes:
    return MAGIC + struct.pack("<H", version)


FOREIGN = {
    "version + 1": _preamble(PROTOCOL_VERSION + 1),
    "version - 1": _preamble(PROTOCOL_VERSION - 1),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "random bytes": bytes((byte % 251 + 1) for byte in os.urandom(4096)),
    "right version, then random bytes": PREAMBLE + struct.pack("<I", 64) + os.urandom(64),
    "right version, then a length beyond all limits": PREAMBLE + b"\xff\xff\xff\xff",
}
NAMED = {
    "version + 1": rf"protocol version {PROTOCOL_VERSION + 1} at the peer, {PROTOCOL_VERSION} here",
    "version - 1": rf"protocol version {PROTOCOL_VERSION - 1} at the peer, {PROTOCOL_VERSION} here",
    "another protocol": "does not speak the datadist control protocol",
    "random bytes": "does not speak the datadist control protocol",
    "right version, then random bytes": "malformed control message",
    "right version, then a length beyond all limits": "limit is",
}


@contextmanager
def impostor(says: bytes) -> Iterator[int]:
    """Listens, says that to everyone, and then keeps the connection open. Its port."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])
                    accepted[-1].sendall(says)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(SOON_S)
    for sock in accepted:
        sock.close()


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """pytest keeps log records, and those keep errors, and those keep everything on their way."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is shown the door because it has taken too long."""
    monkeypatch.setattr(gate, "HELLO_TIMEOUT_S", LATER_S)
    monkeypatch.setattr(_tcp_accept, "HELLO_TIMEOUT_S", LATER_S)


@pytest.fixture(scope="module", autouse=True)
def everything_started_once() -> None:
    """What a process starts when it first links, and keeps, is no leak of the tests here."""
    with linked():
        pass


@pytest.mark.parametrize("kind", FOREIGN)
def test_b37_a_link_to_a_foreign_peer_fails_at_once_and_says_why(kind: str) -> None:
    with nothing_left_behind(), make_end() as end, impostor(FOREIGN[kind]) as port:
        begun_s = time.monotonic()
        overall, _ = end.link_clusters([remote_info(77, "127.0.0.1", port)], timeout=int(LATER_S * 1000))
        assert time.monotonic() - begun_s < SOON_S
        assert overall.name in ("LLM_LINK_FAILED", "LLM_SUSPECT_REMOTE_ERROR")
        assert re.search(NAMED[kind], str(end.link_failure(77)))
        assert end._open().links.links() == []


def _is_closed(sock: socket.socket) -> bool:
    """Everything that comes is read, until the peer closes."""
    sock.settimeout(SOON_S)
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize("kind", FOREIGN)
def test_b37_a_foreign_peer_that_comes_is_shown_the_door_at_once(kind: str) -> None:
    with nothing_left_behind(), make_end(listen="127.0.0.1:0") as end, make_end() as friend:
        must_link(friend, end)
        with socket.create_connection(_address(end)) as sock:
            sock.sendall(FOREIGN[kind])
            assert _is_closed(sock)
        friend.check_link_status(end.cluster_id)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


def _framed(payload: bytes) -> list[bytes]:
    """Alone, and dressed as what each port expects."""
    frame = struct.pack("<I", len(payload)) + payload
    return [payload, frame, PREAMBLE + frame, PREAMBLE + payload]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_b39_a_pickle_is_refused_and_never_loaded(tmp_path: Path, protocol: int) -> None:
    """At the control port, at the data port, and as the body of a call, an answer and a hand-off's description."""
    marker = tmp_path / "it was run"
    payload = pickle.dumps(Bomb(marker), protocol)
    pickle.loads(payload)
    assert marker.exists(), "the bomb itself is broken: this showed nothing"
    marker.unlink()
    with nothing_left_behind(), linked("tcp") as (p, d):
        for address in (_address(p), _data_address(p)):
            for data in _framed(payload):
                with socket.create_connection(address) as sock:
                    with suppress(OSError):  # it may be closed before all is sent
                        sock.sendall(data)
                        sock.shutdown(socket.SHUT_WR)
                    assert _is_closed(sock)
        p.register_service("echo", lambda _, body: body)
        assert d.call(p.cluster_id, "echo", payload, SOON_S) == payload
        cache = filled_cache(p, 1)
        d.check_link_status(p.cluster_id)
        manager(p).deallocate_blocks_cache(cache)
        del cache
    assert not marker.exists()


def _address(end: LLMDataDist) -> tuple[str, int]:
    address = end.listen_address
    assert address is not None
    return address.host, address.port


def _data_address(end: LLMDataDist) -> tuple[str, int]:
    """Of its tcp backend: the listening socket of this process that is not the control port."""
    own = {socket_.split("[")[1] for socket_ in map(os.readlink, _descriptors()) if socket_.startswith("socket:[")}
    with open("/proc/net/tcp") as lines:
        rows = [line.split() for line in lines][1:]
    ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] + "]" in own}
    others = sorted(ports - {_address(end)[1]})
    assert others, "the tcp backend does not listen"
    return "127.0.0.1", others[0]


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):
            yield path
