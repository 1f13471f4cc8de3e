# SPDX-License-Identifier: Apache-2.0
"""Links to other engines' workers, made on first use, off the engine's thread.

There is at most one attempt per peer at a time; all who need the peer wait for it and share its outcome. A peer is
ready once the link is up and both descriptions fit. A link that fails is forgotten, so that the next use makes a
fresh one: at once, if the link had worked, and after a pause, if the attempt before failed. The pause grows with each
failure, up to some seconds, and is gone with the first success: nobody is refused for ever. A peer that does not fit
is remembered for a while, so that it is not asked for each request. A restarted peer has another cluster id, thus is
another peer; what is left of the one at the same address is dropped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from datadist_core.errors import LinkFailed, LLMException, ParamInvalid, TimedOut
from datadist_core.types import Deadline

from ..description import Description, Incompatible, check_compatible, decode, encode
from ..messages import DESCRIBE, Endpoint
from .planner import PairPlan, plan_pair
from .topology import PlanError

#: Of the pause before an attempt that follows failures, in seconds: the first, doubled by each failure, the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
#: The same for a peer that does not fit. It may have been starting when it said so.
FIRST_REFUSAL_S, LONGEST_REFUSAL_S = 1.0, 30.0
#: Failures are forgotten when the peer was not needed for so long.
FORGET_S = 60.0


class LinkMaker(Protocol):
    """What is needed of LLMDataDist. Errors are LLMExceptions."""

    def link(self, endpoint: Endpoint, timeout_s: float) -> str:
        """Link, and return a line for the user about how."""
        ...

    def unlink(self, endpoint: Endpoint) -> None:
        """Drop this end of the link; never waits for the peer."""
        ...

    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Peer:
    """A linked worker that fits. `plan`: what it has for us to read; empty if it holds other layers or heads."""

    endpoint: Endpoint
    description: Description
    plan: PairPlan


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What came of the latest attempts at one peer: nothing, `num_failures` times.

    Attributes:
        next_s: when the next attempt may be made; times are those of `time.monotonic`.
        incompatible: the latest one showed that the peer does not fit, and why not.
    """

    num_failures: int
    next_s: float
    incompatible: str | None = None

    def after(self, error: BaseException, now_s: float, jitter: float) -> _Trouble:
        factor = jitter * 2.0 ** min(self.num_failures, 16)
        if isinstance(error, Incompatible):
            pause_s = min(LONGEST_REFUSAL_S, FIRST_REFUSAL_S * factor)
            return _Trouble(self.num_failures + 1, now_s + pause_s, str(error))
        return _Trouble(self.num_failures + 1, now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * factor))


_NO_TROUBLE = _Trouble(0, 0.0)


class PeerDirectory:
    """Thread-safe.

    Args:
        clock_s, pause, jitter: for tests; the last one says which part of a pause is waited.
    """

    def __init__(
        self,
        maker: LinkMaker,
        describe: Callable[[], Description],
        link_timeout_s: float,
        log: logging.Logger,
        clock_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        self._maker = maker
        self._clock_s = clock_s
        self._pause = pause
        self._jitter = jitter
        self._describe = describe
        self._link_timeout_s = link_timeout_s
        self._log = log
        self._lock = threading.Lock()
        self._peers: dict[int, Future[Peer]] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._troubles: dict[int, _Trouble] = {}
        #: Of those who call a peer that does not fit; forgotten when nobody does.
        self._turns: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()

    @property
    def ours(self) -> Description:
        """This worker, as peers see it."""
        return self._describe()

    def prepare(self, endpoint: Endpoint) -> Future[Peer]:
        """The peer, or the attempt to reach it that runs or is started now, maybe after a pause. Never waits."""
        with self._lock:
            trouble = self._troubles.get(endpoint.cluster_id, _NO_TROUBLE)
            pause_s = max(0.0, trouble.next_s - self._clock_s())
            if trouble.incompatible is not None and pause_s > 0:
                return _failed(Incompatible(trouble.incompatible))
            future = self._peers.get(endpoint.cluster_id)
            if future is not None:
                return future
            future = self._peers[endpoint.cluster_id] = Future()
            self._endpoints[endpoint.cluster_id] = endpoint
        name = f"datadist-reach-{endpoint.host}:{endpoint.port}"
        attempt = threading.Thread(target=self._attempt, args=(endpoint, future, pause_s), name=name, daemon=True)
        try:
            attempt.start()
        except RuntimeError as error:  # the process has too many; those who wait must hear of it all the same
            failure = link_failed(endpoint, f"no thread for it ({error}); end others, or raise the limit of threads")
            self._attempt_failed(endpoint, failure)
            future.set_exception(failure)
        return future

    def ready(self, endpoint: Endpoint, deadline: Deadline) -> Peer:
        """Wait for the peer. Raises what the attempt raised, or TimedOut at the deadline."""
        try:
            return self.prepare(endpoint).result(deadline.timeout())
        except FutureTimeout as error:
            raise TimedOut(f"no link to {_place(endpoint)} in time") from error

    @contextmanager
    def linked(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[None]:
        """A link for a call that even a peer that does not fit understands: to such a one, one thread at a time."""
        try:
            self.ready(endpoint, deadline)
        except Incompatible:
            with self._turn_at(endpoint, deadline):
                self._maker.link(endpoint, deadline.remaining_s())
                try:
                    yield
                finally:
                    self._maker.unlink(endpoint)
        else:
            yield

    @contextmanager
    def _turn_at(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[None]:
        """Nobody else unlinks meanwhile what is linked for one call."""
        with self._lock:
            turn = self._turns.setdefault(endpoint.cluster_id, threading.Lock())
        if not turn.acquire(timeout=deadline.remaining_s()):
            raise TimedOut(f"others call {_place(endpoint)}, which does not fit, one by one")
        try:
            yield
        finally:
            turn.release()

    def drop(self, peer: Peer) -> None:
        """Forget this link after trouble on it, unless a fresh one has replaced it already."""
        with self._lock:
            future = self._peers.get(peer.endpoint.cluster_id)
            if future is None or not future.done() or future.exception() or future.result() is not peer:
                return
            self._forget(peer.endpoint.cluster_id)
        self._maker.unlink(peer.endpoint)

    def lost(self, cluster_id: int) -> None:
        """The core says that this link is down."""
        with self._lock:
            future = self._peers.get(cluster_id)
            if future is not None and future.done():
                self._forget(cluster_id)

    def num_peers(self) -> int:
        with self._lock:
            return len(self._peers)

    def _attempt(self, endpoint: Endpoint, future: Future[Peer], pause_s: float) -> None:
        try:
            self._pause(pause_s)
            peer = self._reach(endpoint)
        except LLMException as error:
            self._attempt_failed(endpoint, error)
            future.set_exception(error)
        except BaseException as error:
            # Whoever waits must hear of it, whatever it is, and as what they expect: an address, say, that is none.
            self._log.debug("unexpected error in an attempt at %s", _place(endpoint), exc_info=True)
            failure = link_failed(endpoint, f"unexpected error: {error!r}")
            self._attempt_failed(endpoint, failure)
            future.set_exception(failure)
        else:
            self._reached(endpoint)
            future.set_result(peer)

    def _reach(self, endpoint: Endpoint) -> Peer:
        deadline = Deadline.after(self._link_timeout_s)
        how = self._maker.link(endpoint, deadline.remaining_s())
        try:
            peer = self._exchange_descriptions(endpoint, deadline)
        except LLMException:
            self._maker.unlink(endpoint)
            raise
        self._log.info("linked to %s %s", _place(endpoint), how)
        return peer

    def _exchange_descriptions(self, endpoint: Endpoint, deadline: Deadline) -> Peer:
        ours = self._describe()
        try:
            reply = self._maker.call(endpoint.cluster_id, DESCRIBE, encode(ours), deadline.remaining_s())
        except ParamInvalid as error:
            raise Incompatible(f"refused: {error}") from error
        theirs = decode(reply)
        check_compatible(ours, theirs)
        try:
            return Peer(endpoint, theirs, plan_pair(theirs, ours))
        except PlanError as error:
            raise Incompatible(str(error)) from error

    def _attempt_failed(self, endpoint: Endpoint, error: BaseException) -> None:
        with self._lock:
            self._forget(endpoint.cluster_id)
            now_s = self._clock_s()
            before = self._troubles.get(endpoint.cluster_id, _NO_TROUBLE)
            old = [who for who, trouble in self._troubles.items() if now_s > trouble.next_s + FORGET_S]
            for cluster_id in old:
                del self._troubles[cluster_id]
            self._troubles[endpoint.cluster_id] = before.after(error, now_s, self._jitter())
        self._log.warning("no link to %s: %s", _place(endpoint), error)

    def _reached(self, endpoint: Endpoint) -> None:
        """Whoever was at this address before is gone, and what went wrong before is forgotten."""
        with self._lock:
            gone = [
                old
                for old in self._endpoints.values()
                if (old.host, old.port) == (endpoint.host, endpoint.port) and old.cluster_id != endpoint.cluster_id
            ]
            self._troubles.pop(endpoint.cluster_id, None)
            for old in gone:
                self._forget(old.cluster_id)
                self._troubles.pop(old.cluster_id, None)
        for old in gone:
            self._maker.unlink(old)

    def _forget(self, cluster_id: int) -> None:
        self._peers.pop(cluster_id, None)
        self._endpoints.pop(cluster_id, None)


def link_failed(endpoint: Endpoint, reason: str) -> LinkFailed:
    return LinkFailed(f"cannot link to {_place(endpoint)}: {reason}")


def _place(endpoint: Endpoint) -> str:
    return f"{endpoint.host}:{endpoint.port} (cluster {endpoint.cluster_id})"


def _failed(error: LLMException) -> Future[Peer]:
    future: Future[Peer] = Future()
    future.set_exception(error)
    return future
