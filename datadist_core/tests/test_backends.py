# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over every backend that needs nothing but this host."""

from __future__ import annotations

from typing import Any, ClassVar

from datadist_core.testing.conformance import BackendConformance, CompletionSuite


class TestLoopback(BackendConformance):
    factory = "datadist_core.backends.loopback:LoopbackBackend"
    two_processes = False
    serves_grids = True


class TestShm(BackendConformance):
    factory = "datadist_core.backends.shm:ShmBackend"


class TestTcp(BackendConformance):
    factory = "datadist_core.backends.tcp:TcpBackend"


class TestDelayedLoopback(CompletionSuite):
    """Held batches obey the contract as well, wherever they are when something happens to them."""

    factory = "datadist_core.testing.faults:FaultyLoopback"
    options: ClassVar[dict[str, Any]] = {"fault": {"kind": "delay", "seconds": 0.002}}
    two_processes = False
