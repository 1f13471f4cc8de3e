# SPDX-License-Identifier: Apache-2.0
"""Batches on their way: one thread makes the calls, batches take turns, each ends once.

A call cannot be cancelled. So a batch is a series of pieces of bounded size, and one that is cancelled, or whose link
ends, ends with the call that is under way: with its data, or by the vendor's sync_kv_timeout.

A call that failed may, for all that is published, still be writing. So after every failure but a refusal the link is
ended at this end (`on_lost`) before the batch is completed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .._copy import scatter_copy
from ..errors import CacheNotExist, Cancelled, ClosedError, LLMException, ParamInvalid, PeerLost
from ..memory.region import Region
from ..transfer.backend import Completion, DoneCallback
from ..transfer.plan import Batch, CopyList, Items, Op
from ._attached import AttachedRegions
from ._hixl_blocks import BlockCall
from ._hixl_engine import Registered, VendorEngine
from ._hixl_identity import Descriptor, Identity

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 30.0
_REFUSALS = (ParamInvalid, CacheNotExist)
_FIRST = np.zeros(1, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Link:
    """One peer. `end_error` says why the link is down; None while it is up."""

    peer_id: int
    peer: Identity
    slot: int
    end_error: LLMException | None = None
    regions: AttachedRegions[Descriptor] = field(init=False)

    def __post_init__(self) -> None:
        self.regions = AttachedRegions(self.peer_id)

    def check_up(self) -> None:
        """Raise what ended the link."""
        if self.end_error is not None:
            raise type(self.end_error)(str(self.end_error)) from self.end_error


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Calls between one piece of our memory and one region of the peer.

    Attributes:
        copies: absolute ranges, `local` in the user's memory and `remote` in staging, to copy before a WRITE and
            after a READ; None if nothing is staged.
    """

    local: Registered
    remote: Descriptor
    calls: Iterator[BlockCall]
    copies: CopyList | None = None


@dataclass(slots=True, eq=False)
class OpenBatch:
    """An accepted batch. `regions` keep the local memory alive."""

    batch_id: int
    batch: Batch
    link: Link
    pieces: Iterator[Piece]
    done: DoneCallback
    regions: tuple[Region, ...]
    end_error: LLMException | None = None

    def complete(self) -> None:
        """Nothing of it moves any more."""
        self.done(_completion_of(self.batch_id, self.end_error))


class Mover:
    """Thread-safe.

    Args:
        on_lost: called by the mover's thread after a failure; ends the link before it returns.
    """

    def __init__(self, engine: VendorEngine, on_lost: Callable[[Link, LLMException], None]) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._waiting: deque[OpenBatch] = deque()
        self._moving: OpenBatch | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, opened: OpenBatch) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError("the cann backend is not open")
            opened.link.check_up()
            self._waiting.append(opened)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datadist-cann", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, batch_id: int) -> None:
        """Unknown ids are a no-op."""
        self._drop(lambda opened: opened.batch_id == batch_id, Cancelled(f"batch {batch_id} was cancelled"))

    def end(self, link: Link, error: LLMException) -> None:
        """Complete the link's batches with `error`; when this returns none is under way. Idempotent.

        In the mover's own thread (it is in a `done` callback, or in `on_lost`) nothing is waited for.
        """
        with self._changed:
            link.end_error = link.end_error or error
        self._await(self._drop(lambda opened: opened.link is link, error))

    def close(self, error: LLMException) -> None:
        """Complete everything with `error` and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._await(self._drop(lambda opened: True, error))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_TIMEOUT_S)

    def _drop(self, chosen: Callable[[OpenBatch], bool], error: LLMException) -> OpenBatch | None:
        """End the chosen ones that wait; the one that moves, if it is chosen, is told to, and returned."""
        with self._changed:
            dropped = [opened for opened in self._waiting if chosen(opened)]
            for opened in dropped:
                self._waiting.remove(opened)
            moving = self._moving if self._moving is not None and chosen(self._moving) else None
            if moving is not None:
                moving.end_error = moving.end_error or error
        for opened in dropped:
            opened.end_error = error
            opened.complete()
        return moving

    def _await(self, moving: OpenBatch | None) -> None:
        if moving is None or threading.current_thread() is self._thread:
            return
        with self._changed:
            ended = self._changed.wait_for(lambda: self._moving is not moving, _END_TIMEOUT_S)
        if not ended:
            logger.error("a call into the vendor's library has not returned for %s s", _END_TIMEOUT_S)

    def _run(self) -> None:
        while (opened := self._take()) is not None:
            self._put_back(opened, self._advance(opened))

    def _take(self) -> OpenBatch | None:
        """The batch whose turn it is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._moving = self._waiting.popleft() if self._waiting else None
            return self._moving

    def _put_back(self, opened: OpenBatch, ended: bool) -> None:
        """The end of a turn: the batch waits for its next one, or is complete."""
        with self._changed:
            ended = ended or opened.end_error is not None
            if not ended:
                self._waiting.append(opened)
                self._moving = None
                return
        opened.complete()
        with self._changed:
            self._moving = None
            self._changed.notify_all()

    def _advance(self, opened: OpenBatch) -> bool:
        """Move one piece. Whether the batch has come to its end."""
        try:
            piece = next(opened.pieces, None)
            if piece is not None:
                self._move(opened, piece)
            return piece is None
        except LLMException as error:
            opened.end_error = opened.end_error or error
            if not isinstance(error, _REFUSALS):
                self._on_lost(opened.link, error)
            return True

    def _move(self, opened: OpenBatch, piece: Piece) -> None:
        op, copies = opened.batch.op, piece.copies
        if copies is not None and op is Op.WRITE:
            scatter_copy(copies.remote, copies.local, copies.num_bytes)
        for call in piece.calls:
            if opened.end_error is not None:
                return
            move_blocks(self._engine, op, opened.link.peer, piece, call)
        if copies is not None and op is Op.READ:
            scatter_copy(copies.local, copies.remote, copies.num_bytes)


def move_blocks(engine: VendorEngine, op: Op, peer: Identity, piece: Piece, call: BlockCall) -> None:
    """One call into the vendor's library."""
    size = call.block_bytes
    engine.move(op, peer, piece.remote.models[size], piece.local.caches[size], call.remote, call.local)


def ends_of(num_blocks: int) -> Items:
    """The first and the last block."""
    return _FIRST if num_blocks == 1 else np.array([0, num_blocks - 1], dtype=np.int64)


def lost(link: Link, error: LLMException) -> PeerLost:
    """What the other batches of a link end with after a failed call."""
    return PeerLost(f"the cann link to peer {link.peer_id} was ended after a failed transfer: {error}")


def _completion_of(batch_id: int, error: LLMException | None) -> Completion:
    if error is None:
        return Completion.ok(batch_id)
    if isinstance(error, Cancelled):
        return Completion.cancelled(batch_id, error)
    return Completion.failed(batch_id, error)
