# SPDX-License-Identifier: Apache-2.0
"""An open tcp backend: its threads, listener, links and batches, from `open` to `close`."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from ..errors import Cancelled, ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, TimedOut, Unreachable
from ..transfer.backend import BackendContext, Completion, DoneCallback
from ..transfer.plan import Batch
from ..types import Deadline
from ._attempts import Attempt, Attempts
from ._tcp_accept import MAX_STRANGERS, Acceptor, Expected
from ._tcp_address import Endpoint, decode_identity, encode_identity, listen, reachable_at
from ._tcp_connection import Connection
from ._tcp_dial import Dialler
from ._tcp_frames import INSTANCE_BYTES, TOKEN_BYTES, encode_request
from ._tcp_link import Link
from ._tcp_loop import IoLoop
from ._tcp_memory import Layout
from ._tcp_options import parse_options
from ._tcp_parts import Ending, Joined, split
from ._tcp_proof import LinkKey
from ._tcp_rate import RateLimit
from ._tcp_requests import CANCEL_GRACE_S, Request
from ._tcp_tls import Tls, Wire, check_both_or_none
from ._tcp_workers import Workers

logger = logging.getLogger(__name__)


class Runtime:
    """Everything that exists only while the backend is open. Its public methods may be called from any thread."""

    def __init__(self, context: BackendContext) -> None:
        self.closed = False
        self.links: dict[int, Link] = {}
        self._context = context
        self._options = parse_options(context.options)
        self._instance = os.urandom(INSTANCE_BYTES)
        self._batches: dict[int, Ending] = {}
        self._tls = Tls.of(context.security)
        self._attempts = Attempts()
        self._dialler = Dialler(self._options, self._tls)
        self._reporters = Workers("datadist-tcp-report", 1)
        self._acceptor: Acceptor | None = None
        self._listening = threading.Lock()
        self._listened: list[str] = []
        self._endpoints: list[Endpoint] = []
        self.identity = self._describe()
        self._loop = self._make_loop()
        rate = self._options.max_bytes_per_s
        self._limit = RateLimit(rate, self._loop.wake_at) if rate else None
        self._loop.start()
        if context.listen_host is not None:
            self._listen_or_close(context.listen_host)

    def close(self) -> None:
        """Idempotent; any number of threads may call it."""
        self.closed = True
        self._dialler.close()
        self._loop.stop()
        self._reporters.stop()

    def dial(self, peer_id: int, identity: bytes, link_token: bytes, deadline: Deadline) -> None:
        with self._attempts.begin(peer_id) as attempt:
            wires = self._dialler.dial(decode_identity(identity), self._key(link_token), deadline, attempt)
            try:
                self._loop.call(lambda: self._install_dialled(peer_id, wires, attempt))
            except LLMException:
                for wire in wires:
                    wire.close()
                raise

    def accept(self, peer_id: int, identity: bytes, link_token: bytes, deadline: Deadline) -> None:
        check_both_or_none(self._tls, decode_identity(identity).tls)
        acceptor = self._acceptor
        if acceptor is None:
            raise Unreachable("this end does not listen, so it can only dial (no listen_ip_info)")
        expected = Expected(self._key(link_token), lambda connections: self._install(peer_id, connections))
        with self._attempts.begin(peer_id) as attempt:
            try:
                self._loop.call(lambda: acceptor.expect(expected))
                attempt.when_ended(lambda error: self._post_unless_closed(lambda: acceptor.give_up(expected, error)))
                expected.result.result(deadline.timeout())
            except FutureTimeoutError:
                self._loop.call(lambda: acceptor.forget(expected))
                if not expected.result.done():
                    raise TimedOut("the peer's tcp connection did not arrive in time") from None
                expected.result.result()
            except LLMException:
                self._post_unless_closed(lambda: acceptor.forget(expected))
                raise

    def disconnect(self, peer_id: int) -> None:
        if self.closed:
            return
        self._attempts.end(peer_id)
        try:
            self._loop.call(lambda: self._remove_link(peer_id, PeerLost(f"the link to peer {peer_id} was taken down")))
        except ClosedError:
            return  # closing ends it as well
        except TimedOut as error:  # it is done as soon as that is over, and `is_fenced` tells when
            logger.error("peer %d is not disconnected yet: %s", peer_id, error)

    def is_fenced(self, peer_id: int) -> bool:
        """Whether nothing is received for that peer any more, neither what it sends nor what we asked for."""
        link = self.links.get(peer_id)
        return link is None or link.ended

    def link(self, peer_id: int) -> Link:
        """The link to a peer. Raises NotYetLinked, or PeerLost with the reason."""
        link = self.links.get(peer_id)
        if link is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        if link.lost is not None:
            raise PeerLost(f"peer {peer_id} is gone: {link.lost}") from link.lost
        return link

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        link = self.link(batch.peer_id)
        parts = split(batch, link.num_streams)
        layouts = [self._local_layout(part, link) for part in parts]
        if not batch.num_bytes:
            done(Completion.ok(batch_id))
            return
        bodies = [encode_request(part) for part in parts]
        forgetting = self._forgetting(batch_id, done)
        if len(parts) == 1:
            self._submit_one(link, Request(batch_id, batch, layouts[0], bodies[0], forgetting, link.encrypted))
            return
        joined = Joined(len(parts), forgetting, self._post_unless_closed)
        requests = [
            Request(batch_id, part, layout, body, joined.on_part, link.encrypted)
            for part, layout, body in zip(parts, layouts, bodies, strict=True)
        ]
        joined.parts = requests
        self._loop.post(lambda: self._start(link, batch_id, joined, requests))

    def _submit_one(self, link: Link, request: Request) -> None:
        """The submitter waits for the answer, if it comes soon."""
        request.submitter = 0 if self._loop.owned else threading.get_ident()
        self._loop.post(lambda: self._start(link, request.batch_id, request, [request]))
        request.submitter = 0
        if request.borrowed is not None:
            with suppress(ClosedError):  # closing has ended it as well
                request.wait(self._loop)

    def cancel(self, batch_id: int) -> None:
        try:
            self._loop.post(lambda: self._cancel(batch_id))
        except ClosedError:
            return  # closing ends it as well

    def listen(self, host: str) -> None:
        """Accept at `host` as well ("*" or empty: all interfaces). Raises Unreachable with the reason."""
        host = "" if host == "*" else host
        with self._listening:
            if host in self._listened:
                return
            port = 0 if self._listened else self._options.port  # a port can be had once
            listener = listen(host, port, self._options.rcvbuf, MAX_STRANGERS)
            self._loop.call(lambda: self._accept_at(listener))
            self._listened.append(host)
            # The latest first: it is where the owner wants to be reached now.
            self._endpoints = [*reachable_at(listener, self._options.advertise_host), *self._endpoints]
            self.identity = self._describe()

    def _describe(self) -> bytes:
        return encode_identity(self._instance, self._endpoints, self._tls is not None)

    def _key(self, link_token: bytes) -> LinkKey:
        if len(link_token) != TOKEN_BYTES:
            raise ParamInvalid(f"a link token has {TOKEN_BYTES} bytes, not {len(link_token)}")
        return LinkKey(link_token)

    def _post_unless_closed(self, command: Callable[[], None]) -> None:
        with suppress(ClosedError):  # closing ends everything as well
            self._loop.post(command)

    def _listen_or_close(self, host: str) -> None:
        try:
            self.listen(host)
        except BaseException:
            self.close()
            raise

    def _make_loop(self) -> IoLoop:
        try:
            return IoLoop(self._sweep, self._teardown)
        except OSError as error:
            raise Unreachable(f"the tcp backend cannot start: {error}") from error

    def _local_layout(self, batch: Batch, link: Link) -> Layout:
        regions = []
        for pair in batch.pairs:
            if pair.remote.region_id not in link.attached:
                raise ParamInvalid(f"region {pair.remote.region_id} of peer {batch.peer_id} is not attached")
            region = self._context.local_region(pair.local.region_id)
            pair.local.check_inside(region.size_bytes)
            regions.append(region)
        return Layout.of_batch(batch, regions)

    def _forgetting(self, batch_id: int, done: DoneCallback) -> DoneCallback:
        """`done`, with the batch forgotten first."""

        def forget_and_report(completion: Completion) -> None:
            self._batches.pop(batch_id, None)
            done(completion)

        return forget_and_report

    # For the loop's owner

    def _accept_at(self, listener: socket.socket) -> None:
        if self._acceptor is None:
            self._acceptor = Acceptor(self._loop, self._instance, self._options, self._tls)
        self._acceptor.add_listener(listener)

    def _start(self, link: Link, batch_id: int, batch: Ending, requests: Sequence[Request]) -> None:
        self._batches[batch_id] = batch
        for request in requests:
            self._loop.wake_at(request.deadline.at_s)
            link.start(request)

    def _cancel(self, batch_id: int) -> None:
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.give_up(Cancelled(f"batch {batch_id} was cancelled"))
            self._loop.wake_at(time.monotonic() + CANCEL_GRACE_S)

    def _install_dialled(self, peer_id: int, wires: Sequence[Wire], attempt: Attempt) -> None:
        attempt.check_wanted()
        self._install(peer_id, [Connection(self._loop, wire) for wire in wires])

    def _install(self, peer_id: int, connections: list[Connection]) -> None:
        self._remove_link(peer_id, PeerLost(f"peer {peer_id} was connected anew"))
        for connection in connections:
            connection.limit = self._limit
        self.links[peer_id] = Link(peer_id, connections, self._loop, self._context, self._on_lost)

    def _remove_link(self, peer_id: int, error: LLMException) -> None:
        link = self.links.get(peer_id)
        if link is not None:
            link.end(error)
            del self.links[peer_id]  # not before: see `is_fenced`

    def _on_lost(self, link: Link, error: LLMException) -> None:
        """Told by a thread of its own: the owner may hold a lock, waiting for us to disconnect something."""
        self._reporters.put(lambda: self._context.report_peer_lost(link.peer_id, error))

    def _sweep(self) -> float:
        moments = [link.sweep() for link in list(self.links.values())]
        if self._acceptor is not None:
            moments.append(self._acceptor.sweep())
        if self._limit is not None:
            moments.append(self._limit.sweep())
        return min(moments, default=math.inf)

    def _teardown(self) -> None:
        error = ClosedError("the tcp backend was closed")
        if self._acceptor is not None:
            self._acceptor.close(error)
        for peer_id in list(self.links):
            self._remove_link(peer_id, error)
