# SPDX-License-Identifier: Apache-2.0
"""P's lease table, with a clock that stands still unless told otherwise."""

from __future__ import annotations

import threading

from vllm_datadist.handoff.lease import MAX_LEASE_TIMES, LeaseOutcome, LeasePhase, Reader
from vllm_datadist.messages import LeaseState, RequestKey
from vllm_datadist.worker.saves import LeaseTable

HELD, EXPIRED, RELEASED, UNKNOWN = LeaseState.HELD, LeaseState.EXPIRED, LeaseState.RELEASED, LeaseState.UNKNOWN
D, OTHER_D = Reader(7, RequestKey("d", 1)), Reader(8, RequestKey("d", 1))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _table(clock: Clock, **options: int) -> LeaseTable:
    return LeaseTable(clock, arrival_wait_s=0.0, **options)


def _key(name: str, attempt: int = 1) -> RequestKey:
    return RequestKey(name, attempt)


def test_a_released_lease_is_reported_once_and_repeats_its_answer() -> None:
    table = _table(Clock())
    table.open(_key("a"), 30)
    assert table.release([_key("a")], D) == [HELD]
    assert table.take_finished() == [_key("a")]
    assert table.release([_key("a")], D) == [HELD]
    assert table.take_finished() == []
    assert table.take_outcomes() == [LeaseOutcome(_key("a"), LeasePhase.RELEASED)]


def test_a_lease_ends_by_itself_and_says_so_from_then_on() -> None:
    clock = Clock()
    table = _table(clock)
    table.open(_key("a"), 30)
    clock.now_s += 29.9
    assert table.take_finished() == []
    clock.now_s += 0.1
    assert table.take_finished() == [_key("a")]
    assert table.release([_key("a")], D) == [EXPIRED]
    assert table.renew([_key("a")]) == [EXPIRED]
    assert table.take_finished() == []
    assert table.take_outcomes() == [LeaseOutcome(_key("a"), LeasePhase.EXPIRED)]


def test_a_release_after_the_time_but_before_the_sweep_is_too_late() -> None:
    clock = Clock()
    table = _table(clock)
    table.open(_key("a"), 30)
    clock.now_s += 30
    assert table.release([_key("a")], D) == [EXPIRED]
    assert table.take_finished() == [_key("a")]


def test_renewing_does_not_bring_a_released_lease_back() -> None:
    table = _table(Clock())
    table.open(_key("a"), 30)
    table.release([_key("a")], D)
    assert table.renew([_key("a")]) == [RELEASED]
    table.open(_key("a"), 30)
    assert table.num_active == 0


def test_held_is_said_again_to_the_one_who_released_and_to_nobody_else() -> None:
    """Another reader may have read after the release, when the blocks could hold something else."""
    table = _table(Clock())
    table.open(_key("a"), 30)
    assert table.release([_key("a")], D) == [HELD]
    assert table.release([_key("a")], OTHER_D) == [RELEASED]
    assert table.release([_key("a")], Reader(D.cluster_id, _key("d", 2))) == [RELEASED]
    assert table.release([_key("a")], D) == [HELD]


def test_b11_one_renewed_lease_does_not_shield_those_behind_it() -> None:
    clock = Clock()
    table = _table(clock)
    names = [chr(letter) for letter in range(ord("A"), ord("Z") + 1)]
    for name in names:
        table.open(_key(name), 30)
    clock.now_s += 20
    assert table.renew([_key("A")]) == [HELD]
    clock.now_s += 15
    assert table.take_finished() == [_key(name) for name in names[1:]]
    assert table.num_active == 1


def test_b09_attempts_of_one_request_id_do_not_touch_each_other() -> None:
    clock = Clock()
    table = _table(clock)
    table.open(_key("a", 1), 30)
    clock.now_s += 31
    table.open(_key("a", 2), 30)
    assert table.release([_key("a", 1)], D) == [EXPIRED]
    assert table.num_active == 1
    assert table.take_finished() == [_key("a", 1)]
    assert table.release([_key("a", 2)], D) == [HELD]
    assert table.take_finished() == [_key("a", 2)]


def test_a_lease_that_is_always_renewed_ends_all_the_same() -> None:
    """Else two engines that hand off to each other could wait for each other's blocks for ever."""
    clock = Clock()
    table = _table(clock)
    table.open(_key("a"), 30)
    for _ in range(MAX_LEASE_TIMES):
        assert table.renew([_key("a")]) == [HELD]
        clock.now_s += 29.9
    clock.now_s += 0.1 * MAX_LEASE_TIMES
    assert table.renew([_key("a")]) == [EXPIRED]
    assert table.take_finished() == [_key("a")]


def test_only_opened_leases_are_ever_reported() -> None:
    table = _table(Clock())
    assert table.release([_key("never")], D) == [UNKNOWN]
    assert table.renew([_key("never")]) == [UNKNOWN]
    assert table.take_finished() == []


def test_several_at_once_are_answered_in_order() -> None:
    table = _table(Clock())
    table.open(_key("a"), 30)
    assert table.renew([_key("b"), _key("a")]) == [UNKNOWN, HELD]


def test_a_faster_d_waits_for_p_to_open_the_lease() -> None:
    table = LeaseTable(arrival_wait_s=60.0)
    answers: list[LeaseState] = []
    caller = threading.Thread(target=lambda: answers.extend(table.release([_key("a")], D)), daemon=True)
    caller.start()
    table.open(_key("a"), 30)
    caller.join(30)
    assert answers == [HELD]


def test_memory_of_ended_leases_is_bounded() -> None:
    table = _table(Clock(), max_ended=2)
    for name in "abc":
        table.open(_key(name), 30)
        table.release([_key(name)], D)
    assert table.release([_key("a"), _key("b"), _key("c")], D) == [UNKNOWN, HELD, HELD]
