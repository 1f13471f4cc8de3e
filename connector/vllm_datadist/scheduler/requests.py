# SPDX-License-Identifier: Apache-2.0
"""D's table of hand-offs: a request is in it from its arrival until vLLM has let go of its blocks.

Each moves as `handoff.request` says. A ticket is good for one load. Several requests may come with the same one
(n > 1): the first is the leader, the others follow it: they wait until its load has ended, and then go on from this
engine's own prefix cache.

Who names a push by a transfer id alone may send it again when it failed, or was aborted: then P computes it again, and
waits to be told. So a request that finds its leader gone before anything came of it leads in its place. If the leader
has what it needed, the later one needs nothing from P, and says so.

vLLM stops the engine with an assertion when it hears of the end of a load it does not know. So ids that the table
has seen the end of are remembered for a while, and dropped from later reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..handoff.request import REQUEST_TABLE, RequestEvent, RequestState, Tell
from ..messages import PushSource, RemoteLease, RequestKey
from ..newest import Newest
from ..params import PromptDigest, Ticket

_NO_PROMPT = PromptDigest(0, "")
_AWAITS_LOAD = (RequestState.LOADING, RequestState.ABANDONED)
_LEADERS_AFFAIR = (Tell.WATCH, Tell.RELEASE)
_BEFORE_SETTLED = (RequestState.QUEUED, *_AWAITS_LOAD)


@dataclass(frozen=True, slots=True)
class TicketId:
    """What makes a ticket one of a kind: P's incarnation, and the request and attempt there.

    Of a push without a ticket, P's address and the transfer id: another P may have given the same id.
    """

    engine_id: str
    key: RequestKey


@dataclass(slots=True)
class Handoff:
    """One request that came with a ticket, or for a push without one.

    Attributes:
        ticket: None for a push that P has given no ticket for (yet).
        source: where a push comes from; None for a pull.
        prompt: of the prompt that P prefills for a push.
        refused: why its ticket cannot be used; "" if it can.
        num_remote_tokens: tokens being loaded or loaded from P.
        leader: the request whose load this one waits for; None if it loads itself.
        is_late: it came when its leader was gone already, so that nobody else lets P go.
        is_aborted: it was finished because nobody wants it any more: how the load ends is of no interest.
    """

    key: RequestKey
    ticket: Ticket | None
    num_prompt_tokens: int
    source: PushSource | None = None
    prompt: PromptDigest = _NO_PROMPT
    state: RequestState = RequestState.NEW
    refused: str = ""
    num_remote_tokens: int = 0
    leader: RequestKey | None = None
    is_late: bool = False
    is_aborted: bool = False

    @property
    def remote(self) -> RemoteLease | None:
        """P's lease, if it is known."""
        return None if self.ticket is None else self.ticket.remote

    @property
    def origin(self) -> str:
        """P, for the log."""
        if self.source is not None:
            return f"{self.source.host}:{self.source.port} (transfer {self.source.transfer_id})"
        return "" if self.ticket is None else self.ticket.remote.engine_id

    @property
    def ticket_id(self) -> TicketId:
        if self.ticket is not None:
            return TicketId(self.ticket.remote.engine_id, self.ticket.remote.key)
        if self.source is None:
            raise ValueError("a hand-off has a ticket or comes as a push")
        return TicketId(f"{self.source.host}:{self.source.port}", RequestKey(self.source.transfer_id, 0))

    def step(self, event: RequestEvent) -> tuple[Tell, ...]:
        """Move on. What to tell the workers; P's lease is not a follower's to keep or to release."""
        self.state, tells = REQUEST_TABLE.next(self.state, event)
        if self.leader is None:
            return tells
        not_ours = (Tell.WATCH,) if self.is_late else _LEADERS_AFFAIR
        return tuple(tell for tell in tells if tell not in not_ours)


@dataclass(slots=True)
class _Lead:
    """`has_settled`: its load ended well, or it needed none."""

    key: RequestKey
    has_settled: bool = False


class HandoffTable:
    """Hand-offs by vLLM's request id; at most one attempt per id is current. Not thread-safe."""

    def __init__(self, max_remembered: int = 4096) -> None:
        self._current: dict[str, Handoff] = {}
        self._reported: Newest[str, None] = Newest(max_remembered)
        self._leaders: Newest[TicketId, _Lead] = Newest(max_remembered)

    def __len__(self) -> int:
        return len(self._current)

    def add(self, handoff: Handoff) -> Handoff | None:
        """Make it current. Returns the attempt it replaces, if there was one."""
        replaced = self._current.get(handoff.key.request_id)
        self._current[handoff.key.request_id] = handoff
        self._reported.pop(handoff.key.request_id, None)
        return replaced

    def lead(self, handoff: Handoff) -> None:
        """Make it the leader of its ticket, or a follower of the request that came with the same ticket before.

        Before it is added.
        """
        lead, key = self._leaders.get(handoff.ticket_id), handoff.key
        is_late = lead is not None and handoff.ticket is None and self._is_gone(lead.key, key.request_id)
        if lead is None or (is_late and not lead.has_settled):
            self._leaders.pop(handoff.ticket_id, None)
            self._leaders[handoff.ticket_id] = _Lead(key)
        else:
            handoff.leader, handoff.is_late = lead.key, is_late

    def _is_gone(self, leader: RequestKey, newcomer: str) -> bool:
        """Or will be, because the newcomer takes its place or nobody wants it any more."""
        current = self._current.get(leader.request_id)
        if current is None or current.key != leader or leader.request_id == newcomer:
            return True
        return current.state is RequestState.ABANDONED

    def settled(self, handoff: Handoff) -> None:
        """It has all that it will ever need from P."""
        lead = self._leaders.get(handoff.ticket_id)
        if lead is not None and lead.key == handoff.key:
            lead.has_settled = True

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

    def load_ended(self, request_id: str, failed: bool = False) -> Handoff | None:
        """The workers are done with its load. None if no load of that id is awaited."""
        handoff = self._current.get(request_id)
        if handoff is None or handoff.state not in _AWAITS_LOAD:
            return None
        handoff.step(RequestEvent.LOAD_ENDED)
        if handoff.state is RequestState.GONE:
            del self._current[request_id]
        elif not failed:
            self.settled(handoff)
        self._remember(request_id)
        return handoff

    def was_reported(self, request_id: str) -> bool:
        """Whether the end of this id's load was reported before and no new one has begun."""
        return request_id in self._reported

    def _remember(self, request_id: str) -> None:
        self._reported[request_id] = None
