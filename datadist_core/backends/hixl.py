# SPDX-License-Identifier: Apache-2.0
"""One-sided, on Huawei Ascend: the bytes are moved by the vendor's own LLM-DataDist, the Python package `llm_datadist`.

Never run on Ascend hardware by us. Every call is checked against the published API by a stand-in, see
`datadist_core.testing.ascend_standin` and docs/ascend.md. Read `_hixl_vendor` for what is used of the vendor's package,
`_hixl_engine` for its limits, `_hixl_blocks` for how byte ranges become blocks, `_hixl_mover` for how batches run.

A link of ours is a link of the vendor's: the end that dials calls `link_clusters`, and each end has a cluster id of its
own for that, made at random. A region is a blocks cache registered for peers, a READ is `pull_blocks`, a WRITE is
`push_blocks`.

What to know before using it:

- The vendor allows one LLMDataDist per process: only the first backend of a process can be opened.
- Memory can be registered only while there are no links. What is registered later is not exported (the link then uses
  another backend for it), and goes through a staging buffer when it is the local side.
- IPv4 only; the port that the vendor listens at is not the one of our control connection.
- A transfer that timed out, or failed in another way than by a refusal, ends the link.
- Whoever may link can read and write all memory registered here: ranges are checked against it, not against grids.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ..errors import ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, TimedOut, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch, CopyList, GridPair, Op, expand
from ..types import Deadline, Placement
from ._attached import local_regions
from ._hixl_blocks import BlockCall, divides, stage, to_runs
from ._hixl_engine import Registered, VendorEngine
from ._hixl_identity import (
    NUM_SLOTS,
    TABLE_BYTES,
    TABLE_MODEL_ID,
    Descriptor,
    Identity,
    decode_descriptor,
    decode_identity,
    make_identity,
    prove,
    shows,
)
from ._hixl_mover import Link, Mover, OpenBatch, Piece, ends_of, lost, move_blocks
from ._hixl_options import CannOptions, address_for, parse_options
from ._hixl_vendor import load_vendor
from ._proof_table import ProofTable

logger = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_TABLE = Descriptor(TABLE_BYTES, {TABLE_BYTES: TABLE_MODEL_ID})
_WHOLE_TABLE = BlockCall(TABLE_BYTES, ends_of(1), ends_of(1))


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """What `open` acquires.

    Attributes:
        staging: for the mover alone.
        scratch, table_copy: for test reads, and for reading a peer's table; one at a time.
        closing: set when `close` begins.
    """

    context: BackendContext
    options: CannOptions
    engine: VendorEngine
    mover: Mover
    proofs: ProofTable
    staging: Registered
    scratch: Registered
    table_copy: Registered
    read_lock: threading.Lock
    closing: threading.Event

    def read(self, link: Link, into: Registered, remote: Descriptor, call: BlockCall) -> bytes:
        """The blocks of one call, which go to the start of `into`."""
        with self.read_lock:
            move_blocks(self.engine, Op.READ, link.peer, Piece(into, remote, iter(())), call)
            return ctypes.string_at(into.address, len(call.local) * call.block_bytes)


class CannBackend(Backend):
    """Moves bytes with the vendor's LLM-DataDist. Thread-safe.

    Args:
        load: gives the vendor's package. Only tests, which have a stand-in, pass one.
    """

    name = "cann"

    def __init__(self, load: Callable[[], Any] = load_vendor) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._standing: _Standing | None = None
        self._regions: dict[int, Registered] = {}
        self._links: dict[int, Link] = {}
        # Who may end the vendor's link with a cluster: a link of ours may have been replaced by a newer one.
        self._owners: dict[int, Link] = {}
        self._owners_lock = threading.Lock()

    def capabilities(self) -> Capabilities:
        placements = frozenset({Placement.HOST, Placement.DEVICE})
        return Capabilities(one_sided=True, cross_host=True, inline=False, placements=placements)

    def open(self, context: BackendContext) -> None:
        if self._standing is not None:
            raise ParamInvalid("the cann backend is open already")
        self._standing = _stand_up(context, parse_options(context.options), self._load(), self._on_lost)

    def listen(self, host: str) -> None:
        standing = self._opened()
        options, engine = standing.options, standing.engine
        address = address_for(options.host or host, options.port)
        if not engine.listens or engine.address.host != address.host:
            engine.listen(address)

    def close(self) -> None:
        with self._lock:
            standing, self._standing = self._standing, None
            links, self._links = list(self._links.values()), {}
        if standing is None:
            return
        standing.closing.set()
        error = ClosedError("the cann backend was closed")
        standing.mover.close(error)
        for link in links:
            self._take_down(standing, link, error)
        standing.engine.close()
        self._regions.clear()

    def identity(self) -> bytes:
        engine = self._opened().engine
        return make_identity(engine.cluster_id, engine.address, engine.listens)

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        standing, peer = self._opened(), decode_identity(identity)
        self.disconnect(peer_id)
        link = self._enter(standing, peer_id, peer, prove(link_token, standing.engine.cluster_id), initiator)
        try:
            if initiator:
                _dial(standing.engine, peer, deadline)
            _find_proof(standing, link, prove(link_token, peer.cluster_id), initiator, deadline)
        except BaseException:
            self._drop(standing, link, Unreachable(f"the link to peer {peer_id} was not made"))
            raise

    def disconnect(self, peer_id: int) -> None:
        with self._lock:
            standing, link = self._standing, self._links.pop(peer_id, None)
        if standing is not None and link is not None:
            self._take_down(standing, link, PeerLost(f"the link to peer {peer_id} was taken down"))

    def register(self, region: Region) -> bytes | None:
        standing = self._opened()
        if self._owners:
            logger.info("region %d is not registered with the vendor: there are links", region.region_id)
            return None
        registered = standing.engine.register(
            region.address, region.size_bytes, _placement(region), standing.options.block_bytes, region.for_peers
        )
        if not registered.caches:
            return None
        with self._lock:
            self._regions[region.region_id] = registered
        if not region.for_peers:
            return None
        return msgspec.msgpack.encode(Descriptor(region.size_bytes, registered.models))

    def unregister(self, region_id: int) -> None:
        with self._lock:
            standing, registered = self._standing, self._regions.pop(region_id, None)
        if standing is not None and registered is not None:
            standing.engine.unregister(registered)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        standing = self._opened()
        described, link = decode_descriptor(descriptor, region_id, size_bytes), self._link(peer_id)
        if link.regions.get(region_id) == described:
            return
        sizes = _common(standing.staging, described)
        if not sizes:
            raise Unreachable(f"region {region_id} of peer {peer_id} is registered in other block sizes than ours")
        for size in sizes:
            blocks = ends_of(max(1, size_bytes // size))
            try:
                standing.read(link, standing.scratch, described, BlockCall(size, np.arange(len(blocks)), blocks))
            except LLMException as error:
                raise Unreachable(f"a test read of region {region_id} of peer {peer_id} failed: {error}") from error
        link.regions.put(region_id, described)

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._lock:
            link = self._links.get(peer_id)
        if link is not None:
            link.regions.remove(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        standing, link = self._opened(), self._link(batch.peer_id)
        remote = link.regions.of(batch)
        regions = local_regions(standing.context.local_region, batch.pairs)
        pieces: list[Iterator[Piece]] = []
        for (local_id, remote_id), pairs in _by_regions(batch.pairs).items():
            ranges = expand(replace(batch, pairs=pairs), {local_id: 0}, {remote_id: 0})
            region, registered = regions[local_id], self._regions.get(local_id)
            pieces.append(_pieces(batch.op, ranges, region, registered, standing.staging, remote[remote_id]))
        every_piece = itertools.chain.from_iterable(pieces)
        standing.mover.submit(OpenBatch(batch_id, batch, link, every_piece, done, tuple(regions.values())))

    def cancel(self, batch_id: int) -> None:
        standing = self._standing
        if standing is not None:
            standing.mover.cancel(batch_id)

    def _opened(self) -> _Standing:
        standing = self._standing
        if standing is None:
            raise ClosedError("the cann backend is not open")
        return standing

    def _link(self, peer_id: int) -> Link:
        with self._lock:
            link = self._links.get(peer_id)
        if link is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        return link

    def _enter(self, standing: _Standing, peer_id: int, peer: Identity, proof: bytes, initiator: bool) -> Link:
        """A new link, which owns the vendor's link with that cluster from now on."""
        link = Link(peer_id, peer, standing.proofs.show(proof))
        with self._lock:
            is_open = self._standing is standing
            if is_open:
                self._links[peer_id] = link
        if not is_open:
            standing.proofs.withdraw(link.slot)
            raise ClosedError("the cann backend is not open")
        with self._owners_lock:
            older, self._owners[peer.cluster_id] = self._owners.get(peer.cluster_id), link
            if older is not None and initiator:
                standing.engine.unlink(peer)
        if older is not None:
            self._drop(standing, older, PeerLost(f"the peer of link {older.peer_id} has linked again"))
        return link

    def _drop(self, standing: _Standing, link: Link, error: LLMException) -> None:
        """Take a link down that may be among `_links`, and may be taken down by another thread."""
        with self._lock:
            ours = self._links.get(link.peer_id) is link
            if ours:
                del self._links[link.peer_id]
        if ours:
            self._take_down(standing, link, error)

    def _take_down(self, standing: _Standing, link: Link, error: LLMException) -> None:
        """For whoever took it out of `_links`: that is once."""
        standing.proofs.withdraw(link.slot)
        standing.mover.end(link, error)
        with self._owners_lock:
            if self._owners.get(link.peer.cluster_id) is link:
                standing.engine.unlink(link.peer)
                del self._owners[link.peer.cluster_id]

    def _on_lost(self, link: Link, error: LLMException) -> None:
        standing = self._standing
        if standing is not None:
            self._drop(standing, link, lost(link, error))
            standing.context.report_peer_lost(link.peer_id, error)


def _stand_up(
    context: BackendContext, options: CannOptions, vendor: Any, on_lost: Callable[[Link, LLMException], None]
) -> _Standing:
    """Raises Unreachable with the reason."""
    address = address_for(options.host or context.listen_host, options.port)
    engine = VendorEngine(vendor, options, address, context.listen_host is not None)
    proofs, sizes = ProofTable("cann", NUM_SLOTS), options.block_bytes
    try:
        table = engine.register(
            proofs.address, TABLE_BYTES, Placement.HOST, (TABLE_BYTES,), for_peers=True, model_id=TABLE_MODEL_ID
        )
        staging = engine.register_own(STAGING_BYTES, sizes)
        scratch = engine.register_own(2 * max(sizes), sizes)
        table_copy = engine.register_own(TABLE_BYTES, (TABLE_BYTES,))
        if not (
            table.caches and table_copy.caches and staging.caches and staging.caches.keys() == scratch.caches.keys()
        ):
            raise Unreachable("the vendor's library registers no host memory of this process; the log says why")
    except BaseException:
        engine.close()
        raise
    mover, lock, closing = Mover(engine, on_lost), threading.Lock(), threading.Event()
    return _Standing(context, options, engine, mover, proofs, staging, scratch, table_copy, lock, closing)


def _dial(engine: VendorEngine, peer: Identity, deadline: Deadline) -> None:
    if not peer.port:
        raise Unreachable("the peer's cann backend does not listen")
    engine.link(peer, deadline)


def _find_proof(standing: _Standing, link: Link, proof: bytes, initiator: bool, deadline: Deadline) -> None:
    """Wait until the peer has dialled, if it is to, and shows that it belongs to this link.

    Raises Unreachable, TimedOut.
    """
    pause = _FIRST_PAUSE_S
    while not ((initiator or standing.engine.is_linked(link.peer)) and _has_shown(standing, link, proof, initiator)):
        link.check_up()
        if standing.closing.is_set():
            raise ClosedError("the cann backend was closed")
        if deadline.expired:
            raise TimedOut("the other end of the cann link has not shown in time that it belongs to it")
        standing.closing.wait(min(pause, deadline.remaining_s()))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _has_shown(standing: _Standing, link: Link, proof: bytes, initiator: bool) -> bool:
    try:
        return shows(standing.read(link, standing.table_copy, _TABLE, _WHOLE_TABLE), proof)
    except ClosedError:
        raise
    except LLMException as error:
        if initiator:
            raise Unreachable(f"the vendor has linked with {link.peer.address} but moves no data: {error}") from error
        logger.debug("the peer may be linking again: %s", error)
        return False


def _pieces(
    op: Op, ranges: CopyList, region: Region, registered: Registered | None, staging: Registered, remote: Descriptor
) -> Iterator[Piece]:
    """How ranges (offsets in the two regions) move. Raises ParamInvalid, at once, if they cannot."""
    sizes = _common(registered, remote) if registered is not None else []
    if registered is not None and sizes and divides(ranges, sizes[0]):
        runs = to_runs(ranges, sizes)
        return (Piece(registered, remote, iter((call,))) for run in runs for call in run.calls())
    if _placement(region) is Placement.DEVICE:
        raise ParamInvalid(
            f"device memory (region {region.region_id}) that is not registered with the vendor in the blocks needed "
            "cannot be moved: register it before the first link"
        )
    fillings = stage(ranges, _common(staging, remote), op, remote.size_bytes, STAGING_BYTES)
    return (
        Piece(
            staging,
            remote,
            itertools.chain.from_iterable(run.calls() for run in staged.runs),
            _based(staged.copies, region.address, staging.address),
        )
        for staged in fillings
    )


def _based(copies: CopyList, local: int, remote: int) -> CopyList:
    return CopyList(copies.local + local, copies.remote + remote, copies.num_bytes)


def _common(local: Registered, remote: Descriptor) -> list[int]:
    """Block sizes that both ends have registered the memory in, ascending."""
    return sorted(local.caches.keys() & remote.models.keys())


def _by_regions(pairs: Iterable[GridPair]) -> dict[tuple[int, int], tuple[GridPair, ...]]:
    found: dict[tuple[int, int], list[GridPair]] = {}
    for pair in pairs:
        found.setdefault((pair.local.region_id, pair.remote.region_id), []).append(pair)
    return {key: tuple(kept) for key, kept in found.items()}


def _placement(region: Region) -> Placement:
    """Where it really is: our pools are mapped memory of this host, whatever placement they stand for."""
    return Placement.HOST if region.mapping is not None else region.placement
