# SPDX-License-Identifier: Apache-2.0
"""Offers for a transfer that is another request's of D now: they wait for their turn.

D gives up a request, and asks again for the same transfer. Its threads, and its workers, tell P so in any order: the
new offer may arrive before all of the old ones are withdrawn, and old ones may arrive after new ones. P cannot tell
such a request from one that a router has sent twice: in both cases there are two requests of one engine, and only D
knows whether the first is still wanted. So neither takes the other's place. Who comes later waits until all offers of
the one before have ended, each in its own way; and is refused when that takes too long.

For `pushes`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..messages import RequestKey
from .push import PushMachine
from .push_readers import request_key


class Line:
    """Who waits, by transfer id, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[PushMachine]] = {}

    def __contains__(self, push: PushMachine) -> bool:
        return push in self._waiting.get(push.ref.transfer_id, ())

    def transfer_ids(self) -> list[str]:
        """Transfers that somebody waits for."""
        return list(self._waiting)

    def add(self, push: PushMachine) -> None:
        self._waiting.setdefault(push.ref.transfer_id, []).append(push)

    def discard(self, push: PushMachine) -> None:
        """It does not wait any more, if it did."""
        if push in self:
            self._keep(push.ref.transfer_id, lambda other: other is not push)

    def next_key(self, transfer_id: str) -> RequestKey | None:
        """Which request of D has its turn when this transfer is free."""
        waiting = self._waiting.get(transfer_id)
        return request_key(waiting[0].ref) if waiting else None

    def take_turn(self, transfer_id: str) -> list[PushMachine]:
        """All that the workers of that request have offered so far: they wait no more."""
        key = self.next_key(transfer_id)
        turn = [push for push in self._waiting.get(transfer_id, ()) if request_key(push.ref) == key]
        self._keep(transfer_id, lambda push: push not in turn)
        return turn

    def _keep(self, transfer_id: str, is_kept: Callable[[PushMachine], bool]) -> None:
        waiting = [push for push in self._waiting.pop(transfer_id, ()) if is_kept(push)]
        if waiting:
            self._waiting[transfer_id] = waiting
