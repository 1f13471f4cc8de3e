# SPDX-License-Identifier: Apache-2.0
"""Which bytes of P's blocks belong where in D's: pure planning from two descriptions of the same layer.

A block of a layer holds (head, token, content). Both ends say which heads they hold and how far apart heads and
tokens lie; the planner pairs blocks by token position and heads by number, never by index or count. What it cannot
pair it refuses, naming the field and both values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
class LayerPlan:
    """source_blocks[i] -> target_blocks[i], the slices of each. `first_head`, `num_heads`: what it covers."""

    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    slices: tuple[BlockSlice, ...]
    first_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks paired by token position."""

    source: tuple[int, ...]
    target: tuple[int, ...]


def plan_layer(
    source: LayerDescription,
    target: LayerDescription,
    source_table: Sequence[int | None],
    target_table: Sequence[int | None],
    first_token: int,
    end_token: int,
) -> LayerPlan:
    """Plan tokens first_token..end_token-1 of one layer for the heads that both ends hold.

    Args:
        source_table, target_table: block ids by position // block size; None = no block there.

    Raises:
        PlanError: the descriptions do not fit, or the source lacks a block that the target has.
    """
    check_layers(source, target)
    pairs = pair_blocks(source_table, target_table, target.block_tokens, first_token, end_token)
    first_head, num_heads = shared_heads(source, target)
    return LayerPlan(pairs.source, pairs.target, block_slices(source, target), first_head, num_heads)


def check_layers(source: LayerDescription, target: LayerDescription) -> None:
    """Raise PlanError unless the two describe the same layer in shapes that can be paired."""
    for name in ("layer_name", "block_tokens", "content_bytes"):
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise PlanError(f"layer {target.layer_name}: {name} is {ours} here and {theirs} at the peer")
    if shared_heads(source, target)[1] < 1:
        raise PlanError(
            f"layer {target.layer_name}: heads are {_heads(target)} here and {_heads(source)} at the peer: none shared"
        )


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
            raise PlanError(
                f"tokens {position * block_tokens}..{(position + 1) * block_tokens - 1}: the target has block "
                f"{wanted} for them, the source has none"
            )
        source.append(found)
        target.append(wanted)
    return BlockPairs(tuple(source), tuple(target))


@lru_cache(maxsize=4096)
def block_slices(source: LayerDescription, target: LayerDescription) -> tuple[BlockSlice, ...]:
    """The byte ranges of one block for the shared heads, neighbours merged; one slice if all of a block moves."""
    first, num_heads = shared_heads(source, target)
    source_offsets = _offsets(source, first - source.first_head, num_heads)
    target_offsets = _offsets(target, first - target.first_head, num_heads)
    order = np.argsort(target_offsets, kind="stable")
    return _merge(source_offsets[order], target_offsets[order], target.content_bytes)


def moves_whole_blocks(slices: tuple[BlockSlice, ...], source: LayerDescription, target: LayerDescription) -> bool:
    return slices == (BlockSlice(0, 0, target.block_bytes),) and source.block_bytes == target.block_bytes


def _offsets(layer: LayerDescription, first_head: int, num_heads: int) -> npt.NDArray[np.int64]:
    """Offset in a block of every (head, token), heads outermost."""
    heads = (np.arange(num_heads, dtype=np.int64) + first_head) * layer.head_stride_bytes
    tokens = np.arange(layer.block_tokens, dtype=np.int64) * layer.token_stride_bytes
    return (heads[:, None] + tokens[None, :]).ravel()


def _merge(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], size: int) -> tuple[BlockSlice, ...]:
    breaks = np.flatnonzero((np.diff(source) != size) | (np.diff(target) != size)) + 1
    starts = np.concatenate(([0], breaks)).astype(np.int64)
    counts = np.diff(np.concatenate((starts, [len(source)])))
    return tuple(
        BlockSlice(int(target[start]), int(source[start]), int(count) * size)
        for start, count in zip(starts, counts, strict=True)
    )


def _at(table: Sequence[int | None], position: int) -> int | None:
    return table[position] if position < len(table) else None


def _heads(layer: LayerDescription) -> str:
    return f"{layer.first_head}..{layer.first_head + layer.num_heads - 1}"
