# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over every backend that needs nothing but this host."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from datadist_core.testing._suite_base import both_ops
from datadist_core.testing._suite_processes import _big_batch as big_batch
from datadist_core.testing._suite_processes import _end as end_all
from datadist_core.testing._suite_processes import _submit_many as submit_many
from datadist_core.testing.conformance import BackendConformance, CompletionSuite
from datadist_core.transfer.plan import Op

#: Skipped, with the reason, where their packages are not installed; `.ci/run` does not install them.
OPTIONAL = True


class TestLoopback(BackendConformance):
    factory = "datadist_core.backends.loopback:LoopbackBackend"
    two_processes = False
    serves_grids = True


class TestShm(BackendConformance):
    factory = "datadist_core.backends.shm:ShmBackend"


class TestCma(BackendConformance):
    factory = "datadist_core.backends.cma:CmaBackend"


class TestTcp(BackendConformance):
    factory = "datadist_core.backends.tcp:TcpBackend"


class TestNixl(BackendConformance):
    """With whatever UCX finds best between processes of this host."""

    factory = "datadist_core.backends.nixl:NixlBackend"
    may_be_unavailable = OPTIONAL


@pytest.mark.slow
class TestNixlTcp(BackendConformance):
    """What UCX does between hosts without RDMA. Here a peer that is stopped stops a transfer."""

    factory = "datadist_core.backends.nixl:NixlBackend"
    options: ClassVar[dict[str, Any]] = {"ucx": {"TLS": "tcp"}}
    may_be_unavailable = OPTIONAL

    @pytest.mark.parametrize("ending", ["cancel", "disconnect", "close"])
    @both_ops
    def test_batches_with_a_stopped_peer_can_be_ended(self, op: Op, ending: str) -> None:
        """As in the suite, but for the peer's fate: when it goes on, UCX may abort it (see `_nixl_agent`)."""
        with self._open_big() as pair:
            batch = big_batch(pair, op)
            pair.b.stop()
            submitted = submit_many(pair, batch)
            end_all(pair, ending, submitted)
            for batch_id in submitted:
                pair.a.log.wait(batch_id)
            pair.b.kill()


class TestMooncake(BackendConformance):
    factory = "datadist_core.backends.mooncake:MooncakeBackend"
    may_be_unavailable = OPTIONAL


class TestDelayedLoopback(CompletionSuite):
    """Held batches obey the contract as well, wherever they are when something happens to them."""

    factory = "datadist_core.testing.faults:FaultyLoopback"
    options: ClassVar[dict[str, Any]] = {"fault": {"kind": "delay", "seconds": 0.002}}
    two_processes = False
