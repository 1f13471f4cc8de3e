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
from those blocks. Who does not want such a send to go on waits until `is_sending(key)` is false, or has it end early.

Whom a transfer belongs to: all offers that are under way for it are one request's of D. Another request that offers
meanwhile for the same transfer id waits for its turn (`push_turns`), for a while, and is refused then. When the first
one's offers have ended it has what is still there, and what the first one needs, or does not, counts for nothing. While
there are no offers it belongs to the request that has announced its own, which may queue at D for long: P keeps the
lease alive for it. So who takes its offer back does not end a lease that another waits for.
"""

from __future__ import annotations

from collections import Counter

from datadist_core.errors import LLMException

from ..messages import Offer, OfferRef, OfferState, PushChunk, PushEnd, PushOpen, PushVoid, RequestKey
from ..newest import Newest
from .lease import Leases
from .load import LeaseLost
from .push import PushAct, PushEffect, PushEvent, PushMachine, PushPhase, Source, why_malformed, why_unfit
from .push_ended import Answer, Ended
from .push_readers import Announcements, OfferId, Served, ServedBook, offer_id, request_key
from .push_sends import Sends
from .push_turns import Line

#: Offers under way, in all and of one worker of D; one more is refused.
MAX_OFFERS, MAX_OFFERS_OF_ONE = 65536, 8192
#: An offer for a transfer that is over waits so long for P's next request of that id: who tries both again may have
#: reached D first. One for a transfer that another request has offered for waits so long for its turn.
COME_AGAIN_S = 3.0


class PushTable:
    """All pushes of one worker of P. Not thread-safe: the lock that guards `leases` guards it too.

    Args:
        leases: this worker's.
        max_ended: how many ended offers are remembered, to answer late or repeated calls.
    """

    def __init__(self, leases: Leases, max_ended: int = 4096) -> None:
        self._leases = leases
        #: The latest of each transfer id.
        self._sources: dict[str, Source] = {}
        self._by_key: dict[RequestKey, Source] = {}
        #: Those of them whose blocks are held under a lease.
        self._held: dict[RequestKey, Source] = {}
        self._active: dict[OfferId, PushMachine] = {}
        self._num_of: Counter[int] = Counter()
        #: Who waits until another request's offers have ended; each has a source of its own until then.
        self._line = Line()
        #: They, and who has come after the transfer was over: until when they wait for their turn, or P's next request.
        self._doubtful: dict[PushMachine, float] = {}
        #: Replaced by a higher number of the same offer, while something was under way.
        self._replaced: set[PushMachine] = set()
        self._ended: Newest[OfferId, Ended] = Newest(max_ended)
        #: Transfers of which nothing is left, and why.
        self._gone: Newest[str, str] = Newest(max_ended)
        #: Who needs nothing of a transfer whose lease is not open yet.
        self._served = ServedBook(max_ended)
        self._announced = Announcements(max_ended)
        self._sends = Sends(leases)
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
        return self._sends.is_from(key)

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
        self._begin_turn(opened.transfer_id)

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
        self._sends.pin(ended.key)
        for served in self._served.take(source.transfer_id):
            self._leases.release([ended.key], served.reader, served.num_readers)
        self._end_unfit(source)
        self._check_lease(source)

    # --- D's calls --------------------------------------------------------------------------------------------

    def announce(self, ref: OfferRef, until_s: float) -> None:
        """This request of D will offer, or say that it needs nothing: until then, at the latest, it is waited for."""
        key = request_key(ref)
        source, is_new = self._sources.get(ref.transfer_id), self._announced.note(ref.transfer_id, key, until_s)
        if is_new and (source is None or source.owner is None):
            self._served.keep_only(ref.transfer_id, key)

    def offer(self, cluster_id: int, offer: Offer, now_s: float) -> Answer:
        """Take it on, perhaps for later (`push_turns`), unless it can be seen that nothing will come of it."""
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
        push = self._take_on(who, offer, now_s)
        if source.owner in (None, who.reader.key):
            self._join(push, source)
        else:
            self._line.add(push)
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
            ended = self._ended[who] = Ended(ref.number, Answer(OfferState.WITHDRAWN))
        return ended.answer

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
        self._sends.end(push)
        self._perform(push, push.ended_well(PushEvent.SENT))
        self._check_lease(push.source)

    def failed(self, push: PushMachine, error: LLMException) -> None:
        """ASK or SEND has ended with this error, and has let go of all memory. For TELL, use `told`."""
        self._sends.end(push)
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
        for transfer_id in self._line.transfer_ids():
            self._begin_turn(transfer_id)
        for push in [push for push, until_s in self._doubtful.items() if until_s <= now_s]:
            self._end_doubtful(push)
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

    def _take_on(self, who: OfferId, offer: Offer, now_s: float) -> PushMachine:
        """With a source of its own that never computes anything."""
        source = Source(who.transfer_id)
        push = self._active[who] = PushMachine(who.cluster_id, offer, source, now_s + offer.timeout_s)
        source.pushes.append(push)
        self._num_of[who.cluster_id] += 1
        self._doubtful[push] = now_s + COME_AGAIN_S
        self._ended.pop(who, None)
        return push

    def _join(self, push: PushMachine, source: Source) -> None:
        """It is this source's."""
        transfer_id = source.transfer_id
        push.source.pushes.remove(push)
        push.source = source
        source.pushes.append(push)
        self._sources[transfer_id] = source
        self._served.keep_only(transfer_id, request_key(push.ref))
        if source.key is not None or transfer_id not in self._gone:
            self._doubtful.pop(push, None)
        if source.key is not None and (reason := why_unfit(push.offer, source)):
            self._step(push, PushEvent.GONE, reason)
        elif push.has_work:
            self._step(push, PushEvent.WORK)

    def _begin_turn(self, transfer_id: str) -> None:
        """If no offer is under way for it, it is the next one's."""
        source = self._sources.get(transfer_id) or Source(transfer_id)
        if not source.pushes:
            for push in self._line.take_turn(transfer_id):
                self._join(push, source)

    def _end_doubtful(self, push: PushMachine) -> None:
        transfer_id = push.ref.transfer_id
        reason = self._gone.get(transfer_id, "")
        if push in self._line:
            before = self._sources.get(transfer_id)
            if before is not None and all(other.is_ending for other in before.pushes):
                return  # it is its turn soon
            reason = "another request has offered for this transfer"
            self._line.discard(push)
        self._doubtful.pop(push, None)
        if push.source.key is None:
            self._step(push, PushEvent.GONE, reason)

    def _take_off(self, who: OfferId) -> PushMachine | None:
        push = self._active.pop(who, None)
        if push is not None:
            self._doubtful.pop(push, None)
            self._line.discard(push)
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
        if why := why_malformed(offer):
            return why
        if len(self._active) >= MAX_OFFERS or self._num_of[who.cluster_id] >= MAX_OFFERS_OF_ONE:
            return f"there are {MAX_OFFERS} offers already, or {MAX_OFFERS_OF_ONE} of this worker"
        return "" if source.key is None else why_unfit(offer, source)

    def _check_lease(self, source: Source) -> None:
        """After its end a send that is pinned goes on, and counts; no other is begun."""
        key = source.key
        if key is None or key not in self._held or self._leases.is_open(key):
            return
        if not self._sends.is_pinning(key):
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
        source.end_token = 0
        for push in list(source.pushes):
            self._step(push, PushEvent.GONE, reason)
        self._begin_turn(source.transfer_id)

    def _step(self, push: PushMachine, event: PushEvent, reason: str = "") -> None:
        self._perform(push, push.step(event, reason))

    def _perform(self, push: PushMachine, effects: tuple[PushEffect, ...]) -> None:
        if push.phase is PushPhase.ENDED:
            self._settle(push)
        for effect in effects:
            if effect is PushEffect.RELEASE:
                self._release(push)
            elif effect is PushEffect.SEND:
                self._begin_send(push)
            else:
                self._acts.append(PushAct(push, effect))

    def _begin_send(self, push: PushMachine) -> None:
        if self._sends.begin(push):
            self._acts.append(PushAct(push, PushEffect.SEND, push.send))
            return
        self._step(push, PushEvent.GONE, "P's lease is over")
        self._perform(push, push.ended_badly(LeaseLost("P's lease is over")))

    def _release(self, push: PushMachine) -> None:
        who, source = offer_id(push.cluster_id, push.ref), push.source
        if source.key is None:  # or it was not its turn
            source = self._sources.get(who.transfer_id, source)
        served = Served(who.reader, push.offer.num_offers)
        self._serve(who.transfer_id, source, served, push.word is OfferState.DONE)

    def _serve(self, transfer_id: str, source: Source | None, served: Served, is_done: bool = False) -> None:
        """One more worker of D needs nothing of P's lease; unless another request of D does.

        That is the one being served; or, for who has not been served, but lets go, any that is to be.
        """
        owner, announced = source and source.owner, self._announced.key_of(transfer_id)
        claims = (owner or announced,) if is_done else (owner, announced, self._line.next_key(transfer_id))
        if any(key not in (None, served.reader.key) for key in claims):
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
        self._ended[who] = Ended(push.ref.number, Answer(push.word or OfferState.FAILED, push.reason))
        source = push.source
        if source.key is None and not source.pushes and self._sources.get(source.transfer_id) is source:
            del self._sources[source.transfer_id]
        self._begin_turn(source.transfer_id)
