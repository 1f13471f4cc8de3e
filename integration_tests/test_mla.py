# SPDX-License-Identifier: Apache-2.0
"""MLA: one latent vector per token. As exact as vLLM's CPU MLA allows to see.

That kernel does not agree with itself: in one engine the logprobs of a prompt's tokens change with what follows
them, and prefill and decode give different ones, so greedy text of a random model parts sooner or later even from
itself. Here both sides take the same path (the last prompt token is one that the single engine generated, so that
both decode it), and what is asked is that most texts are equal, and that the text depends on every block. The
exactness test of this layout is connector/tests/test_mla_pair.py, without vLLM's kernel: bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.fleet import NUM_TOKENS, Fleet, random_prompt, running_fleet, wait_until_blocks_are_free

BLOCK = 16
LENGTHS = [2, 8, *range(BLOCK - 2, BLOCK + 3), *range(3 * BLOCK - 2, 3 * BLOCK + 3), 69, 100, 150, 200, 500, 1297]
#: Of a text that was not taken over at all, not one would be equal.
MIN_SHARE_EQUAL = 0.75


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(models("deepseek_mla"), BLOCK, tmp_path_factory.mktemp("logs")) as running:
        yield running


def test_text_is_taken_over(fleet: Fleet) -> None:
    num_equal, differing = 0, []
    for length in LENGTHS:
        base = random_prompt(length - 1, ("mla", length))
        first, *wanted = fleet.expected(base, NUM_TOKENS + 1)
        with fleet.remote_tokens_grow_by(length):
            got = fleet.handed_off([*base, first]).token_ids
        if got == wanted:
            num_equal += 1
        else:
            differing.append(length)
    assert num_equal >= MIN_SHARE_EQUAL * len(LENGTHS), f"texts differ for prompts of {differing} tokens"
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def test_the_text_depends_on_every_block(fleet: Fleet) -> None:
    prompt = random_prompt(4 * BLOCK + 5, "sensitive")
    wanted = fleet.expected(prompt, 2 * NUM_TOKENS)
    for block in range(4):
        other = list(prompt)
        other[block * BLOCK : (block + 1) * BLOCK] = random_prompt(BLOCK, ("other", block))
        assert fleet.expected(other, 2 * NUM_TOKENS) != wanted, f"block {block}"
