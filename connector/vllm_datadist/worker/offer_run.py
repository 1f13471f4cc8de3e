# SPDX-License-Identifier: Apache-2.0
"""One offer's driver, for `offers.OfferRunner`: a call, or a wait that holds no thread, and on to the next event.

A call waits for its turn among those to the same peer, which does not answer all at once, or not at all. Whatever else
happens meanwhile is acted on at once, instead of the call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException, PeerLost, TimedOut

from ..counts import Awaited
from ..handoff.load import RELINK_PAUSE_S
from ..handoff.offer import POLL_S, OfferEffect, OfferMachine
from ..messages import OFFER, OFFER_STATE, WITHDRAW, AskOffer, Offer, Withdraw
from .claims import check_claim
from .load_book import Stopwatch
from .notices import FoundWorkers, OfferPart
from .peers import Peer
from .shares import check_brings

if TYPE_CHECKING:
    from .offers import OfferRunner

#: How often a fence that has not come is looked for.
FENCE_POLL_S = 0.25

_Effects = tuple[OfferEffect, ...]


@dataclass(slots=True, eq=False)
class _Wait:
    """What an offer waits for, and how it goes on."""

    go_on: Callable[[], _Effects]
    future: Future[Peer] | None = None


@dataclass(slots=True, eq=False)
class OfferRun:
    """One offer's driver: performs what its machine asks for. At most one thread at a time, none while it waits.

    `named`: P's workers, of which the machine's is one.
    """

    machine: OfferMachine
    runner: OfferRunner
    watch: Stopwatch
    named: FoundWorkers
    _wait: _Wait | None = None
    _peer: Peer | None = None
    _loss: LLMException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # --- from any thread ---

    def wake(self, wait: _Wait | None = None) -> None:
        """What it waits for has come: `wait`, or whatever it is."""
        with self._lock:
            found = self._wait
            if found is None or (wait is not None and wait is not found):
                return
            self._wait = None
        self.runner.pool.now(lambda: self.go(found.go_on))

    def lose(self, error: LLMException) -> None:
        """The link is gone."""
        with self._lock:
            self._loss = error
        self.wake()

    # --- in the pool ---

    def start(self) -> None:
        self.go(lambda: self._locked(lambda: self.machine.started(time.monotonic())))

    def go(self, event: Callable[[], _Effects]) -> None:
        """From one event on, until it waits or has ended."""
        effects = self._tell(event)
        if not self._perform(effects):
            self._await_turn(effects[-1])

    def _tell(self, event: Callable[[], _Effects]) -> _Effects:
        try:
            return event()
        except LLMException as error:
            failure = error
        except Exception as error:
            # A fault of ours. It must not leave vLLM waiting for the request, nor P with our blocks.
            self.runner.log.exception("request %s: unexpected error in a push", self.machine.key.request_id)
            failure = LLMException(f"unexpected error: {error!r}")
        return self._locked(lambda: self.machine.failed(failure, time.monotonic()))

    def _locked(self, step: Callable[[], _Effects]) -> _Effects:
        with self.runner.lock:
            return step()

    def _perform(self, effects: _Effects) -> bool:
        """Whether it has ended, or waits. Calls are left to do."""
        if OfferEffect.DROP_LINK in effects and self._peer is not None:
            self.runner.peers.drop(self._peer)
        if OfferEffect.LET_GO in effects:
            machine = self.machine
            self.runner.notices.let_go(machine.job, machine.ref, OfferPart(machine.endpoint, machine.num_offers))
        if OfferEffect.REPORT in effects:
            self.runner.ended(self)
            return True
        prepare = _WAITS.get(effects[-1])
        if prepare is None:
            return False
        prepare(self)
        return True

    def _hold(self, wait: _Wait, until_s: float) -> None:
        with self._lock:
            self._wait = wait
            is_lost = self._loss is not None
        self.runner.pool.at(until_s, lambda: self.wake(wait))
        with self.runner.lock:
            has_news = self.machine.has_news
        if is_lost or has_news:
            self.wake(wait)

    # --- what is waited for ---

    def _reach(self) -> None:
        future = self.runner.peers.prepare(self.machine.endpoint)
        wait = _Wait(lambda: self._reached(future), future)
        with self._lock:
            self._loss = None
        until_s = min(self.machine.deadline_s, time.monotonic() + 2 * self.runner.link_timeout_s)
        self._hold(wait, until_s)
        future.add_done_callback(lambda _: self.wake(wait))

    def _reached(self, future: Future[Peer]) -> _Effects:
        if not future.done():
            raise TimedOut(f"no link to {self.machine.endpoint.host}:{self.machine.endpoint.port} in time")
        self._peer = future.result()
        self._check_named(self._peer)
        self.watch.lap(Awaited.LINK)
        return self._locked(lambda: self.machine.linked(time.monotonic()))

    def _check_named(self, peer: Peer) -> None:
        """Raise Incompatible if that worker is not what it was named as: what it does not have, nobody would send."""
        endpoint, named = self.machine.endpoint, self.named
        if not named.is_ticket:
            check_claim(endpoint, named.claim, peer.description)
        check_brings(self.runner.peers.ours, endpoint, named.workers, peer.plan)

    def _await(self) -> None:
        self._hold(_Wait(self._awaited), self.machine.wake_s)

    def _awaited(self) -> _Effects:
        with self._lock:
            loss, self._loss = self._loss, None
        if loss is not None:
            raise PeerLost(str(loss))
        return self._locked(lambda: self.machine.woken(time.monotonic()))

    def _pause(self) -> None:
        with self._lock:
            self._loss = None
        self._hold(
            _Wait(lambda: self._locked(lambda: self.machine.pause_over(time.monotonic()))),
            time.monotonic() + RELINK_PAUSE_S,
        )

    def _fence(self) -> None:
        with self._lock:
            self._wait = wait = _Wait(self._look_at_fence)
        self.runner.pool.at(time.monotonic() + FENCE_POLL_S, lambda: self.wake(wait))

    def _look_at_fence(self) -> _Effects:
        cluster_id = self.machine.endpoint.cluster_id
        if self.machine.has_word or self.runner.fences.is_fenced(cluster_id, 0.0):
            return self._locked(lambda: self.machine.fenced(time.monotonic()))
        return (OfferEffect.FENCE,)

    # --- calls ---

    def _await_turn(self, effect: OfferEffect) -> None:
        wait, machine = _Wait(lambda: self._not_called(effect)), self.machine
        with self._lock:
            self._wait = wait
            is_over = self._loss is not None
        self.runner.calls.now(machine.endpoint.cluster_id, lambda: self._turn(wait, effect))
        if effect is OfferEffect.OFFER:
            self.runner.pool.at(machine.deadline_s, lambda: self.wake(wait))
        elif effect is OfferEffect.ASK_STATE:
            self.runner.pool.at(time.monotonic() + POLL_S, lambda: self.wake(wait))
        with self.runner.lock:
            is_over = is_over or self._is_needless(effect)
        if is_over:
            self.wake(wait)

    def _turn(self, wait: _Wait, effect: OfferEffect) -> None:
        with self._lock:
            if self._wait is not wait:
                return  # it has gone on otherwise
            self._wait = None
        self.go(_CALLS[effect].__get__(self))

    def _not_called(self, effect: OfferEffect) -> _Effects:
        with self._lock:
            loss, self._loss = self._loss, None
        if loss is not None:
            raise PeerLost(str(loss))
        with self.runner.lock:
            is_needless = self._is_needless(effect)
        if effect is OfferEffect.WITHDRAW and not is_needless:
            return (effect,)
        raise TimedOut("P has not answered our other calls in time")

    def _is_needless(self, effect: OfferEffect) -> bool:
        """P need not be asked any more. Taking back goes on until P's word is there, also when it is cancelled."""
        return self.machine.has_word if effect is OfferEffect.WITHDRAW else self.machine.has_news

    def _offer(self) -> _Effects:
        job, machine = self.machine.job, self.machine
        offer = Offer(
            ref=machine.ref,
            first_token=job.first_token,
            end_token=job.end_token,
            block_ids=[[block or 0 for block in table] for table in job.tables],
            num_prompt_tokens=job.num_prompt_tokens,
            prompt_digest=job.prompt_digest,
            num_offers=machine.num_offers,
            timeout_s=max(0.0, machine.deadline_s - time.monotonic()),
        )
        return self._call(OFFER, offer)

    def _ask_state(self) -> _Effects:
        return self._call(OFFER_STATE, AskOffer(self.machine.ref))

    def _withdraw(self) -> _Effects:
        machine, job = self.machine, self.machine.job
        instead = self.runner.heir_of(job.key, job.source)
        return self._call(WITHDRAW, Withdraw(machine.ref, machine.num_offers, instead))

    def _call(self, name: str, question: Offer | AskOffer | Withdraw) -> _Effects:
        answer = self.runner.ask(self.machine.endpoint, name, question)
        return self._locked(lambda: self.machine.answered(answer.state, answer.reason, time.monotonic()))


_WAITS: dict[OfferEffect, Callable[[OfferRun], None]] = {
    OfferEffect.REACH: OfferRun._reach,
    OfferEffect.AWAIT: OfferRun._await,
    OfferEffect.PAUSE: OfferRun._pause,
    OfferEffect.FENCE: OfferRun._fence,
}
_CALLS: dict[OfferEffect, Callable[[OfferRun], _Effects]] = {
    OfferEffect.OFFER: OfferRun._offer,
    OfferEffect.ASK_STATE: OfferRun._ask_state,
    OfferEffect.WITHDRAW: OfferRun._withdraw,
}
