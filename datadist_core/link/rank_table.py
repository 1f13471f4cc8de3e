# SPDX-License-Identifier: Apache-2.0
"""Who belongs to a communicator and where each member is: the arguments of `LLMDataDist.link`, checked.

A rank table has addresses but no ports. The member with the lowest rank hosts, at a port that every member computes
in the same way, from the communicator's name and the host's cluster id. (Not from the other members: two members with
different tables must still meet, to find out which field differs.) A "port" in the host's device entry, an extension,
takes its place.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..checks import UINT32_MAX, HostPort, check_type
from ..errors import ParamInvalid

MAX_NAME_CHARS = 127
MIN_MEMBERS = 2
MAX_MEMBERS = 4
#: Derived ports lie below the range that Linux takes its ephemeral ports from (32768 and up).
FIRST_PORT = 20_000
NUM_PORTS = 12_000
_UINT64_MAX = 2**64 - 1
_SHAPE = '{"server_list": [{"device": [{"device_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}]}]}'


@dataclass(frozen=True, slots=True)
class Member:
    """One cluster of a communicator. `port` is that of its device entry, or None."""

    cluster_id: int
    rank: int
    host: str
    port: int | None


@dataclass(frozen=True, slots=True)
class CommunicatorPlan:
    """A communicator as one member was told of it; `members` in ascending order of rank."""

    name: str
    own_id: int
    members: tuple[Member, ...]

    @classmethod
    def parse(
        cls, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str, own_cluster_id: int
    ) -> CommunicatorPlan:
        """Raises TypeError or ParamInvalid, each naming the argument, its value and the remedy."""
        _check_name(comm_name)
        _check_clusters(cluster_rank_info, own_cluster_id)
        devices = _devices(rank_table)
        missing = [rank for rank in cluster_rank_info.values() if rank not in devices]
        if missing:
            raise ParamInvalid(
                f"rank_table has no device with rank_id {missing[0]}, which cluster_rank_info={cluster_rank_info} "
                f"names; it has {sorted(devices)}. Add a device entry for each rank"
            )
        members = tuple(
            Member(cluster_id, rank, devices[rank].host, devices[rank].port)
            for cluster_id, rank in cluster_rank_info.items()
        )
        return cls(comm_name, own_cluster_id, members)

    @property
    def host(self) -> Member:
        return self.members[0]

    @property
    def own(self) -> Member:
        return self.member(self.own_id)

    @property
    def lower(self) -> tuple[Member, ...]:
        """The members that this one dials."""
        return self.members[: self.members.index(self.own)]

    @property
    def others(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.cluster_id != self.own_id)

    @property
    def host_address(self) -> HostPort:
        return HostPort(self.host.host, self.host.port or derived_port(self.name, self.host.cluster_id))

    @property
    def rank_of(self) -> dict[int, int]:
        return {m.cluster_id: m.rank for m in self.members}

    def member(self, cluster_id: int) -> Member:
        return next(m for m in self.members if m.cluster_id == cluster_id)


def derived_port(comm_name: str, host_cluster_id: int) -> int:
    """The port at which the lowest rank hosts: the same at every member and in every run."""
    digest = hashlib.sha256(f"{host_cluster_id}:{comm_name}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % NUM_PORTS


def _check_name(name: str) -> None:
    check_type("comm_name", name, str)
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ParamInvalid(
            f"comm_name={_short(name)} has {len(name)} characters; use 1 to {MAX_NAME_CHARS}, the same at every member"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ParamInvalid(f"comm_name={_short(name)} has characters that are no UTF-8 text; use others") from error


def _check_clusters(info: dict[int, int], own_cluster_id: int) -> None:
    check_type("cluster_rank_info", info, dict)
    for cluster_id, rank in info.items():
        check_type("a cluster id in cluster_rank_info", cluster_id, int)
        check_type(f"cluster_rank_info[{cluster_id}]", rank, int)
        if not 0 <= cluster_id <= _UINT64_MAX:
            raise ParamInvalid(f"cluster_rank_info has cluster id {cluster_id}; use the members' cluster ids, uint64")
        if not 0 <= rank <= UINT32_MAX:
            raise ParamInvalid(f"cluster_rank_info[{cluster_id}]={rank} must be a rank of 0 or more")
    if not MIN_MEMBERS <= len(info) <= MAX_MEMBERS:
        raise ParamInvalid(f"cluster_rank_info={info} names {len(info)} clusters; name {MIN_MEMBERS} to {MAX_MEMBERS}")
    ranks = list(info.values())
    if any(a >= b for a, b in pairwise(ranks)):
        raise ParamInvalid(f"cluster_rank_info={info} must have distinct ranks in ascending order, not {ranks}")
    if own_cluster_id not in info:
        raise ParamInvalid(f"cluster_rank_info={info} lacks this cluster's own id {own_cluster_id}; add it with a rank")


@dataclass(frozen=True, slots=True)
class _Device:
    host: str
    port: int | None


def _devices(rank_table: str) -> dict[int, _Device]:
    """The devices of a rank table by rank. Ranks that no member has may be there too."""
    check_type("rank_table", rank_table, str)
    found: dict[int, _Device] = {}
    servers = _list(_load(rank_table), "server_list", "rank_table")
    for i, server in enumerate(servers):
        where = f"rank_table.server_list[{i}]"
        for j, device in enumerate(_list(_object(server, where), "device", where)):
            _add_device(found, server, device, f"{where}.device[{j}]")
    return found


def _load(rank_table: str) -> dict[str, Any]:
    try:
        value = json.loads(rank_table)
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"rank_table={_short(rank_table)} is not JSON ({error}); give {_SHAPE}") from error
    return _object(value, "rank_table")


def _add_device(found: dict[int, _Device], server: dict[str, Any], device: object, where: str) -> None:
    entry = _object(device, where)
    rank = _number(entry, "rank_id", where)
    _number(entry, "device_id", where)
    if rank in found:
        raise ParamInvalid(f"{where}.rank_id={rank} is in rank_table twice; give each device a rank of its own")
    port = _number(entry, "port", where) if "port" in entry else None
    if port is not None and not 1 <= port <= 65535:
        raise ParamInvalid(f"{where}.port={port} must be 1..65535; leave it out to have one derived")
    found[rank] = _Device(_address(entry, server, where), port)


def _address(device: dict[str, Any], server: dict[str, Any], where: str) -> str:
    text = device.get("device_ip") or server.get("host_ip")
    try:
        if isinstance(text, str):
            return str(ipaddress.ip_address(text.strip()))
    except ValueError:
        pass
    raise ParamInvalid(
        f"{where}.device_ip={_short(text)} is not an IP address; give the address at which the member can be reached"
    )


def _number(entry: dict[str, Any], key: str, where: str) -> int:
    """A number, or digits in a string as the vendor's files have them."""
    value = entry.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= UINT32_MAX:
        raise ParamInvalid(f'{where}.{key}={_short(value)} must be a number of 0 or more, as 0 or "0"')
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParamInvalid(f"{where}={_short(value)} must be a JSON object; give {_SHAPE}")
    return value


def _list(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list) or not value:
        raise ParamInvalid(f"{where}.{key}={_short(value)} must be a list with at least one entry; give {_SHAPE}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
