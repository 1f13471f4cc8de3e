# SPDX-License-Identifier: Apache-2.0
"""The soak in its shortest form; `python -m integration_tests.soak --seconds 600` is the long one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from integration_tests.soak import MIN_FREEZES, MIN_KILLS, soak


@pytest.mark.timeout(900)
def test_a_minute_of_faults_under_load(models, tmp_path: Path) -> None:
    summary = soak(60.0, seed=5, directory=tmp_path, max_kills=3, model=models("llama"))
    assert summary.is_good, asdict(summary)
    assert summary.faults.get("SIGSTOP", 0) >= MIN_FREEZES, summary.faults
    assert summary.faults.get("SIGKILL", 0) >= MIN_KILLS, summary.faults
