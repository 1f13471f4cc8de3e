# SPDX-License-Identifier: Apache-2.0
"""The nixl backend: NIXL moves the bytes, between hosts over RDMA where there is RDMA, one-sided where the network is.

Read the modules in this order: `_nixl_agent` (what NIXL guarantees and what it does not), `_nixl_link` (what peers
tell each other), `_nixl_lists` (a batch as NIXL wants it), `_nixl_transfer`, `_nixl_mover`, then `_nixl_runtime`,
which holds all of it. `_nixl_options` has the settings.

Whoever is linked can read and write all registered memory: NIXL's owner takes no part and checks nothing. Links are
made between ends that trust each other with their KV memory. What is checked here are the ranges of our own batches.

Where there is no RDMA between hosts, UCX takes TCP, and then a reader that is killed in mid-transfer can take the
process that it reads from with it: UCX calls `abort`, and no setting of it prevents that (`_nixl_agent` has what was
tried). Prefer our `tcp` there, which has nothing of the kind. Within one host nothing like that was seen.

RDMA, as NIXL and UCX document it, NEVER RUN BY US: network cards that this process may open (/dev/infiniband in a
container), an unlimited `ulimit -l` for registered memory, and nothing to be installed, since NIXL's wheel brings its
user-space libraries. UCX then chooses by itself; UCX_NET_DEVICES=mlx5_0:1 picks a card, which is needed where many of
them make the address too large to be sent, UCX_TLS the transports. Memory is registered twice, with the serving agent
and with the moving one.

GPUs: this backend registers host memory only, with or without a GPU in the machine; device memory has to be copied to
the host first (`swap_blocks`). NIXL's builds for CUDA 12 and 13 run without CUDA for this. With a CUDA build of torch,
`nixl` chooses the build of the same CUDA version; else the newest is taken.

nixl is imported by `open`, not before.
"""

from __future__ import annotations

import threading

from ..errors import ClosedError, ParamInvalid
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch
from ..types import Deadline
from ._nixl_link import decode_descriptor, decode_identity
from ._nixl_runtime import Runtime


class NixlBackend(Backend):
    """Moves host memory with NIXL.

    Options (`BackendContext.options`): plugin, num_threads, ucx, params; see `_nixl_options.NixlOptions`.
    """

    name = "nixl"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Runtime | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=True, inline=False)

    def open(self, context: BackendContext) -> None:
        with self._lock:
            if self._running is not None:
                raise ParamInvalid("the nixl backend is open already")
            self._running = Runtime(context)

    def close(self) -> None:
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def identity(self) -> bytes:
        return self._opened().identity

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        running = self._opened()
        peer = decode_identity(identity, running.plugin)
        running.connect(peer_id, peer, link_token, deadline, initiator=initiator)

    def disconnect(self, peer_id: int) -> None:
        running = self._running
        if running is not None:
            running.disconnect(peer_id)

    def register(self, region: Region) -> bytes | None:
        return self._opened().register(region)

    def unregister(self, region_id: int) -> None:
        running = self._running
        if running is not None:
            running.unregister(region_id)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        described = decode_descriptor(region_id, size_bytes, descriptor)
        self._opened().attach(peer_id, region_id, described, deadline)

    def detach(self, peer_id: int, region_id: int) -> None:
        running = self._running
        if running is not None:
            running.detach(peer_id, region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        self._opened().submit(batch_id, batch, done)

    def cancel(self, batch_id: int) -> None:
        running = self._running
        if running is not None:
            running.cancel(batch_id)

    def _opened(self) -> Runtime:
        running = self._running
        if running is None or running.closed:
            raise ClosedError("the nixl backend is not open")
        return running
