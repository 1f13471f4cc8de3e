# SPDX-License-Identifier: Apache-2.0
"""D's table of hand-offs: a request is in it from its arrival until vLLM has let go of its blocks.

Each moves as `handoff.request` says. A ticket is good for one load. Several requests may come with the same one
(n > 1): the first is the leader, the others follow it: they wait until its load has ended, and then go on from this
engine's own prefix cache.

vLLM stops the engine with an assertion when it hears of the end of a load it does not know. So ids that the table
has seen the end of are remembered for a while, and dropped from later reports.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..handoff.request import REQUEST_TABLE, RequestEvent, RequestState, Tell
from ..messages import RequestKey
from ..params import Ticket

_AWAITS_LOAD = (RequestState.LOADING, RequestState.ABANDONED)
_LEADERS_AFFAIR = (Tell.WATCH, Tell.RELEASE)
_BEFORE_SETTLED = (RequestState.QUEUED, *_AWAITS_LOAD)


@dataclass(frozen=True, slots=True)
class TicketId:
    """What makes a ticket one of a kind: P's incarnation, and the request and attempt there."""

    engine_id: str
    key: RequestKey


@dataclass(slots=True)
class Handoff:
    """One request that came with a ticket.

    Attributes:
        refused: why its ticket cannot be used; "" if it can.
        num_remote_tokens: tokens being loaded or loaded from P.
        leader: the request whose load this one waits for; None if it loads itself.
        is_aborted: it was finished because nobody wants it any more: how the load ends is of no interest.
    """

    key: RequestKey
    ticket: Ticket
    num_prompt_tokens: int
    state: RequestState = RequestState.NEW
    refused: str = ""
    num_remote_tokens: int = 0
    leader: RequestKey | None = None
    is_aborted: bool = False

    def step(self, event: RequestEvent) -> tuple[Tell, ...]:
        """Move on. What to tell the workers; P's lease is not a follower's to keep or to release."""
        self.state, tells = REQUEST_TABLE.next(self.state, event)
        return tells if self.leader is None else tuple(tell for tell in tells if tell not in _LEADERS_AFFAIR)


class HandoffTable:
    """Hand-offs by vLLM's request id; at most one attempt per id is current. Not thread-safe."""

    def __init__(self, max_remembered: int = 4096) -> None:
        self._current: dict[str, Handoff] = {}
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._leaders: OrderedDict[TicketId, RequestKey] = OrderedDict()
        self._max_remembered = max_remembered

    def __len__(self) -> int:
        return len(self._current)

    def add(self, handoff: Handoff) -> Handoff | None:
        """Make it current. Returns the attempt it replaces, if there was one."""
        replaced = self._current.get(handoff.key.request_id)
        self._current[handoff.key.request_id] = handoff
        self._reported.pop(handoff.key.request_id, None)
        return replaced

    def lead(self, handoff: Handoff) -> None:
        """Make it the leader of its ticket, or a follower of the request that came with the same ticket before."""
        ticket_id = TicketId(handoff.ticket.remote.engine_id, handoff.ticket.remote.key)
        handoff.leader = self._leaders.get(ticket_id)
        if handoff.leader is None:
            self._leaders[ticket_id] = handoff.key
            _forget_oldest(self._leaders, self._max_remembered)

    def must_wait(self, handoff: Handoff) -> bool:
        """Whether the leader that it follows has not ended its load yet."""
        leader = None if handoff.leader is None else self._current.get(handoff.leader.request_id)
        return leader is not None and leader.key == handoff.leader and leader.state in _BEFORE_SETTLED

    def get(self, request_id: str) -> Handoff | None:
        return self._current.get(request_id)

    def queued(self, request_id: str) -> Handoff | None:
        handoff = self._current.get(request_id)
        return handoff if handoff is not None and handoff.state is RequestState.QUEUED else None

    def remove(self, request_id: str) -> None:
        self._current.pop(request_id, None)

    def load_ended(self, request_id: str) -> Handoff | None:
        """The workers are done with its load. None if no load of that id is awaited."""
        handoff = self._current.get(request_id)
        if handoff is None or handoff.state not in _AWAITS_LOAD:
            return None
        handoff.step(RequestEvent.LOAD_ENDED)
        if handoff.state is RequestState.GONE:
            del self._current[request_id]
        self._remember(request_id)
        return handoff

    def was_reported(self, request_id: str) -> bool:
        """Whether the end of this id's load was reported before and no new one has begun."""
        return request_id in self._reported

    def _remember(self, request_id: str) -> None:
        self._reported[request_id] = None
        _forget_oldest(self._reported, self._max_remembered)


def _forget_oldest(table: OrderedDict[Any, Any], max_entries: int) -> None:
    while len(table) > max_entries:
        table.popitem(last=False)
