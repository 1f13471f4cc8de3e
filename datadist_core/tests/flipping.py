# SPDX-License-Identifier: Apache-2.0
"""Bits that change on the way: by a hook after a copy in memory, and in the packets of a TCP connection.

`flip_after_next(address)` has one bit there inverted when the next transfer of a flipping backend has ended, before
anybody hears of that. `FlippingRelay` stands between two ends of the real tcp backend.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from datadist_core import LLMDataDist
from datadist_core.backends._tcp_address import decode_identity
from datadist_core.backends.loopback import LoopbackBackend
from datadist_core.backends.shm import ShmBackend
from datadist_core.transfer.backend import DoneCallback, Prepared
from datadist_core.transfer.item_copy import ItemList
from datadist_core.transfer.plan import Batch, GridPair, Op, Slice

_pending: list[int] = []


def flip_after_next(address: int) -> None:
    _pending.append(address)


def is_pending() -> bool:
    """Whether a flip that was asked for has not happened: no transfer came by."""
    return bool(_pending)


def forget_flips() -> None:
    _pending.clear()


def flip_bit(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= 0x10


def _spoil() -> None:
    while _pending:
        flip_bit(_pending.pop())


class _SpoiledCopy(Prepared):
    def __init__(self, inner: Prepared) -> None:
        self._inner = inner

    def run(self, op: Op, local_items: ItemList, remote_items: ItemList) -> None:
        self._inner.run(op, local_items, remote_items)
        _spoil()


class FlippingLoopback(LoopbackBackend):
    name = "flipping-loopback"

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        super().submit(batch_id, batch, lambda completion: (_spoil(), done(completion))[1])


class FlippingShm(ShmBackend):
    name = "flipping-shm"

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        super().submit(batch_id, batch, lambda completion: (_spoil(), done(completion))[1])

    def prepare(self, peer_id: int, pairs: tuple[GridPair, ...], slices: tuple[Slice, ...]) -> Prepared | None:
        inner = super().prepare(peer_id, pairs, slices)
        return None if inner is None else _SpoiledCopy(inner)


RELAY_HOST = "127.0.0.2"
MARKER = bytes(range(0xA0, 0xB0))


class FlippingRelay:
    """Passes TCP connections to RELAY_HOST on to the same port of 127.0.0.1. Once `armed`, it inverts one bit of the
    first MARKER that comes by, in either direction: payload, not a header."""

    def __init__(self, port: int) -> None:
        self.armed = False
        self.num_flipped = 0
        self._port = port
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((RELAY_HOST, port))
        self._start(self._accept)

    def close(self) -> None:
        for one in [self._listener, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, target, *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, name="datadist-relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port), timeout=30)
                far.settimeout(None)
                self._sockets += [near, far]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self._spoiled(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _spoiled(self, data: bytes) -> bytes:
        at = data.find(MARKER) if self.armed else -1
        if at < 0:
            return data
        self.armed = False
        self.num_flipped += 1
        changed = bytearray(data)
        changed[at + 3] ^= 0x10
        return bytes(changed)


@contextmanager
def relay_before(prompt: LLMDataDist) -> Iterator[FlippingRelay]:
    """In front of the tcp data path of an end that was made with {"tcp": {"advertise_host": RELAY_HOST}}."""
    identity = decode_identity(prompt._open().engine.backends["tcp"].identity())
    [endpoint] = identity.endpoints
    assert endpoint.host == RELAY_HOST, msgspec.json.encode(endpoint)
    relay = FlippingRelay(endpoint.port)
    try:
        yield relay
    finally:
        relay.close()
