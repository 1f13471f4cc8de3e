# SPDX-License-Identifier: Apache-2.0
"""Loads between two hosts whose network is slow, loses packets, is cut, or whose other end has vanished.

Real worker sides in two network namespaces. Whatever the network does: a load that is reported as good has P's bytes,
a load that is not ends in its time, P's blocks come back, and nothing has to be restarted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from connector.tests.case_worker import worker_in
from connector.tests.patience import WORK_S
from datadist_core.testing.lossy_network import ADDRESSES, LossyNetwork, why_unavailable
from datadist_core.testing.parallel import eventually, require_all
from datadist_core.testing.remote import RemoteObject

pytestmark = pytest.mark.slow

#: Of loads that cannot succeed.
LOAD_TIMEOUT_S = 8.0
SOURCE, TARGET = list(range(8)), list(range(8, 16))
FOR_EVER_S = 2 * WORK_S


@dataclass
class Hosts:
    """`p` may be replaced; what a test starts is ended by `stack`."""

    network: LossyNetwork
    p: RemoteObject
    d: RemoteObject
    stack: ExitStack

    def load(self, lease_s: float = 2 * WORK_S, seed: int = 1) -> tuple[str, float]:
        """One hand-off: how it ended, and after how long."""
        remote = self.p.call("hold", lease_s)
        loaded = self.d.call("load", remote, seed, SOURCE, TARGET, FOR_EVER_S)
        assert not loaded.wrong
        return loaded.error, loaded.seconds


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = why_unavailable()
    if reason is not None:
        (pytest.fail if os.environ.get("DATADIST_REQUIRE_ALL") == "1" else pytest.skip)(reason)
    with ExitStack() as stack:
        network = stack.enter_context(LossyNetwork(delay_s=0.002))
        made: dict[str, RemoteObject] = {}

        def make(name: str, index: int) -> None:
            made[name] = worker_in(network.namespaces[index], ADDRESSES[index], link_timeout_s=5.0)
            stack.callback(made[name].kill)

        require_all([lambda: make("p", 0), lambda: make("d", 1)])
        yield Hosts(network, made["p"], made["d"], stack)


def test_b01_b15_b18_loads_over_a_network_that_fails_in_every_way(hosts: Hosts) -> None:
    """One after the other, with the same two workers: nobody is restarted until P's host vanishes."""
    network, p, d = hosts.network, hosts.p, hosts.d
    assert hosts.load()[0] == ""
    assert p.call("freed", WORK_S)
    before = [end.call("holdings") for end in (p, d)]

    network.shape(0.1, 0.05)  # a round trip takes 200 ms, and one packet in twenty is lost
    assert hosts.load()[0] == ""
    assert p.call("freed", WORK_S)
    assert sum(counts.lost for counts in network.counts()) > 0, "no packet was lost: this showed nothing"

    network.shape(0.002, 0.0)
    network.cut()
    d.call("limit_loads", LOAD_TIMEOUT_S)
    error, seconds = hosts.load(lease_s=2.0)
    assert error != ""
    assert seconds < LOAD_TIMEOUT_S + 15.0
    assert p.call("freed", WORK_S), "nobody can reach P: the lease must end by itself"

    network.heal()
    assert eventually(lambda: hosts.load(lease_s=2.0)[0] == "", WORK_S), "D does not come back to P by itself"
    assert p.call("freed", WORK_S)
    for end, held in zip((p, d), before, strict=True):
        assert eventually(lambda end=end, held=held: not end.call("holdings").beyond(held)), end.call("holdings")

    network.cut()  # P's host is gone: D hears nothing of it, and the next P is another one at the same place
    port = p.call("endpoint").port
    p.kill()
    network.heal()
    hosts.p = worker_in(network.namespaces[0], ADDRESSES[0], port, seed=2, link_timeout_s=5.0)
    hosts.stack.callback(hosts.p.kill)
    d.call("limit_loads", WORK_S)
    assert hosts.load(seed=2)[0] == ""
    assert hosts.p.call("freed", WORK_S)
    assert eventually(lambda: not d.call("holdings").beyond(before[1])), d.call("holdings").beyond(before[1])
