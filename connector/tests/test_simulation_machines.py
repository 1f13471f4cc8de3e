# SPDX-License-Identifier: Apache-2.0
"""The tables of a hand-off by themselves: what no path through them can do, and how a load ends."""

from __future__ import annotations

import pytest

from connector.tests.simulation.coverage import TABLES
from datadist_core.errors import Cancelled, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.load import LOAD_TABLE, Effect, LeaseLost, LoadMachine, LoadState, LoadTable
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


def test_a_load_is_reported_once_and_may_come_back_under_another_attempt() -> None:
    table = LoadTable()
    load = LoadMachine(JOB, P, 0.0, TIMEOUT_S)
    assert (table.add(load), table.add(load), len(table)) == (True, False, 1)
    assert table.cancel(RequestKey("d-1", 2)) is None
    assert table.cancel_all() == [load]


def test_a_late_answer_about_a_lease_that_is_watched_anew_changes_nothing() -> None:
    table = RenewalTable()
    table.watch(JOB.key, LEASE, P, 0.0)
    [[old]] = table.take_due(0.0).values()
    table.watch(JOB.key, LEASE, P, 1.0)
    table.answered([old], [LeaseState.EXPIRED], 2.0)
    assert (len(table), table.next_due_s()) == (1, 1.0)
