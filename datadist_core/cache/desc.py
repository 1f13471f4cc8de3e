# SPDX-License-Identifier: Apache-2.0
"""Descriptors and keys: what a cache looks like and how a peer names one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..checks import check_range, check_type
from ..errors import ParamInvalid
from ..types import DataType, Memtype, Placement

UINT64_MAX = 2**64 - 1
#: The value of `req_id` or `prefix_id` that means "not this one".
UNSET_ID = UINT64_MAX


class CacheDesc:
    """`num_tensors` equal tensors of `shape`. For paged attention `shape[0]` is the number of blocks. Immutable.

    Args:
        num_tensors: usually two per layer (K and V).
        shape: dimensions of each tensor, in elements, each at least 1.
        data_type: element type.
        placement: the pool it is allocated from.
        batch_dim_index: the dimension of `shape` that counts batch entries.
        seq_len_dim_index, kv_tensor_format: for the original only.

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
        if shape:
            check_range("batch_dim_index", batch_dim_index, 0, len(shape) - 1)
            check_range("seq_len_dim_index", seq_len_dim_index, -len(shape), len(shape) - 1)
        self._num_tensors = num_tensors
        self._shape = tuple(shape)
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format

    @property
    def num_tensors(self) -> int:
        """How many equal tensors the cache has, usually two per layer (K and V)."""
        return self._num_tensors

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of each tensor, in elements."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Which pool it lives in: DEVICE by default."""
        return self._placement

    @property
    def batch_dim_index(self) -> int:
        """Which dimension of `shape` counts batch entries; 0 by default."""
        return self._batch_dim_index

    @property
    def seq_len_dim_index(self) -> int:
        """Which dimension of `shape` is the sequence length; -1 (the last) by default. No effect here."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """Any str, None by default. No effect here."""
        return self._kv_tensor_format

    @property
    def batch_size(self) -> int:
        """Number of batch entries: `shape[batch_dim_index]`."""
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
    _defaults: dict[str, int] = {}  # noqa: RUF012 - constants of each subclass, never written
    _aliases: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, *args: int, **kwargs: int) -> None:
        values = self._defaults | self._given(args, kwargs)
        for name in self._required:
            if name not in values:
                raise ParamInvalid(f"{name} is required")
        for name, value in values.items():
            check_type(name, value, int)
            check_range(name, value, 0, UINT64_MAX)
        self._values = tuple(values[name] for name in self._fields)

    def _given(self, args: tuple[int, ...], kwargs: dict[str, int]) -> dict[str, int]:
        kind, takes = type(self).__name__, ", ".join(self._fields)
        if len(args) > len(self._fields):
            raise ParamInvalid(f"Unsupported param: {kind} takes {len(self._fields)} values, got {len(args)}")
        given = dict(zip(self._fields, args, strict=False))
        for alias, value in kwargs.items():
            name = self._aliases.get(alias, alias)
            if name not in self._fields:
                raise ParamInvalid(f"Unsupported param: {alias}; {kind} takes {takes}")
            if name in given:
                raise ParamInvalid(f"Unsupported param: {alias}; {name} is given twice")
            given[name] = value
        return given

    def _get(self, name: str) -> int:
        return self._values[self._fields.index(name)]

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache: uint64."""
        return self._values[0]  # of every kind of key

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other._values

    def __hash__(self) -> int:
        return hash((type(self), self._values))

    def __repr__(self) -> str:
        inner = ", ".join(f"{n}={v}" for n, v in zip(self._fields, self._values, strict=True))
        return f"{type(self).__name__}({inner})"


class CacheKey(_Key):
    """A contiguous cache entry of `cluster_id`, by request or by prefix (exactly one of the two is set).

    Args:
        cluster_id: its owner; `prompt_cluster_id` is another name for it.
        req_id: the request; 2**64-1 for a key by prefix.
        model_id: the model.
        prefix_id: the common prefix; 2**64-1 for a key by request.

    All are uint64, positional or by name. Compares and hashes by value.

    Raises TypeError, ValueError for what is no uint64, or ParamInvalid for a missing or unknown argument. That one of
    the two ids is set is checked at use.
    """

    __slots__ = ()
    _fields = ("cluster_id", "req_id", "model_id", "prefix_id")
    _required = ("cluster_id", "req_id")
    _defaults = {"model_id": 0, "prefix_id": UNSET_ID}  # noqa: RUF012
    _aliases = {"prompt_cluster_id": "cluster_id"}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def prompt_cluster_id(self) -> int:
        """V1's name of `cluster_id`."""
        return self.cluster_id

    @property
    def req_id(self) -> int:
        """The request: uint64; 2**64-1 where the key goes by prefix."""
        return self._get("req_id")

    @property
    def model_id(self) -> int:
        """The model: uint64, 0 by default."""
        return self._get("model_id")

    @property
    def prefix_id(self) -> int:
        """The common prefix: uint64; 2**64-1, the default, where the key goes by request."""
        return self._get("prefix_id")


class CacheKeyByIdAndIndex(_Key):
    """A cache of `cluster_id` by its id there, and the batch entry in it.

    Args:
        cluster_id: its owner.
        cache_id: its `Cache.cache_id` there.
        batch_index: the batch entry.

    Arguments, equality and errors as for `CacheKey`.
    """

    __slots__ = ()
    _fields = ("cluster_id", "cache_id", "batch_index")
    _required = ("cluster_id", "cache_id")
    _defaults = {"batch_index": 0}  # noqa: RUF012

    @property
    def cache_id(self) -> int:
        """`Cache.cache_id` at its owner: uint64."""
        return self._get("cache_id")

    @property
    def batch_index(self) -> int:
        """The batch entry, 0 by default."""
        return self._get("batch_index")


class BlocksCacheKey(_Key):
    """The blocks cache of `cluster_id` for one model.

    Args:
        cluster_id: its owner; `prompt_cluster_id` is another name for it.
        model_id: the model.

    Arguments, equality and errors as for `CacheKey`.
    """

    __slots__ = ()
    _fields = ("cluster_id", "model_id")
    _required = ("cluster_id",)
    _defaults = {"model_id": 0}  # noqa: RUF012
    _aliases = {"prompt_cluster_id": "cluster_id"}  # noqa: RUF012

    @property
    def prompt_cluster_id(self) -> int:
        """V1's name of `cluster_id`."""
        return self.cluster_id

    @property
    def model_id(self) -> int:
        """The model: uint64, 0 by default."""
        return self._get("model_id")


class MemInfo:
    """A range of memory: `size` bytes at `addr`.

    Attributes:
        mem_type: which kind of memory.
        addr: where it begins, > 0.
        size: bytes, > 0.

    Raises TypeError or ValueError, naming the argument.
    """

    __slots__ = ("addr", "mem_type", "size")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_type("mem_type", mem_type, Memtype)
        check_type("addr", addr, int)
        check_type("size", size, int)
        check_range("addr", addr, 1, UINT64_MAX)
        check_range("size", size, 1, UINT64_MAX)
        self.mem_type = mem_type
        self.addr = addr
        self.size = size
