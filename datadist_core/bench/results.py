# SPDX-License-Identifier: Apache-2.0
"""What was measured. Ratios are between two contenders in the same rounds, so that a busy machine hits both alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

YARDSTICKS = ("stream", "memcpy", "socket", "nixl", "nixl-default", "nixl-tcp", "mooncake")


@dataclass(frozen=True, slots=True)
class Group:
    """What all contenders moved in the same rounds."""

    op: str
    pattern: str
    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class Row:
    """Throughput of one contender. `ratios`: how many times faster than each yardstick, the median over rounds."""

    name: str
    op: str
    block_bytes: int
    num_blocks: int
    pattern: str
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    verified: bool
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Time to pull a single block."""

    name: str
    block_bytes: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class OutsideCopy:
    """How much of `pull_blocks` is not the copy: it took `pull_ms`, the same copy alone took `copy_ms`."""

    name: str
    num_blocks: int
    block_bytes: int
    pull_ms: float
    copy_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class SingleCopy:
    """A contiguous run of blocks against one copy of as many bytes, by the better of memcpy and stream."""

    name: str
    gb_per_s: float
    copy: str
    copy_gb_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class OwnerCpu:
    """Processor time of the owner's process, as part of one core: while it is pulled from, and while it is not."""

    name: str
    pulled: float
    idle: float


@dataclass(frozen=True, slots=True)
class LinkMemory:
    """What one more link costs the process that dialled it."""

    name: str
    kib: float
    threads: float
    files: float


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Memory that a cache's blocks cost beside their bytes, and the peak while all of half of them are pulled.

    Both per million blocks, measured with `num_blocks`.
    """

    name: str
    num_blocks: int
    held_mib: float
    pull_mib: float


@dataclass(slots=True)
class Findings:
    """What is measured besides throughput and latency."""

    kernel: str = ""
    kernel_is_native: bool = False
    auto_uses: str = ""
    outside_copy: list[OutsideCopy] = field(default_factory=list)
    single_copy: list[SingleCopy] = field(default_factory=list)
    owner_cpu: list[OwnerCpu] = field(default_factory=list)
    link_memory: list[LinkMemory] = field(default_factory=list)
    block_memory: list[BlockMemory] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Attributes:
    skipped: contenders that could not start, with the reason.
    failed: those that broke down while they were measured. What they had done until then is in the rows.
    """

    rows: list[Row] = field(default_factory=list)
    latency: list[LatencyRow] = field(default_factory=list)
    link_ms: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    @property
    def verified(self) -> bool:
        return all(row.verified for row in self.rows)

    def find(self, name: str, group: Group) -> Row | None:
        return next((row for row in self.rows if row.name == name and group_of(row) == group), None)

    def groups(self) -> list[Group]:
        """In the order of measuring, each once."""
        return list(dict.fromkeys(group_of(row) for row in self.rows))

    def latency_of(self, name: str, block_bytes: int) -> LatencyRow | None:
        return next((row for row in self.latency if (row.name, row.block_bytes) == (name, block_bytes)), None)


def group_of(row: Row) -> Group:
    return Group(row.op, row.pattern, row.block_bytes, row.num_blocks)


def make_rows(group: Group, times: Mapping[str, Sequence[float]], verified: Mapping[str, bool]) -> list[Row]:
    """One for each contender; `times` are in seconds, those of one round in the same place."""
    return [_row(name, group, times, verified[name]) for name in times]


def median_ratio(reference_s: Sequence[float], own_s: Sequence[float]) -> float:
    """How much faster than the reference; each pair was measured in the same round."""
    return statistics.median(theirs / own for theirs, own in zip(reference_s, own_s, strict=True))


def _row(name: str, group: Group, times: Mapping[str, Sequence[float]], verified: bool) -> Row:
    speeds = [group.num_bytes / seconds / 1e9 for seconds in times[name]]
    others = [other for other in YARDSTICKS if other in times and other != name]
    return Row(
        name=name,
        op=group.op,
        block_bytes=group.block_bytes,
        num_blocks=group.num_blocks,
        pattern=group.pattern,
        gb_per_s=statistics.median(speeds),
        gb_per_s_min=min(speeds),
        gb_per_s_max=max(speeds),
        verified=verified,
        ratios={other: median_ratio(times[other], times[name]) for other in others},
    )
