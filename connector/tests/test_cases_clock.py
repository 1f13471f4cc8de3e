# SPDX-License-Identifier: Apache-2.0
"""Leases last as long as they were given for, whatever happens to the time of day."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from datadist_core.testing.parallel import eventually
from datadist_core.tests.jumping_clock import keep_jumping, run_under_a_jumping_clock
from vllm_datadist.messages import RequestKey
from vllm_datadist.worker.saves import LeaseTable

LONG, SHORT = RequestKey("long", 1), RequestKey("short", 1)


def main_under_a_jumping_clock() -> None:
    logging.disable()
    keep_jumping()
    table, begun_s = LeaseTable(), time.monotonic()
    table.open(LONG, 60.0)
    table.open(SHORT, 1.0)
    assert eventually(lambda: table.take_finished() == [SHORT]), "not ended when its time was over"
    assert time.monotonic() - begun_s >= 1.0, "ended before its time"
    assert table.num_active == 1


@pytest.mark.slow
def test_b05_b11_a_lease_lasts_its_time_whatever_the_clock_says(tmp_path: Path) -> None:
    run_under_a_jumping_clock(main_under_a_jumping_clock, tmp_path)
