# SPDX-License-Identifier: Apache-2.0
"""The requester's half of a connection: this end's batches on their way to completion.

A READ's memory is written by our loop's owner alone. So a READ that is given up is complete at once: from then on its
bytes are read from the socket into nowhere until the peer has stopped sending. A WRITE that is given up is complete
when the peer has said that it will not write any more; a peer that does not say so in time loses the connection.

Everything here is done by the loop's owner, except for making a `Request`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque

from ..errors import Cancelled, LLMException, PeerLost, ProtocolError, TimedOut
from ..transfer.backend import Completion, DoneCallback
from ..transfer.plan import Batch, Op
from ._tcp_connection import Connection, Discard, Sink
from ._tcp_frames import MAX_OPEN_REQUESTS, Header, Kind, decode_end, encode_frame
from ._tcp_loop import IoLoop
from ._tcp_memory import Layout, MemoryStream
from ._tcp_tls import Wire

CANCEL_GRACE_S = 3.0
SMALL_BYTES = 1 << 20
"""Requests up to this size are waited for by the thread that submits them, if the peer usually answers at once."""
PATIENCE_S = 0.002
"""How soon "at once" is, and how long the thread waits: whatever takes longer would not gain by it."""
_NOTE_WEIGHT = 1 / 8

_DISCARD = Discard()


class Request:
    """One batch. Also the source of its data frames (WRITE) and the sink of them (READ)."""

    kind = Kind.PUSHED

    def __init__(
        self, batch_id: int, batch: Batch, layout: Layout, body: bytes, done: DoneCallback, encrypted: bool = False
    ) -> None:
        self.batch_id, self.op, self.deadline = batch_id, batch.op, batch.deadline
        self.peer_id = batch.peer_id
        self.body = body
        self.small = layout.num_bytes <= SMALL_BYTES
        self.submitter = 0
        """The thread that may wait for it, while that thread is inside `submit`."""
        self.borrowed: Connection | None = None
        """What the submitter reads from, if it waits."""
        self.created_s = time.monotonic()
        self.request_id = 0
        self.aborted = False
        self.granted = False
        self.give_up_at_s = math.inf
        self.why_ended: LLMException | None = None
        self._requester: Requester | None = None
        self._stream: MemoryStream | None = MemoryStream(layout, encrypted)
        self._remaining_after = 0
        self._done: DoneCallback | None = done

    @property
    def completed(self) -> bool:
        return self._done is None

    @property
    def remaining(self) -> int:
        return self._remaining_after if self._stream is None else self._stream.remaining

    def complete(self, error: LLMException | None) -> None:
        """Deliver the completion, the first time. The batch's memory is not touched from here on."""
        done, self._done = self._done, None
        if self._stream is not None:
            self._remaining_after, self._stream = self._stream.remaining, None
        if done is not None:
            done(_completion(self.batch_id, error))

    def prepare(self) -> None:
        """Use the time until the peer answers."""
        self.body = b""
        if self._stream is not None:
            self._stream.prepare()

    def send(self, sock: Wire, budget: int) -> int:
        if self._stream is None:
            raise PeerLost("a WRITE ended while it was being sent")
        return self._stream.send(sock, budget)

    def on_sent(self) -> None:
        """The peer's END is what counts."""

    def receive(self, sock: Wire, budget: int) -> int:
        if self._stream is not None:
            return self._stream.receive(sock, budget)
        got = _DISCARD.receive(sock, budget)
        self._remaining_after -= got
        return got

    def on_frame_end(self) -> None:
        if not self.remaining:
            self._assigned().on_received(self)

    def wait(self, loop: IoLoop) -> None:
        """In the submitter's thread: take in the answer if it comes soon, else leave that to the loop."""
        connection = self.borrowed
        until_s = time.monotonic() + PATIENCE_S
        while connection is not None:
            connection.wait_readable(max(0.0, until_s - time.monotonic()))
            try:
                if loop.call(lambda: self._read_or_leave(connection, until_s)):
                    return
            except TimedOut:  # the owner is stuck; the batch was accepted, so this is not for the submitter
                loop.post(connection.give_back)
                return

    def _read_or_leave(self, connection: Connection, until_s: float) -> bool:
        if connection.read_borrowed(lambda: self.completed):
            return True
        if time.monotonic() < until_s:
            return False
        connection.give_back()
        self._assigned().note(PATIENCE_S)
        return True

    def assign(self, requester: Requester) -> None:
        self._requester = requester

    def give_up(self, error: LLMException) -> None:
        """End it early. It completes now or, a WRITE that is with the peer, soon."""
        if not self.completed and self._requester is not None:
            self._requester.give_up(self, error)

    def _assigned(self) -> Requester:
        if self._requester is None:
            raise LLMException("a request got data before it was sent")
        return self._requester


class Requester:
    """The requests of this end on one connection. At most `MAX_OPEN_REQUESTS` are with the peer at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._last_id = 0
        self._quick_share = 1.0  # of the latest small requests

    @property
    def num_requests(self) -> int:
        return len(self._open) + len(self._waiting)

    def start(self, request: Request) -> None:
        request.assign(self)
        waited_for = request.submitter == threading.get_ident() and request.small and self._quick_share > 0.5
        if waited_for and self._connection.borrow():  # before it is sent: the answer must not wake anybody else
            request.borrowed = self._connection
        self._waiting.append(request)
        self._send_waiting()

    def note(self, seconds: float) -> None:
        """A small request took so long, or takes longer."""
        self._quick_share += _NOTE_WEIGHT * ((seconds < PATIENCE_S) - self._quick_share)

    def give_up(self, request: Request, error: LLMException) -> None:
        """What `Request.give_up` does."""
        if request.why_ended is not None:
            return
        request.why_ended = error
        if request.request_id == 0:
            self._waiting.remove(request)
            request.complete(error)
            return
        if request.op is Op.READ:
            request.complete(error)
        else:
            request.give_up_at_s = time.monotonic() + CANCEL_GRACE_S
            self._connection.abort(request)
        self._connection.send_frame(encode_frame(Kind.CANCEL, request.request_id))

    def sweep(self) -> float:
        """Give up what is past its deadline. Returns when to look again. Raises TimedOut for a silent peer."""
        now = time.monotonic()
        requests = [r for r in (*self._open.values(), *self._waiting) if not r.completed]
        for request in requests:
            if now >= request.give_up_at_s:
                raise TimedOut(f"the peer did not confirm the end of a transfer within {CANCEL_GRACE_S} s")
            if now >= request.deadline.at_s:
                self.give_up(request, TimedOut("the transfer did not end within its deadline"))
        return min((_next_event(r) for r in requests if not r.completed), default=math.inf)

    def end_all(self, error: LLMException) -> None:
        """The connection is closed: complete everything."""
        requests = (*self._open.values(), *self._waiting)
        self._open.clear()
        self._waiting.clear()
        for request in requests:
            request.complete(request.why_ended or error)

    def sink_of(self, header: Header) -> Sink:
        """Where a PULLED frame goes."""
        request = self._find(header, Op.READ)
        if header.body_bytes > request.remaining:
            raise ProtocolError("the peer sends more than was asked for")
        return request

    def on_grant(self, header: Header) -> None:
        request = self._find(header, Op.WRITE)
        if request.granted:
            raise ProtocolError("the peer granted a WRITE twice")
        request.granted = True
        if request.why_ended is None:
            self._connection.add_source(request)

    def on_end(self, header: Header, body: bytearray) -> None:
        request = self._open.get(header.request_id)
        if request is None:
            raise ProtocolError(f"END of request {header.request_id}, which is not open")
        error = decode_end(body)
        if error is None and (request.op is Op.READ or request.remaining):
            raise ProtocolError("the peer called a transfer complete before all bytes were through")
        self._over(request, None if error is None else request.why_ended or error)

    def on_received(self, request: Request) -> None:
        """The last byte of a READ is in place."""
        self._over(request)

    def _over(self, request: Request, error: LLMException | None = None) -> None:
        """The peer is done with it."""
        del self._open[request.request_id]
        if request.small:
            self.note(time.monotonic() - request.created_s)
        self._connection.abort(request)
        request.complete(error)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._open) < MAX_OPEN_REQUESTS and not self._connection.closed:
            request = self._waiting.popleft()
            self._last_id += 1
            request.request_id = self._last_id
            self._open[request.request_id] = request
            kind = Kind.READ if request.op is Op.READ else Kind.WRITE
            self._connection.send_frame(encode_frame(kind, request.request_id, request.body))
            request.prepare()

    def _find(self, header: Header, op: Op) -> Request:
        request = self._open.get(header.request_id)
        if request is None or request.op is not op:
            raise ProtocolError(f"{header.kind.name} for request {header.request_id}, which is no open {op.name}")
        return request


def _next_event(request: Request) -> float:
    return request.give_up_at_s if request.why_ended is not None else request.deadline.at_s


def _completion(batch_id: int, error: LLMException | None) -> Completion:
    if error is None:
        return Completion.ok(batch_id)
    if isinstance(error, Cancelled):
        return Completion.cancelled(batch_id, error)
    return Completion.failed(batch_id, error)
