# SPDX-License-Identifier: Apache-2.0
"""Memory that is used again is never taken for what it held before, without any checksum.

What sees to it, and where each piece is tested:

- the ids of caches, grids and regions are numbers that are given out once: an old one names nothing (here);
- before memory is given away, every peer that knows the cache is asked to forget it, and its transfers end: what it
  has worked out about that cache, the short way included, goes with it (here; the races in test_cache_races);
- a CacheKey that was pulled is consumed, and only the cache that was pulled loses it (test_cache_races);
- a peer that does not answer loses its link, and its memory is kept until it can write no more (test_fences);
- the connector's blocks stay in one registered cache while requests come and go: there it is the lease, which P
  confirms as HELD only if it lasted from before the ticket to after the read, and attempt numbers in every key (the
  connector's tests, and its simulation).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, Cache, CacheKeyByIdAndIndex, LLMDataDist, LLMRole
from datadist_core.errors import CacheNotExist, LLMException
from datadist_core.link.answers import Answers
from datadist_core.memory.grid import Grid
from datadist_core.testing.parallel import eventually
from datadist_core.tests.core_ends import config, desc, linked, make_end, manager, must_link, plain_cache
from datadist_core.transfer.plan import Batch, GridPair, Op, whole_item
from datadist_core.types import Deadline

BACKENDS = ["loopback", "shm", "cma", "tcp"]
ROUNDS = 12
WAIT_S = 20.0

every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Owner:
    """P, which registers the same memory again and again under one key, each time with other content."""

    def __init__(self, prompt: LLMDataDist) -> None:
        self._prompt = prompt
        self.memory = plain_cache(prompt, 1)
        self.key = BlocksCacheKey(prompt.cluster_id, 3)
        self.generation = 0
        self.cache = self._register()

    def _register(self) -> Cache:
        self.generation += 1
        for tensor in self.memory.numpy():
            tensor[:] = self.generation
        addresses = self.memory.tensor_addrs
        return manager(self._prompt).register_blocks_cache(desc(), addresses, self.key, remote_accessible=True)

    def register_anew(self) -> None:
        manager(self._prompt).unregister_cache(self.cache.cache_id)
        self.cache = self._register()


def generations_in(cache: Cache, blocks: list[int]) -> set[float]:
    return set().union(*(np.unique(tensor[blocks]).tolist() for tensor in cache.numpy()))


@every_backend
def test_the_same_memory_under_the_same_key(backend: str) -> None:
    with linked(backend) as (p, d):
        owner, mine = Owner(p), plain_cache(d, 2)
        old_ids = set[int]()
        for _ in range(3):
            for _ in range(2):  # the second takes the short way
                manager(d).pull_blocks(owner.key, mine, [1, 2], [7, 8])
                assert generations_in(mine, [7, 8]) == {owner.generation}
            old_ids.add(owner.cache.cache_id)
            owner.register_anew()
            assert owner.cache.cache_id not in old_ids
        for cache_id in old_ids:
            with pytest.raises(CacheNotExist):
                manager(d).pull_blocks(CacheKeyByIdAndIndex(p.cluster_id, cache_id), mine, [1], [1])
        assert generations_in(mine, [7, 8]) == {owner.generation - 1}  # refused, not served from what is there now


@contextmanager
def in_thread(work) -> Iterator[None]:
    """Runs `work` until it returns or the block ends (`work(ended)`). Raises what it raised."""
    failures: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            work(ended)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def pull_while_it_changes(backend: str) -> None:
    """Every pull that succeeds gives one generation, whole, which was current at some moment of the call."""
    with linked(backend) as (p, d):
        owner, mine = Owner(p), plain_cache(d, 2)
        blocks = list(range(16))

        def change(ended: threading.Event) -> None:
            for _ in range(ROUNDS):
                owner.register_anew()
            ended.set()

        with in_thread(change) as _:
            while owner.generation <= ROUNDS:
                before = owner.generation
                try:
                    manager(d).pull_blocks(owner.key, mine, blocks, blocks)
                except CacheNotExist:
                    continue  # between two generations
                came = generations_in(mine, blocks)
                assert len(came) == 1, f"torn between generations {came}"
                assert before <= came.pop() <= owner.generation


@every_backend
def test_memory_that_is_registered_anew_while_a_peer_pulls(backend: str) -> None:
    pull_while_it_changes(backend)


def test_memory_is_not_given_back_before_a_running_pull_has_ended() -> None:
    """The pull is held up between its look-up and its copy."""
    held_s = 0.2
    slow = config("datadist_core.testing.faults:FaultyShm")
    fault = {"kind": "delay", "seconds": held_s}
    slow.global_resource_config = json.dumps({"FaultyShm": {"fault": fault}})
    with make_end("datadist_core.testing.faults:FaultyShm", "127.0.0.1:0") as p, LLMDataDist(LLMRole.MIX, 77) as d:
        d.init(slow)
        must_link(d, p)
        owner, mine, took_s = Owner(p), plain_cache(d, 2), list[float]()
        remote_uses = d._open().links.get(p.cluster_id).peer_caches

        def pull(ended: threading.Event) -> None:
            took_s.append(manager(d).pull_blocks(owner.key, mine, [1], [1]).seconds)
            came.append(generations_in(mine, [1]))

        came: list[set[float]] = []
        for _ in range(10):  # on a busy machine it may be over before this thread sees it
            came.clear()
            with in_thread(pull):
                assert eventually(lambda: came or any(c._num_uses for c in remote_uses._caches.values()), WAIT_S)
                if came:
                    continue
                manager(p).unregister_cache(owner.cache.cache_id)
                for tensor in owner.memory.numpy():
                    tensor[:] = -1
            break
        assert took_s[-1] >= held_s
        assert came == [{1.0}]


@pytest.mark.parametrize("backend", ["shm", "loopback"])
def test_without_revoking_old_memory_would_be_read(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before: shm reads on, and finds what belongs to somebody else."""
    monkeypatch.setattr(Answers, "revoke", lambda self, cache_id, deadline: None)
    if backend == "shm":
        with linked(backend) as (p, d):
            owner, mine = Owner(p), plain_cache(d, 2)
            key = CacheKeyByIdAndIndex(p.cluster_id, owner.cache.cache_id)
            manager(d).pull_blocks(key, mine, [1], [1])
            owner.register_anew()
            manager(d).pull_blocks(key, mine, [1], [1])
            assert generations_in(mine, [1]) == {2}
    else:  # the owner's own check is the second line: the grid's number names nothing any more
        with linked(backend) as (p, d):
            owner, mine = Owner(p), plain_cache(d, 2)
            manager(d).pull_blocks(owner.key, mine, [1], [1])
            owner.register_anew()
            with pytest.raises(CacheNotExist):
                manager(d).pull_blocks(owner.key, mine, [1], [1])


@pytest.mark.parametrize("backend", ["loopback", "tcp"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])
def test_an_owner_that_serves_refuses_an_old_grid(backend: str, op: Op) -> None:
    """Of a peer that goes on using what it was asked to forget."""
    with linked(backend) as (p, d):
        owner, mine = Owner(p), plain_cache(d, 2)
        manager(d).pull_blocks(owner.key, mine, [1], [1])
        parts, link = d._open(), d._open().links.get(p.cluster_id)
        old: Grid = p._open().table.by_id(owner.cache.cache_id).grids[0]
        here = parts.table.by_id(mine.cache_id).grids[0]
        owner.register_anew()
        manager(d).pull_blocks(owner.key, mine, [1], [1])  # attaches the memory again
        one = np.zeros(1, dtype=np.int64)
        batch = Batch(
            link.link_id, op, (GridPair(here, old),), one, one, whole_item(here.item_bytes), Deadline.after(WAIT_S)
        )
        before = mine.numpy()[0][0].copy()
        with pytest.raises(LLMException) as caught:
            parts.engine.run(link.backends[0], batch)
        assert isinstance(caught.value, CacheNotExist), caught.value
        np.testing.assert_array_equal(mine.numpy()[0][0], before)
        assert generations_in(owner.cache, [0]) == {owner.generation}


def test_ids_are_given_out_once() -> None:
    with linked("loopback") as (p, _):
        table, seen, addresses = p._open().table, list[int](), set[int]()
        for _ in range(5):
            cache = plain_cache(p, 1)
            entry = table.by_id(cache.cache_id)
            seen += [cache.cache_id, *(10**9 + grid.grid_id for grid in entry.grids)]
            addresses |= set(cache.tensor_addrs)
            manager(p).deallocate_blocks_cache(cache)
        assert len(addresses) == 4  # the same memory each time
        assert len(set(seen)) == len(seen) == 25
