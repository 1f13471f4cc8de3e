# SPDX-License-Identifier: Apache-2.0
"""Several turns between two kv_both engines: P takes back from D what D has computed, and prefills the new tokens only.

The request to D carries P's ticket and `do_remote_decode` as well: D's answer then has a ticket for all that D holds,
prompt and generated tokens. The next turn's request to P carries that ticket. Exact also where the next prompt does not
continue what was generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_pd.servers import Completion, ExampleProxy, VllmServer, metrics, start_all
from integration_tests.fleet import (
    LOCAL_TOKENS,
    PATIENCE_S,
    REMOTE_TOKENS,
    alone,
    ask,
    config,
    eventual_value,
    random_prompt,
    wait_until_blocks_are_free,
)

BLOCK = 32
LEASE_S = 20.0


@dataclass(frozen=True)
class Both:
    """Two engines, both kv_both and recomputing, that forget nothing by themselves: `one` prefills, `two` decodes."""

    one: VllmServer
    two: VllmServer


@pytest.fixture(scope="module")
def both(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    servers = [
        VllmServer(
            models("llama"),
            kv_transfer_config=config("kv_both", {"lease_s": LEASE_S}, kv_load_failure_policy="recompute"),
            name=name,
            block_size=BLOCK,
            extra_args=("--no-enable-prefix-caching",) if name == "one" else (),
            log_dir=tmp_path_factory.mktemp("logs"),
        )
        for name in ("one", "two")
    ]
    with start_all(servers):
        yield Both(*servers)


def _turn(both: Both, prompt: Sequence[int], ticket: dict[str, Any] | None, num_tokens: int) -> Completion:
    """What a router does: P with the last turn's ticket, if any, then D with P's, which is asked for one itself."""
    first = ask(both.one, prompt, 1, kv_transfer_params={**(ticket or {}), "do_remote_decode": True})
    assert first.kv_transfer_params
    return ask(both.two, prompt, num_tokens, kv_transfer_params={**first.kv_transfer_params, "do_remote_decode": True})


def _tokens(server: VllmServer) -> tuple[int, int]:
    """(from the other engine, had or computed here) of all its hand-off requests."""
    found = metrics(server.base_url)
    return int(found.get(REMOTE_TOKENS, 0)), int(found.get(LOCAL_TOKENS, 0))


def _check_growth(server: VllmServer, before: tuple[int, int], remote: int, local: int) -> None:
    wanted = (before[0] + remote, before[1] + local)
    assert eventual_value(lambda: _tokens(server), wanted) == wanted, f"before: {before}"


@pytest.mark.parametrize("num_generated", [1, 2, 2 * BLOCK + 7])
def test_the_next_turns_are_prefilled_from_where_the_last_one_ended(both: Both, num_generated: int) -> None:
    """P has no prefix cache: what it does not compute comes from D."""
    prompt, ticket, num_known = random_prompt(2 * BLOCK + 5, ("turns", num_generated)), None, 0
    for turn in range(3):
        before = _tokens(both.one)
        answer = _turn(both, prompt, ticket, num_generated)
        assert answer.token_ids == alone(both.one, prompt, num_generated), f"turn {turn}"
        if turn:
            _check_growth(both.one, before, remote=num_known, local=len(prompt) - num_known)
        ticket = answer.kv_transfer_params
        # The last generated token has been sampled, not computed.
        num_known = len(prompt) + len(answer.token_ids) - 1
        assert ticket["remote_num_tokens"] == num_known
        prompt = [*prompt, *answer.token_ids, *random_prompt(BLOCK + 3, ("question", turn))]


#: Of what D has computed: 2 * BLOCK + 5 tokens of prompt, and some that it has generated.
PROMPT_TOKENS = 2 * BLOCK + 5
DEPARTURES = (BLOCK - 1, PROMPT_TOKENS, 3 * BLOCK, 3 * BLOCK + 9)


@pytest.fixture(scope="module")
def first_turn(both: Both) -> tuple[list[int], Completion]:
    """A prompt, and an answer that is long enough."""
    for seed in range(20):
        prompt = random_prompt(PROMPT_TOKENS, ("departs", seed))
        answer = _turn(both, prompt, None, 2 * BLOCK)
        if len(answer.token_ids) == 2 * BLOCK:
            return prompt, answer
    raise AssertionError("the model ends each answer early")


def _turned(prompt: Sequence[int], answer: Completion, departs_at: int) -> list[int]:
    """The next turn's prompt, as if the template wrote the token at `departs_at` in another way."""
    known = [*prompt, *answer.token_ids]
    known[departs_at] ^= 1
    return [*known, *random_prompt(9, "next question")]


@pytest.mark.parametrize("departs_at", DEPARTURES)
def test_a_prompt_that_departs_takes_only_what_is_the_same(
    both: Both, first_turn: tuple[list[int], Completion], departs_at: int
) -> None:
    prompt = _turned(*first_turn, departs_at)
    ticket = _turn(both, first_turn[0], None, 2 * BLOCK).kv_transfer_params
    before, shared = _tokens(both.one), departs_at // BLOCK * BLOCK
    assert _turn(both, prompt, ticket, 12).token_ids == alone(both.one, prompt)
    _check_growth(both.one, before, remote=shared, local=len(prompt) - shared)


def test_negative_control_without_its_digests_such_a_ticket_gives_another_text(
    both: Both, first_turn: tuple[list[int], Completion]
) -> None:
    """Else the tests above would prove nothing. This is what trusting the prompt's digest alone would do."""
    prompt = _turned(*first_turn, PROMPT_TOKENS + 1)
    ticket = _turn(both, first_turn[0], None, 2 * BLOCK).kv_transfer_params
    for name in ("prefix_span", "prefix_digests"):
        del ticket["datadist"][name]
    assert _turn(both, prompt, ticket, 12).token_ids != alone(both.one, prompt)


def test_a_turn_that_comes_too_late_is_computed(both: Both) -> None:
    """D has let go of the last turn, which another request has taken; P notices that, and computes all of it."""
    prompt = random_prompt(BLOCK + 5, "late")
    answer = _turn(both, prompt, None, 12)
    ask(both.one, [*prompt, *answer.token_ids, 6], kv_transfer_params=answer.kv_transfer_params)
    prompt = [*prompt, *answer.token_ids, 7, 8, 9]
    before = _tokens(both.one)
    assert _turn(both, prompt, answer.kv_transfer_params, 12).token_ids == alone(both.one, prompt)
    _check_growth(both.one, before, remote=0, local=len(prompt))


def test_the_engines_change_their_parts_from_turn_to_turn(both: Both) -> None:
    """A role is a matter of the request: who decoded prefills the next turn, also with a ticket of its own."""
    prompt, ticket = random_prompt(PROMPT_TOKENS, "change"), None
    pairs = (both, Both(both.two, both.one), Both(both.two, both.one), both)
    for turn, pair in enumerate(pairs):
        answer = _turn(pair, prompt, ticket, 12)
        assert answer.token_ids == alone(both.one, prompt), f"turn {turn}"
        ticket = answer.kv_transfer_params
        prompt = [*prompt, *answer.token_ids, *random_prompt(5, ("change", turn))]


def test_a_chat_through_the_proxy(both: Both, tmp_path: Path) -> None:
    """The proxy knows a chat by its beginning; the template writes the answer in other tokens than it was generated."""
    messages = [{"role": "user", "content": "a first question, longer than two blocks of the cache of this model"}]
    urls = [both.one.base_url], [both.two.base_url]
    with ExampleProxy(*urls, extra_args=("--conversations", str(LEASE_S)), log_dir=tmp_path) as proxy:
        for turn in range(3):
            before = _tokens(both.one)
            reply = _chat(proxy.base_url, messages)
            assert "kv_transfer_params" not in reply
            text = reply["choices"][0]["message"]["content"]
            assert text == _chat(both.one.base_url, messages, cache_salt="alone")["choices"][0]["message"]["content"]
            if turn:
                taken = lambda before=before: _tokens(both.one)[0] - before[0]  # noqa: E731
                assert eventual_value(lambda: taken() >= num_before, True), f"turn {turn}: {taken()}"  # noqa: B023
            num_before = reply["usage"]["prompt_tokens"] // BLOCK * BLOCK
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and question {turn}"}]


def _chat(base_url: str, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    asked = {"model": "model", "messages": messages, "max_tokens": 16, "temperature": 0} | body
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
    return dict(answer.raise_for_status().json())


def test_every_block_comes_back(both: Both) -> None:
    """Those of the last turns too, which nobody goes on."""
    wait_until_blocks_are_free(both.one, both.two, seconds=LEASE_S + PATIENCE_S)
