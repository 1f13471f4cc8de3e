# SPDX-License-Identifier: Apache-2.0
"""STAND-IN, not the vendor's package: the value types of `ascend_standin`, and how it complains.

The enums are types of their own on purpose: ours, where the vendor's are due, are found out.
"""

from __future__ import annotations

import functools
import inspect
import ipaddress
import itertools
import logging
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NoReturn, ParamSpec, TypeVar

from .. import types as ours
from ..config import LLMConfig as OurConfig

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Everything that was asked of the stand-in and is not in the published API, in this process.
complaints: list[str] = []

LLMRole = IntEnum("LLMRole", {name: ours.LLMRole[name].value for name in ("PROMPT", "DECODER", "MIX")})  # type: ignore[misc]
Placement = IntEnum("Placement", {one.name: one.value for one in ours.Placement})  # type: ignore[misc]
LLMStatusCode = IntEnum("LLMStatusCode", {one.name: one.value for one in ours.LLMStatusCode})  # type: ignore[misc]
DataType = Enum("DataType", {one.name: one.value for one in ours.DataType if "FLOAT8" not in one.name})  # type: ignore[misc]

_UINT64_MAX = 2**64 - 1
_CONFIG_NAMES = frozenset({
    "device_id", "listen_ip_info", "sync_kv_timeout", "ge_options", "mem_pool_cfg", "host_mem_pool_cfg",
    "enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role", "local_comm_res",
    "transfer_backend", "global_resource_config", "link_total_time", "link_retry_count", "rdma_traffic_class",
    "rdma_service_level", "mem_utilization", "buf_pool_cfg", "deploy_res_path",
})  # fmt: skip


class NotPublished(AssertionError):
    """A call that the published API does not allow: a mistake of the caller, never of a peer."""


class LLMException(RuntimeError):
    """What the API documents, with `status_code`."""

    def __init__(self, status_code: LLMStatusCode, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


def complain(text: str) -> NoReturn:
    """Remember it, for whoever checks at the end of a test, log it, and raise it."""
    complaints.append(text)
    logger.error("not published: %s", text)
    raise NotPublished(text)


def published(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose signature is that of the published API: other arguments are complained of."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            complain(f"{function.__qualname__}{signature}: {error}")
        return function(*args, **kwargs)

    return checked


def require(name: str, value: object, *types: type) -> None:
    """Complain unless `value` is of exactly one of the types: no bool for an int, no NumPy integer either."""
    if type(value) not in types:
        complain(f"{name}={value!r} is {type(value).__name__}, not {' or '.join(t.__name__ for t in types)}")


def require_range(name: str, value: object, low: int, high: int) -> None:
    require(name, value, int)
    if not low <= value <= high:  # type: ignore[operator]  # an int by now
        complain(f"{name}={value} is out of range {low}..{high}")


def require_ints(name: str, values: list[int] | tuple[int, ...]) -> None:
    """Complain unless it is a list or tuple of non-negative ints."""
    require(name, values, list, tuple)
    for kind in set(map(type, values)):
        if kind is not int:
            complain(f"{name} holds {kind.__name__}, not int")
    if values and min(values) < 0:
        complain(f"{name} holds a negative number")


class Published:
    """Objects that have nothing but what is published."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        complain(f"{type(self).__name__}.{name} is not published, or not part of the stand-in")


class LLMConfig(Published):
    """Values are checked by our own LLMConfig, whose checks are tested against the same page."""

    _inner: OurConfig

    def __init__(self) -> None:
        object.__setattr__(self, "_inner", OurConfig())

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _CONFIG_NAMES:
            complain(f"LLMConfig.{name} is not published")
        try:
            setattr(self._inner, name, value)
        except (TypeError, ValueError, RuntimeError) as error:
            complain(f"LLMConfig.{name}: {error}")

    @published
    def generate_options(self) -> dict[str, str]:
        return self._inner.generate_options()


class LLMClusterInfo(Published):
    def __init__(self) -> None:
        self._id: int | None = None
        self.local: list[tuple[str, int]] = []
        self.remote: list[tuple[str, int]] = []

    @property
    def remote_cluster_id(self) -> int:
        if self._id is None:
            complain("LLMClusterInfo.remote_cluster_id was not set")
        return self._id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        require_range("remote_cluster_id", value, 0, _UINT64_MAX)
        self._id = value

    @published
    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        self.local.append(_ip_info(ip, port))

    @published
    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        self.remote.append(_ip_info(ip, port))


class CacheDesc(Published):
    @published
    def __init__(
        self,
        num_tensors: int,
        shape: list[int] | tuple[int, ...],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,  # type: ignore[attr-defined]
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        require_range("num_tensors", num_tensors, 1, 1 << 20)
        require("shape", shape, list, tuple)
        for size in shape:
            require_range("shape", size, 1, 2**63 - 1)
        require("data_type", data_type, DataType)
        require("placement", placement, Placement)
        require("batch_dim_index", batch_dim_index, int)
        require("seq_len_dim_index", seq_len_dim_index, int)
        self.num_tensors, self.shape, self.placement = num_tensors, list(shape), placement
        self.block_bytes = ours.DataType[data_type.name].item_bytes
        for size in shape[1:]:
            self.block_bytes *= size


class BlocksCacheKey(Published):
    @published
    def __init__(self, cluster_id: int, model_id: int = 0) -> None:
        require_range("cluster_id", cluster_id, 0, _UINT64_MAX)
        require_range("model_id", model_id, 0, _UINT64_MAX)
        self.cluster_id, self.model_id = cluster_id, model_id


_cache_ids = itertools.count(1)


class Cache(Published):
    """What registering returns."""

    def __init__(self, cache_desc: CacheDesc, tensor_addrs: list[int]) -> None:
        self.cache_id = next(_cache_ids)
        self.cache_desc = cache_desc
        self.tensor_addrs = tensor_addrs
        self.is_blocks_cache = True


def _ip_info(ip: str | int, port: int) -> tuple[str, int]:
    """The original knows IPv4 only."""
    require("ip", ip, str, int)
    require_range("port", port, 1, 65535)
    try:
        return str(ipaddress.IPv4Address(ip if isinstance(ip, str) else ip.to_bytes(4, "little"))), port
    except ValueError as error:
        complain(f"ip={ip!r}: {error}")
