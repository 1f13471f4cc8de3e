# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over every backend that needs nothing but this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from datadist_core.backends._mooncake_binding import load as load_mooncake
from datadist_core.errors import Unreachable
from datadist_core.testing.ascend_standin import complaints
from datadist_core.testing.conformance import BackendConformance, CompletionSuite, ProcessSuite
from datadist_core.tests.optional import REQUIRE_ALL
from datadist_core.tests.tls_backend import make_files

#: Skipped, with the reason, where their packages cannot be used; not in `.ci/run`, which installs them.
OPTIONAL = not REQUIRE_ALL


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


class TestTcpTls(BackendConformance):
    """The same under TLS, where everything that is sent and received takes another way through the process."""

    factory = "datadist_core.tests.tls_backend:TlsTcpBackend"
    two_processes = False

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        directory = tmp_path_factory.getbasetemp() / "tls"
        self.options = {"files": str(directory if directory.exists() else make_files(directory))}


@pytest.mark.slow
class TestTcpTlsProcesses(ProcessSuite):
    factory = TestTcpTls.factory
    _files = TestTcpTls._files


class TestNixl(BackendConformance):
    """With whatever UCX finds best between processes of this host."""

    factory = "datadist_core.backends.nixl:NixlBackend"
    may_be_unavailable = OPTIONAL


@pytest.mark.slow
class TestNixlTcp(BackendConformance):
    """What UCX does between hosts without RDMA. Here a peer that is stopped stops a transfer."""

    factory = "datadist_core.backends.nixl:NixlBackend"
    options: ClassVar[dict[str, Any]] = {"ucx": {"TLS": "tcp"}}
    stopped_peers_go_on = False  # UCX may abort them, see `_nixl_agent`
    may_be_unavailable = OPTIONAL


class TestMooncake(BackendConformance):
    factory = "datadist_core.backends.mooncake:MooncakeBackend"
    may_be_unavailable = OPTIONAL

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        """Its libraries open files when they are loaded, and keep them: no leak of a backend's."""
        with suppress(Unreachable):
            load_mooncake()


class TestCannOverTheStandIn(BackendConformance):
    """The adapter for Huawei Ascend, over the STAND-IN for the vendor's package: this ran on no Ascend device."""

    factory = "datadist_core.testing.ascend_standin:CannOverStandIn"
    options: ClassVar[dict[str, Any]] = {"timeout_ms": 2000}

    @pytest.fixture(autouse=True)
    def _only_published_calls(self) -> Iterator[None]:
        complaints.clear()
        yield
        assert complaints == []


class TestDelayedLoopback(CompletionSuite):
    """Held batches obey the contract as well, wherever they are when something happens to them."""

    factory = "datadist_core.testing.faults:FaultyLoopback"
    options: ClassVar[dict[str, Any]] = {"fault": {"kind": "delay", "seconds": 0.002}}
    two_processes = False
