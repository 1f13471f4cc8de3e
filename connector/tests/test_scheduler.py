# SPDX-License-Identifier: Apache-2.0
"""The scheduler side with hand-made requests: who is told what, when, and how often."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import Endpoint, StepWork
from vllm_datadist.scheduler.side import EngineFacts, SchedulerSide

BLOCK = 4
FULL = GroupInfo(0, BLOCK, None, ("layers.0",))
WINDOW = GroupInfo(1, BLOCK, 8, ("layers.1",))
FACTS = EngineFacts("engine-p", True, True, (FULL,), tp_size=1, pp_size=1, lease_s=30.0)
WORKER = Endpoint(0, 0, "127.0.0.1", 5000, 2**63)


@dataclass
class Request:
    """What the connector reads of a vLLM request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(range(self.num_prompt_tokens))

    def finished(self, status: str = "FINISHED_LENGTH_CAPPED") -> Request:
        self.status = SimpleNamespace(name=status)
        return self


@dataclass
class Output:
    """What the connector reads of vLLM's report of a step."""

    finished_recving: set[str] | None = None
    finished_sending: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)


def _side(**changes: Any) -> SchedulerSide:
    side = SchedulerSide(replace(FACTS, **changes), logging.getLogger("test"))
    side.set_workers([WORKER])
    assert side.take_work().workers == (WORKER,)
    return side


def _blocks(*groups: Sequence[int]) -> list[list[SimpleNamespace]]:
    return [[SimpleNamespace(block_id=i, is_null=i == 0) for i in group] for group in groups]


def _ticket(num_tokens: int, ids: Sequence[Sequence[int]] | None = None, **changes: Any) -> dict[str, Any]:
    """What a P of the same make returns for a prompt of `num_tokens` tokens."""
    side = _side(**changes)
    ids = ids if ids is not None else [list(range(101, 101 + -(-num_tokens // BLOCK)))]
    request = Request("p-1", num_tokens, {"do_remote_decode": True}, num_computed_tokens=num_tokens)
    delayed, params = side.request_finished(request.finished(), ids)
    assert delayed
    assert params is not None
    return params


def _arrived(side: SchedulerSide, num_tokens: int, params: dict[str, Any] | None = None, name: str = "d-1") -> Request:
    request = Request(name, num_tokens, _ticket(num_tokens) if params is None else params)
    side.on_new_request(request)
    return request


def _loading(side: SchedulerSide, num_tokens: int = 10, name: str = "d-1") -> Request:
    request = _arrived(side, num_tokens, name=name)
    side.update_state_after_alloc(request, _blocks(range(1, 1 + -(-num_tokens // BLOCK))), num_tokens)
    return request


# --- P ------------------------------------------------------------------------------------------------------------


def test_p_makes_a_ticket_and_opens_one_lease() -> None:
    side = _side()
    request = Request("p-1", 10, {"do_remote_decode": True}, num_computed_tokens=10)
    delayed, params = side.request_finished(request.finished(), ([7, 8, 9],))
    assert delayed
    assert params["remote_block_ids"] == [[7, 8, 9]]
    assert params["remote_num_tokens"] == 10
    assert params["datadist"]["workers"][0]["cluster_id"] == str(2**63)
    [lease] = side.take_work().leases
    assert (lease.key.request_id, lease.key.attempt, lease.lease_s) == ("p-1", params["datadist"]["attempt"], 30.0)
    assert not side.has_work()


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_p_frees_at_once_what_did_not_finish_well(status: str) -> None:
    side = _side()
    request = Request("p-1", 10, {"do_remote_decode": True}, num_computed_tokens=10)
    assert side.request_finished(request.finished(status), ([7, 8, 9],)) == (False, None)
    assert not side.has_work()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": None}])
def test_p_hands_off_only_what_it_is_asked_to(params: dict[str, Any] | None) -> None:
    side = _side()
    assert side.request_finished(Request("p-1", 10, params).finished(), ([7],)) == (False, None)


def test_p_hands_off_nothing_without_blocks_or_workers() -> None:
    request = Request("p-1", 10, {"do_remote_decode": True}).finished()
    assert _side().request_finished(request, ([],)) == (False, None)
    lonely = SchedulerSide(FACTS, logging.getLogger("test"))
    assert lonely.request_finished(request, ([7],)) == (False, None)


def test_b28_p_uses_the_final_block_list_however_the_prompt_was_chunked() -> None:
    """Chunks never pass through the connector: only the list at the end counts, also if the last added no block."""
    side = _side()
    request = Request("p-1", 36, {"do_remote_decode": True}, num_computed_tokens=33)
    side.on_new_request(request)
    side.update_state_after_alloc(request, _blocks([1, 2]), 0)
    side.update_state_after_alloc(request, _blocks([1, 2]), 0)
    request.num_computed_tokens = 36
    _, params = side.request_finished(request.finished(), ([1, 2],))
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[1, 2]], 36)


def test_b09_every_attempt_of_a_request_id_has_its_own_number() -> None:
    side = _side()
    attempts = []
    for _ in range(3):
        request = Request("same", 10, {"do_remote_decode": True}, num_computed_tokens=10)
        _, params = side.request_finished(request.finished(), ([7],))
        attempts.append(params["datadist"]["attempt"])
        output = Output(finished_sending={"same"})
        side.update_output(output)
        assert output.finished_sending == {"same"}
    assert len(set(attempts)) == 3


def test_a_consumer_serves_a_hand_off_request_itself_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    side = _side(is_producer=False)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            request = Request(name, 10, {"do_remote_decode": True}, num_computed_tokens=10)
            side.on_new_request(request)
            assert side.request_finished(request.finished(), ([7],)) == (False, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "kv_consumer" in caplog.text


def test_a_producer_prefills_a_ticket_request_itself_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    side = _side(is_consumer=False)
    params = _ticket(10)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            request = _arrived(side, 10, params, name)
            assert side.num_new_matched_tokens(request, 0) == (0, False)
    assert len(caplog.records) == 1
    assert not side.has_work()


@dataclass(frozen=True)
class Tokens:
    remote: float = 0
    local: float = 0
    failed_loads: float = 0


def _tokens(side: SchedulerSide) -> Tokens:
    counts = side.take_counts()
    return Tokens(*(counts.total(name) for name in ("remote_tokens", "local_tokens", "failed_loads")))


# --- D: the good way ----------------------------------------------------------------------------------------------


def test_d_watches_then_loads_then_counts() -> None:
    side = _side()
    request = _arrived(side, 10)
    [watch] = side.take_work().watches
    assert watch.remote.key.request_id == "p-1"
    assert side.num_new_matched_tokens(request, 0) == (10, True)
    assert side.num_new_matched_tokens(request, 0) == (10, True)
    assert not side.has_work()
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 10)
    [load] = side.take_work().loads
    assert (load.first_token, load.end_token) == (0, 10)
    assert (load.groups[0].source, load.groups[0].target) == ((101, 102, 103), (1, 2, 3))
    side.update_output(Output(finished_recving={"d-1"}))
    assert _tokens(side) == Tokens(remote=10)
    assert side.take_counts().is_empty()


LENGTHS = [k * BLOCK + rest for k in (2, 3) for rest in (-1, 0, 1)]


@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [(num_tokens, cached) for num_tokens in LENGTHS for cached in range(0, num_tokens, BLOCK)],
)
def test_b26_only_the_tail_that_d_lacks_is_loaded(num_tokens: int, cached: int) -> None:
    side = _side()
    request = _arrived(side, num_tokens)
    assert side.num_new_matched_tokens(request, cached) == (num_tokens - cached, True)
    num_blocks = -(-num_tokens // BLOCK)
    side.update_state_after_alloc(request, _blocks(range(1, num_blocks + 1)), num_tokens - cached)
    [load] = side.take_work().loads
    assert (load.first_token, load.end_token) == (cached, num_tokens)
    assert load.groups[0].source == tuple(range(101, 101 + num_blocks))
    assert load.groups[0].target == tuple(range(1, 1 + num_blocks))


@pytest.mark.parametrize("num_tokens", [4 * BLOCK, 4 * BLOCK + 3])
def test_b06_p_is_told_when_d_needs_nothing(num_tokens: int) -> None:
    for _ in range(20):
        side = _side()
        request = _arrived(side, num_tokens)
        assert side.num_new_matched_tokens(request, num_tokens) == (0, False)
        side.update_state_after_alloc(request, _blocks([1, 2, 3, 4, 5]), 0)
        side.update_state_after_alloc(request, _blocks([1, 2, 3, 4, 5]), 0)
        work = side.take_work()
        assert ([job.remote.key.request_id for job in work.releases], work.loads) == (["p-1"], [])
        assert _tokens(side) == Tokens(local=num_tokens)


def test_p_that_holds_less_or_more_than_the_prompt() -> None:
    side = _side()
    request = _arrived(side, 12, _ticket(8))
    assert side.num_new_matched_tokens(request, 0) == (8, True)
    params = _ticket(8)
    params["remote_num_tokens"] = 20
    side = _side()
    request = _arrived(side, 8, params, "d-2")
    assert side.num_new_matched_tokens(request, 0) == (8, True)


def test_a_second_call_after_the_load_changes_nothing() -> None:
    side = _side()
    request = _loading(side)
    side.take_work()
    side.update_output(Output(finished_recving={"d-1"}))
    side.update_state_after_alloc(request, _blocks([1, 2, 3, 4]), 0)
    assert not side.has_work()


def test_a_preempted_or_failed_request_is_not_loaded_again() -> None:
    side = _side()
    request = _loading(side)
    side.take_work()
    side.update_output(Output(finished_recving={"d-1"}, failed_recving={"d-1"}))
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 0)
    assert not side.has_work()
    assert _tokens(side) == Tokens(local=10, failed_loads=1)


# --- D: requests that go away --------------------------------------------------------------------------------------


def test_a_request_that_ends_before_it_was_scheduled_releases_p() -> None:
    side = _side()
    request = _arrived(side, 10)
    key = side.take_work().watches[0].key
    assert side.request_finished(request.finished("FINISHED_ABORTED"), ([],)) == (False, None)
    work = side.take_work()
    assert (work.ended, [job.key for job in work.releases]) == ([key], [key])


def test_a_request_that_the_front_end_refused_releases_p() -> None:
    """vLLM sends it with one token and aborts it at once, so that P hears of it (B03)."""
    side = _side()
    request = Request("d-1", 1, _ticket(10))
    request.abort_immediately = True
    side.on_new_request(request)
    side.request_finished(request.finished("FINISHED_ABORTED"), ([],))
    assert len(side.take_work().releases) == 1


def test_an_abort_while_loading_is_reported_to_vllm_once_and_never_twice() -> None:
    side = _side()
    request = _loading(side)
    key = side.take_work().loads[0].key
    assert side.request_finished(request.finished("FINISHED_ABORTED"), ([1, 2, 3],)) == (False, None)
    work = side.take_work()
    assert (work.ended, work.releases) == ([key], [])
    output = Output(finished_recving={"d-1"}, failed_recving={"d-1"})
    side.update_output(output)
    assert output.finished_recving == {"d-1"}
    assert _tokens(side) == Tokens()
    again = Output(finished_recving={"d-1"}, failed_recving={"d-1"})
    side.update_output(again)
    assert (again.finished_recving, again.failed_recving) == (set(), set())


def test_a_load_that_failed_under_policy_fail_is_counted() -> None:
    """vLLM finishes the request with an error before it passes the report on."""
    side = _side()
    request = _loading(side)
    side.request_finished(request.finished("FINISHED_ERROR"), ([1, 2, 3],))
    side.update_output(Output(finished_recving={"d-1"}, failed_recving={"d-1"}))
    assert _tokens(side) == Tokens(failed_loads=1)


def test_b07_ends_of_unknown_ended_and_doubled_requests_are_never_fatal() -> None:
    side = _side()
    request = _loading(side)
    done = Request("p-9", 10, {"do_remote_decode": True}, num_computed_tokens=10)
    side.request_finished(done.finished(), ([7],))
    both = Output(finished_recving={"d-1", "unknown"}, finished_sending={"p-9", "unknown"})
    side.update_output(both)
    assert (both.finished_recving, both.finished_sending) == ({"d-1", "unknown"}, {"p-9", "unknown"})
    again = Output(finished_recving={"d-1"}, finished_sending={"p-9"})
    side.update_output(again)
    assert (again.finished_recving, again.finished_sending) == (set(), set())
    side.request_finished(request.finished(), ([1, 2, 3],))
    side.request_finished(request, ([1, 2, 3],))
    side.update_output(Output())
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 10)
    assert side.num_new_matched_tokens(request, 0) == (0, False)


def test_b09_a_request_id_that_comes_back_gets_its_own_load() -> None:
    side = _side()
    first = _loading(side)
    key = side.take_work().loads[0].key
    side.update_output(Output(finished_recving={"d-1"}))
    side.request_finished(first.finished(), ([1, 2, 3],))
    side.take_work()
    _loading(side)
    second = side.take_work().loads[0].key
    assert (second.request_id, second.attempt == key.attempt) == ("d-1", False)
    output = Output(finished_recving={"d-1"})
    side.update_output(output)
    assert output.finished_recving == {"d-1"}


# --- D: tickets that do not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": (replace(FULL, block_tokens=0),)}, "number of block sizes is 1 here and 0 at P"),
        ({"groups": (FULL, WINDOW)}, "number of KV cache groups is 1 here and 2 at P"),
    ],
)
def test_a_ticket_that_does_not_fit_is_released_and_named(
    changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = _side()
    ids = [[101, 102, 103]] * len(changes.get("groups", (FULL,)))
    with caplog.at_level(logging.WARNING):
        request = _arrived(side, 10, _ticket(10, ids, **changes))
    assert re.search(named, caplog.text)
    work = side.take_work()
    assert (len(work.releases), work.watches) == (1, [])
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 0)
    assert not side.has_work()


def test_a_ticket_of_another_prompt_is_released_and_named(caplog: pytest.LogCaptureFixture) -> None:
    side = _side()
    request = Request("d-1", 10, _ticket(10))
    request.prompt_token_ids[9] = 77
    with caplog.at_level(logging.WARNING):
        side.on_new_request(request)
    assert "prompt_digest" in caplog.text
    assert len(side.take_work().releases) == 1
    assert side.num_new_matched_tokens(request, 0) == (0, False)


def test_a_prompt_without_token_ids_is_not_that_of_a_ticket_with_them() -> None:
    """Such prompts are known by their embeddings: see test_identity.py."""
    side = _side()
    request = Request("d-1", 10, _ticket(10))
    request.prompt_token_ids = None
    side.on_new_request(request)
    assert side.num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "datadist": {"version": 9}}]
)
def test_a_malformed_ticket_means_prefilling_here(params: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    side = _side()
    with caplog.at_level(logging.WARNING):
        request = _arrived(side, 10, params)
    assert "d-1: unusable ticket, prefilling here: " in caplog.text
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, _blocks([1, 2, 3]), 0)
    side.request_finished(request.finished(), ([1, 2, 3],))
    assert side.take_work() == StepWork()


# --- windows -------------------------------------------------------------------------------------------------------


def _window_ids(num_tokens: int, at: int) -> list[int]:
    """A window group's blocks of a prompt, when the next token is the one at position `at`: 0 where dropped."""
    kept = max(0, at - WINDOW.window + 1) // BLOCK
    return [0 if i < kept else 201 + i for i in range(-(-num_tokens // BLOCK))]


@pytest.mark.parametrize("num_tokens", range(1, 6 * BLOCK))
def test_a_window_group_is_loaded_exactly_or_not_at_all(num_tokens: int) -> None:
    """vLLM recomputes the last prompt token, which sees one token further back than the next one."""
    groups = (FULL, WINDOW)
    full = list(range(101, 101 + -(-num_tokens // BLOCK)))
    side = _side(groups=groups)
    request = _arrived(
        side, num_tokens, _ticket(num_tokens, [full, _window_ids(num_tokens, num_tokens)], groups=groups)
    )
    count, _ = side.num_new_matched_tokens(request, 0)
    oldest_seen = max(0, num_tokens - WINDOW.window)
    oldest_kept = max(0, num_tokens - WINDOW.window + 1) // BLOCK * BLOCK
    assert count == (num_tokens if oldest_seen >= oldest_kept else 0)
    if not count:
        return
    target = [0 if i == 0 else i + 1000 for i in _window_ids(num_tokens, num_tokens)]
    side.update_state_after_alloc(request, _blocks(full, target), count)
    [load] = side.take_work().loads
    for source, wanted in zip(load.groups[1].source, load.groups[1].target, strict=True):
        assert (source is None) == (wanted is None)


def test_a_window_that_p_has_passed_is_not_loaded() -> None:
    """P went on decoding: the blocks behind its window are gone, though D's query needs them."""
    groups = (FULL, WINDOW)
    ids = [[101, 102, 103, 104, 105], _window_ids(18, 30)]
    side = _side(groups=groups)
    request = _arrived(side, 18, _ticket(18, ids, groups=groups))
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    side.update_state_after_alloc(request, _blocks([1, 2, 3, 4, 5], [0, 0, 6, 7, 8]), 0)
    assert len(side.take_work().releases) == 1
