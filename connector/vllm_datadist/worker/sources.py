# SPDX-License-Identifier: Apache-2.0
"""Which workers of P a push comes from: named by P's ticket, or asked for at the address that the router gave.

Who listens at an address is asked once at a time, in a thread of its own: all who want to know it share the answer and
hold no thread meanwhile, and an address where nobody answers is waited for by nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from datadist_core.errors import LinkFailed, ProtocolError, RemoteError
from datadist_core.types import Deadline

from ..address import address_error
from ..handoff.desk import WorkerPlace
from ..messages import Endpoint, PushSource
from ..params import MAX_WORKERS, not_a_grid
from .directory import WORKERS, AskWorkers, WorkerAddress, Workers
from .lease_calls import CALL_TIMEOUT_S
from .notices import FoundWorkers, OfferPart, OfferParts
from .peers import PeerDirectory
from .shares import SourceBook


class ClusterFinder(Protocol):
    def find_cluster(self, host: str, port: int, timeout_s: float) -> int: ...

    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes: ...


class PushSources:
    """Thread-safe. Each look-up asks anew who listens: P may have been started again."""

    def __init__(self, finder: ClusterFinder, peers: PeerDirectory, place: WorkerPlace, book: SourceBook) -> None:
        self._finder = finder
        self._peers = peers
        self._place = place
        self._book = book
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], Future[FoundWorkers]] = {}

    def find(self, source: PushSource, timeout_s: float) -> Future[FoundWorkers]:
        """P's workers, or the look-up that runs or is started now and may take so long. Never waits."""
        if source.remote is not None:
            known: Future[FoundWorkers] = Future()
            known.set_result(FoundWorkers(source.remote.workers, is_ticket=True))
            return known
        with self._lock:
            future = self._running.get((source.host, source.port))
            if future is not None:
                return future
            future = self._running[source.host, source.port] = Future()
        arguments = (source.host, source.port, Deadline.after(timeout_s), future)
        try:
            threading.Thread(target=self._run, args=arguments, name="datadist-find", daemon=True).start()
        except RuntimeError as error:
            self._end(source.host, source.port)
            future.set_exception(LinkFailed(f"no thread to ask {source.host}:{source.port}: {error}"))
        return future

    def parts(self, found: FoundWorkers) -> OfferParts:
        """Those that have layers and heads of ours. Raises LLMException."""
        sources = self._book.find(found.workers)
        if not sources.read:
            raise LinkFailed(f"P has no worker for rank {self._place.index}")
        parts = [OfferPart(one.endpoint, one.num_readers) for one in sources.read]
        return OfferParts(tuple(parts), tuple(OfferPart(endpoint, 1) for endpoint in sources.unread))

    def share(self, found: FoundWorkers) -> Sequence[OfferPart]:
        """Together our workers tell all of P's, also if there are more or fewer."""
        return [OfferPart(worker, 1) for worker in found.workers[self._place.index :: self._place.world_size]]

    def _run(self, host: str, port: int, deadline: Deadline, future: Future[FoundWorkers]) -> None:
        try:
            found = self._ask(host, port, deadline)
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            self._end(host, port)
            future.set_exception(error)
        else:
            self._end(host, port)
            future.set_result(found)

    def _end(self, host: str, port: int) -> None:
        with self._lock:
            self._running.pop((host, port), None)

    def _ask(self, host: str, port: int, deadline: Deadline) -> FoundWorkers:
        timeout_s = deadline.earlier(CALL_TIMEOUT_S).remaining_s()
        first = Endpoint(0, 0, host, port, self._finder.find_cluster(host, port, timeout_s))
        with self._peers.linked(first, deadline):
            timeout_s = deadline.earlier(CALL_TIMEOUT_S).remaining_s()
            reply = self._finder.call(first.cluster_id, WORKERS, msgspec.msgpack.encode(AskWorkers()), timeout_s)
        return read_workers(reply, first.cluster_id)


def read_workers(reply: bytes, asked: int) -> FoundWorkers:
    """The answer of P's worker `asked`, which is one of those.

    Raises:
        RemoteError: it names none.
        ProtocolError: these cannot be the workers of one engine.
    """
    try:
        answer = msgspec.msgpack.decode(reply, type=Workers)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{WORKERS}: the peer's answer cannot be read: {error}") from error
    workers = answer.workers
    if not workers:
        raise RemoteError("P has not told its workers of each other yet")
    if len(workers) > MAX_WORKERS:
        raise ProtocolError(f"{WORKERS}: the peer names {len(workers)} workers, expected 1..{MAX_WORKERS}")
    for one in workers:
        if why := _not_a_worker(one):
            raise ProtocolError(f"{WORKERS}: the peer names a worker at {one.host[:80]!r}, port {one.port}: {why}")
    found = tuple(
        Endpoint(one.pp_rank, one.tp_rank, one.host, one.port, one.cluster_id, one.first_layer) for one in workers
    )
    if why := not_a_grid(found):
        raise ProtocolError(f"{WORKERS}: the peer names {why}")
    if (claim := answer.engine) is not None and claim.tp_size != 1 + max(one.tp_rank for one in found):
        raise ProtocolError(
            f"{WORKERS}: the peer names {len(found)} workers, of which tp_size {claim.tp_size} is no cut"
        )
    if asked not in {one.cluster_id for one in found}:
        raise ProtocolError(f"{WORKERS}: the peer does not name itself (cluster {asked}): the answer is not of now")
    return FoundWorkers(found, claim=answer.engine)


def _not_a_worker(one: WorkerAddress) -> str:
    """Why nobody can be reached by that; "" if somebody may be."""
    if why := address_error(one.host, one.port):
        return why
    if not 0 < one.cluster_id < 2**64 or one.first_layer < 0:
        return f"cluster_id {one.cluster_id} and first_layer {one.first_layer} are no worker's"
    return ""
