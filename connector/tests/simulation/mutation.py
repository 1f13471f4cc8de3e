# SPDX-License-Identifier: Apache-2.0
"""What a fault put into the real code on purpose is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """`invariants`: which of them may be the first to see it. `calm`: in schedules where nothing else goes wrong.

    `pushes`: the share of pushes among the hand-offs of those schedules.
    """

    name: str
    invariants: tuple[str, ...]
    apply: Callable[[Patch], None]
    pushes: float = 0.0

    @property
    def calm(self) -> bool | None:
        return True if self.invariants == ("calm",) else None
