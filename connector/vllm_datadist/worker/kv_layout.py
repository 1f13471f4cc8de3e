# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache tensors to blocks caches: where each layer's blocks lie and what is in them.

vLLM hands over one view per layer, [blocks, heads, tokens, content], whatever the memory order. A blocks cache needs
equal blocks that are contiguous and follow one another. One cache holds the layers of one KV cache group that have
blocks of one size, in the order of their names; layers over the same bytes are in it once. Groups of a hybrid model
lie over the same memory, which is no harm: a block id belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..description import CacheDescription
from ..groups import GroupInfo
from .topology import LayerDescription


class LayoutError(ValueError):
    """KV cache tensors that this connector cannot register. The text says which, why, and the remedy."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """This rank's part of the model's KV heads."""

    tp_rank: int
    tp_size: int
    total_heads: int

    def first_head(self, num_heads: int) -> int:
        """Number of the first of the `num_heads` heads held here; ranks share a head if there are too few."""
        if num_heads >= self.total_heads:
            return 0
        if num_heads * self.tp_size <= self.total_heads:
            return self.tp_rank * num_heads
        return self.tp_rank * self.total_heads // self.tp_size


@dataclass(frozen=True, slots=True)
class LocalCache:
    """One blocks cache to register: `addresses[i]` is the first byte of layer i of the description."""

    description: CacheDescription
    addresses: tuple[int, ...]
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _LocalLayer:
    description: LayerDescription
    address: int


def describe_caches(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[GroupInfo],
    kinds: Sequence[str],
    num_blocks: int,
    heads: HeadShare,
) -> list[LocalCache]:
    """Raises LayoutError for tensors that are missing or have no contiguous blocks."""
    caches: list[LocalCache] = []
    for group, kind in zip(groups, kinds, strict=True):
        layers = _distinct(
            [_describe(name, _find(tensors, name), group, num_blocks, heads) for name in group.layer_names]
        )
        layers.sort(key=lambda layer: (layer.description.block_bytes, layer.description.layer_name))
        for _, same_size in groupby(layers, key=lambda layer: layer.description.block_bytes):
            caches.append(_cache(len(caches), group, kind, list(same_size), num_blocks))
    return caches


def _cache(model_id: int, group: GroupInfo, kind: str, layers: list[_LocalLayer], num_blocks: int) -> LocalCache:
    description = CacheDescription(
        model_id, group.index, kind, group.block_tokens, group.window, [layer.description for layer in layers]
    )
    block_bytes = layers[0].description.block_bytes
    return LocalCache(description, tuple(layer.address for layer in layers), num_blocks, block_bytes)


def _find(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise LayoutError(f"vLLM gave no KV cache tensor for layer {name}")
    return tensors[name]


def _distinct(layers: list[_LocalLayer]) -> list[_LocalLayer]:
    """One layer per address: layers that share a tensor are moved once, under the first name."""
    seen: dict[int, _LocalLayer] = {}
    for layer in layers:
        seen.setdefault(layer.address, layer)
    return list(seen.values())


def _describe(name: str, tensor: torch.Tensor, group: GroupInfo, num_blocks: int, heads: HeadShare) -> _LocalLayer:
    if tensor.dim() != 4 or tensor.shape[0] != num_blocks or tensor.shape[2] != group.block_tokens:
        raise LayoutError(
            f"layer {name}: the KV cache has shape {tuple(tensor.shape)}, expected [{num_blocks} blocks, heads, "
            f"{group.block_tokens} tokens, content]; if the attention backend splits blocks, set --block-size to the "
            "size it splits them into"
        )
    item_bytes = tensor.element_size()
    _, num_heads, tokens, content = tensor.shape
    head_stride, token_stride = _strides(tensor)
    block_bytes = num_heads * tokens * content * item_bytes
    if not _is_dense(tensor):
        raise LayoutError(
            f"layer {name}: blocks are not contiguous one after the other (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} elements); set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return _LocalLayer(
        LayerDescription(
            name,
            num_blocks,
            tokens,
            block_bytes,
            heads.first_head(num_heads),
            num_heads,
            head_stride * item_bytes,
            token_stride * item_bytes,
            content * item_bytes,
        ),
        tensor.data_ptr(),
    )


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """(head, token) strides in elements; the stride of a dimension of one item, which means nothing, made regular."""
    _, num_heads, tokens, content = tensor.shape
    token_stride = tensor.stride(2) if tokens > 1 else content
    head_stride = tensor.stride(1) if num_heads > 1 else tokens * token_stride
    return head_stride, token_stride


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a block's elements fill a range without gaps, and the next block follows at once."""
    expected = 1
    dims = [(stride, size) for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return tensor.shape[0] == 1 or tensor.stride(0) == expected
