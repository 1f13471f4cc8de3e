# SPDX-License-Identifier: Apache-2.0
"""Runs P's pushes: does what `handoff.pushes` says, in threads, while the engine computes.

The engine's thread tells what each step computes, and never waits: not for a send either when a request loses its
blocks. What is being sent then is void: the push ends, or all of it is sent again after what is under way has ended,
and D is told nothing before. So bytes that another request puts into those blocks meanwhile can only pass through
blocks that D has reserved for this transfer, and nobody reads them there.

A push waits for the engine and for D without holding a thread; threads are held by sends, and by calls to D, which end
by CALL_TIMEOUT_S. A send ends by its offer's deadline. No worker of D gets all threads: one that is stopped holds up
its own pushes only, and never the leases that others' offers keep alive.

A grant is good for one link: the one that there was when D was asked is noted before, and all sends of that push go
over it or fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from datadist_core.errors import Cancelled, LLMException, NotYetLinked, ProtocolError, TimedOut
from datadist_core.types import Deadline

from ..handoff.push import PushAct, PushEffect, PushMachine, PushPhase, Send
from ..handoff.push_ended import Answer
from ..handoff.pushes import PushTable
from ..messages import (
    OFFER_STANDS,
    PUSHED,
    Announce,
    AskOffer,
    Offer,
    OfferAnswer,
    OfferRef,
    OfferState,
    PushChunk,
    Pushed,
    PushedBytes,
    RequestKey,
    StepWork,
)
from .later import WorkPool
from .layer_sync import LayerProgress, StepLayers
from .lease_calls import CALL_TIMEOUT_S, Caller
from .load_book import LoadBook
from .peer_pool import PeerPool
from .pulls import Moved
from .saves import LeaseTable

SWEEP_S = 0.25
#: Calls to D at the same time, in all and to one of its workers.
NUM_CALLERS, NUM_CALLERS_OF_ONE = 16, 4
#: How long an offer that is announced may take to come.
MAX_ANNOUNCED_S = 3600.0
#: How long the answer to a withdrawal waits for what is under way.
WITHDRAW_WAIT_S = 1.0
_Question = TypeVar("_Question", AskOffer, Pushed)


@dataclass(frozen=True, slots=True)
class Computing:
    """The step that computes the last tokens of a send, and the first of them; earlier ones are in their blocks."""

    step: StepLayers
    first_token: int


@dataclass(frozen=True, slots=True)
class PushTask:
    """One send.

    Attributes:
        computing: None if all tokens are in their blocks.
        is_wanted: False once nobody needs it any more: it may end early, by any error.
    """

    cluster_id: int
    offer: Offer
    send: Send
    computing: Computing | None
    is_wanted: Callable[[], bool]
    deadline: Deadline

    @property
    def transfer_id(self) -> str:
        return self.offer.ref.transfer_id

    @property
    def peer(self) -> str:
        """D's worker, for traces."""
        return f"cluster {self.cluster_id}"


class Mover(Protocol):
    def move(self, task: PushTask) -> list[Moved]:
        """Send all of it. Returns, or raises LLMException, when nothing is under way any more."""
        ...


class Links(Caller, Protocol):
    """Calls to peers, and the links that they go over."""

    def link_id(self, cluster_id: int) -> int | None:
        """Which link to that peer is up; None without one. A link that is made anew has another."""
        ...


class PushRunner:
    """Thread-safe."""

    def __init__(
        self,
        leases: LeaseTable,
        mover: Mover,
        links: Links,
        progress: LayerProgress,
        num_threads: int,
        log: logging.Logger,
        book: LoadBook | None = None,
    ) -> None:
        self._book = book or LoadBook()
        self._leases = leases
        self._table = PushTable(leases.unlocked)
        self._mover = mover
        self._links = links
        self._progress = progress
        self._log = log
        self._computing: dict[RequestKey, Computing] = {}
        self._moved: WeakKeyDictionary[PushMachine, list[Moved]] = WeakKeyDictionary()
        self._is_sweeping = False
        # Calls must not wait for sends, of which each may last.
        self._senders = PeerPool("push", num_threads, num_threads - num_threads // 4, log)
        self._callers = PeerPool("push-call", NUM_CALLERS, NUM_CALLERS_OF_ONE, log)
        # Nor must the leases, which this renews.
        self._sweeper = WorkPool("push-sweep", 1, log)

    # --- from the engine's thread -----------------------------------------------------------------------------

    def retract(self, work: StepWork) -> None:
        """Requests that have lost their blocks. Before anything else of this step writes to them; again is no harm."""
        lost = [end for end in work.push_ends if end.error]
        if not (work.push_voids or lost):
            return
        with self._leases.lock:
            for void in work.push_voids:
                self._table.void(void)
                self._computing.pop(void.key, None)
            for end in lost:
                self._table.end(end)
                self._computing.pop(end.key, None)
            self._act()

    def begin_step(self, work: StepWork) -> None:
        """What the forward pass that comes now computes. The leases of this step have been opened."""
        self.retract(work)
        if not (work.push_opens or work.push_chunks or work.push_ends):
            return
        with self._leases.lock:
            for opened in work.push_opens:
                self._table.open(opened)
            if work.push_chunks:
                self._begin_chunks(work.push_chunks)
            for end in work.push_ends:
                self._table.end(end)
                self._computing.pop(end.key, None)
            self._act()

    def _begin_chunks(self, chunks: Sequence[PushChunk]) -> None:
        step = self._progress.begin()
        for chunk in chunks:
            self._computing[chunk.key] = Computing(step, chunk.first_token)
            self._table.chunk(chunk)

    def num_open(self) -> int:
        with self._leases.lock:
            return len(self._table)

    def num_announced(self) -> int:
        """Transfers for which an offer is expected."""
        with self._leases.lock:
            return self._table.num_announced

    def close(self, timeout_s: float) -> None:
        self._progress.end(has_failed=True)
        self._sweeper.close(timeout_s)
        self._callers.close(timeout_s)
        self._senders.close(timeout_s)

    # --- from the core's threads ------------------------------------------------------------------------------

    def announce(self, ref: OfferRef, timeout_s: float) -> OfferAnswer:
        """An offer will come: until then, but no longer than that, the lease is kept alive."""
        if not timeout_s > 0:  # nor is that which is no number
            return OfferAnswer(OfferState.FAILED, f"timeout_s {timeout_s} is not > 0")
        with self._leases.lock:
            self._expect(ref, timeout_s)
            self._act()
        return OfferAnswer(OfferState.ACCEPTED)

    def offer(self, cluster_id: int, offer: Offer) -> OfferAnswer:
        with self._leases.lock:
            answer = self._table.offer(cluster_id, offer, time.monotonic())
            self._act()
        return _answer(answer)

    def state(self, cluster_id: int, ref: OfferRef) -> OfferAnswer:
        with self._leases.lock:
            return _answer(self._table.state(cluster_id, ref))

    def withdraw(self, cluster_id: int, ref: OfferRef, num_offers: int, instead: Announce | None = None) -> OfferAnswer:
        """What is under way is waited for, for a while."""
        with self._leases.lock:
            if instead is not None and instead.timeout_s > 0:
                self._expect(instead.ref, instead.timeout_s)
            answer = self._table.withdraw(cluster_id, ref, num_offers)
            self._act()
            until_s = time.monotonic() + WITHDRAW_WAIT_S
            while answer.state is OfferState.WRITING and (left_s := until_s - time.monotonic()) > 0:
                self._leases.lock.wait(left_s)
                answer = self._table.state(cluster_id, ref)
            return _answer(answer)

    def link_lost(self, cluster_id: int) -> None:
        try:
            link_id = self._links.link_id(cluster_id)
        except LLMException:
            link_id = None  # this end is being closed
        with self._leases.lock:
            self._table.link_lost(cluster_id, link_id)
            self._act()

    # --- inside, with the lock held ---------------------------------------------------------------------------

    def _expect(self, ref: OfferRef, timeout_s: float) -> None:
        self._table.announce(ref, time.monotonic() + min(timeout_s, MAX_ANNOUNCED_S))

    def _act(self) -> None:
        """After every call of the table."""
        for act in self._table.take_acts():
            if act.effect is PushEffect.SEND and act.send is not None:
                task = self._task(act.push, act.send)
                self._senders.now(act.push.cluster_id, partial(self._send, act.push, task))
            elif act.effect is PushEffect.ASK:
                self._callers.now(act.push.cluster_id, partial(self._ask, act))
            elif act.effect is PushEffect.TELL:
                self._callers.now(act.push.cluster_id, partial(self._tell, act))
        self._leases.lock.notify_all()
        if not self._table.is_idle and not self._is_sweeping:
            self._is_sweeping = True
            self._sweeper.at(time.monotonic() + SWEEP_S, self._sweep)

    def _task(self, push: PushMachine, send: Send) -> PushTask:
        computing = self._computing.get(send.key)
        if computing is not None and send.end_token <= computing.first_token:
            computing = None
        is_wanted = lambda: push.send is send and push.phase is PushPhase.SENDING  # noqa: E731
        return PushTask(push.cluster_id, push.offer, send, computing, is_wanted, Deadline(push.deadline_s))

    # --- inside, in threads of the pools ----------------------------------------------------------------------

    def _sweep(self) -> None:
        with self._leases.lock:
            self._is_sweeping = False
            try:
                self._table.sweep(time.monotonic())
                # The lease lives as long as D's offer stands, or is to come.
                self._leases.unlocked.renew(self._table.held_keys())
            finally:
                self._act()

    def _send(self, push: PushMachine, task: PushTask) -> None:
        try:
            moved = self._mover.move(task)
        except LLMException as error:
            self._failed(push, error, task.is_wanted())
        except Exception as error:
            self._log.exception("transfer %s: unexpected error in a push", push.ref.transfer_id)
            self._failed(push, LLMException(f"unexpected error: {error!r}"))
        else:
            self._book.sent(moved)
            with self._leases.lock:
                self._moved.setdefault(push, []).extend(moved)
                self._table.sent(push)
                self._act()

    def _failed(self, push: PushMachine, error: LLMException, is_wanted: bool = True) -> None:
        self._book.not_sent(error if is_wanted else Cancelled("nobody wants it any more"))
        with self._leases.lock:
            self._table.failed(push, error)
            self._act()
        self._log.warning("transfer %s: not pushed: %s", push.ref.transfer_id, error)

    def _ask(self, act: PushAct) -> None:
        try:
            self._note_link(act.push)
            answer = self._call(act.push, OFFER_STANDS, AskOffer(act.push.ref))
        except LLMException as error:
            self._failed(act.push, error)
            return
        with self._leases.lock:
            self._table.stands(act.push, answer.state is OfferState.ACCEPTED)
            self._act()

    def _note_link(self, push: PushMachine) -> None:
        link_id = self._links.link_id(push.cluster_id)
        if link_id is None:
            raise NotYetLinked(f"there is no link to cluster {push.cluster_id}")
        with self._leases.lock:
            push.link_id = link_id

    def _tell(self, act: PushAct) -> None:
        push = act.push
        with self._leases.lock:
            moved = [PushedBytes(one.num_bytes, one.backend, one.seconds) for one in self._moved.pop(push, [])]
        notice = Pushed(push.ref, push.word or OfferState.FAILED, push.reason, moved)
        try:
            self._call(push, PUSHED, notice)
        except LLMException as error:
            self._log.info("transfer %s: D was not told the end: %s", push.ref.transfer_id, error)
        with self._leases.lock:
            self._table.told(push)
            self._act()

    def _call(self, push: PushMachine, name: str, question: _Question) -> OfferAnswer:
        deadline = Deadline(push.deadline_s).earlier(CALL_TIMEOUT_S)
        if deadline.expired:
            raise TimedOut(f"{name}: the time of the offer is over")
        reply = self._links.call(push.cluster_id, name, msgspec.msgpack.encode(question), deadline.remaining_s())
        try:
            return msgspec.msgpack.decode(reply, type=OfferAnswer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"{name}: the peer's answer cannot be read: {error}") from error


def _answer(answer: Answer) -> OfferAnswer:
    return OfferAnswer(answer.state, answer.reason)
