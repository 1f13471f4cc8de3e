# SPDX-License-Identifier: Apache-2.0
"""A peer that is stopped in the middle of a copy, and goes on when its link is long gone, harms nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode, Placement
from datadist_core.cache import keeper
from datadist_core.link import fences
from datadist_core.testing.parallel import eventually
from datadist_core.tests.child import Child
from datadist_core.tests.core_ends import make_end, manager

CHILD_ID = 7
NUM_BLOCKS, BLOCK_FLOATS = 48, 1 << 18  # 48 MiB: fits into the pool, and takes milliseconds to copy
DESC = CacheDesc(1, (NUM_BLOCKS, BLOCK_FLOATS), DataType.DT_FLOAT, Placement.HOST)
BLOCKS = list(range(NUM_BLOCKS))
ONE_SIDED = pytest.mark.parametrize("backend", ["shm", "cma"])


@pytest.fixture
def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMDataDist]:
    monkeypatch.setattr(keeper, "REVOKE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(keeper, "FENCE_WAIT_S", 0.05)
    with make_end(request.getfixturevalue("backend"), "127.0.0.1:0") as end:
        yield end


@pytest.fixture
def child(backend: str, owner: LLMDataDist) -> Iterator[Child]:
    with Child(cluster_id=CHILD_ID, backend=backend, listen="127.0.0.1:0") as peer:
        peer.do("fill", 5, num_blocks=NUM_BLOCKS, block=BLOCK_FLOATS, num_tensors=1)
        assert gets_linked(owner, peer)
        yield peer


def used_bytes(owner: LLMDataDist) -> int:
    return manager(owner).pool_stats(Placement.HOST).used_bytes


def stop_in_the_middle_of_a_push(owner: LLMDataDist, child: Child):
    """The cache that the child writes to, with the child stopped before it is through; and how much is written."""
    cache = manager(owner).allocate_blocks_cache(DESC, BlocksCacheKey(owner.cluster_id))
    [array] = cache.numpy()
    array[:] = 0
    child.start("push", owner.cluster_id, BLOCKS, BLOCKS)
    assert eventually(lambda: array[:, 0].any() or array[:, -1].any(), 10)
    child.stop()
    return cache, array


def finish(child: Child) -> None:
    try:
        child.finish()
    except Exception:  # the push failed, as it should
        return


def gets_linked(owner: LLMDataDist, child: Child) -> bool:
    address = owner.listen_address
    return child.do("link", owner.cluster_id, address.host, address.port)[0] == "LLM_SUCCESS"


@ONE_SIDED
def test_memory_is_not_given_away_while_a_stopped_peer_may_write_to_it(owner: LLMDataDist, child: Child) -> None:
    before = used_bytes(owner)
    cache, array = stop_in_the_middle_of_a_push(owner, child)
    del array
    manager(owner).deallocate_cache(cache)
    assert used_bytes(owner) > before  # kept
    with pytest.raises(LLMException, match="no free range"):  # so this one does not get it
        manager(owner).allocate_blocks_cache(DESC)
    child.resume()
    finish(child)
    assert eventually(lambda: used_bytes(owner) == before, 10)
    manager(owner).deallocate_cache(manager(owner).allocate_blocks_cache(DESC))


@ONE_SIDED
def test_it_comes_back_when_the_stopped_peer_is_killed(owner: LLMDataDist, child: Child) -> None:
    before = used_bytes(owner)
    cache, array = stop_in_the_middle_of_a_push(owner, child)
    del array
    manager(owner).deallocate_cache(cache)
    assert used_bytes(owner) > before
    child.kill()
    assert eventually(lambda: used_bytes(owner) == before, 10)


@ONE_SIDED
def test_a_link_that_was_lost_before_counts_as_well(owner: LLMDataDist, child: Child) -> None:
    """Given up by heartbeats, say; the cache is freed only later."""
    before = used_bytes(owner)
    cache, array = stop_in_the_middle_of_a_push(owner, child)
    del array
    owner.unlink_clusters([child.info()], timeout=1000, force=True)
    manager(owner).deallocate_cache(cache)
    assert used_bytes(owner) > before
    child.resume()
    finish(child)
    assert eventually(lambda: used_bytes(owner) == before, 10)


@pytest.mark.parametrize("backend", ["cma"])  # shm reaches memory of pools only
def test_the_callers_own_memory_is_the_callers_to_keep(owner: LLMDataDist, child: Child) -> None:
    own = np.zeros(NUM_BLOCKS * BLOCK_FLOATS, dtype=np.float32)
    cache = manager(owner).register_blocks_cache(
        DESC, [own.ctypes.data], BlocksCacheKey(owner.cluster_id), remote_accessible=True
    )
    child.start("push", owner.cluster_id, BLOCKS, BLOCKS)
    assert eventually(lambda: own[0] or own[-1], 10)
    child.stop()
    with pytest.raises(LLMException, match=f"cluster {CHILD_ID} may still write") as caught:
        manager(owner).unregister_cache(cache.cache_id)
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    child.resume()
    finish(child)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm"])
def test_negative_control_without_fences_the_next_owner_is_overwritten(
    owner: LLMDataDist, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped copy really goes on. Not every time: it may have been stopped between two pieces."""
    monkeypatch.setattr(fences, "_is_fenced", lambda link: True)
    for _ in range(20):
        cache, array = stop_in_the_middle_of_a_push(owner, child)
        del array
        manager(owner).deallocate_cache(cache)
        other = manager(owner).allocate_blocks_cache(DESC)
        [array] = other.numpy()
        array[:] = 0
        child.resume()
        finish(child)
        written = bool(array.any())
        del array
        manager(owner).deallocate_cache(other)
        if written:
            return
        assert eventually(lambda: gets_linked(owner, child), 10)
    pytest.fail("no stopped copy wrote to memory that had been given away")


def test_whoever_waits_for_fences_is_served_at_the_end() -> None:
    """`finalize` waits for no stopped peer."""

    class Never:
        backends = ()

    waiting = fences.Fences()
    done = threading.Event()
    link = Never()
    link.backends = (type("Backend", (), {"is_fenced": lambda self, peer_id: False})(),)
    link.link_id = 1
    waiting.when_fenced([link], done.set)
    assert not done.is_set()
    waiting.close()
    assert done.is_set()
    end_s = time.monotonic() + 5
    while any(t.name == "datadist-fences" for t in threading.enumerate()) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(t.name == "datadist-fences" for t in threading.enumerate())
