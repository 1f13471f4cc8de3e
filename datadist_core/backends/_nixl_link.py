# SPDX-License-Identifier: Apache-2.0
"""What two nixl backends tell each other, and what one keeps of its peer.

NIXL itself authenticates nobody. So each end sends the other a note over NIXL, through the same connection that the
transfers will use, that only somebody with the link's token can have made. A link is up when that note has arrived.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..errors import LLMException, NotYetLinked, ParamInvalid, PeerLost, ProtocolError, Unreachable
from ..transfer.plan import Batch

_VERSION = 1
_MAX_IDENTITY_BYTES = 4096
_MAX_DESCRIPTOR_BYTES = 1024
_MAX_NOTES = 1024


class Identity(msgspec.Struct, frozen=True):
    """How to reach the agent that serves us."""

    version: int
    plugin: str
    name: str
    connection: bytes


class Descriptor(msgspec.Struct, frozen=True):
    """One region, and what NIXL needs to get at it."""

    address: int
    size_bytes: int
    metadata: bytes


def encode_identity(plugin: str, name: str, connection: bytes) -> bytes:
    """Raises Unreachable if it is too large to be sent."""
    identity = msgspec.msgpack.encode(Identity(_VERSION, plugin, name, connection))
    if len(identity) > _MAX_IDENTITY_BYTES:
        raise Unreachable(
            f"NIXL's address of this process has {len(identity)} bytes, {_MAX_IDENTITY_BYTES} at most can be sent: it "
            "lists every network device; choose fewer with the environment variable UCX_NET_DEVICES"
        )
    return identity


def decode_identity(identity: bytes, plugin: str) -> Identity:
    """Raises ProtocolError for anything that is none, Unreachable for one that does not fit ours."""
    try:
        peer = msgspec.msgpack.decode(identity, type=Identity)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"this is not the identity of a nixl backend: {error}") from error
    if peer.version != _VERSION:
        raise Unreachable(f"the peer's nixl backend speaks version {peer.version}, this one {_VERSION}")
    if peer.plugin != plugin:
        raise Unreachable(f"the peer's nixl backend uses NIXL's plugin {peer.plugin}, this one {plugin}")
    return peer


def encode_descriptor(address: int, size_bytes: int, metadata: bytes) -> bytes | None:
    """None if it is too large to be sent: then peers cannot reach the region through NIXL."""
    descriptor = msgspec.msgpack.encode(Descriptor(address, size_bytes, metadata))
    return descriptor if len(descriptor) <= _MAX_DESCRIPTOR_BYTES else None


def decode_descriptor(region_id: int, size_bytes: int, descriptor: bytes) -> Descriptor:
    """Raises Unreachable unless it describes a region of `size_bytes`."""
    try:
        described = msgspec.msgpack.decode(descriptor, type=Descriptor)
    except msgspec.MsgspecError as error:
        raise Unreachable(f"the descriptor of region {region_id} is malformed: {error}") from error
    if described.size_bytes != size_bytes or size_bytes < 1 or described.address < 0:
        raise Unreachable(
            f"region {region_id} is announced with {size_bytes} bytes but its descriptor says {described.size_bytes}"
        )
    return described


def make_note(link_token: bytes, sender: str, receiver: str, *, initiator: bool) -> bytes:
    """What `sender` (serving agents' names) proves itself with to `receiver`."""
    said = "|".join(("datadist-nixl", "dialled" if initiator else "accepted", sender, receiver))
    return hmac.new(link_token, said.encode(), hashlib.sha256).hexdigest().encode()


class Notes:
    """Notes that have arrived and that nobody has asked for yet: the newest `_MAX_NOTES`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[bytes, None] = {}

    def add(self, notes: list[bytes]) -> None:
        with self._lock:
            for note in notes:
                self._notes[note] = None
            for old in list(self._notes)[: max(0, len(self._notes) - _MAX_NOTES)]:
                del self._notes[old]

    def take(self, note: bytes) -> bool:
        """Whether `note` has arrived; only once."""
        with self._lock:
            return self._notes.pop(note, b"") is None


@dataclass(slots=True, eq=False)
class Link:
    """One peer. `lost` is why it is not usable any more; until `up` it is not usable yet."""

    peer_id: int
    identity: Identity
    regions: dict[int, Descriptor]
    up: bool = False
    lost: LLMException | None = None

    def check_up(self) -> None:
        if self.lost is not None:
            raise PeerLost(f"peer {self.peer_id} has gone, or the link was taken down") from self.lost
        if not self.up:
            raise NotYetLinked(f"peer {self.peer_id} is not connected")

    def regions_of(self, batch: Batch) -> Mapping[int, Descriptor]:
        """The attached regions that a batch names. Raises ParamInvalid unless its remote grids lie in them."""
        found: dict[int, Descriptor] = {}
        for pair in batch.pairs:
            region_id = pair.remote.region_id
            region = self.regions.get(region_id)
            if region is None:
                raise ParamInvalid(f"region {region_id} of peer {self.peer_id} is not attached")
            pair.remote.check_inside(region.size_bytes)
            found[region_id] = region
        return found
