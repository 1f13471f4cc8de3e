# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the flow tests (`test_flows_*.py`), and which conformance tests are slow."""

from __future__ import annotations

import pytest

from datadist_core.tests import patience as patience  # sets limits
from datadist_core.tests.flow_checks import V1_AND_V2, Processes, linked_pair


@pytest.fixture(scope="module")
def processes():
    """Started when first needed, ended with the module."""
    with Processes() as started:
        yield started


@pytest.fixture(params=V1_AND_V2)
def way(request):
    """Backend, generation, and whether the ends are processes."""
    return request.param


@pytest.fixture
def pair(processes, way):
    """P and D, linked."""
    with linked_pair(processes, way) as ends:
        yield ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the conformance suites do with processes of their own is slow, and foreign engines are. The rest is fast."""
    for item in items:
        function = getattr(item, "function", None)
        module = getattr(function, "__module__", "")
        foreign = "test_backends.py::TestNixl" in item.nodeid or "test_backends.py::TestMooncake" in item.nodeid
        if foreign or module.endswith("testing._suite_processes") or "two-processes" in item.nodeid:
            item.add_marker(pytest.mark.slow)
