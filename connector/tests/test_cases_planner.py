# SPDX-License-Identifier: Apache-2.0
"""Plans between engines of different parallelism, block size and layout, against a naive gather (B31, B32, B33).

Every (layer, head, token, element) is a number of its own. An engine is its ranks' memories; D's ranks plan from what
P's ranks say of themselves, in an order that says nothing, and must end up with exactly what a gather by layer name,
head number and token position gives.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from vllm_datadist.worker.kv_layout import HeadShare
from vllm_datadist.worker.topology import (
    HeadSource,
    LayerDescription,
    LayerPlan,
    PlanError,
    check_layers,
    choose_sources,
    plan_layer,
)

CONTENT = 2
LAYERS = ("layers.0", "layers.1", "layers.10")
MAX_HEADS, MAX_TOKENS = 8, 256
Memory = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Of an engine."""

    tp_size: int
    block_tokens: int
    heads_first: bool
    total_heads: int = 4


class Rank:
    """One worker: its descriptions and the memory of each layer. Blocks are handed out in a shuffled order."""

    def __init__(self, shape: Shape, rank: int, num_tokens: int, seed: int) -> None:
        self.shape = shape
        num_heads = max(1, shape.total_heads // shape.tp_size)
        self.first_head = HeadShare(rank, shape.tp_size, shape.total_heads).first_head(num_heads)
        self.num_heads = num_heads
        num_blocks = -(-num_tokens // shape.block_tokens) + 3
        self.table: list[int | None] = random.Random(seed).sample(range(1, num_blocks), num_blocks - 3)
        heads, tokens = num_heads, shape.block_tokens
        strides = (tokens * CONTENT, CONTENT) if shape.heads_first else (CONTENT, heads * CONTENT)
        self.layers = [
            LayerDescription(
                name, num_blocks, tokens, heads * tokens * CONTENT, self.first_head, heads, *strides, CONTENT
            )
            for name in LAYERS
        ]
        self.memory = {name: np.full(num_blocks * heads * tokens * CONTENT, -2, np.int64) for name in LAYERS}

    def view(self, name: str) -> Memory:
        """[block, head, token, element] of a layer, whatever the order in memory."""
        heads, tokens = self.num_heads, self.shape.block_tokens
        if self.shape.heads_first:
            return self.memory[name].reshape(-1, heads, tokens, CONTENT)
        return self.memory[name].reshape(-1, tokens, heads, CONTENT).transpose(0, 2, 1, 3)

    def fill(self, num_tokens: int) -> None:
        for name, head, token in itertools.product(LAYERS, range(self.num_heads), range(num_tokens)):
            block, within = self.table[token // self.shape.block_tokens], token % self.shape.block_tokens
            self.view(name)[block, head, within] = number(name, self.first_head + head, token)


def number(name: str, head: int, token: int) -> Memory:
    return np.arange(CONTENT) + CONTENT * (token + MAX_TOKENS * (head + MAX_HEADS * LAYERS.index(name)))


def engine(shape: Shape, num_tokens: int, seed: int) -> list[Rank]:
    """All ranks of an engine have the same block table."""
    return [Rank(shape, rank, num_tokens, seed) for rank in range(shape.tp_size)]


def run(plan: LayerPlan, source: Memory, source_bytes: int, target: Memory, target_bytes: int) -> None:
    """Do what a transfer of the plan does."""
    for part in plan.parts:
        for from_block, to_block in zip(part.source_blocks, part.target_blocks, strict=True):
            for piece in part.slices:
                start = to_block * target_bytes + piece.target_offset
                begin = from_block * source_bytes + piece.source_offset
                assert (target[start : start + piece.num_bytes] == -2).all(), "written twice"
                target[start : start + piece.num_bytes] = source[begin : begin + piece.num_bytes]


def load(ps: list[Rank], d: Rank, rank: int, first: int, end: int) -> None:
    said = [(p, layer) for p in ps for layer in p.layers]
    random.Random(rank).shuffle(said)
    for layer in d.layers:
        chosen = choose_sources(layer, [theirs for _, theirs in said], spread=rank)
        for wanted in chosen:
            p, theirs = said[wanted.index]
            plan = plan_layer(theirs, layer, p.table, d.table, first, end, wanted)
            run(plan, p.memory[layer.layer_name], theirs.block_bytes, d.memory[layer.layer_name], layer.block_bytes)


def check(d: Rank, first: int, end: int) -> None:
    """Exactly the asked tokens are there, and no block is touched that has none of them."""
    size = d.shape.block_tokens
    for name in LAYERS:
        view = d.view(name)
        for head, token in itertools.product(range(d.num_heads), range(first, end)):
            got = view[d.table[token // size], head, token % size]
            assert (got == number(name, d.first_head + head, token)).all(), (name, head, token, got)
        loaded = {d.table[token // size] for token in range(first, end)}
        others = [block for block in range(len(view)) if block not in loaded]
        assert (view[others] == -2).all(), name


TP_SIZES = [(1, 1), (2, 8), (8, 2), (1, 2), (2, 1), (4, 8), (8, 8)]
BLOCK_SIZES = [(16, 16), (16, 128), (128, 16), (32, 64), (64, 32), (4, 6)]


@pytest.mark.parametrize("tp_sizes", TP_SIZES, ids=str)
def test_b31_b32_any_cut_of_heads_reproduces_the_gather(tp_sizes: tuple[int, int]) -> None:
    """4 KV heads: TP 8 means that two ranks hold each of them."""
    for p_first, d_first in itertools.product([True, False], repeat=2):
        ps = engine(Shape(tp_sizes[0], 16, p_first), 41, seed=1)
        ds = engine(Shape(tp_sizes[1], 16, d_first), 41, seed=2)
        for p in ps:
            p.fill(41)
        for rank, d in enumerate(ds):
            load(ps, d, rank, 16, 41)
            check(d, 16, 41)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES, ids=str)
def test_b33_blocks_of_other_sizes_reproduce_the_gather(block_sizes: tuple[int, int]) -> None:
    """The last block ragged, and a prefix that D has: at, before and behind block boundaries of either end."""
    end = 141
    for p_first, d_first in itertools.product([True, False], repeat=2):
        [p] = engine(Shape(1, block_sizes[0], p_first, total_heads=2), end, seed=3)
        p.fill(end)
        for first in (0, 1, block_sizes[1], end - 1):
            [d] = engine(Shape(1, block_sizes[1], d_first, total_heads=2), end, seed=4)
            load([p], d, 0, first, end)
            check(d, first, end)


def test_b31_b33_at_once_and_with_one_head_for_all_ranks() -> None:
    for total_heads, p_tp, d_tp in [(4, 2, 8), (4, 8, 2), (1, 2, 4)]:
        ps = engine(Shape(p_tp, 32, True, total_heads), 70, seed=5)
        ds = engine(Shape(d_tp, 64, False, total_heads), 70, seed=6)
        for p in ps:
            p.fill(70)
        for rank, d in enumerate(ds):
            load(ps, d, rank, 0, 70)
            check(d, 0, 70)


def test_b31_ranks_with_the_same_heads_ask_different_holders() -> None:
    sources = [rank.layers[0] for rank in engine(Shape(8, 16, True), 16, seed=0)]
    chosen = [choose_sources(layer, sources, spread=rank) for rank, layer in enumerate(sources)]
    assert chosen == [(HeadSource(rank, rank // 2, 1),) for rank in range(8)]


def test_b31_heads_that_nobody_holds_are_named_with_both_values() -> None:
    [_, second] = engine(Shape(2, 16, True), 16, seed=0)
    [whole] = engine(Shape(1, 16, True), 16, seed=0)
    with pytest.raises(PlanError, match=r"heads are 0\.\.3 here and 2\.\.3 at the peer: nobody there holds head 0"):
        choose_sources(whole.layers[0], [second.layers[0]])


def test_b32_a_layer_that_nobody_holds_is_named_with_what_there_is() -> None:
    [rank] = engine(Shape(1, 16, True), 16, seed=0)
    with pytest.raises(PlanError, match=r"layer_name is layers\.0 here; the peer has layers\.1 \.\. layers\.10"):
        choose_sources(rank.layers[0], rank.layers[1:])
    with pytest.raises(PlanError, match="the peer has no layers"):
        choose_sources(rank.layers[0], [])


@pytest.mark.parametrize(("field", "value"), [("layer_name", "layers.1"), ("content_bytes", 4)])
def test_b35_what_no_plan_can_pair_is_refused_with_field_and_both_values(field: str, value: object) -> None:
    [rank] = engine(Shape(1, 16, True), 16, seed=0)
    ours = rank.layers[0]
    theirs = msgspec.structs.replace(ours, **{field: value})
    with pytest.raises(PlanError) as caught:
        plan_layer(theirs, ours, [1], [1], 0, 16)
    assert f"{field} is {getattr(ours, field)} here and {value} at the peer" in str(caught.value)


def test_b33_one_transfer_cannot_pair_blocks_of_two_sizes_and_says_so() -> None:
    """What runs today moves one kind of piece per transfer, so the link is refused by the same check."""
    [p], [d] = engine(Shape(1, 16, True), 16, seed=0), engine(Shape(1, 128, True), 16, seed=0)
    with pytest.raises(PlanError, match="block_tokens is 128 here and 16 at the peer"):
        check_layers(p.layers[0], d.layers[0])


def test_b33_a_block_that_the_source_lacks_is_named_by_its_tokens() -> None:
    [p], [d] = engine(Shape(1, 16, True), 40, seed=0), engine(Shape(1, 128, True), 40, seed=0)
    with pytest.raises(PlanError, match=r"tokens 32\.\.47: the target has block \d+ for them, the source has none"):
        plan_layer(p.layers[0], d.layers[0], p.table[:2], d.table, 0, 40)
