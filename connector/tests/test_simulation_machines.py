# SPDX-License-Identifier: Apache-2.0
"""The tables of a hand-off by themselves: what no path through them can do, and how a load ends."""

from __future__ import annotations

import pytest

from connector.tests.simulation.coverage import TABLES
from datadist_core.errors import Cancelled, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.lease import Leases, Reader
from vllm_datadist.handoff.load import LOAD_TABLE, Effect, LeaseLost, LoadMachine, LoadState
from vllm_datadist.handoff.parts import GroupEnd, PartTable
from vllm_datadist.handoff.renewal import RenewalTable
from vllm_datadist.handoff.table import NotAllowed
from vllm_datadist.messages import BlockTables, Endpoint, LeaseState, LoadJob, RemoteLease, RequestKey

P = Endpoint(0, 0, "p", 1, 7)
LEASE = RemoteLease("engine", RequestKey("p-1", 1), 30.0, (P,))
JOB = LoadJob(RequestKey("d-1", 1), LEASE, (BlockTables((1,), (2,)),), 0, 4)
TIMEOUT_S = 10.0
BLOCKING = {Effect.REACH, Effect.READ, Effect.ASK_RELEASE, Effect.PAUSE}


def _confirming() -> LoadMachine:
    load = LoadMachine(JOB, P, 0.0, TIMEOUT_S)
    assert load.started(0.0) == (Effect.REACH,)
    assert load.linked(0.0) == (Effect.READ,)
    assert load.read(0.0) == (Effect.ASK_RELEASE,)
    return load


def _reachable(start: LoadState) -> set[LoadState]:
    reached, new = set(), {start}
    while new:
        reached |= new
        new = {to for (at, _), (to, _) in LOAD_TABLE.rows.items() if at in reached} - reached
    return reached


def test_no_path_reads_again_after_the_release_was_asked_for() -> None:
    after = _reachable(LoadState.CONFIRMING)
    assert LoadState.READING not in after
    effects = {effect for (at, _), (_, done) in LOAD_TABLE.rows.items() if at in after for effect in done}
    assert Effect.READ not in effects


def test_every_way_to_the_end_reports_once_and_every_other_step_waits_for_one_thing() -> None:
    for (at, event), (to, effects) in LOAD_TABLE.rows.items():
        assert at is not LoadState.ENDED, event
        assert effects.count(Effect.REPORT) == (to is LoadState.ENDED), (at, event)
        assert len(BLOCKING & set(effects)) == (to is not LoadState.ENDED), (at, event)
        assert LoadState.ENDED in _reachable(to)
        if to is not LoadState.ENDED:
            assert effects[-1] in BLOCKING


def test_every_state_of_every_machine_can_be_left() -> None:
    for table in TABLES:
        for state in {state for state, _ in table.rows}:
            final = all(to is state for (at, _), (to, _) in table.rows.items() if at is state)
            assert not final or state.value in ("released", "expired", "ended"), (table.name, state)


def test_what_a_state_does_not_allow_is_refused() -> None:
    with pytest.raises(NotAllowed, match="load: read is not possible in the state queued"):
        LoadMachine(JOB, P, 0.0, TIMEOUT_S).read(0.0)


@pytest.mark.parametrize("state", [LeaseState.EXPIRED, LeaseState.RELEASED])
def test_any_other_answer_than_held_fails_the_load(state: LeaseState) -> None:
    load = _confirming()
    assert load.answered(state, 1.0) == (Effect.REPORT,)
    assert isinstance(load.error, LeaseLost)


def test_held_counts_also_after_the_deadline_and_after_an_abort() -> None:
    for cancelled in (False, True):
        load = _confirming()
        if cancelled:
            load.cancel()
        assert load.answered(LeaseState.HELD, TIMEOUT_S + 1) == (Effect.REPORT,)
        assert load.error is None


def test_a_lease_that_is_not_open_yet_is_asked_for_again_until_the_deadline() -> None:
    load = _confirming()
    assert load.answered(LeaseState.UNKNOWN, 2.0) == (Effect.ASK_RELEASE,)
    assert load.answered(LeaseState.UNKNOWN, TIMEOUT_S) == (Effect.REPORT,)
    assert isinstance(load.error, LeaseLost)
    late = _confirming()
    late.answered(LeaseState.UNKNOWN, 2.0)
    late._patient_until_s = TIMEOUT_S + 5
    assert late.answered(LeaseState.UNKNOWN, TIMEOUT_S + 1) == (Effect.LET_GO, Effect.REPORT)
    assert isinstance(late.error, TimedOut)


def test_trouble_on_the_link_is_cured_once() -> None:
    load = _confirming()
    assert load.failed(PeerLost("cut"), 1.0) == (Effect.DROP_LINK, Effect.PAUSE)
    assert load.pause_over(1.2) == (Effect.REACH,)
    assert load.linked(1.3) == (Effect.ASK_RELEASE,)
    assert load.failed(PeerLost("cut again"), 1.4) == (Effect.DROP_LINK, Effect.REPORT)
    assert str(load.error) == "cut again"


def test_an_abort_lets_p_go_when_the_read_has_ended() -> None:
    load = LoadMachine(JOB, P, 0.0, TIMEOUT_S)
    load.started(0.0)
    load.linked(0.0)
    load.cancel()
    assert load.state is LoadState.READING
    assert load.read(1.0) == (Effect.LET_GO, Effect.REPORT)
    assert isinstance(load.error, Cancelled)


def test_a_read_that_p_refuses_lets_p_go() -> None:
    load = LoadMachine(JOB, P, 0.0, TIMEOUT_S)
    load.started(0.0)
    load.linked(0.0)
    assert load.failed(RemoteError("no such block"), 1.0) == (Effect.LET_GO, Effect.REPORT)


def _parts(count: int) -> tuple[PartTable[LoadMachine], list[LoadMachine]]:
    table: PartTable[LoadMachine] = PartTable()
    parts = [LoadMachine(JOB, P, 0.0, TIMEOUT_S) for _ in range(count)]
    assert table.add(JOB.key, parts)
    return table, parts


def test_a_job_is_added_once_and_may_come_back_under_another_attempt() -> None:
    table, parts = _parts(2)
    assert not table.add(JOB.key, parts)
    assert table.cancel(RequestKey("d-1", 2)) == []
    assert table.cancel_all() == parts
    assert table.cancel_all() == []


def test_a_job_is_reported_with_its_last_part_and_one_that_fails_cancels_the_others() -> None:
    table, (first, second, third) = _parts(3)
    assert (table.take(first), table.take(first)) == (True, False)
    assert table.ended(first) == []
    second.error = PeerLost("cut")
    assert table.ended(second) == [third]
    assert third.is_cancelled
    assert table.take_ends() == []
    assert table.take(third), "whoever cancelled it drives what waits for its turn"
    third.error = Cancelled("the request is gone")
    assert table.ended(third) == []
    assert table.take_ends() == [GroupEnd(JOB.key, second.error)]
    assert (table.take_settled(), table.take_ends(), len(table)) == ([JOB.key], [], 0)


def test_a_job_that_is_given_up_is_reported_at_once_and_settled_with_its_last_part() -> None:
    table: PartTable[LoadMachine] = PartTable()
    part = LoadMachine(JOB, P, 0.0, TIMEOUT_S)
    table.add(JOB.key, [part], gives_up_s=5.0)
    assert table.give_up(4.9) == []
    assert table.take_ends() == []
    assert table.give_up(5.0) == [part]
    [end] = table.take_ends()
    assert isinstance(end.error, TimedOut)
    assert (table.take_settled(), table.give_up(6.0)) == ([], [])
    assert table.ended(part) == []
    assert (table.take_ends(), table.take_settled()) == ([], [JOB.key])


@pytest.mark.parametrize("error", [None, PeerLost("cut")])
def test_parts_may_end_well_or_not_after_the_job_was_cancelled_or_given_up(error: PeerLost | None) -> None:
    for given_up in (False, True):
        table: PartTable[LoadMachine] = PartTable()
        parts = [LoadMachine(JOB, P, 0.0, TIMEOUT_S) for _ in range(2)]
        table.add(JOB.key, parts, gives_up_s=5.0)
        assert (table.give_up(5.0) if given_up else table.cancel(JOB.key)) == parts
        for part in parts:
            part.error = error
            assert table.take_settled() == []
            assert table.ended(part) == []
        assert (len(table.take_ends()), table.take_settled(), len(table)) == (1, [JOB.key], 0)


def test_a_job_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts of .* is empty"):
        PartTable[LoadMachine]().add(JOB.key, [])


KEY = RequestKey("p-1", 1)
READERS = [Reader(cluster_id, RequestKey("d-1", 1)) for cluster_id in (11, 12, 13)]


def _open_lease() -> Leases:
    leases = Leases(lambda: 0.0)
    leases.open(KEY, 10.0)
    return leases


def test_a_lease_ends_with_the_last_of_its_readers_each_of_whom_counts_once() -> None:
    leases = _open_lease()
    assert leases.release([KEY], READERS[0], 3) == [LeaseState.HELD]
    assert leases.release([KEY], READERS[0], 3) == [LeaseState.HELD]
    assert leases.release([KEY], READERS[1], 3) == [LeaseState.HELD]
    assert leases.take_finished() == []
    assert leases.renew([KEY]) == [LeaseState.HELD]
    assert leases.release([KEY], READERS[2], 3) == [LeaseState.HELD]
    assert leases.take_finished() == [KEY]
    assert [leases.release([KEY], reader, 3) for reader in READERS] == [[LeaseState.HELD]] * 3
    assert leases.release([KEY], Reader(14, READERS[0].key), 3) == [LeaseState.RELEASED]


@pytest.mark.parametrize("count", [0, -1, 1, 3])
def test_a_release_that_counts_otherwise_is_an_error_in_the_answer(count: int) -> None:
    leases = _open_lease()
    assert leases.release([KEY], READERS[0], 2) == [LeaseState.HELD]
    assert leases.release([KEY], READERS[1], count) == [LeaseState.MISCOUNTED]
    assert leases.take_finished() == []
    assert leases.release([KEY], READERS[1], 2) == [LeaseState.HELD]
    assert leases.release([KEY], READERS[1], count) == [LeaseState.MISCOUNTED]
    assert leases.take_finished() == [KEY]


def test_the_readers_of_a_lease_are_workers_of_one_request() -> None:
    leases = _open_lease()
    assert leases.release([KEY], READERS[0], 2) == [LeaseState.HELD]
    assert leases.release([KEY], Reader(12, RequestKey("d-2", 1)), 2) == [LeaseState.RELEASED]
    assert leases.take_finished() == []


def test_a_lease_that_is_pinned_is_finished_when_nothing_is_sent_any_more() -> None:
    leases = _open_lease()
    assert leases.pin(KEY)
    leases.pin_under_way(KEY)
    assert leases.release([KEY], READERS[0]) == [LeaseState.HELD]
    assert not leases.pin(KEY)
    leases.unpin(KEY)
    assert (leases.take_finished(), leases.num_active) == ([], 1)
    leases.unpin(KEY)
    leases.unpin(KEY)
    assert (leases.take_finished(), leases.num_active) == ([KEY], 0)


def test_a_send_that_is_under_way_when_its_lease_ends_at_once_pins_it() -> None:
    leases = Leases(lambda: 0.0, max_ended=1)
    leases.end_within(0.0)
    leases.open(KEY, 10.0)
    leases.open(RequestKey("p-2", 2), 10.0)
    assert leases.renew([KEY]) == [LeaseState.UNKNOWN]
    leases.pin_under_way(KEY)
    assert leases.take_finished() == [RequestKey("p-2", 2)]
    leases.unpin(KEY)
    assert leases.take_finished() == [KEY]


def test_a_late_answer_about_a_lease_that_is_watched_anew_changes_nothing() -> None:
    table = RenewalTable()
    table.watch(JOB.key, LEASE, P, 0.0)
    [[old]] = table.take_due(0.0).values()
    table.watch(JOB.key, LEASE, P, 1.0)
    table.answered([old], [LeaseState.EXPIRED], 2.0)
    assert (len(table), table.next_due_s()) == (1, 1.0)
