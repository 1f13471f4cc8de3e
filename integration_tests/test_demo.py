# SPDX-License-Identifier: Apache-2.0
"""The demo, with the real model: what a newcomer runs first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(1800)
def test_demo_answers_and_is_identical() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.vllm_pd.demo"], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Paris" in done.stdout
    assert "identical = yes" in done.stdout
    assert "shm" in done.stdout
