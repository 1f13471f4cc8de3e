# SPDX-License-Identifier: Apache-2.0
"""The server's half of a connection: what the peer asks to read from, or write to, this end's memory.

The peer is not trusted: it names grids and items, and both are checked against what the owner lends (`serve_grid`).
Lending may wait for the owner's locks, so it is an errand of the loop: other threads go on meanwhile.
A grid stays lent until the last of its bytes is sent or received, or until the connection is gone.

Nor may a peer make this end hold much memory by asking for much at a time (`Budget`): a request of some kilobytes can
stand for millions of ranges.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from ..errors import Cancelled, ClosedError, LLMException, PeerLost, ProtocolError, RemoteError
from ..transfer.backend import BackendContext
from ..transfer.plan import Op, check_items
from ._tcp_connection import Connection, Sink
from ._tcp_frames import (
    MAX_OPEN_REQUESTS,
    MAX_RANGES_PER_PAIR,
    Header,
    Kind,
    Wanted,
    decode_request,
    encode_end,
    encode_frame,
)
from ._tcp_loop import IoLoop
from ._tcp_memory import GridMemory, Layout, MemoryStream
from ._tcp_tls import Wire

MAX_PREPARING = 16 * MAX_OPEN_REQUESTS
"""Requests per connection that wait for the owner's memory, with those that were cancelled meanwhile."""

MAX_RANGES = MAX_RANGES_PER_PAIR
"""Of all requests of a link whose ranges are worked out: about 32 bytes each. More requests wait, however many."""
MAX_ASKED_BYTES = 128 << 20
"""Of all open requests of a link, as they came. More are refused."""


class Budget:
    """How much the requests of one link may hold. For the loop's owner."""

    def __init__(self) -> None:
        self._asked_bytes = 0
        self._num_ranges = 0
        self._waiting: deque[Served] = deque()

    def ask(self, served: Served) -> bool:
        """Whether there is room for a request as such. If so, `end` must follow; it begins now or later."""
        if self._asked_bytes and self._asked_bytes + served.asked_bytes > MAX_ASKED_BYTES:
            return False
        self._asked_bytes += served.asked_bytes
        self._waiting.append(served)
        self._begin()
        return True

    def end(self, served: Served) -> None:
        self._asked_bytes -= served.asked_bytes
        if served.begun:
            self._num_ranges -= served.num_ranges
        else:
            self._waiting.remove(served)
        self._begin()

    def _begin(self) -> None:
        """Begin those that there is room for, in order; the largest one alone if need be."""
        while self._waiting:
            first = self._waiting[0]
            if self._num_ranges and self._num_ranges + first.num_ranges > MAX_RANGES:
                return
            self._waiting.popleft()
            self._num_ranges += first.num_ranges
            first.begun = True
            first.prepare()


class Served:
    """One request of the peer. Source of a READ's data frames and sink of a WRITE's."""

    kind = Kind.PULLED

    def __init__(self, server: Server, wanted: Wanted, asked_bytes: int) -> None:
        self.request_id, self.op = wanted.request_id, wanted.op
        self.wanted = wanted
        self.asked_bytes = asked_bytes
        self.num_ranges = len(wanted.items) * len(wanted.slices)
        self.begun = False
        self.aborted = False
        self.over = False
        self._server = server
        self._stream: MemoryStream | None = None
        self._lent = ExitStack()

    @property
    def remaining(self) -> int:
        return 0 if self._stream is None else self._stream.remaining

    @property
    def prepared(self) -> bool:
        return self._stream is not None

    def prepare(self) -> None:
        self._server.prepare(self)

    def begin(self, stream: MemoryStream, lent: ExitStack) -> None:
        self._stream, self._lent = stream, lent

    def finish(self) -> None:
        """Leave the memory alone and give it back."""
        self.over = True
        self._lent.close()

    def send(self, sock: Wire, budget: int) -> int:
        return self._opened().send(sock, budget)

    def on_sent(self) -> None:
        self._server.on_sent(self)

    def receive(self, sock: Wire, budget: int) -> int:
        return self._opened().receive(sock, budget)

    def on_frame_end(self) -> None:
        if not self.remaining:
            self._server.on_received(self)

    def _opened(self) -> MemoryStream:
        if self._stream is None or self.over:
            raise PeerLost("a request of the peer ended while its data was moving")
        return self._stream


class Server:
    """The peer's requests on one connection. Done by the loop's owner, except for `_prepare`."""

    def __init__(self, connection: Connection, loop: IoLoop, context: BackendContext, budget: Budget) -> None:
        self._connection, self._loop, self._context, self._budget = connection, loop, context, budget
        self._open: dict[int, Served] = {}
        self._num_preparing = 0

    def on_request(self, header: Header, body: bytearray) -> None:
        wanted = decode_request(header, body)
        if len(self._open) >= MAX_OPEN_REQUESTS or wanted.request_id in self._open:
            raise ProtocolError(f"request {wanted.request_id} is open already or exceeds {MAX_OPEN_REQUESTS}")
        if self._num_preparing >= MAX_PREPARING:
            self._answer(wanted.request_id, RemoteError("too many requests are waiting for memory here"))
            return
        served = Served(self, wanted, len(body))
        self._open[wanted.request_id] = served
        if not self._budget.ask(served):
            del self._open[wanted.request_id]
            self._answer(wanted.request_id, RemoteError("requests of too many blocks at once; wait for some to end"))

    def prepare(self, served: Served) -> None:
        """There is room for it."""
        self._num_preparing += 1
        self._loop.send_on_errand(lambda: self._prepare(served))
        self._connection.pause()

    def on_cancel(self, header: Header) -> None:
        served = self._open.get(header.request_id)
        if served is None:
            return  # it was over before the peer knew
        if served.op is Op.READ and served.prepared:
            self._connection.abort(served)
        else:
            self._end(served, Cancelled("cancelled by the requester"))

    def sink_of(self, header: Header) -> Sink:
        """Where a PUSHED frame goes."""
        served = self._open.get(header.request_id)
        if served is None or served.op is not Op.WRITE or header.body_bytes > served.remaining:
            raise ProtocolError(
                f"{header.body_bytes} bytes for request {header.request_id}, which does not expect them"
            )
        return served

    def on_sent(self, served: Served) -> None:
        if served.over:
            return
        if served.remaining:
            self._end(served, Cancelled("cancelled by the requester"))
        else:
            self._forget(served)

    def on_received(self, served: Served) -> None:
        self._end(served, None)

    def end_all(self) -> None:
        """The connection is closed: give all memory back."""
        for served in list(self._open.values()):
            self._forget(served)

    def _end(self, served: Served, error: LLMException | None) -> None:
        self._forget(served)
        self._answer(served.request_id, error)

    def _forget(self, served: Served) -> None:
        del self._open[served.request_id]
        served.finish()
        self._budget.end(served)

    def _answer(self, request_id: int, error: LLMException | None) -> None:
        self._connection.send_frame(encode_end(request_id, error))

    def _prepare(self, served: Served) -> None:
        """On an errand: borrow the memory and check the request against it."""
        lent = ExitStack()
        try:
            outcome: MemoryStream | LLMException = self._borrow(served.wanted, lent)
        except LLMException as error:
            outcome = error
        except Exception as error:
            outcome = RemoteError(f"serving failed unexpectedly: {error!r}")
        try:
            self._loop.post(lambda: self._on_prepared(served, lent, outcome))
        except ClosedError:
            lent.close()

    def _borrow(self, wanted: Wanted, lent: ExitStack) -> MemoryStream:
        grids: list[GridMemory] = []
        checked = (0, 0)
        for claimed in wanted.grids:
            loan = lent.enter_context(self._context.serve_grid(claimed.grid_id, wanted.op))
            loan.grid.check_inside(loan.region.size_bytes)
            grid = loan.grid.recut(claimed)
            size = (grid.num_items, grid.item_bytes)
            if size != checked:
                check_items(wanted.items, grid, wanted.slices)
                checked = size
            grids.append(GridMemory(grid, loan.region.address))
        stream = MemoryStream(Layout.of_request(wanted, tuple(grids)), self._connection.encrypted)
        stream.prepare()
        return stream

    def _on_prepared(self, served: Served, lent: ExitStack, outcome: MemoryStream | LLMException) -> None:
        self._num_preparing -= 1
        if served.over or isinstance(outcome, LLMException):
            lent.close()
            if not served.over:
                self._end(served, outcome if isinstance(outcome, LLMException) else None)
            return
        served.begin(outcome, lent)
        if served.op is Op.READ:
            self._connection.add_source(served)
        else:
            self._connection.send_frame(encode_frame(Kind.GRANT, served.request_id))
