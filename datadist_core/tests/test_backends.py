# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over every backend that needs nothing but this host."""

from __future__ import annotations

from datadist_core.testing.conformance import BackendConformance


class TestLoopback(BackendConformance):
    factory = "datadist_core.backends.loopback:LoopbackBackend"
    two_processes = False
    serves_grids = True


class TestShm(BackendConformance):
    factory = "datadist_core.backends.shm:ShmBackend"
