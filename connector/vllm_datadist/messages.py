# SPDX-License-Identifier: Apache-2.0
"""Everything that passes between the connector's parts.

Scheduler side -> worker side, once per step: `StepWork`. Worker -> worker of the other engine, over a link:
`Renew` and `Release`, answered by `LeaseAnswer` (the third call, describe, is in `description.py`). Whatever is
keyed by a request is keyed by (request id, attempt): vLLM may use a request id again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

DESCRIBE = "datadist.describe"
RENEW = "datadist.renew"
RELEASE = "datadist.release"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt at one request. `attempt` is never used twice within an engine's life."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one worker listens. `cluster_id` is new each time the worker starts."""

    pp_rank: int
    tp_rank: int
    host: str
    port: int
    cluster_id: int


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """The lease P holds for a request: its key at P, and P's workers."""

    engine_id: str
    key: RequestKey
    lease_s: float
    workers: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class LeaseOpen:
    """P: hold the blocks of this request for `lease_s` from now."""

    key: RequestKey
    lease_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """D: keep P's lease alive while the request queues here."""

    key: RequestKey
    remote: RemoteLease


@dataclass(frozen=True, slots=True)
class BlockTables:
    """One KV cache group: list index = token position // block size. None = no block there (out of the window)."""

    source: tuple[int | None, ...]
    target: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """D: bring tokens first_token..end_token-1 from P's blocks into ours, one `BlockTables` per group."""

    key: RequestKey
    remote: RemoteLease
    groups: tuple[BlockTables, ...]
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class ReleaseJob:
    """D: nothing is needed (any more); tell P to free its blocks."""

    key: RequestKey
    remote: RemoteLease


@dataclass(slots=True)
class StepWork:
    """What the scheduler side tells every worker with one step.

    `ended`: requests that are gone from D. `drain_s`: the engine is to end, all leases end within this time.
    """

    leases: list[LeaseOpen] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    releases: list[ReleaseJob] = field(default_factory=list)
    ended: list[RequestKey] = field(default_factory=list)
    drain_s: float | None = None

    def is_empty(self) -> bool:
        is_told = self.leases or self.watches or self.loads or self.releases or self.ended
        return not is_told and self.drain_s is None


class LeaseState(str, Enum):
    """P's answer about a lease.

    HELD: in force, or released by the one who asks while it was. EXPIRED: ended by time, so the blocks may hold
    something else. RELEASED: asked to renew what was released before, or to release what another reader has.
    UNKNOWN: never opened here, or too long ago.
    """

    HELD = "held"
    EXPIRED = "expired"
    RELEASED = "released"
    UNKNOWN = "unknown"


class LeaseRef(msgspec.Struct, frozen=True):
    """Names a lease at P."""

    request_id: str
    attempt: int


class Renew(msgspec.Struct, frozen=True):
    leases: list[LeaseRef]


class Release(msgspec.Struct, frozen=True):
    """`reader` is D's own request: HELD is said again to it alone."""

    leases: list[LeaseRef]
    reader: LeaseRef


class LeaseAnswer(msgspec.Struct, frozen=True):
    """One state per lease asked for, in order."""

    states: list[LeaseState]


def lease_ref(key: RequestKey) -> LeaseRef:
    return LeaseRef(key.request_id, key.attempt)
