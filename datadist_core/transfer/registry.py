# SPDX-License-Identifier: Apache-2.0
"""Backends by name, loaded only when asked for.

A name is one of the built-in ones below, an entry point of the group `datadist_core.backends` (third parties), or
"module:Class". `auto` means the built-in ones in order of preference, as far as they can be opened here; `hixl` means
`cann`, then `auto`. Backends over other engines (nixl, mooncake, cann) are never in `auto`: they are asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from ..errors import ParamInvalid
from .backend import Backend

ENTRY_POINT_GROUP = "datadist_core.backends"

_BUILT_IN = {
    "loopback": "datadist_core.backends.loopback:LoopbackBackend",
    "shm": "datadist_core.backends.shm:ShmBackend",
    "cma": "datadist_core.backends.cma:CmaBackend",
    "tcp": "datadist_core.backends.tcp:TcpBackend",
    "nixl": "datadist_core.backends.nixl:NixlBackend",
    "mooncake": "datadist_core.backends.mooncake:MooncakeBackend",
    "cann": "datadist_core.backends.hixl:CannBackend",
}
#: Best first: within this process, then mapped memory, then memory that the kernel copies, then sockets.
AUTO_ORDER = ("loopback", "shm", "cma", "tcp")
#: What scripts for Ascend ask for: the vendor's own engine where it is installed, and behind it what `auto` means.
HIXL_ORDER = ("cann", *AUTO_ORDER)
_GROUPS = {"auto": AUTO_ORDER, "hixl": HIXL_ORDER}


def backend_names(transfer_backend: str) -> tuple[str, ...]:
    """The backends that a `transfer_backend` setting asks for, best first. Comma separated lists are accepted."""
    names: list[str] = []
    for name in transfer_backend.split(","):
        names += _GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(names))


def create_backend(name: str) -> Backend:
    """A new, unopened backend. Raises ParamInvalid naming the known ones."""
    path = _BUILT_IN.get(name) or _from_entry_points(name) or (name if ":" in name else None)
    if path is None:
        raise ParamInvalid(
            f"transfer_backend={name!r} is unknown here; use auto, hixl, {', '.join(_BUILT_IN)}, a name from an entry "
            f"point of group {ENTRY_POINT_GROUP}, or module:Class"
        )
    module_name, _, class_name = path.partition(":")
    try:
        backend_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ParamInvalid(f"transfer_backend={name!r} cannot be loaded from {path}: {error}") from error
    if not (isinstance(backend_class, type) and issubclass(backend_class, Backend)):
        raise ParamInvalid(f"transfer_backend={name!r}: {path} is not a Backend")
    return backend_class()


def _from_entry_points(name: str) -> str | None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return point.value
    return None
