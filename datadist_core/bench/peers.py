# SPDX-License-Identifier: Apache-2.0
"""The peers: other engines by themselves, see `peer_ends.py` for how they are used."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ..testing.remote import RemoteObject
from .blocks import BlockLists
from .contract import HERE, PULL, THERE
from .ends import ANSWER_TIMEOUT_S
from .peer_ends import Engine, PeerEnd

MakeEngine = Callable[[bool, int, int], Engine]
"""Of: whether it starts the transfers, seed, bytes of the largest cache."""


class PeerContender:
    """Both ends are processes of their own, so that the engine meets nothing of ours or of others.

    Args:
        busy_when_idle: the engine polls all the time, a whole core for each end. Then both processes are stopped while
            they have nothing to do, or nobody else could be measured beside them.
    """

    def __init__(self, name: str, make_engine: MakeEngine, cache_bytes: int, busy_when_idle: bool) -> None:
        self.name = name
        self._stops = busy_when_idle
        with ExitStack() as undo:
            self._here = RemoteObject(PeerEnd, (make_engine, True, HERE, cache_bytes), ANSWER_TIMEOUT_S)
            undo.callback(self._here.kill)
            self._there = RemoteObject(PeerEnd, (make_engine, False, THERE, cache_bytes), ANSWER_TIMEOUT_S)
            undo.callback(self._there.kill)
            self._there.call("meet", self._here.call("hello"))
            self._here.call("meet", self._there.call("hello"))
            self._signal(signal.SIGSTOP)
            self._undo = undo.pop_all()

    def prepare(self, lists: BlockLists) -> None:
        with self._awake():
            for end in (self._there, self._here):
                end.call("prepare", lists.num_cache_blocks, lists.block_bytes)

    def clear(self, op: str) -> None:
        with self._awake():
            (self._here if op == PULL else self._there).call("clear")

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        with self._awake():
            times: list[float] = self._here.call("move_each", op, list(moves), repeats)
        return times

    def verify(self, op: str, lists: BlockLists) -> bool:
        end, seed = (self._here, THERE) if op == PULL else (self._there, HERE)
        with self._awake():
            return bool(end.call("matches", seed, lists))

    def close(self) -> None:
        self._undo.close()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for end in (self._here, self._there) if self._stops else ():
            with suppress(ProcessLookupError):  # it has died, which the next call will tell
                os.kill(end.pid, number)
