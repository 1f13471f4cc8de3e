# SPDX-License-Identifier: Apache-2.0
"""Same host, one-sided: the peer's memory is mapped into this process, and a transfer is a copy.

Memory pools are memory files (memfd). Their descriptor is fetched from the peer over a Unix socket, see
`_shm_protocol`, and the whole file is mapped once per link, however many regions lie in it. From then on the peer
takes no part in a transfer: it may be busy or stopped. That also means that it cannot check what we touch: whoever
is linked can read and write all of a pool that it has a region of. Links are made between ends that trust each
other with their KV memory; the checks here (ranges, seals, sizes) keep mistakes, and a peer that lies about its
memory, from crashing *us*.

A mapping goes when the last region in it is detached and the last copy that uses it has ended: both hold a
reference, and nothing else does. The connection to the peer stays open and tells when the peer has gone; data that
was copied while it went is not called OK. It is closed only after this end's last copy, so that the peer knows from
when on its memory is touched no more (`is_fenced`): a process that was stopped in the middle of a copy goes on with it
when it is continued, whatever has become of the link meanwhile.

Large copies are shared with other threads of this process while processors are idle (`_copy.helpers`): at most
`copy_threads` in all, an option of this backend (1 to 4, default 4; 1 is the caller's thread alone).

Not reachable: other hosts, other network namespaces (containers without a common one), and memory that is not in
a pool. `connect` and `attach` say which.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from .._copy.helpers import MAX_THREADS
from ..errors import ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback, Prepared
from ..transfer.item_copy import ItemCopy, ItemList
from ..transfer.plan import Batch, GridPair, Op, Slice
from ..types import Deadline
from ._attached import AttachedRegions, decode_descriptor_as, decode_identity_as, local_regions
from ._host import this_host
from ._inline import InlineBatches, OpenBatch
from ._shm_client import RegionClient
from ._shm_mapping import FileKey, MappedFile, file_key
from ._shm_server import Admission, RegionServer

_log = logging.getLogger(__name__)

_VERSION = 1

Pairs: TypeAlias = tuple[GridPair, ...]
Slices: TypeAlias = tuple[Slice, ...]


class _Identity(msgspec.Struct, frozen=True):
    """Where we are, as far as it decides who can reach us."""

    version: int
    boot_id: str
    network_namespace: str
    address: bytes


class _Descriptor(msgspec.Struct, frozen=True):
    """Where in its memory file a region lies."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _AttachedRegion:
    file: MappedFile
    address: int
    size_bytes: int


class _Link:
    """One peer and what is mapped of it. Thread-safe."""

    def __init__(self, admission: Admission, client: RegionClient, max_threads: int) -> None:
        self.admission = admission
        self.client = client
        self.lost: LLMException | None = None
        self._ended = False
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._regions: AttachedRegions[_AttachedRegion] = AttachedRegions(admission.peer_id)
        self._moves: weakref.WeakSet[_Move] = weakref.WeakSet()
        self._files: weakref.WeakValueDictionary[FileKey, MappedFile] = weakref.WeakValueDictionary()

    def check_up(self) -> None:
        """Raise PeerLost if the peer has gone."""
        if self.lost is not None or not self.client.is_up():
            raise PeerLost(f"peer {self.admission.peer_id} has gone or closed the link") from self.lost

    def attach(self, region_id: int, described: _Descriptor, deadline: Deadline) -> None:
        if self._regions.get(region_id) is not None:
            return
        fd = self.client.fetch(region_id, deadline)
        try:
            self._add(region_id, described, fd)
        finally:
            os.close(fd)

    def detach(self, region_id: int) -> None:
        if self._regions.remove(region_id):
            self.forget_moves()

    def prepare(self, batches: InlineBatches, local: dict[int, Region], pairs: Pairs, slices: Slices) -> _Move:
        """Raises ParamInvalid unless the remote grids lie in attached regions."""
        local_base = {region_id: region.address for region_id, region in local.items()}
        with self._lock:  # no region is detached between being found here and being kept
            remote = self._regions.of_pairs(pairs)
            remote_base = {region_id: region.address for region_id, region in remote.items()}
            copy = ItemCopy(pairs, slices, local_base, remote_base, self._max_threads)
            writable = all(region.file.writable for region in remote.values())
            move = _Move(self, batches, _Mapped(copy, (*local.values(), *remote.values()), writable))
            self._moves.add(move)
            return move

    def forget_moves(self) -> None:
        """They keep memory mapped. Those whose regions stay are prepared anew when needed."""
        with self._lock:
            moves, self._moves = self._moves, weakref.WeakSet()
        for move in moves:
            move.mapped = None

    def end(self, error: LLMException, batches: InlineBatches) -> None:
        """End the copies, then part. Only then may the peer take it that its memory is touched no more."""
        self.client.hang_up()
        with self._lock:  # what is being attached now, in another thread, is not kept
            self._ended = True
            self._regions.clear()
        self.forget_moves()
        if not batches.end_then(error, self.admission.peer_id, self.client.close):
            _log.error("a copy with peer %d does not end; until it does its connection stays", self.admission.peer_id)

    def _add(self, region_id: int, described: _Descriptor, fd: int) -> None:
        key = file_key(fd)
        with self._lock:
            if self._ended:
                raise PeerLost(f"the link to peer {self.admission.peer_id} ended meanwhile")
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = MappedFile(fd)
            address = file.address_of(described.offset_bytes, described.size_bytes)
            self._regions.put(region_id, _AttachedRegion(file, address, described.size_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """A copy, and what keeps the memory at both ends of it mapped."""

    copy: ItemCopy
    regions: tuple[object, ...]
    writable: bool


class _Move(Prepared):
    """`mapped` is taken away when the link ends or a region goes; a copy that is running then keeps what it uses."""

    def __init__(self, link: _Link, batches: InlineBatches, mapped: _Mapped) -> None:
        self.mapped: _Mapped | None = mapped
        self._link = link
        self._batches = batches

    def run(self, op: Op, local_items: ItemList, remote_items: ItemList) -> None:
        # Entered first: whoever ends the link takes `mapped` away and then waits for all who have entered.
        running = self._batches.enter(self._link.admission.peer_id)
        try:
            self.copy(running, op, local_items, remote_items)
        finally:
            self._batches.leave(running)

    def copy(self, running: OpenBatch, op: Op, local_items: ItemList, remote_items: ItemList) -> None:
        """What is copied while the peer goes is not OK."""
        mapped = self.mapped
        if mapped is None:
            self._link.check_up()
            raise ParamInvalid(f"a region of peer {self._link.admission.peer_id} that was prepared for is detached")
        if op is Op.WRITE and not mapped.writable:
            raise ParamInvalid(f"peer {self._link.admission.peer_id} lets nobody write to this memory")
        link = self._link
        connection = link.client.fileno()
        is_up = running.copy(mapped.copy, op, local_items, remote_items, connection)
        if connection < 0 or not is_up or link.lost is not None:
            raise PeerLost(f"peer {link.admission.peer_id} has gone or closed the link") from link.lost


class ShmBackend(Backend):
    """Copies between this process's memory and pools of other processes on this host."""

    name = "shm"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: BackendContext | None = None
        self._server: RegionServer | None = None
        self._identity = b""
        self._regions: dict[int, Region] = {}
        self._links: dict[int, _Link] = {}
        self._batches = InlineBatches()
        self._max_threads = MAX_THREADS

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=False, inline=True)

    def open(self, context: BackendContext) -> None:
        self._max_threads = _copy_threads(context.options)
        here = this_host()
        server = RegionServer(self._find_region, self._on_lost)
        server.start()
        self._identity = msgspec.msgpack.encode(
            _Identity(_VERSION, here.boot_id, here.network_namespace, server.address)
        )
        self._context, self._server = context, server

    def close(self) -> None:
        with self._lock:
            self._context = None
            server, self._server = self._server, None
            links = list(self._links.values())
            self._links.clear()
            self._regions.clear()
        for link in links:
            link.end(ClosedError("the shm backend was closed"), self._batches)
        if server is not None:
            server.close()

    def identity(self) -> bytes:
        self._opened()
        return self._identity

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        peer = decode_identity_as(_Identity, identity, self.name)
        _check_reachable(peer)
        self.disconnect(peer_id)
        client = RegionClient(peer.address)
        try:
            self._link_up(_Link(Admission(peer_id, link_token), client, self._max_threads))
            client.greet(link_token, deadline)
        except PeerLost as error:
            self._abandon(peer_id, client)
            self._opened()
            raise Unreachable(f"the peer ended the shared-memory handshake: {error}") from error
        except LLMException:
            self._abandon(peer_id, client)
            raise

    def disconnect(self, peer_id: int) -> None:
        with self._lock:
            link = self._links.pop(peer_id, None)
            server = self._server
        if link is None:
            return
        if server is not None:
            server.expel(link.admission)
        link.end(PeerLost(f"the link to peer {peer_id} was taken down"), self._batches)

    def is_fenced(self, peer_id: int) -> bool:
        with self._lock:
            server, is_connected = self._server, peer_id in self._links
        return not is_connected and (server is None or not server.awaits_end_of(peer_id))

    def register(self, region: Region) -> bytes | None:
        with self._lock:
            self._regions[region.region_id] = region
        if region.mapping is None or not region.for_peers:
            return None
        return msgspec.msgpack.encode(_Descriptor(region.mapping.offset_bytes, region.size_bytes))

    def unregister(self, region_id: int) -> None:
        with self._lock:
            self._regions.pop(region_id, None)
            links = list(self._links.values())
        for link in links:
            link.forget_moves()

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        described = decode_descriptor_as(_Descriptor, descriptor, region_id, size_bytes)
        self._link(peer_id).attach(region_id, described, deadline)

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is not None:
            link.detach(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        link = self._link(batch.peer_id)
        link.check_up()

        def move(running: OpenBatch) -> None:
            prepared = self._prepare(link, batch.pairs, batch.slices)
            prepared.copy(running, batch.op, batch.local_items, batch.remote_items)

        self._batches.run(batch_id, batch, done, move)

    def prepare(self, peer_id: int, pairs: Pairs, slices: Slices) -> Prepared:
        return self._prepare(self._link(peer_id), pairs, slices)

    def cancel(self, batch_id: int) -> None:
        self._batches.cancel(batch_id)

    def _prepare(self, link: _Link, pairs: Pairs, slices: Slices) -> _Move:
        context = self._opened()
        local = local_regions(context.local_region, pairs)
        return link.prepare(self._batches, local, pairs, slices)

    def _opened(self) -> BackendContext:
        context = self._context
        if context is None:
            raise ClosedError("the shm backend is not open")
        return context

    def _link(self, peer_id: int) -> _Link:
        self._opened()
        with self._lock:
            link = self._links.get(peer_id)
        if link is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        return link

    def _link_up(self, link: _Link) -> None:
        """Make a link known, so that `close` ends its handshake, and let its peer in."""
        with self._lock:
            if self._server is None:
                raise ClosedError("the shm backend is not open")
            self._links[link.admission.peer_id] = link
            self._server.admit(link.admission)

    def _abandon(self, peer_id: int, client: RegionClient) -> None:
        """Nothing of a failed connect stays behind."""
        self.disconnect(peer_id)
        client.close()

    def _find_region(self, region_id: int) -> Region:
        with self._lock:
            region = self._regions.get(region_id)
        if region is None or not region.for_peers:
            raise Unreachable(f"region {region_id} is not registered (any more), or not for peers")
        return region

    def _on_lost(self, admission: Admission, error: LLMException | None) -> None:
        """A peer's own connection to us ended: in order, or with `error`."""
        with self._lock:
            link, context = self._links.get(admission.peer_id), self._context
        if link is None or link.admission is not admission or context is None:
            return
        link.lost = error or PeerLost(f"peer {admission.peer_id} took the link down")
        if error is not None:
            context.report_peer_lost(admission.peer_id, error)


def _copy_threads(options: Mapping[str, Any]) -> int:
    """Raises ParamInvalid naming the option."""
    for name in options:
        if name != "copy_threads":
            raise ParamInvalid(f"shm option {name!r} is unknown; there is copy_threads")
    value = options.get("copy_threads", MAX_THREADS)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_THREADS:
        raise ParamInvalid(f"shm option copy_threads={value!r} must be an integer in 1..{MAX_THREADS}")
    return value


def _check_reachable(peer: _Identity) -> None:
    here = this_host()
    if peer.version != _VERSION:
        raise Unreachable(f"the peer's shm backend speaks version {peer.version}, this one {_VERSION}")
    if peer.boot_id != here.boot_id:
        raise Unreachable(f"the peer is on another host (boot id {peer.boot_id}, here {here.boot_id})")
    if peer.network_namespace != here.network_namespace:
        raise Unreachable(
            f"the peer is in another network namespace ({peer.network_namespace}, here {here.network_namespace}); "
            "start both containers in the same one to share memory"
        )
