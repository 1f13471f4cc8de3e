# SPDX-License-Identifier: Apache-2.0
"""What D tells P's workers about its offers without waiting for the outcome, in threads of its own.

That an offer will come, or that nothing is needed. P does without it when it does not arrive: its lease ends by itself.
So nothing is tried again, and what could not be said within the link timeout, counted from when it was given, is not
said any more. No thread is held while a link is being made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from datadist_core.errors import LLMException, ProtocolError, TimedOut
from datadist_core.types import Deadline

from ..description import Incompatible
from ..messages import (
    ANNOUNCE,
    WITHDRAW,
    Announce,
    AnnounceJob,
    AskOffer,
    Endpoint,
    Offer,
    OfferAnswer,
    OfferJob,
    OfferRef,
    PushSource,
    RequestKey,
    Withdraw,
    WithdrawJob,
    lease_ref,
)
from .directory import EngineClaim
from .later import WorkPool
from .lease_calls import CALL_TIMEOUT_S, Caller
from .peer_pool import PeerPool
from .peers import Peer, PeerDirectory

#: One call to one peer at a time: what is said first arrives first, and who does not answer holds one thread.
NUM_THREADS = 8
Question = Announce | Offer | AskOffer | Withdraw


@dataclass(frozen=True, slots=True)
class OfferPart:
    """One worker of P that a job needs, and how many workers of D offer to it."""

    endpoint: Endpoint
    num_offers: int


@dataclass(frozen=True, slots=True)
class OfferParts:
    """Of one job. `unread`: P's workers that nobody needs, and that this worker of D lets go."""

    parts: tuple[OfferPart, ...]
    unread: tuple[OfferPart, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundWorkers:
    """All of P's workers: named by a ticket, or by one of them, which said `claim` of its engine."""

    workers: tuple[Endpoint, ...]
    is_ticket: bool = False
    claim: EngineClaim | None = None


class Sources(Protocol):
    """Which workers of P there are, and which of them this worker deals with."""

    def find(self, source: PushSource, timeout_s: float) -> Future[FoundWorkers]:
        """P's workers. Never waits."""
        ...

    def parts(self, found: FoundWorkers) -> OfferParts:
        """Those whose KV cache this worker needs. Raises LLMException."""
        ...

    def share(self, found: FoundWorkers) -> Sequence[OfferPart]:
        """Those that this worker tells that nothing is needed. Raises LLMException."""
        ...


@dataclass(frozen=True, slots=True)
class _Notice:
    """What is said about the request `key`, to each worker with the message that `message_to` makes."""

    key: RequestKey
    what: str
    name: str
    message_to: Callable[[OfferPart], Announce | Withdraw]
    deadline: Deadline


class OfferNotices:
    """Thread-safe; nothing here waits, but `close`.

    Args:
        pool: for what takes no time. Calls have threads of their own.
        heir_of: which request a transfer is for now that this one lets go of; asked when P is told.
    """

    def __init__(
        self,
        peers: PeerDirectory,
        caller: Caller,
        sources: Sources,
        link_timeout_s: float,
        pool: WorkPool,
        log: logging.Logger,
        heir_of: Callable[[RequestKey, PushSource], Announce | None],
    ) -> None:
        self._peers = peers
        self._caller = caller
        self._sources = sources
        self._link_timeout_s = link_timeout_s
        self._log = log
        self._pool = pool
        self._heir_of = heir_of
        self._calls = PeerPool("notice", NUM_THREADS, 1, log)

    def announce(self, job: AnnounceJob, timeout_s: float) -> None:
        """An offer will come, within `timeout_s`. The link is made by the way, which takes that out of the offer."""
        question = Announce(OfferRef(job.source.transfer_id, lease_ref(job.key)), timeout_s)
        deadline = Deadline.after(self._link_timeout_s)
        notice = _Notice(job.key, "that an offer will come", ANNOUNCE, lambda part: question, deadline)
        # Also to those that will hear that nothing is needed of them: none is left to its lease's time.
        self._find(job.source, notice, self._parts_and_unread)

    def withdraw(self, job: WithdrawJob) -> None:
        """None of D's workers offers anything: together they tell all of P's."""
        self._find(job.source, self._withdrawal_of(job), self._sources.share)

    def withdraw_parts(self, job: WithdrawJob) -> None:
        """This worker of D was about to offer, as others do: said to those, and in the words, that they say it to."""
        self._find(job.source, self._withdrawal_of(job), self._parts_and_unread)

    def withdraw_from(self, job: WithdrawJob, parts: Sequence[OfferPart]) -> None:
        """The same, when it is known to whom."""
        notice = self._withdrawal_of(job)
        self._pool.now(lambda: self._say(notice, parts))

    def let_go(self, job: OfferJob, ref: OfferRef, part: OfferPart) -> None:
        """An offer that was made is not to be served any more."""
        notice = self._withdrawal(job.key, job.source, ref, "to stop")
        self._pool.now(lambda: self._say(notice, [part]))

    def close(self, timeout_s: float) -> None:
        """What has not been said is dropped. Idempotent."""
        self._calls.close(timeout_s)

    def _withdrawal_of(self, job: WithdrawJob) -> _Notice:
        ref = OfferRef(job.source.transfer_id, lease_ref(job.key))
        return self._withdrawal(job.key, job.source, ref, "that nothing is needed, its lease ends by itself")

    def _withdrawal(self, key: RequestKey, source: PushSource, ref: OfferRef, what: str) -> _Notice:
        deadline = Deadline.after(self._link_timeout_s)
        message_to = lambda part: Withdraw(ref, part.num_offers, self._heir_of(key, source))  # noqa: E731
        return _Notice(key, what, WITHDRAW, message_to, deadline)

    def _parts_and_unread(self, workers: FoundWorkers) -> Sequence[OfferPart]:
        found = self._sources.parts(workers)
        return (*found.parts, *found.unread)

    # --- in the pool ------------------------------------------------------------------------------------------

    def _find(self, source: PushSource, notice: _Notice, choose: Callable[[FoundWorkers], Sequence[OfferPart]]) -> None:
        def found(future: Future[FoundWorkers]) -> None:
            try:
                parts = choose(future.result())
            except LLMException as error:
                self._not_said(notice, error)
            else:
                self._say(notice, parts)

        def find() -> None:
            future = self._sources.find(source, self._link_timeout_s)
            future.add_done_callback(lambda ended: self._pool.now(lambda: found(ended)))

        self._pool.now(find)

    def _say(self, notice: _Notice, parts: Sequence[OfferPart]) -> None:
        for part in parts:
            self._peers.prepare(part.endpoint).add_done_callback(
                lambda link, part=part: self._calls.now(  # type: ignore[misc]
                    part.endpoint.cluster_id, lambda: self._call(notice, part, link)
                )
            )

    def _call(self, notice: _Notice, part: OfferPart, link: Future[Peer]) -> None:
        try:
            if notice.deadline.expired:
                raise TimedOut("there was no link in time, or too much else to say")
            failure = link.exception()
            if failure is not None and not isinstance(failure, Incompatible):
                raise failure
            with self._peers.linked(part.endpoint, notice.deadline):
                ask(self._caller, part.endpoint, notice.name, notice.message_to(part), notice.deadline)
        except LLMException as error:
            self._not_said(notice, error)

    def _not_said(self, notice: _Notice, error: LLMException) -> None:
        self._log.info("request %s: P was not told %s: %s", notice.key.request_id, notice.what, error)


def ask(caller: Caller, endpoint: Endpoint, name: str, question: Question, deadline: Deadline) -> OfferAnswer:
    """Call that worker of P. It ends by the deadline, at the latest after CALL_TIMEOUT_S. Raises LLMException."""
    timeout_s = deadline.earlier(CALL_TIMEOUT_S).remaining_s()
    reply = caller.call(endpoint.cluster_id, name, msgspec.msgpack.encode(question), timeout_s)
    try:
        return msgspec.msgpack.decode(reply, type=OfferAnswer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{name}: the peer's answer cannot be read: {error}") from error
