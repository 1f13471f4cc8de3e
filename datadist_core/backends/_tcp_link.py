# SPDX-License-Identifier: Apache-2.0
"""A link to one peer: one or more connections, each with a requester's and a server's half.

Requests are spread over the connections; a large batch consists of several (`_tcp_parts`). If one connection breaks,
the link is lost: what was under way on the others cannot be told apart from what was lost. Everything here is done by
the loop's owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import LLMException, PeerLost, ProtocolError
from ..transfer.backend import BackendContext
from ._tcp_connection import Connection, Sink, translated
from ._tcp_frames import Header, Kind
from ._tcp_loop import IoLoop
from ._tcp_requests import Request, Requester
from ._tcp_serve import Budget, Server


class _Stream:
    """One connection of a link: routes its frames to the half that they are for."""

    def __init__(self, link: Link, connection: Connection, loop: IoLoop, context: BackendContext, budget: Budget):
        self._link = link
        self.connection = connection
        self.requester = Requester(connection)
        self.server = Server(connection, loop, context, budget)
        connection.owner = self

    def on_header(self, connection: Connection, header: Header) -> Sink | None:
        if header.kind is Kind.PULLED:
            return self.requester.sink_of(header)
        if header.kind is Kind.PUSHED:
            return self.server.sink_of(header)
        if header.kind in (Kind.HELLO, Kind.HEARD, Kind.PROOF, Kind.WELCOME):
            raise ProtocolError(f"{header.kind.name} on a link that is up")
        return None

    def on_frame(self, connection: Connection, header: Header, body: bytearray) -> None:
        if header.kind is Kind.GRANT:
            self.requester.on_grant(header)
        elif header.kind is Kind.END:
            self.requester.on_end(header, body)
        elif header.kind is Kind.CANCEL:
            self.server.on_cancel(header)
        else:
            self.server.on_request(header, body)

    def on_broken(self, connection: Connection, error: LLMException) -> None:
        self._link.lose(error)

    def end(self, error: LLMException) -> None:
        self.connection.close()
        self.server.end_all()
        self.requester.end_all(error)


class Link:
    """The way to one peer. `lost` is why it is no longer one, None while it is."""

    def __init__(
        self,
        peer_id: int,
        connections: Sequence[Connection],
        loop: IoLoop,
        context: BackendContext,
        on_lost: Callable[[Link, LLMException], None],
    ) -> None:
        self.peer_id = peer_id
        self.attached: set[int] = set()
        self.lost: LLMException | None = None
        #: All connections are closed.
        self.ended = False
        self._on_lost = on_lost
        budget = Budget()
        self._streams = [_Stream(self, connection, loop, context, budget) for connection in connections]

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def encrypted(self) -> bool:
        return self._streams[0].connection.encrypted

    def start(self, request: Request) -> None:
        """Begin a batch, or complete it at once if the link was lost meanwhile."""
        if self.lost is not None:
            request.complete(self.lost)
            return
        stream = min(self._streams, key=lambda s: s.requester.num_requests)
        try:
            stream.requester.start(request)
        except Exception as error:
            self.lose(translated(error))

    def sweep(self) -> float:
        """Look after deadlines. Returns when to look again."""
        if self.lost is not None:
            return math.inf
        try:
            return min(stream.requester.sweep() for stream in self._streams)
        except LLMException as error:
            self.lose(error)
            return math.inf

    def lose(self, error: LLMException) -> None:
        """The peer is gone, or behaves as if it were: end everything with PeerLost and report it."""
        if self.lost is not None:
            return
        lost = (
            error if isinstance(error, PeerLost) else PeerLost(f"the link to peer {self.peer_id} was given up: {error}")
        )
        if lost is not error:
            lost.__cause__ = error
        self.end(lost)
        self._on_lost(self, lost)

    def end(self, error: LLMException) -> None:
        """Close all connections and complete all batches with `error`. Idempotent."""
        if self.lost is not None:
            return
        self.lost = error
        for stream in self._streams:
            stream.end(error)
        self.ended = True
