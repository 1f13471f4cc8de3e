# SPDX-License-Identifier: Apache-2.0
"""What only some tests need is not imported by all: a worker of pytest-xdist collects every file."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: The halves that decide, and what they are made of.
WITHOUT_TORCH = (
    "vllm_datadist",
    "vllm_datadist.config",
    "vllm_datadist.description",
    "vllm_datadist.groups",
    "vllm_datadist.handoff.load",
    "vllm_datadist.messages",
    "vllm_datadist.params",
    "vllm_datadist.scheduler.side",
    "vllm_datadist.versions",
    "vllm_datadist.worker.peers",
    "vllm_datadist.worker.saves",
    "vllm_datadist.worker.topology",
)


def test_collecting_the_fast_tests_imports_no_vllm(request: pytest.FixtureRequest, vllm_at_collection: bool) -> None:
    if "not slow" in request.config.option.markexpr:
        assert not vllm_at_collection, "import it in the test or in a fixture: see test_stats.py"


def test_deciding_needs_neither_vllm_nor_torch() -> None:
    program = f"import sys, {', '.join(WITHOUT_TORCH)}; print(sorted(m for m in ('torch', 'vllm') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
