# SPDX-License-Identifier: Apache-2.0
"""Making and freeing this side's caches, and their keys.

Before memory is given up, or a key comes to mean something else, every linked peer that knows the cache is asked to
forget it, and its running transfers end (`Link.answers.revoke`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from ..checks import check_type
from ..errors import CacheNotExist, LLMException, ParamInvalid, TimedOut
from ..link.fanout import run_all
from ..link.link import Link
from ..link.manager import LinkManager
from ..types import Deadline, Placement
from .cache import Cache, check_addrs
from .desc import UNSET_ID, BlocksCacheKey, CacheDesc, CacheKey
from .rules import Rules
from .store import CacheStore
from .table import CacheEntry, CacheTable, Dropped, Key

logger = logging.getLogger(__name__)

#: When a cache is freed, peers get this long to end their transfers on it.
REVOKE_TIMEOUT_S = 6.0
#: Then whatever still uses its memory at this end gets this long.
SETTLE_TIMEOUT_S = 6.0
#: And a peer that has lost its link, but may be stopped in the middle of a copy. Its memory is kept for longer.
FENCE_WAIT_S = 1.0


class CacheKeeper:
    """Thread-safe."""

    def __init__(self, cluster_id: int, rules: Rules, store: CacheStore, table: CacheTable, links: LinkManager) -> None:
        self._cluster_id = cluster_id
        self._rules = rules
        self._store = store
        self._table = table
        self._links = links

    def allocate(self, desc: CacheDesc, keys: dict[Key, int], is_blocks_cache: bool) -> Cache:
        return self._add(self._store.allocate(desc, is_blocks_cache), keys)

    def register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: dict[Key, int],
        is_blocks_cache: bool,
        accessible: bool | None,
    ) -> Cache:
        """`accessible` None means: DEVICE memory is, HOST memory is not."""
        check_type("cache_desc", desc, CacheDesc)
        check_addrs(desc, addrs)
        if accessible is None:
            accessible = desc.placement is Placement.DEVICE
        check_type("remote_accessible", accessible, bool)
        return self._add(self._store.register(desc, addrs, is_blocks_cache, accessible), keys)

    def drop_id(self, cache_id: int) -> None:
        """Drop the id's hold; the memory goes if no key holds it. Unknown ids are a no-op."""
        dropped = self._table.drop_id(cache_id)
        if dropped is not None and not dropped.retired:
            self._revoke(cache_id, keep_links=True)  # peers may not go on naming it by its id
        self._settle(dropped)

    def unregister(self, cache_id: int) -> None:
        """Give registered memory back. Unknown ids are a no-op; ParamInvalid for a cache from the pool."""
        try:
            is_registered = self._table.by_id(cache_id).is_registered
        except CacheNotExist:
            return
        if not is_registered:
            raise ParamInvalid(f"cache_id={cache_id} was allocated, not registered; use deallocate_cache")
        self.drop_id(cache_id)

    def drop_key(self, key: CacheKey, of_cache_id: int | None = None) -> None:
        """Drop one key; the memory goes if nothing else holds it. Unknown keys are a no-op.

        Args:
            of_cache_id: only if the key names that cache; None for whatever it names.
        """
        self._settle(self._table.drop_key(key, of_cache_id))

    # -- keys

    def blocks_keys(self, key: BlocksCacheKey | None) -> dict[Key, int]:
        """The key of a blocks cache, checked."""
        if key is None:
            return {}
        check_type("blocks_cache_key", key, BlocksCacheKey)
        self._check_own("blocks_cache_key", key)
        self._rules.check_may_hold_keys("blocks_cache_key")
        return {key: 0}

    def batch_keys(self, desc: CacheDesc, keys: Sequence[CacheKey]) -> dict[Key, int]:
        """One key per batch entry, checked; a repeated one names the last of its entries."""
        check_type("cache_desc", desc, CacheDesc)
        check_type("cache_keys", keys, list, tuple)
        for i, key in enumerate(keys):
            check_type(f"cache_keys[{i}]", key, CacheKey)
        desc.check_usable()
        if len(keys) > desc.batch_size:
            raise ParamInvalid(
                f"cache_keys has {len(keys)} keys for a batch size of {desc.batch_size}; give at most one each"
            )
        used: dict[Key, int] = {}
        for i, key in enumerate(keys):
            if not _is_filler(key):
                check_one_id(f"cache_keys[{i}]", key)
                self._check_own(f"cache_keys[{i}]", key)
                used[key] = i
        if used:
            self._rules.check_may_hold_keys("cache_keys")
        return used

    def _check_own(self, name: str, key: Key) -> None:
        if key.cluster_id != self._cluster_id:
            raise ParamInvalid(f"{name}.cluster_id={key.cluster_id} must be this cluster's own id, {self._cluster_id}")

    # -- inside

    def _add(self, entry: CacheEntry, keys: dict[Key, int]) -> Cache:
        entry.key_to_index = keys
        for dropped in self._table.add(entry):
            if dropped.retired:
                self._settle(dropped)
            else:
                # Peers that know the older cache by such a key must ask again. That cache goes on to exist: a peer
                # that is slow to answer does no harm.
                self._revoke(dropped.entry.cache_id, keep_links=True)
        return entry.cache

    def _settle(self, dropped: Dropped | None) -> None:
        if dropped is not None and dropped.retired:
            entry = dropped.entry
            silent = self._revoke(entry.cache_id)
            writers = [*silent, *self._links.who_may_write(entry.cache_id)]
            self._keep_from(writers, entry)
            wait_s = FENCE_WAIT_S if writers else SETTLE_TIMEOUT_S
            if not self._table.settle(entry, Deadline.after(wait_s)):
                self._tell_kept(entry, writers)

    def _keep_from(self, writers: Sequence[Link], entry: CacheEntry) -> None:
        """The memory of a retired cache is not given up before none of these peers can write to it any more."""
        if writers:
            self._table.serve_retired(entry)
            self._links.fences.when_fenced(writers, partial(self._table.end_serving, entry))

    def _tell_kept(self, entry: CacheEntry, writers: Sequence[Link]) -> None:
        """Its memory cannot be given up yet. What is ours will be later; the caller's own is the caller's concern."""
        why = "a transfer of this end still uses its memory; keep that memory until the transfer has ended"
        if writers:
            names = ", ".join(str(link.peer.cluster_id) for link in writers)
            why = f"cluster {names} may still write to its memory; it is kept until that process goes on or has ended"
        if entry.is_registered:
            raise TimedOut(f"cache_id={entry.cache_id} is gone, but {why}")
        logger.warning("cache %d is freed, but %s", entry.cache_id, why)

    def _revoke(self, cache_id: int, keep_links: bool = False) -> list[Link]:
        """Have every linked peer forget a cache, all at once. Returns who did not: they lose their links (unless
        `keep_links`), and may still be writing."""
        deadline = Deadline.after(REVOKE_TIMEOUT_S)
        links = [link for link in self._links.links() if link.answers.has_told_of(cache_id)]
        calls = [partial(_revoke_at, link, cache_id, deadline, keep_links) for link in links]
        # Nearly always there is one, and it needs no thread. Each ends by the deadline.
        let_go = [calls[0]()] if len(calls) == 1 else run_all("revoke", calls, Deadline.never(), False)
        return [link for link, has_let_go in zip(links, let_go, strict=True) if not has_let_go]


def _revoke_at(link: Link, cache_id: int, deadline: Deadline, keep_link: bool) -> bool:
    """Whether the peer has let go of the cache."""
    try:
        link.answers.revoke(cache_id, deadline)
    except LLMException as error:
        logger.info("cluster %d did not let go of cache %d: %s", link.peer.cluster_id, cache_id, error)
        if not keep_link:
            link.close(error)
        return False
    return True


def check_one_id(name: str, key: CacheKey) -> None:
    """Raise ParamInvalid unless exactly one of req_id and prefix_id is set."""
    if (key.req_id == UNSET_ID) == (key.prefix_id == UNSET_ID):
        raise ParamInvalid(
            f"{name}={key!r} must have exactly one of req_id and prefix_id; the other one is 2**64-1 (not set)"
        )


def _is_filler(key: CacheKey) -> bool:
    return key.req_id == UNSET_ID and key.prefix_id == UNSET_ID
