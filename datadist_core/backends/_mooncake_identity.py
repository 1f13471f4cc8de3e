# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a link know of each other: identities, descriptors, and proofs.

Mooncake has no notion of a link, and its engines let everybody in. So each end shows, in a table that is registered
with its serving engine, an HMAC under the link's token, for as long as it has the link up; the other end reads the
table through Mooncake. Who finds the proof knows that it talks to the right engine, and that data gets through.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec

from ..errors import Unreachable
from ._attached import decode_identity_as
from ._mooncake_engine import Peer
from ._proof_table import PROOF_BYTES

_VERSION = 1
INSTANCE_BYTES = 16
NUM_SLOTS = 256  # links at a time
TABLE_BYTES = NUM_SLOTS * PROOF_BYTES

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
    identity = decode_identity_as(Identity, data, "mooncake")
    if identity.version != _VERSION:
        raise Unreachable(f"the peer's mooncake backend speaks version {identity.version}, this one {_VERSION}")
    if identity.protocol != protocol:
        raise Unreachable(f"the peer's mooncake backend uses protocol {identity.protocol!r}, this one {protocol!r}")
    return identity


def prove(token: bytes, instance: bytes) -> bytes:
    """What the end with that instance shows the other end of a link."""
    return hmac.digest(token, b"datadist mooncake" + instance, "sha256")


def shows(table: bytes, proof: bytes) -> bool:
    """Whether `proof` is in a slot of a table."""
    return any(hmac.compare_digest(table[at : at + PROOF_BYTES], proof) for at in range(0, len(table), PROOF_BYTES))
