# SPDX-License-Identifier: Apache-2.0
"""Drives P's pushes on virtual time, as `worker.pushes` does on the real clock, and moves the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from datadist_core.errors import Cancelled, LLMException, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.lease import Reader
from vllm_datadist.handoff.push import PushAct, PushEffect, PushMachine, Send
from vllm_datadist.handoff.push_readers import request_key
from vllm_datadist.handoff.pushes import PushTable
from vllm_datadist.messages import Announce, Offer, OfferRef, OfferState, RequestKey, StepWork

from .calls import CALL_TIMEOUT_S, ask
from .network import Answering, LinkEnd
from .retries import Taker
from .world import Violation

if TYPE_CHECKING:
    from .blocks import Request
    from .worker import SimWorker

SEND_TIMEOUT_S = 6.0
SWEEP_S = 0.5
WITHDRAW_WAIT_S = 1.0


class SimPusher:
    """For each request that is being pushed: `given`, tokens that steps have been given to compute since it has its
    blocks; `final`, tokens whose KV cache is really there."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table = PushTable(worker.leases, worker.limits.max_remembered)
        self.final: dict[RequestKey, int] = {}
        self.given: dict[RequestKey, int] = {}
        self.sends: dict[PushMachine, SimSend] = {}
        self._is_sweeping = False
        #: Whom it has sent all of its share.
        self.served: set[Taker] = set()
        self._owners: dict[str, RequestKey | None] = {}
        self._withdrawals: list[Callable[[], bool]] = []

    def is_busy(self) -> bool:
        return bool(self.sends or not self.table.is_idle)

    # --- the engine's step ---

    def begin_step(self, work: StepWork) -> None:
        for void in work.push_voids:
            self.table.void(void)
            self._forget(void.key)
        for opened in work.push_opens:
            self.table.open(opened)
        for chunk in work.push_chunks:
            self.given[chunk.key] = chunk.end_token
            self.table.chunk(chunk)
        for end in work.push_ends:
            self.table.end(end)
            if end.error:
                self._forget(end.key)
        self._act()

    def computed(self, key: RequestKey, end_token: int) -> None:
        """The forward pass of this worker is over."""
        self.final[key] = end_token
        for send in list(self.sends.values()):
            send.look()

    def _forget(self, key: RequestKey) -> None:
        """The request has lost its blocks. Sends that wait for tokens of it wait for nothing."""
        self.final.pop(key, None)
        self.given.pop(key, None)
        for send in list(self.sends.values()):
            if send.send.key == key:
                send.lose_source()

    # --- services for D ---

    def on_announce(self, ref: OfferRef, timeout_s: float, answer: Answering) -> None:
        self._expect(ref, timeout_s)
        answer(True)
        self._act()

    def _expect(self, ref: OfferRef, timeout_s: float) -> None:
        until_s = self._worker.clock() + timeout_s
        self._worker.truth.expects(ref.transfer_id, request_key(ref), until_s)
        self.table.announce(ref, until_s)

    def on_offer(self, cluster_id: int, offer: Offer, answer: Answering) -> None:
        self._worker.truth.has_come(offer.ref.transfer_id, request_key(offer.ref))
        answer(self.table.offer(cluster_id, offer, self._worker.clock()))
        self._act()

    def on_state(self, cluster_id: int, ref: OfferRef, answer: Answering) -> None:
        answer(self.table.state(cluster_id, ref))

    def on_withdraw(
        self, cluster_id: int, ref: OfferRef, count: int, instead: Announce | None, answer: Answering
    ) -> None:
        """Answered when nothing is under way any more, or after a while."""
        if instead is not None:
            self._expect(instead.ref, instead.timeout_s)
        self._worker.truth.let_go(ref.transfer_id, _reader(cluster_id, ref), count)

        def try_to(is_last: bool) -> bool:
            found = self.table.withdraw(cluster_id, ref, count)
            if found.state is OfferState.WRITING and not is_last:
                return False
            answer(found)
            return True

        if not try_to(False):
            waiting = lambda: try_to(False)  # noqa: E731
            self._withdrawals.append(waiting)
            self._worker.clock.after(WITHDRAW_WAIT_S, lambda: self._time_over(waiting, try_to), self._worker)
        self._act()

    def _time_over(self, waiting: Callable[[], bool], try_to: Callable[[bool], bool]) -> None:
        if waiting in self._withdrawals:
            self._withdrawals.remove(waiting)
            try_to(True)
            self._act()

    def link_lost(self, cluster_id: int) -> None:
        self.table.link_lost(cluster_id, self._link_id(cluster_id))
        self._act()

    # --- effects ---

    def _note_owners(self) -> None:
        """Whose offers P has taken on by now."""
        for transfer_id, source in self.table._sources.items():
            if source.owner not in (None, self._owners.get(transfer_id)):
                self._owners[transfer_id] = source.owner
                self._worker.truth.takes_over(transfer_id, source.owner)

    def _act(self) -> None:
        self._note_owners()
        for act in self.table.take_acts():
            self._worker.world.note(
                "%s push %s.%d -> %s %s",
                self._worker.name,
                act.push.ref.request,
                act.push.ref.number,
                act.effect,
                act.send,
            )
            _PERFORM[act.effect](self, act)
            self._worker.engine.nemesis(self._worker, act.push)
        self._withdrawals = [waiting for waiting in self._withdrawals if not waiting()]
        if not self.table.is_idle and not self._is_sweeping:
            self._is_sweeping = True
            self._worker.wake_after(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._is_sweeping = False
        self.table.sweep(self._worker.clock())
        held = self.table.held_keys()
        self._worker.leases.renew(held)
        self._worker.truth.renew(held)
        self._act()

    def _ask(self, act: PushAct) -> None:
        push = act.push

        def done(outcome: object) -> None:
            if isinstance(outcome, LLMException):
                self.table.failed(push, outcome)
            else:
                self.table.stands(push, outcome is True)
            self._act()

        who, ref = self._worker.cluster_id, push.ref
        push.link_id = self._link_id(push.cluster_id)
        ask(self._worker, self._end(push), lambda d, answer: d.offers.on_stands(who, ref, answer), CALL_TIMEOUT_S, done)

    def _tell(self, act: PushAct) -> None:
        push, who = act.push, self._worker.cluster_id
        word, reason, ref = push.word or OfferState.FAILED, push.reason, push.ref

        def done(outcome: object) -> None:
            self.table.told(push)
            self._act()

        perform = lambda d, answer: d.offers.on_pushed(who, ref, word, reason, answer)  # noqa: E731
        ask(self._worker, self._end(push), perform, CALL_TIMEOUT_S, done)

    def _send(self, act: PushAct) -> None:
        push, send = act.push, act.send
        if send is None:
            raise Violation("model", "a send of nothing")

        def done(outcome: object) -> None:
            del self.sends[push]
            if isinstance(outcome, LLMException):
                self.table.failed(push, outcome)
            else:
                if send.end_token >= push.offer.end_token:
                    self.served.add(Taker(push.ref.transfer_id, request_key(push.ref)))
                    self._worker.truth.let_go(push.ref.transfer_id, _reader(who, push.ref), push.offer.num_offers)
                self.table.sent(push)
            self._act()
            self._worker.engine.nemesis(self._worker, push)

        who = push.cluster_id
        end = self._end(push)
        if end is not None and send.link_id not in (None, end.link.link_id):
            end = None
        SimSend(self._worker, push, send, end, done).start()

    def _link_id(self, cluster_id: int) -> int | None:
        end = self._worker.inbound.get(cluster_id)
        return None if end is None else end.link.link_id

    def _end(self, push: PushMachine) -> LinkEnd | None:
        return self._worker.inbound.get(push.cluster_id)


def _reader(cluster_id: int, ref: OfferRef) -> Reader:
    return Reader(cluster_id, request_key(ref))


_PERFORM: dict[PushEffect, Callable[[SimPusher, PushAct], None]] = {
    PushEffect.ASK: SimPusher._ask,
    PushEffect.SEND: SimPusher._send,
    PushEffect.TELL: SimPusher._tell,
}


class SimSend:
    """One-sided writes, block by block, over one end of a link: until that end is closed at P, whatever D thinks.

    A send is void when the request has lost its blocks meanwhile; what it moves then is not looked at, and must not
    count.
    """

    def __init__(self, worker: SimWorker, push: PushMachine, send: Send, end: LinkEnd | None, done: Answering) -> None:
        self.worker = worker
        self.push = push
        self.send = send
        self.end = end
        self.is_void = False
        self.request: Request | None = worker.engine.pushed.get(send.key)
        self._done: Answering | None = done
        self._is_waiting = False
        self.is_cut = False
        size = worker.engine.block_tokens
        self._todo = deque(range(send.first_token // size, -(-send.end_token // size)))

    def start(self) -> None:
        worker = self.worker
        worker.pusher.sends[self.push] = self
        if self.end is None or self.end.is_closed:
            worker.later(0.0, lambda: self._over(PeerLost("there is no link")))
            return
        if self.request is None or self.send.end_token > worker.pusher.given.get(self.send.key, 0):
            raise Violation("source", f"{worker.name} sends {self.send}, which no step computes")
        self.end.on_lost.append(self._cut)
        worker.wake_after(SEND_TIMEOUT_S, lambda: self._over(TimedOut("the send took too long")))
        self._next_block()

    def _cut(self, error: LLMException) -> None:
        """Nothing is written any more; the thread that sends notices a little later."""
        self.is_cut = True
        world = self.worker.world
        self.worker.later(world.rng.choice((0.0, 0.1, 1.0)) * world.rng.random(), lambda: self._over(error))

    def lose_source(self) -> None:
        self.is_void = True
        if self._is_waiting:
            self.worker.later(0.0, lambda: self._over(Cancelled("nothing more will be computed")))

    def look(self) -> None:
        if self._is_waiting and self._is_final():
            self._is_waiting = False
            self._take_later()

    def _next_block(self) -> None:
        if self._done is None or self.is_cut:
            return
        if not self._todo:
            self._over(self)
        elif self._is_final():
            self._take_later()
        else:
            self._is_waiting = True

    def _is_final(self) -> bool:
        """The layer synchroniser of the real driver waits for this."""
        _, end_token = self._tokens(self._todo[0])
        key = self.send.key
        return end_token <= self.worker.pusher.final.get(key, 0)

    def _tokens(self, index: int) -> tuple[int, int]:
        size = self.worker.engine.block_tokens
        return max(self.send.first_token, index * size), min(self.send.end_token, (index + 1) * size)

    def _take_later(self) -> None:
        world, faults = self.worker.world, self.worker.network.faults
        luck = world.rng.random()
        if luck < faults.read_hangs:
            return
        if world.rng.random() < faults.odd:
            error = world.rng.choice((RemoteError("the peer cannot"), TimedOut("the transfer took too long")))
            self.worker.later(0.0, lambda: self._over(error))
            return
        seconds = world.rng.expovariate(1.0) * faults.delay_s
        if luck < faults.read_hangs + faults.read_stalls:
            seconds = world.rng.uniform(0.3, 9)
        self.worker.later(seconds, self._take)

    def _take(self) -> None:
        if self._done is None or self.is_cut or self.end is None:
            return
        index = self._todo.popleft()
        source, target = self.send.tables[0][index], self.push.offer.block_ids[0][index]
        if source is None or not target:
            raise Violation("tags", f"{self.send.key}: a block of the push is missing")
        self._check_source(index, source)
        d, size = self.end.other.worker, self.worker.engine.block_tokens
        first, end = self._tokens(index)
        at = (source - index) * size
        content = [(h, self.worker.memory[h][at + first : at + end]) for h in self.worker.heads if h in d.heads]
        self.worker.later(self.worker.network.faults.delay_s * 0.1, lambda: self._put(target, (first, end), content))

    def _check_source(self, index: int, source: int) -> None:
        """What is sent is P's to send, and final: unless the send is void."""
        if self.is_void or self.request is None:
            return
        worker, request = self.worker, self.request
        if request.is_freed and request.hold_key is not None:
            raise Violation("source", f"{worker.name} sends from blocks of {self.send.key}, which it has given back")
        first, end = self._tokens(index)
        worker.engine.checks.tokens(request, worker, source, first, end)

    def _put(self, target: int, tokens: tuple[int, int], content: list[tuple[int, list[int]]]) -> None:
        """P's process writes into D's memory. D's process may be stopped, or gone."""
        if self._done is None or self.is_cut or self.end is None:
            return
        d = self.end.other.worker
        if not d.is_alive:
            return
        key = RequestKey(self.push.ref.request.request_id, self.push.ref.request.attempt)
        request = d.engine.load_targets.get(key)
        if request is None or request.is_freed or not request.awaits_load or not d.offers.may_write(self.push.ref):
            raise Violation(
                "reserved", f"{self.worker.name} writes into block {target} of {d.name}, which {key} has not reserved"
            )
        if tokens[0] < request.num_load_from:
            raise Violation("position", f"{self.worker.name} writes tokens {tokens} of {key}, which has some of them")
        written = d.engine.written.setdefault(key, set())
        size = d.engine.block_tokens
        at = target * size + tokens[0] % size
        for head, tags in content:
            d.memory[head][at : at + len(tags)] = tags
            if not self.is_void:
                written.update((d.place.index, head, token) for token in range(*tokens))
            else:
                written.difference_update((d.place.index, head, token) for token in range(*tokens))
        self._next_block()

    def _over(self, outcome: object) -> None:
        """Nothing is written after it."""
        if self._done is not None and self.worker.is_alive:
            done, self._done = self._done, None
            done(outcome)
