# SPDX-License-Identifier: Apache-2.0
"""What all machines of a hand-off share: the look-up in a table, and its failure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Act = TypeVar("Act")


class NotAllowed(RuntimeError):
    """A machine was fed an event that its state does not allow: a fault of the driver, never of a peer."""


class Table(Generic[State, Event, Act]):
    """(state, event) -> (next state, what to do)."""

    def __init__(self, name: str, rows: Mapping[tuple[State, Event], tuple[State, Act]]) -> None:
        self.name = name
        self.rows = rows

    def next(self, state: State, event: Event) -> tuple[State, Act]:
        """Raises NotAllowed."""
        row = self.rows.get((state, event))
        if row is None:
            raise NotAllowed(f"{self.name}: {event.value} is not possible in the state {state.value}")
        return row
