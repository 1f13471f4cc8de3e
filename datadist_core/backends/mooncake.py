# SPDX-License-Identifier: Apache-2.0
"""One-sided, between hosts: the bytes are moved by Mooncake's TransferEngine, over TCP or RDMA.

Needs the package mooncake-transfer-engine (`pip install "vllm-datadist[mooncake]"`), and of the system the libraries
that its wheel links but does not bring: Debian's libibverbs1, libnuma1 and libcurl4, also without RDMA. Read
`_mooncake_engine` for how it is kept from touching memory that is no longer its own, `_mooncake_link` for how batches
run, `_mooncake_identity` for how two ends recognise each other, `_mooncake_binding` for its settings.

What to know before using it:

- Mooncake's engines listen on all interfaces, on ports of their own choice, and let everybody in: whoever can reach
  them can read and write all registered memory. Use it in networks that you trust. Peers' ranges are checked by
  Mooncake against the registered regions, not against grids.
- While a transfer runs, a core is busy waiting for it: that is how Mooncake's binding works.
- A push that failed or was cancelled may still be arriving at the peer for a moment. The link layer's Revoke, or
  unregistering the region, is what tells that a peer has stopped.
- Links of one process to the same peer share their fate for a moment: what ends a transfer early shuts all connections
  to that peer. Transfers of others notice, and repeat the piece that was under way (see `_mooncake_engine`).

RDMA, as Mooncake documents it, NEVER RUN BY US: the options protocol="rdma" and, to pick network cards, device="mlx5_0"
(several: separated by commas; none: Mooncake's own choice by the machine's topology); cards that this process may open
(/dev/infiniband in a container) with their driver for libibverbs (Debian: ibverbs-providers), and an unlimited
`ulimit -l` for registered memory, which is registered twice: once for peers, once for our own transfers. Transfers
with a peer that has stopped end at Mooncake's own time limit there (option timeout_s), because there is no connection
to shut. What ran is that without cards this is refused with the reason.

GPUs: this backend registers host memory only; device memory has to be copied to the host first (`swap_blocks`). The
extra installs Mooncake's build without CUDA; its builds with CUDA (mooncake-transfer-engine, and -cuda13) have the same
module, and were not tried.

Options: protocol ("tcp" or "rdma"), device, host, timeout_s; see `_mooncake_options.MooncakeOptions`.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ..errors import ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, TimedOut, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch, expand
from ..types import Deadline
from ._attached import decode_descriptor_as, local_regions
from ._mooncake_engine import Engine, Initiator, Peer
from ._mooncake_identity import (
    INSTANCE_BYTES,
    NUM_SLOTS,
    TABLE_BYTES,
    Descriptor,
    Identity,
    decode_identity,
    make_identity,
    prove,
    shows,
)
from ._mooncake_link import Link, OpenBatch, cut
from ._mooncake_options import MooncakeOptions, address_of, parse_options
from ._proof_table import ProofTable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_MAX_FAILURES = 3
"""Reads that may fail while a link is made: Mooncake may remember an earlier process at that port."""


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """What `open` acquires. `closing` is set when `close` begins."""

    context: BackendContext
    options: MooncakeOptions
    server: Engine
    initiator: Initiator
    proofs: ProofTable
    instance: bytes
    closing: threading.Event

    def close(self) -> None:
        self.initiator.close()
        self.server.close()


class MooncakeBackend(Backend):
    """Moves bytes with Mooncake's TransferEngine. Thread-safe."""

    name = "mooncake"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: _Standing | None = None
        self._host = ""
        self._regions: dict[int, Region] = {}
        self._links: dict[int, Link] = {}
        self._slots: dict[Link, int] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=True, inline=False)

    def open(self, context: BackendContext) -> None:
        if self._standing is not None:
            raise ParamInvalid("the mooncake backend is open already")
        options = parse_options(context.options)
        self._host = address_of(options.host or context.listen_host)
        self._standing = _stand_up(context, options, self._host)

    def listen(self, host: str) -> None:
        """The engines listen on all interfaces already; what changes is the address that peers are told."""
        if self._opened().options.host is None:
            self._host = address_of(host)

    def close(self) -> None:
        with self._lock:
            standing, self._standing = self._standing, None
            links, self._links = list(self._links.values()), {}
        if standing is None:
            return
        standing.closing.set()
        for link in links:
            self._take_down(standing, link, ClosedError("the mooncake backend was closed"))
        standing.close()
        self._regions.clear()

    def identity(self) -> bytes:
        standing = self._opened()
        peer = Peer(self._host, standing.server.port, standing.server.data_port)
        return make_identity(standing.instance, standing.options.protocol, peer, standing.proofs.address)

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        standing = self._opened()
        theirs = decode_identity(identity, standing.options.protocol)
        link = Link(peer_id, theirs.peer, standing.initiator, self._on_lost)
        self.disconnect(peer_id)
        with self._lock:
            if self._standing is not standing:
                raise ClosedError("the mooncake backend is not open")
            self._slots[link] = standing.proofs.show(prove(link_token, standing.instance))
            self._links[peer_id] = link
        try:
            _find_peer(link, deadline)
            _find_proof(standing.closing, link, theirs, prove(link_token, theirs.instance), deadline)
        except BaseException:
            self._abandon(standing, link)
            raise

    def disconnect(self, peer_id: int) -> None:
        with self._lock:
            standing, link = self._standing, self._links.pop(peer_id, None)
        if standing is not None and link is not None:
            self._take_down(standing, link, PeerLost(f"the link to peer {peer_id} was taken down"))

    def register(self, region: Region) -> bytes | None:
        standing = self._opened()
        served = region.for_peers and standing.server.register(region.address, region.size_bytes)
        if region.for_peers and not served:
            logger.info("Mooncake does not take region %s: it overlaps with another", region.region_id)
            return None
        standing.initiator.add(region.address, region.size_bytes)
        with self._lock:
            self._regions[region.region_id] = region
        if not served:
            return None
        return msgspec.msgpack.encode(Descriptor(region.address, region.size_bytes))

    def unregister(self, region_id: int) -> None:
        with self._lock:
            standing, region = self._standing, self._regions.pop(region_id, None)
        if standing is not None and region is not None:
            with suppress(ClosedError):
                standing.initiator.remove(region.address)
                if region.for_peers:
                    standing.server.unregister(region.address)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        self._opened()
        described, link = decode_descriptor_as(Descriptor, descriptor, region_id, size_bytes), self._link(peer_id)
        if link.regions.get(region_id) == described:
            return
        ends = (described.address, described.address + size_bytes - 1)
        if link.read(ends, 1, deadline) is None:
            link.check_up()
            raise Unreachable(f"the peer's Mooncake engine at {link.peer.name} does not give region {region_id}")
        link.regions.put(region_id, described)

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is not None:
            link.regions.remove(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        context, link = self._opened().context, self._link(batch.peer_id)
        remote = {region_id: described.address for region_id, described in link.regions.of(batch).items()}
        regions = local_regions(context.local_region, batch.pairs)
        local = {region_id: region.address for region_id, region in regions.items()}
        pieces = cut(expand(batch, local, remote))
        link.submit(OpenBatch(batch_id, batch, done, pieces, tuple(regions.values())))

    def cancel(self, batch_id: int) -> None:
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(batch_id)

    def _opened(self) -> _Standing:
        standing = self._standing
        if standing is None:
            raise ClosedError("the mooncake backend is not open")
        return standing

    def _link(self, peer_id: int) -> Link:
        with self._lock:
            link = self._links.get(peer_id)
        if link is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        return link

    def _take_down(self, standing: _Standing, link: Link, error: LLMException) -> None:
        """For a link that is no longer among `_links`."""
        with self._lock:
            slot = self._slots.pop(link, None)
        if slot is not None:
            standing.proofs.withdraw(slot)
        link.end(error)

    def _abandon(self, standing: _Standing, link: Link) -> None:
        """Nothing of a failed connect stays behind."""
        with self._lock:
            if self._links.get(link.peer_id) is link:
                del self._links[link.peer_id]
        self._take_down(standing, link, Unreachable(f"the link to peer {link.peer_id} was not made"))

    def _on_lost(self, link: Link, error: LLMException) -> None:
        with self._lock:
            standing = self._standing if self._links.get(link.peer_id) is link else None
        if standing is not None:
            standing.context.report_peer_lost(link.peer_id, error)


def _stand_up(context: BackendContext, options: MooncakeOptions, host: str) -> _Standing:
    """Raises Unreachable with the reason."""
    server, proofs = Engine(options, host), ProofTable("mooncake", NUM_SLOTS)
    try:
        if not server.register(proofs.address, TABLE_BYTES):
            raise Unreachable(f"Mooncake cannot register memory for its transport {options.protocol}")
        initiator = Initiator(lambda: Engine(options, host), registers=options.protocol != "tcp")
    except BaseException:
        server.close()
        raise
    return _Standing(context, options, server, initiator, proofs, os.urandom(INSTANCE_BYTES), threading.Event())


def _find_peer(link: Link, deadline: Deadline) -> None:
    """Raises Unreachable or TimedOut if the peer's engine does not answer."""
    if link.answers(deadline):
        return
    link.check_up()
    if deadline.expired:
        raise TimedOut(f"the peer's Mooncake engine at {link.peer.name} has not answered in time")
    raise Unreachable(f"no Mooncake engine answers at {link.peer.name}: it has ended, or a firewall is in between")


def _find_proof(closing: threading.Event, link: Link, theirs: Identity, proof: bytes, deadline: Deadline) -> None:
    """Wait until the peer shows that it belongs to this link. Raises Unreachable, TimedOut."""
    pause, num_failures = _FIRST_PAUSE_S, 0
    while True:
        table = link.read((theirs.table_address,), TABLE_BYTES, deadline)
        if table is not None and shows(table, proof):
            return
        link.check_up()
        if deadline.expired:
            raise TimedOut("the other end of the mooncake link has not shown in time that it belongs to it")
        num_failures += table is None
        if num_failures == _MAX_FAILURES:
            raise Unreachable(f"the peer's Mooncake engine at {link.peer.name} answers but gives no data")
        closing.wait(min(pause, deadline.remaining_s()))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
