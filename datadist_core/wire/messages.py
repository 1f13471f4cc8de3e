# SPDX-License-Identifier: Apache-2.0
"""Every control message, each a frozen msgspec Struct, encoded as one tagged MessagePack union.

Nothing here can carry an object, only data: a peer that sends anything else is refused by the decoder. Data does
not travel on the control connection.
"""

from __future__ import annotations

import msgspec

#: Raised whenever an old peer could misread a new one. Both ends must agree exactly.
PROTOCOL_VERSION = 3


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages."""


class GridInfo(msgspec.Struct, frozen=True, array_like=True):
    """A grid as its owner describes it; fields as in `memory.Grid`."""

    grid_id: int
    region_id: int
    offset_bytes: int
    stride_bytes: int
    item_bytes: int
    num_items: int


class RegionInfo(msgspec.Struct, frozen=True):
    """A region as its owner describes it: per backend, what `Backend.attach` needs there."""

    region_id: int
    size_bytes: int
    descriptors: dict[str, bytes]


class BackendOffer(msgspec.Struct, frozen=True):
    """A backend that the sender has open, with its identity for `Backend.connect`."""

    name: str
    identity: bytes


class CacheInfo(msgspec.Struct, frozen=True):
    """A cache that the owner lets us use. One grid per tensor.

    `shape`, `data_type`, `num_tensors` are those of the owner's CacheDesc; `batch_index` is the batch entry that a
    CacheKey stands for (0 for blocks caches).
    """

    cache_id: int
    is_blocks_cache: bool
    num_tensors: int
    shape: list[int]
    data_type: str
    batch_dim_index: int
    grids: list[GridInfo]
    regions: list[RegionInfo]
    batch_index: int = 0


class Beacon(msgspec.Struct, frozen=True):
    """A few bytes of registered memory that hold `value`: reading them proves that a data path works."""

    grid: GridInfo
    region: RegionInfo
    value: bytes


class Process(msgspec.Struct, frozen=True):
    """Which process an end is: see `link.process`. `door`: the address of its Unix socket."""

    door: bytes
    started: int


class Challenge(Message, frozen=True, tag=True, omit_defaults=True):
    """First message of a dialling end that has a shared secret; `nonce`: 32 random bytes. See `link.authentication`."""

    protocol_version: int
    cluster_id: int
    expected_cluster_id: int
    nonce: bytes


class CounterChallenge(Message, frozen=True, tag=True, omit_defaults=True):
    """The listening end's answer to Challenge."""

    nonce: bytes


class Proof(Message, frozen=True, tag=True, omit_defaults=True):
    """That the sender knows the secret: HMAC over both challenges. First the dialling end's, then the other one's."""

    mac: bytes


class Hello(Message, frozen=True, tag=True, omit_defaults=True):
    """First message of the dialling end, or the first after the proofs."""

    protocol_version: int
    software: str
    cluster_id: int
    expected_cluster_id: int
    incarnation: bytes
    role: int
    v2: bool
    link_token: bytes
    offers: list[BackendOffer]
    beacon: Beacon
    heartbeat_s: float
    process: Process | None = None


class Welcome(Message, frozen=True, tag=True, omit_defaults=True):
    """The listening end agrees to try."""

    protocol_version: int
    software: str
    cluster_id: int
    incarnation: bytes
    role: int
    v2: bool
    offers: list[BackendOffer]
    beacon: Beacon
    heartbeat_s: float
    process: Process | None = None


class Refuse(Message, frozen=True, tag=True, omit_defaults=True):
    """The link is not made; the text is for the user.

    `cluster_id`: of the sender, to who has asked for another one.
    """

    status: int
    message: str
    cluster_id: int | None = None


class Probed(Message, frozen=True, tag=True, omit_defaults=True):
    """Which offered backends the sender could really use with us, best first, and why not the others."""

    usable: list[str]
    rejected: dict[str, str]


class Ready(Message, frozen=True, tag=True, omit_defaults=True):
    """The dialling end has seen both results: these backends are the link's, best first."""

    backends: list[str]


class Established(Message, frozen=True, tag=True, omit_defaults=True):
    """The listening end has the link in its table. From here on it is up at both ends."""


class Ping(Message, frozen=True, tag=True, omit_defaults=True):
    number: int = 0


class Pong(Message, frozen=True, tag=True, omit_defaults=True):
    number: int = 0


class Unlink(Message, frozen=True, tag=True, omit_defaults=True):
    """The sender has stopped using the link and asks us to clean up our end."""

    reason: str = ""


class Unlinked(Message, frozen=True, tag=True, omit_defaults=True):
    """Our end is clean."""


class Lookup(Message, frozen=True, tag=True, omit_defaults=True):
    """Ask the owner for a cache. `kind`: "blocks" (cluster, model), "cache" (req or prefix), "id" (cache id, index)."""

    request_id: int
    kind: str
    cluster_id: int
    model_id: int = 0
    req_id: int = 0
    prefix_id: int = 0
    cache_id: int = 0
    batch_index: int = 0


class Found(Message, frozen=True, tag=True, omit_defaults=True):
    request_id: int
    cache: CacheInfo


class Locate(Message, frozen=True, tag=True, omit_defaults=True):
    """Ask the owner which of its caches these addresses of its memory lie in."""

    request_id: int
    addresses: list[int]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one address lies: byte `offset_bytes` of a tensor of a cache."""

    cache_id: int
    tensor: int
    offset_bytes: int


class Located(Message, frozen=True, tag=True, omit_defaults=True):
    """One place per address, in order, and the caches they name."""

    request_id: int
    places: list[Place]
    caches: list[CacheInfo]


class Consume(Message, frozen=True, tag=True, omit_defaults=True):
    """We have pulled what this key stands for; the owner drops the key. Answered with Reply, also if it is unknown.

    `cache_id` is what was pulled: a key that names another cache by now is kept.
    """

    request_id: int
    cache_id: int
    model_id: int
    req_id: int
    prefix_id: int


class Revoke(Message, frozen=True, tag=True, omit_defaults=True):
    """A cache is about to be freed: forget it, let transfers on it end, then answer with Revoked."""

    request_id: int
    cache_id: int


class SumPart(msgspec.Struct, frozen=True, array_like=True):
    """`num_bytes` from `offset_bytes` of every item."""

    offset_bytes: int
    num_bytes: int


class AskChecksums(Message, frozen=True, tag=True, omit_defaults=True):
    """Ask the owner what its memory holds: of every grid one XXH3 per `items_per_sum` items, over all parts of them.

    `grids` are divided as the asking end sees them; `items` are int64 in little-endian order. See `cache.integrity`.
    """

    request_id: int
    grids: list[GridInfo]
    items: bytes
    parts: list[SumPart]
    items_per_sum: int


class Checksums(Message, frozen=True, tag=True, omit_defaults=True):
    """Uint64 numbers in little-endian order, grid after grid."""

    request_id: int
    sums: bytes


class Call(Message, frozen=True, tag=True, omit_defaults=True):
    """A request to a service that the layer above registered by name."""

    request_id: int
    service: str
    body: bytes


class Reply(Message, frozen=True, tag=True, omit_defaults=True):
    """The good answer to Call (with the body), and to Revoke and Consume (empty)."""

    request_id: int
    body: bytes = b""


class Failure(Message, frozen=True, tag=True, omit_defaults=True):
    """The bad answer to any request that carries a `request_id`."""

    request_id: int
    status: int
    message: str


AnyMessage = (
    Challenge
    | CounterChallenge
    | Proof
    | Hello
    | Welcome
    | Refuse
    | Probed
    | Ready
    | Established
    | Ping
    | Pong
    | Unlink
    | Unlinked
    | Lookup
    | Found
    | Locate
    | Located
    | Consume
    | Revoke
    | AskChecksums
    | Checksums
    | Call
    | Reply
    | Failure
)
