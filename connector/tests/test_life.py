# SPDX-License-Identifier: Apache-2.0
"""The life of a request under vLLM's real scheduler, step by step, with and without async scheduling.

What needs many steps or many sizes is here, where a step takes microseconds; integration_tests/ has the same with
servers, for a few. See `stepped_engine` for what is real and what is a toy.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from connector.tests.stepped_engine import BLOCK, VOCABULARY, Engine, toy_text
from connector.tests.stepped_offloading import OffloadingEngine

#: Importing vLLM takes longer than all of these together.
pytestmark = pytest.mark.slow
SYNC_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Each engine's connector listens for the end of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _prompt(num_tokens: int, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(range(VOCABULARY), k=num_tokens)


def _pair(is_async: bool = False, **options: Any) -> tuple[Engine, Engine]:
    peers: dict[int, Engine] = {}
    p = Engine("kv_producer", peers, is_async=is_async)
    return p, Engine("kv_consumer", peers, is_async=is_async, **options)


def _check_nothing_is_held(*engines: Engine) -> None:
    for engine in engines:
        engine.run()
    assert [engine.num_held_blocks for engine in engines] == [0] * len(engines)
    for engine in engines:
        assert not engine.scheduler.requests
        assert not engine.leases
        assert not engine.loads


# --- chunks -------------------------------------------------------------------------------------------------------

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 4)


@SYNC_ASYNC
def test_b28_chunks_of_every_size_up_to_two_blocks_and_one(is_async: bool) -> None:
    """On both sides: at D for what it has to compute because P's part ends before the prompt's end."""
    for chunk in range(1, 2 * BLOCK + 2):
        peers: dict[int, Engine] = {}
        p = Engine("kv_producer", peers, chunk=chunk, is_async=is_async)
        d = Engine("kv_consumer", peers, chunk=chunk, is_async=is_async, prefix_caching=False)
        for num_tokens in LENGTHS:
            prompt = _prompt(num_tokens, (chunk, num_tokens))
            ticket = p.prefill(f"p{num_tokens}", prompt)
            assert ticket["remote_num_tokens"] == num_tokens, chunk
            assert len(ticket["remote_block_ids"][0]) == -(-num_tokens // BLOCK), chunk
            if num_tokens % 2:
                ticket["remote_num_tokens"] -= num_tokens // 2
            answer = d.decode(f"d{num_tokens}", prompt, 3, ticket)
            assert answer.tokens == toy_text(prompt, 3), (chunk, num_tokens)
        _check_nothing_is_held(p, d)


def test_negative_control_one_wrong_entry_changes_the_text() -> None:
    p, d = _pair()
    prompt = _prompt(3 * BLOCK + 3, "wrong")
    ticket = p.prefill("p", prompt)
    p.memory[ticket["remote_block_ids"][0][1]][5] ^= 1
    assert d.decode("d", prompt, 3, ticket).tokens != toy_text(prompt, 3)


@SYNC_ASYNC
@pytest.mark.parametrize("num_tokens", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_what_d_has_is_not_loaded_and_what_it_computes_goes_on_from_there(is_async: bool, num_tokens: int) -> None:
    """k blocks are in D's prefix cache, P has computed up to some token, D computes the rest: for every k and some."""
    p, d = _pair(is_async)
    for num_warm in range(5):
        for num_ready in (BLOCK // 2, 2 * BLOCK, num_tokens - 1, num_tokens):
            prompt, name = _prompt(num_tokens, (num_warm, num_ready)), f"{num_warm} {num_ready}"
            if num_warm:
                d.decode(f"warm {name}", prompt[: num_warm * BLOCK], 1, None)
            ticket = p.prefill(f"p {name}", prompt) | {"remote_num_tokens": num_ready}
            before = d.num_loaded_tokens
            assert d.decode(f"d {name}", prompt, 4, ticket).tokens == toy_text(prompt, 4), name
            num_had = min(num_warm * BLOCK, (num_tokens - 1) // BLOCK * BLOCK)
            assert d.num_loaded_tokens - before == max(0, num_ready - num_had), name
    _check_nothing_is_held(p, d)


# --- preemption ---------------------------------------------------------------------------------------------------


@SYNC_ASYNC
def test_p_is_short_of_blocks_and_prefills_again_what_it_had_to_drop(is_async: bool) -> None:
    peers: dict[int, Engine] = {}
    p = Engine("kv_both", peers, num_blocks=11, chunk=BLOCK, is_async=is_async, prefix_caching=False)
    p.scheduler.scheduler_reserve_full_isl = False  # vLLM's default admits no prompt that does not fit as a whole
    d = Engine("kv_consumer", peers, is_async=is_async)
    prompts = [_prompt(6 * BLOCK + i, ("short p", i)) for i in range(3)]
    # One that decodes beside them takes the last blocks: a prefill is dropped between its chunks.
    beside = p.submit("beside", prompts[0][: 3 * BLOCK - 2], 2 * BLOCK)
    answers = [p.submit(f"p{i}", prompt, 1, {"do_remote_decode": True}) for i, prompt in enumerate(prompts)]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        p.run(until=lambda answer=answer: answer.params is not None)
        assert d.decode(f"d{i}", prompt, 5, answer.params).tokens == toy_text(prompt, 5), i
    p.run()
    assert beside.tokens == toy_text(beside.prompt, 2 * BLOCK)
    assert p.num_preemptions > 0
    _check_nothing_is_held(p, d)


@SYNC_ASYNC
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_d_is_short_of_blocks_and_computes_what_it_had_to_drop(is_async: bool, prefix_caching: bool) -> None:
    """P has let go by then: the second attempt is D's own."""
    p, d = _pair(is_async, num_blocks=16, prefix_caching=prefix_caching)
    prompts = [_prompt(3 * BLOCK + 3, ("short d", i)) for i in range(3)]
    tickets = [p.prefill(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
    answers = [d.submit(f"d{i}", prompt, 5 * BLOCK, tickets[i]) for i, prompt in enumerate(prompts)]
    d.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == toy_text(prompt, 5 * BLOCK)
    assert d.num_preemptions > 0
    _check_nothing_is_held(p, d)


@SYNC_ASYNC
def test_by_priority_a_request_with_a_ticket_overtakes_and_drops_others(is_async: bool) -> None:
    """The important ones come last, find no blocks, and take them from those that run. All are right."""
    p, d = _pair(is_async, num_blocks=14, policy="priority")
    prompts = [_prompt(3 * BLOCK + 3, ("priority", i)) for i in range(4)]
    tickets = [p.prefill(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
    first = [d.submit(f"d{i}", prompts[i], 4 * BLOCK, tickets[i], priority=9) for i in range(3)]
    d.run(until=lambda: all(answer.tokens for answer in first[:2]))
    last = d.submit("d3", prompts[3], 4 * BLOCK, tickets[3], priority=0)
    d.run(until=lambda: last.finish_reason is not None)
    assert [answer.finish_reason for answer in first].count(None) >= 2, "it did not overtake"
    d.run()
    for prompt, answer in zip(prompts, [*first, last], strict=True):
        assert answer.tokens == toy_text(prompt, 4 * BLOCK)
    assert d.num_preemptions > 0
    _check_nothing_is_held(p, d)


# --- aborts -------------------------------------------------------------------------------------------------------


@SYNC_ASYNC
@pytest.mark.parametrize("side", ["p", "d"])
def test_an_abort_after_any_step_leaves_nothing_and_harms_nobody(is_async: bool, side: str) -> None:
    """Queued, loading, decoding; at P between chunks and after the ticket. Another request runs beside it."""
    prompt, other = _prompt(3 * BLOCK + 3, "aborted"), _prompt(2 * BLOCK + 7, "beside")
    for num_steps in range(12):
        peers: dict[int, Engine] = {}
        p = Engine("kv_producer", peers, chunk=BLOCK + 1, is_async=is_async)
        d = Engine("kv_consumer", peers, is_async=is_async)
        if side == "p":
            aborted = p.submit("x", prompt, 1, {"do_remote_decode": True})
            beside = p.submit("y", other, 1, {"do_remote_decode": True})
            for _ in range(num_steps):
                p.step()
            p.abort("x")
            p.run(until=lambda beside=beside: beside.params is not None)
            answer = d.decode("y", other, 4, beside.params)
            if aborted.params is not None:  # it had ended before: its ticket is good
                assert d.decode("x", prompt, 4, aborted.params).tokens == toy_text(prompt, 4)
        else:
            ticket, ticket_beside = p.prefill("x", prompt), p.prefill("y", other)
            d.holds_loads = num_steps < 6
            d.submit("x", prompt, 6, ticket)
            answer = d.submit("y", other, 4, ticket_beside)
            for _ in range(num_steps):
                d.step()
            d.abort("x")
            d.step()
            d.holds_loads = False
            d.run()
        assert answer.tokens == toy_text(other, 4), num_steps
        _check_nothing_is_held(p, d)


# --- loads that fail ----------------------------------------------------------------------------------------------


@SYNC_ASYNC
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("failing", range(4))
def test_b42_a_failed_load_is_recomputed(is_async: bool, prefix_caching: bool, failing: int) -> None:
    """Four at once, two of them equal and one a beginning of these; one load fails while the others wait."""
    p, d = _pair(is_async, prefix_caching=prefix_caching, transfer={"kv_load_failure_policy": "recompute"})
    twin = _prompt(3 * BLOCK + 3, "twin")
    prompts = [twin, twin[: 2 * BLOCK + 5], twin, _prompt(5, "another")]
    tickets = [p.prefill(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
    d.holds_loads = True
    answers = [d.submit(f"d{i}", prompt, 2 * BLOCK, tickets[i]) for i, prompt in enumerate(prompts)]
    d.step()
    for key in list(d.loads):
        if key.request_id == f"d{failing}":
            d.end_load(key, failed=True)
    d.step()
    d.step()
    d.holds_loads = False
    d.run()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == toy_text(prompt, 2 * BLOCK)
    _check_nothing_is_held(p, d)


@SYNC_ASYNC
def test_a_failed_load_with_policy_fail_fails_that_request_only(is_async: bool) -> None:
    p, d = _pair(is_async, transfer={"kv_load_failure_policy": "fail"})
    prompt = _prompt(3 * BLOCK + 3, "fails")
    tickets = [p.prefill(f"p{i}", prompt) for i in range(2)]
    d.holds_loads = True
    failed, good = (d.submit(f"d{i}", prompt, 6, ticket) for i, ticket in enumerate(tickets))
    d.step()
    d.end_load(next(key for key in d.loads if key.request_id == "d0"), failed=True)
    d.holds_loads = False
    d.run()
    assert (failed.finish_reason, failed.tokens) == ("error", [])
    assert good.tokens == toy_text(prompt, 6)
    _check_nothing_is_held(p, d)


# --- several requests with one ticket -----------------------------------------------------------------------------


@SYNC_ASYNC
@pytest.mark.parametrize("num_sequences", [2, 3, 8])
def test_b40_sequences_of_one_request_share_a_load(is_async: bool, num_sequences: int) -> None:
    """The first loads; the others wait for it, also if it is aborted, or fails."""
    for trouble in ("none", "abort", "fail"):
        p, d = _pair(is_async, transfer={"kv_load_failure_policy": "recompute"})
        prompt = _prompt(2 * BLOCK + 3, num_sequences)
        ticket = p.prefill("p", prompt)
        d.holds_loads = True
        answers = [d.submit(f"{i}_d", prompt, 5, ticket) for i in range(num_sequences)]
        for _ in range(3):
            d.step()
        assert len(d.loads) == 1
        assert not any(answer.tokens for answer in answers), "one did not wait, and computed the prompt"
        d.holds_loads = False
        if trouble == "abort":
            d.abort("0_d")
        elif trouble == "fail":
            d.end_load(next(iter(d.loads)), failed=True)
        d.run()
        for answer in answers[1 if trouble == "abort" else 0 :]:
            assert answer.tokens == toy_text(prompt, 5), trouble
        _check_nothing_is_held(p, d)


# --- conversations ------------------------------------------------------------------------------------------------


def _conversation(is_async: bool, prompt: Sequence[int], num_tokens: int) -> tuple[Engine, Engine, dict[str, Any]]:
    peers: dict[int, Engine] = {}
    p = Engine("kv_both", peers, is_async=is_async, prefix_caching=False)
    d = Engine("kv_both", peers, is_async=is_async)
    answer = d.decode("turn 1", prompt, num_tokens, p.prefill("turn 1", prompt) | {"do_remote_decode": True})
    assert answer.params is not None
    return p, d, answer.params


@SYNC_ASYNC
@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK, 2 * BLOCK + 3])
def test_p_takes_over_all_that_d_has_computed(is_async: bool, num_tokens: int) -> None:
    prompt = _prompt(2 * BLOCK + 3, "conversation")
    p, d, ticket = _conversation(is_async, prompt, num_tokens)
    known = prompt + toy_text(prompt, num_tokens)
    assert ticket["remote_num_tokens"] == len(known) - 1
    turn = [*known, *_prompt(BLOCK + 1, "question")]
    before = p.num_loaded_tokens
    second = p.prefill("turn 2", turn, **(ticket | {"do_remote_decode": True}))
    assert p.num_loaded_tokens - before == len(known) - 1
    assert d.decode("turn 2", turn, 5, second).tokens == toy_text(turn, 5)
    _check_nothing_is_held(p, d)


@SYNC_ASYNC
def test_an_end_that_comes_while_the_next_step_is_under_way(is_async: bool) -> None:
    """By a token that ends the answer: what the step after it writes is beyond the ticket."""
    peers: dict[int, Engine] = {}
    p, d = (Engine("kv_both", peers, is_async=is_async, prefix_caching=False) for _ in range(2))
    prompt = _prompt(2 * BLOCK + 3, "ends early")
    text = toy_text(prompt, 5)
    params = p.prefill("turn 1", prompt) | {"do_remote_decode": True}
    answer = d.submit("turn 1", prompt, 50, params, stop_at=text[4])
    d.run()
    assert answer.tokens == text[: text.index(text[4]) + 1]
    assert answer.params is not None
    known = prompt + answer.tokens
    assert answer.params["remote_num_tokens"] == len(known) - 1
    turn = [*known, 1, 2, 3]
    second = p.prefill("turn 2", turn, **(answer.params | {"do_remote_decode": True}))
    assert d.decode("turn 2", turn, 5, second).tokens == toy_text(turn, 5)
    _check_nothing_is_held(p, d)


def test_a_prompt_that_departs_anywhere_takes_the_blocks_before() -> None:
    prompt = _prompt(2 * BLOCK + 3, "departs")
    known = prompt + toy_text(prompt, BLOCK + 7)
    for departs_at in range(len(known)):
        p, d, ticket = _conversation(False, prompt, BLOCK + 7)
        turn = [*known[:departs_at], known[departs_at] ^ 1, *known[departs_at + 1 :], 1, 2, 3]
        before = p.num_loaded_tokens
        second = p.prefill("turn 2", turn, **(ticket | {"do_remote_decode": True}))
        is_sampled_only = departs_at == len(known) - 1
        expected = departs_at if is_sampled_only else departs_at // BLOCK * BLOCK
        assert p.num_loaded_tokens - before == expected, departs_at
        assert d.decode("turn 2", turn, 3, second).tokens == toy_text(turn, 3), departs_at
        _check_nothing_is_held(p, d)


def test_negative_control_without_its_digests_a_ticket_is_believed() -> None:
    prompt = _prompt(2 * BLOCK + 3, "believed")
    p, d, ticket = _conversation(False, prompt, BLOCK)
    for name in ("prefix_span", "prefix_digests"):
        del ticket["datadist"][name]
    known = prompt + toy_text(prompt, BLOCK)
    known[len(prompt) + 2] ^= 1
    second = p.prefill("turn 2", known, **(ticket | {"do_remote_decode": True}))
    assert d.decode("turn 2", known, 3, second).tokens != toy_text(known, 3)


def test_a_shorter_next_prompt_takes_what_it_has() -> None:
    prompt = _prompt(2 * BLOCK + 3, "shorter")
    for num_tokens in (1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 2):
        p, d, ticket = _conversation(False, prompt, BLOCK)
        turn = prompt[:num_tokens]
        second = p.prefill("turn 2", turn, **(ticket | {"do_remote_decode": True}))
        assert p.num_loaded_tokens == num_tokens // BLOCK * BLOCK
        assert d.decode("turn 2", turn, 3, second).tokens == toy_text(turn, 3)
        _check_nothing_is_held(p, d)


# --- beside another connector -------------------------------------------------------------------------------------


@SYNC_ASYNC
@pytest.mark.parametrize("ours_first", [True, False])
def test_b44_only_the_chosen_one_loads_and_p_is_released_in_any_case(ours_first: bool, is_async: bool) -> None:
    """The first time D has nothing; then its own cache is emptied, and the host has all whole blocks."""
    peers: dict[int, Engine] = {}
    p = OffloadingEngine("kv_producer", peers, ours_first=ours_first, is_async=is_async)
    d = OffloadingEngine("kv_consumer", peers, ours_first=ours_first, is_async=is_async)
    prompt = _prompt(3 * BLOCK + 5, "offload")
    wanted = toy_text(prompt, 2 * BLOCK)

    def turn(name: str) -> tuple[int, int]:
        before = d.num_loaded_tokens, d.num_blocks_from_host
        assert d.decode(name, prompt, 2 * BLOCK, p.prefill(name, prompt)).tokens == wanted
        for engine in (p, d):
            engine.run()
            assert engine.num_held_blocks == 0, name
            assert not engine.leases
            assert engine.scheduler.reset_prefix_cache()
        return d.num_loaded_tokens - before[0], d.num_blocks_from_host - before[1]

    assert turn("first") == (len(prompt), 0)
    assert turn("again") == ((len(prompt), 0) if ours_first else (0, 3))
    assert p.num_blocks_from_host == 3
