# SPDX-License-Identifier: Apache-2.0
"""What one link answers the peer: look-ups of our caches, calls of services, and the revoking of caches it knows.

Requests arrive in the control loop's thread, where nothing may block; answers are made in the executor, or in a thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol

from ..errors import LLMException
from ..types import Deadline, LLMStatusCode
from ..wire import messages as m
from .state import LinkState

if TYPE_CHECKING:
    from .link import Link, LinkServices

logger = logging.getLogger(__name__)

#: The dialling end may use the link a moment before the listening end has put it into its table.
ESTABLISH_WAIT_S = 5.0
#: Questions for checksums that one end has under way on one link, and how many the other lets wait: more, because an
#: end that has given up on an answer asks the next question.
MAX_CHECKSUM_QUESTIONS = 8
MAX_CHECKSUMS_WAITING = 64
#: Requests of one peer that wait for an answer, and roughly their bytes: then more are refused.
MAX_REQUESTS_WAITING = 1024
MAX_BYTES_WAITING = 64 << 20


class CacheService(Protocol):
    """What the owner of caches answers. All may raise an LLMException, which the peer then gets."""

    def lookup(self, query: m.Lookup) -> m.CacheInfo: ...

    def locate(self, addresses: Sequence[int]) -> Located: ...

    def consume(self, consumed: m.Consume) -> None: ...

    def checksums(self, asked: m.AskChecksums) -> bytes: ...


class Located(Protocol):
    """Places in order of the addresses, and the caches they lie in."""

    @property
    def places(self) -> list[m.Place]: ...

    @property
    def caches(self) -> list[m.CacheInfo]: ...


class Answers:
    """Thread-safe."""

    def __init__(self, link: Link, services: LinkServices) -> None:
        self._link = link
        self._services = services
        #: Held from a look-up until its answer is sent: a Revoke must not overtake the answer that tells of the cache,
        #: for the peer would then use what it has just promised to forget.
        self._telling = threading.Lock()
        self._served_cache_ids: set[int] = set()
        self._counting = threading.Lock()
        self._requests_waiting = 0
        self._bytes_waiting = 0

    def revoke(self, cache_id: int, deadline: Deadline) -> None:
        """Tell the peer that our cache is going, and wait until it uses it no more. No-op if it never asked for it."""
        with self._telling:
            if cache_id not in self._served_cache_ids:
                return
            self._served_cache_ids.discard(cache_id)
        self._link.request(lambda i: m.Revoke(i, cache_id), deadline)

    def has_told_of(self, cache_id: int) -> bool:
        """Whether the peer knows that cache of ours, or is just being told of it."""
        with self._telling:
            return cache_id in self._served_cache_ids

    # -- requests of the peer (control loop's thread)

    def on_lookup(self, message: m.Lookup) -> None:
        def serve() -> None:
            with self._telling:
                cache = self._services.caches.lookup(message)
                self._tell([cache], m.Found(message.request_id, cache))

        self._in_executor(message.request_id, serve)

    def on_locate(self, message: m.Locate) -> None:
        def serve() -> None:
            with self._telling:
                located = self._services.caches.locate(message.addresses)
                self._tell(located.caches, m.Located(message.request_id, located.places, located.caches))

        self._in_executor(message.request_id, serve, 8 * len(message.addresses))

    def on_consume(self, message: m.Consume) -> None:
        def serve() -> m.AnyMessage:
            self._services.caches.consume(message)
            return m.Reply(message.request_id)

        self._in_executor(message.request_id, serve)

    def on_checksums(self, message: m.AskChecksums) -> None:
        def serve() -> m.AnyMessage:
            return m.Checksums(message.request_id, self._services.caches.checksums(message))

        def run() -> None:
            if self._link.state is not LinkState.DOWN:
                self._send(_answer_or_failure(message.request_id, serve))

        if not self._services.turns.submit(self._link, run):
            text = f"more than {MAX_CHECKSUMS_WAITING} questions for checksums wait on this link"
            self._send(m.Failure(message.request_id, int(LLMStatusCode.LLM_LINK_BUSY), text))

    def on_call(self, message: m.Call) -> None:
        def serve() -> m.AnyMessage:
            body = self._services.serve_call(message.service, self._link.peer.cluster_id, message.body)
            return m.Reply(message.request_id, body)

        self._in_executor(message.request_id, serve, len(message.body))

    def on_revoke(self, message: m.Revoke) -> None:
        """Not in the executor: what that runs (calls, Consume) may free caches, and so may wait at both ends for the
        answer to a Revoke."""
        remote = self._link.peer_caches.forget(message.cache_id)

        def serve() -> m.AnyMessage:
            if remote is not None:
                self._link.peer_caches.await_end(remote)
            return m.Reply(message.request_id)

        def run() -> None:
            self._send(_answer_or_failure(message.request_id, serve))
            if remote is not None:
                self._link.peer_caches.let_go(remote)

        if remote is None:
            run()
        else:
            self._submit(self._services.revoking, run)

    def _tell(self, caches: Sequence[m.CacheInfo], answer: m.Found | m.Located) -> None:
        """Answer with caches of ours; from here on the peer is asked before one of them is freed."""
        self._served_cache_ids.update(cache.cache_id for cache in caches)
        self._link.send(answer)

    def _in_executor(self, request_id: int, serve: Callable[[], m.AnyMessage | None], num_bytes: int = 0) -> None:
        """Have `serve` make the answer, or send it itself and return None. Refused if too much waits already."""

        def run() -> None:
            self._link.established.wait(ESTABLISH_WAIT_S)
            try:
                self._send(_answer_or_failure(request_id, serve))
            finally:
                self._count(-1, -num_bytes)

        if self._count(1, num_bytes):
            self._submit(self._services.executor, run)
        else:
            self._count(-1, -num_bytes)
            text = f"more than {MAX_REQUESTS_WAITING} requests, or {MAX_BYTES_WAITING >> 20} MiB, wait on this link"
            self._send(m.Failure(request_id, int(LLMStatusCode.LLM_LINK_BUSY), text))

    def _count(self, requests: int, num_bytes: int) -> bool:
        """Whether what waits is within the limits; one request may be of any size."""
        with self._counting:
            self._requests_waiting += requests
            self._bytes_waiting += num_bytes
            few = self._bytes_waiting <= MAX_BYTES_WAITING or self._requests_waiting == 1
            return few and self._requests_waiting <= MAX_REQUESTS_WAITING

    def _submit(self, executor: Executor, run: Callable[[], None]) -> None:
        try:
            executor.submit(run)
        except RuntimeError:
            logger.debug("a request came while finalizing")

    def _send(self, answer: m.AnyMessage | None) -> None:
        try:
            if answer is not None:
                self._link.send(answer)
        except LLMException as error:
            logger.debug("an answer could not be sent: %s", error)


def _answer_or_failure(request_id: int, serve: Callable[[], m.AnyMessage | None]) -> m.AnyMessage | None:
    try:
        return serve()
    except LLMException as error:
        return m.Failure(request_id, int(error.status_code), str(error))
    except Exception as error:  # a service of the layer above failed: the caller must hear of it
        logger.exception("a service failed")
        return m.Failure(request_id, int(LLMStatusCode.LLM_FAILED), f"{type(error).__name__}: {error}")
