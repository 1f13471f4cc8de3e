# SPDX-License-Identifier: Apache-2.0
"""`Settings`: everything `init` was told, typed and checked; what the rest of the package reads.

The option strings of LLM-DataDist exist only here and in `config.LLMConfig`, which writes them. No other module reads
an option key or the environment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checks import UINT32_MAX, HostPort
from .errors import ParamInvalid
from .security import Security
from .types import Placement

logger = logging.getLogger(__name__)

INT64_MAX = 2**63 - 1
DEFAULT_PAGE_SHIFT = 16
INTEGRITY_KINDS = ("off", "checksum")
BUILT_IN_BACKENDS = ("auto", "loopback", "shm", "cma", "tcp", "nixl", "mooncake", "cann", "hixl")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """One memory pool: `memory_size_bytes` mapped lazily, handed out in pages of `1 << page_shift` bytes.

    With `huge_pages` it lies in huge pages of the system, all of it reserved at once.
    """

    memory_size_bytes: int
    page_shift: int = DEFAULT_PAGE_SHIFT
    huge_pages: bool = False

    @classmethod
    def parse(cls, text: str, name: str) -> PoolSettings:
        values = json_object(text, name)
        size = values.get("memory_size")
        shift = values.get("page_shift", DEFAULT_PAGE_SHIFT)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= INT64_MAX:
            raise ParamInvalid(f"{name}: memory_size={size!r} must be a number of bytes greater than 0")
        if isinstance(shift, bool) or not isinstance(shift, int) or not 10 <= shift <= 30:
            raise ParamInvalid(f"{name}: page_shift={shift!r} must be an int of 10..30 (pages of 1 KiB to 1 GiB)")
        huge = values.get("huge_pages", False)
        if not isinstance(huge, bool):
            raise ParamInvalid(f"{name}: huge_pages={huge!r} must be true or false")
        return cls(size, shift, huge)


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
    heartbeat_s: float = 4.0
    integrity: str = "off"
    security: Security = field(default_factory=Security)

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
    "llm.HeartbeatInterval",
    "llm.Integrity",
    "llm.Security",
    # Kept for compatibility; they steer hardware that is not here, but for those of `_FOR_THE_VENDOR`.
    "ge.exec.deviceId",
    "ge.session_device_id",
    "llm.RdmaTrafficClass",
    "llm.RdmaServiceLevel",
    "llm.MemoryUtilization",
    "llm.BufPoolCfg",
    "llm.deployResPath",
}


#: Known options that the vendor's own engine gets as well, as it does all that are not known here.
_FOR_THE_VENDOR = {
    "llm.LocalCommRes",
    "ge.exec.deviceId",
    "ge.session_device_id",
    "llm.RdmaTrafficClass",
    "llm.RdmaServiceLevel",
}


def _parse_settings(options: Mapping[str, str]) -> Settings:
    _check_kept(options)
    listen = options.get("llm.listenIpInfo", "")
    transfer_backend = parse_backend(options.get("llm.TransferBackend", "auto"))
    backend_options = json_object(options.get("llm.GlobalResourceConfig") or "{}", "llm.GlobalResourceConfig")
    return Settings(
        listen=HostPort.parse(listen, "llm.listenIpInfo") if listen else None,
        sync_kv_timeout_s=_digits(options, "llm.SyncKvCacheWaitTime", 1000, low=1) / 1000,
        pools=parse_pools(options),
        v2=_flag(options, "llm.EnableCacheManager") or "llm.LocalCommRes" in options,
        local_comm_res=comm_res(options.get("llm.LocalCommRes"), "llm.LocalCommRes"),
        remote_cache_accessible=_flag(options, "llm.EnableRemoteCacheAccessible"),
        switch_role_enabled=_flag(options, "llm.EnableSwitchRole"),
        transfer_backend=transfer_backend,
        backend_options=_for_the_vendor(transfer_backend, backend_options, options),
        link_total_time_s=_digits(options, "llm.LinkTotalTime", 0, high=UINT32_MAX),
        link_retry_count=_digits(options, "llm.LinkRetryCount", 1, low=1, high=100),
        heartbeat_s=_digits(options, "llm.HeartbeatInterval", 4000, low=100, high=60_000) / 1000,
        integrity=parse_integrity(options.get("llm.Integrity", "off"), "llm.Integrity"),
        security=parse_security(options.get("llm.Security"), "llm.Security"),
    )


def _check_kept(options: Mapping[str, str]) -> None:
    """Options that steer nothing here still have a documented form."""
    for key in ("ge.exec.deviceId", "ge.session_device_id"):
        if (text := options.get(key)) and not all(is_digits(one) for one in text.split(";")):
            raise ParamInvalid(f'{key}={text!r} must be device ids of 0 or more, separated by ";"')
    traffic_class = _digits(options, "llm.RdmaTrafficClass", 0, high=255)
    if traffic_class % 4:
        raise ParamInvalid(f"llm.RdmaTrafficClass={traffic_class} must be a multiple of 4")
    _digits(options, "llm.RdmaServiceLevel", 0, high=7)
    if text := options.get("llm.MemoryUtilization"):
        _check_utilization(text)


def _check_utilization(text: str) -> None:
    try:
        fits = 0 <= float(text) <= 1
    except ValueError:
        fits = False
    if not fits:
        raise ParamInvalid(f"llm.MemoryUtilization={text!r} must be a number of 0..1")


def comm_res(text: str | None, name: str) -> str | None:
    if text:
        json_object(text, name)
    return text


def parse_security(text: str | None, name: str) -> Security:
    return Security.parse(text, name) if text else Security()


def parse_pools(options: Mapping[str, str]) -> dict[Placement, PoolSettings]:
    pools: dict[Placement, PoolSettings] = {}
    if (size := options.get("ge.flowGraphMemMaxSize")) is not None:
        if not is_digits(size) or not 0 < int(size) <= INT64_MAX:
            raise ParamInvalid(f"ge.flowGraphMemMaxSize={size!r} must be the pool's bytes in digits only, one pool")
        pools[Placement.DEVICE] = PoolSettings(int(size))
    if text := options.get("llm.MemPoolConfig"):
        pools[Placement.DEVICE] = PoolSettings.parse(text, "llm.MemPoolConfig")
    if text := options.get("llm.HostMemPoolConfig"):
        pools[Placement.HOST] = PoolSettings.parse(text, "llm.HostMemPoolConfig")
    return pools


def _for_the_vendor(transfer_backend: str, given: dict[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """`given`, and in the part of the backend `cann`, if it is asked for, the options that steer Ascend hardware."""
    part = given.get("cann", {})
    if not {"cann", "hixl"}.intersection(transfer_backend.split(",")) or not isinstance(part, dict):
        return given
    own = part.get("options", {})
    steering = {key: text for key, text in options.items() if key in _FOR_THE_VENDOR or key not in _KNOWN_KEYS}
    if not steering or not isinstance(own, dict):
        return given
    return {**given, "cann": {**part, "options": {**steering, **own}}}


def parse_backend(name: str, option: str = "llm.TransferBackend") -> str:
    # "module:Class" and names from entry points are looked up, and refused by name, when the backend is opened.
    if not name or any(c.isspace() for c in name):
        raise ParamInvalid(f"{option}={name!r}: use one of {', '.join(BUILT_IN_BACKENDS)} or module:Class")
    return name


def parse_integrity(kind: str, name: str) -> str:
    if kind not in INTEGRITY_KINDS:
        raise ParamInvalid(f"{name}={kind!r} must be one of {', '.join(INTEGRITY_KINDS)}")
    return kind


def _digits(options: Mapping[str, str], key: str, default: int, low: int = 0, high: int = INT64_MAX) -> int:
    text = options.get(key)
    if text is None or text == "":
        return default
    if not is_digits(text) or not low <= int(text) <= high:
        raise ParamInvalid(f"{key}={text!r} must be a number of {low}..{high}")
    return int(text)


def is_digits(text: str) -> bool:
    """Plain decimal digits, and no more of them than any number here may have."""
    return text.isascii() and text.isdigit() and len(text) <= 20


def _flag(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "0")
    if text not in ("0", "1"):
        raise ParamInvalid(f'{key}={text!r} must be "0" or "1"')
    return text == "1"


def json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"{name}={text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ParamInvalid(f"{name}={text!r} must be a JSON object")
    return value
