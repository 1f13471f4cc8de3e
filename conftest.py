# SPDX-License-Identifier: Apache-2.0
"""For all tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _modules_stay() -> None:
    """What has been imported so far stays. Without it a `gc.collect()`, of which leak checks make many, is quick."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # so that modules can go in order
