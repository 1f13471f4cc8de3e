# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache views become blocks caches; what has no contiguous blocks is refused by name."""

from __future__ import annotations

import pytest
import torch

from vllm_datadist.groups import GroupInfo
from vllm_datadist.worker.kv_layout import HeadShare, LayoutError, describe_caches

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 16
ONE = HeadShare(0, 1, HEADS)


def _group(*names: str, index: int = 0, tokens: int = TOKENS) -> GroupInfo:
    return GroupInfo(index, tokens, None, tuple(sorted(names)))


def test_layers_of_a_group_are_one_cache_in_the_order_of_their_names() -> None:
    tensors = {name: torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for name in ("b", "a")}
    [cache] = describe_caches(tensors, [_group("b", "a")], ["full_attention"], BLOCKS, ONE)
    assert cache.addresses == (tensors["a"].data_ptr(), tensors["b"].data_ptr())
    assert (cache.num_blocks, cache.block_bytes) == (BLOCKS, HEADS * TOKENS * CONTENT * 4)
    layer = cache.description.layers[0]
    assert (layer.layer_name, layer.block_tokens, layer.num_heads, layer.first_head) == ("a", TOKENS, HEADS, 0)
    assert (layer.head_stride_bytes, layer.token_stride_bytes, layer.content_bytes) == (TOKENS * CONTENT * 4, 64, 64)


def test_token_major_blocks_are_dense_too() -> None:
    tensor = torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).permute(0, 2, 1, 3)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, ONE)
    layer = cache.description.layers[0]
    assert (layer.head_stride_bytes, layer.token_stride_bytes) == (CONTENT * 4, HEADS * CONTENT * 4)


def test_a_single_latent_head_has_regular_strides_whatever_torch_says() -> None:
    tensor = torch.zeros(BLOCKS * TOKENS * 576).as_strided((BLOCKS, 1, TOKENS, 576), (TOKENS * 576, 7, 576, 1))
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["mla_attention"], BLOCKS, HeadShare(1, 2, 1))
    layer = cache.description.layers[0]
    assert (layer.first_head, layer.num_heads, layer.head_stride_bytes) == (0, 1, TOKENS * 576 * 4)


def test_groups_over_the_same_bytes_and_layers_that_share_a_tensor() -> None:
    shared = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    tensors = {"a": shared, "b": shared, "w": shared}
    groups = [_group("a", "b"), _group("w", index=3)]
    first, second = describe_caches(tensors, groups, ["full_attention", "sliding_window"], BLOCKS, ONE)
    assert (first.addresses, second.addresses) == ((shared.data_ptr(),), (shared.data_ptr(),))
    assert [layer.layer_name for layer in first.description.layers] == ["a"]
    assert (first.description.model_id, second.description.model_id) == (0, 1)
    assert second.description.kind == "sliding_window"


def test_layers_of_two_block_sizes_are_two_caches() -> None:
    tensors = {"a": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), "b": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)}
    caches = describe_caches(tensors, [_group("a", "b")], ["full_attention"], BLOCKS, ONE)
    assert [(cache.description.group, cache.description.model_id) for cache in caches] == [(0, 0), (0, 1)]
    assert [cache.block_bytes for cache in caches] == [512, 1024]


@pytest.mark.parametrize(
    ("share", "first"),
    [
        (HeadShare(0, 1, 2), 0),
        (HeadShare(3, 4, 8), 6),
        (HeadShare(1, 2, 2), 0),
        (HeadShare(5, 8, 8), 10),
    ],
)
def test_which_heads_a_rank_holds(share: HeadShare, first: int) -> None:
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    total = HeadShare(share.tp_rank, share.tp_size, HEADS * share.tp_size if first else share.total_heads)
    [cache] = describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, total)
    assert cache.description.layers[0].first_head == first


def test_ranks_share_a_head_when_there_are_more_ranks_than_heads() -> None:
    assert [HeadShare(rank, 8, 4).first_head(1) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT), "shape"),
        (torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT), "--block-size"),
        (torch.zeros(BLOCKS, 2, HEADS, TOKENS, CONTENT)[:, 0], "not contiguous.*VLLM_KV_CACHE_LAYOUT"),
        (torch.zeros(HEADS, BLOCKS, TOKENS, CONTENT).permute(1, 0, 2, 3), "not contiguous"),
    ],
)
def test_other_layouts_are_refused_with_layer_and_reason(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(LayoutError, match=f"layer a: .*{text}"):
        describe_caches({"a": tensor}, [_group("a")], ["full_attention"], BLOCKS, ONE)


def test_a_missing_layer_is_named() -> None:
    with pytest.raises(LayoutError, match="layer b"):
        describe_caches({}, [_group("b")], ["full_attention"], BLOCKS, ONE)
