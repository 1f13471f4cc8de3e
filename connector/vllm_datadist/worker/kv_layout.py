# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache tensors to blocks caches: where each layer's pages lie and what is in them.

vLLM hands over one view per layer, [pages, heads, tokens, content], whatever the memory order. The core moves equal
pages that follow one another; what is in a page is told to the peer as offsets and strides (`topology`). So:

- a layer whose pages follow one another is a tensor of its own (LBHNC, LBNHC);
- layers whose pages lie side by side are one tensor whose pages are theirs together (BLHNC, BLNHC, BHLNC): a run of
  blocks of all layers is then one copy;
- a layer whose heads lie outside of its pages is one tensor per head (LHBNC).

One cache holds the tensors of one KV cache group that have pages of one size, in the natural order of their layers'
names, in which the layers of a pipeline stage are neighbours. Layers over the same bytes are in it once. Groups of a
hybrid model lie over the same memory, which is no harm: a block id belongs to one group at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from ..groups import GroupInfo
from .topology import CacheDescription, LayerDescription, Strip, first_head, is_regular, plain


class LayoutError(ValueError):
    """KV cache tensors that this connector cannot register. The text says which, why, and the remedy."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """This rank's part of the model's KV heads.

    Attributes:
        total_heads: KV heads of a layer in the whole model.
        by_layer: the same for layers that have another number.
    """

    tp_rank: int
    tp_size: int
    total_heads: int
    by_layer: Mapping[str, int] = field(default_factory=dict)

    def total_of(self, layer_name: str, num_heads: int) -> int:
        """Of this layer, `num_heads` of which are here; 0 if it is not known which these are."""
        total = self.by_layer.get(layer_name, self.total_heads)
        return total if is_regular(num_heads, total, self.tp_size) else 0

    def first_of(self, layer_name: str, num_heads: int) -> int:
        """Number of the first of them."""
        total = self.total_of(layer_name, num_heads)
        return first_head(num_heads, total, self.tp_rank, self.tp_size) if total else 0


@dataclass(frozen=True, slots=True)
class Interior:
    """How the attention kernel keeps a head of a block, where that is not what the view's shape says.

    Attributes:
        strips: see `LayerDescription`; with a `packing`, of no meaning.
    """

    strips: tuple[Strip, ...]
    packing: str = ""


@dataclass(frozen=True, slots=True)
class LocalCache:
    """One blocks cache to register: `addresses[i]` is the first byte of its tensor i."""

    description: CacheDescription
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Heads of a layer in pages `page_bytes` apart, the first of them at `address`; `extent` bytes of each are its own.

    Attributes:
        description: `tensor` and `offset_bytes` are not known yet.
        limit: the first byte behind the memory it lies in.
    """

    description: LayerDescription
    address: int
    page_bytes: int
    num_pages: int
    extent: int
    limit: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    address: int
    parts: tuple[_Part, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].page_bytes, self.parts[0].num_pages


def describe_caches(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[GroupInfo],
    kinds: Sequence[str],
    num_blocks: int,
    heads: HeadShare,
    interiors: Mapping[str, Interior] | None = None,
) -> list[LocalCache]:
    """Raises LayoutError for tensors that are missing or lie in a way that no pages can describe.

    Args:
        interiors: by layer, where the content of a block does not lie as its view says.
    """
    caches: list[LocalCache] = []
    for place, (group, kind) in enumerate(zip(groups, kinds, strict=True)):
        by_shape: defaultdict[tuple[int, int], list[_Tensor]] = defaultdict(list)
        for tensor in _tensors(tensors, group, num_blocks, heads, interiors or {}):
            by_shape[tensor.shape].append(tensor)
        for shape in sorted(by_shape):
            caches.append(_cache(len(caches), place, group, kind, by_shape[shape], num_blocks))
    return caches


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, with the numbers in them in order: layers.2 before layers.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _cache(
    model_id: int, place: int, group: GroupInfo, kind: str, tensors: Sequence[_Tensor], num_blocks: int
) -> LocalCache:
    page_bytes, num_pages = tensors[0].shape
    layers = [
        _placed(part.description, index, part.address - tensor.address)
        for index, tensor in enumerate(tensors)
        for part in tensor.parts
    ]
    description = CacheDescription(
        model_id=model_id,
        group=place,
        kind=kind,
        window=group.window,
        chunk=group.chunk,
        is_state=group.is_state,
        block_tokens=group.table_tokens,
        pages_per_block=num_pages // num_blocks,
        page_bytes=page_bytes,
        num_pages=num_pages,
        num_tensors=len(tensors),
        layers=layers,
    )
    return LocalCache(description, tuple(tensor.address for tensor in tensors))


def _placed(layer: LayerDescription, tensor: int, offset_bytes: int) -> LayerDescription:
    return LayerDescription(
        layer.layer_name,
        tensor,
        offset_bytes,
        layer.first_head,
        layer.num_heads,
        layer.rank_heads,
        layer.total_heads,
        layer.head_stride_bytes,
        layer.strips,
        layer.packing,
    )


# --- tensors ------------------------------------------------------------------------------------------------------


def _tensors(
    views: Mapping[str, torch.Tensor],
    group: GroupInfo,
    num_blocks: int,
    heads: HeadShare,
    interiors: Mapping[str, Interior],
) -> Iterator[_Tensor]:
    """Of one group, in the natural order of the layers' names."""
    parts: dict[int, _Part] = {}
    for name in sorted(group.layer_names, key=natural_order):
        for part in _parts(name, _find(views, name), group, num_blocks, heads):
            part = _with_interior(part, interiors.get(name))
            parts.setdefault(part.address, part)  # layers that share a tensor are moved once, under the first name
    waiting = list(parts.values())
    while waiting:
        first = waiting.pop(0)
        beside = [part for part in waiting if _are_beside(first, part)]
        waiting = [part for part in waiting if part not in beside]
        yield _tensor((first, *beside))


def _are_beside(one: _Part, other: _Part) -> bool:
    """Whether both have room in pages of one tensor."""
    if (one.page_bytes, one.num_pages, one.limit) != (other.page_bytes, other.num_pages, other.limit):
        return False
    low, high = sorted((one, other), key=lambda part: part.address)
    return high.address + high.extent <= low.address + low.page_bytes


def _tensor(parts: tuple[_Part, ...]) -> _Tensor:
    """Its pages begin at the first of the parts, or before it where their gaps would else reach beyond the memory."""
    first, page_bytes = parts[0], parts[0].page_bytes
    start = min(part.address for part in parts)
    address = min(start, first.limit - first.num_pages * page_bytes)
    if any(part.address + part.extent > address + page_bytes for part in parts):
        raise LayoutError(
            f"layer {first.description.layer_name}: its {first.num_pages} blocks of {page_bytes} bytes do not lie in "
            "the tensor's memory; set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return _Tensor(address, parts)


def _find(views: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in views:
        raise LayoutError(f"vLLM gave no KV cache tensor for layer {name}")
    return views[name]


# --- one layer ----------------------------------------------------------------------------------------------------


def _parts(name: str, view: torch.Tensor, group: GroupInfo, num_blocks: int, heads: HeadShare) -> Iterator[_Part]:
    """One part, or one per head where heads lie further apart than pages."""
    if group.is_state:
        yield _state(name, view, num_blocks)
        return
    _check_shape(name, view, group, num_blocks)
    num_pages, num_heads, tokens, content = view.shape
    item_bytes = view.element_size()
    page, head, token = (stride * item_bytes for stride in _strides(view))
    first, total = heads.first_of(name, num_heads), heads.total_of(name, num_heads)
    held_together = num_heads if head < page or num_heads == 1 else 1
    sizes = [(token, tokens)] + ([(head, held_together)] if held_together > 1 else [])
    extent = _extent(name, view, sizes, content * item_bytes, page)
    for index in range(0, num_heads, held_together):
        layer = LayerDescription(
            name, 0, 0, first + index, held_together, num_heads, total, head, plain(token, content * item_bytes)
        )
        yield _Part(layer, view.data_ptr() + index * head, page, num_pages, extent, _limit(view))


def _state(name: str, view: torch.Tensor, num_blocks: int) -> _Part:
    """A block is one state: one head of one token, whose number in the model nobody knows. Padding is not moved."""
    size = view[0].numel() * view.element_size()
    if view.shape[0] != num_blocks or not view[0].is_contiguous():
        raise LayoutError(
            f"layer {name}: the states have shape {tuple(view.shape)} and strides {view.stride()} elements, expected "
            f"{num_blocks} blocks, each contiguous; set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    page = view.stride(0) * view.element_size() if num_blocks > 1 else size
    layer = LayerDescription(name, 0, 0, 0, 1, 1, 0, size, plain(size, size))
    return _Part(layer, view.data_ptr(), page, num_blocks, size, _limit(view))


def _with_interior(part: _Part, interior: Interior | None) -> _Part:
    if interior is None:
        return part
    strips = part.description.strips if interior.packing else interior.strips
    return replace(part, description=msgspec.structs.replace(part.description, strips=strips, packing=interior.packing))


def _limit(view: torch.Tensor) -> int:
    storage = view.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _check_shape(name: str, view: torch.Tensor, group: GroupInfo, num_blocks: int) -> None:
    """vLLM's blocks, or each of them cut into the same number of smaller ones by the attention backend."""
    if view.dim() == 4 and view.shape[0] and view.shape[2] and view.shape[0] % num_blocks == 0:
        num_tokens = view.shape[0] // num_blocks * view.shape[2]
    else:
        num_tokens = 0
    if num_tokens == group.table_tokens:
        return
    raise LayoutError(
        f"layer {name}: the KV cache has shape {tuple(view.shape)}, expected [{num_blocks} blocks, heads, "
        f"{group.table_tokens} tokens, content], or each block cut into equal smaller ones"
    )


def _strides(view: torch.Tensor) -> tuple[int, int, int]:
    """Of page, head and token, in elements; that of a dimension of one item, which means nothing, made regular."""
    num_pages, num_heads, tokens, content = view.shape
    token = view.stride(2) if tokens > 1 else content
    head = view.stride(1) if num_heads > 1 else tokens * token
    page = view.stride(0) if num_pages > 1 else max(num_heads * head, tokens * token)
    return page, head, token


def _extent(name: str, view: torch.Tensor, sizes: list[tuple[int, int]], content_bytes: int, page_bytes: int) -> int:
    """Bytes from the first to the last of a part in a page. LayoutError where bytes overlap or do not fit a page."""
    extent, is_sound = content_bytes, view.shape[3] == 1 or view.stride(3) == 1
    for stride, size in sorted(sizes):
        is_sound = is_sound and (size == 1 or stride >= extent)
        extent = (size - 1) * stride + extent
    if not is_sound or extent > page_bytes:
        raise LayoutError(
            f"layer {name}: heads and tokens of a block do not lie side by side (shape {tuple(view.shape)}, strides "
            f"{view.stride()} elements); set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return extent
