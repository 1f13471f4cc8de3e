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
was copied while it went is not called OK.

Not reachable: other hosts, other network namespaces (containers without a common one), and memory that is not in
a pool. `connect` and `attach` say which.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

import msgspec

from ..errors import ClosedError, LLMException, NotYetLinked, PeerLost, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch, expand
from ..types import Deadline
from ._attached import AttachedRegions, decode_descriptor_as, decode_identity_as
from ._host import this_host
from ._inline import InlineBatches, OpenBatch
from ._shm_client import RegionClient
from ._shm_mapping import FileKey, MappedFile, file_key
from ._shm_server import Admission, RegionServer

_VERSION = 1


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

    def __init__(self, admission: Admission, client: RegionClient) -> None:
        self.admission = admission
        self.client = client
        self.lost: LLMException | None = None
        self._lock = threading.Lock()
        self._regions: AttachedRegions[_AttachedRegion] = AttachedRegions(admission.peer_id)
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
        self._regions.remove(region_id)

    def regions_of(self, batch: Batch) -> dict[int, _AttachedRegion]:
        """The attached regions that a batch names. Raises ParamInvalid unless its remote grids lie in them."""
        return self._regions.of(batch)

    def close(self) -> None:
        self.client.close()
        self._regions.clear()

    def _add(self, region_id: int, described: _Descriptor, fd: int) -> None:
        key = file_key(fd)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = MappedFile(fd)
            address = file.address_of(described.offset_bytes, described.size_bytes)
            self._regions.put(region_id, _AttachedRegion(file, address, described.size_bytes))


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

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=False, inline=True)

    def open(self, context: BackendContext) -> None:
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
        if server is not None:
            server.close()
        for link in links:
            link.close()
        self._batches.end(ClosedError("the shm backend was closed"))

    def identity(self) -> bytes:
        self._opened()
        return self._identity

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        peer = decode_identity_as(_Identity, identity, self.name)
        _check_reachable(peer)
        self.disconnect(peer_id)
        client = RegionClient(peer.address)
        try:
            self._link_up(_Link(Admission(peer_id, link_token), client))
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
        link.close()
        self._batches.end(PeerLost(f"the link to peer {peer_id} was taken down"), peer_id)

    def register(self, region: Region) -> bytes | None:
        with self._lock:
            self._regions[region.region_id] = region
        if region.mapping is None:
            return None
        return msgspec.msgpack.encode(_Descriptor(region.mapping.offset_bytes, region.size_bytes))

    def unregister(self, region_id: int) -> None:
        with self._lock:
            self._regions.pop(region_id, None)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        described = decode_descriptor_as(_Descriptor, descriptor, region_id, size_bytes)
        self._link(peer_id).attach(region_id, described, deadline)

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is not None:
            link.detach(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        context, link = self._opened(), self._link(batch.peer_id)
        link.check_up()
        self._batches.run(batch_id, batch, done, lambda running: _move(running, context, link))

    def cancel(self, batch_id: int) -> None:
        self._batches.cancel(batch_id)

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
        if region is None:
            raise Unreachable(f"region {region_id} is not registered (any more)")
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


def _move(running: OpenBatch, context: BackendContext, link: _Link) -> None:
    """Copy one batch. `remote` and `local` keep the memory mapped until the end."""
    batch = running.batch
    remote = link.regions_of(batch)
    local = {pair.local.region_id: context.local_region(pair.local.region_id) for pair in batch.pairs}
    for pair in batch.pairs:
        pair.local.check_inside(local[pair.local.region_id].size_bytes)
    local_bases = {region_id: region.address for region_id, region in local.items()}
    remote_bases = {region_id: region.address for region_id, region in remote.items()}
    running.copy(expand(batch, local_bases, remote_bases))
    link.check_up()


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
