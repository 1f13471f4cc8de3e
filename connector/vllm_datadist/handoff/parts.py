# SPDX-License-Identifier: Apache-2.0
"""A job in parts: one load, or one set of offers, with one part per worker of P that a worker of D needs.

vLLM waits for the job, not for its parts: it is reported once, when all parts have ended, and one that failed cancels
the others. A push has a second end. When P may still write although nobody waits any more (it does not answer, and its
end of the link is not fenced), the job is reported as failed at its deadline, and the blocks stay D's until the parts
have ended too: SETTLED. Usually both come together.

    RUNNING -> STOPPING -> ENDED                  one part failed, or cancelled: the others are told to end
    RUNNING | STOPPING -> REPORTED -> ENDED       reported at the deadline, settled later (only if `gives_up`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from datadist_core.errors import LLMException, TimedOut

from ..messages import RequestKey
from .table import Table


class GroupState(Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    REPORTED = "reported before all parts have ended"
    ENDED = "ended"


class GroupEvent(Enum):
    PART_ENDED = "a part ended"
    PART_FAILED = "a part failed"
    LAST_ENDED = "the last part ended"
    CANCELLED = "cancelled"
    GIVEN_UP = "deadline over, and P may still write"


class GroupEffect(Enum):
    """CANCEL_OTHERS: every part that has not ended is cancelled, and its driver must be woken."""

    CANCEL_OTHERS = "cancel the others"
    REPORT = "report the end"
    SETTLE = "report that the blocks are safe"


_S, _E, _D = GroupState, GroupEvent, GroupEffect
_ALL_OVER = (_S.ENDED, (_D.REPORT, _D.SETTLE))

#: (state, event) -> (next state, effects).
GROUP_TABLE: Table[GroupState, GroupEvent, tuple[GroupEffect, ...]] = Table(
    "parts",
    {
        (_S.RUNNING, _E.PART_ENDED): (_S.RUNNING, ()),
        (_S.RUNNING, _E.PART_FAILED): (_S.STOPPING, (_D.CANCEL_OTHERS,)),
        (_S.RUNNING, _E.LAST_ENDED): _ALL_OVER,
        (_S.RUNNING, _E.CANCELLED): (_S.STOPPING, (_D.CANCEL_OTHERS,)),
        (_S.RUNNING, _E.GIVEN_UP): (_S.REPORTED, (_D.CANCEL_OTHERS, _D.REPORT)),
        (_S.STOPPING, _E.PART_ENDED): (_S.STOPPING, ()),
        (_S.STOPPING, _E.PART_FAILED): (_S.STOPPING, ()),
        (_S.STOPPING, _E.LAST_ENDED): _ALL_OVER,
        (_S.STOPPING, _E.CANCELLED): (_S.STOPPING, ()),
        (_S.STOPPING, _E.GIVEN_UP): (_S.REPORTED, (_D.REPORT,)),
        (_S.REPORTED, _E.PART_ENDED): (_S.REPORTED, ()),
        (_S.REPORTED, _E.PART_FAILED): (_S.REPORTED, ()),
        (_S.REPORTED, _E.LAST_ENDED): (_S.ENDED, (_D.SETTLE,)),
        (_S.REPORTED, _E.CANCELLED): (_S.REPORTED, ()),
    },
)


class Part(Protocol):
    """What a group needs of `LoadMachine` and `OfferMachine`. `error`: why it failed, once it has ended."""

    @property
    def key(self) -> RequestKey: ...
    @property
    def error(self) -> LLMException | None: ...
    def cancel(self) -> None: ...


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a job ended. `error` is that of the part that failed first; None if the blocks hold P's KV cache."""

    key: RequestKey
    error: LLMException | None


@dataclass(slots=True)
class _Group(Generic[PartT]):
    key: RequestKey
    running: list[PartT]
    gives_up_s: float
    state: GroupState = GroupState.RUNNING
    error: LLMException | None = None


class PartTable(Generic[PartT]):
    """The jobs of one worker that have not ended. Not thread-safe: one lock of the driver's around every call.

    A driver adds a job with its parts, runs each part's machine, and calls `ended` for each when its machine has ended.
    Whatever a method returns are parts that have been cancelled just now: wake those who wait for their next event,
    and drive those to their end, with `take`, that nobody has begun. `take_ends` and `take_settled` go to vLLM.
    """

    def __init__(self) -> None:
        self._groups: dict[RequestKey, _Group[PartT]] = {}
        #: Not taken by a driver yet.
        self._waiting: set[PartT] = set()
        self._ends: list[GroupEnd] = []
        self._settled: list[RequestKey] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, key: RequestKey, parts: Sequence[PartT], gives_up_s: float = math.inf) -> bool:
        """False, and nothing changes, if this key is under way. At least one part.

        Args:
            gives_up_s: when a job that has not ended is reported as failed, although its blocks are not safe yet. Only
                for a push, and only if vLLM keeps the blocks of a failed load until `take_settled` names it.
        """
        if key in self._groups:
            return False
        if not parts:
            raise ValueError(f"parts of {key} is empty; give at least one, or report with `fail`")
        self._groups[key] = _Group(key, list(parts), gives_up_s)
        self._waiting.update(parts)
        return True

    def fail(self, key: RequestKey, error: LLMException | None) -> None:
        """Report a job that has no parts: one that cannot even be started, or (None) that needs nothing."""
        self._ends.append(GroupEnd(key, error))
        self._settled.append(key)

    def take(self, part: PartT) -> bool:
        """Whether the caller is to drive this part: the first who asks. That may be who cancelled it."""
        if part not in self._waiting:
            return False
        self._waiting.discard(part)
        return True

    def running(self, key: RequestKey) -> Sequence[PartT]:
        """The parts of this job that have not ended."""
        group = self._groups.get(key)
        return () if group is None else tuple(group.running)

    def cancel(self, key: RequestKey) -> list[PartT]:
        """Nobody wants this job any more. It is reported all the same."""
        group = self._groups.get(key)
        return [] if group is None else self._step(group, GroupEvent.CANCELLED)

    def cancel_all(self) -> list[PartT]:
        return [part for key in list(self._groups) for part in self.cancel(key)]

    def ended(self, part: PartT) -> list[PartT]:
        """This part's machine has ended. Once per part."""
        group = self._groups[part.key]
        group.running.remove(part)
        self._waiting.discard(part)
        if group.error is None:
            group.error = part.error
        if not group.running:
            return self._step(group, GroupEvent.LAST_ENDED)
        return self._step(group, GroupEvent.PART_ENDED if part.error is None else GroupEvent.PART_FAILED)

    def give_up(self, now_s: float) -> list[PartT]:
        """Report what is overdue. Call it before `take_ends`, in every step."""
        overdue = [group for group in self._groups.values() if group.gives_up_s <= now_s]
        cancelled: list[PartT] = []
        for group in overdue:
            group.gives_up_s = math.inf
            group.error = group.error or TimedOut(
                "P did not end its push in time, and has not confirmed that it will not"
            )
            cancelled += self._step(group, GroupEvent.GIVEN_UP)
        return cancelled

    def take_ends(self) -> list[GroupEnd]:
        """Jobs to be reported that ended since the last call; each exactly once."""
        ends, self._ends = self._ends, []
        return ends

    def take_settled(self) -> list[RequestKey]:
        """Jobs into whose blocks nobody writes any more, since the last call: each once, never before its end."""
        settled, self._settled = self._settled, []
        return settled

    def _step(self, group: _Group[PartT], event: GroupEvent) -> list[PartT]:
        group.state, effects = GROUP_TABLE.next(group.state, event)
        cancelled: list[PartT] = []
        for effect in effects:
            if effect is GroupEffect.CANCEL_OTHERS:
                cancelled = list(group.running)
                for part in cancelled:
                    part.cancel()
            elif effect is GroupEffect.REPORT:
                self._ends.append(GroupEnd(group.key, group.error))
            else:
                self._settled.append(group.key)
        if group.state is GroupState.ENDED:
            del self._groups[group.key]
        return cancelled
