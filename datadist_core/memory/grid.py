# SPDX-License-Identifier: Apache-2.0
"""A grid: equal items at equal distance. Every KV transfer is "items a[] of this grid to items b[] of that"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ParamInvalid


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_items` items of `item_bytes`, `stride_bytes` apart, from `offset_bytes` of one region.

    One tensor of a blocks cache is one grid whose items are the blocks. `grid_id` is unique in the process
    that owns the memory and is never used again, so that a peer with an old id is refused rather than served
    from memory that meanwhile holds something else.

    The id names the memory; how it is divided into items is the user's affair, at either end: a contiguous cache
    is read in blocks by `cut`, and whoever owns the memory checks with `recut` that a peer's cut lies in it.
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

    def cut(self, offset_bytes: int, item_bytes: int, num_items: int) -> Grid:
        """The same memory from `offset_bytes` (relative to this grid) as `num_items` neighbouring items.

        Raises:
            ParamInvalid: the bytes are not all this grid's.
        """
        start = self.offset_bytes + offset_bytes
        return self.recut(Grid(self.grid_id, self.region_id, start, item_bytes, item_bytes, num_items))

    def recut(self, claimed: Grid) -> Grid:
        """`claimed` in this grid's region. ParamInvalid unless it covers only bytes of this grid's items."""
        if claimed.division == self.division:
            return self
        if self.stride_bytes != self.item_bytes:
            raise ParamInvalid(f"grid {self.grid_id} has gaps between its items; it cannot be divided in another way")
        well_formed = claimed.num_items >= 1 and 1 <= claimed.item_bytes <= claimed.stride_bytes
        if not well_formed or claimed.offset_bytes < self.offset_bytes or claimed.end_bytes > self.end_bytes:
            raise ParamInvalid(
                f"{claimed.num_items} items of {claimed.item_bytes} bytes at {claimed.offset_bytes} do not lie in "
                f"bytes {self.offset_bytes}..{self.end_bytes} of the region, which is what grid {self.grid_id} covers"
            )
        return replace(claimed, region_id=self.region_id)

    @property
    def division(self) -> tuple[int, int, int, int]:
        """Where the items lie in the region: offset, stride, item size, number."""
        return self.offset_bytes, self.stride_bytes, self.item_bytes, self.num_items

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
