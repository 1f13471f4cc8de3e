# SPDX-License-Identifier: Apache-2.0
"""Who holds a cache, and what a key names: two linked ends against a model of a page, step by step at random.

The model: a cache is there while its id holds it or, if it was allocated and is contiguous, while it has a key left.
A key names the last entry that it was given to; a peer that pulls by it takes it away. After every step the pool of
the owner must hold exactly the bytes of the caches that are there, and every key must name what the model says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    LLMStatusCode,
    Placement,
)
from datadist_core.errors import CacheNotExist, ParamInvalid
from datadist_core.tests.core_ends import POOL_BYTES, linked, manager

UNSET = 2**64 - 1
PAGE = 1 << 16
#: One batch entry of one tensor fills one page of the pool.
WIDTH = PAGE // 4
NUM_TENSORS = 2


@dataclass(eq=False)
class Known:
    """A cache as the model sees it."""

    cache: Cache
    first_value: int
    batch_size: int
    is_blocks: bool = False
    is_registered: bool = False
    held_by_id: bool = True
    keys: dict[Any, int] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        return self.held_by_id or (bool(self.keys) and not self.is_blocks and not self.is_registered)

    @property
    def pool_bytes(self) -> int:
        return 0 if self.is_registered else NUM_TENSORS * self.batch_size * PAGE


def desc(batch_size: int) -> CacheDesc:
    return CacheDesc(NUM_TENSORS, (batch_size, WIDTH), DataType.DT_INT32, Placement.HOST)


#: (req_id, prefix_id, model_id): few, so that they come again; some that fill an entry and name nothing.
names = st.one_of(
    st.tuples(st.integers(0, 2), st.just(UNSET), st.integers(0, 1)),
    st.tuples(st.just(UNSET), st.integers(0, 1), st.just(0)),
    st.tuples(st.just(UNSET), st.just(UNSET), st.just(0)),
)
models = st.integers(0, 1)


class Keys(RuleBasedStateMachine):
    """`owner` makes caches; `peer` pulls."""

    owner: LLMDataDist
    peer: LLMDataDist
    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Known] = []
        self.by_key: dict[Any, Known] = {}
        self.memory = np.zeros((NUM_TENSORS, 4, WIDTH), dtype=np.int32)
        self.next_value = 1
        self.into = manager(self.peer).allocate_cache(desc(1))
        self.into_blocks = manager(self.peer).allocate_blocks_cache(desc(1))

    def teardown(self) -> None:
        for one in self.all:
            for key in [key for key in one.keys if isinstance(key, CacheKey)]:
                manager(self.owner).remove_cache_key(key)
            manager(self.owner).deallocate_cache(one.cache)
        for cache in (self.into, self.into_blocks):
            manager(self.peer).deallocate_cache(cache)
        for end in (self.owner, self.peer):
            stats = manager(end).pool_stats(Placement.HOST)
            assert (stats.used_bytes, stats.largest_free_bytes) == (0, POOL_BYTES)

    # -- what the owner does

    @rule(target=known, batch_size=st.integers(1, 4), given=st.lists(names, max_size=4), registered=st.booleans())
    def make(self, batch_size: int, given: list[tuple[int, int, int]], registered: bool) -> Known:
        keys = [self.key(name) for name in given[:batch_size]]
        if registered:
            addresses = [int(tensor.ctypes.data) for tensor in self.memory]
            cache = manager(self.owner).register_cache(desc(batch_size), addresses, keys, True)
        else:
            cache = manager(self.owner).allocate_cache(desc(batch_size), keys)
        one = Known(cache, self.next_value, batch_size, is_registered=registered)
        return self.add(one, {key: i for i, key in enumerate(keys) if {key.req_id, key.prefix_id} != {UNSET}})

    @rule(target=known, batch_size=st.integers(1, 3), model=st.none() | models)
    def make_blocks(self, batch_size: int, model: int | None) -> Known:
        key = None if model is None else BlocksCacheKey(self.owner.cluster_id, model)
        cache = manager(self.owner).allocate_blocks_cache(desc(batch_size), key)
        one = Known(cache, self.next_value, batch_size, is_blocks=True)
        return self.add(one, {} if key is None else {key: 0})

    @rule(given=st.lists(names, min_size=2, max_size=4))
    def too_many_keys(self, given: list[tuple[int, int, int]]) -> None:
        """Refused before anything changes."""
        with pytest.raises(ParamInvalid, match="cache_keys"):
            manager(self.owner).allocate_cache(desc(1), [self.key(name) for name in given])

    @rule(one=known)
    def free(self, one: Known) -> None:
        """Also once more, and with whichever call fits."""
        if one.is_registered:
            manager(self.owner).unregister_cache(one.cache.cache_id)
        elif one.is_blocks:
            manager(self.owner).deallocate_blocks_cache(one.cache)
        else:
            manager(self.owner).deallocate_cache(one.cache)
        one.held_by_id = False
        if not one.is_there:
            self.forget_keys(one)

    @rule(name=names)
    def remove_key(self, name: tuple[int, int, int]) -> None:
        key = self.key(name)
        manager(self.owner).remove_cache_key(key)
        self.drop(key)

    # -- what the peer does

    @rule(name=names, into_blocks=st.booleans())
    def pull_by_key(self, name: tuple[int, int, int], into_blocks: bool) -> None:
        key = self.key(name)
        if {key.req_id, key.prefix_id} == {UNSET}:
            with pytest.raises(ParamInvalid, match="exactly one"):
                self.pull(key, into_blocks)
            return
        one = self.by_key.get(key)
        if one is None:
            with pytest.raises(CacheNotExist) as caught:
                self.pull(key, into_blocks)
            assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            return
        self.check_reads(one, one.keys[key], self.pull(key, into_blocks))
        self.drop(key)

    @rule(one=known, index=st.integers(0, 4), into_blocks=st.booleans())
    def pull_by_id(self, one: Known, index: int, into_blocks: bool) -> None:
        key = CacheKeyByIdAndIndex(self.owner.cluster_id, one.cache.cache_id, index)
        if not one.held_by_id:
            with pytest.raises(CacheNotExist):
                self.pull(key, into_blocks)
        elif one.is_blocks or index >= one.batch_size:
            with pytest.raises(ParamInvalid):
                self.pull(key, into_blocks)
        else:
            self.check_reads(one, index, self.pull(key, into_blocks))

    @rule(model=models, index=st.integers(0, 3))
    def pull_block(self, model: int, index: int) -> None:
        key = BlocksCacheKey(self.owner.cluster_id, model)
        one = self.by_key.get(key)
        expected: Any = CacheNotExist if one is None else ParamInvalid if index >= one.batch_size else None
        if expected is None:
            manager(self.peer).pull_blocks(key, self.into_blocks, [index], [0])
            self.check_reads(one, index, self.into_blocks)
        else:
            with pytest.raises(expected):
                manager(self.peer).pull_blocks(key, self.into_blocks, [index], [0])

    @rule(one=consumes(known))
    def free_twice(self, one: Known) -> None:
        self.free(one)
        self.free(one)

    # -- after every step

    @invariant()
    def the_pool_holds_what_is_there_and_nothing_else(self) -> None:
        used = manager(self.owner).pool_stats(Placement.HOST).used_bytes
        assert used == sum(one.pool_bytes for one in self.all if one.is_there)

    @invariant()
    def a_handle_is_of_use_while_its_id_holds(self) -> None:
        for one in self.all[-3:]:
            if one.held_by_id and not one.is_blocks:
                manager(self.owner).copy_cache(one.cache, one.cache, 0, 0)
            elif not one.is_blocks:
                with pytest.raises(CacheNotExist):
                    manager(self.owner).copy_cache(one.cache, one.cache, 0, 0)

    # -- the model

    def key(self, name: tuple[int, int, int]) -> CacheKey:
        req_id, prefix_id, model_id = name
        return CacheKey(self.owner.cluster_id, req_id, model_id, prefix_id)

    def add(self, one: Known, keys: dict[Any, int]) -> Known:
        for i, tensor in enumerate(one.cache.numpy()):
            for index in range(one.batch_size):
                tensor[index] = self.value(one, index, i)
        self.next_value += one.batch_size * NUM_TENSORS
        for key in keys:
            self.drop(key)
            self.by_key[key] = one
        one.keys = keys
        self.all.append(one)
        return one

    def drop(self, key: Any) -> None:
        one = self.by_key.pop(key, None)
        if one is not None:
            del one.keys[key]

    def forget_keys(self, one: Known) -> None:
        for key in list(one.keys):
            self.drop(key)

    def value(self, one: Known, index: int, tensor: int) -> int:
        return one.first_value + index * NUM_TENSORS + tensor

    def pull(self, key: Any, into_blocks: bool) -> Cache:
        if into_blocks:
            manager(self.peer).pull_blocks(key, self.into_blocks, (), [0])
            return self.into_blocks
        manager(self.peer).pull_cache(key, self.into)
        return self.into

    def check_reads(self, one: Known, index: int, into: Cache) -> None:
        if one.is_registered:
            return  # several of them share one memory; what is in it is not the question here
        for i, tensor in enumerate(into.numpy()):
            assert set(np.unique(tensor).tolist()) == {self.value(one, index, i)}


@pytest.mark.parametrize("backend", ["loopback", pytest.param("tcp", marks=pytest.mark.slow)])
def test_keys_and_ids_hold_what_they_should(backend: str) -> None:
    with linked(backend) as (p, d):

        class OfThese(Keys):
            owner, peer = p, d

        run_state_machine_as_test(
            OfThese,
            settings=settings(
                max_examples=settings.default.max_examples // 2, stateful_step_count=30, deadline=None, database=None
            ),
        )


def test_the_last_of_two_equal_keys_counts() -> None:
    with linked("loopback") as (p, d):
        key, other = CacheKey(p.cluster_id, 1), CacheKey(p.cluster_id, 2)
        cache = manager(p).allocate_cache(desc(3), [key, other, key])
        for i, tensor in enumerate(cache.numpy()):
            tensor[:] = np.arange(3)[:, None] * 10 + i
        del tensor  # a view keeps the memory
        into = manager(d).allocate_cache(desc(1))
        manager(p).deallocate_cache(cache)
        manager(d).pull_cache(key, into)
        assert [int(tensor[0, 0]) for tensor in into.numpy()] == [20, 21]
        assert manager(p).pool_stats(Placement.HOST).used_bytes == NUM_TENSORS * 3 * PAGE
        manager(d).pull_cache(other, into)
        assert [int(tensor[0, 0]) for tensor in into.numpy()] == [10, 11]
        assert manager(p).pool_stats(Placement.HOST).used_bytes == 0


def test_a_pull_that_fails_takes_no_key_away() -> None:
    with linked("loopback") as (p, d):
        key = CacheKey(p.cluster_id, 1)
        cache = manager(p).allocate_cache(desc(2), [key])
        manager(p).deallocate_cache(cache)
        wrong = manager(d).allocate_cache(CacheDesc(3, (1, WIDTH), DataType.DT_INT32, Placement.HOST))
        for _ in range(2):
            with pytest.raises(ParamInvalid, match="tensors"):
                manager(d).pull_cache(key, wrong)
        manager(d).pull_cache(key, manager(d).allocate_cache(desc(1)))
        with pytest.raises(CacheNotExist):
            manager(d).pull_cache(key, wrong)


@pytest.mark.parametrize("cache_id", [0, UNSET])
def test_an_id_that_no_cache_has_names_nothing(cache_id: int) -> None:
    """0 is the link's own test memory: nobody's cache."""
    with linked("loopback") as (p, d):
        bytes_of_it = CacheDesc(1, (1, 64), DataType.DT_UINT8, Placement.HOST)
        into = manager(d).allocate_blocks_cache(bytes_of_it)
        with pytest.raises(CacheNotExist):
            manager(d).pull_blocks(CacheKeyByIdAndIndex(p.cluster_id, cache_id), into, [0], [0])
        d.check_link_status(p.cluster_id)
