# SPDX-License-Identifier: Apache-2.0
"""Transfers between a cache of this end and one of a linked peer: find the peer's cache, plan, run, all or error.

Both caches are held for as long as a batch runs: ours by a pin, the peer's because its owner asks us (`Revoke`) before
it frees one and waits for our transfers on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import CacheNotExist, LLMException, ParamInvalid
from ..link.link import Link
from ..link.manager import LinkManager
from ..link.remote import KeyedCache, RemoteCache
from ..transfer.backend import Backend
from ..transfer.engine import TransferEngine
from ..transfer.plan import Batch, GridPair, Op
from ..types import Deadline
from ..wire.messages import Lookup
from .cache import LOCAL_CACHE_ID, Cache
from .desc import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from .integrity import Integrity, Moved
from .keeper import check_one_id
from .local_copy import check_blocks
from .plans import Moves
from .report import TransferReport
from .routes import Leg, Route, Routes, Signature
from .rules import RemoteKey, Rules
from .table import CacheEntry, CacheTable

logger = logging.getLogger(__name__)

#: After a pull by CacheKey the owner is told so; the data is here then, whatever becomes of the message.
CONSUME_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What was moved, and through what."""

    num_bytes: int
    backend: str


@dataclass(frozen=True, slots=True)
class Met:
    """The two caches of a transfer, both held."""

    link: Link
    local: CacheEntry
    remote: RemoteCache
    remote_batch_index: int


#: From the two caches to what moves. Raises ParamInvalid.
Planner = Callable[[Met], Moves]


class Mover:
    """Thread-safe."""

    def __init__(
        self, engine: TransferEngine, table: CacheTable, links: LinkManager, rules: Rules, integrity: Integrity
    ) -> None:
        self._engine = engine
        self._integrity = integrity
        self._table = table
        self._links = links
        #: The short way of transfers like one before.
        self.routes = Routes(engine, table, links, rules, integrity)

    def pull(
        self,
        name: str,
        key: RemoteKey,
        cache: Cache,
        plan: Planner,
        way: Signature | None,
        deadline: Deadline,
    ) -> TransferReport:
        """Into `cache`. A CacheKey (`name` in errors) has served its purpose afterwards: its owner drops it.

        Args:
            way: of the call, if one like it may go the short way next time.
        """
        if isinstance(key, CacheKey):
            check_one_id(name, key)
        return self._transfer(Op.READ, key, cache, plan, way, None, deadline)

    def push(
        self,
        key: RemoteKey,
        cache: Cache,
        plan: Planner,
        way: Signature | None,
        link_id: int | None,
        deadline: Deadline,
    ) -> TransferReport:
        """Out of `cache`; over no other link than that one, if it is given."""
        return self._transfer(Op.WRITE, key, cache, plan, way, link_id, deadline)

    def link(self, cluster_id: int, link_id: int | None) -> Link:
        """See `LinkTable.get`."""
        return self._links.get(cluster_id, link_id)

    def run(
        self,
        link: Link,
        op: Op,
        local: CacheEntry,
        moves: Moves,
        backend_of: dict[int, Backend],
        deadline: Deadline,
    ) -> Ran:
        """Run what is planned, and check it if so set; the caller holds both caches.

        One batch per backend needed; usually one in all.
        """
        batches = [
            (backend, Batch(link.link_id, op, pairs, moves.local_items, moves.remote_items, moves.slices, deadline))
            for backend, pairs in _by_backend(moves, backend_of).items()
        ]
        for _, batch in batches:
            batch.check()
        for backend, batch in batches:
            self._engine.run(backend, batch)
        ran = Ran(sum(batch.num_bytes for _, batch in batches), "+".join(backend.name for backend, _ in batches))
        self._integrity.check(Moved(link, op, local, moves, ran.backend), deadline)
        return ran

    def _transfer(
        self,
        op: Op,
        key: RemoteKey,
        cache: Cache,
        plan: Planner,
        way: Signature | None,
        link_id: int | None,
        deadline: Deadline,
    ) -> TransferReport:
        started_s = time.perf_counter()
        link = self._links.get(key.cluster_id, link_id)
        with link.transferring(), self._table.pinned(cache.cache_id) as local:
            query = lookup_of(key)
            with using(link, query, deadline) as remote:
                met = Met(link, local, remote.cache, remote.batch_index)
                moves = plan(met)
                ran = self.run(link, op, local, moves, remote.cache.backend_of, deadline)
                if way is not None:
                    self.keep_route(way, op, met, moves)
            report = TransferReport(ran.num_bytes, ran.backend, time.perf_counter() - started_s)
            if op is Op.READ and isinstance(key, CacheKey):
                # Not held any more: the owner may free the cache before it answers, and would wait for us.
                self._consume(link, key, query, remote.cache.cache_id)
            return report

    def keep_route(self, way: Signature, op: Op, met: Met, moves: Moves) -> None:
        """Have the next transfer like this one go the short way (`Mover.routes`). Both caches are held."""
        try:
            legs = tuple(
                Leg(backend, pairs, backend.prepare(met.link.link_id, pairs, moves.slices))
                for backend, pairs in _by_backend(moves, met.remote.backend_of).items()
            )
        except LLMException as error:  # such as a link that is on its way down; the transfer was a success
            logger.debug("no short way to cluster %d for now: %s", met.link.peer.cluster_id, error)
            return
        self.routes.keep(way, Route(op, met.link, met.local, met.remote, moves.slices, legs))

    def _consume(self, link: Link, key: CacheKey, query: Lookup, cache_id: int) -> None:
        try:
            link.peer_caches.consume(query, cache_id, Deadline.after(CONSUME_TIMEOUT_S))
        except LLMException as error:
            # The pull itself was a success. A peer that is gone has no keys any more; a slow one drops it later.
            logger.warning("cluster %d could not be told that %r was pulled: %s", key.cluster_id, key, error)


@contextmanager
def using(link: Link, query: Lookup, deadline: Deadline) -> Iterator[KeyedCache]:
    """The peer's cache, held against its being freed. Looked up once more if it was just freed and made anew."""
    found = link.peer_caches.find(query, deadline)
    try:
        held = found.cache.hold()
    except CacheNotExist:
        found = link.peer_caches.find(query, deadline)
        held = found.cache.hold()
    with held:
        yield found


def check_managed(name: str, cache: Cache) -> None:
    """Raise ParamInvalid for a cache that only the caller knows."""
    if cache.cache_id == LOCAL_CACHE_ID:
        raise ParamInvalid(
            f"{name} was made by Cache.create_cpu_cache, which is for swap_blocks only; register_blocks_cache or "
            "register_cache makes the caller's own memory fit for transfers"
        )


def check_movable_blocks(name: str, cache: Cache, instead: str) -> None:
    """Raise ParamInvalid unless it is a blocks cache that a pull or push can use. `instead`: the right call."""
    check_blocks(name, cache, instead)
    check_managed(name, cache)


def lookup_of(key: RemoteKey) -> Lookup:
    if isinstance(key, BlocksCacheKey):
        return Lookup(0, "blocks", key.cluster_id, model_id=key.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return Lookup(0, "id", key.cluster_id, cache_id=key.cache_id, batch_index=key.batch_index)
    return Lookup(0, "cache", key.cluster_id, model_id=key.model_id, req_id=key.req_id, prefix_id=key.prefix_id)


def _by_backend(moves: Moves, backend_of: dict[int, Backend]) -> dict[Backend, tuple[GridPair, ...]]:
    regions = {pair.remote.region_id for pair in moves.pairs}
    if len({backend_of[region_id] for region_id in regions}) == 1:
        return {backend_of[regions.pop()]: tuple(moves.pairs)}
    by_backend: dict[Backend, list[GridPair]] = {}
    for pair in moves.pairs:
        by_backend.setdefault(backend_of[pair.remote.region_id], []).append(pair)
    return {backend: tuple(pairs) for backend, pairs in by_backend.items()}
