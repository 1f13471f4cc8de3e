# SPDX-License-Identifier: Apache-2.0
"""Who is measured, and with which settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .servers import free_port

NIXL_CONNECTOR = "nixl"


@dataclass(frozen=True, slots=True)
class Contender:
    """A connector with one setting.

    Attributes:
        name: in the results.
        packages: what must be importable.
        connector, fields: `kv_connector` and the rest of --kv-transfer-config but for the role.
        make_env: environment variables of one server.
    """

    name: str
    packages: tuple[str, ...]
    connector: str
    fields: Mapping[str, Any]
    make_env: Callable[[], Mapping[str, str]] = field(default=dict)

    def transfer_config(self, role: str) -> dict[str, Any]:
        return {"kv_connector": self.connector, "kv_role": role, **self.fields}

    def why_not_here(self) -> str:
        """Why it cannot be used; "" if it can, as far as can be told without starting it."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"the package {missing[0]} is not installed" if missing else ""


def _ours(name: str, backend: str, *packages: str) -> Contender:
    # A host that is busy with starting servers is slow to link; that is not what is measured.
    extra = {"transfer_backend": backend, "link_timeout_s": 30}
    fields = {"kv_connector_module_path": "vllm_datadist", "kv_connector_extra_config": extra}
    return Contender(name, ("vllm", *packages), "DataDistConnector", fields)


def _nixl_env() -> dict[str, str]:
    """Each server needs a port of its own. Between two processes on one host UCX is far slower with its default
    choice of transports than without its InfiniBand emulations: `sm` is shared memory and cross-memory attach."""
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "self,sm,tcp"}


#: The names of the options. Ours over another engine has a name of its own in the results.
OURS: dict[str, Contender] = {
    **{name: _ours(name, name) for name in ("auto", "shm", "cma", "tcp")},
    "nixl": _ours("datadist-nixl", "nixl", "nixl"),
    "mooncake": _ours("datadist-mooncake", "mooncake", "mooncake"),
}
PEERS: dict[str, Contender] = {
    "nixl": Contender(
        NIXL_CONNECTOR, ("vllm", "nixl"), "NixlConnector", {"kv_buffer_device": "cpu"}, make_env=_nixl_env
    )
}
DEFAULT_BACKENDS = ("auto", "tcp", "cma")
DEFAULT_PEERS = ("nixl",)
OUR_NAMES = tuple(contender.name for contender in OURS.values())


def contenders_of(backends: Sequence[str], peers: Sequence[str]) -> list[Contender]:
    """The peer right after the first of ours: what is compared lies close in time."""
    ours = [OURS[name] for name in backends]
    return [*ours[:1], *(PEERS[name] for name in peers), *ours[1:]]
