# SPDX-License-Identifier: Apache-2.0
"""Somebody at the other end of a control connection who was not written to be polite: frames by hand, over a socket."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from datadist_core.errors import ProtocolError
from datadist_core.security import Security
from datadist_core.wire import messages as m
from datadist_core.wire.codec import MAX_MESSAGE_BYTES, PREAMBLE, FrameDecoder, encode

BOUND_S = 40.0
GRID = m.GridInfo(1, 2, 0, 64, 64, 1)
BEACON = m.Beacon(GRID, m.RegionInfo(2, 4096, {"tcp": b""}), b"x" * 64)


class Attacker:
    """One connection, at whichever end. Everything ends within `BOUND_S`.

    Args:
        sock: connected; closed with this.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(BOUND_S)
        self.sock = sock
        self._decoder = FrameDecoder(MAX_MESSAGE_BYTES)
        self._unread: list[m.AnyMessage] = []
        self.heard = b""
        self.ended = False

    @classmethod
    def dials(cls, port: int, host: str = "127.0.0.1", preamble: bytes = PREAMBLE) -> Attacker:
        made = cls(socket.create_connection((host, port), timeout=BOUND_S))
        made.say(preamble)
        return made

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def say(self, *what: m.AnyMessage | bytes) -> None:
        """Never fails: the other end may have closed already."""
        with suppress(OSError):
            self.sock.sendall(b"".join(one if isinstance(one, bytes) else encode(one) for one in what))

    def hear(self) -> m.AnyMessage | None:
        """The next message; None once the other end has closed. TimeoutError if neither comes."""
        while not self._unread and not self.ended:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            self.ended = not data
            self.heard += data
            with suppress(ProtocolError):  # something else than our protocol: `heard` has it
                self._unread += self._decoder.feed(data)
        return self._unread.pop(0) if self._unread else None

    def hear_all(self) -> list[m.AnyMessage]:
        """Until the other end closes."""
        heard = []
        while (message := self.hear()) is not None:
            heard.append(message)
        return heard

    def hear_until(self, kind: type) -> list[m.AnyMessage]:
        """Up to a message of that kind, or the end."""
        heard: list[m.AnyMessage] = []
        while (message := self.hear()) is not None:
            heard.append(message)
            if isinstance(message, kind):
                break
        return heard

    # -- what a member would say

    def challenge(self, mine: int, expected: int, nonce: bytes | None = None) -> m.Challenge:
        return m.Challenge(m.PROTOCOL_VERSION, mine, expected, nonce or os.urandom(32))

    def prove(self, security: Security, mine: int, expected: int) -> bool:
        """As the dialling end. Whether the other end has accepted it, and proved itself."""
        challenge = self.challenge(mine, expected)
        self.say(challenge)
        counter = self.hear()
        if not isinstance(counter, m.CounterChallenge):
            return False
        self.say(m.Proof(security.prove("dialling end", *said(challenge, counter))))
        answer = self.hear()
        return isinstance(answer, m.Proof) and security.check(answer.mac, "listening end", *said(challenge, counter))

    def link(self, mine: int, expected: int) -> bool:
        """From Hello to Established, without any backend."""
        self.say(hello(mine, expected))
        if not isinstance(self.hear(), m.Welcome) or not isinstance(self.hear(), m.Probed):
            return False
        self.say(m.Ready([]))
        return isinstance(self.hear(), m.Established)


def hello(mine: int, expected: int) -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, "attacker", mine, expected, b"i" * 16, 3, True, b"t" * 16, [], BEACON, 4.0)


def said(challenge: m.Challenge, counter: m.CounterChallenge) -> list[bytes]:
    """What a proof is over, written down a second time."""
    numbers = (challenge.protocol_version, challenge.cluster_id, challenge.expected_cluster_id)
    return [*(b"%d" % number for number in numbers), challenge.nonce, counter.nonce]


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body
