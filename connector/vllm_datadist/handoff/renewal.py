# SPDX-License-Identifier: Apache-2.0
"""D keeps P's leases alive while their requests queue or load, whether or not the engine makes steps.

Each watched lease is renewed at once, then every third of its time, all leases at one peer with one call. Nobody
waits for a link here: while there is none, the lease is looked at again soon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..messages import Endpoint, LeaseState, RemoteLease, RequestKey
from .table import Table

#: How soon to look again for a link that is not there yet.
LINK_POLL_S = 0.5


class RenewalState(Enum):
    RESTING = "resting"
    ASKING = "asking"
    ENDED = "ended"


class RenewalEvent(Enum):
    DUE = "due"
    NO_LINK = "no link"
    UNANSWERED = "unanswered"
    HELD = "answer: held"
    UNKNOWN = "answer: unknown"
    LEASE_OVER = "answer: expired or released"
    UNWATCHED = "unwatched"


class Next(Enum):
    """When to ask again."""

    IN_A_PERIOD = "in a period"
    SOON = "soon"
    NEVER = "never"


_S, _E, _N = RenewalState, RenewalEvent, Next

#: (state, event) -> (next state, when to ask again). A late answer about a lease that is no longer watched is dropped.
RENEWAL_TABLE: Table[RenewalState, RenewalEvent, Next] = Table(
    "renewal",
    {
        (_S.RESTING, _E.DUE): (_S.ASKING, _N.IN_A_PERIOD),
        (_S.RESTING, _E.UNWATCHED): (_S.ENDED, _N.NEVER),
        (_S.ASKING, _E.NO_LINK): (_S.RESTING, _N.SOON),
        (_S.ASKING, _E.UNANSWERED): (_S.RESTING, _N.IN_A_PERIOD),
        (_S.ASKING, _E.HELD): (_S.RESTING, _N.IN_A_PERIOD),
        (_S.ASKING, _E.UNKNOWN): (_S.RESTING, _N.IN_A_PERIOD),
        (_S.ASKING, _E.LEASE_OVER): (_S.ENDED, _N.NEVER),
        (_S.ASKING, _E.UNWATCHED): (_S.ENDED, _N.NEVER),
        **{(_S.ENDED, event): (_S.ENDED, _N.NEVER) for event in _E if event not in (_E.DUE, _E.UNWATCHED)},
    },
)
_EVENT_OF = {
    LeaseState.HELD: _E.HELD,
    LeaseState.UNKNOWN: _E.UNKNOWN,
    LeaseState.EXPIRED: _E.LEASE_OVER,
    LeaseState.RELEASED: _E.LEASE_OVER,
}


@dataclass(slots=True, eq=False)
class Watched:
    """One lease. `due_s` is when it is asked about next."""

    key: RequestKey
    remote: RemoteLease
    endpoint: Endpoint
    due_s: float
    state: RenewalState = RenewalState.RESTING

    @property
    def period_s(self) -> float:
        return self.remote.lease_s / 3


class RenewalTable:
    """The watched leases of one worker. Not thread-safe; see `worker.renewals`."""

    def __init__(self) -> None:
        self._watched: dict[RequestKey, Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint, now_s: float) -> None:
        """Renew now and from now on, until `unwatch` or the lease's end."""
        self.unwatch(key)
        self._watched[key] = Watched(key, remote, endpoint, now_s)

    def unwatch(self, key: RequestKey) -> None:
        watched = self._watched.get(key)
        if watched is not None:
            self._step(watched, RenewalEvent.UNWATCHED, 0.0)

    def clear(self) -> None:
        for key in list(self._watched):
            self.unwatch(key)

    def take_due(self, now_s: float) -> dict[Endpoint, list[Watched]]:
        """Leases to renew now, by peer. Each call's outcome comes back by `no_link`, `unanswered` or `answered`."""
        due: defaultdict[Endpoint, list[Watched]] = defaultdict(list)
        for watched in self._watched.values():
            if watched.due_s <= now_s and watched.state is RenewalState.RESTING:
                self._step(watched, RenewalEvent.DUE, now_s)
                due[watched.endpoint].append(watched)
        return dict(due)

    def next_due_s(self) -> float | None:
        """When to call `take_due` next; None = not before another lease is watched or an outcome came back."""
        return min((one.due_s for one in self._watched.values() if one.state is RenewalState.RESTING), default=None)

    def no_link(self, asked: Iterable[Watched], now_s: float) -> None:
        """The link is being made, or could not be made this time."""
        for watched in asked:
            self._step(watched, RenewalEvent.NO_LINK, now_s)

    def unanswered(self, asked: Iterable[Watched], now_s: float) -> None:
        for watched in asked:
            self._step(watched, RenewalEvent.UNANSWERED, now_s)

    def answered(self, asked: Sequence[Watched], states: Sequence[LeaseState], now_s: float) -> None:
        for watched, state in zip(asked, states, strict=True):
            self._step(watched, _EVENT_OF[state], now_s)

    def _step(self, watched: Watched, event: RenewalEvent, now_s: float) -> None:
        watched.state, when = RENEWAL_TABLE.next(watched.state, event)
        if when is Next.SOON:
            watched.due_s = min(watched.due_s, now_s + LINK_POLL_S)
        elif event is RenewalEvent.DUE:
            watched.due_s = now_s + watched.period_s
        if watched.state is RenewalState.ENDED and self._watched.get(watched.key) is watched:
            del self._watched[watched.key]
