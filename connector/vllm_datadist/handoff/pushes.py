# SPDX-License-Identifier: Apache-2.0
"""P's pushes: which requests are to be pushed, which offers have come for them, and when their blocks may be freed.

    the engine's steps   `open`, `chunk`, `void`, `end`             what it computes, in the order of `StepWork`
    D's calls            `announce`, `offer`, `state`, `withdraw`   answered at once
    the driver's threads `stands`, `sent`, `failed`, `told`         how an effect has ended
    time, links          `sweep`, `link_lost`

Each returns what is to be done now, as `PushAct`s. Nothing that is unknown, repeated or late is an error.

When P's blocks may be given to others. After the request's end they are held under a lease, of the same key, that is
opened before `end` is fed. Each worker of D that has all it needs counts as one of its readers, and each send pins it:
so it ends when all have been served, or by its time, but never under a send.

Before its end vLLM keeps them, but it takes them back without asking when the request is preempted or aborted. `void`,
or `end` with an error, is fed before the step's forward pass writes anything. A send under way then is void: whatever
it still takes out of those blocks goes into blocks that D has reserved for this offer, and D hears nothing final before
the send has ended; it does not count, so that either all is sent again, or the push has failed. No other send is begun
from those blocks. Who does not want such a send to go on waits until `is_sending(key)` is false before that forward
pass, or has it end early.

Whom a transfer belongs to: all offers that are under way for it are one request's of D. Another D that comes meanwhile
with the same transfer id is refused; when the first one's offers have ended it may have what is still there, and then
what the first one needs, or does not, counts for nothing. While there are no offers it belongs to the request that has
announced its own, which may queue at D for long: P keeps the lease alive for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from datadist_core.errors import LLMException

from ..messages import Offer, OfferRef, OfferState, PushChunk, PushEnd, PushOpen, PushVoid, RequestKey
from .lease import Leases
from .load import LeaseLost
from .push import PushEffect, PushEvent, PushMachine, PushPhase, Send, Source, why_unfit
from .push_readers import Announcements, OfferId, Served, ServedBook, offer_id, request_key

#: Offers under way, in all and of one worker of D; one more is refused.
MAX_OFFERS, MAX_OFFERS_OF_ONE = 65536, 8192
#: No offer may last longer.
MAX_TIMEOUT_S = 86400.0
#: An offer for a transfer that is over waits so long for P's next request of that id: who tries both again may have
#: reached D first.
COME_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class PushAct:
    """What the driver shall do for a push: ASK, SEND or TELL, in a thread that may wait.

    For SEND, `send` says what; for TELL, the push's `word` and `reason` are what D is told.
    """

    push: PushMachine
    effect: PushEffect
    send: Send | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """To a call of D's."""

    state: OfferState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is left of an offer."""

    number: int
    answer: Answer


class PushTable:
    """All pushes of one worker of P. Not thread-safe: the lock that guards `leases` guards it too.

    Args:
        leases: this worker's.
        max_ended: how many ended offers are remembered, to answer late or repeated calls.
    """

    def __init__(self, leases: Leases, max_ended: int = 4096) -> None:
        self._leases = leases
        self._max_ended = max_ended
        #: The latest of each transfer id.
        self._sources: dict[str, Source] = {}
        self._by_key: dict[RequestKey, Source] = {}
        #: Those of them whose blocks are held under a lease.
        self._held: dict[RequestKey, Source] = {}
        self._active: dict[OfferId, PushMachine] = {}
        self._num_of: Counter[int] = Counter()
        #: Offered after their transfer was over, and until when they wait for it to come again.
        self._doubtful: dict[PushMachine, float] = {}
        #: Replaced by a higher number of the same offer, while something was under way.
        self._replaced: set[PushMachine] = set()
        self._ended: OrderedDict[OfferId, _Ended] = OrderedDict()
        #: Transfers of which nothing is left, and why.
        self._gone: OrderedDict[str, str] = OrderedDict()
        #: Who needs nothing of a transfer whose lease is not open yet.
        self._served = ServedBook(max_ended)
        self._announced = Announcements(max_ended)
        #: Each send under way, and the request from whose blocks.
        self._sends: dict[PushMachine, RequestKey] = {}
        self._pinned: set[PushMachine] = set()
        self._acts: list[PushAct] = []

    def __len__(self) -> int:
        """Offers that have not ended."""
        return len(self._active) + len(self._replaced)

    @property
    def is_idle(self) -> bool:
        """Nothing here ends by time: no `sweep` is needed."""
        return not (self._active or self._replaced or self._held or len(self._announced))

    @property
    def num_announced(self) -> int:
        """Transfers for which an offer is expected."""
        return len(self._announced)

    def take_acts(self) -> list[PushAct]:
        """What is to be done since the last call. After every other call, also after those that answer."""
        acts, self._acts = self._acts, []
        return acts

    def held_keys(self) -> list[RequestKey]:
        """Requests that have ended, and whose blocks an offer, or one that is announced, waits for."""
        sources = [push.source for push in self._active.values()]
        sources += [self._sources[name] for name in self._announced if name in self._sources]
        return [source.key for source in sources if source.is_held and source.key]

    def is_sending(self, key: RequestKey) -> bool:
        """Whether a send from this request's blocks is under way."""
        return key in self._sends.values()

    # --- the engine's steps -----------------------------------------------------------------------------------

    def open(self, opened: PushOpen) -> None:
        """A request that is to be pushed. Again with the same key changes nothing."""
        if opened.key in self._by_key:
            return
        source = self._sources.get(opened.transfer_id)
        if source is None or source.key is not None:
            source = Source(opened.transfer_id)
        source.key = opened.key
        source.num_prompt_tokens, source.prompt_digest = opened.num_tokens, opened.prompt_digest
        self._sources[opened.transfer_id] = self._by_key[opened.key] = source
        self._gone.pop(opened.transfer_id, None)
        self._end_unfit(source)

    def chunk(self, chunk: PushChunk) -> None:
        """This step computes tokens up to `end_token`."""
        source = self._by_key.get(chunk.key)
        if source is None or source.is_held:
            return
        source.end_token, source.tables = chunk.end_token, chunk.tables
        for push in list(source.pushes):
            if push.has_work:
                self._step(push, PushEvent.WORK)

    def void(self, void: PushVoid) -> None:
        """The request has lost its blocks. Its chunks begin again, if it does, with the same key."""
        source = self._by_key.get(void.key)
        if source is None:
            return
        source.end_token, source.tables = 0, ()
        for push in list(source.pushes):
            self._step(push, PushEvent.RETRACTED)

    def end(self, ended: PushEnd) -> None:
        """The request has ended. Without an error its lease has been opened before."""
        source = self._by_key.get(ended.key)
        if source is None:
            return
        if ended.error:
            self._over(source, ended.error)
            return
        source.is_held, self._held[ended.key] = True, source
        for push in [push for push, key in self._sends.items() if key == ended.key]:
            self._leases.pin_under_way(ended.key)
            self._pinned.add(push)
        for served in self._served.take(source.transfer_id):
            self._leases.release([ended.key], served.reader, served.num_readers)
        self._end_unfit(source)
        self._check_lease(source)

    # --- D's calls --------------------------------------------------------------------------------------------

    def announce(self, ref: OfferRef, until_s: float) -> None:
        """This request of D will offer, or say that it needs nothing: until then, at the latest, it is waited for."""
        key = request_key(ref)
        is_new = self._announced.note(ref.transfer_id, key, until_s)
        if is_new and _owner(self._sources.get(ref.transfer_id)) is None:
            self._served.keep_only(ref.transfer_id, key)

    def offer(self, cluster_id: int, offer: Offer, now_s: float) -> Answer:
        """Take it on, unless it can be seen that nothing will come of it. Again changes nothing."""
        who = offer_id(cluster_id, offer.ref)
        self._announced.has_come(who.transfer_id, who.reader.key)
        known = self._known(who, offer.ref.number)
        if known is not None:
            return known
        self._replace(who)
        current = self._sources.get(offer.ref.transfer_id)
        if current is not None:
            self._check_lease(current)  # it may have just ended
        source = self._sources.get(offer.ref.transfer_id) or Source(offer.ref.transfer_id)
        reason = self._why_refused(who, offer, source)
        if reason:
            return Answer(OfferState.FAILED, reason)
        push = self._take_on(who, offer, source, now_s)
        if push.has_work:
            self._step(push, PushEvent.WORK)
        return Answer(OfferState.ACCEPTED)

    def state(self, cluster_id: int, ref: OfferRef) -> Answer:
        """How far it is."""
        who = offer_id(cluster_id, ref)
        push, ended = self._active.get(who), self._ended.get(who)
        if push is not None and push.ref.number == ref.number:
            return Answer(push.state, push.reason)
        if push is None and ended is not None and ended.number == ref.number:
            return ended.answer
        return Answer(OfferState.UNKNOWN)

    def withdraw(self, cluster_id: int, ref: OfferRef, num_offers: int) -> Answer:
        """D needs nothing of this (any more); it may never have offered. WRITING: ask again, something is under way.

        The driver does not answer WRITING at once, but waits for a second whether it ends.
        """
        who = offer_id(cluster_id, ref)
        push, ended = self._active.get(who), self._ended.get(who)
        self._announced.has_come(who.transfer_id, who.reader.key)
        if push is not None and push.ref.number > ref.number:
            return Answer(OfferState.WITHDRAWN)
        if push is not None:
            self._step(push, PushEvent.WITHDRAWN)
        if push is None or push.is_over:  # also if it has failed, or was void: now it is known that D wants no other
            self._serve(ref.transfer_id, self._sources.get(ref.transfer_id), Served(who.reader, num_offers))
        if push is not None:
            return Answer(push.state, push.reason)
        if ended is None or ended.number != ref.number:
            self._remember(who, _Ended(ref.number, Answer(OfferState.WITHDRAWN)))
        return self._ended[who].answer

    # --- how effects have ended -------------------------------------------------------------------------------

    def stands(self, push: PushMachine, stands: bool) -> None:
        """D's answer to ASK."""
        if stands:
            self._check_lease(push.source)
            self._perform(push, push.ended_well(PushEvent.STANDS))
        else:
            self._perform(push, push.refused())

    def sent(self, push: PushMachine) -> None:
        """SEND has ended: all of it is in D's blocks. It counts, also if the lease is over: it was pinned."""
        self._send_ended(push)
        self._perform(push, push.ended_well(PushEvent.SENT))
        self._check_lease(push.source)

    def failed(self, push: PushMachine, error: LLMException) -> None:
        """ASK or SEND has ended with this error, and has let go of all memory. For TELL, use `told`."""
        self._send_ended(push)
        self._perform(push, push.ended_badly(error))

    def told(self, push: PushMachine) -> None:
        """TELL has ended, whichever way: if D has not heard it, it will ask."""
        self._step(push, PushEvent.TOLD)

    # --- time and links ---------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """End what is over by time: offers, also expected ones, and sources whose lease has ended.

        Some times a second; then the leases of `held_keys` are to be renewed.
        """
        self._announced.expire(now_s)
        for push in [push for push in self._active.values() if push.deadline_s <= now_s]:
            self._step(push, PushEvent.OVERDUE)
        for push in [push for push, until_s in self._doubtful.items() if until_s <= now_s]:
            del self._doubtful[push]
            if push.source.key is None:
                self._step(push, PushEvent.GONE, self._gone.get(push.ref.transfer_id, ""))
        for source in list(self._held.values()):
            self._check_lease(source)

    def link_lost(self, cluster_id: int, link_id: int | None = None) -> None:
        """A link to this worker of D is lost, or has been replaced by another; `link_id` is the one there is now.

        What D has granted over any other is void. This may come late: no send goes over another link than its push's.
        """
        for push in [push for push in self._active.values() if push.cluster_id == cluster_id]:
            if link_id is None or push.link_id not in (None, link_id):
                self._step(push, PushEvent.LINK_LOST)

    # --- inside -----------------------------------------------------------------------------------------------

    def _take_on(self, who: OfferId, offer: Offer, source: Source, now_s: float) -> PushMachine:
        push = self._active[who] = PushMachine(who.cluster_id, offer, source, now_s + offer.timeout_s)
        self._num_of[who.cluster_id] += 1
        source.pushes.append(push)
        self._sources[who.transfer_id] = source
        self._ended.pop(who, None)
        self._served.keep_only(who.transfer_id, who.reader.key)
        if source.key is None and who.transfer_id in self._gone:
            self._doubtful[push] = now_s + COME_AGAIN_S
        return push

    def _take_off(self, who: OfferId) -> PushMachine | None:
        push = self._active.pop(who, None)
        if push is not None:
            self._doubtful.pop(push, None)
            push.source.pushes.remove(push)
            self._num_of[who.cluster_id] -= 1
            if not self._num_of[who.cluster_id]:
                del self._num_of[who.cluster_id]
        return push

    def _end_unfit(self, source: Source) -> None:
        for push in list(source.pushes):
            reason = why_unfit(push.offer, source)
            if reason:
                self._step(push, PushEvent.GONE, reason)

    def _known(self, who: OfferId, number: int) -> Answer | None:
        """The answer to an offer that need not, or must not, be taken on."""
        push, ended = self._active.get(who), self._ended.get(who)
        if push is not None and push.ref.number == number:
            return Answer(push.state, push.reason)
        if push is not None and push.ref.number > number:
            return Answer(OfferState.FAILED, "it has been offered again since")
        if ended is not None and (ended.number >= number or ended.answer.state is OfferState.WITHDRAWN):
            return ended.answer
        return None

    def _replace(self, who: OfferId) -> None:
        """The same offer comes again after trouble on the link; the one before gets nowhere any more."""
        old = self._active.get(who)
        if old is not None:
            self._replaced.add(old)
            self._step(old, PushEvent.LINK_LOST)
            self._take_off(who)

    def _why_refused(self, who: OfferId, offer: Offer, source: Source) -> str:
        if not 0 <= offer.first_token < offer.end_token or offer.num_offers < 1:
            return f"tokens {offer.first_token}..{offer.end_token} and num_offers {offer.num_offers} make no offer"
        if not 0 < offer.timeout_s <= MAX_TIMEOUT_S:
            return f"timeout_s {offer.timeout_s} is not > 0 and <= {MAX_TIMEOUT_S}"
        if len(self._active) >= MAX_OFFERS or self._num_of[who.cluster_id] >= MAX_OFFERS_OF_ONE:
            return f"there are {MAX_OFFERS} offers already, or {MAX_OFFERS_OF_ONE} of this worker"
        if _owner(source) not in (None, who.reader.key):
            return "another request has offered for this transfer"
        return "" if source.key is None else why_unfit(offer, source)

    def _check_lease(self, source: Source) -> None:
        """After its end a send that is pinned goes on, and counts; no other is begun."""
        key = source.key
        if key is None or key not in self._held or self._leases.is_open(key):
            return
        if not any(self._sends[push] == key for push in self._pinned):
            self._over(source, "P's lease is over")

    def _over(self, source: Source, reason: str) -> None:
        """Its blocks are not to be sent from any more, once what is under way has ended."""
        if source.key is not None:
            self._by_key.pop(source.key, None)
            self._held.pop(source.key, None)
        if self._sources.get(source.transfer_id) is source:
            del self._sources[source.transfer_id]
            self._served.take(source.transfer_id)
            self._gone[source.transfer_id] = reason
            while len(self._gone) > self._max_ended:
                self._gone.popitem(last=False)
        source.end_token = 0
        for push in list(source.pushes):
            self._step(push, PushEvent.GONE, reason)

    def _step(self, push: PushMachine, event: PushEvent, reason: str = "") -> None:
        self._perform(push, push.step(event, reason))

    def _perform(self, push: PushMachine, effects: tuple[PushEffect, ...]) -> None:
        if push.phase is PushPhase.ENDED:
            self._settle(push)
        for effect in effects:
            if effect is PushEffect.RELEASE:
                served = Served(offer_id(push.cluster_id, push.ref).reader, push.offer.num_offers)
                self._serve(push.source.transfer_id, push.source, served)
            elif effect is PushEffect.SEND:
                self._begin_send(push)
            else:
                self._acts.append(PushAct(push, effect))

    def _begin_send(self, push: PushMachine) -> None:
        send = push.send
        if send is None:
            raise RuntimeError("a send of nothing")
        if push.source.is_held:
            if not self._leases.pin(send.key):
                self._step(push, PushEvent.GONE, "P's lease is over")
                self._perform(push, push.ended_badly(LeaseLost("P's lease is over")))
                return
            self._pinned.add(push)
        self._sends[push] = send.key
        self._acts.append(PushAct(push, PushEffect.SEND, send))

    def _send_ended(self, push: PushMachine) -> None:
        key = self._sends.pop(push, None)
        if key is not None and push in self._pinned:
            self._pinned.discard(push)
            self._leases.unpin(key)

    def _serve(self, transfer_id: str, source: Source | None, served: Served) -> None:
        """One more worker of D needs nothing of P's lease; unless another request of D is being served."""
        owner = _owner(source) or self._announced.key_of(transfer_id)
        if owner not in (None, served.reader.key):
            return
        if source is not None and source.is_held and source.key is not None:
            self._leases.release([source.key], served.reader, served.num_readers)
        else:
            self._served.note(transfer_id, served)

    def _settle(self, push: PushMachine) -> None:
        """It has ended: only the answer to late questions is kept."""
        if push in self._replaced:
            self._replaced.discard(push)
            return
        who = offer_id(push.cluster_id, push.ref)
        if self._take_off(who) is None:
            return
        self._remember(who, _Ended(push.ref.number, Answer(push.word or OfferState.FAILED, push.reason)))
        source = push.source
        if source.key is None and not source.pushes and self._sources.get(source.transfer_id) is source:
            del self._sources[source.transfer_id]

    def _remember(self, who: OfferId, ended: _Ended) -> None:
        self._ended[who] = ended
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)


def _owner(source: Source | None) -> RequestKey | None:
    """The request of D that has offers under way for it. They are all one request's."""
    return request_key(source.pushes[0].ref) if source is not None and source.pushes else None
