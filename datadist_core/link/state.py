# SPDX-License-Identifier: Apache-2.0
"""The life of a link as one table, without I/O.

Both ends run the same machine; `dialling` only says who speaks first.

    dialling end                         listening end
    START     -- Hello -->               START
    GREETED                 <-- Welcome  GREETED        (or Refuse, by either, until the link is up)
    PROBING   (both try every backend)   PROBING
              <-- Probed --
    PROBED    -- Ready -->               PROBED
    AGREED    <-- Established --         AGREED
    UP                                   UP
    UNLINKING -- Unlink -->              UNLINKING_PEER
    DOWN      <-- Unlinked --            DOWN

The transport breaking leads to DOWN from everywhere.
"""

from __future__ import annotations

from enum import Enum

from ..errors import ProtocolError
from ..wire import messages as m


class LinkState(Enum):
    START = "start"
    GREETED = "greeted"
    PROBING = "probing"
    PROBED = "probed"
    AGREED = "agreed"
    UP = "up"
    UNLINKING = "unlinking"
    UNLINKING_PEER = "unlinked by the peer"
    DOWN = "down"


_ASKS = (m.Ping, m.Lookup, m.Locate, m.Consume, m.Revoke, m.Call)
_ANSWERS = (m.Pong, m.Found, m.Located, m.Reply, m.Failure)
_TRAFFIC = (*_ASKS, *_ANSWERS)
_S = LinkState
_Table = dict[tuple[LinkState, type], LinkState]

#: (state, message) -> next state; what is not in the table is not allowed.
_DIALLING_SENDS: _Table = {
    (_S.START, m.Hello): _S.GREETED,
    (_S.PROBED, m.Ready): _S.AGREED,
    (_S.PROBED, m.Refuse): _S.DOWN,
    (_S.PROBING, m.Refuse): _S.DOWN,
}
_DIALLING_RECEIVES: _Table = {
    (_S.GREETED, m.Welcome): _S.PROBING,
    (_S.GREETED, m.Refuse): _S.DOWN,
    (_S.PROBING, m.Refuse): _S.DOWN,
    (_S.PROBING, m.Probed): _S.PROBED,
    (_S.PROBED, m.Refuse): _S.DOWN,
    (_S.AGREED, m.Refuse): _S.DOWN,
    (_S.AGREED, m.Established): _S.UP,
}
_BOTH_SEND: _Table = {
    **{(_S.UP, t): _S.UP for t in _TRAFFIC},
    **{(_S.UNLINKING, t): _S.UNLINKING for t in _TRAFFIC},
    **{(_S.UNLINKING_PEER, t): _S.UNLINKING_PEER for t in _TRAFFIC},
    (_S.UP, m.Unlink): _S.UNLINKING,
    (_S.UNLINKING, m.Unlinked): _S.UNLINKING,
    (_S.UNLINKING_PEER, m.Unlinked): _S.DOWN,
}
_BOTH_RECEIVE: _Table = {
    **{(_S.UP, t): _S.UP for t in _TRAFFIC},
    **{(_S.UNLINKING, t): _S.UNLINKING for t in _TRAFFIC},
    **{(_S.UNLINKING_PEER, t): _S.UNLINKING_PEER for t in _TRAFFIC},
    (_S.UP, m.Unlink): _S.UNLINKING_PEER,
    (_S.UNLINKING, m.Unlink): _S.UNLINKING,
    (_S.UNLINKING, m.Unlinked): _S.DOWN,
}


class LinkMachine:
    """Checks every message against the table. Not thread-safe; the link serialises access."""

    def __init__(self, dialling: bool) -> None:
        # What one end sends is what the other receives: the listening end uses the same tables, swapped.
        mine, theirs = (_DIALLING_SENDS, _DIALLING_RECEIVES) if dialling else (_DIALLING_RECEIVES, _DIALLING_SENDS)
        self._sends: _Table = {**mine, **_BOTH_SEND}
        self._receives: _Table = {**theirs, **_BOTH_RECEIVE}
        self.state = LinkState.START

    def sending(self, message: m.AnyMessage) -> None:
        """Move on as `message` is sent. ProtocolError if this state does not allow it."""
        self.state = self._next(self._sends, message, "send")

    def received(self, message: m.AnyMessage) -> None:
        """Move on as `message` arrives. ProtocolError if the peer may not send it now."""
        self.state = self._next(self._receives, message, "receive")

    def broken(self) -> None:
        self.state = LinkState.DOWN

    def _next(self, table: _Table, message: m.AnyMessage, verb: str) -> LinkState:
        following = table.get((self.state, type(message)))
        if following is None:
            raise ProtocolError(f"cannot {verb} {type(message).__name__} while the link is {self.state.value}")
        return following
