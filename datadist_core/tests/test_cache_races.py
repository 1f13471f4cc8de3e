# SPDX-License-Identifier: Apache-2.0
"""Freeing, renaming and moving caches at the same time, at both ends: whoever is told "done" has the right bytes.

Every cache is filled with one number that no other cache has; a pull that succeeds must have brought a number that
its key has stood for, and one only. The races that need a certain moment are made with hooks, the others are
searched for by threads that do as much as they can for a bounded number of rounds.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from datadist_core.errors import CacheNotExist, LinkFailed, ParamInvalid, ProtocolError, TimedOut
from datadist_core.link.remote import RemoteCache
from datadist_core.memory.live import live_ranges
from datadist_core.tests.core_ends import (
    LINK_MS,
    cluster_info,
    filled_cache,
    linked,
    make_end,
    manager,
    must_link,
    plain_cache,
)
from datadist_core.types import Deadline
from datadist_core.wire import messages as m

#: One whose owner takes no part in a transfer, and one whose owner serves it.
BACKENDS = ("shm", "tcp")
OK = LLMStatusCode.LLM_SUCCESS
#: Longer than anything here may take; nothing waits that long unless it hangs.
HANGS_S = 30
DESC = CacheDesc(2, (4, 1024), DataType.DT_INT32, Placement.HOST)
_numbers = itertools.count(1)


def make(end: LLMDataDist, *keys: CacheKey, desc: CacheDesc = DESC) -> tuple[Cache, int]:
    """A contiguous cache and the number that it is full of."""
    cache = manager(end).allocate_cache(desc, list(keys))
    return cache, fill(cache)


def make_blocks(end: LLMDataDist, key: BlocksCacheKey | None = None) -> tuple[Cache, int]:
    cache = manager(end).allocate_blocks_cache(DESC, key)
    return cache, fill(cache)


def fill(cache: Cache, number: int | None = None) -> int:
    number = next(_numbers) if number is None else number
    for tensor in cache.numpy():
        tensor[:] = number
    return number


def numbers_in(cache: Cache, index: int = 0) -> set[int]:
    return set().union(*(np.unique(tensor[index]).tolist() for tensor in cache.numpy()))


def used_bytes(end: LLMDataDist) -> int:
    return manager(end).pool_stats(Placement.HOST).used_bytes


def link_of(end: LLMDataDist, peer: LLMDataDist):
    return end._open().links.get(peer.cluster_id)


def pull(end: LLMDataDist, key: CacheKey | CacheKeyByIdAndIndex, into: Cache) -> int | None:
    """The number that came, or None if the owner does not know the key (any more)."""
    fill(into, -1)
    try:
        manager(end).pull_cache(key, into)
    except CacheNotExist:
        return None
    (number,) = numbers_in(into)
    return number


def soon() -> Deadline:
    return Deadline.after(HANGS_S)


class Threads:
    """Run functions at once; the first error of any comes out at the end, and a thread that hangs is an error."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, function: Callable[..., Any], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(*args)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name="datadist-test")
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANGS_S)
        assert not [thread for thread in self._threads if thread.is_alive()], "a thread hangs"
        if self._errors:
            raise self._errors[0]


@contextmanager
def together(*functions: Callable[[], Any]) -> Iterator[Threads]:
    threads = Threads()
    for function in functions:
        threads.start(function)
    yield threads
    threads.join()


def until(condition: Callable[[], Any], what: str) -> None:
    event = threading.Event()
    for _ in range(HANGS_S * 200):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError(f"never: {what}")


@contextmanager
def meanwhile(function: Callable[[], Any]) -> Iterator[None]:
    """Within the block another thread calls the function again and again, at least once."""
    stop, threads = threading.Event(), Threads()
    called = threading.Event()

    def call_on() -> None:
        try:
            while not stop.is_set():
                function()
                called.set()
        finally:
            called.set()

    threads.start(call_on)
    try:
        assert called.wait(HANGS_S)
        yield
    finally:
        stop.set()
        threads.join()


class Released(LayerSynchronizer):
    """Releases every layer; a hook may do something first."""

    def __init__(self, before: Callable[[int], None] = lambda layer: None) -> None:
        self._before = before

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self._before(layer_index)
        return True


@pytest.fixture(params=BACKENDS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    with linked(request.param) as both:
        yield both


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    """For what is the same over every backend."""
    with linked("loopback") as both:
        yield both


# -- moments that matter


def test_a_revoke_does_not_overtake_the_answer_that_tells_of_the_cache(ends, monkeypatch) -> None:
    """Else the peer is asked to forget what it does not know yet, learns of it after that, and reads freed memory."""
    p, d = ends
    cache, number = make(p)
    into, _ = make(d)
    link, send, freeing = link_of(p, d), link_of(p, d).send, Threads()

    def free_and_reuse() -> None:
        manager(p).deallocate_cache(cache)
        make(p)

    def send_late(message: m.AnyMessage) -> None:
        if isinstance(message, m.Found):
            freeing.start(free_and_reuse).join(0.2)  # long enough to overtake, if that is possible
        send(message)

    monkeypatch.setattr(link, "send", send_late)
    assert pull(d, CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id), into) in (number, None)
    freeing.join()
    assert used_bytes(p) == DESC.size * DESC.num_tensors + 32768  # one cache, in pages of 64 KiB


def test_a_stale_key_is_not_remembered(ends, monkeypatch) -> None:
    """The key moves to another cache while the answer to a look-up of it is on its way."""
    p, d = ends
    key = BlocksCacheKey(p.cluster_id)
    make_blocks(p, key)
    into, _ = make_blocks(d)
    link, send, moving, newer = link_of(p, d), link_of(p, d).send, Threads(), []

    def send_late(message: m.AnyMessage) -> None:
        if isinstance(message, m.Found) and not newer:
            newer.append(None)
            moving.start(lambda: newer.append(make_blocks(p, key)[1])).join(0.2)
        send(message)

    monkeypatch.setattr(link, "send", send_late)
    with suppress(CacheNotExist):
        manager(d).pull_blocks(key, into, [0], [0])
    moving.join()
    manager(d).pull_blocks(key, into, [0], [0])
    assert numbers_in(into) == {newer[1]}


def test_freeing_one_cache_does_not_cut_off_another_in_the_same_memory(ends) -> None:
    """The peer learns of the second one while it waits for its transfers on the first, the only one it knew."""
    p, d = ends
    first, _ = make(p)
    second, number = make(p)
    into, _ = make(d)
    assert pull(d, CacheKeyByIdAndIndex(p.cluster_id, first.cache_id), into) is not None
    remote = link_of(d, p).peer_caches._caches[first.cache_id]
    with together() as threads, remote.hold():
        threads.start(manager(p).deallocate_cache, first)
        until(lambda: remote.revoked, "the peer is asked to forget the first cache")
        assert pull(d, CacheKeyByIdAndIndex(p.cluster_id, second.cache_id), into) == number
    assert pull(d, CacheKeyByIdAndIndex(p.cluster_id, second.cache_id), into) == number


def test_freeing_one_cache_does_not_cut_off_a_transfer_on_another_that_is_freed_too(ends) -> None:
    p, d = ends
    caches = [make(p)[0] for _ in range(2)]
    into, _ = make(d)
    for cache in caches:
        assert pull(d, CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id), into) is not None
    peer_caches = link_of(d, p).peer_caches
    remote = peer_caches._caches[caches[0].cache_id]
    backend = link_of(d, p).backends[0]
    detached: list[int] = []
    with together() as threads, remote.hold():
        threads.start(manager(p).deallocate_cache, caches[0])
        until(lambda: remote.revoked, "the peer is asked to forget the first cache")
        detach, backend.detach = backend.detach, lambda link_id, region_id: detached.append(region_id)
        try:
            manager(p).deallocate_cache(caches[1])
        finally:
            backend.detach = detach
        assert not detached


def test_a_key_that_names_another_cache_when_its_pull_ends_is_kept(ends, monkeypatch) -> None:
    p, d = ends
    key = CacheKey(p.cluster_id, 7)
    _, first = make(p, key)
    into, _ = make(d)
    peer_caches = link_of(d, p).peer_caches
    consume, second = peer_caches.consume, []

    def consume_late(*args: Any) -> None:
        if not second:
            second.append(make(p, key)[1])
        consume(*args)

    monkeypatch.setattr(peer_caches, "consume", consume_late)
    assert pull(d, key, into) == first
    assert pull(d, key, into) == second[0]
    assert pull(d, key, into) is None


def test_a_pull_that_has_ended_drops_no_key_of_a_peer_that_has_come_back() -> None:
    """The link it ran on is gone; a new one to the same cluster id leads to another life of it."""
    with make_end("tcp", role=LLMRole.DECODER) as d:
        into, _ = make(d)
        with make_end("tcp", "127.0.0.1:0", cluster_id=77) as old, make_end("tcp", "127.0.0.1:0", cluster_id=77) as new:
            key = CacheKey(77, 7)
            _, first = make(old, key)
            _, second = make(new, key)
            must_link(d, old)
            peer_caches = link_of(d, old).peer_caches
            consume = peer_caches.consume

            def consume_late(*args: Any) -> None:
                assert d.unlink_clusters([cluster_info(old)], timeout=LINK_MS, force=True)[0] is OK
                must_link(d, new)
                consume(*args)

            peer_caches.consume = consume_late
            assert pull(d, key, into) == first
            assert pull(d, key, into) == second


def test_a_living_cache_that_loses_its_key_keeps_its_link(ends, monkeypatch) -> None:
    """The peer is still busy with the older cache. Nothing of that is freed, so the link need not go."""
    p, d = ends
    key = BlocksCacheKey(p.cluster_id)
    make_blocks(p, key)
    into, _ = make_blocks(d)
    manager(d).pull_blocks(key, into, [0], [0])
    monkeypatch.setattr("datadist_core.link.peer_caches.REVOKE_WAIT_S", 0.1)
    with link_of(d, p).peer_caches.find(m.Lookup(0, "blocks", p.cluster_id), soon()).cache.hold():
        _, newer = make_blocks(p, key)
    manager(d).pull_blocks(key, into, [0], [0])
    assert numbers_in(into) == {newer}


def test_a_task_goes_on_in_the_cache_it_began_with(ends) -> None:
    """By address: that another cache takes the key is nothing to it. By key: layers must not land in two caches."""
    p, d = ends
    key = BlocksCacheKey(d.cluster_id)
    four = CacheDesc(4, (4, 1024), DataType.DT_INT32, Placement.HOST)
    source = manager(p).allocate_blocks_cache(four)
    number = fill(source)
    target = manager(d).allocate_blocks_cache(four, key)

    def take_the_key(layer: int) -> None:
        if layer == 1:
            until(lambda: set(np.unique(target.numpy()[1][2])) == {number}, "the first layer is there")
            manager(d).allocate_blocks_cache(four, key)

    by_key = manager(p).transfer_cache_async(
        source, Released(take_the_key), [TransferWithCacheKeyConfig(key)], [0, 1], [2, 3]
    )
    assert by_key.get_results(HANGS_S * 1000) == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST]
    fill(target, -1)
    config = TransferConfig(d.cluster_id, target.tensor_addrs)
    manager(d).register_blocks_cache(four, target.tensor_addrs, key, True)  # may be where the peer finds the addresses

    by_address = manager(p).transfer_cache_async(source, Released(take_the_key), [config], [0, 1], [2, 3])
    assert by_address.get_results(HANGS_S * 1000) == [OK]
    assert all(set(np.unique(t[2:])) == {number} and set(np.unique(t[:2])) == {-1} for t in target.numpy())


def test_a_task_does_not_follow_an_address_into_another_cache(ends) -> None:
    p, d = ends
    four = CacheDesc(4, (4, 1024), DataType.DT_INT32, Placement.HOST)
    source = manager(p).allocate_blocks_cache(four)
    number = fill(source)
    target = manager(d).allocate_blocks_cache(four)
    again: list[Cache] = []

    def replace(layer: int) -> None:
        if layer == 1:
            until(lambda: set(np.unique(target.numpy()[1][2])) == {number}, "the first layer is there")
            manager(d).deallocate_blocks_cache(target)
            again.append(manager(d).allocate_blocks_cache(four))
            fill(again[0], -1)

    config = TransferConfig(d.cluster_id, target.tensor_addrs)
    task = manager(p).transfer_cache_async(source, Released(replace), [config], [0, 1], [2, 3])
    assert task.get_results(HANGS_S * 1000) == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST]
    assert again[0].tensor_addrs == target.tensor_addrs  # else this shows nothing
    assert all(set(np.unique(tensor)) == {-1} for tensor in again[0].numpy())


def test_an_address_in_two_caches_is_taken_where_there_is_more_room(ends) -> None:
    p, d = ends
    whole = manager(d).allocate_blocks_cache(DESC)
    part = CacheDesc(2, (1, 256), DataType.DT_INT32, Placement.HOST)
    manager(d).register_blocks_cache(part, whole.tensor_addrs, None, True)
    fill(whole, -1)
    source, number = make_blocks(p)
    config = TransferConfig(d.cluster_id, whole.tensor_addrs)
    task = manager(p).transfer_cache_async(source, Released(), [config], [0], [3])
    assert task.get_results(HANGS_S * 1000) == [OK], task.errors
    assert all(tensor[3, 0] == number and tensor[0, 0] == -1 for tensor in whole.numpy())


# -- many threads


def test_two_peers_pull_the_same_key_at_once(ends) -> None:
    p, d = ends
    backend = link_of(d, p).backends[0].name
    with make_end(backend, role=LLMRole.DECODER) as other:
        must_link(other, p)
        intos = {end: make(end)[0] for end in (d, other)}
        for round_number in range(30):
            key = CacheKey(p.cluster_id, round_number)
            cache, number = make(p, key)
            manager(p).deallocate_cache(cache)
            came: list[int | None] = []

            def pull_it(end: LLMDataDist, key: CacheKey = key, came: list[int | None] = came) -> None:
                came.append(pull(end, key, intos[end]))

            with together(partial(pull_it, d), partial(pull_it, other)):
                pass
            assert set(came) in ({number}, {number, None})
            assert used_bytes(p) == 0
            assert pull(d, key, intos[d]) is None


def test_both_ends_allocate_pull_push_and_free_at_once(ends) -> None:
    """Deadlocks, wrong bytes, links that get lost, memory that does not come back."""
    rounds = 25
    told: dict[int, int] = {}  # cache id -> its number

    def owner(end: LLMDataDist, me: int) -> None:
        mine: list[tuple[Cache, Cache]] = []

        def free() -> None:
            memory, keyed = mine.pop(0)
            manager(end).unregister_cache(keyed.cache_id)
            manager(end).deallocate_cache(memory)

        for i in range(rounds):
            memory, number = make(end)
            told[memory.cache_id] = number
            # Named only now: a key given to `allocate_cache` can be pulled before the cache is full.
            key = CacheKey(end.cluster_id, 100 * me + i % 7)
            mine.append((memory, manager(end).register_cache(DESC, memory.tensor_addrs, [key], True)))
            if len(mine) > 3:
                free()
        while mine:
            free()

    def puller(end: LLMDataDist, peer: LLMDataDist) -> None:
        into, _ = make(end)
        for i in range(rounds):
            number = pull(end, CacheKey(peer.cluster_id, 100 * (i % 2) + i % 7), into)
            assert number is None or number in told.values()
            for cache_id, number in list(told.items())[-3:]:
                assert pull(end, CacheKeyByIdAndIndex(peer.cluster_id, cache_id), into) in (number, None)
        manager(end).deallocate_cache(into)

    p, d = ends
    owners = [partial(owner, end, i) for end in ends for i in range(2)]
    pullers = [partial(puller, end, peer) for end, peer in ((p, d), (d, p)) for _ in range(2)]
    with together(*owners, *pullers):
        pass
    for end, peer in ((p, d), (d, p)):
        end.check_link_status(peer.cluster_id)
        assert used_bytes(end) == 0
        assert not link_of(end, peer).peer_caches._leaving


def test_a_key_that_moves_while_it_is_pulled_gives_one_cache_or_the_other(ends) -> None:
    p, d = ends
    key, blocks = BlocksCacheKey(p.cluster_id), [0, 1, 2, 3]
    full = [make_blocks(p) for _ in range(2)]
    into, _ = make_blocks(d)
    named: list[Cache] = []

    def move() -> None:
        """To the other memory; the cache that had the key goes a little later."""
        memory, _ = full[len(named) % 2]
        named.append(manager(p).register_blocks_cache(DESC, memory.tensor_addrs, key, True))
        if len(named) > 1:
            manager(p).unregister_cache(named[-2].cache_id)

    came = []
    with meanwhile(move):
        while len(came) < 30:
            with suppress(CacheNotExist):
                manager(d).pull_blocks(key, into, blocks, blocks)
                came.append(set().union(*(numbers_in(into, block) for block in blocks)))
    assert all(numbers in ({full[0][1]}, {full[1][1]}) for numbers in came)


def test_own_memory_comes_and_goes_while_peers_ask(ends) -> None:
    """What a peer asks for and is just unregistered is "not there", never a bad argument; others do not notice."""
    p, d = ends
    source, number = make_blocks(p)
    target, _ = make_blocks(d)
    memory = np.zeros((2, 4, 1024), dtype=np.int32)
    addresses = [int(memory[i].ctypes.data) for i in range(2)]
    current = [0]

    def come_and_go() -> None:
        cache = manager(d).register_cache(DESC, addresses, (), True)
        current[0] = cache.cache_id
        manager(d).unregister_cache(cache.cache_id)

    into, _ = make(p)
    with meanwhile(come_and_go):
        for _ in range(30):
            # LinkFailed: shm reaches pools only. Anything else is an error.
            with suppress(CacheNotExist, LinkFailed):
                manager(p).pull_cache(CacheKeyByIdAndIndex(d.cluster_id, current[0]), into)
            config = TransferConfig(d.cluster_id, target.tensor_addrs)
            task = manager(p).transfer_cache_async(source, Released(), [config], [0], [3])
            assert task.get_results(HANGS_S * 1000) == [OK], task.errors
    assert int(target.numpy()[1][3, -1]) == number


def test_caches_are_freed_inside_service_handlers_of_both_ends(ends) -> None:
    p, d = ends
    intos = {end: make(end)[0] for end in ends}
    caches = {end: [make(end)[0] for _ in range(20)] for end in ends}
    for end in ends:
        end.register_service(
            "free", lambda cluster_id, body, end=end: manager(end).deallocate_cache(caches[end][body[0]]) or b"freed"
        )
    for end, peer in ((p, d), (d, p)):
        for cache in caches[peer]:
            assert pull(end, CacheKeyByIdAndIndex(peer.cluster_id, cache.cache_id), intos[end]) is not None

    def free_all(end: LLMDataDist, peer: LLMDataDist, start: int) -> None:
        for i in range(start, 20, 2):
            assert end.call(peer.cluster_id, "free", bytes([i]), HANGS_S) == b"freed"

    with together(*(lambda e=e, o=o, i=i: free_all(e, o, i) for e, o in ((p, d), (d, p)) for i in range(2))):
        pass
    for end in ends:
        assert used_bytes(end) == DESC.size * DESC.num_tensors + 32768


def test_more_handlers_free_caches_at_both_ends_than_there_are_threads_for_handlers(pair) -> None:
    """Each waits for the peer to let go of a cache, which the peer must be able to do though its handlers all wait."""
    many, at_once = 80, 64
    intos = {end: make(end)[0] for end in pair}
    small = CacheDesc(1, (1, 64), DataType.DT_INT32, Placement.HOST)
    caches = {end: [make(end, desc=small)[0] for _ in range(many)] for end in pair}
    into = {end: make(end, desc=small)[0] for end in pair}
    both_busy, lock = threading.Event(), threading.Lock()
    running = dict.fromkeys(pair, 0)

    def free(end: LLMDataDist, body: bytes) -> bytes:
        with lock:
            running[end] += 1
            if min(running.values()) >= at_once:
                both_busy.set()
        both_busy.wait(HANGS_S)
        manager(end).deallocate_cache(caches[end][body[0]])
        return b""

    for end, peer in (pair, pair[::-1]):
        end.register_service("free", lambda cluster_id, body, end=end: free(end, body))
        for cache in caches[peer]:
            assert pull(end, CacheKeyByIdAndIndex(peer.cluster_id, cache.cache_id), into[end]) is not None
    with together(
        *(
            partial(e.call, o.cluster_id, "free", bytes([i]), HANGS_S)
            for e, o in (pair, pair[::-1])
            for i in range(many)
        )
    ):
        pass
    for end, peer in (pair, pair[::-1]):
        end.check_link_status(peer.cluster_id)
        for cache in (intos[end], into[end]):
            manager(end).deallocate_cache(cache)
        assert used_bytes(end) == 0


class Held:
    """A task that sends a cache and stays at its first layer until `go` is set. The cache is in use meanwhile."""

    def __init__(self, end: LLMDataDist, peer: LLMDataDist, source: Cache) -> None:
        self.go, asked = threading.Event(), threading.Event()

        def wait(layer: int) -> None:
            asked.set()
            self.go.wait(HANGS_S)

        self._target, _ = make(peer)
        config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(peer.cluster_id, self._target.cache_id))
        self.task = manager(end).transfer_cache_async(source, Released(wait), [config])
        assert asked.wait(HANGS_S)

    def end(self) -> set[int]:
        """The numbers that came."""
        self.go.set()
        assert self.task.get_results(HANGS_S * 1000) == [OK], self.task.errors
        return numbers_in(self._target)


def test_own_memory_is_given_back_only_when_nothing_uses_it_any_more(ends) -> None:
    p, d = ends
    memory = np.full((2, 4, 1024), 77, dtype=np.int32)
    source = manager(p).register_cache(DESC, [int(tensor.ctypes.data) for tensor in memory])
    held, came = Held(p, d, source), []

    def unregister() -> None:
        manager(p).unregister_cache(source.cache_id)
        came.append(held.task.get_results(1)[0])

    with together(unregister):
        alive = p._open().table.entries
        until(lambda: source.cache_id not in {entry.cache_id for entry in alive()}, "the cache is being given back")
        assert held.end() == {77}
    assert came == [OK]


def test_own_memory_that_is_still_in_use_is_said_to_be(ends, monkeypatch) -> None:
    p, d = ends
    memory = np.full((2, 4, 1024), 77, dtype=np.int32)
    source = manager(p).register_cache(DESC, [int(tensor.ctypes.data) for tensor in memory])
    held = Held(p, d, source)
    monkeypatch.setattr("datadist_core.cache.keeper.SETTLE_TIMEOUT_S", 0.05)
    with pytest.raises(TimedOut, match=f"cache_id={source.cache_id}"):
        manager(p).unregister_cache(source.cache_id)
    manager(p).unregister_cache(source.cache_id)  # twice is a no-op
    assert held.end() == {77}


def test_freeing_pool_memory_does_not_wait_for_a_task_of_the_same_end(ends) -> None:
    """It keeps the memory by itself; and it may be the task's own synchroniser that frees."""
    p, d = ends
    source, number = make(p)
    held = Held(p, d, source)
    manager(p).deallocate_cache(source)
    assert used_bytes(p) != 0
    assert held.end() == {number}
    until(lambda: used_bytes(p) == 0, "the memory is back")


# -- ends that end


@pytest.mark.parametrize("which", ["owner", "puller"])
def test_finalize_ends_what_is_under_way(ends, which: str) -> None:
    """Pulls, pushes and tasks end with an error of ours, in time; what succeeded before is right."""
    p, d = ends
    key = BlocksCacheKey(p.cluster_id)
    _, number = make_blocks(p, key)
    into, _ = make_blocks(d)
    target, _ = make_blocks(p)
    started = threading.Barrier(4)

    def pull_on() -> None:
        for i in itertools.count():
            if i == 1:
                started.wait(HANGS_S)
            try:
                fill(into, -1)
                manager(d).pull_blocks(key, into, [0, 1], [0, 1])
                found = {int(tensor[0, 0]) for tensor in into.numpy()}
            except LLMException:
                break
            assert found == {number}
        if i == 0:
            started.wait(HANGS_S)

    def send_on() -> None:
        for i in itertools.count():
            if i == 1:
                started.wait(HANGS_S)
            config = TransferConfig(p.cluster_id, target.tensor_addrs)
            try:
                task = manager(d).transfer_cache_async(into, Released(), [config], [2], [2])
            except LLMException:
                break
            assert task.get_results(HANGS_S * 1000)[0] is not None
            if task.errors[0] is not None:
                break
        if i == 0:
            started.wait(HANGS_S)

    def free_on() -> None:
        started.wait(HANGS_S)
        with suppress(LLMException):
            for _ in itertools.count():  # the pool of `d` alone does not last for ever
                cache, _ = make(p)
                key = CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id)
                manager(d).pull_cache(key, manager(d).allocate_cache(DESC))
                manager(p).deallocate_cache(cache)

    with together(pull_on, send_on, free_on):
        started.wait(HANGS_S)
        (p if which == "owner" else d).finalize()


def test_a_task_that_runs_on_when_its_end_is_finalized_ends_and_lets_go(ends) -> None:
    p, d = ends
    source, _ = make_blocks(p)
    target, _ = make_blocks(d)
    asked, go = threading.Event(), threading.Event()

    def wait(layer: int) -> None:
        asked.set()
        go.wait(HANGS_S)

    config = TransferConfig(d.cluster_id, target.tensor_addrs)
    task = manager(p).transfer_cache_async(source, Released(wait), [config], [0], [0])
    assert asked.wait(HANGS_S)
    p.finalize()
    go.set()
    assert task.get_results(HANGS_S * 1000) == [LLMStatusCode.LLM_ENGINE_FINALIZED]


def test_finalize_gives_the_pools_back_whatever_is_in_them(ends) -> None:
    before = len(live_ranges._by_address)
    caches = [make(end, CacheKey(end.cluster_id, 1))[0] for end in ends]
    manager(ends[0]).deallocate_cache(caches[0])  # held by its key
    view = caches[1].numpy()[0]
    starts = [end._open().store._pools[Placement.HOST].region.address for end in ends]
    for end in ends:
        end.finalize()
    assert len(live_ranges._by_address) == before
    assert pools_left(starts, 1) == {starts[1]}
    assert len(set(view.ravel().tolist())) == 1
    del view
    assert pools_left(starts, 0) == set()


def pools_left(starts: list[int], wanted: int) -> set[int]:
    """Those that are there still; threads that have just ended a link may hold one for a moment."""
    end = time.monotonic() + HANGS_S
    while True:
        gc.collect()
        left = set(starts) & set(live_ranges._pools)
        if len(left) <= wanted or time.monotonic() > end:
            return left
        time.sleep(0.01)


# -- growth


@pytest.mark.parametrize("rounds", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_grows_with_the_number_of_caches(backend: str, rounds: int) -> None:
    with linked(backend) as (p, d):
        into, _ = make(d)

        def one_round(i: int) -> None:
            key = CacheKey(p.cluster_id, i)
            cache = manager(p).allocate_cache(DESC, [key])
            manager(d).pull_cache(CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id, i % 4), into)
            manager(p).deallocate_cache(cache)
            manager(d).pull_cache(key, into)

        def sizes() -> list[int]:
            ours, theirs = link_of(p, d), link_of(d, p)
            table, store = p._open().table, p._open().store
            of_links = (ours.answers._served_cache_ids, theirs.peer_caches._caches, theirs.peer_caches._keyed)
            of_caches = (table._by_id, table._by_key, table._by_grid, store._regions._exported, live_ranges._by_address)
            return [*map(len, of_links), *map(len, of_caches), len(ours._pending), len(theirs._pending)]

        for i in range(5):
            one_round(i)
        before = sizes()
        for i in range(rounds):
            one_round(i)
        assert sizes() == before
        assert used_bytes(p) == 0


# -- peers that lie


def told(**changes: Any) -> m.CacheInfo:
    grid = {"grid_id": 1, "region_id": 1, "offset_bytes": 0, "stride_bytes": 4096, "item_bytes": 4096, "num_items": 4}
    grid |= {name: changes.pop(name) for name in list(changes) if name in grid}
    info: dict[str, Any] = {
        "cache_id": 9,
        "is_blocks_cache": False,
        "num_tensors": 1,
        "shape": [4, 1024],
        "data_type": "DT_INT32",
        "batch_dim_index": 0,
        "grids": [m.GridInfo(**grid)],
        "regions": [m.RegionInfo(1, 1 << 20, {})],
    }
    return m.CacheInfo(**(info | changes))


LIES = {
    "cache_id": [2**63, -1],
    "grid_id": [2**63, 2**64 - 1, -1],
    "region_id": [2**63, 2],
    "offset_bytes": [-1, 1 << 20, 2**63],
    "stride_bytes": [0, -4096, 2**62],
    "item_bytes": [0, -1, 8192],
    "num_items": [0, -4, 3, 2**62],
    "num_tensors": [0, 2, -1],
    "shape": [[], [0, 1024], [-4, -1024], [4, 2**62], [2**62, 2**62], [4]],
    "data_type": ["DT_STRING", "DT_INT8", "float32", ""],
    "batch_dim_index": [-1, 2, 2**62],
    "regions": [[], [m.RegionInfo(1, 0, {})], [m.RegionInfo(1, -1, {})]],
}


def test_the_honest_description_is_accepted() -> None:
    assert RemoteCache(told()).layout.batch_size == 4


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in LIES.items() for value in values])
def test_a_description_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ParamInvalid):
        RemoteCache(told(**{field: value}))


@pytest.mark.parametrize("batch_index", [-1, 4, 2**63, 2**64 - 1])
def test_a_batch_entry_that_the_cache_has_not_is_refused(pair, monkeypatch, batch_index: int) -> None:
    p, d = pair
    cache, _ = make(p)
    into, _ = make(d)
    server, lookup = p._open().server, p._open().server.lookup
    monkeypatch.setattr(server, "lookup", lambda query: _with_index(lookup(query), batch_index))
    with pytest.raises(ProtocolError):
        manager(d).pull_cache(CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id), into)
    monkeypatch.undo()
    manager(d).pull_cache(CacheKeyByIdAndIndex(p.cluster_id, cache.cache_id), into)


def _with_index(info: m.CacheInfo, batch_index: int) -> m.CacheInfo:
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return m.CacheInfo(**(fields | {"batch_index": batch_index}))


@pytest.mark.parametrize(
    "make_request",
    [
        lambda i, own: m.Lookup(i, "cache", own, req_id=-1),
        lambda i, own: m.Lookup(i, "blocks", own, model_id=-1),
        lambda i, own: m.Lookup(i, "id", own, cache_id=0),
        lambda i, own: m.Lookup(i, "id", own, cache_id=-1),
        lambda i, own: m.Lookup(i, "nonsense", own),
        lambda i, own: m.Lookup(i, "blocks", own + 1),
        lambda i, own: m.Locate(i, [0]),
        lambda i, own: m.Locate(i, [2**64 - 1, -1]),
        lambda i, own: m.Consume(i, -1, -1, -1, -1),
    ],
    ids=lambda make_request: repr(make_request(1, 2)),
)
def test_a_request_that_makes_no_sense_is_answered_with_an_error(pair, make_request) -> None:
    """And with one of ours, without a traceback in the owner's log: it is not the owner that is wrong."""
    p, d = pair
    with pytest.raises(LLMException) as caught:
        link_of(d, p).request(lambda i: make_request(i, p.cluster_id), soon())
    assert caught.value.status_code is not LLMStatusCode.LLM_FAILED
    d.check_link_status(p.cluster_id)


def test_an_entry_index_below_zero_is_refused_by_the_owner(pair) -> None:
    p, d = pair
    cache, _ = make(p)
    with pytest.raises(ParamInvalid, match="batch_index=-1"):
        link_of(d, p).request(lambda i: m.Lookup(i, "id", p.cluster_id, 0, 0, 0, cache.cache_id, -1), soon())


def test_answers_that_nobody_asked_for_are_forgotten(pair) -> None:
    p, d = pair
    for i in range(10):
        link_of(p, d).send(m.Found(10**6 + i, told(cache_id=10**6 + i)))
    with pytest.raises(LLMException):
        d.call(p.cluster_id, "nothing", b"", HANGS_S)  # a round trip: the answers have arrived
    assert not [cache_id for cache_id in link_of(d, p).peer_caches._caches if cache_id >= 10**6]


def test_peers_are_asked_to_forget_at_the_same_time(monkeypatch):
    """So that several that do not answer cost one time limit together."""
    with make_end("tcp", "127.0.0.1:0") as p, make_end("tcp") as one, make_end("tcp") as two, make_end("tcp") as three:
        source = filled_cache(p, 1)
        together = threading.Barrier(3)
        for d in (one, two, three):
            must_link(d, p)
            d.cache_manager.pull_blocks(BlocksCacheKey(p.cluster_id), plain_cache(d, 2), [0], [0])
            answers = p._open().links.get(d.cluster_id).answers
            revoke = answers.revoke
            monkeypatch.setattr(answers, "revoke", lambda *args, revoke=revoke: (together.wait(HANGS_S), revoke(*args)))
        p.cache_manager.deallocate_blocks_cache(source)
        assert not together.broken
        for d in (one, two, three):
            with pytest.raises(CacheNotExist):
                d.cache_manager.pull_blocks(BlocksCacheKey(p.cluster_id), plain_cache(d, 3), [0], [0])
