# SPDX-License-Identifier: Apache-2.0
"""Options of the mooncake backend, checked, and the address that it tells its peers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import ParamInvalid, Unreachable

PROTOCOLS = ("tcp", "rdma")
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5, 600
"""Mooncake takes less than 5 s for 5 s."""

_SOMEWHERE = ("192.0.2.1", 9)
"""An address kept for documents: nothing is sent to it, only the route is looked up."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Attributes:
    protocol: Mooncake's transport, "tcp" or "rdma".
    device: names of RDMA devices, comma separated; empty leaves the choice to Mooncake.
    host: IPv4 address or name that peers reach this end at; None takes the one that links are accepted at.
    timeout_s: how long Mooncake may take for one piece of a batch (16 MiB) before it is given up.
    """

    protocol: str = "tcp"
    device: str = ""
    host: str | None = None
    timeout_s: int = 8


def parse_options(options: Mapping[str, Any]) -> MooncakeOptions:
    """Raises ParamInvalid naming the option."""
    known = sorted(MooncakeOptions.__dataclass_fields__)
    for name, value in options.items():
        if name not in known:
            raise ParamInvalid(f"mooncake option {name!r} is unknown; there are {', '.join(known)}")
        problem = _problem(name, value)
        if problem:
            raise ParamInvalid(f"mooncake option {name}={value!r} must be {problem}")
    return MooncakeOptions(**options)


def _problem(name: str, value: object) -> str:
    """What `value` should have been; empty if it is right."""
    if name == "timeout_s":
        right = isinstance(value, int) and not isinstance(value, bool) and MIN_TIMEOUT_S <= value <= MAX_TIMEOUT_S
        return "" if right else f"an integer in {MIN_TIMEOUT_S}..{MAX_TIMEOUT_S}"
    if not isinstance(value, str) or len(value) > 200 or (name == "host" and not value):
        return "a string of at most 200 characters"
    return "" if name != "protocol" or value in PROTOCOLS else f"one of {', '.join(PROTOCOLS)}"


def address_of(host: str | None) -> str:
    """The IPv4 address to tell peers for `host`; for a wildcard or None that of the interface with the default route.

    Raises Unreachable: Mooncake names its engines "address:port", which does not work with IPv6.
    """
    if host is None or host in {"", "::"}:
        return _outward_address()
    try:
        found = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Unreachable(f"mooncake needs an IPv4 address, and {host!r} has none: {error}") from error
    return _outward_address() if ipaddress.ip_address(found).is_unspecified else found


def _outward_address() -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        return str(probe.getsockname()[0])
    return "127.0.0.1"
