# SPDX-License-Identifier: Apache-2.0
"""From heads that two workers both hold to transfers of the core: which slices of which tensors' pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .ranges import PageWindow, Ranges, joined, layer_ranges
from .topology import CacheDescription, Held, PlanError

#: Of one copy. More are more copies: a question to a peer has its limits.
MAX_SLICES = 1024
#: Of one plan. What differs in more places is refused: it would take minutes to move, and to plan.
MAX_PLAN_SLICES = 1 << 18


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """Within every paired page: `num_bytes` from `source_offset` of the source's page to `target_offset`."""

    target_offset: int
    source_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One transfer of the core: the same slices of the paired pages, from each source tensor to its target tensor.

    Attributes:
        source_model_id, target_model_id: the caches.
        source_tensors, target_tensors: equally long.
        slices: None = whole pages.
        layer_names: whose bytes these are. In a plan by layer the i-th is that of the i-th tensors.
    """

    source_model_id: int
    target_model_id: int
    source_tensors: range
    target_tensors: range
    slices: tuple[BlockSlice, ...] | None
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Heads that the target has from the source, where both hold them."""

    source: Held
    target: Held
    heads: range


@dataclass(frozen=True, slots=True)
class _Lane:
    """Between these tensors bytes are copied; and of which layer, where layers are kept apart."""

    target_tensor: int
    source_tensor: int
    layer_name: str | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one page of each end; `offset`: of the first of them in the period of both."""

    offset: int
    num_tokens: int


def copies_of(shares: Sequence[Share], offset: int, num_tokens: int, by_layer: bool) -> Iterator[BlockCopy]:
    """Of one pair of caches: tensors with the same slices, one behind the other at both ends, are one copy."""
    piece = _Piece(offset, num_tokens)
    lanes: defaultdict[_Lane, list[Share]] = defaultdict(list)
    for share in shares:
        name = share.target.layer.layer_name if by_layer else None
        lanes[_Lane(share.target.layer.tensor, share.source.layer.tensor, name)].append(share)
    source, target = shares[0].source.cache, shares[0].target.cache
    # One by one, as they are joined: what is not joined is counted before the next one is made.
    made = (_lane_copy(source, target, lane, some, piece) for lane, some in sorted(lanes.items(), key=_order))
    for copy in _joined(made, by_layer):
        yield from _within_limits(copy)


def _lane_copy(
    source: CacheDescription, target: CacheDescription, lane: _Lane, shares: Sequence[Share], piece: _Piece
) -> BlockCopy:
    slices: tuple[BlockSlice, ...] | None = _slices(shares, piece)
    if slices == (BlockSlice(0, 0, target.page_bytes),) and source.page_bytes == target.page_bytes:
        slices = None
    return BlockCopy(
        source.model_id,
        target.model_id,
        range(lane.source_tensor, lane.source_tensor + 1),
        range(lane.target_tensor, lane.target_tensor + 1),
        slices,
        _names(shares),
    )


def _names(shares: Sequence[Share]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(share.target.layer.layer_name for share in shares))


def _order(item: tuple[_Lane, Sequence[Share]]) -> tuple[int, int, tuple[str, ...]]:
    lane, shares = item
    return lane.target_tensor, lane.source_tensor, _names(shares)


def _joined(copies: Iterable[BlockCopy], by_layer: bool) -> Iterator[BlockCopy]:
    last: BlockCopy | None = None
    for copy in copies:
        if last is not None and _continues(last, copy):
            names = (*last.layer_names, *copy.layer_names)
            last = replace(
                last,
                source_tensors=range(last.source_tensors.start, copy.source_tensors.stop),
                target_tensors=range(last.target_tensors.start, copy.target_tensors.stop),
                layer_names=names if by_layer else tuple(dict.fromkeys(names)),
            )
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _continues(last: BlockCopy, copy: BlockCopy) -> bool:
    return (
        copy.source_tensors.start == last.source_tensors.stop
        and copy.target_tensors.start == last.target_tensors.stop
        and copy.slices == last.slices
    )


def _within_limits(copy: BlockCopy) -> Iterator[BlockCopy]:
    if copy.slices is None or len(copy.slices) <= MAX_SLICES:
        yield copy
        return
    for first in range(0, len(copy.slices), MAX_SLICES):
        yield replace(copy, slices=copy.slices[first : first + MAX_SLICES])


def _slices(shares: Sequence[Share], piece: _Piece) -> tuple[BlockSlice, ...]:
    """The byte ranges of one pair of pages."""
    ranges = joined([_ranges(share, piece) for share in shares])
    if len(ranges.sizes) > MAX_PLAN_SLICES:
        check_num_slices(len(ranges.sizes), shares[0])
    return _slices_of(ranges.target.tobytes(), ranges.source.tobytes(), ranges.sizes.tobytes())


@lru_cache(maxsize=1)
def _slices_of(target: bytes, source: bytes, sizes: bytes) -> tuple[BlockSlice, ...]:
    """Of three arrays of 64 bit numbers. Most layers have the slices of the one before, and then share them."""
    columns = (np.frombuffer(column, dtype=np.int64).tolist() for column in (target, source, sizes))
    return tuple(map(BlockSlice, *columns))


def check_num_slices(num_slices: int, share: Share) -> None:
    if num_slices > MAX_PLAN_SLICES:
        raise PlanError(
            f"layer {share.target.layer.layer_name}: its layout here ({_layout(share.target)}) and at the peer "
            f"({_layout(share.source)}) differ in more than {MAX_PLAN_SLICES} places"
        )


def _layout(held: Held) -> str:
    layer = held.layer
    return f"block_tokens {held.cache.block_tokens}, {layer.num_heads} heads, strips {layer.strips[:2]}"


def _ranges(share: Share, piece: _Piece) -> Ranges:
    theirs, mine = share.source, share.target
    source = PageWindow(piece.offset % theirs.cache.page_tokens, theirs.cache.page_tokens)
    target = PageWindow(piece.offset % mine.cache.page_tokens, mine.cache.page_tokens)
    return layer_ranges(theirs.layer, mine.layer, share.heads, source, target, piece.num_tokens)
