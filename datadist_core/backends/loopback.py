# SPDX-License-Identifier: Apache-2.0
"""The reference backend: both ends are in one process, and a transfer is a copy.

Read it to see what a backend has to do; everything else in other backends is about getting at the peer's memory.

A peer is another `LoopbackBackend` of this process, found by the number in its identity. A link is up while both
ends hold the same token, so either end can take it down, and the other notices at its next batch. The peer's
grids are read through its own `serve_grid`, which checks what we name and keeps the memory in place meanwhile.

One condition guards the links of all loopback backends: a link involves two of them, and with a lock each, two
backends that connect to each other would wait for one another.
"""

from __future__ import annotations

import itertools
import struct
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ..errors import ClosedError, NotYetLinked, ParamInvalid, PeerLost, ProtocolError, TimedOut, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.item_copy import ItemCopy
from ..transfer.plan import Batch, GridPair
from ..types import Deadline
from ._inline import InlineBatches, OpenBatch

_TAG = b"loopback1:"
_NUMBER = struct.Struct("!Q")

_links_changed = threading.Condition()
_open_backends: dict[int, LoopbackBackend] = {}
_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class _Link:
    peer: LoopbackBackend
    token: bytes
    attached: set[int] = field(default_factory=set)


class LoopbackBackend(Backend):
    """Moves bytes between two owners in the same process."""

    name = "loopback"

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._context: BackendContext | None = None
        self._regions: dict[int, Region] = {}
        self._links: dict[int, _Link] = {}
        self._batches = InlineBatches()

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=False, inline=True)

    def open(self, context: BackendContext) -> None:
        with _links_changed:
            self._context = context
            _open_backends[self._number] = self

    def close(self) -> None:
        with _links_changed:
            self._context = None
            self._links.clear()
            _open_backends.pop(self._number, None)
            _links_changed.notify_all()
        self._batches.end(ClosedError("the loopback backend was closed"))
        self._regions.clear()

    def identity(self) -> bytes:
        return _TAG + _NUMBER.pack(self._number) + self._opened().process_token

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        peer = self._find(identity)
        with _links_changed:
            self._opened()  # since it was closed it would not be taken out again
            link = self._links[peer_id] = _Link(peer, link_token)
            _links_changed.notify_all()
            _links_changed.wait_for(lambda: peer._holds(link_token) or not self._has(peer_id, link), deadline.timeout())
            self._opened()
            if not self._has(peer_id, link):
                raise Unreachable(f"peer {peer_id} was disconnected while it was being connected")
            if not peer._holds(link_token):
                del self._links[peer_id]
                raise TimedOut("the other end of the loopback link did not connect in time")

    def disconnect(self, peer_id: int) -> None:
        with _links_changed:
            self._links.pop(peer_id, None)
            _links_changed.notify_all()
        self._batches.end(PeerLost(f"the link to peer {peer_id} was taken down"), peer_id)

    def register(self, region: Region) -> bytes | None:
        self._regions[region.region_id] = region
        return _TAG if region.for_peers else None

    def unregister(self, region_id: int) -> None:
        self._regions.pop(region_id, None)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        link = self._link(peer_id)
        region = link.peer._regions.get(region_id)
        if region is None or region.size_bytes != size_bytes:
            raise Unreachable(f"peer {peer_id} has no region {region_id} of {size_bytes} bytes")
        link.attached.add(region_id)

    def detach(self, peer_id: int, region_id: int) -> None:
        with _links_changed:
            if peer_id in self._links:
                self._links[peer_id].attached.discard(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        context, link = self._opened(), self._link(batch.peer_id)
        peer_context = link.peer._context
        if peer_context is None:
            raise PeerLost(f"peer {batch.peer_id} has closed its backend")
        for pair in batch.pairs:
            if pair.remote.region_id not in link.attached:
                raise ParamInvalid(f"region {pair.remote.region_id} of peer {batch.peer_id} is not attached")
        self._batches.run(batch_id, batch, done, lambda running: _move(running, batch, context, peer_context))

    def cancel(self, batch_id: int) -> None:
        self._batches.cancel(batch_id)

    def _opened(self) -> BackendContext:
        if self._context is None:
            raise ClosedError("the loopback backend is not open")
        return self._context

    def _find(self, identity: bytes) -> LoopbackBackend:
        """The backend that made `identity`."""
        if not identity.startswith(_TAG) or len(identity) < len(_TAG) + _NUMBER.size:
            raise ProtocolError("this is not the identity of a loopback backend")
        rest = identity[len(_TAG) :]
        if rest[_NUMBER.size :] != self._opened().process_token:
            raise Unreachable("the peer is in another process")
        with _links_changed:
            peer = _open_backends.get(_NUMBER.unpack(rest[: _NUMBER.size])[0])
        if peer is None:
            raise Unreachable("the peer has closed its loopback backend")
        return peer

    def _has(self, peer_id: int, link: _Link) -> bool:
        """Whether that link was neither taken down nor replaced; the lock is held."""
        return self._links.get(peer_id) is link

    def _holds(self, token: bytes) -> bool:
        """Whether this end of the link with `token` is up; the lock is held."""
        return any(link.token == token for link in self._links.values())

    def _link(self, peer_id: int) -> _Link:
        """The link to a peer, up at both ends."""
        self._opened()
        with _links_changed:
            link = self._links.get(peer_id)
            if link is None:
                raise NotYetLinked(f"peer {peer_id} is not connected")
            if not link.peer._holds(link.token):
                raise PeerLost(f"peer {peer_id} has taken the link down")
            return link


def _move(running: OpenBatch, batch: Batch, context: BackendContext, peer: BackendContext) -> None:
    """Copy one batch, holding the peer's grids and trusting nothing but their owner about where they are."""
    with ExitStack() as held:
        served = [held.enter_context(peer.serve_grid(p.remote.grid_id, batch.op)) for p in batch.pairs]
        pairs = tuple(GridPair(p.local, s.grid.recut(p.remote)) for p, s in zip(batch.pairs, served, strict=True))
        replace(batch, pairs=pairs).check()
        local = {p.local.region_id: context.local_region(p.local.region_id).address for p in pairs}
        remote = {s.region.region_id: s.region.address for s in served}
        copy = ItemCopy(pairs, batch.slices, local, remote)
        running.copy(copy, batch.op, batch.local_items, batch.remote_items)
