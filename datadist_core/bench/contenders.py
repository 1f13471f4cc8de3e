# SPDX-License-Identifier: Apache-2.0
"""Who is measured: our backends, and the references that say what this machine can do.

To add one, write a `Contender` and name it in `CONTENDERS`; with whom it is compared is part of that entry.
"""

from __future__ import annotations

import ctypes
import itertools
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from .._copy import native_library
from ..cache.desc import BlocksCacheKey
from ..config import HostPort
from ..errors import FeatureNotEnabled, LLMException
from .blocks import BlockLists, Int64s
from .ends import Boxes, End, Remote, SocketEnd, receive_all, send_all, view

PULL, PUSH = "pull", "push"
OPS = (PULL, PUSH)
TRANSFER_TIMEOUT_S = 60.0
_HERE, _THERE = 1, 2  # seeds of the two outboxes
_cluster_ids = itertools.count(1)


class Contender(Protocol):
    """Moves blocks. One thread uses it at a time; all errors are LLMException or OSError."""

    name: str

    def prepare(self, lists: BlockLists) -> None:
        """Make caches for blocks of this size, with content to move."""

    def clear(self, op: str) -> None:
        """Zero the memory that `op` writes to."""

    def move(self, op: str, lists: BlockLists) -> None:
        """Pull or push; returns when the bytes are in place. This is what is timed."""

    def verify(self, op: str, lists: BlockLists) -> bool:
        """Whether, since `clear`, exactly the bytes that `lists` names were written."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


@runtime_checkable
class Linking(Protocol):
    """A contender whose making of a connection can be timed."""

    def link(self) -> None: ...

    def unlink(self) -> None: ...


class _FarEnd(Protocol):
    """What is asked of the other `End`, wherever it lives."""

    def address(self) -> HostPort: ...

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None: ...

    def clear(self) -> None: ...

    def matches(self, seed: int, lists: BlockLists) -> bool: ...

    def close(self) -> None: ...


class _RemoteEnd:
    """An `End` in a process of its own."""

    def __init__(self, backend: str, cluster_id: int, cache_bytes: int) -> None:
        self._remote = Remote(End, backend, cluster_id, _THERE, cache_bytes, True)

    def address(self) -> HostPort:
        address: HostPort = self._remote.call("address")
        return address

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        self._remote.call("prepare", num_cache_blocks, block_bytes)

    def clear(self) -> None:
        self._remote.call("clear")

    def matches(self, seed: int, lists: BlockLists) -> bool:
        return bool(self._remote.call("matches", seed, lists))

    def close(self) -> None:
        self._remote.close()


class BackendContender:
    """`pull_blocks` and `push_blocks` over one of our backends, with the peer in another process or in this one."""

    def __init__(self, backend: str, cache_bytes: int, in_process: bool = False) -> None:
        self.name = backend
        here_id, self._peer_id = next(_cluster_ids), next(_cluster_ids)
        with ExitStack() as undo:
            self._here = End(backend, here_id, _HERE, cache_bytes)
            undo.callback(self._here.close)
            self._there: _FarEnd = (
                End(backend, self._peer_id, _THERE, cache_bytes, listen=True)
                if in_process
                else _RemoteEnd(backend, self._peer_id, cache_bytes)
            )
            undo.callback(self._there.close)
            self._address = self._there.address()
            self.link()
            undo.callback(self._part)
            self._undo = undo.pop_all()

    def link(self) -> None:
        self._here.link(self._peer_id, self._address)

    def unlink(self) -> None:
        self._here.unlink(self._peer_id, self._address)

    def prepare(self, lists: BlockLists) -> None:
        self._here.prepare(lists.num_cache_blocks, lists.block_bytes)
        self._there.prepare(lists.num_cache_blocks, lists.block_bytes)

    def clear(self, op: str) -> None:
        (self._here if op == PULL else self._there).clear()

    def move(self, op: str, lists: BlockLists) -> None:
        manager = self._here.dist.cache_manager
        # The signatures want sequences of int; arrays are what callers with long lists hand over.
        src, dst = lists.src, lists.dst
        if op == PULL:
            key = BlocksCacheKey(self._peer_id, End.OUTBOX)
            manager.pull_blocks(key, self._here.inbox, src, dst, deadline_s=TRANSFER_TIMEOUT_S)  # type: ignore[arg-type]
        else:
            key = BlocksCacheKey(self._peer_id, End.INBOX)
            manager.push_blocks(key, self._here.outbox, src, dst, deadline_s=TRANSFER_TIMEOUT_S)  # type: ignore[arg-type]

    def verify(self, op: str, lists: BlockLists) -> bool:
        return self._here.matches(_THERE, lists) if op == PULL else self._there.matches(_HERE, lists)

    def close(self) -> None:
        self._undo.close()

    def _part(self) -> None:
        """So that neither end reports the other as lost; a link that is down already has been reported."""
        with suppress(LLMException):
            self.unlink()


class CopyReference:
    """One thread of C copies block by block within this process, in memory of the same kind as the backends'.

    Args:
        streaming: with the best streaming stores this processor has; else with plain memcpy.
    """

    def __init__(self, name: str, cache_bytes: int, streaming: bool) -> None:
        self.name = name
        self._copy = _copy_variant(streaming)
        self._end = End("loopback", next(_cluster_ids), _HERE, cache_bytes)

    def prepare(self, lists: BlockLists) -> None:
        self._end.prepare(lists.num_cache_blocks, lists.block_bytes)

    def clear(self, op: str) -> None:
        self._end.clear()

    def move(self, op: str, lists: BlockLists) -> None:
        src = view(self._end.outbox).ctypes.data + lists.src * lists.block_bytes
        dst = view(self._end.inbox).ctypes.data + lists.dst * lists.block_bytes
        self._copy(dst, src, np.full(lists.num_blocks, lists.block_bytes))

    def verify(self, op: str, lists: BlockLists) -> bool:
        return self._end.matches(_HERE, lists)

    def close(self) -> None:
        self._end.close()


class SocketReference:
    """As many bytes, but from one contiguous buffer to another, over a bare TCP connection to another process."""

    def __init__(self, name: str, cache_bytes: int) -> None:
        self.name = name
        self._boxes = Boxes(_HERE, cache_bytes)
        with ExitStack() as undo:
            self._remote = Remote(SocketEnd, _THERE, cache_bytes)
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

    def move(self, op: str, lists: BlockLists) -> None:
        num_bytes = lists.num_bytes
        if op == PULL:
            self._connection.sendall(SocketEnd.request(SocketEnd.PULL, num_bytes))
            receive_all(self._connection, self._boxes.inbox.data[:num_bytes])
        else:
            self._connection.sendall(SocketEnd.request(SocketEnd.PUSH, num_bytes))
            send_all(self._connection, self._boxes.outbox.data[:num_bytes])
            receive_all(self._connection, memoryview(bytearray(len(SocketEnd.PUSHED))))

    def verify(self, op: str, lists: BlockLists) -> bool:
        if op == PULL:
            return self._boxes.matches(_THERE, lists.num_bytes)
        return bool(self._remote.call("matches", _HERE, lists.num_bytes))

    def close(self) -> None:
        self._undo.close()


def _connect(address: HostPort) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=TRANSFER_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Let the kernel watch the time: with a timeout of its own, Python would poll before every call.
    connection.settimeout(None)
    limit = struct.pack("ll", int(TRANSFER_TIMEOUT_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    return connection


def _copy_variant(streaming: bool) -> Callable[[Int64s, Int64s, Int64s], None]:
    library = native_library()
    if library is None:
        raise FeatureNotEnabled("the references need the compiled copy kernel; the log says how to build it")
    function = library.datadist_scatter_copy_variant
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    # Numbered from memcpy to the widest stores; -1 is the answer to one that this processor lacks.
    variants = [number for number in range(4) if function(number, None, None, None, 0) == 0]
    variant = variants[-1] if streaming else variants[0]

    def copy(dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        function(variant, dst.ctypes.data, src.ctypes.data, num_bytes.ctypes.data, len(dst))

    return copy


@dataclass(frozen=True, slots=True)
class Entry:
    """How to make a contender, given the bytes of its largest cache; the first of `references` is its yardstick."""

    make: Callable[[int], Contender]
    references: tuple[str, ...] = ()


CONTENDERS: dict[str, Entry] = {
    "shm": Entry(lambda size: BackendContender("shm", size), ("stream", "memcpy")),
    "tcp": Entry(lambda size: BackendContender("tcp", size), ("socket",)),
    "loopback": Entry(lambda size: BackendContender("loopback", size, in_process=True), ("stream", "memcpy")),
}
REFERENCES: dict[str, Entry] = {
    "memcpy": Entry(lambda size: CopyReference("memcpy", size, streaming=False)),
    "stream": Entry(lambda size: CopyReference("stream", size, streaming=True)),
    "socket": Entry(lambda size: SocketReference("socket", size)),
}


def with_references(names: Sequence[str]) -> list[str]:
    """`names` of contenders, then the references that they are compared with."""
    needed = {reference for name in names for reference in CONTENDERS[name].references}
    return [*names, *(name for name in REFERENCES if name in needed)]


def yardstick(name: str) -> str | None:
    """The reference that this contender's ratio is with; None for a reference."""
    return CONTENDERS[name].references[0] if name in CONTENDERS else None


def make_contender(name: str, cache_bytes: int) -> Contender:
    return (CONTENDERS.get(name) or REFERENCES[name]).make(cache_bytes)
