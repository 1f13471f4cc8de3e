# SPDX-License-Identifier: Apache-2.0
"""A region: one range of this process's memory that backends may move bytes from and to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..types import Placement


@dataclass(frozen=True, slots=True)
class SharedMapping:
    """How another process on this host can map a region: a memfd and the region's offset in it.

    `fd` belongs to the pool that made it; whoever keeps it longer than the region must duplicate it.
    """

    fd: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """`size_bytes` from `address`. `owner` is kept alive for as long as the region is.

    `for_peers`: whether peers may reach any of it. If not, it is only the local side of transfers, and no backend gives
    a peer, or whatever engine serves peers, the means to touch it.
    """

    region_id: int
    address: int
    size_bytes: int
    placement: Placement
    owner: object = field(repr=False, default=None)
    mapping: SharedMapping | None = None
    for_peers: bool = True

    @property
    def end_address(self) -> int:
        return self.address + self.size_bytes

    def contains(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.end_address
