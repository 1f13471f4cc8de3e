# SPDX-License-Identifier: Apache-2.0
"""Placing vLLM's KV cache in memory that same-host peers can map, without vLLM knowing.

vLLM makes the KV cache of all layers by one `torch.zeros(size, dtype=int8)` inside a context that the connector may
supply. Ours answers exactly that call with a tensor over pool memory, and lets everything else through. If the call
does not come (another device, another vLLM), the tensors are registered where they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """`size_bytes` of zeroed memory at `address`, valid as long as `owner` lives."""

    address: int
    size_bytes: int
    owner: object


class KvCachePlacement(TorchFunctionMode):
    """The context manager. `placed` says whether the allocation was seen; entered at most once at a time.

    Args:
        size_bytes: the size of the allocation to answer.
        allocate: makes the memory, called when the allocation is seen.
    """

    def __init__(self, size_bytes: int, allocate: Callable[[int], PoolMemory]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._allocate = allocate
        self.placed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and not self.placed and self._is_kv_cache(args, kwargs):
            tensor = tensor_over(self._allocate(self._size_bytes))
            self.placed = True
            return tensor
        return func(*args, **kwargs)

    def _is_kv_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = torch.device(kwargs.get("device") or "cpu")
        return args == (self._size_bytes,) and kwargs.get("dtype") == torch.int8 and device.type == "cpu"


def tensor_over(memory: PoolMemory) -> torch.Tensor:
    """An int8 tensor over `memory`, which it keeps alive."""
    kept_alive: Any = type("PoolBytes", (ctypes.c_char * memory.size_bytes,), {})
    view = kept_alive.from_address(memory.address)
    view.owner = memory.owner
    return torch.frombuffer(view, dtype=torch.int8)
