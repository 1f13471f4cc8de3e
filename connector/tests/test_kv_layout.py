# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache views become blocks caches, whatever their layout; what no pages can describe is refused by name."""

from __future__ import annotations

import pytest
import torch

from vllm_datadist.groups import GroupInfo
from vllm_datadist.worker.kv_layout import HeadShare, LayoutError, describe_caches
from vllm_datadist.worker.topology import LayerDescription, plain

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 16
ONE = HeadShare(0, 1, HEADS)


def _group(*names: str, index: int = 0, tokens: int = TOKENS) -> GroupInfo:
    return GroupInfo(index, tokens, None, tuple(sorted(names)))


def test_layers_of_a_group_are_one_cache_in_the_order_of_their_numbers() -> None:
    names = ("layers.10", "layers.9")
    tensors = {name: torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for name in names}
    [cache] = describe_caches(tensors, [_group(*names)], ["full_attention"], BLOCKS, ONE)
    assert cache.addresses == (tensors["layers.9"].data_ptr(), tensors["layers.10"].data_ptr())
    described = cache.description
    assert (described.num_pages, described.page_bytes) == (BLOCKS, HEADS * TOKENS * CONTENT * 4)
    assert (described.block_tokens, described.pages_per_block, described.num_tensors) == (TOKENS, 1, 2)
    assert described.layers == [
        LayerDescription(name, tensor, 0, 0, HEADS, HEADS, HEADS, TOKENS * CONTENT * 4, plain(CONTENT * 4, CONTENT * 4))
        for tensor, name in enumerate(reversed(names))
    ]


def test_token_major_blocks() -> None:
    tensor = torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).permute(0, 2, 1, 3)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, ONE)
    [layer] = cache.description.layers
    assert (layer.head_stride_bytes, layer.strips) == (CONTENT * 4, plain(HEADS * CONTENT * 4, CONTENT * 4))


def test_layers_side_by_side_in_each_block_are_one_tensor() -> None:
    """Whatever vLLM's order of the layers, and with a gap behind the last one."""
    packed = torch.zeros(BLOCKS, 3, HEADS, TOKENS, CONTENT)
    tensors = {"b": packed[:, 0], "a": packed[:, 1]}
    [cache] = describe_caches(tensors, [_group("a", "b")], ["full_attention"], BLOCKS, ONE)
    size = HEADS * TOKENS * CONTENT * 4
    assert (cache.addresses, cache.description.page_bytes) == ((packed.data_ptr(),), 3 * size)
    assert [(one.layer_name, one.tensor, one.offset_bytes) for one in cache.description.layers] == [
        ("a", 0, size),
        ("b", 0, 0),
    ]


def test_the_last_block_does_not_reach_beyond_the_memory() -> None:
    """Layers at the end of each block: the tensor begins before them."""
    packed = torch.zeros(BLOCKS, 3, HEADS, TOKENS, CONTENT)
    [cache] = describe_caches({"a": packed[:, 2]}, [_group("a")], ["full_attention"], BLOCKS, ONE)
    assert cache.addresses == (packed.data_ptr(),)
    assert cache.description.layers[0].offset_bytes == 2 * HEADS * TOKENS * CONTENT * 4


def test_heads_outside_of_the_blocks_are_a_tensor_each() -> None:
    tensor = torch.zeros(HEADS, BLOCKS, TOKENS, CONTENT).permute(1, 0, 2, 3)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, HeadShare(1, 2, 2 * HEADS))
    assert [(one.tensor, one.first_head, one.num_heads, one.rank_heads) for one in cache.description.layers] == [
        (0, 2, 1, 2),
        (1, 3, 1, 2),
    ]
    assert cache.addresses == (tensor.data_ptr(), tensor.data_ptr() + BLOCKS * TOKENS * CONTENT * 4)


def test_blocks_that_the_kernel_cuts_are_several_pages() -> None:
    tensor = torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, ONE)
    described = cache.description
    assert (described.num_pages, described.pages_per_block, described.page_tokens) == (2 * BLOCKS, 2, TOKENS // 2)
    assert described.block_tokens == TOKENS


def test_a_single_latent_head_has_regular_strides_whatever_torch_says() -> None:
    tensor = torch.zeros(BLOCKS * TOKENS * 576).as_strided((BLOCKS, 1, TOKENS, 576), (TOKENS * 576, 7, 576, 1))
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["mla_attention"], BLOCKS, HeadShare(1, 2, 1))
    [layer] = cache.description.layers
    assert (layer.first_head, layer.num_heads, layer.total_heads) == (0, 1, 1)
    assert layer.head_stride_bytes == TOKENS * 576 * 4


def test_groups_over_the_same_bytes_and_layers_that_share_a_tensor() -> None:
    shared = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    tensors = {"a": shared, "b": shared, "w": shared}
    groups = [_group("a", "b"), _group("w", index=3)]
    first, second = describe_caches(tensors, groups, ["full_attention", "sliding_window"], BLOCKS, ONE)
    assert (first.addresses, second.addresses) == ((shared.data_ptr(),), (shared.data_ptr(),))
    assert [layer.layer_name for layer in first.description.layers] == ["a"]
    assert (first.description.model_id, second.description.model_id) == (0, 1)
    assert (second.description.kind, second.description.group) == ("sliding_window", 1)


def test_layers_of_two_block_sizes_are_two_caches() -> None:
    tensors = {"a": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), "b": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)}
    caches = describe_caches(tensors, [_group("a", "b")], ["full_attention"], BLOCKS, ONE)
    assert [(cache.description.group, cache.description.model_id) for cache in caches] == [(0, 0), (0, 1)]
    assert [cache.description.page_bytes for cache in caches] == [512, 1024]


def test_states_are_blocks_of_one_item_without_their_padding() -> None:
    tensor = torch.zeros(BLOCKS, 100)[:, :70]
    group = GroupInfo(0, 64, None, ("a",), is_state=True)
    [cache] = describe_caches({"a": tensor}, [group], ["mamba: x"], BLOCKS, HeadShare(1, 2, 8))
    described, [layer] = cache.description, cache.description.layers
    assert (described.block_tokens, described.page_bytes, described.is_state) == (1, 400, True)
    assert (layer.content_bytes, layer.total_heads) == (280, 0)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (HeadShare(0, 1, 2), (0, 2)),
        (HeadShare(3, 4, 8), (6, 8)),
        (HeadShare(1, 2, 2), (0, 2)),
        (HeadShare(5, 8, 16), (10, 16)),
        (HeadShare(1, 2, 8), (0, 0)),
        (HeadShare(1, 2, 8, {"a": 4}), (2, 4)),
    ],
)
def test_which_heads_a_rank_holds(share: HeadShare, expected: tuple[int, int]) -> None:
    """Two of them here. Where the model has another number than its config says, nobody knows which."""
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, share)
    [layer] = cache.description.layers
    assert (layer.first_head, layer.total_heads) == expected


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT), "shape"),
        (torch.zeros(2 * BLOCKS, HEADS, TOKENS, CONTENT), "cut into equal smaller ones"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), "shape"),
        (torch.zeros(BLOCKS, HEADS, CONTENT, TOKENS).transpose(2, 3), "side by side"),
        (torch.zeros(9999).as_strided((BLOCKS, HEADS, TOKENS, CONTENT), (512, 8, 16, 1)), "side by side"),
        (torch.zeros(TOKENS, BLOCKS, HEADS, CONTENT).permute(1, 2, 0, 3), "side by side"),
    ],
)
def test_other_layouts_are_refused_with_layer_and_reason(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(LayoutError, match=f"layer a: .*{text}"):
        describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, ONE)


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(LayoutError, match="layer b"):
        describe_caches({}, [_group("b")], ["full_attention"], BLOCKS, ONE)
