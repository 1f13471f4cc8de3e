# SPDX-License-Identifier: Apache-2.0
"""What a worker notes of loads and pushes: kinds of failures, one report per load, and nothing counted twice."""

from __future__ import annotations

import threading
import time

import pytest

from connector.tests.patience import LINK_S
from datadist_core import errors
from datadist_core.testing.parallel import eventually
from vllm_datadist.counts import Awaited, Failure, Mode
from vllm_datadist.description import Incompatible
from vllm_datadist.handoff.load import LeaseLost
from vllm_datadist.handoff.offer import PushFailed
from vllm_datadist.messages import Endpoint, RequestKey
from vllm_datadist.worker.load_book import LayerSpans, LoadBook, Stopwatch, failure_of
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.pulls import Moved
from vllm_datadist.worker.topology import PlanError

KEY = RequestKey("d-1", 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.PeerLost("x"), Failure.LINK),
        (errors.LinkFailed("x"), Failure.LINK),
        (errors.NotYetLinked("x"), Failure.LINK),
        (errors.TimedOut("x"), Failure.TIMED_OUT),
        (LeaseLost("x"), Failure.LEASE_LOST),
        (Incompatible("x"), Failure.REFUSED),
        (PlanError("x"), Failure.REFUSED),
        (errors.IntegrityError("x"), Failure.INTEGRITY),
        (errors.Cancelled("x"), Failure.CANCELLED),
        (PushFailed("x"), Failure.PEER),
        (errors.ProtocolError("x"), Failure.PEER),
        (errors.OutOfMemory("x"), Failure.OTHER),
        (RuntimeError("x"), Failure.OTHER),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_kinds_of_failures(error: Exception, kind: Failure) -> None:
    assert failure_of(error) is kind


def test_no_class_of_errors_is_forgotten() -> None:
    """A new class of the core has a kind, or is one of those that say nothing about hand-offs."""
    says_nothing = {"LLMException", "OutOfMemory", "AlreadyLinked", "LinkExists", "FeatureNotEnabled"}
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.LLMException)]
    assert {one.__name__ for one in classes if failure_of(one("x")) is Failure.OTHER} == says_nothing


def _watches(mode: Mode) -> list[Stopwatch]:
    return [Stopwatch(KEY, mode, "t", f"10.0.0.{i}:7000", time.monotonic() - 1.0 - i) for i in range(2)]


def test_the_parts_of_a_load_make_one_report() -> None:
    book, watches = LoadBook(rank=3), _watches(Mode.PULL)
    book.open(KEY, watches)
    for number, watch in enumerate(watches):
        watch.lap(Awaited.LINK)
        watch.lap_moved([Moved(100, "tcp", 0.25), Moved(50, "shm", 0.5 * number)])
        watch.lap(Awaited.CONFIRMATION)
    report = book.close(KEY, Mode.PULL, None)
    assert (report.num_bytes, report.transfer_s, report.failure) == (300, 0.75, None)
    assert (report.peers, report.backends) == (("10.0.0.0:7000", "10.0.0.1:7000"), ("shm", "tcp"))
    assert 2.0 <= report.waits_s["link"] < 20.0, "that of the slowest"
    counts = book.take_counts().data
    assert counts["counters"]["transfer_bytes"] == {"tcp|pull|3": 200, "shm|pull|3": 100}
    assert counts["times"]["transfer_seconds"] == {"pull|3": [0.75]}
    assert set(counts["times"]["wait_seconds"]) == {"link|pull|3", "confirmation|pull|3"}
    assert book.take_counts().is_empty()
    again = book.close(KEY, Mode.PULL, errors.Cancelled("x"))
    assert (again.peers, again.num_bytes, again.failure) == ((), 0, Failure.CANCELLED)
    assert book.take_counts().data["counters"] == {"transfer_failures": {"cancelled|pull|3": 1}}


def test_what_p_pushes_p_counts() -> None:
    p, d, watches = LoadBook(0), LoadBook(0), _watches(Mode.PUSH)
    d.open(KEY, watches)
    moved = [Moved(100, "tcp", 0.25)]
    p.sent(moved)
    p.not_sent(errors.PeerLost("x"))
    watches[0].heard_moved(moved)
    report = d.close(KEY, Mode.PUSH, None)
    assert (report.num_bytes, report.backends) == (100, ("tcp",))
    assert "transfer_bytes" not in d.take_counts().data["counters"], "P has counted them"
    assert p.take_counts().data["counters"] == {
        "transfer_bytes": {"tcp|push|0": 100},
        "transfer_failures": {"link|push|0": 1},
    }


def test_threads_lose_nothing() -> None:
    book = LoadBook(0)

    def work(number: int) -> None:
        for attempt in range(100):
            key = RequestKey(str(number), attempt)
            watch = Stopwatch(key, Mode.PULL, "t", "p")
            book.open(key, [watch])
            watch.lap_moved([Moved(1, "tcp", 0.0)])
            assert book.close(key, Mode.PULL, None).num_bytes == 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert book.take_counts().total("transfer_bytes") == 800


def test_layers_are_timed_without_the_waits_between() -> None:
    spans = LayerSpans("t", "cluster 2", "tcp", 100)
    spans.end()  # before the first
    spans.begin("layer.0")
    threading.Event().wait(0.01)
    spans.end()
    moved_s = spans.seconds
    assert moved_s >= 0.009
    threading.Event().wait(0.01)
    spans.end()
    assert spans.seconds == moved_s


def test_links_that_are_up_are_counted_at_both_ends() -> None:
    p, d = (DataDistNode("127.0.0.1", 0, "tcp", 0) for _ in range(2))
    try:
        assert (p.num_links, d.num_links) == (0, 0)
        at_p = Endpoint(0, 0, p.host, p.port, p.cluster_id)
        d.link(at_p, LINK_S)
        assert eventually(lambda: (p.num_links, d.num_links) == (1, 1))
        d.unlink(at_p)
        assert eventually(lambda: (p.num_links, d.num_links) == (0, 0))
    finally:
        d.close()
        p.close()
    assert (p.num_links, d.num_links) == (0, 0)
