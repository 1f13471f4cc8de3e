# SPDX-License-Identifier: Apache-2.0
"""The threads that drive loads. Their machine is in test_simulation_machines.py, real pairs in test_worker_pair.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datadist_core.errors import Cancelled
from datadist_core.testing.parallel import eventually
from vllm_datadist.messages import BlockTables, Endpoint, LeaseState, LoadJob, RemoteLease, RequestKey
from vllm_datadist.worker.loads import LoadLimits, LoadRunner
from vllm_datadist.worker.peers import Peer

P = Endpoint(0, 0, "p", 1, 1)


class Peers:
    """Always linked."""

    def ready(self, endpoint: Endpoint, deadline: Any) -> Peer:
        return Peer(endpoint, None)  # type: ignore[arg-type]

    @contextmanager
    def linked(self, endpoint: Endpoint, deadline: Any) -> Iterator[None]:
        yield

    def drop(self, peer: Peer) -> None:
        raise AssertionError("no link is broken here")


class Leases:
    """P says HELD to everything."""

    def __init__(self) -> None:
        self.released: list[RequestKey] = []

    def release(
        self, endpoint: Endpoint, keys: list[RequestKey], reader: RequestKey, deadline: Any
    ) -> list[LeaseState]:
        self.released += keys
        return [LeaseState.HELD for _ in keys]


class Puller:
    """Reads for as long as it is not told to go on."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def pull(self, peer: Peer, job: LoadJob, deadline: Any) -> list[Any]:
        self.has_begun.set()
        assert self.goes_on.wait(30)
        return []


def _job(name: str) -> LoadJob:
    remote = RemoteLease("P", RequestKey(f"{name} at P", 1), 30.0, (P,))
    return LoadJob(RequestKey(name, 1), remote, (BlockTables((1,), (1,)),), 0, 16)


def test_a_cancelled_load_does_not_wait_for_those_before_it() -> None:
    """Else P would keep its blocks, and vLLM those of the request that is gone, until a thread is free."""
    leases, puller = Leases(), Puller()
    runner = LoadRunner(Peers(), leases, puller, LoadLimits(60.0, 5.0, 1), logging.getLogger("test"))  # type: ignore[arg-type]
    try:
        first, second = _job("first"), _job("second")
        runner.submit_load(first, P)
        assert puller.has_begun.wait(10)
        runner.submit_load(second, P)
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
