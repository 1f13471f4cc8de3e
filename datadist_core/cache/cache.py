# SPDX-License-Identifier: Apache-2.0
"""`Cache`: the handle a user holds. `views` says what its views keep, also when the cache is freed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy.typing as npt

from ..checks import check_type
from ..errors import CacheNotExist, ParamInvalid
from ..memory.live import Hold, live_ranges
from ..types import Placement
from .desc import CacheDesc
from .views import Tensor, check_address

if TYPE_CHECKING:
    import torch

#: `cache_id` of memory that only this process knows (`Cache.create_cpu_cache`).
LOCAL_CACHE_ID = -1


class Cache:
    """`cache_desc.num_tensors` tensors at `tensor_addrs`. V1 calls it KvCache.

    The handle does not own the memory: `CacheManager` does, until the cache is deallocated or unregistered, and
    views (`numpy()`, `tensors()`) do for as long as they live.

    Args:
        hold: gives a token that keeps the memory; raises CacheNotExist when the cache is freed. None, or a token
            that is None: the memory was named by its addresses only. Where those are in one of our caches, views
            keep that cache's memory; other memory is the caller's to keep.
    """

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        is_blocks_cache: bool,
        hold: Hold | None = None,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = list(tensor_addrs)
        self._is_blocks_cache = is_blocks_cache
        self._hold: Hold = hold or (lambda: None)

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
        """Its id at its owner, > 0: what `CacheKeyByIdAndIndex` names; -1 for one made by `create_cpu_cache`."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What it looks like."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """The address of each tensor in this process (a copy of the list)."""
        return list(self._tensor_addrs)

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """[`tensor_addrs`]: one list per device, and here that is one."""
        return [self.tensor_addrs]

    @property
    def is_blocks_cache(self) -> bool:
        """Whether it is paged (blocks), and not contiguous (batch entries)."""
        return self._is_blocks_cache

    def numpy(self) -> list[npt.NDArray[Any]]:
        """One writable ndarray of `cache_desc.shape` per tensor, over the same memory, no copy.

        bf16 and fp8 arrays have the types of the package ml_dtypes.

        A view keeps its memory. When the cache is freed while views live, it is gone for everyone at once (handle,
        keys, peers); its memory stays as it is and returns to the pool after the last view is gone, as does the
        whole pool's mapping after `finalize`. What counts as a view: the arrays, their slices and reshapes, and
        whatever else was made from them without a copy. Registered memory stays the caller's to keep.

        Raises:
            CacheNotExist: the cache has been freed.
            ParamInvalid: the addresses of this cache lie in a pool's memory that has been freed.

        Thread-safe.
        """
        return [tensor.numpy() for tensor in self._views()]

    def tensors(self) -> list[torch.Tensor]:
        """Like `numpy()`, as torch tensors on the CPU.

        Raises:
            CacheNotExist, ParamInvalid: as `numpy()`; also ParamInvalid for an address that is not a multiple of
                the element size.
            FeatureNotEnabled: torch is not installed, or too old for this type.
        """
        return [tensor.torch() for tensor in self._views()]

    def invalidate(self) -> None:
        """The id does not stand for this cache any more: no more views from this handle. For the cache table."""
        self._hold = partial(_freed, self._cache_id)

    def _views(self) -> list[Tensor]:
        """All tensors. They share one token: the memory of a cache is one piece, kept or given back as a whole."""
        desc = self._cache_desc
        owners = self._owners()
        return [
            Tensor(address, desc.shape, desc.data_type, owner)
            for address, owner in zip(self._tensor_addrs, owners, strict=True)
        ]

    def _owners(self) -> list[object]:
        token = self._hold()
        if token is not None:
            return [token] * len(self._tensor_addrs)
        size_bytes = self._cache_desc.size
        return [live_ranges.keep(a, size_bytes, f"tensor_addrs[{i}]") for i, a in enumerate(self._tensor_addrs)]

    def __repr__(self) -> str:
        kind = "blocks" if self._is_blocks_cache else "contiguous"
        return f"Cache(cache_id={self._cache_id}, {kind}, {self._cache_desc!r})"


KvCache = Cache


def cache_tensors(cache: Cache, tensor_index: int = 0) -> list[Tensor]:
    """Tensor `tensor_index` of a cache, in a list of one (one per device, in the original's words).

    Raises TypeError, ParamInvalid for an index that is out of range, CacheNotExist when the cache has been freed.
    """
    check_type("cache", cache, Cache)
    check_type("tensor_index", tensor_index, int)
    num_tensors = cache.cache_desc.num_tensors
    if not 0 <= tensor_index < num_tensors:
        raise ParamInvalid(f"tensor_index={tensor_index} is out of range 0..{num_tensors - 1}")
    return [cache._views()[tensor_index]]


def check_addrs(cache_desc: CacheDesc, addrs: object) -> None:
    """Raise unless `addrs` is one non-zero address per tensor of `cache_desc`."""
    check_type("addrs", addrs, list, tuple)
    cache_desc.check_usable()
    for i, address in enumerate(addrs):  # type: ignore[var-annotated, arg-type]
        check_address(f"addrs[{i}]", address, cache_desc.size)
    if len(addrs) != cache_desc.num_tensors:  # type: ignore[arg-type]
        raise ParamInvalid(
            f"addrs has {len(addrs)} addresses for cache_desc.num_tensors={cache_desc.num_tensors}; one each is needed"  # type: ignore[arg-type]
        )


def _freed(cache_id: int) -> NoReturn:
    raise CacheNotExist(f"cache_id={cache_id} has been freed")
