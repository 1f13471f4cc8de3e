# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark in its shortest form, with real servers: complete, and right. How fast is not tested.

Without vLLM's NixlConnector: on two cores single hand-offs of it took half a minute, now and then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS = 129
LIMIT_S = 800
NUMBERS = ("added_ms", "added_ms_min", "added_ms_max", "request_ms", "cached_ms", "first_request_ms")


@pytest.mark.timeout(900)
def test_short_run(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = [*f"--backends auto --peers none --tokens {TOKENS} --repeats 2 --json".split(), str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_datadist.bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # it stops its servers
        output, _ = process.communicate(timeout=60)
        raise AssertionError(output) from None
    assert process.returncode == 0, output
    found = json.loads(file.read_text())
    assert (found["skipped"], found["failed"]) == ({}, {})
    assert [row["name"] for row in found["rows"]] == ["auto"]
    for row in found["rows"]:
        assert (row["tokens"], row["kv_bytes"], row["num_samples"]) == (TOKENS, TOKENS << 17, 2)
        assert row["verified"], output
        assert all(isinstance(row[name], float) for name in NUMBERS), row
        assert row["added_ms_min"] <= row["added_ms"] <= row["added_ms_max"]
        assert row["request_ms"] > 0
    assert found["bytes_over"]["auto"] == ["shm"], "both servers are on this host"
    assert "NixlConnector's" in output
