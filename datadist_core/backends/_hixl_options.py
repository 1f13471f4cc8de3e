# SPDX-License-Identifier: Apache-2.0
"""Options of the cann backend, checked, and the addresses that it gives to the vendor's library."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import ParamInvalid, Unreachable

ROLES = ("PROMPT", "DECODER", "MIX")
MAX_TIMEOUT_MS = 8000
"""A call into the vendor's library cannot be cancelled, and a cancelled batch must end within 10 s."""
MAX_BLOCK_BYTES = 1 << 20

_SOMEWHERE = ("192.0.2.1", 9)
"""An address kept for documents: nothing is sent to it, only the route is looked up."""


@dataclass(frozen=True, slots=True)
class CannOptions:
    """Attributes:
    device_id: the Ascend device, `LLMConfig.device_id` of the vendor.
    role: the vendor's LLMRole. Its V2 moves both ways whatever the role is.
    host: IPv4 address or name that the vendor listens at; None takes the one that links are accepted at.
    port: the vendor listens at; 0 picks a free one.
    timeout_ms: the vendor's sync_kv_timeout: how long one call may take.
    block_bytes: sizes of the blocks that memory is registered in, powers of two; see `_hixl_blocks`. Memory is
        registered once for each, in this order; a size that the vendor refuses is left out.
    local_comm_res: the vendor's option of that name; None leaves it unset.
    options: option strings for the vendor's `init`, over those made from the above.
    """

    device_id: int = 0
    role: str = "MIX"
    host: str | None = None
    port: int = 0
    timeout_ms: int = 5000
    block_bytes: tuple[int, ...] = (512, 16384, 1)
    local_comm_res: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse_options(options: Mapping[str, Any]) -> CannOptions:
    """Raises ParamInvalid naming the option."""
    for name, value in options.items():
        if name not in _CHECKS:
            raise ParamInvalid(f"cann option {name!r} is unknown; there are {', '.join(sorted(_CHECKS))}")
        fits, wanted = _CHECKS[name]
        if not fits(value):
            raise ParamInvalid(f"cann option {name}={value!r} must be {wanted}")
    given = dict(options)
    if "block_bytes" in given:
        given["block_bytes"] = tuple(given["block_bytes"])
    return CannOptions(**given)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _are_blocks(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or not value or len(set(value)) != len(value):
        return False
    return all(_is_int(size, 1, MAX_BLOCK_BYTES) and size & (size - 1) == 0 for size in value)


def _are_strings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device_id": (lambda value: _is_int(value, 0, (1 << 32) - 1), "an integer of 0 or more"),
    "role": (lambda value: value in ROLES, f"one of {', '.join(ROLES)}"),
    "host": (_is_text, "an IPv4 address or a name"),
    "port": (lambda value: _is_int(value, 0, 65535), "a port of 0..65535"),
    "timeout_ms": (lambda value: _is_int(value, 1, MAX_TIMEOUT_MS), f"milliseconds of 1..{MAX_TIMEOUT_MS}"),
    "block_bytes": (_are_blocks, f"a list of distinct powers of two of 1..{MAX_BLOCK_BYTES}"),
    "local_comm_res": (lambda value: isinstance(value, str), "a string"),
    "options": (_are_strings, "an object with strings as values"),
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a vendor's object listens, or would."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def address_for(host: str | None, port: int) -> Address:
    """An IPv4 address of this host for `host` (a wildcard or None: the interface with the default route), and a port.

    Raises Unreachable: the vendor knows IPv4 only, and takes no port 0.
    """
    found = _outward_address() if host is None or host in {"", "::"} else _ipv4(host)
    if ipaddress.ip_address(found).is_unspecified:
        found = _outward_address()
    return Address(found, port or _free_port(found))


def _ipv4(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Unreachable(f"the vendor's library needs an IPv4 address, and {host!r} has none: {error}") from error


def _free_port(host: str) -> int:
    """Free now: somebody may take it before the vendor does, who then says so."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise Unreachable(f"{host} is no address that this host can listen at: {error}") from error


def _outward_address() -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        return str(probe.getsockname()[0])
    return "127.0.0.1"
