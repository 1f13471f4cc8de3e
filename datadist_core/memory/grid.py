# SPDX-License-Identifier: Apache-2.0
"""A grid: equal items at equal distance. Every KV transfer is "items a[] of this grid to items b[] of that"."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ParamInvalid


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_items` items of `item_bytes`, `stride_bytes` apart, from `offset_bytes` of one region.

    One tensor of a blocks cache is one grid whose items are the blocks. `grid_id` is unique in the process
    that owns the memory and is never used again, so that a peer with an old id is refused rather than served
    from memory that meanwhile holds something else.
    """

    grid_id: int
    region_id: int
    offset_bytes: int
    stride_bytes: int
    item_bytes: int
    num_items: int

    @property
    def end_bytes(self) -> int:
        """First byte behind the last item, relative to the region."""
        return self.offset_bytes + (self.num_items - 1) * self.stride_bytes + self.item_bytes

    def check_inside(self, region_bytes: int) -> None:
        """Raise ParamInvalid unless the grid is well formed and lies in a region of `region_bytes`."""
        if self.num_items < 1 or not 1 <= self.item_bytes <= self.stride_bytes <= region_bytes:
            raise ParamInvalid(
                f"grid {self.grid_id} is malformed: num_items={self.num_items}, item_bytes={self.item_bytes}, "
                f"stride_bytes={self.stride_bytes}"
            )
        if self.offset_bytes < 0 or self.end_bytes > region_bytes:
            raise ParamInvalid(
                f"grid {self.grid_id} covers bytes {self.offset_bytes}..{self.end_bytes} of region "
                f"{self.region_id}, which has {region_bytes} bytes"
            )
