# SPDX-License-Identifier: Apache-2.0
"""The references, which say what this machine can do: copies within one process, and a bare socket.

Where the copy kernel is not compiled there is no `stream`, and `memcpy` is called from Python for each block: what a
Python program could do at best by itself.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from .._copy import native_library
from ..checks import HostPort
from ..errors import FeatureNotEnabled
from ..testing.remote import RemoteObject
from .blocks import BlockLists, Int64s
from .contract import HERE, PULL, THERE, TRANSFER_TIMEOUT_S, time_each
from .ends import ANSWER_TIMEOUT_S, End, view
from .plain_ends import Boxes, SocketEnd, receive_all, send_all

_VARIANTS = ("memcpy", "SSE2 streaming stores", "AVX2 streaming stores", "AVX-512 streaming stores")
_end_ids = itertools.count(1)

_Copy = Callable[[Int64s, Int64s, Int64s], None]


class CopyReference:
    """One thread copies block by block within this process, in memory of the same kind as the backends'.

    Only the copy is timed, not the making of its lists of addresses.

    Args:
        streaming: with the best streaming stores this processor has; else with plain memcpy.
    """

    def __init__(self, name: str, cache_bytes: int, streaming: bool) -> None:
        self.name = name
        self._copy = _streaming_copy() if streaming else _plain_copy()
        self._end = End("loopback", next(_end_ids), HERE, cache_bytes)

    def prepare(self, lists: BlockLists) -> None:
        self._end.prepare(lists.num_cache_blocks, lists.block_bytes)

    def clear(self, op: str) -> None:
        self._end.clear()

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        return time_each([self._ready(lists) for lists in moves], repeats)

    def verify(self, op: str, lists: BlockLists) -> bool:
        return self._end.matches(HERE, lists)

    def close(self) -> None:
        self._end.close()

    def _ready(self, lists: BlockLists) -> Callable[[], None]:
        src = view(self._end.outbox).ctypes.data + lists.src * lists.block_bytes
        dst = view(self._end.inbox).ctypes.data + lists.dst * lists.block_bytes
        return functools.partial(self._copy, dst, src, np.full(lists.num_blocks, lists.block_bytes))


class SocketReference:
    """As many bytes, but from one contiguous buffer to another, over a bare TCP connection to another process."""

    def __init__(self, name: str, cache_bytes: int) -> None:
        self.name = name
        self._boxes = Boxes(HERE, cache_bytes)
        with ExitStack() as undo:
            self._remote = RemoteObject(SocketEnd, (THERE, cache_bytes), ANSWER_TIMEOUT_S)
            undo.callback(self._remote.close)
            address: HostPort = self._remote.call("address")
            self._connection = undo.enter_context(_connect(address))
            self._undo = undo.pop_all()

    def prepare(self, lists: BlockLists) -> None:
        """The buffers are filled for good: they have no blocks."""

    def clear(self, op: str) -> None:
        if op == PULL:
            self._boxes.clear()
        else:
            self._remote.call("clear")

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        move = self._pull if op == PULL else self._push
        return time_each([functools.partial(move, lists.num_bytes) for lists in moves], repeats)

    def verify(self, op: str, lists: BlockLists) -> bool:
        if op == PULL:
            return self._boxes.matches(THERE, lists.num_bytes)
        return bool(self._remote.call("matches", HERE, lists.num_bytes))

    def close(self) -> None:
        self._undo.close()

    def _pull(self, num_bytes: int) -> None:
        self._connection.sendall(SocketEnd.request(SocketEnd.PULL, num_bytes))
        receive_all(self._connection, self._boxes.inbox.data[:num_bytes])

    def _push(self, num_bytes: int) -> None:
        self._connection.sendall(SocketEnd.request(SocketEnd.PUSH, num_bytes))
        send_all(self._connection, self._boxes.outbox.data[:num_bytes])
        receive_all(self._connection, memoryview(bytearray(len(SocketEnd.PUSHED))))


def copy_kernel() -> str:
    """What copies in this process, in words."""
    variants = _variants()
    if not variants:
        return "Python path, no compiled kernel; the log says how to build it"
    return f"native, {_VARIANTS[variants[-1]]}"


def kernel_is_native() -> bool:
    return bool(_variants())


def _connect(address: HostPort) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=TRANSFER_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Let the kernel watch the time: with a timeout of its own, Python would poll before every call.
    connection.settimeout(None)
    limit = struct.pack("ll", int(TRANSFER_TIMEOUT_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    return connection


def _streaming_copy() -> _Copy:
    variants = _variants()
    if not variants:
        raise FeatureNotEnabled("needs the compiled copy kernel; the log says how to build it")
    return functools.partial(_native_copy, variants[-1])


def _plain_copy() -> _Copy:
    return functools.partial(_native_copy, 0) if _variants() else _memmove_each


def _variants() -> list[int]:
    """Numbered from memcpy to the widest stores; -1 is the answer to one that this processor lacks."""
    library = native_library()
    if library is None:
        return []
    function = library.datadist_scatter_copy_variant
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return [number for number in range(len(_VARIANTS)) if function(number, None, None, None, 0) == 0]


def _native_copy(variant: int, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
    library = native_library()
    if library is not None:
        pointers = (dst.ctypes.data, src.ctypes.data, num_bytes.ctypes.data)
        library.datadist_scatter_copy_variant(variant, *pointers, len(dst))


def _memmove_each(dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
    for to, source, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
        ctypes.memmove(to, source, size)
