# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a link know of each other: identities, descriptors, and proofs.

Mooncake has no notion of a link, and its engines let everybody in. So each end shows, in a table that is registered
with its serving engine, an HMAC under the link's token, for as long as it has the link up; the other end reads the
table through Mooncake. Who finds the proof knows that it talks to the right engine, and that data gets through.
"""

from __future__ import annotations

import hmac
import threading
from typing import Annotated

import msgspec
import numpy as np

from ..errors import ProtocolError, Unreachable
from ._mooncake_engine import Peer

_VERSION = 1
INSTANCE_BYTES = 16
PROOF_BYTES = 32
NUM_SLOTS = 256  # links at a time
TABLE_BYTES = NUM_SLOTS * PROOF_BYTES
_EMPTY = bytes(PROOF_BYTES)

Address = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Where to find the serving engine of an end, and in its memory the table of proofs."""

    version: int
    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
    protocol: Annotated[str, msgspec.Meta(max_length=20)]
    host: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+\.\d+\.\d+$", max_length=15)]
    port: Port
    data_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    table_address: Address

    @property
    def peer(self) -> Peer:
        return Peer(self.host, self.port, self.data_port)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies in its owner's address space."""

    address: Address
    size_bytes: Address


def make_identity(instance: bytes, protocol: str, peer: Peer, table_address: int) -> bytes:
    identity = Identity(_VERSION, instance, protocol, peer.host, peer.port, peer.data_port, table_address)
    return msgspec.msgpack.encode(identity)


def decode_identity(data: bytes, protocol: str) -> Identity:
    """Raises ProtocolError for garbage, Unreachable if the other end is of another kind."""
    try:
        identity = msgspec.msgpack.decode(data, type=Identity)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"this is not the identity of a mooncake backend: {error}") from error
    if identity.version != _VERSION:
        raise Unreachable(f"the peer's mooncake backend speaks version {identity.version}, this one {_VERSION}")
    if identity.protocol != protocol:
        raise Unreachable(f"the peer's mooncake backend uses protocol {identity.protocol!r}, this one {protocol!r}")
    return identity


def decode_descriptor(data: bytes, region_id: int, size_bytes: int) -> Descriptor:
    """Raises Unreachable for garbage, and if it is not of a region of that size."""
    try:
        described = msgspec.msgpack.decode(data, type=Descriptor)
    except msgspec.MsgspecError as error:
        raise Unreachable(f"the descriptor of region {region_id} is malformed: {error}") from error
    if described.size_bytes != size_bytes:
        raise Unreachable(
            f"region {region_id} is announced with {size_bytes} bytes but its descriptor says {described.size_bytes}"
        )
    return described


def prove(token: bytes, instance: bytes) -> bytes:
    """What the end with that instance shows the other end of a link."""
    return hmac.digest(token, b"datadist mooncake" + instance, "sha256")


def shows(table: bytes, proof: bytes) -> bool:
    """Whether `proof` is in a slot of a table."""
    return any(hmac.compare_digest(table[at : at + PROOF_BYTES], proof) for at in range(0, len(table), PROOF_BYTES))


class ProofTable:
    """The proofs that this end shows. Thread-safe. Peers read it at any time, without notice."""

    def __init__(self) -> None:
        self._slots = np.zeros((NUM_SLOTS, PROOF_BYTES), dtype=np.uint8)
        self._lock = threading.Lock()
        self._free = list(range(NUM_SLOTS))[::-1]
        self.address = int(self._slots.ctypes.data)

    def show(self, proof: bytes) -> int:
        """Put a proof into a slot and return its number. Raises Unreachable if all are taken."""
        with self._lock:
            if not self._free:
                raise Unreachable(f"this end has {NUM_SLOTS} links over mooncake already")
            slot = self._free.pop()
            self._slots[slot] = np.frombuffer(proof, dtype=np.uint8)
        return slot

    def withdraw(self, slot: int) -> None:
        """Once for each slot."""
        with self._lock:
            self._slots[slot] = np.frombuffer(_EMPTY, dtype=np.uint8)
            self._free.append(slot)
