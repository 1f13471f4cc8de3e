# SPDX-License-Identifier: Apache-2.0
"""The life of a link as one table, without I/O.

Both ends run the same machine; `dialling` only says who speaks first.

    dialling end                         listening end
    START     -- Challenge -->           START          with a shared secret only; without one it begins with Hello
    CHALLENGED      <-- CounterChallenge CHALLENGED     (or Refuse)
    COUNTERED -- Proof -->               COUNTERED
    CLAIMED                   <-- Proof  CLAIMED        (the listening end has checked; or Refuse)
    PROVEN    -- Hello -->               PROVEN         (the dialling end has checked)
    GREETED                 <-- Welcome  GREETED        (or Refuse, by either, until the link is up)
    PROBING   (both try every backend)   PROBING
              <-- Probed --
    PROBED    -- Ready -->               PROBED
    AGREED    <-- Established --         AGREED
    UP                                   UP
    UNLINKING -- Unlink -->              UNLINKING_PEER
    DOWN      <-- Unlinked --            DOWN

An end with a secret allows no Hello before the proofs, one without allows no Challenge; a listening end that gets it
all the same is UNWANTING and may do nothing but refuse. The transport breaking leads to DOWN from everywhere.
"""

from __future__ import annotations

import functools
from enum import Enum

from ..errors import ProtocolError
from ..wire import messages as m


class LinkState(Enum):
    START = "start"
    CHALLENGED = "challenged"
    COUNTERED = "counter-challenged"
    CLAIMED = "proved by the dialling end"
    PROVEN = "proved by both ends"
    UNWANTING = "not wanted"
    GREETED = "greeted"
    PROBING = "probing"
    PROBED = "probed"
    AGREED = "agreed"
    UP = "up"
    UNLINKING = "unlinking"
    UNLINKING_PEER = "unlinked by the peer"
    DOWN = "down"


_ASKS = (m.Ping, m.Lookup, m.Locate, m.Consume, m.Revoke, m.AskChecksums, m.Call)
_ANSWERS = (m.Pong, m.Found, m.Located, m.Checksums, m.Reply, m.Failure)
_TRAFFIC = (*_ASKS, *_ANSWERS)
_S = LinkState
_Table = dict[tuple[LinkState, type], LinkState]

#: (state, message) -> next state; what is not in the table is not allowed.
_DIALLING_SENDS: _Table = {
    (_S.PROBED, m.Ready): _S.AGREED,
    (_S.PROBED, m.Refuse): _S.DOWN,
    (_S.PROBING, m.Refuse): _S.DOWN,
}
#: How it begins without a shared secret, and with one.
_PLAIN: _Table = {(_S.START, m.Hello): _S.GREETED}
_SECRET_SENDS: _Table = {
    (_S.START, m.Challenge): _S.CHALLENGED,
    (_S.COUNTERED, m.Proof): _S.CLAIMED,
    (_S.PROVEN, m.Hello): _S.GREETED,
}
_SECRET_RECEIVES: _Table = {
    (_S.CHALLENGED, m.CounterChallenge): _S.COUNTERED,
    (_S.CHALLENGED, m.Refuse): _S.DOWN,
    (_S.CLAIMED, m.Proof): _S.PROVEN,
    (_S.CLAIMED, m.Refuse): _S.DOWN,
}
#: What the listening end does with who begins in the way that is not its own.
_REFUSES: _Table = {(_S.UNWANTING, m.Refuse): _S.DOWN}
_UNWANTED_HELLO: _Table = {(_S.START, m.Hello): _S.UNWANTING}
_UNWANTED_CHALLENGE: _Table = {(_S.START, m.Challenge): _S.UNWANTING}

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


@functools.cache
def _tables(dialling: bool, with_secret: bool) -> tuple[_Table, _Table]:
    """Of what one end may send and receive; shared by all its links."""
    sends = {**_DIALLING_SENDS, **(_SECRET_SENDS if with_secret else _PLAIN)}
    receives = {**_DIALLING_RECEIVES, **(_SECRET_RECEIVES if with_secret else {})}
    if not dialling:
        # What one end sends is what the other receives: the listening end uses the same tables, swapped.
        unwanted = _UNWANTED_HELLO if with_secret else _UNWANTED_CHALLENGE
        sends, receives = {**receives, **_REFUSES}, {**sends, **unwanted}
    return {**sends, **_BOTH_SEND}, {**receives, **_BOTH_RECEIVE}


class LinkMachine:
    """Checks every message against the table. Not thread-safe; the link serialises access."""

    def __init__(self, dialling: bool, with_secret: bool = False) -> None:
        self._sends, self._receives = _tables(dialling, with_secret)
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
