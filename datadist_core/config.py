# SPDX-License-Identifier: Apache-2.0
"""`LLMConfig` (what users fill in) and `Settings` (what the rest of the package reads).

The option strings of LLM-DataDist exist only here: `LLMConfig` writes them, `Settings.from_options` parses them,
and no other module reads an option key or the environment.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ParamInvalid
from .types import Placement

logger = logging.getLogger(__name__)

UINT32_MAX = 2**32 - 1
DEFAULT_PAGE_SHIFT = 16
BUILT_IN_BACKENDS = ("auto", "loopback", "shm", "cma", "tcp", "nixl", "mooncake", "hixl")


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address. `host` may be a name, IPv4 or IPv6 (without brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, name: str = "listen_ip_info") -> HostPort:
        """From "ip:port", "name:port" or "[ipv6]:port"; also bare "ipv6:port", as the original accepts."""
        host, sep, port = text.rpartition(":")
        if not sep or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ParamInvalid(f'{name}={text!r} is not "ip:port" with a port of 0..65535 (0 picks a free one)')
        return cls(host.strip("[]"), int(port))


def ip_text(ip: str | int, name: str = "ip") -> str:
    """The original's int form of an IPv4 address (network byte order as little-endian int) as text."""
    if isinstance(ip, bool) or not isinstance(ip, str | int):
        raise TypeError(f"{name} must be a str or an int, not {type(ip).__name__}")
    if isinstance(ip, str):
        if not ip.strip():
            raise ParamInvalid(f"{name} is empty; give an IPv4 or IPv6 address or a host name")
        return ip.strip().strip("[]")
    if not 0 <= ip <= UINT32_MAX:
        raise ValueError(f"{name}={ip} does not fit the int form of an IPv4 address (0..{UINT32_MAX})")
    return str(ipaddress.IPv4Address(ip.to_bytes(4, "little")))


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """One memory pool: `memory_size_bytes` mapped lazily, handed out in pages of `1 << page_shift` bytes."""

    memory_size_bytes: int
    page_shift: int = DEFAULT_PAGE_SHIFT

    @classmethod
    def parse(cls, text: str, name: str) -> PoolSettings:
        values = _json_object(text, name)
        size = values.get("memory_size")
        shift = values.get("page_shift", DEFAULT_PAGE_SHIFT)
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ParamInvalid(f"{name}: memory_size={size!r} must be a number of bytes greater than 0")
        if isinstance(shift, bool) or not isinstance(shift, int) or not 10 <= shift <= 30:
            raise ParamInvalid(f"{name}: page_shift={shift!r} must be an int of 10..30 (pages of 1 KiB to 1 GiB)")
        return cls(size, shift)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `init` was told, typed and checked."""

    listen: HostPort | None = None
    sync_kv_timeout_s: float = 1.0
    pools: Mapping[Placement, PoolSettings] = field(default_factory=dict)
    v2: bool = False
    local_comm_res: str | None = None
    remote_cache_accessible: bool = False
    switch_role_enabled: bool = False
    transfer_backend: str = "auto"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    link_total_time_s: float = 0.0
    link_retry_count: int = 1

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Settings:
        """Parse option strings. Unknown keys are kept out with one log line; bad values raise ParamInvalid."""
        for key, value in options.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"options must map str to str, but options[{key!r}] is {type(value).__name__}")
        unknown = sorted(set(options) - _KNOWN_KEYS)
        if unknown:
            logger.info("options without a meaning on this machine are ignored: %s", ", ".join(unknown))
        return _parse_settings(options)


_KNOWN_KEYS = {
    "llm.listenIpInfo",
    "llm.SyncKvCacheWaitTime",
    "ge.flowGraphMemMaxSize",
    "llm.MemPoolConfig",
    "llm.HostMemPoolConfig",
    "llm.EnableCacheManager",
    "llm.EnableRemoteCacheAccessible",
    "llm.EnableSwitchRole",
    "llm.LocalCommRes",
    "llm.TransferBackend",
    "llm.GlobalResourceConfig",
    "llm.LinkTotalTime",
    "llm.LinkRetryCount",
    # Kept for compatibility; they steer hardware that is not here.
    "ge.exec.deviceId",
    "ge.session_device_id",
    "llm.RdmaTrafficClass",
    "llm.RdmaServiceLevel",
    "llm.MemoryUtilization",
    "llm.BufPoolCfg",
    "llm.deployResPath",
}


def _parse_settings(options: Mapping[str, str]) -> Settings:
    listen = options.get("llm.listenIpInfo", "")
    return Settings(
        listen=HostPort.parse(listen, "llm.listenIpInfo") if listen else None,
        sync_kv_timeout_s=_digits(options, "llm.SyncKvCacheWaitTime", 1000, low=1) / 1000,
        pools=_parse_pools(options),
        v2=_flag(options, "llm.EnableCacheManager") or "llm.LocalCommRes" in options,
        local_comm_res=options.get("llm.LocalCommRes"),
        remote_cache_accessible=_flag(options, "llm.EnableRemoteCacheAccessible"),
        switch_role_enabled=_flag(options, "llm.EnableSwitchRole"),
        transfer_backend=_parse_backend(options.get("llm.TransferBackend", "auto")),
        backend_options=_json_object(options.get("llm.GlobalResourceConfig") or "{}", "llm.GlobalResourceConfig"),
        link_total_time_s=_digits(options, "llm.LinkTotalTime", 0, high=UINT32_MAX),
        link_retry_count=_digits(options, "llm.LinkRetryCount", 1, low=1, high=100),
    )


def _parse_pools(options: Mapping[str, str]) -> dict[Placement, PoolSettings]:
    pools: dict[Placement, PoolSettings] = {}
    if size := options.get("ge.flowGraphMemMaxSize"):
        if not (size.isascii() and size.isdigit()) or int(size) == 0:
            raise ParamInvalid(f"ge.flowGraphMemMaxSize={size!r} must be the pool's bytes in digits only, one pool")
        pools[Placement.DEVICE] = PoolSettings(int(size))
    if text := options.get("llm.MemPoolConfig"):
        pools[Placement.DEVICE] = PoolSettings.parse(text, "llm.MemPoolConfig")
    if text := options.get("llm.HostMemPoolConfig"):
        pools[Placement.HOST] = PoolSettings.parse(text, "llm.HostMemPoolConfig")
    return pools


def _parse_backend(name: str, option: str = "llm.TransferBackend") -> str:
    # "module:Class" and names from entry points are looked up, and refused by name, when the backend is opened.
    if not name or any(c.isspace() for c in name):
        raise ParamInvalid(f"{option}={name!r}: use one of {', '.join(BUILT_IN_BACKENDS)} or module:Class")
    return name


def _digits(options: Mapping[str, str], key: str, default: int, low: int = 0, high: int | None = None) -> int:
    text = options.get(key)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < low or (high is not None and int(text) > high):
        raise ParamInvalid(f"{key}={text!r} must be a number of {low}..{'' if high is None else high}")
    return int(text)


def _flag(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "0")
    if text not in ("0", "1"):
        raise ParamInvalid(f'{key}={text!r} must be "0" or "1"')
    return text == "1"


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ParamInvalid(f"{name}={text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ParamInvalid(f"{name}={text!r} must be a JSON object")
    return value


def check_type(name: str, value: object, *types: type) -> None:
    """TypeError naming the argument unless `value` is of one of `types`; a bool is not an int here."""
    if isinstance(value, bool) and bool not in types:
        raise TypeError(f"{name} must be {_type_names(types)}, not bool")
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {_type_names(types)}, not {type(value).__name__}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range {low}..{high}")


def _type_names(types: Sequence[type]) -> str:
    return " or ".join(t.__name__ for t in types)


class LLMConfig:
    """The options of an `LLMDataDist`, as properties. `generate_options()` gives what `init` takes.

    Setters raise TypeError for a wrong type and ValueError or ParamInvalid for a bad value, at once.
    """

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self._ge_options: dict[str, str] = {}
        self._values: dict[str, Any] = {
            "device_id": None,
            "listen_ip_info": None,
            "sync_kv_timeout": 1000,
            "mem_pool_cfg": None,
            "host_mem_pool_cfg": None,
            "enable_cache_manager": False,
            "enable_remote_cache_accessible": False,
            "enable_switch_role": False,
            "local_comm_res": None,
            "transfer_backend": "auto",
            "global_resource_config": None,
            "link_total_time": 0,
            "link_retry_count": 1,
            "rdma_traffic_class": None,
            "rdma_service_level": None,
            "mem_utilization": 0.95,
            "buf_pool_cfg": None,
            "deploy_res_path": None,
        }

    def generate_options(self) -> dict[str, str]:
        """The option strings for what was set. Options that were not set are left out."""
        return {**self._ge_options, **self._options}

    def gen_options(self) -> dict[str, str]:
        """Alias of `generate_options`."""
        return self.generate_options()

    def _set(self, name: str, value: Any, key: str, text: str) -> None:
        self._values[name] = value
        self._options[key] = text

    def _set_int(self, name: str, value: object, key: str, low: int, high: int, multiple: int = 1) -> None:
        check_type(name, value, int)
        number = int(value)  # type: ignore[call-overload]
        check_range(name, number, low, high)
        if number % multiple:
            raise ValueError(f"{name}={number} must be a multiple of {multiple}")
        self._set(name, number, key, str(number))

    def _set_text(self, name: str, value: object, key: str) -> None:
        check_type(name, value, str)
        self._set(name, value, key, str(value))

    def _set_flag(self, name: str, value: object, key: str) -> None:
        check_type(name, value, bool)
        self._set(name, value, key, "1" if value else "0")

    @property
    def device_id(self) -> int | list[int] | tuple[int, ...] | None:
        return self._values["device_id"]  # type: ignore[no-any-return]

    @device_id.setter
    def device_id(self, value: int | list[int] | tuple[int, ...]) -> None:
        check_type("device_id", value, int, list, tuple)
        ids = [value] if isinstance(value, int) else list(value)
        for one in ids:
            check_type("device_id", one, int)
            check_range("device_id", one, 0, UINT32_MAX)
        if not ids:
            raise ValueError("device_id is an empty list; give at least one id")
        self._set("device_id", value, "ge.exec.deviceId", ";".join(map(str, ids)))
        self._options["ge.session_device_id"] = str(ids[0])

    @property
    def listen_ip_info(self) -> str | None:
        return self._values["listen_ip_info"]  # type: ignore[no-any-return]

    @listen_ip_info.setter
    def listen_ip_info(self, value: str) -> None:
        check_type("listen_ip_info", value, str)
        HostPort.parse(value, "listen_ip_info")
        self._set("listen_ip_info", value, "llm.listenIpInfo", value)

    @property
    def sync_kv_timeout(self) -> int | str:
        """Time limit of a pull or push in ms."""
        return self._values["sync_kv_timeout"]  # type: ignore[no-any-return]

    @sync_kv_timeout.setter
    def sync_kv_timeout(self, value: int | str) -> None:
        check_type("sync_kv_timeout", value, int, str)
        if not str(value).isdigit() or int(value) <= 0:
            raise ValueError(f"sync_kv_timeout={value!r} must be a number of milliseconds greater than 0")
        self._set("sync_kv_timeout", value, "llm.SyncKvCacheWaitTime", str(value))

    @property
    def ge_options(self) -> dict[str, str]:
        return dict(self._ge_options)

    @ge_options.setter
    def ge_options(self, value: dict[str, str]) -> None:
        check_type("ge_options", value, dict)
        for key, text in value.items():
            check_type("ge_options key", key, str)
            check_type(f"ge_options[{key!r}]", text, str)
        _parse_pools({k: v for k, v in value.items() if k == "ge.flowGraphMemMaxSize"})
        self._ge_options = dict(value)

    @property
    def mem_pool_cfg(self) -> str | None:
        return self._values["mem_pool_cfg"]  # type: ignore[no-any-return]

    @mem_pool_cfg.setter
    def mem_pool_cfg(self, value: str) -> None:
        check_type("mem_pool_cfg", value, str)
        PoolSettings.parse(value, "mem_pool_cfg")
        self._set("mem_pool_cfg", value, "llm.MemPoolConfig", value)

    @property
    def host_mem_pool_cfg(self) -> str | None:
        return self._values["host_mem_pool_cfg"]  # type: ignore[no-any-return]

    @host_mem_pool_cfg.setter
    def host_mem_pool_cfg(self, value: str) -> None:
        check_type("host_mem_pool_cfg", value, str)
        PoolSettings.parse(value, "host_mem_pool_cfg")
        self._set("host_mem_pool_cfg", value, "llm.HostMemPoolConfig", value)

    @property
    def enable_cache_manager(self) -> bool:
        return bool(self._values["enable_cache_manager"])

    @enable_cache_manager.setter
    def enable_cache_manager(self, value: bool) -> None:
        self._set_flag("enable_cache_manager", value, "llm.EnableCacheManager")

    @property
    def enable_remote_cache_accessible(self) -> bool:
        return bool(self._values["enable_remote_cache_accessible"])

    @enable_remote_cache_accessible.setter
    def enable_remote_cache_accessible(self, value: bool) -> None:
        self._set_flag("enable_remote_cache_accessible", value, "llm.EnableRemoteCacheAccessible")

    @property
    def enable_switch_role(self) -> bool:
        return bool(self._values["enable_switch_role"])

    @enable_switch_role.setter
    def enable_switch_role(self, value: bool) -> None:
        self._set_flag("enable_switch_role", value, "llm.EnableSwitchRole")

    @property
    def local_comm_res(self) -> str | None:
        return self._values["local_comm_res"]  # type: ignore[no-any-return]

    @local_comm_res.setter
    def local_comm_res(self, value: str) -> None:
        check_type("local_comm_res", value, str)
        if value:
            _json_object(value, "local_comm_res")
        self._set("local_comm_res", value, "llm.LocalCommRes", value)

    @property
    def transfer_backend(self) -> str:
        return str(self._values["transfer_backend"])

    @transfer_backend.setter
    def transfer_backend(self, value: str) -> None:
        check_type("transfer_backend", value, str)
        self._set_text("transfer_backend", _parse_backend(value, "transfer_backend"), "llm.TransferBackend")

    @property
    def global_resource_config(self) -> str | None:
        return self._values["global_resource_config"]  # type: ignore[no-any-return]

    @global_resource_config.setter
    def global_resource_config(self, value: str) -> None:
        check_type("global_resource_config", value, str)
        _json_object(value or "{}", "global_resource_config")
        self._set_text("global_resource_config", value, "llm.GlobalResourceConfig")

    @property
    def link_total_time(self) -> int:
        """Seconds in all that linking may retry; 0 = as long as the call's own timeout."""
        return int(self._values["link_total_time"])

    @link_total_time.setter
    def link_total_time(self, value: int) -> None:
        self._set_int("link_total_time", value, "llm.LinkTotalTime", 0, UINT32_MAX)

    @property
    def link_retry_count(self) -> int:
        return int(self._values["link_retry_count"])

    @link_retry_count.setter
    def link_retry_count(self, value: int) -> None:
        self._set_int("link_retry_count", value, "llm.LinkRetryCount", 1, 100)

    @property
    def rdma_traffic_class(self) -> int | None:
        return self._values["rdma_traffic_class"]  # type: ignore[no-any-return]

    @rdma_traffic_class.setter
    def rdma_traffic_class(self, value: int) -> None:
        self._set_int("rdma_traffic_class", value, "llm.RdmaTrafficClass", 0, 255, multiple=4)

    @property
    def rdma_service_level(self) -> int | None:
        return self._values["rdma_service_level"]  # type: ignore[no-any-return]

    @rdma_service_level.setter
    def rdma_service_level(self, value: int) -> None:
        self._set_int("rdma_service_level", value, "llm.RdmaServiceLevel", 0, 7)

    @property
    def mem_utilization(self) -> float:
        return float(self._values["mem_utilization"])

    @mem_utilization.setter
    def mem_utilization(self, value: float) -> None:
        check_type("mem_utilization", value, int, float)
        check_range("mem_utilization", value, 0, 1)
        self._set("mem_utilization", value, "llm.MemoryUtilization", str(value))

    @property
    def buf_pool_cfg(self) -> str | None:
        return self._values["buf_pool_cfg"]  # type: ignore[no-any-return]

    @buf_pool_cfg.setter
    def buf_pool_cfg(self, value: str) -> None:
        self._set_text("buf_pool_cfg", value, "llm.BufPoolCfg")

    @property
    def deploy_res_path(self) -> str | None:
        return self._values["deploy_res_path"]  # type: ignore[no-any-return]

    @deploy_res_path.setter
    def deploy_res_path(self, value: str) -> None:
        self._set_text("deploy_res_path", value, "llm.deployResPath")


LlmConfig = LLMConfig
