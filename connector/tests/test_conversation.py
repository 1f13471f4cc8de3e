# SPDX-License-Identifier: Apache-2.0
"""Tickets for more than a prompt: what of them holds for the prompt of the next turn. See also test_life.py."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.tests.test_scheduler import FULL, Request, _side
from vllm_datadist.messages import Endpoint, RemoteLease, RequestKey
from vllm_datadist.params import MAX_PREFIX_DIGESTS, PromptDigest, Ticket, TicketError, parse_ticket, prefix_ends
from vllm_datadist.scheduler.conversation import cut_to_shared, digest_prefixes, num_computed_tokens

BLOCK = 4


@dataclass
class Turn:
    """What is read of a vLLM request."""

    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)


def _tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def _ticket(turn: Turn, num_tokens: int, block_tokens: int = BLOCK) -> Ticket:
    """As it arrives at the next P: through JSON."""
    worker = Endpoint(0, 0, "127.0.0.1", 5000, 1)
    remote = RemoteLease("d", RequestKey("r", 1), 30.0, (worker,))
    prefixes = digest_prefixes(turn, num_tokens, block_tokens)
    blocks = tuple(range(1, 2 + num_tokens // block_tokens))
    ticket = Ticket(remote, (blocks,), (block_tokens,), num_tokens, 1, PromptDigest(BLOCK, "of the prompt"), prefixes)
    return parse_ticket(ticket.to_params())


def _image(offset: int) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=2)
    return SimpleNamespace(modality="image", identifier="x", mm_position=place)


def _num_shared(ticket: Ticket, turn: Turn) -> int:
    return cut_to_shared(ticket, turn).num_tokens


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_all_of_it_or_the_whole_blocks_before_the_departure(num_tokens: int) -> None:
    tokens = _tokens(num_tokens)
    ticket = _ticket(Turn(tokens), num_tokens)
    assert _num_shared(ticket, Turn([*tokens, 1, 2])) == num_tokens
    for departs_at in range(num_tokens):
        other = list(tokens)
        other[departs_at] += 1
        assert _num_shared(ticket, Turn([*other, 1, 2])) == departs_at // BLOCK * BLOCK
        assert _num_shared(ticket, Turn(tokens[: departs_at + 1])) in (num_tokens, (departs_at + 1) // BLOCK * BLOCK)


def test_what_is_generated_by_the_reader_does_not_count() -> None:
    tokens = _tokens(3 * BLOCK)
    ticket = _ticket(Turn(tokens), 3 * BLOCK)
    assert _num_shared(ticket, Turn(tokens, num_prompt_tokens=2 * BLOCK + 1)) == 2 * BLOCK


@pytest.mark.parametrize("has_state", [False, True])
def test_what_was_generated_after_embeddings_is_not_handed_off(has_state: bool) -> None:
    """No digest can say what comes behind a prompt without token ids. A state cannot be taken back to its end."""
    prompt, generated = torch.arange(8.0).view(8, 1), [1, 2, 3, 4, 5]
    groups = (replace(FULL, is_state=has_state),)
    side, reader = _side(groups=groups), _side(groups=groups)
    turn = Request("d", 8, {"do_remote_decode": True}, num_computed_tokens=12)
    vars(turn).update(prompt_embeds=prompt, all_token_ids=[0] * 8 + generated, num_tokens=13)
    is_held, ticket = side.request_finished(turn.finished("FINISHED_STOPPED"), [[7, 8, 9]])
    assert is_held is not has_state
    if ticket is None:
        return
    longer = Request("p", 16, ticket)
    vars(longer).update(prompt_embeds=torch.cat([prompt, torch.full((8, 1), 9.0)]), all_token_ids=[0] * 16)
    reader.on_new_request(longer)
    assert reader.num_new_matched_tokens(longer, 0) == (8, True)


def test_a_ticket_of_a_prompt_stays_what_it_is() -> None:
    plain = replace(_ticket(Turn(_tokens(BLOCK)), BLOCK), prefixes=None)
    assert cut_to_shared(plain, Turn([1, 2, 3])) is plain


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "other"},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")},
        {"prompt_embeds": torch.zeros(3 * BLOCK, 2)},
        {"mm_features": [_image(0)]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_same_tokens_with_something_else_agree_on_nothing(change: dict[str, Any]) -> None:
    tokens = _tokens(3 * BLOCK)
    ticket = _ticket(Turn(tokens), 3 * BLOCK)
    assert _num_shared(ticket, Turn(tokens, **change)) == 0
    assert _num_shared(ticket, Turn(tokens)) == 3 * BLOCK


def test_an_image_further_on_leaves_what_is_before_it() -> None:
    tokens = _tokens(3 * BLOCK)
    ticket = _ticket(Turn(tokens), 3 * BLOCK)
    assert _num_shared(ticket, Turn(tokens, mm_features=[_image(2 * BLOCK + 1)])) == 2 * BLOCK


def test_a_long_conversation_has_a_bounded_number_of_digests() -> None:
    num_tokens = 3 * MAX_PREFIX_DIGESTS * BLOCK + 1
    tokens = _tokens(num_tokens)
    ticket = _ticket(Turn(tokens), num_tokens)
    assert ticket.prefixes is not None
    assert len(ticket.prefixes.digests) <= MAX_PREFIX_DIGESTS
    assert ticket.prefixes.span % BLOCK == 0
    assert prefix_ends(num_tokens, ticket.prefixes.span)[-1] == num_tokens
    other = [*tokens[: num_tokens // 2], *_tokens(num_tokens, seed=1)]
    shared = _num_shared(ticket, Turn(other))
    assert num_tokens // 2 - ticket.prefixes.span < shared <= num_tokens // 2


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_span": 0},
        {"prefix_span": -4},
        {"prefix_span": 1},
        {"prefix_span": "4"},
        {"prefix_digests": []},
        {"prefix_digests": "abc"},
        {"prefix_digests": [1, 2, 3]},
        {"prefix_digests": None},
    ],
    ids=str,
)
def test_malformed_digests_are_named(changes: dict[str, Any]) -> None:
    params = _params()
    params["datadist"] |= changes
    with pytest.raises(TicketError, match=r"datadist\.prefix_"):
        parse_ticket(params)


def _params() -> dict[str, Any]:
    return _ticket(Turn(_tokens(3 * BLOCK)), 3 * BLOCK).to_params()


@pytest.mark.parametrize(
    ("num_computed", "num_in_flight", "num_tokens", "expected"),
    [(10, 0, 11, 10), (12, 1, 12, 11), (14, 0, 12, 12), (0, 1, 5, 0)],
    ids=["last one sampled only", "a step in flight", "accepted drafts cut off", "nothing yet"],
)
def test_computed_for_good(num_computed: int, num_in_flight: int, num_tokens: int, expected: int) -> None:
    request = SimpleNamespace(num_computed_tokens=num_computed, num_in_flight_tokens=num_in_flight)
    request.num_tokens = num_tokens
    assert num_computed_tokens(request) == expected
