# SPDX-License-Identifier: Apache-2.0
"""Memory: regions, the grids in them, and the pool that hands ranges out."""

from .grid import Grid
from .region import Region, SharedMapping

__all__ = ["Grid", "Region", "SharedMapping"]
