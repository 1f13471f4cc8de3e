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
from datadist_core.errors import ClosedError
from datadist_core.link import fences
from datadist_core.testing.parallel import eventually
from datadist_core.tests.child import Child
from datadist_core.tests.core_ends import make_end, manager
from datadist_core.types import Deadline

CHILD_ID = 7
NUM_BLOCKS, BLOCK_FLOATS = 48, 1 << 18  # 48 MiB: fits into the pool, and takes milliseconds to copy
DESC = CacheDesc(1, (NUM_BLOCKS, BLOCK_FLOATS), DataType.DT_FLOAT, Placement.HOST)
BLOCKS = list(range(NUM_BLOCKS))
#: Each test starts a process; the two backends tell when a peer has ended in ways of their own.
ONE_SIDED = pytest.mark.parametrize("backend", ["shm", pytest.param("cma", marks=pytest.mark.slow)])


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
    assert eventually(lambda: array[:, 0].any() or array[:, -1].any())
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
    assert eventually(lambda: used_bytes(owner) == before)
    manager(owner).deallocate_cache(manager(owner).allocate_blocks_cache(DESC))


@ONE_SIDED
def test_it_comes_back_when_the_stopped_peer_is_killed(owner: LLMDataDist, child: Child) -> None:
    before = used_bytes(owner)
    cache, array = stop_in_the_middle_of_a_push(owner, child)
    del array
    manager(owner).deallocate_cache(cache)
    assert used_bytes(owner) > before
    child.kill()
    assert eventually(lambda: used_bytes(owner) == before)


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
    assert eventually(lambda: used_bytes(owner) == before)


@pytest.mark.parametrize("backend", ["cma"])  # shm reaches memory of pools only
def test_the_callers_own_memory_is_the_callers_to_keep(owner: LLMDataDist, child: Child) -> None:
    own = np.zeros(NUM_BLOCKS * BLOCK_FLOATS, dtype=np.float32)
    cache = manager(owner).register_blocks_cache(
        DESC, [own.ctypes.data], BlocksCacheKey(owner.cluster_id), remote_accessible=True
    )
    child.start("push", owner.cluster_id, BLOCKS, BLOCKS)
    assert eventually(lambda: own[0] or own[-1])
    child.stop()
    with pytest.raises(LLMException, match=f"cluster {CHILD_ID} may still write") as caught:
        manager(owner).unregister_cache(cache.cache_id)
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    child.resume()
    finish(child)


# -- wait_fenced: told to whoever holds memory of its own accord


def forced(owner: LLMDataDist, child: Child) -> None:
    owner.unlink_clusters([child.info()], timeout=1000, force=True)


def wait_fenced(owner: LLMDataDist, timeout_s: float = 30) -> bool:
    started_s = time.monotonic()
    is_fenced = owner.wait_fenced(CHILD_ID, timeout_s)
    assert time.monotonic() - started_s < timeout_s + 30
    return is_fenced


@ONE_SIDED
@pytest.mark.parametrize("end_of_the_peer", ["goes on", "is killed"])
def test_a_stopped_peer_is_fenced_when_it_has_gone_on_or_died(
    owner: LLMDataDist, child: Child, end_of_the_peer: str
) -> None:
    assert wait_fenced(owner, 0)  # a link that is up is not a former one
    _, array = stop_in_the_middle_of_a_push(owner, child)
    forced(owner, child)
    assert not wait_fenced(owner, 0)
    assert not wait_fenced(owner, 0.05)
    child.resume() if end_of_the_peer == "goes on" else child.kill()
    assert wait_fenced(owner)
    before = array.copy()
    if end_of_the_peer == "goes on":
        finish(child)
    np.testing.assert_array_equal(array, before)


@ONE_SIDED
def test_it_waits_for_a_process_whose_place_another_one_took(
    owner: LLMDataDist, child: Child, request: pytest.FixtureRequest
) -> None:
    stop_in_the_middle_of_a_push(owner, child)
    with Child(cluster_id=CHILD_ID, backend=request.getfixturevalue("backend")) as successor:
        assert gets_linked(owner, successor)
        assert not wait_fenced(owner, 0)
        child.kill()
        assert wait_fenced(owner)
        owner.check_link_status(CHILD_ID)


TCP = pytest.mark.parametrize("backend", ["tcp"])


@TCP
def test_over_tcp_the_end_of_the_link_is_enough(owner: LLMDataDist, child: Child) -> None:
    """The peer is stopped, with bytes of its push in our socket: nobody puts them into memory any more."""
    _, array = stop_in_the_middle_of_a_push(owner, child)
    forced(owner, child)
    assert wait_fenced(owner, 0)
    before = array.copy()
    child.resume()
    finish(child)
    np.testing.assert_array_equal(array, before)


@TCP
def test_over_tcp_a_pull_that_was_under_way_writes_no_more(owner: LLMDataDist, child: Child) -> None:
    cache = manager(owner).allocate_blocks_cache(DESC)
    [array] = cache.numpy()
    array[:] = 0
    failed = threading.Event()

    def pull() -> None:
        try:
            manager(owner).pull_blocks(BlocksCacheKey(CHILD_ID), cache, BLOCKS, BLOCKS, deadline_s=30)
        except LLMException:
            failed.set()

    pulling = threading.Thread(target=pull, name="datadist-test-pull", daemon=True)
    pulling.start()
    assert eventually(lambda: array[:, 0].any() or failed.is_set() or not pulling.is_alive())
    child.stop()
    forced(owner, child)
    assert wait_fenced(owner)
    before = array.copy()
    child.resume()
    pulling.join(30)
    assert not pulling.is_alive()
    np.testing.assert_array_equal(array, before)


@TCP
def test_a_former_link_on_which_a_transfer_of_ours_still_runs_is_not_fenced(owner: LLMDataDist, child: Child) -> None:
    link = owner._open().links.get(CHILD_ID)
    with link.transferring():
        forced(owner, child)
        assert not wait_fenced(owner, 0.02)
    assert wait_fenced(owner)


def test_who_waits_is_told_when_the_end_is_finalized() -> None:
    waiting = fences.Fences()
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(waiting.wait(lambda: True, Deadline.after(30)))
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, name="datadist-test-wait", daemon=True)
    thread.start()
    waiting.close()
    thread.join(30)
    assert [type(one) for one in outcome] == [ClosedError]


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
        assert eventually(lambda: gets_linked(owner, child))
    pytest.fail("no stopped copy wrote to memory that had been given away")


def test_whoever_waits_for_fences_is_served_at_the_end() -> None:
    """`finalize` waits for no stopped peer."""

    class Never:
        backends = ()

    waiting = fences.Fences()
    done = threading.Event()
    link = Never()
    link.is_idle = True
    link.backends = (type("Backend", (), {"is_fenced": lambda self, peer_id: False})(),)
    link.link_id = 1
    waiting.when_fenced([link], done.set)
    assert not done.is_set()
    waiting.close()
    assert done.is_set()
    end_s = time.monotonic() + 30
    while any(t.name == "datadist-fences" for t in threading.enumerate()) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(t.name == "datadist-fences" for t in threading.enumerate())
