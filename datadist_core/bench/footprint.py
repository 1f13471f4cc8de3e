# SPDX-License-Identifier: Apache-2.0
"""What links cost: one end that links with many, in a process where nothing else is counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checks import HostPort
from .ends import End


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process uses: memory that is its own and in use, threads, and open files."""

    private_bytes: int
    num_threads: int
    num_files: int


class Crowd:
    """Many ends in one process, with small pools, that do nothing but listen."""

    def __init__(self, backend: str, first_cluster_id: int, num_ends: int) -> None:
        self._ends = [End(backend, first_cluster_id + i, 0, 1 << 20, listen=True) for i in range(num_ends)]

    def addresses(self) -> list[HostPort]:
        return [end.address() for end in self._ends]


class Hub:
    """One end, to be linked with the ends of a `Crowd`."""

    def __init__(self, backend: str, cluster_id: int) -> None:
        self._end = End(backend, cluster_id, 0, 1 << 20)
        self._linked: dict[int, HostPort] = {}

    def link(self, first_cluster_id: int, addresses: Sequence[HostPort]) -> Footprint:
        """What this process uses once that is done."""
        for i, address in enumerate(addresses):
            self._end.link(first_cluster_id + i, address)
            self._linked[first_cluster_id + i] = address
        return Footprint(_private_bytes(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))

    def unlink(self) -> None:
        for cluster_id, address in self._linked.items():
            self._end.unlink(cluster_id, address)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
