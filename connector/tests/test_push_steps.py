# SPDX-License-Identifier: Apache-2.0
"""What P's scheduler side tells its workers of push requests, from hand-made scheduler outputs; and a step's layers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from datadist_core.types import Deadline
from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import PushChunk, PushEnd, PushOpen, PushVoid, RequestKey, StepWork
from vllm_datadist.scheduler.pushes import PushRequests
from vllm_datadist.worker.later import WorkPool
from vllm_datadist.worker.layer_sync import CacheLayers, LayerProgress, StepLayers

BLOCK = 8
FULL = GroupInfo(0, BLOCK, None, ("layers.0",))
WINDOW = GroupInfo(1, BLOCK, 2 * BLOCK, ("layers.1",))
KEY = RequestKey("p-1", 1)


def _request(num_tokens: int = 40, name: str = "p-1") -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=num_tokens, num_preemptions=0, num_computed_tokens=0, num_in_flight_tokens=0
    )


def _new(request: Any, first: int, blocks: Sequence[Sequence[int]]) -> SimpleNamespace:
    return SimpleNamespace(req_id=request.request_id, num_computed_tokens=first, block_ids=tuple(map(list, blocks)))


def _output(new: Sequence[Any] = (), cached: Sequence[tuple[Any, ...]] = (), **num_tokens: int) -> SimpleNamespace:
    """`cached`: (request, first token, new blocks or None, whether it is resumed)."""
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request, *_ in cached],
            num_computed_tokens=[first for _, first, *_ in cached],
            new_block_ids=[blocks for _, _, blocks, _ in cached],
            resumed_req_ids={request.request_id for request, _, _, resumed in cached if resumed},
        ),
        num_scheduled_tokens={name.replace("_", "-"): count for name, count in num_tokens.items()},
    )


class _Engine:
    """One push request, scheduled by hand; block ids are 100 + position, and 200 + position in the second group."""

    def __init__(self, num_tokens: int, groups: Sequence[GroupInfo] = (FULL,)) -> None:
        self.request = _request(num_tokens)
        self.groups = groups
        self.pushes = PushRequests(groups)
        work = StepWork()
        self.pushes.open(work, self.request, KEY, "t", "digest")
        assert work.push_opens == [PushOpen(KEY, "t", num_tokens, "digest")]
        self.num_computed = 0
        self.num_blocks = 0
        self.is_new = True

    def step(self, num_tokens: int, resumed_as_new: bool = False) -> StepWork:
        end = self.num_computed + num_tokens
        num_blocks = -(-end // BLOCK)
        new = [[100 * (g + 1) + i for i in range(self.num_blocks, num_blocks)] for g in range(len(self.groups))]
        is_resumed = not self.is_new and self.num_computed == 0
        if self.is_new or (is_resumed and resumed_as_new):
            output = _output(new=[_new(self.request, self.num_computed, new)], p_1=num_tokens)
        else:
            blocks = new if any(new) else None
            output = _output(cached=[(self.request, self.num_computed, blocks, is_resumed)], p_1=num_tokens)
        self.is_new, self.num_computed, self.num_blocks = False, end, num_blocks
        self.request.num_computed_tokens = end
        work = StepWork()
        self.pushes.step(work, output)
        return work

    def preempt(self) -> None:
        self.request.num_preemptions += 1
        self.num_computed = self.num_blocks = 0


@pytest.mark.parametrize("chunk", range(1, 34))
def test_chunks_cover_the_prompt_once_and_in_order(chunk: int) -> None:
    """B28 among them: a last chunk that needs no new block."""
    engine = _Engine(36)
    chunks: list[PushChunk] = []
    while engine.num_computed < 36:
        chunks += engine.step(min(chunk, 36 - engine.num_computed)).push_chunks
    assert chunks[0].first_token == 0
    assert [c.first_token for c in chunks[1:]] == [c.end_token for c in chunks[:-1]]
    assert chunks[-1].end_token == 36
    for one in chunks:
        assert one.tables == (tuple(100 + i for i in range(-(-one.end_token // BLOCK))),)


def test_tokens_behind_the_prompt_are_not_pushed() -> None:
    """Drafts may be rejected, and what is generated is not D's."""
    engine = _Engine(20)
    assert [c.end_token for c in engine.step(24).push_chunks] == [20]
    assert engine.step(4).is_empty()


def test_what_the_first_step_finds_cached_counts_as_computed_by_it() -> None:
    """Another request may compute those blocks in the same step."""
    engine = _Engine(36)
    engine.num_computed = 16
    [chunk] = engine.step(20).push_chunks
    assert (chunk.first_token, chunk.end_token) == (0, 36)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_blocks_that_vllm_frees_with_the_prompts_end_are_never_pushed(chunk: int) -> None:
    """It does so before it says that the request has finished, and earlier where a prompt comes in chunks."""
    for num_tokens in range(1, 8 * BLOCK):
        engine = _Engine(num_tokens, (FULL, WINDOW))
        first_kept = max(0, num_tokens - 2 * BLOCK + 1) // BLOCK
        while engine.num_computed < num_tokens:
            [one] = engine.step(min(chunk, num_tokens - engine.num_computed)).push_chunks
            wanted = [200 + i if i >= first_kept else None for i in range(len(one.tables[0]))]
            assert (None not in one.tables[0], list(one.tables[1])) == (True, wanted)


@pytest.mark.parametrize("as_new", [False, True])
def test_a_preempted_request_is_void_and_begins_anew(as_new: bool) -> None:
    engine = _Engine(36)
    engine.step(20)
    engine.preempt()
    work = StepWork()
    engine.pushes.step(work, _output())
    assert (work.push_voids, work.push_chunks) == ([PushVoid(KEY)], [])
    again = engine.step(20, as_new)
    assert not again.push_voids
    [chunk] = again.push_chunks
    assert (chunk.first_token, chunk.end_token, chunk.tables) == (0, 20, ((100, 101, 102),))


def test_preempted_and_resumed_within_one_step() -> None:
    engine = _Engine(36)
    engine.step(20)
    engine.preempt()
    work = engine.step(36)
    assert work.push_voids == [PushVoid(KEY)]
    assert [(c.first_token, c.end_token) for c in work.push_chunks] == [(0, 36)]


def test_a_window_hides_blocks_that_nobody_wants() -> None:
    engine = _Engine(40, (FULL, WINDOW))
    engine.step(20)
    [chunk] = engine.step(20).push_chunks
    assert chunk.tables == ((100, 101, 102, 103, 104), (None, None, None, 203, 204))


def test_null_blocks_are_none() -> None:
    request = _request(40)
    pushes, work = PushRequests((FULL, WINDOW)), StepWork()
    pushes.open(work, request, KEY, "t", "digest")
    pushes.step(work, _output(new=[_new(request, 32, [[1, 2, 3, 4, 5], [0, 0, 0, 7, 8]])], p_1=8))
    assert work.push_chunks[0].tables == ((1, 2, 3, 4, 5), (None, None, None, 7, 8))


def test_a_request_that_generates_on_ends_its_push_before_the_window_leaves_the_prompt() -> None:
    engine = _Engine(40, (FULL, WINDOW))
    engine.step(40)
    ends: list[PushEnd] = []
    for _ in range(40):
        ends += engine.step(1).push_ends
    [end] = ends
    assert "token 24 has left the window of KV cache group 1" in end.error
    work = StepWork()
    engine.pushes.finish(work, "p-1", True, "FINISHED_LENGTH_CAPPED")
    assert work.is_empty()


@pytest.mark.parametrize("in_flight", [0, 4])
@pytest.mark.parametrize("num_output_tokens", range(1, 9))
def test_a_request_that_finishes_says_if_vllm_has_freed_what_d_wants(num_output_tokens: int, in_flight: int) -> None:
    """vLLM frees what has left the window before it asks for the blocks, also by tokens that no step has told of."""
    engine, work = _Engine(40, (FULL, WINDOW)), StepWork()
    for num_tokens in (40, *[1] * (num_output_tokens - 1)):
        assert not engine.step(num_tokens).push_ends
    engine.request.num_computed_tokens += in_flight
    engine.request.num_in_flight_tokens = in_flight
    engine.pushes.finish(work, "p-1", True, "FINISHED_LENGTH_CAPPED")
    num_processed = 40 + num_output_tokens - 1
    is_dropped = (num_processed - 2 * BLOCK + 1) // BLOCK > (40 - 2 * BLOCK + 1) // BLOCK
    assert is_dropped is (num_output_tokens == 8)
    [end] = work.push_ends
    assert end.error == ("token 24 has left the window of KV cache group 1 at P" if is_dropped else "")


def test_the_end_says_whether_blocks_are_held() -> None:
    for is_held, error in ((True, ""), (False, "P has ended the request as FINISHED_ABORTED")):
        engine, work = _Engine(36), StepWork()
        assert engine.pushes.is_taken("t")
        engine.pushes.finish(work, "p-1", is_held, "FINISHED_ABORTED")
        assert work.push_ends == [PushEnd(KEY, error)]
        assert not engine.pushes.is_taken("t")
        assert len(engine.pushes) == 0


def test_other_requests_are_none_of_its_business() -> None:
    engine, work = _Engine(36), StepWork()
    engine.pushes.step(work, _output(new=[_new(_request(8, "other"), 0, [[1]])], other=8))
    engine.pushes.finish(work, "other", True, "FINISHED_STOPPED")
    assert work.is_empty()


# --- the layers of a step -----------------------------------------------------------------------------------------


def test_a_layer_is_released_when_it_is_computed_and_all_at_the_end() -> None:
    progress = LayerProgress()
    step = progress.begin()
    brief = CacheLayers(step, range(2), ("a", "b"), lambda: True, Deadline.after(0.01))
    cache = CacheLayers(step, range(2), ("a", "b"), lambda: True, Deadline.after(20))
    assert not brief.synchronize_layer(0, 1)
    progress.computed("a")
    assert cache.synchronize_layer(0, 1)
    assert not brief.synchronize_layer(1, 1)
    released: list[bool] = []
    waiting = threading.Thread(target=lambda: released.append(cache.synchronize_layer(1, 1)), daemon=True)
    waiting.start()
    progress.end()
    waiting.join(20)
    assert released == [True]
    assert step.has_ended


def test_a_failed_step_releases_nothing() -> None:
    progress = LayerProgress()
    step = progress.begin()
    progress.computed("a")
    progress.end(has_failed=True)
    assert not step.wait("a", 1)
    assert not step.has_ended
    step = progress.begin()
    progress.begin()
    assert not step.wait("a", 1)


def test_without_layerwise_only_the_end_releases() -> None:
    progress = LayerProgress(is_layerwise=False)
    step = progress.begin()
    progress.computed("a")
    assert not step.wait("a", 0.001)
    progress.end()
    assert step.wait("a", 1)


def test_who_is_not_wanted_any_more_stops() -> None:
    step = StepLayers()
    step.end()
    assert not CacheLayers(step, range(1), ("a",), lambda: False, Deadline.never()).synchronize_layer(0, 1)


def test_noting_a_layer_costs_the_engine_microseconds() -> None:
    progress = LayerProgress()
    progress.begin()
    begun = time.perf_counter()
    for i in range(10000):
        progress.computed(f"layers.{i % 32}")
    assert (time.perf_counter() - begun) / 10000 < 200e-6


# --- threads ------------------------------------------------------------------------------------------------------


def test_work_is_done_now_and_later_and_a_fault_harms_nobody_else() -> None:
    pool, done = WorkPool("test", 2, logging.getLogger("quiet")), threading.Semaphore(0)
    order: list[str] = []

    def note(name: str) -> None:
        order.append(name)
        done.release()

    def fail() -> None:
        raise RuntimeError("a fault of ours")

    logging.getLogger("quiet").setLevel(logging.CRITICAL + 1)
    now_s = time.monotonic()
    pool.at(now_s + 0.2, lambda: note("later"))
    pool.at(now_s + 0.1, lambda: note("sooner"))
    for _ in range(4):
        pool.now(fail)
    pool.now(lambda: note("now"))
    assert all(done.acquire(timeout=20) for _ in range(3))
    assert order == ["now", "sooner", "later"]
    pool.close(20)
    pool.now(lambda: note("too late"))
    pool.at(0.0, lambda: note("too late"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("datadist-test-")]
    assert order == ["now", "sooner", "later"]
