# SPDX-License-Identifier: Apache-2.0
"""Batches like earlier ones: what was checked and prepared for those still holds, so only the items are new.

Single blocks are what this is for: NIXL itself needs some microseconds for one, and all the checks would be most of the
time. A route is kept until anything happens that it depends on: then all are dropped, which costs the next batch of
each kind its full price, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..transfer.plan import Batch
from ._nixl_lists import Plan
from ._nixl_mover import Mover

MAX_ROUTES = 128


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A plan with all that was found out for it."""

    peer_id: int
    peer_name: str
    region_ids: frozenset[int]
    mover: Mover
    plan: Plan


class Routes:
    """Guarded by the runtime's lock, which is held in every call.

    Attributes:
        version: changes when routes are dropped. What was planned under another one is of no use any more.
    """

    def __init__(self) -> None:
        self.version = 0
        self._routes: dict[tuple[int, int], Route] = {}

    def find(self, batch: Batch) -> Route | None:
        """For a batch with the very pairs of an earlier one, as those of one cache usually are."""
        route = self._routes.get((batch.peer_id, id(batch.pairs)))
        if route is None or route.plan.pairs is not batch.pairs or route.plan.slices != batch.slices:
            return None
        return route

    def put(self, route: Route, version: int) -> None:
        """Keep a route that was planned under `version`, unless something has happened since, or is about to."""
        if version != self.version or route.plan.layout is None or route.mover.has_leaving:
            return
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        self._routes[route.peer_id, id(route.plan.pairs)] = route

    def clear(self) -> None:
        """Something that routes depend on has changed."""
        self.version += 1
        self._routes.clear()
