# SPDX-License-Identifier: Apache-2.0
"""The byte ranges of one layer within a pair of pages: the same content, wherever either end keeps it.

Every (head, token, piece of content) has an offset in the page at both ends; sorted by the target's, those that are
neighbours at both ends are one range. That is the whole of it, for any layout, cut and kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from .topology import LayerDescription, PlanError, Strip

Offsets = npt.NDArray[np.int64]
#: Of one page of one layer, before neighbours are made one. Beyond it the cut is too fine to be of use.
MAX_RANGES = 1 << 22
#: Results remembered. Those of the layers of a cache come one after the other.
_NUM_KNOWN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Bytes that move within one pair of pages: `sizes` from `source` to `target`, in the target's order."""

    source: Offsets
    target: Offsets
    sizes: Offsets

    def merged(self) -> Ranges:
        """Neighbours at both ends made one."""
        order = np.argsort(self.target, kind="stable")
        source, target, sizes = self.source[order], self.target[order], self.sizes[order]
        goes_on = (np.diff(source) == sizes[:-1]) & (np.diff(target) == sizes[:-1])
        starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1)).astype(np.int64)
        return Ranges(source[starts], target[starts], np.add.reduceat(sizes, starts))


def joined(parts: Sequence[Ranges]) -> Ranges:
    """All of them, neighbours made one."""
    return Ranges(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    ).merged()


@dataclass(frozen=True, slots=True)
class PageWindow:
    """Tokens `first_token` .. of a page, as one end sees them."""

    first_token: int
    page_tokens: int


def _nameless(layer: LayerDescription) -> LayerDescription:
    return msgspec.structs.replace(layer, layer_name="", tensor=0, offset_bytes=0)


def layer_ranges(
    theirs: LayerDescription,
    mine: LayerDescription,
    heads: range,
    source: PageWindow,
    target: PageWindow,
    num_tokens: int,
) -> Ranges:
    """From pages of `theirs` to pages of `mine`: these heads, `num_tokens` tokens from where each window begins."""
    # All layers of a cache are alike, but for their names and places.
    found = _nameless_ranges(_nameless(theirs), _nameless(mine), heads, source, target, num_tokens)
    return Ranges(found.source + theirs.offset_bytes, found.target + mine.offset_bytes, found.sizes)


@lru_cache(maxsize=_NUM_KNOWN)
def _nameless_ranges(
    theirs: LayerDescription,
    mine: LayerDescription,
    heads: range,
    source: PageWindow,
    target: PageWindow,
    num_tokens: int,
) -> Ranges:
    if mine.packing:
        return _packed_ranges(theirs, mine, heads, target)
    cells = _cells(theirs.strips, mine.strips)
    if len(heads) * num_tokens * len(cells.sizes) > MAX_RANGES:
        raise PlanError(f"{len(heads)} heads of {num_tokens} tokens in {len(cells.sizes)} parts are too many to move")
    from_them = _offsets(theirs, heads, source.first_token, num_tokens, cells.source, cells.source_step)
    to_us = _offsets(mine, heads, target.first_token, num_tokens, cells.target, cells.target_step)
    return Ranges(from_them, to_us, np.tile(cells.sizes, len(heads) * num_tokens)).merged()


def _packed_ranges(theirs: LayerDescription, mine: LayerDescription, heads: range, page: PageWindow) -> Ranges:
    """Heads of whole pages."""
    size = page.page_tokens * mine.content_bytes
    source, target = _head_offsets(theirs, heads), _head_offsets(mine, heads)
    return Ranges(source, target, np.full(len(heads), size, dtype=np.int64)).merged()


def _offsets(
    layer: LayerDescription, heads: range, first_token: int, num_tokens: int, cells: Offsets, steps: Offsets
) -> Offsets:
    """Offset in a page of every (head, token, cell)."""
    tokens = np.arange(num_tokens, dtype=np.int64) + first_token
    in_head = cells[None, :] + tokens[:, None] * steps[None, :]
    return (_head_offsets(layer, heads)[:, None, None] + in_head[None, :, :]).ravel()


def _head_offsets(layer: LayerDescription, heads: range) -> Offsets:
    return (np.array(heads, dtype=np.int64) - layer.first_head) * layer.head_stride_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """One head of one token, cut wherever an item of either end begins. Steps: to the same cell of the next token."""

    source: Offsets
    source_step: Offsets
    target: Offsets
    target_step: Offsets
    sizes: Offsets


def _cells(source: tuple[Strip, ...], target: tuple[Strip, ...]) -> _Cells:
    of_source, of_target = _items(source), _items(target)
    total = sum(strip.count * strip.content_bytes for strip in target)
    starts = np.union1d(of_source.starts, of_target.starts)
    sizes = np.diff(np.concatenate((starts, [total])))
    return _Cells(*of_source.at(starts), *of_target.at(starts), sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """The items of a head of a token in the order of their content: item i is bytes `starts[i]` and following of it."""

    starts: Offsets
    offsets: Offsets
    steps: Offsets

    def at(self, starts: Offsets) -> tuple[Offsets, Offsets]:
        """Where these bytes of the content lie, and the steps to the next token's."""
        index = np.searchsorted(self.starts, starts, side="right") - 1
        return self.offsets[index] + (starts - self.starts[index]), self.steps[index]


def _items(strips: tuple[Strip, ...]) -> _Items:
    sizes = np.concatenate([np.full(strip.count, strip.content_bytes, dtype=np.int64) for strip in strips])
    offsets = [strip.offset_bytes + np.arange(strip.count, dtype=np.int64) * strip.stride_bytes for strip in strips]
    steps = [np.full(strip.count, strip.token_stride_bytes, dtype=np.int64) for strip in strips]
    return _Items(np.cumsum(sizes) - sizes, np.concatenate(offsets), np.concatenate(steps))
