# SPDX-License-Identifier: Apache-2.0
"""Which host, and which part of it, a process is on: what two ends compare that share memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import Unreachable


@dataclass(frozen=True, slots=True)
class Host:
    """Two processes with equal hosts see each other's process numbers and sockets."""

    boot_id: str
    pid_namespace: str
    network_namespace: str


def this_host() -> Host:
    """Raises Unreachable where /proc does not tell."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Host(boot_id, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net"))
    except OSError as error:
        raise Unreachable(f"cannot tell which host and namespaces this is: {error}") from error
