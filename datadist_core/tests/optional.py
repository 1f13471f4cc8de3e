# SPDX-License-Identifier: Apache-2.0
"""What some tests need and not every machine has. In CI (`.ci/run`) nothing may be missing."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE_ALL = os.environ.get("DATADIST_REQUIRE_ALL") == "1"


def not_available(reason: object) -> NoReturn:
    """Skip the running test, or fail it where nothing may be skipped."""
    if REQUIRE_ALL:
        pytest.fail(f"not available here, and this run must skip nothing: {reason}")
    pytest.skip(f"not available here: {reason}")
