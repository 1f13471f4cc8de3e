# SPDX-License-Identifier: Apache-2.0
"""The contract between the engine and whatever moves the bytes. A backend is about a dozen methods.

Rules that every backend keeps, and that `datadist_core.testing.conformance` checks:

1. Exactly one completion per accepted batch: also on peer death, cancel, disconnect and close.
2. The memory of a batch belongs to the backend until that completion; there is no "forget it" cancel. That is
   how a late write would land in a block that meanwhile was given to another request.
3. OK means: visible to anyone who is told afterwards over the control channel. FAILED and CANCELLED leave the
   destination undefined.
4. No order between batches.
5. Only errors of `datadist_core.errors` leave a backend, chained to what caused them.
6. Whoever serves a request checks ids and ranges against what it exported. The peer is not trusted. A grid id names
   memory; a batch may divide that memory into items in its own way, which the owner checks (`Grid.recut`).
7. `submit` of a one-sided local backend may complete inline, in the caller's thread: a single-block pull must
   not pay for a thread switch.

Life of a backend: open -> (register*, connect -> attach* -> submit* -> disconnect)* -> close. All methods may be
called from any thread; `done` callbacks come from any thread, are quick and never raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ..errors import LLMException
from ..memory.grid import Grid
from ..memory.region import Region
from ..security import Security
from ..types import Deadline, Placement
from .item_copy import ItemList
from .plan import Batch, GridPair, Op, Slice


class CompletionStatus(Enum):
    """How a batch can end. Unless it is OK, the destination is undefined."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Completion:
    """How a batch ended. `error` is set unless `status` is OK."""

    batch_id: int
    status: CompletionStatus
    error: LLMException | None = None

    @classmethod
    def ok(cls, batch_id: int) -> Completion:
        return cls(batch_id, CompletionStatus.OK)

    @classmethod
    def failed(cls, batch_id: int, error: LLMException) -> Completion:
        return cls(batch_id, CompletionStatus.FAILED, error)

    @classmethod
    def cancelled(cls, batch_id: int, error: LLMException) -> Completion:
        return cls(batch_id, CompletionStatus.CANCELLED, error)


DoneCallback = Callable[[Completion], None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do at all, before any peer is known.

    Attributes:
        one_sided: the peer's processor takes no part in a transfer.
        cross_host: peers on other hosts are possible.
        inline: `submit` returns after the completion was delivered.
        needs_poll: the engine must call `poll` for progress; others have their own.
        placements: memory it can read and write.
    """

    one_sided: bool
    cross_host: bool
    inline: bool
    needs_poll: bool = False
    placements: frozenset[Placement] = frozenset({Placement.HOST})


@dataclass(frozen=True, slots=True)
class ServedGrid:
    """A grid of ours that a peer named, with its memory, held against freeing while it is being served."""

    grid: Grid
    region: Region


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend gets from its owner at `open`.

    Attributes:
        serve_grid: `with serve_grid(grid_id, op) as served:` for two-sided backends. `op` is what the peer does:
            READ from us, WRITE to us. Raises CacheNotExist / ParamInvalid for what the peer may not touch. The
            memory stays ours until the block is left, which may happen in another thread.
        local_region: region id -> Region for local memory named by a batch; raises ParamInvalid if unknown.
        listen_host: address to bind a listener to, or None if this side accepts no links (yet: see `Backend.listen`).
        options: this backend's part of `global_resource_config`.
        process_token: random bytes made once per process.
        security: the shared secret and the files for TLS; a backend with connections of its own uses both there.
        report_peer_lost: tell the owner that a peer's data path broke.
    """

    serve_grid: Callable[[int, Op], AbstractContextManager[ServedGrid]]
    local_region: Callable[[int], Region]
    listen_host: str | None
    options: dict[str, Any] = field(default_factory=dict)
    process_token: bytes = b""
    security: Security = field(default_factory=Security)
    report_peer_lost: Callable[[int, LLMException], None] = lambda peer_id, error: None


class Prepared(ABC):
    """A transfer whose items are not chosen yet. See `Backend.prepare`."""

    @abstractmethod
    def run(self, op: Op, local_items: ItemList, remote_items: ItemList) -> None:
        """A batch of these items, in the caller's thread from end to end; rules 2 to 5 hold.

        Raises ParamInvalid, before anything has moved, for an index out of range; otherwise why the batch failed.
        Thread-safe.
        """


class Backend(ABC):
    """One way to move bytes. See the module's rules."""

    name: ClassVar[str]

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do at all. Also before `open`; always the same."""

    @abstractmethod
    def open(self, context: BackendContext) -> None:
        """Acquire what the backend needs. Raises Unreachable with the reason if it cannot work on this host."""

    def listen(self, host: str) -> None:  # noqa: B027 - most backends have nothing to listen on
        """The owner has begun to accept links at `host`: peers that dial from now on must reach us there too.

        Not called for `BackendContext.listen_host`. Idempotent. Raises Unreachable with the reason.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete what is open with ClosedError, then release everything. Idempotent."""

    @abstractmethod
    def identity(self) -> bytes:
        """What a peer needs for `connect`: opaque, at most 4 KiB, sent over the control channel."""

    @abstractmethod
    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        """Make the peer reachable, really trying it.

        Both ends call it for the same link. `initiator` is True at the end that dialled the link; a backend
        with connections dials there and waits for the other's connection elsewhere. `link_token` is 16 random
        bytes known only to the two ends; it pairs and authenticates what arrives. Raises Unreachable with the
        reason, TimedOut, or ProtocolError; nothing stays behind then.
        """

    @abstractmethod
    def disconnect(self, peer_id: int) -> None:
        """Complete the peer's open batches with PeerLost, drop its regions. Unknown peers are a no-op.

        A `connect` to that peer that is under way in another thread ends soon, and raises; nothing of it stays behind.
        """

    def is_fenced(self, peer_id: int) -> bool:
        """Whether that peer, once disconnected, can write to memory of ours no more; until then it must not be reused.

        A peer that copies one-sidedly may have been stopped in the middle of a copy, and go on after its link is gone.
        So such backends answer True only when the peer's own end of the link, or its process, has ended: a backend's
        `disconnect` lets its peer know only after its own batches have ended. Where this end receives every write
        itself, it is True once it does so no more. Never waits. True for peers that were never connected, False while
        one is; a backend that cannot tell (the default) says True always.
        """
        return True

    @abstractmethod
    def register(self, region: Region) -> bytes | None:
        """Make local memory usable. Returns what a peer needs for `attach` (at most 1 KiB), or None if peers
        cannot reach this region through this backend (it may still be the local side of a batch).

        Unless `region.for_peers`, the result is None, and no peer can get at it, whatever it asks for."""

    @abstractmethod
    def unregister(self, region_id: int) -> None:
        """Undo `register`. Unknown ids are a no-op."""

    @abstractmethod
    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        """Make one region of a connected peer usable in batches, really trying it. Idempotent. Raises Unreachable."""

    @abstractmethod
    def detach(self, peer_id: int, region_id: int) -> None:
        """Undo `attach`. Unknown ids are a no-op."""

    @abstractmethod
    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        """Start a checked batch whose peer is connected and whose remote regions are attached.

        Either raises (then `done` is never called) or calls `done` exactly once. `batch_id` is unique.
        """

    def prepare(self, peer_id: int, pairs: tuple[GridPair, ...], slices: tuple[Slice, ...]) -> Prepared | None:
        """What is the same in all batches of these pairs and slices, done beforehand. None: there is nothing to gain.

        Only for inline backends; the peer is connected and the regions are attached. What is prepared keeps nothing
        of a peer's memory, and fails once the peer is disconnected or a region of it is detached.

        Raises as `submit` does.
        """
        return None

    def poll(self) -> None:  # noqa: B027 - most backends make progress on their own
        """Make progress; called by the engine only for `needs_poll` backends."""

    @abstractmethod
    def cancel(self, batch_id: int) -> None:
        """Ask for an early end. The completion still comes, soon: CANCELLED, or whatever won the race."""
