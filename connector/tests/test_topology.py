# SPDX-License-Identifier: Apache-2.0
"""The planner against a naive gather: memory in which every (head, token, byte) is a number of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from vllm_datadist.worker.topology import (
    BlockSlice,
    LayerDescription,
    PlanError,
    block_slices,
    check_layers,
    moves_whole_blocks,
    pair_blocks,
    plan_layer,
)

TOTAL_HEADS = 4
CONTENT = 3
NUM_BLOCKS = 9
Memory = npt.NDArray[np.int64]


def _layer(first_head: int, num_heads: int, block_tokens: int, heads_first: bool) -> LayerDescription:
    return LayerDescription(
        layer_name="layers.0",
        num_blocks=NUM_BLOCKS,
        block_tokens=block_tokens,
        block_bytes=num_heads * block_tokens * CONTENT,
        first_head=first_head,
        num_heads=num_heads,
        head_stride_bytes=block_tokens * CONTENT if heads_first else CONTENT,
        token_stride_bytes=CONTENT if heads_first else num_heads * CONTENT,
        content_bytes=CONTENT,
    )


def _at(layer: LayerDescription, block: int, head: int, token: int) -> slice:
    """Where one (head, token) lies in a layer's memory; the definition that the planner must agree with."""
    start = block * layer.block_bytes + (head - layer.first_head) * layer.head_stride_bytes
    start += token * layer.token_stride_bytes
    return slice(start, start + layer.content_bytes)


def _filled(layer: LayerDescription, table: Sequence[int | None], num_tokens: int) -> Memory:
    """Memory of a layer that holds `num_tokens` tokens; elsewhere -1. Every value says which one it is."""
    memory = np.full(layer.num_blocks * layer.block_bytes, -1, dtype=np.int64)
    for token, head in itertools.product(range(num_tokens), _heads(layer)):
        block = table[token // layer.block_tokens]
        if block is not None:
            memory[_at(layer, block, head, token % layer.block_tokens)] = _values(head, token)
    return memory


def _values(head: int, token: int) -> Memory:
    return np.arange(CONTENT) + CONTENT * (head + TOTAL_HEADS * token)


def _heads(layer: LayerDescription) -> range:
    return range(layer.first_head, layer.first_head + layer.num_heads)


SHARES = [(0, 4), (0, 2), (2, 2), (1, 1), (3, 1)]
TABLES = [[5, 2, 7], [1, 2, 3], [8, 7, 6]]


@pytest.mark.parametrize("block_tokens", [1, 2, 4])
@pytest.mark.parametrize(("source_heads_first", "target_heads_first"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize(("source_share", "target_share"), list(itertools.product(SHARES, repeat=2)))
def test_every_plan_moves_exactly_what_a_naive_gather_moves(
    source_share: tuple[int, int],
    target_share: tuple[int, int],
    source_heads_first: bool,
    target_heads_first: bool,
    block_tokens: int,
) -> None:
    source = _layer(*source_share, block_tokens, source_heads_first)
    target = _layer(*target_share, block_tokens, target_heads_first)
    shared = sorted(set(_heads(source)) & set(_heads(target)))
    num_tokens = 3 * block_tokens
    for source_table, target_table in itertools.product(TABLES, repeat=2):
        for first, end in itertools.combinations(range(num_tokens + 1), 2):
            if not shared:
                with pytest.raises(PlanError, match="none shared"):
                    plan_layer(source, target, source_table, target_table, first, end)
                continue
            plan = plan_layer(source, target, source_table, target_table, first, end)
            assert list(range(plan.first_head, plan.first_head + plan.num_heads)) == shared
            have = _filled(source, source_table, num_tokens)
            got = np.full(target.num_blocks * target.block_bytes, -2, dtype=np.int64)
            [piece] = plan.parts
            for from_block, to_block in zip(piece.source_blocks, piece.target_blocks, strict=True):
                for part in piece.slices:
                    start = to_block * target.block_bytes + part.target_offset
                    begin = from_block * source.block_bytes + part.source_offset
                    got[start : start + part.num_bytes] = have[begin : begin + part.num_bytes]
            want = np.full_like(got, -2)
            blocks = range(first // block_tokens, -(-end // block_tokens))
            for position, head, token in itertools.product(blocks, shared, range(block_tokens)):
                where = _at(target, target_table[position], head, token)
                want[where] = _values(head, position * block_tokens + token)
            np.testing.assert_array_equal(got, want)


def test_equal_shapes_move_whole_blocks_in_one_slice() -> None:
    layer = _layer(0, 4, 32, heads_first=True)
    slices = block_slices(layer, layer)
    assert slices == (BlockSlice(0, 0, layer.block_bytes),)
    assert moves_whole_blocks(slices, layer, layer)


def test_a_head_range_of_head_major_blocks_is_one_slice() -> None:
    whole, part = _layer(0, 4, 32, heads_first=True), _layer(2, 2, 32, heads_first=True)
    slices = block_slices(whole, part)
    assert slices == (BlockSlice(0, 2 * 32 * CONTENT, 2 * 32 * CONTENT),)
    assert not moves_whole_blocks(slices, whole, part)


def test_positions_without_a_target_block_are_left_out() -> None:
    pairs = pair_blocks([None, None, 5, 6], [None, None, 8, 9], 4, 0, 16)
    assert (pairs.source, pairs.target) == ((5, 6), (8, 9))


def test_b26_only_the_missing_tail_is_paired_by_position() -> None:
    pairs = pair_blocks([11, 12, 13, 14], [21, 22, 23, 24], 4, 8, 15)
    assert (pairs.source, pairs.target) == ((13, 14), (23, 24))


def test_a_block_that_the_source_lacks_is_refused_by_its_tokens() -> None:
    with pytest.raises(PlanError, match=r"tokens 4\.\.7: the target has block 22 .* the source has none"):
        pair_blocks([11, None, 13], [21, 22, 23], 4, 0, 12)
    with pytest.raises(PlanError, match=r"tokens 4\.\.7"):
        pair_blocks([11], [21, 22], 4, 0, 8)


@pytest.mark.parametrize(("field", "value"), [("layer_name", "layers.1"), ("block_tokens", 8), ("content_bytes", 6)])
def test_what_cannot_be_paired_is_refused_with_field_and_both_values(field: str, value: object) -> None:
    ours = _layer(0, 4, 4, heads_first=True)
    theirs = msgspec.structs.replace(ours, **{field: value})
    with pytest.raises(PlanError) as caught:
        check_layers(theirs, ours)
    assert f"{field} is {getattr(ours, field)} here and {value} at the peer" in str(caught.value)
