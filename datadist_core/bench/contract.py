# SPDX-License-Identifier: Apache-2.0
"""What a contender is, and how its moves are timed: at the place where the call is made, and nothing but the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .blocks import BlockLists

PULL, PUSH = "pull", "push"
OPS = (PULL, PUSH)
TRANSFER_TIMEOUT_S = 60.0
HERE, THERE = 1, 2
"""Seeds of the two outboxes."""


class Contender(Protocol):
    """Moves blocks. One thread uses it at a time; all errors are LLMException, RuntimeError or OSError."""

    name: str

    def prepare(self, lists: BlockLists) -> None:
        """Make caches for blocks of this size, with content to move."""

    def clear(self, op: str) -> None:
        """Zero the memory that `op` writes to."""

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        """Pull or push each of `moves`, one after the other, all of it `repeats` times. Seconds of each one.

        A move has ended when its bytes are in place.
        """

    def verify(self, op: str, lists: BlockLists) -> bool:
        """Whether, since `clear`, exactly the bytes that `lists` names were written."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


def time_each(moves: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of every call."""
    return [_timed(move) for _ in range(repeats) for move in moves]


def _timed(move: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    move()
    return time.perf_counter() - started_s
