# SPDX-License-Identifier: Apache-2.0
"""The memory that a batch names, at both ends, and how backends read what a peer says of its memory and of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from ..errors import ParamInvalid, ProtocolError, Unreachable
from ..memory.region import Region
from ..transfer.plan import Batch, GridPair


class Sized(Protocol):
    """Anything that stands for a region of the peer."""

    @property
    def size_bytes(self) -> int: ...


T = TypeVar("T")
R = TypeVar("R", bound=Sized)


class AttachedRegions(Generic[R]):
    """The regions of one peer that may be used in batches, by id. Thread-safe."""

    def __init__(self, peer_id: int) -> None:
        self._peer_id = peer_id
        self._lock = threading.Lock()
        self._regions: dict[int, R] = {}

    def put(self, region_id: int, region: R) -> None:
        with self._lock:
            self._regions[region_id] = region

    def get(self, region_id: int) -> R | None:
        with self._lock:
            return self._regions.get(region_id)

    def remove(self, region_id: int) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._regions.pop(region_id, None) is not None

    def clear(self) -> None:
        with self._lock:
            self._regions.clear()

    def of(self, batch: Batch) -> dict[int, R]:
        """The regions that a batch names. Raises ParamInvalid unless its remote grids lie in them."""
        return self.of_pairs(batch.pairs)

    def of_pairs(self, pairs: Iterable[GridPair]) -> dict[int, R]:
        """The regions of the remote grids of `pairs`. Raises ParamInvalid unless the grids lie in them."""
        with self._lock:
            found: dict[int, R] = {}
            for pair in pairs:
                region_id = pair.remote.region_id
                region = self._regions.get(region_id)
                if region is None:
                    raise ParamInvalid(f"region {region_id} of peer {self._peer_id} is not attached")
                pair.remote.check_inside(region.size_bytes)
                found[region_id] = region
            return found


def local_regions(find: Callable[[int], Region], pairs: Iterable[GridPair]) -> dict[int, Region]:
    """Our own regions that a batch names, by id. Raises ParamInvalid unless its local grids lie in them."""
    found: dict[int, Region] = {}
    for pair in pairs:
        region_id = pair.local.region_id
        if region_id not in found:
            found[region_id] = find(region_id)
        pair.local.check_inside(found[region_id].size_bytes)
    return found


def decode_identity_as(kind: type[T], data: bytes, backend: str) -> T:
    """What a peer says of itself. Raises ProtocolError for garbage."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"this is not the identity of a {backend} backend: {error}") from error


def decode_descriptor_as(kind: type[R], data: bytes, region_id: int, size_bytes: int) -> R:
    """What a peer says of a region. Raises Unreachable for garbage, and if it is not of a region of that size."""
    try:
        described = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unreachable(f"the descriptor of region {region_id} is malformed: {error}") from error
    if described.size_bytes != size_bytes:
        raise Unreachable(
            f"region {region_id} is announced with {size_bytes} bytes but its descriptor says {described.size_bytes}"
        )
    return described
