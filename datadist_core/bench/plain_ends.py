# SPDX-License-Identifier: Apache-2.0
"""Ends that know nothing of our library: plain memory, and a bare TCP connection to send it over."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import numpy.typing as npt

from ..checks import HostPort
from .blocks import WORD_BYTES, BlockLists, Blocks, fill, matches

HOST = "127.0.0.1"

Bytes = npt.NDArray[np.uint8]


class SocketEnd:
    """Sends its outbox and receives into its inbox over a plain TCP connection, as it is told on that connection.

    A request is `PULL` or `PUSH` and a number of bytes. A push is answered with `PUSHED` when all of it is there.
    """

    PULL, PUSH, PUSHED = b"<", b">", b"."
    REQUEST_BYTES = 9

    def __init__(self, seed: int, buffer_bytes: int) -> None:
        self._boxes = Boxes(seed, buffer_bytes)
        self._listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._serve, name="datadist-bench-socket", daemon=True).start()

    @classmethod
    def request(cls, what: bytes, num_bytes: int) -> bytes:
        return what + num_bytes.to_bytes(cls.REQUEST_BYTES - 1, "big")

    def address(self) -> HostPort:
        return HostPort(HOST, self._listener.getsockname()[1])

    def clear(self) -> None:
        self._boxes.clear()

    def matches(self, seed: int, num_bytes: int) -> bool:
        return self._boxes.matches(seed, num_bytes)

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, contextlib.suppress(EOFError, ConnectionError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = bytearray(self.REQUEST_BYTES)
            while True:
                receive_all(connection, memoryview(request))
                self._answer(connection, bytes(request))

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        num_bytes = int.from_bytes(request[1:], "big")
        if request[:1] == self.PULL:
            send_all(connection, self._boxes.outbox.data[:num_bytes])
        else:
            receive_all(connection, self._boxes.inbox.data[:num_bytes])
            connection.sendall(self.PUSHED)


class Boxes:
    """A plain contiguous outbox and inbox."""

    def __init__(self, seed: int, num_bytes: int) -> None:
        self.outbox = np.empty(num_bytes, dtype=np.uint8)
        self.inbox = np.zeros(num_bytes, dtype=np.uint8)
        fill(self._rows(self.outbox), seed)

    def clear(self) -> None:
        self.inbox[:] = 0

    def matches(self, seed: int, num_bytes: int) -> bool:
        """Whether the inbox holds the first bytes of the outbox of `seed`, and nothing else."""
        rows = self._rows(self.inbox)
        moved = np.arange(num_bytes // rows.shape[1])
        return matches(rows, seed, BlockLists(rows.shape[1], len(rows), moved, moved))

    @staticmethod
    def _rows(box: Bytes) -> Blocks:
        return box.reshape(-1, WORD_BYTES)


def send_all(connection: socket.socket, data: memoryview) -> None:
    while data:
        data = data[connection.sendmsg([data]) :]


def receive_all(connection: socket.socket, data: memoryview) -> None:
    while data:
        received = connection.recv_into(data)
        if not received:
            raise EOFError("the other end closed the connection")
        data = data[received:]
