# SPDX-License-Identifier: Apache-2.0
"""P's push: writes what its engine has computed into the blocks that one worker of D has offered.

One machine per offer. Two things happen without order: the offer comes, and the engine computes. Whoever is later
starts the push.

    WAITING -> ASKING -> READY <-> SENDING -> TELLING -> ENDED
                                     ^ |
                            RETRACTING-'          preempted in the middle of a send: all is sent again from the start
       TAKEN_BACK, CUT_OFF, FAILING               something is under way and has to end first; then ENDED or TELLING

Before the first write P asks D whether the offer stands (`handoff.offer` says why); a yes holds until P's final word,
and for the link that P had to D when it asked: each send of the push goes over that one or fails.
At most one thing is under way per push, a question, a send or a notice: the effects below, each of which ends with one
event. Everything else that happens meanwhile only changes what comes next.

A send takes tokens first..end-1 of the prompt, whose KV cache is computed, or is being computed in this very step: then
the driver lets each layer's blocks follow as soon as the layer is done. No send is begun for tokens that no step has
been given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from datadist_core.errors import LLMException

from ..messages import Offer, OfferRef, OfferState, RequestKey
from ..messages import Table as BlockTable
from .load import LINK_BROKEN
from .push_readers import request_key
from .table import Table

#: No offer may last longer.
MAX_TIMEOUT_S = 86400.0


class PushPhase(Enum):
    WAITING = "waiting for tokens"
    ASKING = "asking whether the offer stands"
    READY = "all sent so far"
    SENDING = "sending"
    RETRACTING = "sending what is void"
    TAKEN_BACK = "withdrawn, something under way"
    CUT_OFF = "cut off, something under way"
    FAILING = "failed, something under way"
    TELLING = "telling the end"
    ENDED = "ended"


class PushEvent(Enum):
    """..._MORE: there are tokens to send now. OVER: what was under way has ended, whichever way, and does not count."""

    WORK = "tokens to send"
    STANDS = "the offer stands"
    STANDS_MORE = "the offer stands, tokens to send"
    VOID = "the offer does not stand"
    SENT = "sent"
    SENT_MORE = "sent, more to send"
    SENT_ALL = "sent, nothing is left"
    NO_ANSWER = "the question failed"
    NOT_SENT = "the send failed"
    LINK_BROKE = "the link broke meanwhile"
    OVER = "it is over"
    OVER_MORE = "it is over, tokens to send"
    TOLD = "told, or tried to"
    RETRACTED = "the request lost its blocks"
    GONE = "nothing more will come"
    OVERDUE = "time of the offer over"
    WITHDRAWN = "withdrawn"
    LINK_LOST = "link lost"


class PushEffect(Enum):
    """ASK, SEND and TELL take time, in a thread of the driver's: `stands` or `failed`; `sent` or `failed`; `told`.

    RELEASE is done by `PushTable` itself: this worker of D has what it needs of P's lease.
    """

    ASK = "ask D whether the offer stands"
    SEND = "send"
    TELL = "tell D the end"
    RELEASE = "count D's worker as served"


_S, _E, _D = PushPhase, PushEvent, PushEffect
_TELL = (_S.TELLING, (_D.TELL,))
_DONE = (_S.TELLING, (_D.RELEASE, _D.TELL))
_END = (_S.ENDED, ())
_LET_GO = (_S.ENDED, (_D.RELEASE,))


def _stay(
    phase: PushPhase, *events: PushEvent
) -> dict[tuple[PushPhase, PushEvent], tuple[PushPhase, tuple[PushEffect, ...]]]:
    return {(phase, event): (phase, ()) for event in events}


def _stops(phase: PushPhase) -> dict[tuple[PushPhase, PushEvent], tuple[PushPhase, tuple[PushEffect, ...]]]:
    """While something is under way: it has to end first."""
    return {
        (phase, _E.GONE): (_S.FAILING, ()),
        (phase, _E.OVERDUE): (_S.FAILING, ()),
        (phase, _E.WITHDRAWN): (_S.TAKEN_BACK, ()),
        (phase, _E.LINK_LOST): (_S.CUT_OFF, ()),
    }


#: (phase, event) -> (next phase, effects in order).
PUSH_TABLE: Table[PushPhase, PushEvent, tuple[PushEffect, ...]] = Table(
    "push",
    {
        (_S.WAITING, _E.WORK): (_S.ASKING, (_D.ASK,)),
        (_S.WAITING, _E.GONE): _TELL,
        (_S.WAITING, _E.OVERDUE): _END,
        (_S.WAITING, _E.WITHDRAWN): _LET_GO,
        (_S.WAITING, _E.LINK_LOST): _END,
        **_stay(_S.WAITING, _E.RETRACTED),
        (_S.ASKING, _E.STANDS): (_S.READY, ()),
        (_S.ASKING, _E.STANDS_MORE): (_S.SENDING, (_D.SEND,)),
        (_S.ASKING, _E.VOID): _END,
        (_S.ASKING, _E.NO_ANSWER): _TELL,
        (_S.ASKING, _E.LINK_BROKE): _END,
        **_stops(_S.ASKING),
        **_stay(_S.ASKING, _E.WORK, _E.RETRACTED),
        (_S.READY, _E.WORK): (_S.SENDING, (_D.SEND,)),
        (_S.READY, _E.GONE): _TELL,
        (_S.READY, _E.OVERDUE): _TELL,
        (_S.READY, _E.WITHDRAWN): _LET_GO,
        (_S.READY, _E.LINK_LOST): _END,
        **_stay(_S.READY, _E.RETRACTED),
        (_S.SENDING, _E.SENT): (_S.READY, ()),
        (_S.SENDING, _E.SENT_MORE): (_S.SENDING, (_D.SEND,)),
        (_S.SENDING, _E.SENT_ALL): _DONE,
        (_S.SENDING, _E.NOT_SENT): _TELL,
        (_S.SENDING, _E.LINK_BROKE): _END,
        (_S.SENDING, _E.RETRACTED): (_S.RETRACTING, ()),
        **_stops(_S.SENDING),
        **_stay(_S.SENDING, _E.WORK),
        (_S.RETRACTING, _E.OVER): (_S.READY, ()),
        (_S.RETRACTING, _E.OVER_MORE): (_S.SENDING, (_D.SEND,)),
        **_stops(_S.RETRACTING),
        **_stay(_S.RETRACTING, _E.WORK, _E.RETRACTED),
        (_S.TAKEN_BACK, _E.OVER): _LET_GO,
        **_stay(_S.TAKEN_BACK, _E.WORK, _E.RETRACTED, _E.GONE, _E.OVERDUE, _E.WITHDRAWN, _E.LINK_LOST),
        (_S.CUT_OFF, _E.OVER): _END,
        (_S.CUT_OFF, _E.WITHDRAWN): (_S.TAKEN_BACK, ()),
        **_stay(_S.CUT_OFF, _E.WORK, _E.RETRACTED, _E.GONE, _E.OVERDUE, _E.LINK_LOST),
        (_S.FAILING, _E.OVER): _TELL,
        (_S.FAILING, _E.WITHDRAWN): (_S.TAKEN_BACK, ()),
        (_S.FAILING, _E.LINK_LOST): (_S.CUT_OFF, ()),
        **_stay(_S.FAILING, _E.WORK, _E.RETRACTED, _E.GONE, _E.OVERDUE),
        (_S.TELLING, _E.TOLD): _END,
        **_stay(_S.TELLING, _E.WORK, _E.RETRACTED, _E.GONE, _E.OVERDUE, _E.WITHDRAWN, _E.LINK_LOST),
    },
)
_TO_BE_OVER = (_S.TAKEN_BACK, _S.CUT_OFF, _S.FAILING)
_OUTCOME = {
    _E.SENT_ALL: OfferState.DONE,
    _E.WITHDRAWN: OfferState.WITHDRAWN,
    _E.VOID: OfferState.WITHDRAWN,
    **dict.fromkeys((_E.GONE, _E.OVERDUE, _E.LINK_LOST, _E.NO_ANSWER, _E.NOT_SENT, _E.LINK_BROKE), OfferState.FAILED),
}


@dataclass(slots=True, eq=False)
class Source:
    """What P's engine does for one transfer id.

    Attributes:
        key: P's request, until its blocks are gone; None as long as only offers have come.
        num_prompt_tokens, prompt_digest: of that request.
        end_token: tokens before it are computed, or are being computed in this step. 0 after a preemption.
        tables: the request's blocks up to there, per KV cache group.
        is_held: the request has ended, and its blocks are held under a lease of the same key.
        pushes: those under way from it, in the order of their offers.
    """

    transfer_id: str
    key: RequestKey | None = None
    num_prompt_tokens: int = 0
    prompt_digest: str = ""
    end_token: int = 0
    tables: tuple[BlockTable, ...] = ()
    is_held: bool = False
    pushes: list[PushMachine] = field(default_factory=list)

    @property
    def owner(self) -> RequestKey | None:
        """The request of D that has offers under way for it. They are all one request's."""
        return request_key(self.pushes[0].ref) if self.pushes else None


@dataclass(frozen=True, slots=True)
class Send:
    """What to send now: tokens first_token..end_token-1 of `key`, whose blocks are in `tables`, to the offer's.

    Only over the link `link_id`; without that one the send fails as by a broken link, whatever link there is.
    """

    key: RequestKey
    first_token: int
    end_token: int
    tables: tuple[BlockTable, ...]
    link_id: int | None


def why_malformed(offer: Offer) -> str:
    """Why nobody could serve this offer; "" if somebody may."""
    if not 0 <= offer.first_token < offer.end_token or offer.num_offers < 1:
        return f"tokens {offer.first_token}..{offer.end_token} and num_offers {offer.num_offers} make no offer"
    if not 0 < offer.timeout_s <= MAX_TIMEOUT_S:
        return f"timeout_s {offer.timeout_s} is not > 0 and <= {MAX_TIMEOUT_S}"
    return ""


def why_unfit(offer: Offer, source: Source) -> str:
    """Why this offer cannot be served from that request, with both values; "" if it can."""
    checks = (
        ("number of prompt tokens", offer.num_prompt_tokens, source.num_prompt_tokens),
        ("prompt digest", offer.prompt_digest, source.prompt_digest),
    )
    for name, theirs, ours in checks:
        if theirs != ours:
            return f"{name} is {theirs} at D and {ours} at P"
    if source.is_held and source.end_token < offer.end_token:
        return f"P has computed {source.end_token} tokens, D wants {offer.end_token}"
    return ""


class PushMachine:
    """One offer at P; fed through `PushTable`, but for reading.

    Attributes:
        cluster_id: D's worker.
        link_id: the link to it; the driver notes it right before it asks whether the offer stands.
        send: what SEND means; set when that effect is given, until its end.
        word, reason: how it ended, or will when what is under way has ended; None before.
    """

    def __init__(self, cluster_id: int, offer: Offer, source: Source, deadline_s: float) -> None:
        self.cluster_id = cluster_id
        self.offer = offer
        self.source = source
        self.deadline_s = deadline_s
        self.phase = PushPhase.WAITING
        self.link_id: int | None = None
        self.send: Send | None = None
        self.word: OfferState | None = None
        self.reason = ""
        self._sent_to = offer.first_token

    @property
    def ref(self) -> OfferRef:
        return self.offer.ref

    @property
    def is_over(self) -> bool:
        """Nothing is under way but perhaps the notice, and nothing will be."""
        return self.phase in (PushPhase.TELLING, PushPhase.ENDED)

    @property
    def is_ending(self) -> bool:
        """Nothing is begun any more, for whatever reason."""
        return self.is_over or self.phase in _TO_BE_OVER

    @property
    def state(self) -> OfferState:
        """What D is told when it asks, or takes it back."""
        if self.is_over and self.word is not None:
            return self.word
        return OfferState.WRITING if self.phase is PushPhase.TAKEN_BACK else OfferState.ACCEPTED

    @property
    def has_work(self) -> bool:
        """Tokens that can be sent now."""
        return self.source.key is not None and self._sent_to < min(self.source.end_token, self.offer.end_token)

    def step(self, event: PushEvent, reason: str = "") -> tuple[PushEffect, ...]:
        """Everything that happens to a push goes through here, and nothing after its end."""
        if self.phase is PushPhase.ENDED:
            return ()
        was_over = self.is_over
        self.phase, effects = PUSH_TABLE.next(self.phase, event)
        outcome = _OUTCOME.get(event)
        if outcome is not None and not was_over:
            self.word, self.reason = outcome, reason or event.value
        if event is PushEvent.RETRACTED:
            self._sent_to = self.offer.first_token
        if PushEffect.SEND in effects:
            self.send = self._next_send()
        return effects

    def ended_well(self, event: PushEvent) -> tuple[PushEffect, ...]:
        """The question was answered with yes (STANDS), or the send has ended (SENT)."""
        if event is PushEvent.SENT:
            event = self._how_sent()
        elif self.phase in _TO_BE_OVER:
            event = PushEvent.OVER
        elif self.has_work:
            event = PushEvent.STANDS_MORE
        return self.step(event)

    def refused(self) -> tuple[PushEffect, ...]:
        """The question was answered with no."""
        return self.step(PushEvent.OVER if self.phase in _TO_BE_OVER else PushEvent.VOID)

    def ended_badly(self, error: LLMException) -> tuple[PushEffect, ...]:
        """The question, or the send, has ended with this error, and has let go of all memory."""
        was_send, self.send = self.send is not None, None
        if self.phase in _TO_BE_OVER:
            return self.step(PushEvent.OVER)
        if self.phase is PushPhase.RETRACTING:
            return self.step(PushEvent.OVER_MORE if self.has_work else PushEvent.OVER)
        if isinstance(error, LINK_BROKEN):
            return self.step(PushEvent.LINK_BROKE, str(error))
        return self.step(PushEvent.NOT_SENT if was_send else PushEvent.NO_ANSWER, str(error))

    def _how_sent(self) -> PushEvent:
        sent, self.send = self.send, None
        if self.phase in _TO_BE_OVER:
            return PushEvent.OVER
        if self.phase is PushPhase.RETRACTING:
            return PushEvent.OVER_MORE if self.has_work else PushEvent.OVER
        if sent is not None:
            self._sent_to = sent.end_token
        if self._sent_to >= self.offer.end_token:
            return PushEvent.SENT_ALL
        return PushEvent.SENT_MORE if self.has_work else PushEvent.SENT

    def _next_send(self) -> Send:
        source = self.source
        if source.key is None:
            raise RuntimeError(f"a push of transfer {source.transfer_id} goes on without its request")
        end_token = min(source.end_token, self.offer.end_token)
        return Send(source.key, self._sent_to, end_token, source.tables, self.link_id)


@dataclass(frozen=True, slots=True)
class PushAct:
    """What the driver shall do for a push: ASK, SEND or TELL, in a thread that may wait.

    For SEND, `send` says what; for TELL, the push's `word` and `reason` are what D is told.
    """

    push: PushMachine
    effect: PushEffect
    send: Send | None = None
