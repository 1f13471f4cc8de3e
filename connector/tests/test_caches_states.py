# SPDX-License-Identifier: Apache-2.0
"""Mamba-like state: one block per request, good for exactly one number of tokens, and changed by the next one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.tests.test_scheduler import BLOCK, FACTS, FULL, WORKER, Request, _blocks
from connector.tests.test_worker_pair import ALONE, LEASE_S, LIMITS, Worker, _describe, _lease, _results, log
from vllm_datadist.groups import GroupInfo, missing_position, transfer_table
from vllm_datadist.messages import BlockTables, LeaseOpen, LoadJob, RequestKey, StepWork
from vllm_datadist.scheduler.side import SchedulerSide
from vllm_datadist.worker.kv_layout import HeadShare, LayoutError, describe_caches
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import WorkerSide

MAX_TOKENS = 4096
#: vLLM's "none": one block for a request of any length. Its "align": a block per position, all but the last ones null.
ONE_BLOCK = GroupInfo(1, MAX_TOKENS, None, ("layers.1",), is_state=True)
ALIGNED = GroupInfo(1, BLOCK, None, ("layers.1",), is_state=True)


LAST_SIX_OF_TEN = SimpleNamespace(offset=4, length=6)


class StateRequest(Request):
    """With what is changed at P: see `scheduler.states`."""

    def __init__(self, request_id: str, num_tokens: int, params: dict[str, Any] | None, **fields: Any) -> None:
        super().__init__(request_id, num_tokens, params)
        self.max_tokens = 1
        self.__dict__.update(fields)
        self._all_token_ids = list(range(num_tokens))

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids


def _side(group: GroupInfo = ONE_BLOCK, **fields: Any) -> SchedulerSide:
    facts = {name: getattr(FACTS, name) for name in FACTS.__slots__} | {"groups": (FULL, group)} | fields
    side = SchedulerSide(type(FACTS)(**facts), logging.getLogger("test"))
    side.set_workers([WORKER])
    side.take_work()
    return side


def _table(group: GroupInfo, num_tokens: int, block: int) -> list[int]:
    """As vLLM has it after `num_tokens` tokens: the state where they end, nothing before it."""
    return [0] * (max(0, num_tokens - 1) // group.block_tokens) + [block]


def _full(num_tokens: int, first: int) -> list[int]:
    return list(range(first, first - -num_tokens // BLOCK))


def _prefill(num_tokens: int, group: GroupInfo = ONE_BLOCK, side: SchedulerSide | None = None, **fields: Any) -> Any:
    """P's request, as vLLM would run it to its end, and the ticket."""
    side = side or _side(group)
    request = StateRequest("p-1", num_tokens, {"do_remote_decode": True}, **fields)
    side.on_new_request(request)
    request.num_computed_tokens = max(request.num_computed_tokens, request.num_prompt_tokens)
    computed = request.num_computed_tokens
    _, ticket = side.request_finished(request.finished(), [_full(computed, 101), _table(group, computed, 77)])
    return request, ticket


@pytest.mark.parametrize("group", [ONE_BLOCK, ALIGNED], ids=["none", "align"])
@pytest.mark.parametrize("num_tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 5 * BLOCK + 1])
def test_p_stops_before_the_last_token_and_d_takes_the_state_there(group: GroupInfo, num_tokens: int) -> None:
    request, ticket = _prefill(num_tokens, group)
    assert request.num_prompt_tokens == len(request.all_token_ids) == len(request.prompt_token_ids) == num_tokens - 1
    side = _side(group)
    taken = StateRequest("d-1", num_tokens, ticket)
    side.on_new_request(taken)
    assert taken.num_prompt_tokens == num_tokens
    assert side.num_new_matched_tokens(taken, 0) == (num_tokens - 1, True)
    target = [*_table(group, num_tokens - 1, 9), 10]  # vLLM may have given it one block more
    side.update_state_after_alloc(taken, _blocks(_full(num_tokens - 1, 1), target), num_tokens - 1)
    [load] = side.take_work().loads
    assert load.groups[1] == BlockTables((77,), (9,))
    assert (load.first_token, load.end_token) == (0, num_tokens - 1)


def test_engines_of_different_longest_requests_fit() -> None:
    """In vLLM's mode "none" the block size of a state group is that length."""
    _, ticket = _prefill(10, GroupInfo(1, 2 * MAX_TOKENS, None, ("layers.1",), is_state=True))
    side = _side()
    request = StateRequest("d-1", 10, ticket)
    side.on_new_request(request)
    assert side.num_new_matched_tokens(request, 0) == (9, True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"max_tokens": 8}, "it decodes for itself: it needs all of its prompt", id="decodes"),
        pytest.param({"skip_reading_prefix_cache": True}, "its prompt's logprobs are wanted", id="logprobs"),
        pytest.param(
            {"mm_features": [SimpleNamespace(modality="", identifier="", mm_position=LAST_SIX_OF_TEN)]},
            "an image cannot be cut",
            id="ends with an image",
        ),
    ],
)  # fmt: skip
def test_other_requests_are_left_whole_and_their_state_is_not_taken(fields: dict[str, Any], why: str) -> None:
    request, ticket = _prefill(10, **fields)
    assert request.num_prompt_tokens == 10, why
    side = _side()
    taken = StateRequest("d-1", 10, ticket, **{k: v for k, v in fields.items() if k == "mm_features"})
    side.on_new_request(taken)
    assert side.num_new_matched_tokens(taken, 0) == (0, False), "it would see the last token twice"
    side.update_state_after_alloc(taken, _blocks([1, 2, 3], [4]), 0)
    assert len(side.take_work().releases) == 1


def test_engines_without_state_compute_the_whole_prompt() -> None:
    side = _side(groups=(FULL,))
    request = StateRequest("p-1", 10, {"do_remote_decode": True})
    side.on_new_request(request)
    assert request.num_prompt_tokens == 10


def test_one_token_is_left_to_d() -> None:
    request, ticket = _prefill(1)
    assert request.num_prompt_tokens == 1
    side = _side()
    taken = StateRequest("d-1", 1, ticket)
    side.on_new_request(taken)
    assert side.num_new_matched_tokens(taken, 0) == (0, False)


def test_a_state_that_a_step_in_flight_has_changed_is_not_handed_off() -> None:
    _, ticket = _prefill(10, num_computed_tokens=10, num_in_flight_tokens=1, max_tokens=1)
    assert ticket is None


def test_a_turn_of_a_conversation_goes_on_where_the_state_is_or_not_at_all() -> None:
    """D has decoded; its ticket covers generated tokens. The next prompt repeats them all, or departs from them."""
    request = StateRequest("d-1", 2 * BLOCK, {"do_remote_decode": True}, max_tokens=9)
    side = _side(ALIGNED)
    side.on_new_request(request)
    request._all_token_ids += range(2 * BLOCK, 3 * BLOCK + 1)
    request.num_computed_tokens = 3 * BLOCK
    _, ticket = side.request_finished(request.finished(), [_full(3 * BLOCK, 101), _table(ALIGNED, 3 * BLOCK, 77)])
    for prompt, num_loaded in ((range(3 * BLOCK + 5), 3 * BLOCK), ([*range(2 * BLOCK + 1), *[99] * 8], 0)):
        again = StateRequest("p-2", len(prompt), ticket)
        again._all_token_ids = list(prompt)
        side = _side(ALIGNED)
        side.on_new_request(again)
        assert side.num_new_matched_tokens(again, 0)[0] == num_loaded


def test_a_push_of_a_state_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    push = {"transfer_mode": "push", "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": 1}
    side = _side()
    with caplog.at_level(logging.WARNING):
        request = StateRequest("d-1", 10, {"do_remote_prefill": True} | push)
        side.on_new_request(request)
    assert "state is handed off by pull" in caplog.text
    assert side.num_new_matched_tokens(request, 0) == (0, False)
    p = _side(transfer_mode="push")
    _, ticket = _prefill(10, side=p)
    assert ticket["transfer_mode"] == "pull"
    assert p.take_work().push_opens == []


@pytest.mark.parametrize("num_tokens", [1, BLOCK, BLOCK + 1, 7 * BLOCK])
@pytest.mark.parametrize("group", [ONE_BLOCK, ALIGNED])
def test_the_state_is_the_block_at_the_last_position(group: GroupInfo, num_tokens: int) -> None:
    table = [*_table(group, num_tokens, 77), 8, 9]
    assert list(transfer_table(group, table, num_tokens)) == [77]
    assert missing_position(group, [77], 0, num_tokens, num_tokens + 1) is None
    assert missing_position(group, [0], 0, num_tokens, num_tokens + 1) == num_tokens
    assert missing_position(group, [], 0, num_tokens, num_tokens + 1) == num_tokens


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_a_chunk_is_there_for_the_last_token_or_the_prompt_is_prefilled_here() -> None:
    """vLLM drops the blocks of all chunks before the next token's. A naive model, every length and chunk."""
    for chunk in (BLOCK, 3 * BLOCK, 2 * BLOCK + 2):
        group = GroupInfo(0, BLOCK, None, ("layers.0",), chunk=chunk)
        for num_tokens in range(1, 8 * BLOCK):
            first_kept = num_tokens // chunk * chunk // BLOCK
            table = [0 if i < first_kept else 10 + i for i in range(-(-num_tokens // BLOCK))]
            last = num_tokens - 1
            seen = range(last // chunk * chunk, last + 1)
            is_there = all(table[token // BLOCK] for token in seen)
            missing = missing_position(group, table, 0, num_tokens, num_tokens)
            assert (missing is None) == is_there, (chunk, num_tokens)
            if missing is not None:
                assert missing in range(seen.start // BLOCK * BLOCK, last + 1)


# --- bytes ----------------------------------------------------------------------------------------------------------

NUM_BLOCKS, TOKENS, PAGE, STATE = 8, 4, 256, 100
KV = GroupInfo(0, TOKENS, None, ("a.0", "a.1"))
STATES = GroupInfo(1, MAX_TOKENS, None, ("s.0", "s.1"), is_state=True)
KINDS = ("full_attention", "mamba: mamba2 [[5, 5], [75]] ['torch.int8', 'torch.int8']; conv state SD")
SIZE_BYTES = 2 * NUM_BLOCKS * PAGE


def _views(raw: torch.Tensor) -> dict[str, torch.Tensor]:
    """As vLLM lays a hybrid model out: both groups over the same pages, states padded to a page."""
    kv = raw.view(torch.float32).view(2, NUM_BLOCKS, 1, TOKENS, PAGE // TOKENS // 4)
    states = raw.as_strided((2, NUM_BLOCKS, 1, 1, STATE), (NUM_BLOCKS * PAGE, PAGE, STATE, STATE, 1))
    return {"a.0": kv[0], "a.1": kv[1], "s.0": states[0], "s.1": states[1]}


def _start(kinds: Sequence[str] = KINDS) -> Worker:
    side = WorkerSide(DataDistNode("127.0.0.1", 0, "shm", SIZE_BYTES), ALONE, LIMITS, log)
    with side.place_kv_cache(SIZE_BYTES):
        raw = torch.zeros(SIZE_BYTES, dtype=torch.int8, device="cpu")
    tensors = _views(raw)
    caches = describe_caches(tensors, [KV, STATES], kinds, NUM_BLOCKS, HeadShare(0, 1, 1))
    side.register(tensors, caches, _describe(caches=[cache.description for cache in caches]))
    return Worker(side, tensors | {"raw": raw})


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    workers: list[Worker] = []
    try:
        workers += [_start(), _start()]
        yield workers[0], workers[1]
    finally:
        for worker in workers:
            worker.side.close()


def _load(p: Worker, d: Worker) -> Any:
    remote = _lease(p)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    tables = (BlockTables((5, 2), (1, 3)), BlockTables((4,), (6,)))
    d.side.start(StepWork(loads=[LoadJob(RequestKey("d-1", 1), remote, tables, TOKENS, 2 * TOKENS)]))
    return _results(d, lambda results: bool(results.received))


def test_the_state_arrives_with_the_blocks_that_are_lacking(pair: tuple[Worker, Worker]) -> None:
    """D has the first block of tokens already; the state comes whole all the same, and nothing else is written."""
    p, d = pair
    p.tensors["raw"].copy_(torch.randint(1, 100, (SIZE_BYTES,), dtype=torch.int8))
    results = _load(p, d)
    assert results.failed == set(), results.loads[0].error
    wanted = torch.zeros(SIZE_BYTES, dtype=torch.int8)
    for name, source, target in (("a.0", 2, 3), ("a.1", 2, 3), ("s.0", 4, 6), ("s.1", 4, 6)):
        _views(wanted)[name][target] = p.tensors[name][source]
    assert torch.equal(d.tensors["raw"], wanted)


def test_states_of_another_layout_are_refused_by_name(pair: tuple[Worker, Worker]) -> None:
    other = _start((KINDS[0], KINDS[1].replace("SD", "DS")))
    try:
        results = _load(pair[0], other)
    finally:
        other.side.close()
    assert results.failed
    assert "kind is" in str(results.loads[0].error)
    assert "conv state DS" in str(results.loads[0].error)


def test_states_in_pieces_are_refused_by_name() -> None:
    pieces = torch.zeros(SIZE_BYTES, dtype=torch.int8).as_strided((NUM_BLOCKS, 1, 1, STATE), (PAGE, STATE, STATE, 2))
    with pytest.raises(LayoutError, match=r"s\.0: the states .*LBHNC"):
        describe_caches({"s.0": pieces, "s.1": pieces}, [STATES], KINDS[1:], NUM_BLOCKS, HeadShare(0, 1, 1))
