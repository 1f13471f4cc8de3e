# SPDX-License-Identifier: Apache-2.0
"""What the two ends of a link know of each other: identities, descriptors of regions, and proofs.

The vendor links clusters by ids that anybody may claim. So each end shows, in a table that is registered like all
memory, an HMAC under our link's token, and the other end reads the table with `pull_blocks`. Who finds the proof knows
that it is linked with the right end, and that data gets through.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec

from ..errors import Unreachable
from ._attached import decode_descriptor_as, decode_identity_as
from ._hixl_options import Address
from ._proof_table import PROOF_BYTES

_VERSION = 1
NUM_SLOTS = 256  # links at a time
TABLE_BYTES = NUM_SLOTS * PROOF_BYTES
TABLE_MODEL_ID = 0
"""The model id that the table of proofs is registered under; regions have higher ones."""

Uint63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """An end as the vendor knows it. `port` is 0 if it does not listen."""

    version: int
    cluster_id: Uint63
    host: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+\.\d+\.\d+$", max_length=15)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """A region: by the size of the blocks, the model id that it is registered under."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    models: Annotated[dict[Annotated[int, msgspec.Meta(ge=1, le=1 << 20)], Uint63], msgspec.Meta(max_length=21)]


def make_identity(cluster_id: int, address: Address, listens: bool) -> bytes:
    return msgspec.msgpack.encode(Identity(_VERSION, cluster_id, address.host, address.port if listens else 0))


def decode_identity(data: bytes) -> Identity:
    """Raises ProtocolError for garbage, Unreachable if the other end is of another kind."""
    identity = decode_identity_as(Identity, data, "cann")
    if identity.version != _VERSION:
        raise Unreachable(f"the peer's cann backend speaks version {identity.version}, this one {_VERSION}")
    return identity


def decode_descriptor(data: bytes, region_id: int, size_bytes: int) -> Descriptor:
    """Raises Unreachable for garbage."""
    return decode_descriptor_as(Descriptor, data, region_id, size_bytes)


def prove(token: bytes, cluster_id: int) -> bytes:
    """What the end with that id shows the other end of a link."""
    return hmac.digest(token, b"datadist cann" + cluster_id.to_bytes(8, "little"), "sha256")


def shows(table: bytes, proof: bytes) -> bool:
    """Whether `proof` is in a slot of a table."""
    return any(hmac.compare_digest(table[at : at + PROOF_BYTES], proof) for at in range(0, len(table), PROOF_BYTES))
