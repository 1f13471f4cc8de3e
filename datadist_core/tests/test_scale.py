# SPDX-License-Identifier: Apache-2.0
"""One end with many links: nothing grows with time, and threads do not grow with links."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from datadist_core import LLMDataDist
from datadist_core.bench.scale import BACKEND_THREADS, ScalePlan, measure
from datadist_core.errors import LinkFailed, LLMException
from datadist_core.link.fanout import MIN_THREADS, run_all
from datadist_core.link.table import MAX_REMEMBERED, LinkTable
from datadist_core.link.workers import Workers
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.parallel import WAIT_S, eventually
from datadist_core.tests.core_ends import LINK_MS, cluster_info, make_end, must_link, plain_cache
from datadist_core.types import Deadline

#: Per link over shm, cma and tcp: the control connection, two of shm, one of cma, and of tcp.
FILES_PER_LINK = 7


def links_of(end: LLMDataDist) -> list[weakref.ref]:
    return [weakref.ref(link) for link in end._open().links.links()]


def test_links_that_were_torn_down_leave_nothing_behind() -> None:
    with nothing_left_behind(), ExitStack() as stack:
        servers = [stack.enter_context(make_end("auto", "127.0.0.1:0")) for _ in range(16)]
        hub = stack.enter_context(make_end("auto"))
        plain_cache(hub, 1)
        infos = [cluster_info(server) for server in servers]
        for _ in range(3):
            must_link(hub, *servers)
            hub.check_link_status(servers[0].cluster_id)
            ended = [link for end in (hub, *servers) for link in links_of(end)]
            assert len(ended) == 32
            hub.unlink_clusters(infos, timeout=LINK_MS)
            assert eventually(lambda ended=ended: not _alive(ended)), _alive(ended)


def _alive(links: list[weakref.ref]) -> list[object]:
    gc.collect()
    return [link for ref in links if (link := ref()) is not None]


def test_what_is_remembered_of_former_clusters_is_bounded() -> None:
    """And it keeps nothing alive: an error has a traceback, with all that was in use there."""

    class Witness:
        pass

    def fail() -> None:
        held.append(weakref.ref(witness := Witness()))
        raise LinkFailed(f"with {witness} in use")

    table, held = LinkTable(), []
    for cluster_id in range(MAX_REMEMBERED + 10):
        try:
            fail()
        except LLMException as error:
            table.note_failure(cluster_id, error)
    assert table.failure(0) is None
    assert "in use" in str(table.failure(MAX_REMEMBERED))
    assert not [ref for ref in held if ref() is not None]


def test_calls_for_many_share_some_threads_and_get_more_only_when_these_are_stuck() -> None:
    seen: set[threading.Thread] = set()
    assert run_all("test", [lambda: seen.add(threading.current_thread())] * 500, Deadline.after(WAIT_S), None)
    assert len(seen) <= MIN_THREADS
    stuck, through, number = threading.Event(), threading.Event(), 3 * MIN_THREADS
    calls = [lambda: stuck.wait(WAIT_S)] * number + [lambda: not through.set()]
    with ThreadPoolExecutor(1) as pool:
        try:
            results = pool.submit(run_all, "test", calls, Deadline.after(2 * WAIT_S), False)
            assert through.wait(WAIT_S)
            assert not results.done()
            assert run_all("test", calls[:1], Deadline.after(0.05), False) == [False]
        finally:
            stuck.set()
        assert results.result(WAIT_S) == [True] * (number + 1)


def test_workers_come_and_go() -> None:
    workers = Workers(8, "datadist-test", idle_s=0.1)
    gate = threading.Event()
    futures = [workers.submit(gate.wait, WAIT_S) for _ in range(20)]
    assert workers.num_threads == 8
    gate.set()
    assert all(future.result(WAIT_S) for future in futures)
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(WAIT_S)
    assert eventually(lambda: workers.num_threads == 0)
    assert workers.submit(lambda: 5).result(WAIT_S) == 5
    workers.shutdown(cancel_futures=True)
    with pytest.raises(RuntimeError):
        workers.submit(lambda: 5)
    assert eventually(lambda: workers.num_threads == 0)


@pytest.mark.slow
def test_hundreds_of_links() -> None:
    results = measure(
        ScalePlan(
            num_links=512, num_processes=8, backend="shm", idle_s=0.5, num_pulls=50, num_rounds=0, heartbeat_ms=60_000
        )
    )
    before, after = results.before, results.after
    assert before is not None
    assert after is not None
    assert after.num_threads <= before.num_threads + BACKEND_THREADS
    assert after.num_files - before.num_files <= 511 * FILES_PER_LINK
    assert (after.private_bytes - before.private_bytes) / 511 < 150 << 10


@pytest.mark.slow
def test_links_torn_down_and_made_anew_again_and_again() -> None:
    rounds = measure(
        ScalePlan(num_links=60, num_processes=2, idle_s=0.1, num_pulls=5, num_rounds=7, heartbeat_ms=60_000)
    ).rounds
    first, last = rounds[2], rounds[-1]  # the first ones also fill caches and arenas
    assert last.num_files <= first.num_files + 2
    assert last.num_threads <= first.num_threads + BACKEND_THREADS
    assert last.num_objects - first.num_objects < 60 * 4, "less than one object per link and round"
    assert last.private_bytes - first.private_bytes < 4 << 20
