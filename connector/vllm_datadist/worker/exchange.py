# SPDX-License-Identifier: Apache-2.0
"""A worker's part in pushes: `pushes` as P and `offers` as D, and the services by which the two meet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from datadist_core.errors import LLMException, ProtocolError

from ..description import Description
from ..handoff.desk import WorkerPlace
from ..messages import (
    ANNOUNCE,
    OFFER,
    OFFER_STANDS,
    OFFER_STATE,
    PUSHED,
    WITHDRAW,
    Announce,
    AskOffer,
    Endpoint,
    Offer,
    OfferAnswer,
    OfferState,
    Pushed,
    Withdraw,
)
from ..newest import Newest
from .claims import engine_claim
from .directory import WORKERS, AskWorkers, WorkerAddress, Workers
from .layer_sync import LayerProgress
from .load_book import LoadBook
from .node import DataDistNode
from .offers import OfferRunner
from .peers import PeerDirectory
from .pulls import Moved, RegisteredCache
from .push_moves import BlockPusher
from .pushes import PushRunner
from .saves import LeaseTable
from .shares import SourceBook
from .sources import PushSources


@dataclass(frozen=True, slots=True)
class PushLimits:
    """`timeout_s`: per push, from D's offer on. `num_threads`: sends at the same time.

    `is_layerwise`: a layer may be sent as soon as its hook says that it is computed; else when its step ends.
    """

    timeout_s: float = 120.0
    num_threads: int = 16
    is_layerwise: bool = True


#: Threads that drive offers from event to event; their calls are made in others.
NUM_CALLERS = 4
#: Workers of other engines whose descriptions are kept; the latest.
MAX_DESCRIPTIONS = 4096
_Message = TypeVar("_Message", Announce, Offer, AskOffer, Withdraw, Pushed, AskWorkers)


class PushExchange:
    """Thread-safe. Its services answer as soon as it is made: peers that come earlier are told that P is starting."""

    def __init__(
        self,
        node: DataDistNode,
        caches: Sequence[RegisteredCache],
        ours: Description,
        leases: LeaseTable,
        peers: PeerDirectory,
        place: WorkerPlace,
        limits: PushLimits,
        link_timeout_s: float,
        log: logging.Logger,
        book: LoadBook | None = None,
    ) -> None:
        self._link_timeout_s = link_timeout_s
        self._lock = threading.Lock()
        self._descriptions: Newest[int, Description] = Newest(MAX_DESCRIPTIONS)
        self._workers: tuple[Endpoint, ...] = ()
        self._claim = engine_claim(ours)
        self.progress = LayerProgress(limits.is_layerwise)
        self._mover = BlockPusher(node, caches, ours, self._description_of)
        self.pushes = PushRunner(leases, self._mover, node, self.progress, limits.num_threads, log, book)
        sources = PushSources(node, peers, place, SourceBook(ours))
        self.offers = OfferRunner(peers, node, sources, node, limits.timeout_s, link_timeout_s, NUM_CALLERS, log, book)
        self._serve(node)

    def described(self, cluster_id: int, theirs: Description) -> None:
        """A worker of another engine has linked, and said what its KV cache is like."""
        with self._lock:
            self._descriptions[cluster_id] = theirs
            self._descriptions.move_to_end(cluster_id)

    def set_workers(self, workers: tuple[Endpoint, ...]) -> None:
        """All workers of this engine."""
        self._workers = workers

    def link_lost(self, cluster_id: int, error: LLMException) -> None:
        # What that worker has said of itself stays: its next link may be there already, and who starts anew has
        # another cluster id.
        self._mover.forget(cluster_id)
        self.pushes.link_lost(cluster_id)
        self.offers.link_lost(cluster_id, error)

    def close(self) -> None:
        """Idempotent."""
        self.offers.close()
        self.pushes.close(self._link_timeout_s)

    def _description_of(self, cluster_id: int) -> Description | None:
        with self._lock:
            return self._descriptions.get(cluster_id)

    # --- services: called by peers, in the core's threads -----------------------------------------------------

    def _serve(self, node: DataDistNode) -> None:
        services: dict[str, Callable[[int, bytes], msgspec.Struct]] = {
            ANNOUNCE: self._on_announce,
            OFFER: self._on_offer,
            OFFER_STATE: lambda who, body: self.pushes.state(who, _decode(OFFER_STATE, body, AskOffer).ref),
            WITHDRAW: self._on_withdraw,
            OFFER_STANDS: self._on_stands,
            PUSHED: self._on_pushed,
            WORKERS: self._on_workers,
        }
        for name, answer in services.items():
            node.serve(name, lambda who, body, answer=answer: msgspec.msgpack.encode(answer(who, body)))  # type: ignore[misc]

    def _on_announce(self, who: int, body: bytes) -> OfferAnswer:
        question = _decode(ANNOUNCE, body, Announce)
        return self.pushes.announce(question.ref, question.timeout_s)

    def _on_offer(self, who: int, body: bytes) -> OfferAnswer:
        offer = _decode(OFFER, body, Offer)
        reason = self._mover.why_unfit(who, offer)
        return OfferAnswer(OfferState.FAILED, reason) if reason else self.pushes.offer(who, offer)

    def _on_withdraw(self, who: int, body: bytes) -> OfferAnswer:
        question = _decode(WITHDRAW, body, Withdraw)
        return self.pushes.withdraw(who, question.ref, question.num_offers, question.instead)

    def _on_stands(self, who: int, body: bytes) -> OfferAnswer:
        stands = self.offers.stands(who, _decode(OFFER_STANDS, body, AskOffer).ref)
        return OfferAnswer(OfferState.ACCEPTED if stands else OfferState.UNKNOWN)

    def _on_pushed(self, who: int, body: bytes) -> OfferAnswer:
        notice = _decode(PUSHED, body, Pushed)
        moved = [Moved(one.num_bytes, one.backend, one.seconds) for one in notice.moved]
        is_ours = self.offers.told(who, notice.ref, notice.state, notice.reason, moved)
        return OfferAnswer(OfferState.ACCEPTED if is_ours else OfferState.UNKNOWN)

    def _on_workers(self, who: int, body: bytes) -> Workers:
        _decode(WORKERS, body, AskWorkers)
        workers = self._workers
        return Workers(
            [WorkerAddress(w.pp_rank, w.tp_rank, w.host, w.port, w.cluster_id, w.first_layer) for w in workers],
            self._claim,
        )


def _decode(name: str, body: bytes, kind: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{name}: the message cannot be read: {error}") from error
