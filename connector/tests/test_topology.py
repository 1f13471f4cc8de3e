# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which heads; and descriptions that no worker can mean. Plans are in test_shapes.py."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from vllm_datadist.worker.topology import (
    CacheDescription,
    LayerDescription,
    PlanError,
    Strip,
    check_well_formed,
    first_head,
    holder_for,
    holders,
    is_regular,
    plain,
)

LAYER = LayerDescription("layers.0", 0, 0, 0, 2, 2, 2, 128, plain(64, 64))
CACHE = CacheDescription(
    model_id=0, group=0, kind="full_attention", window=None, chunk=None, is_state=False, block_tokens=2,
    pages_per_block=1, page_bytes=256, num_pages=9, num_tensors=1, layers=[LAYER],
)  # fmt: skip


@pytest.mark.parametrize(("total_heads", "tp_size"), list(itertools.product([1, 2, 4, 8, 16], repeat=2)))
def test_every_head_has_holders_and_each_rank_what_vllm_gives_it(total_heads: int, tp_size: int) -> None:
    num_heads = max(1, total_heads // tp_size)
    assert is_regular(num_heads, total_heads, tp_size)
    for head in range(total_heads):
        ranks = holders(head, num_heads, total_heads, tp_size)
        assert len(ranks) == max(1, tp_size // total_heads)
        for rank in ranks:
            assert first_head(num_heads, total_heads, rank, tp_size) <= head
        asked = [holder_for(head, num_heads, total_heads, tp_size, spread) for spread in range(len(ranks))]
        assert asked == list(ranks), "spread over all of them"
    held = [holders(head, num_heads, total_heads, tp_size) for head in range(total_heads)]
    assert sum(map(len, held)) == tp_size * num_heads


def test_more_ranks_than_heads_share_them_in_vllms_order() -> None:
    assert [first_head(1, 4, rank, 8) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("cut", [(2, 8, 2), (3, 4, 2), (1, 4, 3), (1, 4, 6), (2, 4, 3)], ids=str)
def test_heads_that_are_no_even_cut_are_not_numbered(cut: tuple[int, int, int]) -> None:
    assert not is_regular(*cut)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tokens": 0}, {"pages_per_block": 0}, {"pages_per_block": 3}, {"page_bytes": 0}, {"num_pages": 0},
        {"num_tensors": 0}, {"block_tokens": 1 << 40}, {"page_bytes": 255}, {"group": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    check_well_formed(CACHE)
    with pytest.raises(PlanError):
        check_well_formed(msgspec.structs.replace(CACHE, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": 1}, {"tensor": -1}, {"offset_bytes": 1}, {"offset_bytes": -64}, {"first_head": -1},
        {"num_heads": 3}, {"num_heads": 0}, {"num_heads": 1 << 40, "rank_heads": 1 << 40}, {"rank_heads": 1},
        {"total_heads": -1}, {"head_stride_bytes": 192}, {"head_stride_bytes": -128}, {"strips": ()},
        {"strips": plain(32, 64)}, {"strips": plain(64, 0)}, {"strips": plain(65, 64)}, {"strips": plain(1 << 60, 1)},
        {"strips": (Strip(-1, 1, 64, 64, 64),)}, {"strips": (Strip(0, 0, 64, 64, 64),)},
        {"strips": (Strip(0, 2, 8, 64, 64),)}, {"strips": (Strip(0, 1 << 40, 1, 1, 1),)},
        {"strips": plain(64, 64) * 65},
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_that_does_not_lie_in_its_pages_is_refused(changes: dict[str, int]) -> None:
    layer = msgspec.structs.replace(LAYER, **changes)
    with pytest.raises(PlanError, match=r"layer layers\.0: does not lie in pages of 256 bytes"):
        check_well_formed(msgspec.structs.replace(CACHE, layers=[layer]))
