# SPDX-License-Identifier: Apache-2.0
"""The ends of the transfers: each holds memory, and the far one usually lives in a process of its own.

Every end has an outbox, filled once, that transfers read, and an inbox that they write. Which of its two ends a
transfer is started from is the contender's business.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.cache import Cache
from ..cache.desc import BlocksCacheKey, CacheDesc
from ..cluster import LLMClusterInfo
from ..config import HostPort, LLMConfig
from ..datadist import LLMDataDist
from ..errors import LLMException, PeerLost, TimedOut
from ..types import DataType, LLMRole, LLMStatusCode, Placement
from .blocks import WORD_BYTES, BlockLists, Blocks, fill, matches

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 120.0
LINK_TIMEOUT_MS = 30_000
_SLACK_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


class End:
    """An LLMDataDist with an inbox and an outbox.

    Args:
        seed: of the outbox's content.
        cache_bytes: of the largest inbox that will be asked for.
    """

    OUTBOX, INBOX = 0, 1  # model ids, by which the other end names the caches

    def __init__(self, backend: str, cluster_id: int, seed: int, cache_bytes: int, listen: bool = False) -> None:
        self.seed = seed
        self.dist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.dist.init(_config(backend, 2 * cache_bytes + _SLACK_BYTES, listen))
        self._caches: list[Cache] = []

    @property
    def outbox(self) -> Cache:
        return self._caches[self.OUTBOX]

    @property
    def inbox(self) -> Cache:
        return self._caches[self.INBOX]

    def address(self) -> HostPort:
        address = self.dist.listen_address
        if address is None:
            raise LLMException("this end does not listen")
        return address

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        """Make both boxes anew, for blocks of this size."""
        manager = self.dist.cache_manager
        while self._caches:
            manager.deallocate_blocks_cache(self._caches.pop())
        desc = CacheDesc(1, (num_cache_blocks, block_bytes), DataType.DT_UINT8, Placement.HOST)
        for model_id in (self.OUTBOX, self.INBOX):
            key = BlocksCacheKey(self.dist.cluster_id, model_id)
            self._caches.append(manager.allocate_blocks_cache(desc, key))
        fill(view(self.outbox), self.seed)
        self.clear()

    def clear(self) -> None:
        view(self.inbox)[:] = 0

    def matches(self, seed: int, lists: BlockLists) -> bool:
        """Whether the inbox holds what `lists` takes out of the outbox of `seed`, and nothing else."""
        return matches(view(self.inbox), seed, lists)

    def link(self, cluster_id: int, address: HostPort) -> None:
        """Raises LLMException with the reason if the link cannot be made."""
        overall, _ = self.dist.link_clusters([_info(cluster_id, address)], timeout=LINK_TIMEOUT_MS)
        if overall is not LLMStatusCode.LLM_SUCCESS:
            raise self.dist.link_failure(cluster_id) or LLMException(f"cannot link: {overall.name}", overall)

    def unlink(self, cluster_id: int, address: HostPort) -> None:
        overall, _ = self.dist.unlink_clusters([_info(cluster_id, address)], timeout=LINK_TIMEOUT_MS)
        if overall is not LLMStatusCode.LLM_SUCCESS:
            raise LLMException(f"cannot unlink: {overall.name}", overall)

    def close(self) -> None:
        self.dist.finalize()


def view(cache: Cache) -> Blocks:
    """The blocks of a cache, one row each."""
    return cache.numpy()[0]


def _config(backend: str, pool_bytes: int, listen: bool) -> LLMConfig:
    config = LLMConfig()
    config.transfer_backend = backend
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = f'{{"memory_size": {pool_bytes}}}'
    if listen:
        config.listen_ip_info = f"{HOST}:0"
    return config


def _info(cluster_id: int, address: HostPort) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_remote_ip_info(address.host, address.port)
    return info


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


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    error: str = ""


class Remote:
    """An object in a spawned process: `Remote(End, "shm", ...).call("prepare", ...)`. One call at a time.

    The process ends when the pipe does, so it cannot outlive this one.
    """

    def __init__(self, factory: Callable[..., object], *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_host, args=(theirs, factory, args), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer("start")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """What the method returns. LLMException with its text if it raises; PeerLost, TimedOut."""
        self._pipe.send(_Call(method, args))
        return self._answer(method)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join(5)

    def _answer(self, method: str) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimedOut(f"{method}: the other process did not answer within {ANSWER_TIMEOUT_S} s")
        try:
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerLost(f"{method}: the other process died") from error
        if reply.error:
            raise LLMException(f"{method} in the other process: {reply.error}")
        return reply.value


def _host(pipe: Connection, factory: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Main function of the other process."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        try:
            hosted = factory(*args)
        except Exception as error:
            pipe.send(_Reply(error=repr(error)))
            return
        pipe.send(_Reply())
        while True:
            pipe.send(_execute(hosted, pipe.recv()))
    os._exit(0)  # whoever measured has gone, and may have left threads of ours waiting for it


def _execute(hosted: object, call: _Call) -> _Reply:
    try:
        return _Reply(getattr(hosted, call.method)(*call.args))
    except Exception as error:
        return _Reply(error=repr(error))
