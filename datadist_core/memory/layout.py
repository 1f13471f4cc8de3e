# SPDX-License-Identifier: Apache-2.0
"""How the tensors of one cache lie in memory, its owner's or a peer's: a grid per tensor, and what its items are.

A blocks cache has the blocks as items. A contiguous cache has *batch entries*: what `tensor[i]` is along the batch
dimension. With the batch dimension in front an entry is one item; with `num_outer` indices before it, an entry is that
many items, one in each outer index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ParamInvalid
from .grid import Grid


@dataclass(frozen=True, slots=True)
class Division:
    """How one tensor of a shape divides into items, and what a batch entry consists of.

    Attributes:
        batch_size: batch entries of a contiguous cache; 1 for a blocks cache.
        num_outer: items that make up one batch entry.
    """

    item_bytes: int
    num_items: int
    batch_size: int
    num_outer: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of one batch entry."""
        return self.num_outer * self.item_bytes

    def entry_items(self, batch_index: int) -> npt.NDArray[np.int64]:
        """The items of one batch entry, in order."""
        return np.arange(self.num_outer, dtype=np.int64) * self.batch_size + batch_index


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`grids[t]` is tensor t; all divide alike.

    Attributes:
        data_type: name of the element type; equal names mean equal bytes.
    """

    grids: tuple[Grid, ...]
    is_blocks: bool
    division: Division
    data_type: str

    @property
    def item_bytes(self) -> int:
        return self.division.item_bytes

    @property
    def batch_size(self) -> int:
        return self.division.batch_size

    @property
    def entry_bytes(self) -> int:
        """Bytes of one batch entry of one tensor."""
        return self.division.entry_bytes

    def entry_as_blocks(self, tensor: int, batch_index: int, block_bytes: int) -> Grid:
        """One batch entry of one tensor as consecutive blocks; what does not fill a block at its end is left out."""
        if self.division.num_outer != 1:
            raise ParamInvalid(
                "a cache with dimensions before batch_dim_index has no contiguous entries to cut to blocks"
            )
        num_blocks = self.entry_bytes // block_bytes
        if num_blocks == 0:
            raise ParamInvalid(f"a batch entry of {self.entry_bytes} bytes holds no whole block of {block_bytes} bytes")
        return self.grids[tensor].cut(batch_index * self.entry_bytes, block_bytes, num_blocks)


def divide(shape: Sequence[int], element_bytes: int, batch_dim_index: int, is_blocks: bool) -> Division:
    """Blocks are along dimension 0; batch entries along `batch_dim_index`."""
    axis = 0 if is_blocks else batch_dim_index
    num_outer = math.prod(shape[:axis])
    item_bytes = math.prod(shape[axis + 1 :]) * element_bytes
    batch_size = 1 if is_blocks else shape[axis]
    return Division(item_bytes, num_outer * shape[axis], batch_size, num_outer)
