# SPDX-License-Identifier: Apache-2.0
"""Engines of any shape in memory: what vLLM would hand over for them, with a number of its own in every element.

An engine is its ranks' KV caches, all made from one buffer per rank as vLLM does. `number` says what has to be where;
that is the naive gather that plans and transfers are compared with.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from vllm_datadist.description import PROTOCOL_VERSION, Description
from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import Endpoint
from vllm_datadist.worker.kv_layout import HeadShare, Interior, LocalCache, describe_caches
from vllm_datadist.worker.planner import BlockCopy, BlockPairs, PairPlan
from vllm_datadist.worker.topology import ModelLayer, Strip, first_head

#: As vLLM's KVCacheLayout: which of [layer, block, head, token, content] is outermost, and so on.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
CONTENT = 2
NOTHING = -2
#: Limits of what is counted by `number`.
MAX_HEADS, MAX_TOKENS = 16, 1024
Memory = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layers:
    """One KV cache group: these layers, by number. `total_heads`: KV heads of each; None = those of the shape."""

    numbers: tuple[int, ...]
    window: int | None = None
    total_heads: int | None = None


ALL_LAYERS = (Layers((0, 1, 2, 10)),)


@dataclass(frozen=True)
class Shape:
    """Of an engine.

    Attributes:
        block_tokens: per group, or the same for all.
        pages_per_block: pages that the attention kernel makes of a block.
        is_transposed: the kernel keeps the tokens of a head side by side, as vLLM's CPU attention does with K. Only in
            the layout LBHNC.
        stages: number of the first layer of each pipeline stage.
    """

    tp_size: int = 1
    block_tokens: int | tuple[int, ...] = 16
    layout: str = "LBHNC"
    total_heads: int = 4
    pages_per_block: int = 1
    stages: tuple[int, ...] = (0,)
    dp_rank: int = 0
    use_mla: bool = False
    groups: tuple[Layers, ...] = ALL_LAYERS
    spare_blocks: int = 3
    is_transposed: bool = False

    def tokens_of(self, group: int) -> int:
        return self.block_tokens if isinstance(self.block_tokens, int) else self.block_tokens[group]

    def heads_of(self, layer: int) -> int:
        """KV heads in the whole model of that layer."""
        return next(group.total_heads or self.total_heads for group in self.groups if layer in group.numbers)

    def places(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(len(self.stages)), range(self.tp_size))


@dataclass
class Rank:
    """One worker. `tables` are the same at all workers of an engine."""

    shape: Shape
    pp_rank: int
    tp_rank: int
    tables: list[list[int | None]]
    raw: torch.Tensor
    views: dict[str, torch.Tensor]
    caches: list[LocalCache]
    groups: list[GroupInfo]
    num_blocks: int
    endpoint: Endpoint = field(init=False)

    def __post_init__(self) -> None:
        first_layer = self.shape.stages[self.pp_rank]
        self.endpoint = Endpoint(self.pp_rank, self.tp_rank, "p", 1, self.index + 1, first_layer)

    @property
    def index(self) -> int:
        return self.pp_rank * self.shape.tp_size + self.tp_rank

    def heads(self, name: str) -> range:
        """Of that layer, here."""
        total_heads = self.shape.heads_of(layer_number(name))
        num_heads = heads_per_rank(self.shape, total_heads)
        first = first_head(num_heads, total_heads, self.tp_rank, self.shape.tp_size)
        return range(first, first + num_heads)

    @property
    def model_layers(self) -> tuple[ModelLayer, ...]:
        totals = {number: self.shape.heads_of(number) for group in self.shape.groups for number in group.numbers}
        return tuple(ModelLayer(n, heads_per_rank(self.shape, total), total) for n, total in sorted(totals.items()))

    @property
    def description(self) -> Description:
        return Description(
            version=PROTOCOL_VERSION, model="tiny", revision=None, quantization=None, dtype="float32",
            cache_dtype="auto", use_mla=self.shape.use_mla, speculative="none", tp_size=self.shape.tp_size,
            pp_size=len(self.shape.stages), tp_rank=self.tp_rank, pp_rank=self.pp_rank, dp_rank=self.shape.dp_rank,
            stages=self.shape.stages, model_config={}, caches=[cache.description for cache in self.caches],
            model_layers=self.model_layers,
        )  # fmt: skip

    def move_to(self, raw: torch.Tensor) -> None:
        """The same KV cache in other memory, as large."""
        old = self.raw.data_ptr()
        raw.copy_(self.raw)
        self.views = {
            name: raw.view(torch.int32).as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in self.views.items()
        }
        moved = raw.data_ptr() - old
        self.caches = [
            LocalCache(cache.description, tuple(address + moved for address in cache.addresses))
            for cache in self.caches
        ]
        self.raw = raw

    def blocks(self, name: str) -> Memory:
        """[block, head, token, element] of a layer, as a copy."""
        array = self.content(name)
        array = array.reshape(-1, self.shape.pages_per_block, *array.shape[1:])
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3, 4)).reshape(len(array), array.shape[2], -1, CONTENT)

    def content(self, name: str) -> Memory:
        """[page, head, token, element] of a layer, where the kernel keeps it."""
        view = self.views[name]
        if not self.shape.is_transposed:
            return view.numpy()
        pages, heads, tokens, _ = view.shape
        return view.view(pages, heads, CONTENT, tokens).transpose(2, 3).numpy()

    def fill(self, tables: Sequence[Sequence[int | None]], num_tokens: int) -> None:
        """All tokens that a block is there for, also beyond `num_tokens` in the last one: those are `NOTHING` - 1."""
        for group, info in enumerate(self.groups):
            size = info.block_tokens // self.shape.pages_per_block
            for name in info.layer_names:
                view = self.content(name)
                for position, block in enumerate(tables[group]):
                    for page in range(self.shape.pages_per_block if block is not None else 0):
                        first = position * info.block_tokens + page * size
                        tokens = np.arange(first, first + size)
                        values = number(name, np.array(self.heads(name))[:, None], tokens[None, :])
                        values[:, tokens >= num_tokens] = NOTHING - 1
                        view[(block or 0) * self.shape.pages_per_block + page] = values

    def memory(self, cache: LocalCache, tensor: int) -> Bytes:
        """[page, byte] of one tensor of a cache."""
        described = cache.description
        start = cache.addresses[tensor] - self.raw.data_ptr()
        size = described.num_pages * described.page_bytes
        assert 0 <= start <= self.raw.numel() - size, "the cache reaches beyond its buffer"
        return self.raw.numpy().view(np.uint8)[start : start + size].reshape(described.num_pages, described.page_bytes)


def heads_per_rank(shape: Shape, total_heads: int) -> int:
    return max(1, total_heads // shape.tp_size)


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def layer_number(name: str) -> int:
    return int(name.split(".")[2])


def number(name: str, head: npt.NDArray[np.int64], token: npt.NDArray[np.int64]) -> Memory:
    """What every element of a token of a head of a layer is: [..., element]."""
    layer = layer_number(name)
    first = CONTENT * (token + MAX_TOKENS * (head + MAX_HEADS * layer))
    return (first[..., None] + np.arange(CONTENT)).astype(np.int32)


def engine(shape: Shape, num_tokens: int, seed: int, first_kept: Sequence[int] = ()) -> list[Rank]:
    """All ranks, empty. The tables of group i have no blocks before token `first_kept[i]`."""
    sizes = [shape.tokens_of(group) for group in range(len(shape.groups))]
    needed = [-(-num_tokens // size) for size in sizes]
    num_blocks = sum(needed) + shape.spare_blocks
    ids = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
    tables: list[list[int | None]] = []
    for group, count in enumerate(needed):
        kept = first_kept[group] // sizes[group] if first_kept else 0
        tables.append([None] * kept + [ids.pop() for _ in range(count - kept)])
    return [_rank(shape, pp_rank, tp_rank, tables, num_blocks) for pp_rank, tp_rank in shape.places()]


def _rank(shape: Shape, pp_rank: int, tp_rank: int, tables: list[list[int | None]], num_blocks: int) -> Rank:
    bounds = (*shape.stages, 1 << 20)
    mine = [[n for n in group.numbers if bounds[pp_rank] <= n < bounds[pp_rank + 1]] for group in shape.groups]
    groups = [
        GroupInfo(index, shape.tokens_of(index), group.window, tuple(layer_name(n) for n in numbers))
        for index, (group, numbers) in enumerate(zip(shape.groups, mine, strict=True))
    ]
    totals = [group.total_heads or shape.total_heads for group in shape.groups]
    sizes = [_dims(shape, group, total, num_blocks) for group, total in zip(groups, totals, strict=True)]
    # Groups lie over the same bytes, which does no harm where pages are of one size: a block id belongs to one group.
    are_alike = len({dims if shape.layout.startswith("B") else dims[1:] for dims in sizes}) == 1
    starts = [0 if are_alike else sum(map(prod, sizes[:index])) for index in range(len(sizes))]
    size = max(start + prod(dims) for start, dims in zip(starts, sizes, strict=True))
    raw = torch.full((size,), NOTHING, dtype=torch.int32).view(torch.int8)
    views: dict[str, torch.Tensor] = {}
    for group, start, dims in zip(groups, starts, sizes, strict=True):
        flat = raw.view(torch.int32)[start : start + prod(dims)]
        views |= zip(group.layer_names, _as_layout(flat, dims, shape.layout), strict=True)
    by_layer = {name: shape.heads_of(layer_number(name)) for name in views}
    share = HeadShare(tp_rank, shape.tp_size, shape.total_heads, by_layer)
    kinds = ["full_attention"] * len(groups)
    interiors = {name: _transposed(view.shape[2]) for name, view in views.items()} if shape.is_transposed else {}
    caches = describe_caches(views, groups, kinds, num_blocks, share, interiors)
    return Rank(shape, pp_rank, tp_rank, tables, raw, views, caches, groups, num_blocks)


def _dims(shape: Shape, group: GroupInfo, total_heads: int, num_blocks: int) -> tuple[int, ...]:
    pages, num_layers = shape.pages_per_block, len(group.layer_names)
    return num_layers, num_blocks * pages, heads_per_rank(shape, total_heads), group.block_tokens // pages, CONTENT


def _transposed(tokens: int) -> Interior:
    return Interior((Strip(0, CONTENT, 4 * tokens, 4, 4),))


def _as_layout(flat: torch.Tensor, dims: tuple[int, ...], layout: str) -> torch.Tensor:
    """[layer, block, head, token, content], in that order in memory."""
    order = LAYOUTS[layout]
    return flat.view([dims[axis] for axis in order]).permute([order.index(axis) for axis in range(5)])


# --- doing what a plan says -----------------------------------------------------------------------------------------


def carry_out(plan: PairPlan, source: Rank, target: Rank, first: int, end: int, only_layer: str | None = None) -> None:
    """What a transfer of the plan does. Each byte of the target is written once at most."""
    for move in plan.moves(source.tables, target.tables, first, end):
        for copy in plan.meetings[move.meeting].copies:
            if only_layer is None or only_layer in copy.layer_names:
                _copy(copy, move.pairs, source, target, only_layer)


def _copy(copy: BlockCopy, pairs: BlockPairs, source: Rank, target: Rank, only_layer: str | None) -> None:
    theirs = next(cache for cache in source.caches if cache.description.model_id == copy.source_model_id)
    mine = next(cache for cache in target.caches if cache.description.model_id == copy.target_model_id)
    assert len(copy.source_tensors) == len(copy.target_tensors)
    for index, (source_tensor, target_tensor) in enumerate(zip(copy.source_tensors, copy.target_tensors, strict=True)):
        if only_layer is not None and copy.layer_names[index] != only_layer:
            continue
        have, into = source.memory(theirs, source_tensor), target.memory(mine, target_tensor)
        slices = copy.slices and [(one.target_offset, one.source_offset, one.num_bytes) for one in copy.slices]
        for to, begin, size in slices or [(0, 0, mine.description.page_bytes)]:
            pages = list(pairs.target)
            before = np.ascontiguousarray(into[pages, to : to + size]).view(np.int32)
            assert (before == NOTHING).all(), "written twice"
            into[pages, to : to + size] = have[list(pairs.source), begin : begin + size]


def check(rank: Rank, first: int, end: int, layers: Sequence[str] | None = None) -> None:
    """Exactly the asked tokens are there, and no block is touched that has none of them.

    Args:
        layers: others have nothing at all; None = all layers of the rank.
    """
    for group, info in enumerate(rank.groups):
        size, table = info.block_tokens, rank.tables[group]
        for name in info.layer_names:
            heads = np.array(rank.heads(name))
            blocks = rank.blocks(name)
            is_wanted = layers is None or name in layers
            touched = set()
            for position in range(first // size, -(-end // size)) if is_wanted else ():
                block = table[position]
                if block is None:
                    continue
                touched.add(block)
                tokens = np.arange(max(first, position * size), min(end, (position + 1) * size))
                got = blocks[block][:, tokens - position * size]
                want = number(name, heads[:, None], tokens[None, :])
                np.testing.assert_array_equal(got, want, err_msg=f"{name}, block {block}, tokens {tokens}")
            if len(rank.groups) == 1 or not is_wanted:
                others = [block for block in range(len(blocks)) if block not in touched]
                assert (blocks[others] == NOTHING).all(), f"{name}: other blocks are touched"
