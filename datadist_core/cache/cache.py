# SPDX-License-Identifier: Apache-2.0
"""`Cache`: the handle a user holds, and zero-copy views of its memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..config import check_type
from ..errors import FeatureNotEnabled, ParamInvalid
from ..types import DataType, Placement
from .desc import CacheDesc

if TYPE_CHECKING:
    import torch

#: `cache_id` of memory that only this process knows (`Cache.create_cpu_cache`).
LOCAL_CACHE_ID = -1


class Cache:
    """`cache_desc.num_tensors` tensors at `tensor_addrs`. V1 calls it KvCache.

    The handle does not own the memory: `CacheManager` does, until the cache is deallocated or unregistered.
    """

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        is_blocks_cache: bool,
        owner: object = None,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = list(tensor_addrs)
        self._is_blocks_cache = is_blocks_cache
        self._owner = owner

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Wrap the caller's own host memory, one address per tensor; it stays the caller's to keep alive."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_addrs(cache_desc, addrs)
        if cache_desc.placement is not Placement.HOST:
            raise ParamInvalid(f"cache_desc.placement={cache_desc.placement.name}: create_cpu_cache needs HOST")
        return cls(LOCAL_CACHE_ID, cache_desc, addrs, is_blocks_cache=True)

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        return list(self._tensor_addrs)

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        return [self.tensor_addrs]

    @property
    def is_blocks_cache(self) -> bool:
        return self._is_blocks_cache

    def numpy(self) -> list[npt.NDArray[Any]]:
        """One writable ndarray of `cache_desc.shape` per tensor, over the same memory.

        bf16 and fp8 need the package ml_dtypes. A view keeps the mapping alive, but not its content: once the cache
        is freed the bytes may belong to another one.
        """
        dtype = _numpy_dtype(self._cache_desc.data_type)
        return [np.frombuffer(self._buffer(a), dtype=dtype).reshape(self._cache_desc.shape) for a in self._tensor_addrs]

    def tensors(self) -> list[torch.Tensor]:
        """Like `numpy()`, as torch tensors."""
        import torch

        dtype = getattr(torch, self._cache_desc.data_type.value)
        return [torch.frombuffer(self._buffer(a), dtype=dtype).view(self._cache_desc.shape) for a in self._tensor_addrs]

    def _buffer(self, address: int) -> Any:
        buffer = (ctypes.c_uint8 * self._cache_desc.size).from_address(address)
        buffer._owner = self._owner  # type: ignore[attr-defined]  # lives as long as any view of the buffer
        return buffer

    def __repr__(self) -> str:
        kind = "blocks" if self._is_blocks_cache else "contiguous"
        return f"Cache(cache_id={self._cache_id}, {kind}, {self._cache_desc!r})"


KvCache = Cache


def check_addrs(cache_desc: CacheDesc, addrs: object) -> None:
    """Raise unless `addrs` is one non-zero address per tensor of `cache_desc`."""
    check_type("addrs", addrs, list, tuple)
    cache_desc.check_usable()
    for i, address in enumerate(addrs):  # type: ignore[var-annotated, arg-type]
        check_type(f"addrs[{i}]", address, int)
        if address <= 0:
            raise ParamInvalid(f"addrs[{i}]={address} is not a memory address")
    if len(addrs) != cache_desc.num_tensors:  # type: ignore[arg-type]
        raise ParamInvalid(
            f"addrs has {len(addrs)} addresses for cache_desc.num_tensors={cache_desc.num_tensors}; one each is needed"  # type: ignore[arg-type]
        )


def _numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    try:
        return np.dtype(data_type.value)
    except TypeError:
        return _extended_dtype(data_type)


def _extended_dtype(data_type: DataType) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise FeatureNotEnabled(f"NumPy views of {data_type.name} need `pip install ml_dtypes`") from error
    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, data_type.value))
    return extended
