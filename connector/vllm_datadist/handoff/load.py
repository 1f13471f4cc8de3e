# SPDX-License-Identifier: Apache-2.0
"""D's load: reach P, read its blocks, and have P confirm that the lease held. Theory: the package's own text.

    QUEUED -> LINKING -> READING -> CONFIRMING -> ENDED
                 ^---PAUSED-'          |  ^
                                       |  '- UNKNOWN: P has not opened the lease yet, ask again
    after trouble on the link:         '-> READ_PAUSED -> RELINKING -> CONFIRMING

Trouble on the link is tried to be cured once per load. A late answer alone is no reason to take the link from others
who use it, so the link is dropped only if it is broken. Whatever happens, the way to ENDED reports the load, once.
"""

from __future__ import annotations

from enum import Enum

from datadist_core.errors import (
    Cancelled,
    ClosedError,
    LinkFailed,
    LLMException,
    NotYetLinked,
    PeerLost,
    TimedOut,
    Unreachable,
)

from ..messages import Endpoint, LeaseState, LoadJob, RequestKey
from .table import Table

#: The link is gone or of no use: a fresh one may work.
LINK_BROKEN = (PeerLost, NotYetLinked, LinkFailed, Unreachable, ClosedError)
#: How long to wait before a fresh link is tried.
RELINK_PAUSE_S = 0.2


class LeaseLost(LLMException):
    """P cannot say that the blocks were held all the time: what was read may be something else."""


class LoadState(Enum):
    QUEUED = "queued"
    LINKING = "linking"
    READING = "reading"
    CONFIRMING = "confirming"
    PAUSED = "paused"
    READ_PAUSED = "paused after the read"
    RELINKING = "linking after the read"
    ENDED = "ended"


class LoadEvent(Enum):
    """BROKEN, LATE: trouble on the link that may be cured; ..._AGAIN: that may not. FAILED: trying again is no use."""

    STARTED = "started"
    LINKED = "linked"
    READ = "read"
    PAUSE_OVER = "pause over"
    HELD = "answer: held"
    LEASE_OVER = "answer: expired or released"
    UNOPENED = "answer: unknown"
    NEVER_OPENED = "answer: still unknown"
    BROKEN = "link broken"
    BROKEN_AGAIN = "link broken again"
    LATE = "no answer in time"
    LATE_AGAIN = "no answer in time again"
    FAILED = "failed"
    CANCELLED = "cancelled"
    OVERDUE = "deadline over"


class Effect(Enum):
    """What the driver shall do. The first four take time, and their outcome is the next event."""

    REACH = "reach P"
    READ = "read P's blocks"
    ASK_RELEASE = "ask P to release"
    PAUSE = "pause"
    DROP_LINK = "drop the link"
    LET_GO = "tell P, without waiting, that nothing is needed"
    REPORT = "report the end"


_S, _E, _D = LoadState, LoadEvent, Effect
_LET_GO = (_S.ENDED, (_D.LET_GO, _D.REPORT))
_GIVE_UP = (_S.ENDED, (_D.REPORT,))
_DROP_AND_GIVE_UP = (_S.ENDED, (_D.DROP_LINK, _D.REPORT))

#: (state, event) -> (next state, effects in order). P is told to let go whenever it may still hold the blocks and can
#: be reached, for all we know.
LOAD_TABLE: Table[LoadState, LoadEvent, tuple[Effect, ...]] = Table(
    "load",
    {
        (_S.QUEUED, _E.STARTED): (_S.LINKING, (_D.REACH,)),
        (_S.QUEUED, _E.CANCELLED): _LET_GO,
        (_S.QUEUED, _E.OVERDUE): _LET_GO,
        (_S.LINKING, _E.LINKED): (_S.READING, (_D.READ,)),
        (_S.LINKING, _E.BROKEN): (_S.PAUSED, (_D.PAUSE,)),
        (_S.LINKING, _E.LATE): (_S.PAUSED, (_D.PAUSE,)),
        (_S.LINKING, _E.BROKEN_AGAIN): _GIVE_UP,
        (_S.LINKING, _E.LATE_AGAIN): _GIVE_UP,
        (_S.LINKING, _E.FAILED): _LET_GO,
        (_S.LINKING, _E.CANCELLED): _LET_GO,
        (_S.LINKING, _E.OVERDUE): _LET_GO,
        (_S.READING, _E.READ): (_S.CONFIRMING, (_D.ASK_RELEASE,)),
        (_S.READING, _E.BROKEN): (_S.PAUSED, (_D.DROP_LINK, _D.PAUSE)),
        (_S.READING, _E.LATE): (_S.PAUSED, (_D.PAUSE,)),
        (_S.READING, _E.BROKEN_AGAIN): _DROP_AND_GIVE_UP,
        (_S.READING, _E.LATE_AGAIN): _LET_GO,
        (_S.READING, _E.FAILED): _LET_GO,
        (_S.READING, _E.CANCELLED): _LET_GO,
        (_S.READING, _E.OVERDUE): _LET_GO,
        (_S.PAUSED, _E.PAUSE_OVER): (_S.LINKING, (_D.REACH,)),
        (_S.PAUSED, _E.CANCELLED): _LET_GO,
        (_S.PAUSED, _E.OVERDUE): _GIVE_UP,
        (_S.CONFIRMING, _E.HELD): _GIVE_UP,
        (_S.CONFIRMING, _E.LEASE_OVER): _GIVE_UP,
        (_S.CONFIRMING, _E.UNOPENED): (_S.CONFIRMING, (_D.ASK_RELEASE,)),
        (_S.CONFIRMING, _E.NEVER_OPENED): _GIVE_UP,
        (_S.CONFIRMING, _E.BROKEN): (_S.READ_PAUSED, (_D.DROP_LINK, _D.PAUSE)),
        (_S.CONFIRMING, _E.LATE): (_S.READ_PAUSED, (_D.PAUSE,)),
        (_S.CONFIRMING, _E.BROKEN_AGAIN): _DROP_AND_GIVE_UP,
        (_S.CONFIRMING, _E.LATE_AGAIN): _GIVE_UP,
        (_S.CONFIRMING, _E.FAILED): _GIVE_UP,
        (_S.CONFIRMING, _E.CANCELLED): _LET_GO,
        (_S.CONFIRMING, _E.OVERDUE): _LET_GO,
        (_S.READ_PAUSED, _E.PAUSE_OVER): (_S.RELINKING, (_D.REACH,)),
        (_S.READ_PAUSED, _E.CANCELLED): _LET_GO,
        (_S.READ_PAUSED, _E.OVERDUE): _GIVE_UP,
        (_S.RELINKING, _E.LINKED): (_S.CONFIRMING, (_D.ASK_RELEASE,)),
        (_S.RELINKING, _E.BROKEN_AGAIN): _GIVE_UP,
        (_S.RELINKING, _E.LATE_AGAIN): _GIVE_UP,
        (_S.RELINKING, _E.FAILED): _LET_GO,
        (_S.RELINKING, _E.CANCELLED): _LET_GO,
        (_S.RELINKING, _E.OVERDUE): _LET_GO,
    },
)
#: P's last word: it counts even if nobody waits for the load any more.
_FINAL = (_E.HELD, _E.LEASE_OVER, _E.NEVER_OPENED)
#: These say why by themselves, so the deadline, if it is over too, only forbids to try again.
_TELLING = (*_FINAL, _E.BROKEN, _E.BROKEN_AGAIN, _E.LATE, _E.LATE_AGAIN, _E.FAILED)


class LoadMachine:
    """One load, or the part of one that comes from one worker of P (`handoff.parts`).

    Fed by one driver; `cancel` alone may come from another thread.

    Args:
        job: what to read from where.
        endpoint: P's worker.
        now_s: when it was given.
        timeout_s: from then to its end.
        num_readers: how many workers of D read from that one worker of P, for this job: goes into every release of
            it, also when the driver lets go. A worker of P that nobody reads is released at once, by one worker of D.
    """

    def __init__(self, job: LoadJob, endpoint: Endpoint, now_s: float, timeout_s: float, num_readers: int = 1) -> None:
        self.job = job
        self.endpoint = endpoint
        self.num_readers = num_readers
        self.deadline_s = now_s + timeout_s
        self.state = LoadState.QUEUED
        self.error: LLMException | None = None
        self._timeout_s = timeout_s
        self._cancelled = False
        self._may_try_again = True
        self._patient_until_s: float | None = None

    def cancel(self) -> None:
        """Nobody wants it any more. It ends with the next event."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def key(self) -> RequestKey:
        """Whose part it is."""
        return self.job.key

    def started(self, now_s: float) -> tuple[Effect, ...]:
        return self._step(LoadEvent.STARTED, now_s)

    def linked(self, now_s: float) -> tuple[Effect, ...]:
        return self._step(LoadEvent.LINKED, now_s)

    def read(self, now_s: float) -> tuple[Effect, ...]:
        """All blocks are there."""
        return self._step(LoadEvent.READ, now_s)

    def pause_over(self, now_s: float) -> tuple[Effect, ...]:
        return self._step(LoadEvent.PAUSE_OVER, now_s)

    def answered(self, state: LeaseState, now_s: float) -> tuple[Effect, ...]:
        """P's answer to the release."""
        event = self._event_of(state, now_s)
        if event in (LoadEvent.LEASE_OVER, LoadEvent.NEVER_OPENED):
            self.error = LeaseLost(f"P's lease was {state.value} when the blocks had been read")
        return self._step(event, now_s)

    def failed(self, error: LLMException, now_s: float) -> tuple[Effect, ...]:
        """What was under way (reach, read, ask) has ended with this error, and has let go of all memory."""
        event = self._trouble(error, now_s)
        self.error = error
        return self._step(event, now_s)

    def _event_of(self, state: LeaseState, now_s: float) -> LoadEvent:
        if state is LeaseState.HELD:
            return LoadEvent.HELD
        if state is not LeaseState.UNKNOWN:
            return LoadEvent.LEASE_OVER
        if self._patient_until_s is None:
            self._patient_until_s = min(self.deadline_s, now_s + self.job.remote.lease_s)
        return LoadEvent.UNOPENED if now_s < self._patient_until_s else LoadEvent.NEVER_OPENED

    def _trouble(self, error: LLMException, now_s: float) -> LoadEvent:
        may_try_again = self._may_try_again and now_s < self.deadline_s
        if isinstance(error, LINK_BROKEN):
            return LoadEvent.BROKEN if may_try_again else LoadEvent.BROKEN_AGAIN
        if isinstance(error, TimedOut):
            return LoadEvent.LATE if may_try_again else LoadEvent.LATE_AGAIN
        return LoadEvent.FAILED

    def _step(self, event: LoadEvent, now_s: float) -> tuple[Effect, ...]:
        event = self._overruled(event, now_s)
        self.state, effects = LOAD_TABLE.next(self.state, event)
        if event is LoadEvent.CANCELLED:
            self.error = Cancelled("the request is gone")
        elif event is LoadEvent.OVERDUE:
            self.error = TimedOut(f"the load did not end within {self._timeout_s:g} s")
        elif event in (LoadEvent.BROKEN, LoadEvent.LATE):
            self._may_try_again = False
        elif event is LoadEvent.HELD:
            self.error = None
        return effects

    def _overruled(self, event: LoadEvent, now_s: float) -> LoadEvent:
        """What happened, or why it does not matter any more."""
        if self._cancelled and event not in _FINAL:
            return LoadEvent.CANCELLED
        if now_s >= self.deadline_s and event not in _TELLING:
            return LoadEvent.OVERDUE
        return event
