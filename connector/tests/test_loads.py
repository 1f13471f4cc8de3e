# SPDX-License-Identifier: Apache-2.0
"""The threads that drive loads. Their machine is in test_simulation_machines.py, real pairs in test_worker_pair.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from datadist_core.errors import Cancelled
from datadist_core.testing.parallel import eventually
from vllm_datadist.handoff.desk import Source, Sources
from vllm_datadist.messages import BlockTables, Endpoint, LeaseState, LoadJob, ReleaseJob, RemoteLease, RequestKey
from vllm_datadist.worker.loads import LoadLimits, LoadRunner
from vllm_datadist.worker.peers import Peer
from vllm_datadist.worker.renewals import Renewals

P = Endpoint(0, 0, "p", 1, 1)
SOURCES = Sources((Source(P, 1),))
QUIET = logging.getLogger("vllm_datadist.test_loads")
QUIET.setLevel(logging.CRITICAL)  # things go wrong here on purpose


class Peers:
    """Always linked."""

    def ready(self, endpoint: Endpoint, deadline: Any) -> Peer:
        return Peer(endpoint, None, None)  # type: ignore[arg-type]

    def prepare(self, endpoint: Endpoint) -> Future[Peer]:
        future: Future[Peer] = Future()
        if endpoint.host == "nowhere":
            return future
        future.set_result(self.ready(endpoint, None))
        return future

    @contextmanager
    def linked(self, endpoint: Endpoint, deadline: Any) -> Iterator[None]:
        yield

    def drop(self, peer: Peer) -> None:
        raise AssertionError("no link is broken here")


class Leases:
    """P says HELD to everything, or what it is told to say first."""

    def __init__(self, *first: LeaseState | Exception) -> None:
        self.released: list[RequestKey] = []
        self.renewed: list[RequestKey] = []
        self._first = list(first)

    def release(
        self, endpoint: Endpoint, keys: list[RequestKey], reader: RequestKey, deadline: Any, num_readers: int
    ) -> list[LeaseState]:
        self.released += keys
        return [self._say() for _ in keys]

    def renew(self, endpoint: Endpoint, keys: list[RequestKey], deadline: Any) -> list[LeaseState]:
        self.renewed += keys
        return [self._say() for _ in keys]

    def _say(self) -> LeaseState:
        said = self._first.pop(0) if self._first else LeaseState.HELD
        if isinstance(said, Exception):
            raise said
        return said


class Puller:
    """Reads for as long as it is not told to go on."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def pull(self, peer: Peer, endpoint: Endpoint, job: LoadJob, deadline: Any) -> list[Any]:
        self.has_begun.set()
        assert self.goes_on.wait(30)
        return []


def _remote(name: str, lease_s: float = 30.0) -> RemoteLease:
    return RemoteLease("P", RequestKey(f"{name} at P", 1), lease_s, (P,))


def _release(name: str, lease_s: float = 30.0) -> ReleaseJob:
    return ReleaseJob(RequestKey(name, 1), _remote(name, lease_s))


@contextmanager
def _runner(peers: Peers, leases: Leases) -> Iterator[LoadRunner]:
    runner = LoadRunner(peers, leases, Puller(), LoadLimits(60.0, 5.0, 1), QUIET)  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.close()


def _job(name: str) -> LoadJob:
    remote = _remote(name)
    return LoadJob(RequestKey(name, 1), remote, (BlockTables((1,), (1,)),), 0, 16)


def test_a_cancelled_load_does_not_wait_for_those_before_it() -> None:
    """Else P would keep its blocks, and vLLM those of the request that is gone, until a thread is free."""
    leases, puller = Leases(), Puller()
    runner = LoadRunner(Peers(), leases, puller, LoadLimits(60.0, 5.0, 1), logging.getLogger("test"))  # type: ignore[arg-type]
    try:
        first, second = _job("first"), _job("second")
        runner.submit_load(first, SOURCES)
        assert puller.has_begun.wait(10)
        runner.submit_load(second, SOURCES)
        runner.cancel(second.key)
        [ended] = runner.take_results()
        assert ended.key == second.key
        assert isinstance(ended.error, Cancelled)
        assert eventually(lambda: leases.released == [second.remote.key])
        puller.goes_on.set()
        results: list[Any] = []
        assert eventually(lambda: bool(results.extend(runner.take_results()) or results))
        assert [(one.key, one.error) for one in results] == [(first.key, None)]
        assert leases.released == [second.remote.key, first.remote.key]
    finally:
        puller.goes_on.set()
        runner.close()


# --- releases without a load ---------------------------------------------------------------------------------------


def test_a_fault_in_one_release_leaves_the_others() -> None:
    leases = Leases(ValueError("embedded null byte"))
    with _runner(Peers(), leases) as runner:
        runner.submit_release(_release("bad"), P)
        runner.submit_release(_release("good"), P)
        assert eventually(lambda: [key.request_id for key in leases.released] == ["bad at P", "good at P"])


def test_a_fault_in_the_threads_of_loads_leaves_the_other_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases()
    with _runner(Peers(), leases) as runner:
        with monkeypatch.context() as patch:
            hit = threading.Event()

            def fault(self: LoadRunner, run: Any) -> None:
                hit.set()
                raise KeyError("a fault")

            patch.setattr(LoadRunner, "_run", fault)
            runner.submit_load(_job("hit"), SOURCES)
            assert hit.wait(10)
        runner._puller.goes_on.set()  # type: ignore[attr-defined]
        runner.submit_load(_job("next"), SOURCES)
        results: list[Any] = []
        assert eventually(lambda: bool(results.extend(runner.take_results()) or results))
        assert [(one.key.request_id, one.error) for one in results] == [("next", None)]


def test_a_lease_that_p_has_not_opened_yet_is_released_again() -> None:
    leases = Leases(LeaseState.UNKNOWN, LeaseState.UNKNOWN)
    with _runner(Peers(), leases) as runner:
        runner.submit_release(_release("early"), P)
        assert eventually(lambda: len(leases.released) == 3)
        runner.submit_release(_release("last"), P)
        assert eventually(lambda: len(leases.released) == 4)
    assert [key.request_id for key in leases.released] == [*["early at P"] * 3, "last at P"], "HELD ends it"


def test_a_lease_that_p_never_opens_is_not_released_for_ever() -> None:
    """Until it would be over: another one, which lasts longer, goes on meanwhile with the same pauses."""
    leases = Leases(*[LeaseState.UNKNOWN] * 9)
    with _runner(Peers(), leases) as runner:
        runner.submit_release(_release("never", lease_s=0.5), P)
        runner.submit_release(_release("next"), P)
        released = lambda name: [key.request_id for key in leases.released].count(f"{name} at P")  # noqa: E731
        assert eventually(lambda: released("next") == 4)
        assert 1 <= released("never") <= 2, "0.25 s later at the latest"


def test_peers_that_cannot_be_reached_keep_no_release_waiting() -> None:
    leases = Leases()
    with _runner(Peers(), leases) as runner:
        for number in range(50):
            runner.submit_release(_release(f"{number}"), Endpoint(0, 0, "nowhere", 1, 100 + number))
        runner.submit_release(_release("good"), P)
        assert eventually(lambda: [key.request_id for key in leases.released] == ["good at P"])


# --- renewals ------------------------------------------------------------------------------------------------------


def test_a_fault_in_one_renewal_leaves_the_others() -> None:
    leases = Leases(ValueError("a fault"))
    renewals = Renewals(Peers(), leases, QUIET)  # type: ignore[arg-type]
    try:
        renewals.watch(RequestKey("d", 1), _remote("watched", lease_s=0.1), P)
        assert eventually(lambda: len(leases.renewed) >= 3)
    finally:
        renewals.close()
