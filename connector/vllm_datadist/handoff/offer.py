# SPDX-License-Identifier: Apache-2.0
"""D's offer: reach P, offer our blocks, wait until P has written them, or until P cannot write them any more.

    QUEUED -> LINKING -> OFFERING -> AWAITING <-> ASKING              -> ENDED    P's word: done, or failed
                 ^---PAUSED-'----------'                                          trouble before P may write
                 |                     |---------> WITHDRAWING -----> ENDED       taken back, P confirms
                 '------------------ FENCING <---------'----> ENDED              no word: P's end is fenced

The point of no return is P's question whether the offer stands (`stands`), before its first write: an offer that has
said yes is *granted*. Until then it can be dropped at once, whatever P knows of it: P will ask, and be told no. Once it
is granted, our blocks are P's until P's final word about it (its notice, or any answer), or until no former link to P
can be written over (the fence). It is granted only while the link that it was made over is up (`lose`).

Trouble on the link is tried to be cured once, under the next `number`: what P still says about the one before, or asks
for it, is not this offer's any more.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from datadist_core.errors import Cancelled, LLMException, RemoteError, TimedOut

from ..messages import Endpoint, OfferJob, OfferRef, OfferState, RequestKey, lease_ref
from .load import LINK_BROKEN
from .table import Table

#: How soon P is asked when no notice comes.
POLL_S = 2.0
#: So often P is asked to confirm that it has stopped, each time for as long as a call may last; then its link goes.
MAX_WITHDRAWALS = 3

FINAL = (OfferState.DONE, OfferState.FAILED, OfferState.WITHDRAWN)


class PushFailed(LLMException):
    """P says that it has not written everything, and will not."""


class OfferPhase(Enum):
    QUEUED = "queued"
    LINKING = "linking"
    PAUSED = "paused"
    OFFERING = "offering"
    AWAITING = "awaiting the notice"
    ASKING = "asking how far it is"
    WITHDRAWING = "withdrawing"
    FENCING = "fencing"
    ENDED = "ended"


class OfferEvent(Enum):
    """BROKEN, LATE: trouble on the link that may be cured; ..._AGAIN: that may not. CUT_OFF, TAKE_BACK: the offer is
    granted, so that P may be writing."""

    STARTED = "started"
    LINKED = "linked"
    ACCEPTED = "answer: accepted"
    UNKNOWN = "answer: unknown"
    DONE = "P's word: done"
    NOT_DONE = "P's word: failed or withdrawn"
    WRITING = "answer: still writing"
    WOKEN = "time to ask"
    PAUSE_OVER = "pause over"
    BROKEN = "link broken"
    BROKEN_AGAIN = "link broken again"
    LATE = "no answer in time"
    LATE_AGAIN = "no answer in time again"
    FAILED = "failed"
    CANCELLED = "cancelled"
    OVERDUE = "deadline over"
    SILENT = "no answer in time, no matter"
    CUT_OFF = "link broken, P may write"
    TAKE_BACK = "cancelled, failed or overdue, P may write"
    NO_ANSWER = "P does not confirm"
    FENCED = "fenced"
    FENCED_AGAIN = "fenced, no further try"


class OfferEffect(Enum):
    """What the driver shall do. The first eight take time, and their outcome is the next event.

    REACH: `linked` or `failed`. OFFER, ASK_STATE, WITHDRAW: the call of that name; `answered` or `failed`.
    AWAIT: wait for a notice, a cancellation, the loss of the link, or until `wake_s`: `woken`, or `failed` with the
    loss. PAUSE: `pause_over` after RELINK_PAUSE_S, or when cancelled. FENCE: wait, without end if need be and so not in
    a thread of the pool, until no former link to this cluster id can be written over, or P's word has come: `fenced`.
    A driver may call `linked` instead when somebody has linked to P again: it is asked then.
    """

    REACH = "reach P"
    OFFER = "offer"
    AWAIT = "await the notice"
    ASK_STATE = "ask how far it is"
    WITHDRAW = "withdraw, and wait for the answer"
    PAUSE = "pause"
    FENCE = "wait for the fence"
    DROP_LINK = "drop the link"
    LET_GO = "withdraw, without waiting for an answer"
    REPORT = "report the end"


_S, _E, _D = OfferPhase, OfferEvent, OfferEffect
_LET_GO = (_S.ENDED, (_D.LET_GO, _D.REPORT))
_END = (_S.ENDED, (_D.REPORT,))
_DROP_AND_END = (_S.ENDED, (_D.DROP_LINK, _D.REPORT))
_RELINK = (_S.PAUSED, (_D.DROP_LINK, _D.PAUSE))
_FENCE = (_S.FENCING, (_D.DROP_LINK, _D.FENCE))
_TAKE_BACK = (_S.WITHDRAWING, (_D.WITHDRAW,))

#: (phase, event) -> (next phase, effects in order). From granted offers no row ends but by P's word or the fence.
OFFER_TABLE: Table[OfferPhase, OfferEvent, tuple[OfferEffect, ...]] = Table(
    "offer",
    {
        (_S.QUEUED, _E.STARTED): (_S.LINKING, (_D.REACH,)),
        (_S.QUEUED, _E.CANCELLED): _LET_GO,
        (_S.QUEUED, _E.OVERDUE): _LET_GO,
        (_S.LINKING, _E.LINKED): (_S.OFFERING, (_D.OFFER,)),
        (_S.LINKING, _E.BROKEN): (_S.PAUSED, (_D.PAUSE,)),
        (_S.LINKING, _E.LATE): (_S.PAUSED, (_D.PAUSE,)),
        (_S.LINKING, _E.BROKEN_AGAIN): _END,
        (_S.LINKING, _E.LATE_AGAIN): _END,
        (_S.LINKING, _E.FAILED): _LET_GO,
        (_S.LINKING, _E.CANCELLED): _LET_GO,
        (_S.LINKING, _E.OVERDUE): _LET_GO,
        (_S.PAUSED, _E.PAUSE_OVER): (_S.LINKING, (_D.REACH,)),
        (_S.PAUSED, _E.CANCELLED): _LET_GO,
        (_S.PAUSED, _E.OVERDUE): _LET_GO,
        (_S.OFFERING, _E.ACCEPTED): (_S.AWAITING, (_D.AWAIT,)),
        (_S.OFFERING, _E.UNKNOWN): _LET_GO,
        (_S.OFFERING, _E.DONE): _END,
        (_S.OFFERING, _E.NOT_DONE): _END,
        (_S.OFFERING, _E.BROKEN): _RELINK,
        (_S.OFFERING, _E.LATE): (_S.PAUSED, (_D.PAUSE,)),
        (_S.OFFERING, _E.BROKEN_AGAIN): _DROP_AND_END,
        (_S.OFFERING, _E.LATE_AGAIN): _LET_GO,
        (_S.OFFERING, _E.FAILED): _LET_GO,
        (_S.OFFERING, _E.CANCELLED): _LET_GO,
        (_S.OFFERING, _E.OVERDUE): _LET_GO,
        (_S.OFFERING, _E.SILENT): (_S.AWAITING, (_D.AWAIT,)),
        (_S.OFFERING, _E.CUT_OFF): _FENCE,
        (_S.OFFERING, _E.TAKE_BACK): _TAKE_BACK,
        (_S.AWAITING, _E.WOKEN): (_S.ASKING, (_D.ASK_STATE,)),
        (_S.AWAITING, _E.DONE): _END,
        (_S.AWAITING, _E.NOT_DONE): _END,
        (_S.AWAITING, _E.BROKEN): _RELINK,
        (_S.AWAITING, _E.BROKEN_AGAIN): _DROP_AND_END,
        (_S.AWAITING, _E.CANCELLED): _LET_GO,
        (_S.AWAITING, _E.OVERDUE): _LET_GO,
        (_S.AWAITING, _E.CUT_OFF): _FENCE,
        (_S.AWAITING, _E.TAKE_BACK): _TAKE_BACK,
        (_S.ASKING, _E.ACCEPTED): (_S.AWAITING, (_D.AWAIT,)),
        (_S.ASKING, _E.UNKNOWN): (_S.OFFERING, (_D.OFFER,)),
        (_S.ASKING, _E.DONE): _END,
        (_S.ASKING, _E.NOT_DONE): _END,
        (_S.ASKING, _E.BROKEN): _RELINK,
        (_S.ASKING, _E.BROKEN_AGAIN): _DROP_AND_END,
        (_S.ASKING, _E.FAILED): _LET_GO,
        (_S.ASKING, _E.CANCELLED): _LET_GO,
        (_S.ASKING, _E.OVERDUE): _LET_GO,
        (_S.ASKING, _E.SILENT): (_S.AWAITING, (_D.AWAIT,)),
        (_S.ASKING, _E.CUT_OFF): _FENCE,
        (_S.ASKING, _E.TAKE_BACK): _TAKE_BACK,
        (_S.WITHDRAWING, _E.DONE): _END,
        (_S.WITHDRAWING, _E.NOT_DONE): _END,
        (_S.WITHDRAWING, _E.WRITING): _TAKE_BACK,
        (_S.WITHDRAWING, _E.SILENT): _TAKE_BACK,
        (_S.WITHDRAWING, _E.NO_ANSWER): _FENCE,
        (_S.WITHDRAWING, _E.CUT_OFF): _FENCE,
        (_S.FENCING, _E.DONE): _END,
        (_S.FENCING, _E.LINKED): _TAKE_BACK,
        (_S.FENCING, _E.FENCED): (_S.PAUSED, (_D.PAUSE,)),
        (_S.FENCING, _E.FENCED_AGAIN): _LET_GO,  # else P could go on, over a link made since
    },
)
_NOT_OFFERED = (_S.QUEUED, _S.LINKING, _S.PAUSED)
#: P knows it, and may have asked whether it stands.
_STANDING = (_S.OFFERING, _S.AWAITING, _S.ASKING)
#: It is over; only P's word, or the fence, is awaited.
_ON_THE_WAY_OUT = (_S.WITHDRAWING, _S.FENCING)
#: These say why by themselves, or are about what P may still do: the deadline or a cancellation does not replace them.
_TELLING = (_E.DONE, _E.NOT_DONE, _E.BROKEN, _E.BROKEN_AGAIN, _E.LATE, _E.LATE_AGAIN, _E.FAILED, _E.CUT_OFF)


class OfferMachine:
    """One offer to one worker of P. Not thread-safe: one lock of the driver's around every call, so that `stands`,
    `told` and `cancel`, which come from other threads than the driver's, take turns with the rest.

    Args:
        job: which tokens, into which blocks.
        endpoint: P's worker.
        num_offers: how many workers of D offer to that one, for this job.
        now_s: when it was given.
        timeout_s: from then until it is given up.
    """

    def __init__(self, job: OfferJob, endpoint: Endpoint, num_offers: int, now_s: float, timeout_s: float) -> None:
        self.job = job
        self.endpoint = endpoint
        self.num_offers = num_offers
        self.deadline_s = now_s + timeout_s
        self.phase = OfferPhase.QUEUED
        self.error: LLMException | None = None
        self.is_granted = False
        #: What names it in all messages now.
        self.ref = OfferRef(job.source.transfer_id, lease_ref(job.key), 1)
        #: When AWAIT ends by itself.
        self.wake_s = self.deadline_s
        self._timeout_s = timeout_s
        self._cancelled = False
        self._is_cut = False
        self._may_try_again = True
        self._num_withdrawals = 0
        self._word: OfferState | None = None
        self._reason = ""

    @property
    def key(self) -> RequestKey:
        """Whose part it is (`handoff.parts`)."""
        return self.job.key

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def has_news(self) -> bool:
        """Something that AWAIT and PAUSE are not to wait any longer for."""
        return self._cancelled or self._word is not None

    @property
    def has_word(self) -> bool:
        """P's final word is there: whatever event comes next, the offer ends."""
        return self._word is not None

    # --- from other threads ---

    def cancel(self) -> None:
        """Nobody wants it any more. It ends soon; wake its driver."""
        self._cancelled = True

    def lose(self) -> None:
        """The link is lost. At once, before another link to P is used: a question that comes over that is not for us.

        The machine goes on when the driver tells what it was waiting for: `failed`.
        """
        self._is_cut = True

    def stands(self, cluster_id: int, ref: OfferRef, now_s: float) -> bool:
        """P asks whether it may begin to write. After True it may, until its word or the fence."""
        is_ours = cluster_id == self.endpoint.cluster_id and ref == self.ref
        may_stand = self.phase in _STANDING and not self._is_cut and not self.has_news
        if is_ours and may_stand and now_s < self.deadline_s:
            self.is_granted = True
            return True
        return False

    def told(self, cluster_id: int, ref: OfferRef, state: OfferState, reason: str) -> bool:
        """P's notice. False if it is not about this offer, or no final word: dropped. Else wake the driver."""
        if cluster_id != self.endpoint.cluster_id or ref != self.ref or state not in FINAL:
            return False
        self._hear(state, reason)
        return True

    # --- from the driver ---

    def started(self, now_s: float) -> tuple[OfferEffect, ...]:
        return self._step(OfferEvent.STARTED, now_s)

    def linked(self, now_s: float) -> tuple[OfferEffect, ...]:
        return self._step(OfferEvent.LINKED, now_s)

    def pause_over(self, now_s: float) -> tuple[OfferEffect, ...]:
        return self._step(OfferEvent.PAUSE_OVER, now_s)

    def woken(self, now_s: float) -> tuple[OfferEffect, ...]:
        """AWAIT is over, for whatever reason but the loss of the link."""
        return self._step(OfferEvent.WOKEN, now_s)

    def fenced(self, now_s: float) -> tuple[OfferEffect, ...]:
        """No link to this P, present or former, can be written over."""
        again = self._may_try_again and not self._cancelled and now_s < self.deadline_s
        return self._step(OfferEvent.FENCED if again else OfferEvent.FENCED_AGAIN, now_s)

    def answered(self, state: OfferState, reason: str, now_s: float) -> tuple[OfferEffect, ...]:
        """P's answer to the call under way, asked with `ref`."""
        if state in FINAL:
            self._hear(state, reason)
        return self._step(self._event_of(state), now_s)

    def failed(self, error: LLMException, now_s: float) -> tuple[OfferEffect, ...]:
        """What was under way has ended with this error, or, while AWAIT lasts, the link is lost."""
        event = self._trouble(error, now_s)
        if self.phase not in _ON_THE_WAY_OUT:
            self.error = error
        return self._step(event, now_s)

    # --- inside ---

    def _hear(self, state: OfferState, reason: str) -> None:
        """Only the first final word counts. That everything is written can be true only of what was granted."""
        if self._word is None:
            is_credible = state is not OfferState.DONE or self.is_granted
            self._word = state if is_credible else OfferState.FAILED
            self._reason = reason or state.value

    def _event_of(self, state: OfferState) -> OfferEvent:
        if state is OfferState.UNKNOWN and (self.is_granted or self.phase in _ON_THE_WAY_OUT):
            self._hear(OfferState.FAILED, "P does not know the offer any more")
            return OfferEvent.NOT_DONE
        if state is OfferState.UNKNOWN:
            return OfferEvent.UNKNOWN
        return OfferEvent.WRITING if self.phase is OfferPhase.WITHDRAWING else OfferEvent.ACCEPTED

    def _trouble(self, error: LLMException, now_s: float) -> OfferEvent:
        may_try_again = self._may_try_again and now_s < self.deadline_s
        if isinstance(error, LINK_BROKEN):
            if self.is_granted:
                return OfferEvent.CUT_OFF
            return OfferEvent.BROKEN if may_try_again else OfferEvent.BROKEN_AGAIN
        if self.phase is OfferPhase.WITHDRAWING:
            return self._unconfirmed(error)
        if isinstance(error, TimedOut):
            if self.is_granted or self.phase is OfferPhase.ASKING:
                return OfferEvent.SILENT
            return OfferEvent.LATE if may_try_again else OfferEvent.LATE_AGAIN
        return OfferEvent.TAKE_BACK if self.is_granted else OfferEvent.FAILED

    def _unconfirmed(self, error: LLMException) -> OfferEvent:
        may_ask_again = isinstance(error, TimedOut) and self._num_withdrawals < MAX_WITHDRAWALS
        return OfferEvent.SILENT if may_ask_again else OfferEvent.NO_ANSWER

    def _step(self, event: OfferEvent, now_s: float) -> tuple[OfferEffect, ...]:
        event = self._overruled(event, now_s)
        before = self.phase
        self.phase, effects = OFFER_TABLE.next(before, event)
        if event is OfferEvent.DONE:
            self.error = None
        elif event is OfferEvent.NOT_DONE and before is not OfferPhase.WITHDRAWING:
            self.error = PushFailed(f"P did not push everything: {self._reason}")
        elif event is OfferEvent.UNKNOWN and self.phase is OfferPhase.ENDED:
            self.error = RemoteError("P answered an offer with: unknown")
        self._entered(now_s)
        return effects

    def _entered(self, now_s: float) -> None:
        if self.phase is OfferPhase.PAUSED:  # whatever P knows of the offer so far, it asks in vain whether it stands
            self._may_try_again = False
            self.is_granted = False
            self._word = None
            self.ref = msgspec.structs.replace(self.ref, number=self.ref.number + 1)
        elif self.phase is OfferPhase.LINKING:
            self._is_cut = False
        elif self.phase is OfferPhase.AWAITING:
            self.wake_s = min(self.deadline_s, now_s + POLL_S)
        elif self.phase is OfferPhase.WITHDRAWING:
            self._num_withdrawals += 1

    def _overruled(self, event: OfferEvent, now_s: float) -> OfferEvent:
        """What happened, or why it does not matter any more. P's final word comes before all else."""
        if self._word is OfferState.DONE and self.phase not in _NOT_OFFERED:
            return OfferEvent.DONE
        if self._word is not None and self.phase not in (*_NOT_OFFERED, OfferPhase.FENCING):
            return OfferEvent.NOT_DONE
        if self.phase in _ON_THE_WAY_OUT or event is OfferEvent.CUT_OFF:
            return event
        if self._cancelled:
            self.error = Cancelled("the request is gone")
            return OfferEvent.TAKE_BACK if self.is_granted else OfferEvent.CANCELLED
        if now_s >= self.deadline_s and event not in _TELLING:
            self.error = TimedOut(f"the push did not end within {self._timeout_s:g} s")
            return OfferEvent.TAKE_BACK if self.is_granted else OfferEvent.OVERDUE
        return event
