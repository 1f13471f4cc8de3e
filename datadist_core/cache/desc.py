# SPDX-License-Identifier: Apache-2.0
"""Descriptors and keys: what a cache looks like and how a peer names one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..config import check_range, check_type
from ..errors import ParamInvalid
from ..types import DataType, Memtype, Placement

UINT64_MAX = 2**64 - 1
#: The value of `req_id` or `prefix_id` that means "not this one".
UNSET_ID = UINT64_MAX


class CacheDesc:
    """`num_tensors` equal tensors of `shape`. For paged attention `shape[0]` is the number of blocks.

    Raises TypeError / ValueError for wrong types and ranges; that `num_tensors` is positive and `shape` not empty
    is checked when memory is asked for.
    """

    __slots__ = (
        "_batch_dim_index",
        "_data_type",
        "_kv_tensor_format",
        "_num_tensors",
        "_placement",
        "_seq_len_dim_index",
        "_shape",
    )

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_type("num_tensors", num_tensors, int)
        check_type("shape", shape, list, tuple)
        for i, dim in enumerate(shape):
            check_type(f"shape[{i}]", dim, int)
            check_range(f"shape[{i}]", dim, 1, 2**63 - 1)
        check_type("data_type", data_type, DataType)
        check_type("placement", placement, Placement)
        check_type("batch_dim_index", batch_dim_index, int)
        check_type("seq_len_dim_index", seq_len_dim_index, int)
        if kv_tensor_format is not None:
            check_type("kv_tensor_format", kv_tensor_format, str)
        if shape and not 0 <= batch_dim_index < len(shape):
            raise ValueError(f"batch_dim_index={batch_dim_index} is out of range 0..{len(shape) - 1}")
        self._num_tensors = num_tensors
        self._shape = tuple(shape)
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format

    @property
    def num_tensors(self) -> int:
        return self._num_tensors

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def data_type(self) -> DataType:
        return self._data_type

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def batch_dim_index(self) -> int:
        return self._batch_dim_index

    @property
    def seq_len_dim_index(self) -> int:
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        return self._kv_tensor_format

    @property
    def batch_size(self) -> int:
        return self._shape[self._batch_dim_index]

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self._shape) * self._data_type.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one item of the first dimension (one block, for paged attention)."""
        return self.size // self._shape[0]

    def check_usable(self) -> None:
        """Raise ParamInvalid unless memory can be laid out for this."""
        if self._num_tensors <= 0:
            raise ParamInvalid(f"cache_desc.num_tensors={self._num_tensors} must be greater than 0")
        if not self._shape:
            raise ParamInvalid("cache_desc.shape is empty; it needs at least one dimension")
        if self._data_type is DataType.DT_STRING:
            raise ParamInvalid("cache_desc.data_type=DT_STRING cannot be used for a cache")

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type.name}, "
            f"placement={self._placement.name})"
        )


class _Key:
    """Keys compare and hash by value. Missing and unknown parameters raise ParamInvalid with the original's words."""

    __slots__ = ("_values",)
    _fields: tuple[str, ...] = ()
    _required: tuple[str, ...] = ()
    _defaults: dict[str, int] = {}  # noqa: RUF012 - a constant of each subclass, never written

    def __init__(self, *args: int, **kwargs: int) -> None:
        values = dict(self._defaults)
        if len(args) > len(self._fields):
            raise ParamInvalid(
                f"Unsupported param: {type(self).__name__} takes {len(self._fields)} values, got {len(args)}"
            )
        values.update(zip(self._fields, args, strict=False))
        if "prompt_cluster_id" in kwargs:
            kwargs["cluster_id"] = kwargs.pop("prompt_cluster_id")
        for name, value in kwargs.items():
            if name not in self._fields:
                raise ParamInvalid(f"Unsupported param: {name}; {type(self).__name__} takes {', '.join(self._fields)}")
            values[name] = value
        for name in self._required:
            if name not in values:
                raise ParamInvalid(f"{name} is required")
        for name, value in values.items():
            check_type(name, value, int)
            check_range(name, value, 0, UINT64_MAX)
        self._values = tuple(values[name] for name in self._fields)

    def _get(self, name: str) -> int:
        return self._values[self._fields.index(name)]

    @property
    def cluster_id(self) -> int:
        return self._get("cluster_id")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other._values

    def __hash__(self) -> int:
        return hash((type(self), self._values))

    def __repr__(self) -> str:
        inner = ", ".join(f"{n}={v}" for n, v in zip(self._fields, self._values, strict=True))
        return f"{type(self).__name__}({inner})"


class CacheKey(_Key):
    """A contiguous cache entry of `cluster_id`, by request or by prefix (exactly one of the two is set)."""

    __slots__ = ()
    _fields = ("cluster_id", "req_id", "model_id", "prefix_id")
    _required = ("cluster_id", "req_id")
    _defaults = {"model_id": 0, "prefix_id": UNSET_ID}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def prompt_cluster_id(self) -> int:
        return self.cluster_id

    @property
    def req_id(self) -> int:
        return self._get("req_id")

    @property
    def model_id(self) -> int:
        return self._get("model_id")

    @property
    def prefix_id(self) -> int:
        return self._get("prefix_id")


class CacheKeyByIdAndIndex(_Key):
    """A cache of `cluster_id` by its id there, and the batch entry in it."""

    __slots__ = ()
    _fields = ("cluster_id", "cache_id", "batch_index")
    _required = ("cluster_id", "cache_id")
    _defaults = {"batch_index": 0}  # noqa: RUF012

    @property
    def cache_id(self) -> int:
        return self._get("cache_id")

    @property
    def batch_index(self) -> int:
        return self._get("batch_index")


class BlocksCacheKey(_Key):
    """The blocks cache of `cluster_id` for one model."""

    __slots__ = ()
    _fields = ("cluster_id", "model_id")
    _required = ("cluster_id",)
    _defaults = {"model_id": 0}  # noqa: RUF012

    @property
    def prompt_cluster_id(self) -> int:
        return self.cluster_id

    @property
    def model_id(self) -> int:
        return self._get("model_id")


class MemInfo:
    """A range of memory: `size` bytes at `addr`."""

    __slots__ = ("addr", "mem_type", "size")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_type("mem_type", mem_type, Memtype)
        check_type("addr", addr, int)
        check_type("size", size, int)
        check_range("addr", addr, 0, UINT64_MAX)
        check_range("size", size, 1, UINT64_MAX)
        self.mem_type = mem_type
        self.addr = addr
        self.size = size
