# SPDX-License-Identifier: Apache-2.0
"""The tcp backend: works between any two hosts, with the peer's processor taking part.

Read the modules in this order: `_tcp_frames` (the protocol), `_tcp_proof` (who may open a connection), `_tcp_memory`
(memory as a stream of bytes), `_tcp_tls` (a socket that encrypts), `_tcp_loop` (who may touch a socket),
`_tcp_rate` (a limit on what is sent), `_tcp_connection` (frames on a socket), `_tcp_requests` and `_tcp_serve` (the two
halves of a connection), `_tcp_link`, then `_tcp_address`, `_tcp_accept` and `_tcp_dial` (how a link comes about).
`_tcp_runtime` holds all of it.

Threads: whoever wants something done with a connection becomes the owner of all of them for a moment (`_tcp_loop`):
an io thread when something has come, the caller of a public method otherwise. The thread that submits a small batch
also takes in the answer itself, if that comes within a moment, so that no thread of this process has to be woken for
it; the io thread at the other end lends the memory and sends it. `connect` dials in its caller's thread.
"""

from __future__ import annotations

import threading

from ..errors import ClosedError, ParamInvalid
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch
from ..types import Deadline
from ._tcp_runtime import Runtime


class TcpBackend(Backend):
    """Moves bytes over TCP, straight from and into registered memory.

    Options (`BackendContext.options`, from `global_resource_config["tcp"]`): port, streams, advertise_host, sndbuf,
    rcvbuf, congestion, max_bytes_per_s; see `_tcp_options.TcpOptions`.
    """

    name = "tcp"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Runtime | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=False, cross_host=True, inline=False)

    def open(self, context: BackendContext) -> None:
        with self._lock:
            if self._running is not None:
                raise ParamInvalid("the tcp backend is open already")
            self._running = Runtime(context)

    def listen(self, host: str) -> None:
        self._opened().listen(host)

    def close(self) -> None:
        with self._lock:
            running = self._running
        if running is not None:
            running.close()
        with self._lock:
            self._running = None

    def identity(self) -> bytes:
        return self._opened().identity

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        running = self._opened()
        if initiator:
            running.dial(peer_id, identity, link_token, deadline)
        else:
            running.accept(peer_id, identity, link_token, deadline)

    def disconnect(self, peer_id: int) -> None:
        running = self._running
        if running is not None:
            running.disconnect(peer_id)

    def is_fenced(self, peer_id: int) -> bool:
        running = self._running
        return running is None or running.is_fenced(peer_id)

    def register(self, region: Region) -> bytes | None:
        self._opened()
        return b"" if region.for_peers else None

    def unregister(self, region_id: int) -> None:
        """Nothing to undo: what may be served is asked for each time."""

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        self._opened().link(peer_id).attached.add(region_id)

    def detach(self, peer_id: int, region_id: int) -> None:
        running = self._running
        if running is not None and peer_id in running.links:
            running.links[peer_id].attached.discard(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        self._opened().submit(batch_id, batch, done)

    def cancel(self, batch_id: int) -> None:
        running = self._running
        if running is not None:
            running.cancel(batch_id)

    def _opened(self) -> Runtime:
        running = self._running
        if running is None or running.closed:
            raise ClosedError("the tcp backend is not open")
        return running
