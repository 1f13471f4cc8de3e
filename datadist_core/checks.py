# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, and addresses: what every public constructor, setter and method begins with.

A wrong type is a TypeError, a number out of range a ValueError, other bad content a ParamInvalid; each names the
argument and the value.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ParamInvalid

UINT32_MAX = 2**32 - 1


def check_type(name: str, value: object, *types: type) -> None:
    """TypeError naming the argument unless `value` is of one of `types`; a bool is not an int here."""
    if isinstance(value, bool) and bool not in types:
        raise TypeError(f"{name} must be {_type_names(types)}, not bool")
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {_type_names(types)}, not {type(value).__name__}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """ValueError naming the argument unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range {low}..{high}")


def _type_names(types: Sequence[type]) -> str:
    return " or ".join(t.__name__ for t in types)


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address. `str()` of it puts an IPv6 host in brackets.

    Attributes:
        host: a name, IPv4 or IPv6 (without brackets).
        port: 0..65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, name: str = "listen_ip_info") -> HostPort:
        """From "ip:port", "name:port" or "[ipv6]:port"; also bare "ipv6:port", as the original accepts."""
        check_type(name, text, str)
        host, sep, port = text.rpartition(":")
        if not sep or not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
            raise ParamInvalid(f'{name}={text!r} is not "ip:port" with a port of 0..65535 (0 picks a free one)')
        return cls(_host(host, f"{name}={text!r}"), int(port))


def ip_text(ip: str | int, name: str = "ip") -> str:
    """An address as text, without brackets.

    Args:
        ip: an IPv4 or IPv6 address or a host name, or the original's int form of an IPv4 address (network byte order
            read as a little-endian int).
    """
    check_type(name, ip, str, int)
    if isinstance(ip, str):
        return _host(ip.strip(), f"{name}={ip!r}")
    check_range(name, ip, 0, UINT32_MAX)
    return str(ipaddress.IPv4Address(ip.to_bytes(4, "little")))


def _host(text: str, shown: str) -> str:
    """`text` without brackets. Names are left to the resolver; what can only be a mistyped address is refused."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not host or any(c.isspace() or c in "[]/" for c in host):
        raise ParamInvalid(f"{shown}: give an IPv4 or IPv6 address or a host name")
    if ":" in host or host.replace(".", "").isdigit():
        _check_ip(host, shown)
    return host


def _check_ip(host: str, shown: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ParamInvalid(f"{shown} is not an IP address: {error}") from error
