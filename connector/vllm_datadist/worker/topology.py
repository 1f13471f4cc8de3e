# SPDX-License-Identifier: Apache-2.0
"""Where a worker's KV cache lies, as its peers are told, and which heads of it come from which worker.

A *blocks cache* is a list of equal tensors, each a row of equal *pages*: what the core moves. A block of vLLM's block
tables is one page, or several neighbouring ones where the attention kernel works on smaller blocks. A page holds
(head, token, content) of one layer, or of all layers of the cache one behind the other. How far apart heads and tokens
lie says each layer by itself, so that head-major, token-major and cross-layer layouts are numbers here, not cases. So
are kernels that keep K transposed within a block, with the tokens side by side (`Strip`). Where a kernel packs it in a
way that has no strides, pages can still be moved whole, head by head: that layer has a `packing`.

Layers are paired by name, tokens by position, heads by their number in the whole model, never by index or count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from datadist_core.errors import LLMException
from datadist_core.types import LLMStatusCode

#: Beyond these no engine is; what a peer says is not trusted, and planning takes time and memory.
MAX_TOKENS, MAX_HEADS, MAX_BYTES, MAX_STRIPS, MAX_ITEMS = 1 << 20, 1 << 12, 1 << 48, 64, 1 << 16


class PlanError(LLMException):
    """The two ends cannot be paired. The text names the field and both values."""

    default_code = LLMStatusCode.LLM_PARAM_INVALID


class Strip(msgspec.Struct, frozen=True):
    """A part of what is kept of one head of one token: `count` items of `content_bytes`, `stride_bytes` apart.

    Attributes:
        offset_bytes: of the first item of token 0, from where the head begins.
        token_stride_bytes: to the same item of the next token of the page.
    """

    offset_bytes: int
    count: int
    stride_bytes: int
    token_stride_bytes: int
    content_bytes: int


class LayerDescription(msgspec.Struct, frozen=True):
    """Neighbouring KV heads of one layer. A layer whose heads lie in tensors of their own has several of these.

    Attributes:
        tensor: of the cache, from 0.
        offset_bytes: of the first head and token, in each page of that tensor.
        first_head: number, in the whole model, of the first KV head held here.
        num_heads: heads held here (1 for MLA, whose latent is the same on all ranks).
        rank_heads: heads of this layer that this rank holds, all tensors together.
        total_heads: of the layer in the whole model; 0 = not known, so that only equal ranks can be paired.
        head_stride_bytes: distance of neighbouring heads in a page.
        strips: one head of one token, K before V. The same bytes in the same order at both ends, wherever they lie.
        packing: how a page of a head is packed if no strides describe it; "" = `strips` do.
    """

    layer_name: str
    tensor: int
    offset_bytes: int
    first_head: int
    num_heads: int
    rank_heads: int
    total_heads: int
    head_stride_bytes: int
    strips: tuple[Strip, ...]
    packing: str = ""

    @property
    def content_bytes(self) -> int:
        """Of one head of one token."""
        return sum(strip.count * strip.content_bytes for strip in self.strips)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    def end_bytes(self, page_tokens: int) -> int:
        """First byte of a page behind this layer's last."""
        last_head = (self.num_heads - 1) * self.head_stride_bytes
        return self.offset_bytes + last_head + max(_end_bytes(strip, page_tokens) for strip in self.strips)


class ModelLayer(msgspec.Struct, frozen=True, array_like=True):
    """How the KV heads of one layer are cut at an engine, whichever of its pipeline stages has it.

    Attributes:
        number: in the model, from 0, as in the layer's name.
        rank_heads: heads that each rank of its stage holds.
        total_heads: as in `LayerDescription`.
    """

    number: int
    rank_heads: int
    total_heads: int


class CacheDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One blocks cache: layers of one KV cache group. `model_id` is its key at the core.

    Attributes:
        group: the place of its group among those whose blocks are transferred, which is that of its block tables.
        window, chunk, is_state: as in `groups.GroupInfo`. A state is a block of one token here.
        block_tokens: tokens per entry of the block tables.
        pages_per_block: block b is the pages b * pages_per_block and following.
        page_bytes: from the start of a page to the next one's, gaps included.
    """

    model_id: int
    group: int
    kind: str
    window: int | None
    chunk: int | None
    is_state: bool
    block_tokens: int
    pages_per_block: int
    page_bytes: int
    num_pages: int
    num_tensors: int
    layers: list[LayerDescription]

    @property
    def page_tokens(self) -> int:
        return self.block_tokens // self.pages_per_block


def plain(token_stride_bytes: int, content_bytes: int) -> tuple[Strip, ...]:
    """All of a token's head in one piece."""
    return (Strip(0, 1, content_bytes, token_stride_bytes, content_bytes),)


@dataclass(frozen=True, slots=True)
class Held:
    """Heads of one layer where one worker holds them."""

    cache: CacheDescription
    layer: LayerDescription


def held_layers(caches: Sequence[CacheDescription]) -> Iterator[Held]:
    return (Held(cache, layer) for cache in caches for layer in cache.layers)


def check_well_formed(cache: CacheDescription) -> None:
    """Raise PlanError for what no worker can mean: every byte it describes lies in its page."""
    sizes = (cache.block_tokens, cache.pages_per_block, cache.page_bytes, cache.num_pages, cache.num_tensors)
    is_sane = min(sizes) >= 1 and cache.block_tokens <= MAX_TOKENS and cache.page_bytes <= MAX_BYTES
    if not is_sane or cache.block_tokens % cache.pages_per_block or not 0 <= cache.group <= MAX_TOKENS:
        raise PlanError(
            f"KV cache group {cache.group}: {cache.block_tokens} tokens in {cache.pages_per_block} pages of "
            f"{cache.page_bytes} bytes is no blocks cache"
        )
    for layer in cache.layers:
        if not _is_well_formed(layer, cache):
            raise PlanError(f"layer {layer.layer_name}: does not lie in pages of {cache.page_bytes} bytes: {layer}")


def _is_well_formed(layer: LayerDescription, cache: CacheDescription) -> bool:
    return (
        0 <= layer.tensor < cache.num_tensors
        and 0 <= layer.first_head <= MAX_HEADS
        and 1 <= layer.num_heads <= layer.rank_heads <= MAX_HEADS
        and 0 <= layer.total_heads <= MAX_HEADS
        and layer.offset_bytes >= 0
        and layer.head_stride_bytes >= 1
        and 1 <= len(layer.strips) <= MAX_STRIPS
        and all(_is_strip(strip) for strip in layer.strips)
        and layer.end_bytes(cache.page_tokens) <= cache.page_bytes
    )


def _is_strip(strip: Strip) -> bool:
    strides = strip.stride_bytes, strip.token_stride_bytes
    return strip.offset_bytes >= 0 and 1 <= strip.count <= MAX_ITEMS and 1 <= strip.content_bytes <= min(strides)


def _end_bytes(strip: Strip, page_tokens: int) -> int:
    last_item = (strip.count - 1) * strip.stride_bytes
    return strip.offset_bytes + last_item + (page_tokens - 1) * strip.token_stride_bytes + strip.content_bytes


# --- heads --------------------------------------------------------------------------------------------------------


def first_head(num_heads: int, total_heads: int, tp_rank: int, tp_size: int) -> int:
    """Number of the first of the `num_heads` heads that a rank holds; ranks share a head if there are too few."""
    if num_heads >= total_heads:
        return 0
    if num_heads * tp_size <= total_heads:
        return tp_rank * num_heads
    return tp_rank * total_heads // tp_size


def is_regular(num_heads: int, total_heads: int, tp_size: int) -> bool:
    """Whether so many heads per rank are all of `total_heads`, an even cut, or one that several ranks share.

    Else nobody knows which heads these are.
    """
    if num_heads == total_heads or num_heads * tp_size == total_heads:
        return True
    return num_heads == 1 and total_heads > 0 and tp_size % total_heads == 0


@lru_cache(maxsize=4096)
def holders(head: int, num_heads: int, total_heads: int, tp_size: int) -> tuple[int, ...]:
    """The ranks that hold this head, where each rank holds `num_heads` of `total_heads`."""
    starts = ((rank, first_head(num_heads, total_heads, rank, tp_size)) for rank in range(tp_size))
    return tuple(rank for rank, start in starts if start <= head < start + num_heads)


def holder_for(head: int, num_heads: int, total_heads: int, tp_size: int, spread: int) -> int | None:
    """The one rank from which the worker of that `spread` has this head; None if nobody holds it.

    Workers that need the same head have it from different holders. Both ends come to the same answer, each by itself.
    """
    ranks = holders(head, num_heads, total_heads, tp_size)
    return ranks[spread % len(ranks)] if ranks else None


def heads_text(heads: Sequence[int]) -> str:
    return f"{heads[0]}..{heads[-1]}" if heads else "none"
