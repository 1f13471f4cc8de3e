# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of pushes with hand-made requests: what P's and D's workers are told, and what vLLM hears when."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connector.tests.test_description import OURS
from connector.tests.test_scheduler import BLOCK, FACTS, FULL, WINDOW, WORKER, Output, Request, _blocks, _side
from vllm_datadist.config import ConfigError, ConnectorConfig
from vllm_datadist.groups import GroupInfo, missing_position
from vllm_datadist.messages import PushEnd, PushSource, StepWork, WorkerNotes
from vllm_datadist.params import TicketError, parse_push_source, parse_ticket, transfer_mode
from vllm_datadist.scheduler.settling import SettlingTable
from vllm_datadist.scheduler.side import SchedulerSide
from vllm_datadist.worker.planner import plan_pair
from vllm_datadist.worker.topology import CacheDescription, LayerDescription, PlanError, plain

TO_P = {"do_remote_decode": True, "transfer_mode": "push", "transfer_id": "t-1"}
TO_D = {
    "do_remote_prefill": True, "transfer_mode": "push", "transfer_id": "t-1",
    "remote_host": "10.0.0.1", "remote_port": 7000,
}  # fmt: skip
SOURCE = PushSource("t-1", "10.0.0.1", 7000)


def _at_p(side: SchedulerSide, params: dict[str, Any] = TO_P, name: str = "p-1") -> Request:
    request = Request(name, 10, params, num_computed_tokens=10)
    side.on_new_request(request)
    return request


def _at_d(side: SchedulerSide, params: dict[str, Any] = TO_D, name: str = "d-1") -> Request:
    request = Request(name, 10, params)
    side.on_new_request(request)
    return request


# --- P ------------------------------------------------------------------------------------------------------------


def test_p_opens_a_push_and_ends_it_under_the_lease_of_the_same_key() -> None:
    side = _side()
    request = _at_p(side)
    [opened] = side.take_work().push_opens
    assert (opened.transfer_id, opened.num_tokens, opened.key.request_id) == ("t-1", 10, "p-1")
    delayed, params = side.request_finished(request.finished(), ([7, 8, 9],))
    assert delayed
    assert (params["transfer_mode"], params["transfer_id"]) == ("push", "t-1")
    work = side.take_work()
    assert work.push_ends == [PushEnd(opened.key)]
    assert [lease.key for lease in work.leases] == [opened.key]
    ticket = parse_ticket(params)
    assert ticket.push_source == PushSource("t-1", WORKER.host, WORKER.port, ticket.remote)


def test_p_makes_a_transfer_id_and_the_ticket_says_it() -> None:
    side = _side(transfer_mode="push")
    request = _at_p(side, {"do_remote_decode": True})
    [opened] = side.take_work().push_opens
    _, params = side.request_finished(request.finished(), ([7, 8, 9],))
    assert params["transfer_id"] == opened.transfer_id != ""


def test_two_requests_with_one_transfer_id_do_not_share_it(caplog: pytest.LogCaptureFixture) -> None:
    side = _side()
    _at_p(side)
    second = _at_p(side, name="p-2")
    first_id, second_id = (opened.transfer_id for opened in side.take_work().push_opens)
    assert first_id == "t-1" != second_id
    assert "another request has transfer_id 't-1'" in caplog.text
    _, params = side.request_finished(second.finished(), ([7, 8, 9],))
    assert params["transfer_id"] == second_id


def test_a_transfer_id_is_free_again_when_its_request_has_ended() -> None:
    side = _side()
    side.request_finished(_at_p(side).finished("FINISHED_ABORTED"), ([7],))
    _at_p(side, name="p-2")
    first, second = side.take_work().push_opens
    assert first.transfer_id == second.transfer_id


def test_an_aborted_push_says_so_and_holds_nothing() -> None:
    side = _side()
    request = _at_p(side)
    assert side.request_finished(request.finished("FINISHED_ABORTED"), ([7, 8, 9],)) == (False, None)
    work = side.take_work()
    assert "FINISHED_ABORTED" in work.push_ends[0].error
    assert not work.leases


@pytest.mark.parametrize("mode", [None, "pull"])
def test_a_pull_is_told_nothing_of_pushes(mode: str | None) -> None:
    side = _side()
    request = _at_p(side, {"do_remote_decode": True, "transfer_mode": mode})
    _, params = side.request_finished(request.finished(), ([7, 8, 9],))
    work = side.take_work()
    assert (work.push_opens, work.push_ends) == ([], [])
    assert params["transfer_mode"] == "pull"


def test_a_request_can_pull_where_push_is_the_default() -> None:
    side = _side(transfer_mode="push")
    _at_p(side, {"do_remote_decode": True, "transfer_mode": "pull"})
    assert not side.take_work().push_opens


def test_parameters_that_cannot_be_read_mean_a_pull(caplog: pytest.LogCaptureFixture) -> None:
    side = _side()
    request = _at_p(side, {**TO_P, "transfer_mode": "shove"})
    assert not side.take_work().push_opens
    assert "params.transfer_mode must be one of pull, push, is 'shove'" in caplog.text
    assert side.request_finished(request.finished(), ([7, 8, 9],))[0]


def test_p_that_cannot_push_says_so_to_d_and_hands_off_by_pull(caplog: pytest.LogCaptureFixture) -> None:
    side = _side(no_push="speculative decoding with pipeline stages")
    requests = [_at_p(side), _at_p(side, {**TO_P, "transfer_id": "t-2"}, "p-2")]
    work = side.take_work()
    assert [one.transfer_id for one in work.push_opens] == ["t-1", "t-2"]
    assert [(e.key.request_id, e.error) for e in work.push_ends] == [(n, side._facts.no_push) for n in ("p-1", "p-2")]
    assert caplog.text.count("handed off by pull: speculative decoding with pipeline stages") == 1
    delayed, params = side.request_finished(requests[0].finished(), ([7, 8, 9],))
    assert delayed
    assert (params["transfer_mode"], parse_ticket(params).push_source) == ("pull", None)
    assert not side.take_work().push_ends


# --- D ------------------------------------------------------------------------------------------------------------


def test_d_announces_itself_and_offers_the_blocks_it_gets() -> None:
    side = _side()
    request = _at_d(side)
    [announced] = side.take_work().announcements
    assert announced.source == SOURCE
    assert side.num_new_matched_tokens(request, 4) == (6, True)
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 6)
    work = side.take_work()
    [offer] = work.offers
    assert (offer.source, offer.first_token, offer.end_token) == (SOURCE, 4, 10)
    assert offer.tables == ((1, 2, 3),)
    assert not work.loads
    p_side = _side()
    _at_p(p_side)
    [opened] = p_side.take_work().push_opens
    assert (offer.num_prompt_tokens, offer.prompt_digest) == (opened.num_tokens, opened.prompt_digest)


def test_d_with_a_push_ticket_renews_its_lease_and_offers() -> None:
    p_side, side = _side(), _side()
    _, ticket = p_side.request_finished(_at_p(p_side).finished(), ([7, 8, 9],))
    request = _at_d(side, ticket)
    work = side.take_work()
    assert len(work.watches) == 1
    assert not work.announcements
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 10)
    [offer] = side.take_work().offers
    assert offer.source.remote == work.watches[0].remote


@pytest.mark.parametrize("end", ["nothing needed", "aborted in the queue"])
def test_d_withdraws_what_it_does_not_need(end: str) -> None:
    side = _side()
    request = _at_d(side)
    side.take_work()
    if end == "nothing needed":
        side.update_state_after_alloc(request, _blocks([1, 2, 3]), 0)
    else:
        side.request_finished(request.finished("FINISHED_ABORTED"), ([],))
    [withdrawal] = side.take_work().withdrawals
    assert (withdrawal.key.request_id, withdrawal.source) == ("d-1", SOURCE)


def test_the_followers_of_a_push_wait_for_their_leader() -> None:
    """B40: n > 1."""
    side = _side()
    leader, follower = _at_d(side), _at_d(side, name="d-2")
    side.update_state_after_alloc(leader, _blocks([1, 2, 3]), 10)
    assert side.num_new_matched_tokens(follower, 0) == (None, False)
    side.update_output(Output(finished_recving={"d-1"}))
    assert side.num_new_matched_tokens(follower, 8) == (0, False)
    side.update_state_after_alloc(follower, _blocks([1, 2, 4]), 0)
    work = side.take_work()
    assert len(work.offers) == 1
    assert not work.withdrawals


def _gone(side: SchedulerSide, how: str) -> None:
    """The first request with that transfer id comes and goes."""
    first = _at_d(side)
    if how == "aborted in the queue":
        side.request_finished(first.finished("FINISHED_ABORTED"), ([],))
        return
    side.update_state_after_alloc(first, _blocks([1, 2, 3]), 0 if how == "nothing needed" else 10)
    if how in ("aborted", "aborted, load ended"):
        side.request_finished(first.finished("FINISHED_ABORTED"), ([],))
    if how in ("loaded", "failed", "aborted, load ended"):
        side.update_output(Output(finished_recving={"d-1"}, failed_recving={"d-1"} if how == "failed" else set()))
    if not how.startswith("aborted"):
        side.request_finished(first.finished(), ([],))


@pytest.mark.parametrize("how", ["aborted in the queue", "aborted", "aborted, load ended", "failed"])
@pytest.mark.parametrize("name", ["d-1", "d-2"])
def test_a_push_that_is_sent_again_loads_if_nothing_came_of_the_first(how: str, name: str) -> None:
    side = _side()
    _gone(side, how)
    side.take_work()
    again = _at_d(side, name=name)
    assert side.num_new_matched_tokens(again, 0) == (10, True)
    side.update_state_after_alloc(again, _blocks([4, 5, 6]), 10)
    work = side.take_work()
    assert [one.key.request_id for one in (*work.announcements, *work.offers)] == [name, name]
    follower = _at_d(side, name="d-3")
    assert side.num_new_matched_tokens(follower, 0) == (None, False)


@pytest.mark.parametrize("how", ["loaded", "nothing needed"])
@pytest.mark.parametrize("end", ["nothing needed", "aborted in the queue"])
def test_a_push_that_is_sent_again_lets_p_go_if_the_first_had_what_it_needed(how: str, end: str) -> None:
    side = _side()
    _gone(side, how)
    side.take_work()
    again = _at_d(side, name="d-2")
    assert side.num_new_matched_tokens(again, 8) == (0, False)
    if end == "nothing needed":
        side.update_state_after_alloc(again, _blocks([1, 2, 3]), 0)
    else:
        side.request_finished(again.finished("FINISHED_ABORTED"), ([],))
    work = side.take_work()
    assert [one.key.request_id for one in work.withdrawals] == ["d-2"]
    assert [*work.announcements, *work.offers] == []


def test_a_window_that_cannot_be_filled_exactly_is_computed_here() -> None:
    """The last token's query reaches into a block that vLLM does not keep for the token after it."""
    side = _side(groups=(FULL, WINDOW))
    assert WINDOW.window == 2 * BLOCK
    lengths = {}
    for num_tokens in range(9, 25):
        one = Request(f"d-{num_tokens}", num_tokens, {**TO_D, "transfer_id": f"t-{num_tokens}"})
        side.on_new_request(one)
        lengths[num_tokens] = side.num_new_matched_tokens(one, 0)[0]
    assert all(count == (0 if (n - WINDOW.window) % BLOCK == 3 else n) or n for n, count in lengths.items())
    assert 0 in lengths.values()


def _window_cache(block_tokens: int, window: int) -> CacheDescription:
    layer = LayerDescription("layers.0", 0, 0, 0, 1, 1, 1, 64 * block_tokens, plain(64, 64))
    return CacheDescription(
        model_id=0, group=0, kind="sliding_window", window=window, chunk=None, is_state=False, num_pages=100,
        block_tokens=block_tokens, pages_per_block=1, page_bytes=64 * block_tokens, num_tensors=1, layers=[layer],
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [175, 192])
def test_a_push_into_larger_blocks_of_a_window_is_exact_or_fails(num_tokens: int) -> None:
    """D does not know the size of P's blocks if it has no ticket. Of D's first block P has freed the first half."""
    window, of_p, of_d = 128, 16, 32
    group = GroupInfo(0, of_p, window, ("layers.0",))
    side, num_blocks = _side(groups=(group,)), -(-num_tokens // of_p)
    side.on_new_request(Request("p-1", num_tokens, TO_P))
    new = SimpleNamespace(req_id="p-1", num_computed_tokens=0, block_ids=([*range(1, 1 + num_blocks)],))
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    output = SimpleNamespace(
        num_scheduled_tokens={"p-1": num_tokens}, scheduled_new_reqs=[new], scheduled_cached_reqs=none
    )
    [chunk] = side.take_work(output).push_chunks
    first_kept = (num_tokens - window + 1) // of_d
    assert missing_position(replace(group, block_tokens=of_d), [1] * 6, 0, num_tokens, num_tokens) is None, "D offers"
    target = [None if i < first_kept else 50 + i for i in range(-(-num_tokens // of_d))]
    p, d = (msgspec.structs.replace(OURS, caches=[_window_cache(size, window)]) for size in (of_p, of_d))
    plan = plan_pair(p, d, by_layer=True)
    if num_tokens == 175:
        with pytest.raises(PlanError, match=r"tokens 32\.\.47: the target has block 51 for them, the source has none"):
            plan.moves(chunk.tables, [target], 0, num_tokens)
        return
    sent = [block for move in plan.moves(chunk.tables, [target], 0, num_tokens) for block in move.pairs.source]
    assert sorted(sent) == [*range(1 + 64 // of_p, 1 + num_blocks)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"transfer_id": None}, "params.transfer_id is missing"),
        ({"transfer_id": 7}, "params.transfer_id must be a string of 1..512 characters"),
        ({"transfer_id": "x" * 513}, "params.transfer_id must be a string of 1..512 characters"),
        ({"remote_host": None}, "params.remote_host must be str, is None"),
        ({"remote_port": "7000"}, "params.remote_port must be int, is '7000'"),
        ({"remote_port": 0}, "must say where P's first worker listens"),
        ({"remote_port": 70000}, "must say where P's first worker listens"),
        ({"remote_host": ""}, "must say where P's first worker listens"),
    ],
)
def test_a_push_that_cannot_be_read_is_computed_here(
    change: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = _side()
    request = _at_d(side, {**TO_D, **change})
    assert text in caplog.text
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    assert side.take_work() == StepWork()


def test_a_push_ticket_without_its_id_is_refused() -> None:
    p_side = _side()
    _, ticket = p_side.request_finished(_at_p(p_side).finished(), ([7, 8, 9],))
    with pytest.raises(TicketError, match="transfer_id is missing in a ticket whose transfer_mode is push"):
        parse_ticket({**ticket, "transfer_id": None})
    with pytest.raises(TicketError, match="transfer_mode must be one of pull, push"):
        parse_ticket({**ticket, "transfer_mode": 3})
    assert parse_push_source(TO_D) == SOURCE
    assert transfer_mode({}, "push") == "push"


# --- blocks that P may still write --------------------------------------------------------------------------------


def _offering(side: SchedulerSide) -> Request:
    request = _at_d(side)
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 10)
    return request


@pytest.mark.parametrize("is_finished", [True, False], ids=["policy fail", "policy recompute"])
def test_a_failed_push_that_is_not_settled_keeps_its_blocks(is_finished: bool) -> None:
    side = _side()
    request = _offering(side)
    first = _report({"d-1"}, WorkerNotes({"d-1": 1}))
    if is_finished:  # vLLM ends the request before it passes the report on
        side.request_finished(request.finished("FINISHED_ERROR"), ([1, 2, 3],))
    side.update_output(first)
    assert (first.finished_recving, first.failed_recving) == (None, {"d-1"})
    nothing = _report(set(), None)
    side.update_output(nothing)
    assert not nothing.finished_recving
    last = _report(set(), WorkerNotes({}, {"d-1": 1}), failed=set())
    side.update_output(last)
    assert last.finished_recving == {"d-1"}
    assert side._settling.is_idle


def test_a_failed_push_that_is_settled_is_over_at_once() -> None:
    side = _side()
    _offering(side)
    report = _report({"d-1"}, None)
    side.update_output(report)
    assert report.finished_recving == {"d-1"}


def test_every_worker_that_said_unsettled_has_to_say_settled() -> None:
    table = SettlingTable()
    assert table.update(set(), WorkerNotes({"a": 2})) == set()
    assert table.update({"a", "b"}, None) == {"b"}
    assert table.update(set(), WorkerNotes({}, {"a": 1})) == set()
    assert table.update(set(), WorkerNotes({}, {"a": 1})) == {"a"}
    assert table.is_idle


def test_settled_before_all_workers_have_reported() -> None:
    table = SettlingTable()
    table.update(set(), WorkerNotes({"a": 1}))
    table.update(set(), WorkerNotes({}, {"a": 1}))
    assert table.update({"a"}, None) == {"a"}
    assert table.is_idle


def test_notes_of_several_workers_add_up() -> None:
    both = WorkerNotes({"a": 1}, {"b": 1}).aggregate(WorkerNotes({"a": 1, "c": 1}))
    assert (both.unsettled, both.settled) == ({"a": 2, "c": 1}, {"b": 1})


def _report(received: set[str], notes: WorkerNotes | None, failed: set[str] | None = None) -> Any:
    failures = set(received) if failed is None else failed
    return SimpleNamespace(
        finished_recving=received, finished_sending=None, failed_recving=failures, kv_connector_worker_meta=notes
    )


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_of_pushes() -> None:
    assert ConnectorConfig.from_extra_config({}).transfer_mode == "pull"
    config = ConnectorConfig.from_extra_config({"transfer_mode": "push", "push_timeout_s": 9})
    assert (config.transfer_mode, config.push_timeout_s) == ("push", 9.0)
    with pytest.raises(ConfigError, match="transfer_mode must be one of pull, push, not 'both'"):
        ConnectorConfig.from_extra_config({"transfer_mode": "both"})


def test_workers_learn_of_each_other() -> None:
    side = SchedulerSide(replace(FACTS), logging.getLogger("test"))
    side.set_workers([WORKER])
    assert side.has_work()
    assert side.take_work().workers == (WORKER,)
    assert not side.has_work()
