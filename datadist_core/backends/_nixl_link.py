# SPDX-License-Identifier: Apache-2.0
"""What two nixl backends tell each other, and what one keeps of its peer.

NIXL itself authenticates nobody. So each end sends the other a note over NIXL, through the same connection that the
transfers will use, that only somebody with the link's token can have made. A link is up when that note has arrived.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from dataclasses import dataclass, field

import msgspec

from ..errors import LLMException, NotYetLinked, PeerLost, Unreachable
from ._attached import AttachedRegions, decode_descriptor_as, decode_identity_as

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
    peer = decode_identity_as(Identity, identity, "nixl")
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
    described = decode_descriptor_as(Descriptor, descriptor, region_id, size_bytes)
    if size_bytes < 1 or described.address < 0:
        raise Unreachable(f"region {region_id} of {size_bytes} bytes at {described.address} cannot exist")
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
    regions: AttachedRegions[Descriptor] = field(init=False)
    up: bool = False
    lost: LLMException | None = None

    def __post_init__(self) -> None:
        self.regions = AttachedRegions(self.peer_id)

    def check_up(self) -> None:
        if self.lost is not None:
            raise PeerLost(f"peer {self.peer_id} has gone, or the link was taken down") from self.lost
        if not self.up:
            raise NotYetLinked(f"peer {self.peer_id} is not connected")
