# SPDX-License-Identifier: Apache-2.0
"""Zero-copy views of cache memory: NumPy arrays and torch tensors over addresses.

Every view keeps its memory. What happens when a cache is freed while views of it live:

- The cache is gone for everyone at once: its handle, its keys and linked peers get LLM_KV_CACHE_NOT_EXIST.
- Its memory stays as it is, readable and writable through the views, and is in no other cache. It returns to the
  pool when the last view is gone: the arrays and tensors themselves, slices, reshapes, and whatever else was made
  from them without a copy.
- After `LLMDataDist.finalize` the same holds for the whole pool: it stays mapped until the last view is gone.

Memory that a user registered, or named by an address outside our pools, is the user's to keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..checks import check_type
from ..errors import FeatureNotEnabled, ParamInvalid
from ..memory.live import bytes_at, live_ranges
from ..types import DataType

if TYPE_CHECKING:
    import torch

_ADDRESS_END = 1 << 64  # one past the last address there can be


def ndarray_at(address: int, shape: Sequence[int], data_type: DataType, owner: object) -> npt.NDArray[Any]:
    """A writable array of `shape` at `address`, no copy. It and everything made from it keep `owner` alive.

    bf16 and fp8 arrays have the types of the package ml_dtypes.
    """
    raw = bytes_at(address, math.prod(shape) * data_type.item_bytes, owner)
    return raw.view(numpy_dtype(data_type)).reshape(shape)


def torch_at(address: int, shape: Sequence[int], data_type: DataType, owner: object) -> torch.Tensor:
    """Like `ndarray_at`, as a torch tensor on the CPU.

    Raises:
        ParamInvalid: `address` is not a multiple of the element size, which torch relies on.
        FeatureNotEnabled: torch is not installed, or too old for this type.
    """
    dtype = _torch_dtype(_import_torch(), data_type)
    if address % data_type.item_bytes:
        raise _misaligned("address", address, data_type)
    raw = bytes_at(address, math.prod(shape) * data_type.item_bytes, owner)
    # Not from_numpy: a torch built for an older NumPy refuses the arrays of this one.
    flat: torch.Tensor = _import_torch().frombuffer(raw, dtype=dtype)
    return flat.view(tuple(shape))


def create_tensors(shape: Sequence[int], dtype: torch.dtype | DataType, addrs: Sequence[int]) -> list[torch.Tensor]:
    """One torch tensor of `shape` over the memory at each address, without a copy: torchair's create_npu_tensors.

    Args:
        shape: list or tuple of dimensions, each at least 1.
        dtype: a torch.dtype that a cache can have, or a DataType.
        addrs: list or tuple of addresses, e.g. `cache.tensor_addrs`; or the caller's own memory.

    Returns:
        The tensors, in the order of `addrs`. Where an address is in a cache allocated by this process, the tensor
        keeps that memory, as those of `cache.tensors()` do: also after the cache is freed. Memory outside our pools
        is the caller's: it must be mapped, large enough and stay so; nothing here can check that.

    Raises:
        TypeError: an argument has the wrong type.
        ParamInvalid: `shape` is empty or has a dimension below 1; no cache can have `dtype`; an address is not
            positive or not aligned to the element size, runs past the end of the cache tensor it is in, or is in
            a pool but in no cache (freed or never allocated).
        FeatureNotEnabled: torch is not installed, or too old for this type.

    Thread-safe.
    """
    torch = _import_torch()
    _check_shape(shape)
    data_type = _data_type_of(torch, dtype)
    size_bytes = math.prod(shape) * data_type.item_bytes
    check_type("addrs", addrs, list, tuple)
    for i, address in enumerate(addrs):
        check_address(f"addrs[{i}]", address, size_bytes)
        if address % data_type.item_bytes:
            raise _misaligned(f"addrs[{i}]", address, data_type)
    owners = [live_ranges.keep(address, size_bytes, f"addrs[{i}]") for i, address in enumerate(addrs)]
    return [torch_at(address, shape, data_type, owner) for address, owner in zip(addrs, owners, strict=True)]


class Tensor:
    """One tensor of a cache, usable without torch. A view: it keeps its memory, as all views do (see above).

    V1's `get_cache_tensors` returns these. `np.asarray(tensor)` works too, without a copy.
    """

    __slots__ = ("_address", "_data_type", "_owner", "_shape")

    def __init__(self, address: int, shape: tuple[int, ...], data_type: DataType, owner: object) -> None:
        self._address = address
        self._shape = shape
        self._data_type = data_type
        self._owner = owner

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, in elements."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Its element type; `numpy()` and `torch()` have the matching one."""
        return self._data_type

    def numpy(self, copy: bool = False) -> npt.NDArray[Any]:
        """The tensor as a writable ndarray over the same memory; with `copy` as one of its own."""
        check_type("copy", copy, bool)
        view = ndarray_at(self._address, self._shape, self._data_type, self._owner)
        return view.copy() if copy else view

    def torch(self) -> torch.Tensor:
        """The tensor as a torch tensor over the same memory. FeatureNotEnabled without torch."""
        return torch_at(self._address, self._shape, self._data_type, self._owner)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """NumPy's protocol: `copy` None means only if another `dtype` needs one; False refuses that."""
        view = self.numpy()
        wanted = view.dtype if dtype is None else np.dtype(dtype)
        if wanted == view.dtype:
            return view.copy() if copy else view
        if copy is False:
            raise ValueError(f"dtype={wanted} of a {view.dtype} tensor needs a copy, which copy=False forbids")
        return view.astype(wanted)

    def __repr__(self) -> str:
        return f"Tensor(shape={self._shape}, data_type={self._data_type.name})"


def numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    """The NumPy type of a cache's elements; that of ml_dtypes where NumPy has none."""
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


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise FeatureNotEnabled("torch tensors need torch, which is not installed; numpy() works without") from error
    return torch


def _torch_dtype(torch: Any, data_type: DataType) -> Any:
    dtype = getattr(torch, data_type.value, None)
    if dtype is None:
        raise FeatureNotEnabled(f"torch {torch.__version__} has no type for {data_type.name}; a later one has")
    return dtype


def _data_type_of(torch: Any, dtype: object) -> DataType:
    check_type("dtype", dtype, torch.dtype, DataType)
    usable = {data_type.value: data_type for data_type in DataType if data_type.item_bytes}
    name = dtype.value if isinstance(dtype, DataType) else str(dtype).removeprefix("torch.")
    if name not in usable:
        raise ParamInvalid(f"dtype={dtype} cannot be used for a cache; one of {', '.join(usable)} can")
    return usable[name]


def _check_shape(shape: object) -> None:
    check_type("shape", shape, list, tuple)
    if not shape:
        raise ParamInvalid("shape is empty; it needs at least one dimension")
    for i, dim in enumerate(shape):  # type: ignore[var-annotated, arg-type]
        check_type(f"shape[{i}]", dim, int)
        if dim < 1:
            raise ParamInvalid(f"shape[{i}]={dim} must be at least 1")


def check_address(name: str, address: object, size_bytes: int) -> None:
    """Raise unless `size_bytes` bytes of memory can be at `address`."""
    check_type(name, address, int)
    if not 0 < address <= _ADDRESS_END - size_bytes:  # type: ignore[operator]
        raise ParamInvalid(f"{name}={address} is not the address of {size_bytes} bytes of memory")


def _misaligned(name: str, address: int, data_type: DataType) -> ParamInvalid:
    return ParamInvalid(
        f"{name}={address} must be a multiple of {data_type.item_bytes}, the bytes of a {data_type.name} element"
    )
