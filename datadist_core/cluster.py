# SPDX-License-Identifier: Apache-2.0
"""`LLMClusterInfo`: whom to link with, and where it listens."""

from __future__ import annotations

from .checks import HostPort, check_range, check_type, ip_text
from .errors import ParamInvalid

UINT64_MAX = 2**64 - 1


class LLMClusterInfo:
    """A remote cluster. Addresses: IPv4, IPv6 or host names as str, or IPv4 in the original's int form."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._local: list[HostPort] = []
        self._remote: list[HostPort] = []

    @property
    def remote_cluster_id(self) -> int:
        """The remote cluster's id: uint64, no default. ParamInvalid when read before it was set."""
        if self._remote_cluster_id is None:
            raise ParamInvalid("LLMClusterInfo.remote_cluster_id is not set")
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        check_type("remote_cluster_id", value, int)
        check_range("remote_cluster_id", value, 0, UINT64_MAX)
        self._remote_cluster_id = value

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Which of our addresses to dial from: a hint for the interface; the port is not used for dialling."""
        self._local.append(_address(ip, port, low=0))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Where the cluster listens; several addresses are tried in order."""
        self._remote.append(_address(ip, port, low=1))

    @property
    def local_addresses(self) -> tuple[HostPort, ...]:
        """What `append_local_ip_info` was given, in order; default empty. (An extension.)"""
        return tuple(self._local)

    @property
    def remote_addresses(self) -> tuple[HostPort, ...]:
        """What `append_remote_ip_info` was given, in order; default empty. (An extension.)"""
        return tuple(self._remote)


def _address(ip: str | int, port: int, low: int) -> HostPort:
    host = ip_text(ip)
    check_type("port", port, int)
    check_range("port", port, low, 65535)
    return HostPort(host, port)
