# SPDX-License-Identifier: Apache-2.0
"""How a kernel keeps a block is found out by having it write one: made-up kernels, and vLLM's own for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vllm_datadist.worker.interior import Trial, find_interior
from vllm_datadist.worker.kv_layout import Interior
from vllm_datadist.worker.topology import Strip

HEADS, TOKENS, SIZE = 2, 32, 16
Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _find(keep: Keep, dtype: torch.dtype = torch.float32) -> Interior | None:
    """`keep` gives what a head of a block holds: from [token, dimension] of K and V."""
    block = torch.zeros(1, HEADS, TOKENS, 2 * SIZE, dtype=dtype)

    def write(key: torch.Tensor, value: torch.Tensor) -> None:
        for head in range(HEADS):
            block[0, head] = keep(key[:, head], value[:, head]).reshape(TOKENS, 2 * SIZE)

    return find_interior(Trial(block, SIZE, dtype, 1.0, 1.0, "test"), write)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_the_view_says(dtype: torch.dtype) -> None:
    assert _find(lambda key, value: torch.cat([key, value], dim=1), dtype) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_with_tokens_side_by_side_and_v_behind_it(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    found = _find(lambda key, value: torch.cat([key.T.reshape(-1), value.reshape(-1)]), dtype)
    keys = Strip(0, SIZE, TOKENS * size, size, size)
    values = Strip(TOKENS * SIZE * size, 1, SIZE * size, SIZE * size, SIZE * size)
    assert found == Interior((keys, values))


def test_v_before_k() -> None:
    found = _find(lambda key, value: torch.cat([value.reshape(-1), key.reshape(-1)]))
    half, row = TOKENS * SIZE * 4, SIZE * 4
    assert found == Interior((Strip(half, 1, row, row, row), Strip(0, 1, row, row, row)))


def test_tiles_are_a_packing_with_a_name_of_their_order() -> None:
    tiled = _find(lambda key, value: torch.cat([key.view(2, -1, SIZE).transpose(1, 2).reshape(-1), value.reshape(-1)]))
    other = _find(lambda key, value: torch.cat([key.view(4, -1, SIZE).transpose(1, 2).reshape(-1), value.reshape(-1)]))
    assert tiled is not None
    assert other is not None
    assert tiled.packing.startswith("test, ")
    assert tiled.packing != other.packing


def test_what_is_not_each_number_once_is_not_known() -> None:
    assert _find(lambda key, value: torch.cat([key, key], dim=1)) == Interior((), "test, unknown")
    assert _find(lambda key, value: torch.cat([key, value * 0.37 + 0.1], dim=1)) == Interior((), "test, unknown")


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(
    ("dtype", "kept_as", "name", "scale"),
    [
        (torch.float32, torch.float32, "auto", 1.0),
        (torch.bfloat16, torch.bfloat16, "auto", 1.0),
        (torch.bfloat16, torch.uint8, "fp8_e4m3", 0.5),
    ],
)
def test_vllms_own_cpu_kernel(dtype: torch.dtype, kept_as: torch.dtype, name: str, scale: float) -> None:
    """It is this that moving tokens between blocks of two sizes depends on."""
    ops = pytest.importorskip("vllm._custom_ops")
    size, block = 32, torch.zeros(1, HEADS, TOKENS, 64, dtype=kept_as)

    def write(key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = block.view(1, HEADS, 2 * TOKENS, size).chunk(2, dim=2)
        slots = torch.arange(TOKENS)
        ops.cpu_attn_reshape_and_cache(
            key, value, keys, values, slots, "vec", k_scale=scale, v_scale=scale, kv_cache_dtype=name
        )

    item = kept_as.itemsize
    found = find_interior(Trial(block, size, dtype, scale, scale, "vec"), write)
    row = size * item
    assert found == Interior((Strip(0, size, TOKENS * item, item, item), Strip(TOKENS * row, 1, row, row, row)))
