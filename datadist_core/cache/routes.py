# SPDX-License-Identifier: Apache-2.0
"""The short way for a pull or push of blocks like one before: what was found out then is used again.

The first transfer between two caches looks the peer's cache up, checks that the two fit, and plans. Its `Route` is kept
with the link, and the next call with the same key, cache and layers only holds both caches, checks its indices and
moves. The short way never says what is wrong with a call: whatever is not as it was, or not as usual, goes the long way
(`mover`), which does it or reports why not.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np

from ..errors import NotYetLinked, ParamInvalid, PeerLost, TimedOut
from ..link.link import Link
from ..link.manager import LinkManager
from ..link.remote import RemoteCache
from ..transfer.backend import Backend, Prepared
from ..transfer.engine import TransferEngine
from ..transfer.item_copy import ItemList, as_items
from ..transfer.plan import Batch, GridPair, Op, Slice
from ..types import Deadline
from .cache import Cache
from .desc import BlocksCacheKey, CacheKeyByIdAndIndex
from .integrity import Integrity, Moved
from .plans import Moves
from .report import TransferReport
from .rules import RemoteKey, Rules
from .table import CacheEntry, CacheTable

#: Of one link; more are forgotten all at once. Users have a few caches, or make new ones all the time. Layer by layer
#: there is one per layer, and per way in which blocks of different sizes meet.
MAX_ROUTES = 1024

_LASTING_KEYS = (BlocksCacheKey, CacheKeyByIdAndIndex)
_INTS_ONLY = {int}
_THREE_ONLY = {3}
_USUAL_LISTS = {list, tuple}


#: What a route depends on besides its link, see `signature_of`.
Signature: TypeAlias = tuple[object, ...]


def signature_of(
    op: Op,
    key: RemoteKey,
    cache: Cache,
    local_layers: range | None,
    remote_layers: range | None,
    tensors_per_layer: int,
    slices: Sequence[Sequence[int]] | None,
) -> Signature | None:
    """Of a call of pull_blocks or push_blocks with these arguments, as they came: not checked yet.

    The type of a number counts: True is not 1 here. None where there are no routes: by other keys, and for slices that
    are not written as usual.
    """
    if type(key) not in _LASTING_KEYS:
        return None
    parts = b"" if slices is None else usual_slices(slices)
    if parts is None:
        return None
    return (op, key, cache, local_layers, remote_layers, tensors_per_layer, type(tensors_per_layer), parts)


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """The part of a route that one backend moves. `prepared` is None where it goes through the engine."""

    backend: Backend
    pairs: tuple[GridPair, ...]
    prepared: Prepared | None


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Transfers of blocks between one cache here and one at a peer.

    Attributes:
        pairs: of all legs.
        bytes_of_one: of one block, over all tensors.
        backend_names: as in a report.
    """

    op: Op
    link: Link
    local: CacheEntry
    remote: RemoteCache
    slices: tuple[Slice, ...]
    legs: tuple[Leg, ...]
    pairs: list[GridPair] = field(init=False)
    bytes_of_one: int = field(init=False)
    backend_names: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", [pair for leg in self.legs for pair in leg.pairs])
        object.__setattr__(self, "bytes_of_one", len(self.pairs) * sum(s.num_bytes for s in self.slices))
        object.__setattr__(self, "backend_names", "+".join(leg.backend.name for leg in self.legs))


class Routes:
    """Thread-safe."""

    def __init__(
        self, engine: TransferEngine, table: CacheTable, links: LinkManager, rules: Rules, integrity: Integrity
    ) -> None:
        self._engine = engine
        self._integrity = integrity
        self._table = table
        self._links = links
        self._rules = rules

    def keep(self, signature: Signature, route: Route) -> None:
        """Until the link ends or the peer frees a cache. Only once the call's arguments are checked."""
        routes = route.link.peer_caches.routes
        if len(routes) >= MAX_ROUTES:
            routes.clear()
        routes[signature] = route

    def again(
        self,
        signature: Signature | None,
        key: RemoteKey,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        deadline_s: float | None,
        link_id: int | None = None,
    ) -> TransferReport | None:
        """Move these blocks, if it can be done the short way; None if not. Raises why a transfer failed.

        Over no other link than `link_id`, if it is given.
        """
        started_s = time.perf_counter()
        if signature is None or (deadline_s is not None and not _is_usual_time(deadline_s)):
            return None
        route = self._known(signature, key.cluster_id, link_id)
        if route is None:
            return None
        local_items, remote_items = usual_items(local_blocks), usual_items(remote_blocks)
        if local_items is None or remote_items is None or len(local_items) != len(remote_items):
            return None
        if not self._run_known(signature, route, local_items, remote_items, deadline_s):
            return None
        num_bytes = len(local_items) * route.bytes_of_one
        return TransferReport(num_bytes, route.backend_names, time.perf_counter() - started_s)

    def again_with(
        self,
        signature: Signature,
        cluster_id: int,
        link_id: int | None,
        local_items: ItemList,
        remote_items: ItemList,
    ) -> bool:
        """The same with checked items, equally many on both sides; whether it was done."""
        route = self._known(signature, cluster_id, link_id)
        return route is not None and self._run_known(signature, route, local_items, remote_items, None)

    def _known(self, signature: Signature, cluster_id: int, link_id: int | None) -> Route | None:
        link = self._links.peek(cluster_id)
        if link is None or link_id not in (None, link.link_id):
            return None
        try:
            route: Route | None = link.peer_caches.routes.get(signature)
        except TypeError:  # an argument that has no hash is of a wrong type
            return None
        return route

    def _run_known(
        self,
        signature: Signature,
        route: Route,
        local_items: ItemList,
        remote_items: ItemList,
        deadline_s: float | None,
    ) -> bool:
        try:
            if self._run_held(route, local_items, remote_items, deadline_s):
                return True
        except TimedOut as error:
            raise self._rules.timed_out(error) from error
        route.link.peer_caches.routes.pop(signature, None)
        return False

    def _run_held(self, route: Route, local_items: ItemList, remote_items: ItemList, deadline_s: float | None) -> bool:
        """False if link or caches are not to be had any more, or if something does not fit."""
        if not route.link.begin_transfer_with(route.remote):
            return False
        try:
            if not self._table.pin_held(route.local):
                return False
            try:
                self._run(route, local_items, remote_items, deadline_s)
            finally:
                self._table.unpin(route.local)
        except ParamInvalid:
            return False
        except (PeerLost, NotYetLinked) as error:
            route.link.data_path_failed(error)
            raise
        finally:
            route.link.end_transfer_with(route.remote)
        return True

    def _run(self, route: Route, local_items: ItemList, remote_items: ItemList, deadline_s: float | None) -> None:
        deadline: Deadline | None = None
        for leg in route.legs:
            if leg.prepared is not None:
                leg.prepared.run(route.op, local_items, remote_items)
                continue
            deadline = deadline or self._rules.deadline(deadline_s)
            items = as_items(local_items), as_items(remote_items)
            batch = Batch(route.link.link_id, route.op, leg.pairs, *items, route.slices, deadline)
            batch.check()
            self._engine.run(leg.backend, batch)
        if self._integrity.enabled:
            moves = Moves(route.pairs, as_items(local_items), as_items(remote_items), route.slices)
            moved = Moved(route.link, route.op, route.local, moves, route.backend_names)
            self._integrity.check(moved, deadline or self._rules.deadline(deadline_s))


def _is_usual_time(seconds: float) -> bool:
    return type(seconds) in (int, float) and seconds > 0


def usual_slices(slices: Sequence[Sequence[int]]) -> bytes | None:
    """Slices as they are passed most of the time, as something to compare; None for anything else, right or wrong."""
    if type(slices) not in _USUAL_LISTS or not set(map(type, slices)) <= _USUAL_LISTS:
        return None
    numbers = list(chain.from_iterable(slices))
    if set(map(type, numbers)) != _INTS_ONLY or set(map(len, slices)) != _THREE_ONLY:
        return None
    try:
        return array("q", numbers).tobytes()
    except OverflowError:
        return None


def usual_items(blocks: Sequence[int]) -> ItemList | None:
    """Block indices as they are passed most of the time; None for anything else, right or wrong."""
    if type(blocks) is list or type(blocks) is tuple:
        if set(map(type, blocks)) != _INTS_ONLY:
            return None
        try:
            return array("q", blocks)
        except OverflowError:
            return None
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.int64 and blocks.ndim == 1 and blocks.flags.c_contiguous:
        return blocks if len(blocks) else None
    return None
