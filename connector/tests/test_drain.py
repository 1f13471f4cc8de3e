# SPDX-License-Identifier: Apache-2.0
"""SIGTERM: hand-offs get the time that vLLM gives, and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from vllm_datadist.drain import CLOSING_S, WORKER_LIMIT_S, DrainNotice, drain_limit_s
from vllm_datadist.handoff.lease import Reader
from vllm_datadist.messages import LeaseState, RequestKey, StepWork
from vllm_datadist.worker.saves import LeaseTable

KEY, OTHER = RequestKey("a", 1), RequestKey("b", 2)
READER = Reader(7, RequestKey("d", 1))


@pytest.mark.parametrize(
    ("wanted_s", "shutdown_timeout_s", "limit_s"),
    [
        (0.0, 30.0, 30.0 - CLOSING_S),
        (5.0, 30.0, 5.0),
        (60.0, 30.0, 30.0 - CLOSING_S),
        (0.0, 2.0, 1.0),
        (0.0, 0.0, WORKER_LIMIT_S),
        (1.0, 0.0, 1.0),
    ],
)
def test_within_vllms_limit(wanted_s: float, shutdown_timeout_s: float, limit_s: float) -> None:
    assert drain_limit_s(wanted_s, shutdown_timeout_s) == limit_s


def test_the_signal_is_seen_once_and_passed_on() -> None:
    now = SimpleNamespace(s=100.0)
    passed_on: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: passed_on.append(number))
    try:
        notice = DrainNotice(10.0, clock=lambda: now.s)
        notice.listen()
        assert notice.take_limit_s() is None
        os.kill(os.getpid(), signal.SIGTERM)
        now.s += 4.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed_on == [signal.SIGTERM] * 2
        assert notice.take_limit_s() == 6.0
        assert notice.take_limit_s() is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_engines_of_one_process_share_a_handler_and_are_not_kept() -> None:
    passed_on: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: passed_on.append(number))
    try:
        notices = [DrainNotice(10.0) for _ in range(3)]
        for notice in notices:
            notice.listen()
        gone = weakref.ref(notices.pop())
        del notice
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed_on == [signal.SIGTERM]
        assert all(notice.take_limit_s() is not None for notice in notices)
        assert gone() is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=DrainNotice(1.0).listen)
    thread.start()
    thread.join(30)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_that_nobody_handles_still_ends_the_process() -> None:
    code = (
        "import os, signal; from vllm_datadist.drain import DrainNotice; DrainNotice(1.0).listen();"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -signal.SIGTERM


def test_work_that_only_tells_of_the_end_is_not_empty() -> None:
    assert StepWork().is_empty()
    assert not StepWork(drain_s=0.0).is_empty()


def test_no_lease_outlives_the_drain() -> None:
    """Neither those in force, nor renewed ones, nor one that a last step opens; the limit is never put off."""
    now = SimpleNamespace(s=0.0)
    leases = LeaseTable(clock=lambda: now.s, arrival_wait_s=0.0)
    leases.open(KEY, 30.0)
    leases.end_within(5.0)
    leases.open(OTHER, 30.0)
    now.s = 4.0
    leases.end_within(5.0)
    assert leases.renew([KEY, OTHER]) == [LeaseState.HELD] * 2
    assert leases.release([OTHER], READER) == [LeaseState.HELD]
    now.s = 5.0
    assert leases.release([KEY], READER) == [LeaseState.EXPIRED]
    assert sorted(key.request_id for key in leases.take_finished()) == ["a", "b"]


def test_a_worker_waits_until_the_last_release() -> None:
    """B48."""
    leases = LeaseTable(arrival_wait_s=0.0)
    leases.open(KEY, 300.0)
    assert leases.wait_until_none(0.01) == 1
    waited: list[int] = []
    thread = threading.Thread(target=lambda: waited.append(leases.wait_until_none(60.0)))
    thread.start()
    leases.release([KEY], READER)
    thread.join(30)
    assert waited == [0]
