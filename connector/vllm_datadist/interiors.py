# SPDX-License-Identifier: Apache-2.0
"""Asks each kind of attention layer of the engine how it keeps a block: see `worker.interior`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ._vllm import VllmConfig
from .worker.interior import Trial, find_interior
from .worker.kv_layout import Interior

#: Enough to see that all heads are kept alike.
_MAX_HEADS = 2


def kernel_interiors(vllm_config: VllmConfig, views: Mapping[str, torch.Tensor]) -> dict[str, Interior]:
    """By layer, where a block's content does not lie as its view says, or where nobody knows."""
    layers = vllm_config.compilation_config.static_forward_context
    dtype = vllm_config.model_config.dtype
    known: dict[tuple[object, ...], Interior | None] = {}
    found: dict[str, Interior] = {}
    for name, view in views.items():
        layer = layers.get(name)
        impl = getattr(layer, "impl", None)
        if impl is None or view.dim() != 4 or vllm_config.model_config.use_mla:
            continue  # states, and MLA's latent, lie as they are shown
        kind = (type(impl), getattr(layer, "isa", None), view.shape[1:], view.dtype, _units(layer))
        if kind not in known:
            known[kind] = _interior(layer, impl, view, dtype)
        interior = known[kind]
        if interior is not None:
            found[name] = interior
    return found


def _interior(layer: Any, impl: Any, view: torch.Tensor, dtype: torch.dtype) -> Interior | None:
    name = f"{type(impl).__name__} {getattr(layer, 'isa', '')}".rstrip()
    head_size, content = getattr(impl, "head_size", 0), view.shape[3]
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None or content != 2 * head_size:
        return Interior((), f"{name}, not known to this version")
    heads = min(view.shape[1], _MAX_HEADS)
    block = torch.zeros((1, heads, *view.shape[2:]), dtype=view.dtype)
    slots = torch.arange(view.shape[2], dtype=torch.int64)
    write = partial(_write, update, layer, block, slots)
    return find_interior(Trial(block, head_size, dtype, *_units(layer), name), write)


def _write(
    update: Any, layer: Any, block: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    update(layer, key, value, block, slots)


def _units(layer: Any) -> tuple[float, float]:
    """K and V are divided by these when they are written to a quantized cache."""
    return float(getattr(layer, "_k_scale_float", 1.0)), float(getattr(layer, "_v_scale_float", 1.0))
