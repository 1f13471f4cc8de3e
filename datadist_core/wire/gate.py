# SPDX-License-Identifier: Apache-2.0
"""How many connections one end accepts, and how long a stranger may hold one. Loop thread only.

A stranger is who has not said a valid hello yet, and before that, where there is a secret, has not proved to know it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..errors import LLMException, PeerLost, TimedOut
from ..security import Limits
from .log_limit import LimitedLog

logger = logging.getLogger(__name__)

#: From the accepted connection to a valid hello: a TLS handshake and the proofs of a secret are part of it.
HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Stranger:
    who: str
    timer: asyncio.TimerHandle
    drop: Callable[[LLMException], None]


class Gate:
    """Counts what comes and goes; `drop` of who is not wanted any more must end in `left`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, log: LimitedLog) -> None:
        self._loop = loop
        self._max_connections = limits.connections
        self._max_strangers = min(limits.strangers, _descriptors_for_strangers())
        self._log = log
        self._inside: set[Hashable] = set()
        #: In order of arrival.
        self._strangers: dict[Hashable, _Stranger] = {}

    def enter(self, visitor: Hashable, who: str, drop: Callable[[LLMException], None]) -> bool:
        """Somebody has connected; False: there is no room. The oldest stranger makes room, links never do."""
        full = len(self._inside) >= self._max_connections
        if full or len(self._strangers) >= self._max_strangers:
            if not self._strangers:
                self._log.log(logging.WARNING, "%s is refused: all %d connections are in use", who, len(self._inside))
                return False
            self._turn_away(next(iter(self._strangers)))
        timer = self._loop.call_later(HELLO_TIMEOUT_S, self._late, visitor)
        self._inside.add(visitor)
        self._strangers[visitor] = _Stranger(who, timer, drop)
        return True

    def known(self, visitor: Hashable) -> None:
        """No stranger any more."""
        stranger = self._strangers.pop(visitor, None)
        if stranger is not None:
            stranger.timer.cancel()

    def left(self, visitor: Hashable) -> None:
        """Twice is a no-op."""
        self.known(visitor)
        self._inside.discard(visitor)

    def _turn_away(self, visitor: Hashable) -> None:
        text = f"there were more than {len(self._strangers)} connections that had not said hello yet"
        self._end(visitor, PeerLost(f"{self._strangers[visitor].who} was dropped: {text}"))

    def _late(self, visitor: Hashable) -> None:
        who = self._strangers[visitor].who
        self._end(visitor, TimedOut(f"{who} did not say hello within {HELLO_TIMEOUT_S:.0f} s"))

    def _end(self, visitor: Hashable, error: LLMException) -> None:
        self._log.log(logging.WARNING, "%s", error)
        stranger = self._strangers[visitor]
        self.left(visitor)
        stranger.drop(error)


def _descriptors_for_strangers() -> int:
    """They must not take the file descriptors that links need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(16, soft // 2)
