# SPDX-License-Identifier: Apache-2.0
"""Which bytes of P's blocks belong where in D's: pure planning from two descriptions of the same layer.

A block of a layer holds (head, token, content). Both ends say which heads they hold and how far apart heads and
tokens lie; the planner pairs layers by name, tokens by position and heads by number, never by index or count. What it
cannot pair it refuses, naming the field and both values.

With blocks of different sizes the tokens fall into pieces, cut at every block boundary of either end. A piece lies in
one block of each; pieces that lie alike in their blocks are one part of the plan, and each part is one transfer.
With more ranks than heads several of P's workers hold the same head: `choose_sources` takes each head from one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import msgspec
import numpy as np
import numpy.typing as npt

from datadist_core.errors import LLMException
from datadist_core.types import LLMStatusCode


class PlanError(LLMException):
    """The two ends cannot be paired. The text names the field and both values."""

    default_code = LLMStatusCode.LLM_PARAM_INVALID


class LayerDescription(msgspec.Struct, frozen=True):
    """One layer's KV cache as one worker holds it. Travels to the peer when a link is made.

    Attributes:
        num_blocks: blocks there are.
        block_tokens: tokens in a block.
        block_bytes: bytes from a block's first to its last, no gaps to the next.
        first_head: number, in the whole model, of the first KV head held here.
        num_heads: heads held here (1 for MLA, whose latent is the same on all ranks).
        head_stride_bytes, token_stride_bytes: distance of neighbouring heads and tokens in a block.
        content_bytes: bytes of one head of one token.
    """

    layer_name: str
    num_blocks: int
    block_tokens: int
    block_bytes: int
    first_head: int
    num_heads: int
    head_stride_bytes: int
    token_stride_bytes: int
    content_bytes: int


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """Within every paired block: `num_bytes` from `source_offset` of P's block to `target_offset` of D's."""

    target_offset: int
    source_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlanPart:
    """source_blocks[i] -> target_blocks[i], the slices of each."""

    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    slices: tuple[BlockSlice, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All parts together move the heads `first_head` .. `first_head + num_heads - 1`."""

    parts: tuple[PlanPart, ...]
    first_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class HeadSource:
    """These heads come from the worker at `index` of the list of P's workers."""

    index: int
    first_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """`num_tokens` tokens from `source_token` of a source block on, and from `target_token` of a target block."""

    source_token: int
    target_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks paired by token position."""

    source: tuple[int, ...]
    target: tuple[int, ...]


def choose_sources(
    target: LayerDescription, sources: Sequence[LayerDescription], spread: int = 0
) -> tuple[HeadSource, ...]:
    """From which of P's workers each of the target's heads comes: every head exactly once.

    Args:
        sources: what each of P's workers holds, in any order; descriptions of other layers are passed over.
        spread: this worker's rank: ranks that need the same heads ask different holders of them.

    Raises:
        PlanError: nobody holds the layer, or one of the heads.
    """
    holders = [i for i, source in enumerate(sources) if source.layer_name == target.layer_name]
    if not holders:
        raise PlanError(f"layer_name is {target.layer_name} here; the peer has {_names(sources)}")
    chosen: list[HeadSource] = []
    for head in range(target.first_head, target.first_head + target.num_heads):
        holding = [i for i in holders if _holds(sources[i], head)]
        if not holding:
            theirs = ", ".join(_heads(sources[i]) for i in holders)
            raise PlanError(
                f"layer {target.layer_name}: heads are {_heads(target)} here and {theirs} at the peer: "
                f"nobody there holds head {head}"
            )
        _append_head(chosen, head, holding, spread)
    return tuple(chosen)


def plan_layer(
    source: LayerDescription,
    target: LayerDescription,
    source_table: Sequence[int | None],
    target_table: Sequence[int | None],
    first_token: int,
    end_token: int,
    wanted: HeadSource | None = None,
) -> LayerPlan:
    """Plan tokens first_token..end_token-1 of one layer for the heads that both ends hold, or those `wanted` of them.

    Pieces are moved whole, so tokens next to the asked ones in the same piece come along.

    Args:
        source_table, target_table: block ids by position // block size; None = no block there.

    Raises:
        PlanError: the descriptions do not fit, or the source lacks a block that the target has.
    """
    check_pairable(source, target)
    first_head, num_heads = shared_heads(source, target)
    if wanted is not None:
        first_head, num_heads = wanted.first_head, wanted.num_heads
    pieces = _pair_pieces(source, target, source_table, target_table, range(first_token, end_token))
    parts = tuple(
        PlanPart(pairs.source, pairs.target, _piece_slices(source, target, piece, first_head, num_heads))
        for piece, pairs in pieces.items()
    )
    return LayerPlan(parts, first_head, num_heads)


def check_pairable(source: LayerDescription, target: LayerDescription) -> None:
    """Raise PlanError unless the two describe the same layer and share heads."""
    _check_equal(source, target, "layer_name", "content_bytes")
    if shared_heads(source, target)[1] < 1:
        raise PlanError(
            f"layer {target.layer_name}: heads are {_heads(target)} here and {_heads(source)} at the peer: none shared"
        )


def check_layers(source: LayerDescription, target: LayerDescription) -> None:
    """Raise PlanError unless `block_slices` can pair them: as `check_pairable`, with blocks of one size."""
    _check_equal(source, target, "layer_name", "block_tokens", "content_bytes")
    check_pairable(source, target)


def _check_equal(source: LayerDescription, target: LayerDescription, *names: str) -> None:
    for name in names:
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise PlanError(f"layer {target.layer_name}: {name} is {ours} here and {theirs} at the peer")


def shared_heads(source: LayerDescription, target: LayerDescription) -> tuple[int, int]:
    """(first head, number of heads) that both hold."""
    first = max(source.first_head, target.first_head)
    end = min(source.first_head + source.num_heads, target.first_head + target.num_heads)
    return first, max(0, end - first)


def pair_blocks(
    source_table: Sequence[int | None],
    target_table: Sequence[int | None],
    block_tokens: int,
    first_token: int,
    end_token: int,
) -> BlockPairs:
    """Pair by position. Positions where the target has no block are left out; the source must have all others."""
    source: list[int] = []
    target: list[int] = []
    for position in range(first_token // block_tokens, -(-end_token // block_tokens)):
        wanted = _at(target_table, position)
        if wanted is None:
            continue
        found = _at(source_table, position)
        if found is None:
            raise _lacking(position * block_tokens, (position + 1) * block_tokens, wanted)
        source.append(found)
        target.append(wanted)
    return BlockPairs(tuple(source), tuple(target))


def _pair_pieces(
    source: LayerDescription,
    target: LayerDescription,
    source_table: Sequence[int | None],
    target_table: Sequence[int | None],
    tokens: range,
) -> dict[_Piece, BlockPairs]:
    """The blocks to pair for each kind of piece. Positions without a target block are left out."""
    found: dict[_Piece, tuple[list[int], list[int]]] = {}
    token = tokens.start - tokens.start % _granule(source, target)
    while token < tokens.stop:
        piece = _piece_at(token, source.block_tokens, target.block_tokens)
        wanted = _at(target_table, token // target.block_tokens)
        if wanted is not None:
            block = _at(source_table, token // source.block_tokens)
            if block is None:
                raise _lacking(token, token + piece.num_tokens, wanted)
            pair = found.setdefault(piece, ([], []))
            pair[0].append(block)
            pair[1].append(wanted)
        token += piece.num_tokens
    return {piece: BlockPairs(tuple(blocks), tuple(wanted)) for piece, (blocks, wanted) in found.items()}


@lru_cache(maxsize=4096)
def block_slices(source: LayerDescription, target: LayerDescription) -> tuple[BlockSlice, ...]:
    """The byte ranges of one block for the shared heads, neighbours merged; one slice if all of a block moves.

    For blocks of one size; see `check_layers`.
    """
    first, num_heads = shared_heads(source, target)
    return _piece_slices(source, target, _Piece(0, 0, target.block_tokens), first, num_heads)


@lru_cache(maxsize=4096)
def _piece_slices(
    source: LayerDescription, target: LayerDescription, piece: _Piece, first_head: int, num_heads: int
) -> tuple[BlockSlice, ...]:
    heads = range(first_head, first_head + num_heads)
    source_offsets = _offsets(source, heads, piece.source_token, piece.num_tokens)
    target_offsets = _offsets(target, heads, piece.target_token, piece.num_tokens)
    order = np.argsort(target_offsets, kind="stable")
    return _merge(source_offsets[order], target_offsets[order], target.content_bytes)


def moves_whole_blocks(slices: tuple[BlockSlice, ...], source: LayerDescription, target: LayerDescription) -> bool:
    return slices == (BlockSlice(0, 0, target.block_bytes),) and source.block_bytes == target.block_bytes


def _granule(source: LayerDescription, target: LayerDescription) -> int:
    """Every piece begins at a multiple of it."""
    return gcd(source.block_tokens, target.block_tokens)


def _piece_at(token: int, source_tokens: int, target_tokens: int) -> _Piece:
    """The piece that token lies in, from it on."""
    in_source, in_target = token % source_tokens, token % target_tokens
    return _Piece(in_source, in_target, min(source_tokens - in_source, target_tokens - in_target))


def _offsets(layer: LayerDescription, heads: range, first_token: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Offset in a block of every (head, token), heads outermost."""
    head_offsets = (np.array(heads, dtype=np.int64) - layer.first_head) * layer.head_stride_bytes
    token_offsets = (np.arange(num_tokens, dtype=np.int64) + first_token) * layer.token_stride_bytes
    return (head_offsets[:, None] + token_offsets[None, :]).ravel()


def _merge(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], size: int) -> tuple[BlockSlice, ...]:
    breaks = np.flatnonzero((np.diff(source) != size) | (np.diff(target) != size)) + 1
    starts = np.concatenate(([0], breaks)).astype(np.int64)
    counts = np.diff(np.concatenate((starts, [len(source)])))
    return tuple(
        BlockSlice(int(target[start]), int(source[start]), int(count) * size)
        for start, count in zip(starts, counts, strict=True)
    )


def _append_head(chosen: list[HeadSource], head: int, holding: Sequence[int], spread: int) -> None:
    """With the heads before it, if their holder has this one too."""
    last = chosen[-1] if chosen else None
    if last is not None and last.index in holding:
        chosen[-1] = HeadSource(last.index, last.first_head, last.num_heads + 1)
    else:
        chosen.append(HeadSource(holding[spread % len(holding)], head, 1))


def _lacking(first_token: int, end_token: int, wanted: int) -> PlanError:
    return PlanError(
        f"tokens {first_token}..{end_token - 1}: the target has block {wanted} for them, the source has none"
    )


def _at(table: Sequence[int | None], position: int) -> int | None:
    return table[position] if position < len(table) else None


def _heads(layer: LayerDescription) -> str:
    return f"{layer.first_head}..{layer.first_head + layer.num_heads - 1}"


def _holds(layer: LayerDescription, head: int) -> bool:
    return layer.first_head <= head < layer.first_head + layer.num_heads


def _names(layers: Sequence[LayerDescription]) -> str:
    names = sorted({layer.layer_name for layer in layers})
    return f"{names[0]} .. {names[-1]}" if names else "no layers"
