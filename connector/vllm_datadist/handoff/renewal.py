# SPDX-License-Identifier: Apache-2.0
"""D keeps P's leases alive while their requests queue or load, whether or not the engine makes steps.

Each watched lease is renewed at once, then every third of its time, all leases at one peer with one call. Nobody
waits for a link here: while there is none, the lease is looked at again soon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
    LeaseState.MISCOUNTED: _E.LEASE_OVER,
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
        #: By request and cluster id: a request may be read from several workers of P.
        self._watched: dict[RequestKey, dict[int, Watched]] = {}

    def __len__(self) -> int:
        """Requests whose leases are watched."""
        return len(self._watched)

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint, now_s: float) -> None:
        """Renew the lease at this worker of P now and from now on, until `unwatch` or its end.

        Once for each worker that is read. The same one again begins anew.
        """
        watched = self._watched.setdefault(key, {})
        old = watched.get(endpoint.cluster_id)
        watched[endpoint.cluster_id] = Watched(key, remote, endpoint, now_s)
        if old is not None:
            self._step(old, RenewalEvent.UNWATCHED, 0.0)

    def unwatch(self, key: RequestKey) -> None:
        """At all workers of P."""
        for watched in list(self._watched.get(key, {}).values()):
            self._step(watched, RenewalEvent.UNWATCHED, 0.0)

    def clear(self) -> None:
        for key in list(self._watched):
            self.unwatch(key)

    def take_due(self, now_s: float) -> dict[Endpoint, list[Watched]]:
        """Leases to renew now, by peer. Each call's outcome comes back by `no_link`, `unanswered` or `answered`."""
        due: defaultdict[Endpoint, list[Watched]] = defaultdict(list)
        for watched in self._all():
            if watched.due_s <= now_s and watched.state is RenewalState.RESTING:
                self._step(watched, RenewalEvent.DUE, now_s)
                due[watched.endpoint].append(watched)
        return dict(due)

    def next_due_s(self) -> float | None:
        """When to call `take_due` next; None = not before another lease is watched or an outcome came back."""
        return min((one.due_s for one in self._all() if one.state is RenewalState.RESTING), default=None)

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
        if watched.state is RenewalState.ENDED:
            self._forget(watched)

    def _all(self) -> Iterator[Watched]:
        return (one for of_request in self._watched.values() for one in of_request.values())

    def _forget(self, watched: Watched) -> None:
        of_request = self._watched.get(watched.key, {})
        if of_request.get(watched.endpoint.cluster_id) is watched:
            del of_request[watched.endpoint.cluster_id]
            if not of_request:
                del self._watched[watched.key]
