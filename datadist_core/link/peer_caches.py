# SPDX-License-Identifier: Apache-2.0
"""What one link knows of the peer's caches: asked for once, used many times, forgotten when the owner says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CacheNotExist, LinkFailed, ProtocolError, TimedOut, Unreachable
from ..transfer.backend import Backend
from ..types import Deadline
from ..wire import messages as m
from .probe import attach_region
from .remote import KeyedCache, RemoteCache, RemotePlace

if TYPE_CHECKING:
    from .link import Link

logger = logging.getLogger(__name__)

#: How long an owner that frees a cache waits for this end's running transfers.
REVOKE_WAIT_S = 5.0
#: Kinds of look-up whose answer holds until the owner revokes the cache. A CacheKey may be dropped before.
_LASTING_KINDS = frozenset({"blocks", "id"})

Request = Callable[[Callable[[int], m.AnyMessage], Deadline], m.AnyMessage]


class PeerCaches:
    """Thread-safe. Caches that this returns are attached: ready to be read and written."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._caches: dict[int, RemoteCache] = {}
        #: Revoked, but with transfers that have not ended.
        self._leaving: set[RemoteCache] = set()
        self._keyed: dict[m.Lookup, KeyedCache] = {}
        #: What the layer above has worked out about these caches; forgotten when the peer frees one.
        self.routes: dict[Any, Any] = {}

    def find(self, query: m.Lookup, deadline: Deadline) -> KeyedCache:
        """The peer's cache for a query (`request_id` 0), from what we know or by asking.

        Raises:
            CacheNotExist, ParamInvalid: the peer's answer.
            LinkFailed: no backend of the link reaches it. PeerLost, TimedOut.
        """
        with self._lock:
            known = self._keyed.get(query)
        if known is not None and not known.cache.revoked:
            return known
        answer = self._link.request(lambda i: msgspec.structs.replace(query, request_id=i), deadline)
        if not isinstance(answer, m.Found):
            raise ProtocolError(f"the peer answered a Lookup with {type(answer).__name__}")
        found = KeyedCache(self._told(answer.cache.cache_id, deadline), answer.cache.batch_index)
        if not 0 <= found.batch_index < found.cache.layout.batch_size:
            raise ProtocolError(f"the peer names batch entry {found.batch_index} of its cache {found.cache.cache_id}")
        if query.kind in _LASTING_KINDS:
            with self._lock:
                if self._caches.get(found.cache.cache_id) is found.cache:  # not forgotten meanwhile
                    self._keyed[query] = found
        return found

    def locate(self, addresses: Sequence[int], deadline: Deadline) -> list[RemotePlace]:
        """Where addresses of the peer's memory lie. ParamInvalid if one is in no cache that we may use."""
        answer = self._link.request(lambda i: m.Locate(i, list(addresses)), deadline)
        if not isinstance(answer, m.Located) or len(answer.places) != len(addresses):
            raise ProtocolError(f"the peer answered a Locate of {len(addresses)} addresses wrongly")
        return [self._place(place, deadline) for place in answer.places]

    def consume(self, key: m.Lookup, cache_id: int, deadline: Deadline) -> None:
        """Tell the owner that we have pulled what `key` stood for in that cache, so that it drops the key."""
        self._link.request(lambda i: m.Consume(i, cache_id, key.model_id, key.req_id, key.prefix_id), deadline)

    def learn(self, infos: Sequence[m.CacheInfo]) -> None:
        """The peer has told us of caches. Called as its message arrives, so that a Revoke right behind it finds
        them. Raises ParamInvalid if a description is not sound."""
        told = [RemoteCache(info, self._link.lock) for info in infos]
        with self._lock:
            for remote in told:
                self._caches.setdefault(remote.cache_id, remote)

    def forget(self, cache_id: int) -> RemoteCache | None:
        """The peer frees a cache: start nothing new on it. `await_end` comes next. None if we do not know it."""
        with self._lock:
            remote = self._caches.pop(cache_id, None)
            self.routes.clear()
            self._keyed = {k: v for k, v in self._keyed.items() if v.cache.cache_id != cache_id}
            if remote is not None:
                self._leaving.add(remote)
            return remote

    def await_end(self, remote: RemoteCache) -> None:
        """Wait for what is running on a forgotten cache. TimedOut if that lasts; `let_go` is for the rest then."""
        if not remote.revoke(Deadline.after(REVOKE_WAIT_S)):
            raise TimedOut(f"a transfer on cache {remote.cache_id} is still running")
        self.let_go(remote)

    def let_go(self, remote: RemoteCache) -> None:
        """Detach a forgotten cache's regions once nothing is running on it, however late that is. Idempotent."""
        remote.revoke(Deadline.never())
        with self._lock:
            if remote in self._leaving:
                self._leaving.discard(remote)
                self._detach_unneeded(remote)

    def _detach_unneeded(self, gone: RemoteCache) -> None:
        """With the lock held: a cache in the same memory may become known at any time, and relies on its regions."""
        needed = {r.region_id for c in (*self._caches.values(), *self._leaving) for r in c.info.regions}
        for region_id, backend in gone.backend_of.items():
            if region_id not in needed and not self._is_beacon_region(region_id):
                backend.detach(self._link.link_id, region_id)

    def _place(self, place: m.Place, deadline: Deadline) -> RemotePlace:
        cache = self._told(place.cache_id, deadline)
        if not 0 <= place.tensor < len(cache.layout.grids) or place.offset_bytes < 0:
            raise ProtocolError(f"the peer names tensor {place.tensor} of its cache {place.cache_id}, which has it not")
        return RemotePlace(cache, place.tensor, place.offset_bytes)

    def _told(self, cache_id: int, deadline: Deadline) -> RemoteCache:
        """A cache that the peer has just told us of, attached."""
        with self._lock:
            remote = self._caches.get(cache_id)
        if remote is None:
            raise CacheNotExist(f"cache {cache_id} was freed by its owner meanwhile")
        with remote.hold():  # what is attached here is detached by the Revoke that waits for us
            for region in remote.info.regions:
                if region.region_id not in remote.backend_of:
                    remote.backend_of[region.region_id] = self._attach(region, deadline)
        return remote

    def _attach(self, region: m.RegionInfo, deadline: Deadline) -> Backend:
        """Through the best backend that reaches the region."""
        link, reasons = self._link, list[str]()
        for backend in link.backends:
            try:
                attach_region(backend, link.link_id, region, deadline)
            except Unreachable as error:
                reasons.append(f"{backend.name}: {error}")
                continue
            if reasons:
                logger.info(
                    "link to cluster %d uses %s for one region (%s)", link.peer.cluster_id, backend.name, reasons
                )
            return backend
        raise LinkFailed(f"no backend of the link reaches region {region.region_id}: {'; '.join(reasons)}")

    def _is_beacon_region(self, region_id: int) -> bool:
        beacon = self._link.peer.beacon
        return beacon is not None and beacon.region.region_id == region_id
