# SPDX-License-Identifier: Apache-2.0
"""Everything that passes between the connector's parts.

Scheduler side -> worker side, once per step: `StepWork`. Worker -> worker of the other engine, over a link, D to P:
`Renew` and `Release`, answered by `LeaseAnswer`; for a push `Offer`, `Withdraw` and `AskOffer`, answered by
`OfferAnswer`. P to D: `Pushed`, answered by `OfferAnswer` too. (Two more calls are elsewhere: describe in
`description.py`, and who the workers are in `worker/directory.py`.) Whatever is keyed by a request is keyed by
(request id, attempt): vLLM may use a request id again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from .counts import Failure, HoldOutcome

DESCRIBE = "datadist.describe"
RENEW = "datadist.renew"
RELEASE = "datadist.release"
ANNOUNCE = "datadist.announce"
OFFER = "datadist.offer"
WITHDRAW = "datadist.withdraw"
OFFER_STATE = "datadist.offer_state"
PUSHED = "datadist.pushed"
OFFER_STANDS = "datadist.offer_stands"

#: Block ids by position // block size, of one KV cache group. None = no block there (out of the window).
Table = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One attempt at one request. `attempt` is never used twice within an engine's life."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one worker listens. `cluster_id` is new with each start; `first_layer`: of its pipeline stage."""

    pp_rank: int
    tp_rank: int
    host: str
    port: int
    cluster_id: int
    first_layer: int = 0


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


@dataclass(frozen=True, slots=True)
class PushOpen:
    """P: a request whose KV cache goes to whoever offers blocks for `transfer_id`.

    Attributes:
        num_tokens: tokens of the prompt; no others are pushed.
        prompt_digest: of them, see `scheduler.identity`.
    """

    key: RequestKey
    transfer_id: str
    num_tokens: int
    prompt_digest: str


@dataclass(frozen=True, slots=True)
class PushChunk:
    """P: what the forward pass of this very step computes of a request.

    Attributes:
        first_token: tokens before it are in their blocks since an earlier step.
        end_token: tokens up to it are in their blocks, layer by layer, once this step has computed the layer.
        tables: per KV cache group, the request's blocks up to `end_token`.
    """

    key: RequestKey
    first_token: int
    end_token: int
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class PushVoid:
    """P: the request has lost its blocks (it was preempted): what was sent of it counts for nothing."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class PushEnd:
    """P: vLLM has finished the request. `error` is "" if its blocks are held now, under a lease with the same key,
    until they are sent; else why nothing more will come of it."""

    key: RequestKey
    error: str = ""


@dataclass(frozen=True, slots=True)
class PushSource:
    """D: where the KV cache of a transfer will come from: P's first worker, or all of them with P's lease."""

    transfer_id: str
    host: str
    port: int
    remote: RemoteLease | None = None


@dataclass(frozen=True, slots=True)
class OfferJob:
    """D: blocks reserved for tokens first_token..end_token-1 of a transfer.

    Attributes:
        tables: per KV cache group, our blocks.
        prompt: number of tokens and digest of the prompt, to be the same at P.
    """

    key: RequestKey
    source: PushSource
    tables: tuple[Table, ...]
    first_token: int
    end_token: int
    num_prompt_tokens: int
    prompt_digest: str


@dataclass(frozen=True, slots=True)
class AnnounceJob:
    """D: a request queues that will offer blocks for this transfer, of which D has no ticket that names a lease."""

    key: RequestKey
    source: PushSource


@dataclass(frozen=True, slots=True)
class WithdrawJob:
    """D: nothing is needed of this transfer (any more). `key` may never have offered anything."""

    key: RequestKey
    source: PushSource


@dataclass(slots=True)
class StepWork:
    """What the scheduler side tells every worker with one step.

    `ended`: requests that are gone from D. `drain_s`: the engine is to end, all leases end within this time.
    `workers`: all of this engine, told once. P's push requests in the order `push_voids`, `push_opens`, `push_chunks`,
    `push_ends`; a lease in `leases` comes before the end of its push.
    """

    leases: list[LeaseOpen] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    releases: list[ReleaseJob] = field(default_factory=list)
    ended: list[RequestKey] = field(default_factory=list)
    push_voids: list[PushVoid] = field(default_factory=list)
    push_opens: list[PushOpen] = field(default_factory=list)
    push_chunks: list[PushChunk] = field(default_factory=list)
    push_ends: list[PushEnd] = field(default_factory=list)
    announcements: list[AnnounceJob] = field(default_factory=list)
    offers: list[OfferJob] = field(default_factory=list)
    withdrawals: list[WithdrawJob] = field(default_factory=list)
    workers: tuple[Endpoint, ...] = ()
    drain_s: float | None = None

    def is_empty(self) -> bool:
        pulls = self.leases or self.watches or self.loads or self.releases or self.ended
        pushes = self.push_voids or self.push_opens or self.push_chunks or self.push_ends
        offers = self.announcements or self.offers or self.withdrawals
        return not (pulls or pushes or offers or self.workers) and self.drain_s is None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How one worker's load went. `waits_s` by `counts.Awaited`; `failure` is None if it went well."""

    key: RequestKey
    peers: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    num_bytes: int = 0
    transfer_s: float = 0.0
    waits_s: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class HoldReport:
    """How the lease of one worker of P ended."""

    key: RequestKey
    outcome: HoldOutcome


@dataclass(slots=True)
class WorkerNotes:
    """D's workers -> scheduler side, with a step's report: by request id, how many workers say so.

    Attributes:
        unsettled: their push has failed, and P may still write into its blocks.
        settled: nobody does any more.
        loads, holds: for the metrics and the log only.
    """

    unsettled: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    loads: list[LoadReport] = field(default_factory=list)
    holds: list[HoldReport] = field(default_factory=list)

    def note_unsettled(self, request_id: str) -> None:
        self.unsettled[request_id] = self.unsettled.get(request_id, 0) + 1

    def note_settled(self, request_id: str) -> None:
        self.settled[request_id] = self.settled.get(request_id, 0) + 1

    def is_empty(self) -> bool:
        return not (self.unsettled or self.settled or self.loads or self.holds)

    def aggregate(self, other: WorkerNotes) -> WorkerNotes:
        """Both together; vLLM calls it."""
        loads, holds = [*self.loads, *other.loads], [*self.holds, *other.holds]
        both = WorkerNotes(dict(self.unsettled), dict(self.settled), loads, holds)
        for mine, theirs in ((both.unsettled, other.unsettled), (both.settled, other.settled)):
            for request_id, count in theirs.items():
                mine[request_id] = mine.get(request_id, 0) + count
        return both


class LeaseState(str, Enum):
    """P's answer about a lease.

    HELD: in force, or released by the one who asks while it was. EXPIRED: ended by time, so the blocks may hold
    something else. RELEASED: asked to renew what was released before, or to release what another reader has.
    UNKNOWN: never opened here, or too long ago. MISCOUNTED: a release that gives another number of readers than
    the one before it, or none.
    """

    HELD = "held"
    EXPIRED = "expired"
    RELEASED = "released"
    UNKNOWN = "unknown"
    MISCOUNTED = "miscounted"


class LeaseRef(msgspec.Struct, frozen=True):
    """Names a lease at P."""

    request_id: str
    attempt: int


class Renew(msgspec.Struct, frozen=True):
    leases: list[LeaseRef]


class Release(msgspec.Struct, frozen=True):
    """`reader` is D's own request: HELD is said again to it alone.

    `num_readers`: how many of D's workers read from this one of P; the lease is released with the last of them.
    """

    leases: list[LeaseRef]
    reader: LeaseRef
    num_readers: int = 1


class LeaseAnswer(msgspec.Struct, frozen=True):
    """One state per lease asked for, in order."""

    states: list[LeaseState]


class OfferState(str, Enum):
    """How far an offer is, as P says it in every answer and in its notice.

    ACCEPTED: P will write, or has begun to. DONE: all is written. FAILED: nothing more will be written, and nothing
    is in flight; the reason is said. WITHDRAWN: as FAILED, because D took it back. WRITING: it is taken back, but a
    write is still in flight: ask again. UNKNOWN: P has never heard of it, or too long ago, and writes nothing.
    """

    ACCEPTED = "accepted"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    UNKNOWN = "unknown"


class OfferRef(msgspec.Struct, frozen=True):
    """Names one offer: a transfer, and D's attempt at it. P adds the cluster id of D's worker.

    `number`: 1, 2, ... when the same attempt offers again after trouble on the link (`handoff.offer`).
    """

    transfer_id: str
    request: LeaseRef
    number: int = 1


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """D to P: these blocks are reserved for the KV cache of a transfer; write tokens first_token..end_token-1 there.

    Attributes:
        block_ids: per KV cache group by position // block size at D; 0 = no block there.
        num_offers: how many of D's workers make an offer to this worker of P.
        timeout_s: D waits so long from now on, and no write may begin after that.
    """

    ref: OfferRef
    first_token: int
    end_token: int
    block_ids: list[list[int]]
    num_prompt_tokens: int
    prompt_digest: str
    num_offers: int
    timeout_s: float


class Announce(msgspec.Struct, frozen=True):
    """D to P: an offer will come within this time; keep the lease alive until then. Answered by ACCEPTED."""

    ref: OfferRef
    timeout_s: float


class Withdraw(msgspec.Struct, frozen=True):
    """D to P: the offer is taken back, or none will come of these `num_offers` workers.

    `instead`: the request of D that this transfer is for now; P hears of it before it hears of the withdrawal.
    """

    ref: OfferRef
    num_offers: int
    instead: Announce | None = None


class AskOffer(msgspec.Struct, frozen=True):
    """D to P (`OFFER_STATE`): how far is it? P to D (`OFFER_STANDS`), before P's first write: may it begin?

    The answer to the second is ACCEPTED for yes; anything else means that nothing may be written.
    """

    ref: OfferRef


class PushedBytes(msgspec.Struct, frozen=True):
    """What P moved over one backend."""

    num_bytes: int
    backend: str
    seconds: float


class Pushed(msgspec.Struct, frozen=True):
    """P to D: the offer has ended. `reason` says why for FAILED. `moved` is for D's log only."""

    ref: OfferRef
    state: OfferState
    reason: str = ""
    moved: list[PushedBytes] = []


class OfferAnswer(msgspec.Struct, frozen=True):
    """`reason` says why for FAILED."""

    state: OfferState
    reason: str = ""


def lease_ref(key: RequestKey) -> LeaseRef:
    return LeaseRef(key.request_id, key.attempt)
