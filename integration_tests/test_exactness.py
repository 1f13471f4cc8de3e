# SPDX-License-Identifier: Apache-2.0
"""Greedy text through P and D equals a single engine's, token for token; and the KV cache really came from P."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.vllm_pd.servers import completion, completion_stream, prefill
from integration_tests.fleet import (
    CHUNK_TOKENS,
    NUM_TOKENS,
    Fleet,
    eventual_value,
    random_prompt,
    running_fleet,
    wait_until_blocks_are_free,
)

#: (model, block size). MLA has a file of its own: vLLM's CPU MLA does not reproduce its own text.
SHAPES = [("llama", 32), ("llama", 64), ("gemma3_hybrid", 32)]
HYBRID = "gemma3_hybrid"


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def shape(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def fleet(shape: tuple[str, int], models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kind, block_size = shape
    plain_single = shape == SHAPES[0]
    with running_fleet(models(kind), block_size, tmp_path_factory.mktemp("logs"), plain_single=plain_single) as running:
        yield running


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(lambda b: 1, id="1"),
        pytest.param(lambda b: b - 1, id="B-1"),
        pytest.param(lambda b: b, id="B"),
        pytest.param(lambda b: b + 1, id="B+1"),
        pytest.param(lambda b: 3 * b - 1, id="3B-1"),
        pytest.param(lambda b: 3 * b, id="3B"),
        pytest.param(lambda b: 3 * b + 1, id="3B+1"),
        pytest.param(lambda b: 5 * CHUNK_TOKENS + 17, id="chunked prefill"),
    ],
)
def test_prompt_lengths(fleet: Fleet, shape: tuple[str, int], length) -> None:
    num_tokens = length(fleet.block_size)
    with fleet.remote_tokens_grow_by(num_tokens):
        fleet.check_exact(random_prompt(num_tokens, ("lengths", num_tokens)))


def test_the_text_depends_on_every_block(fleet: Fleet) -> None:
    """Else equal texts would say nothing about the KV cache: one other token in any block gives another text."""
    prompt = random_prompt(4 * fleet.block_size + 5, "sensitive")
    wanted = fleet.expected(prompt, 2 * NUM_TOKENS)
    for block in range(4):
        other = list(prompt)
        other[block * fleet.block_size + 3] ^= 1
        assert fleet.expected(other, 2 * NUM_TOKENS) != wanted, f"block {block}"


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("warm_blocks", range(5))
def test_warm_prefix_cache_at_the_decoder(fleet: Fleet, shape: tuple[str, int], warm_blocks: int, tail: int) -> None:
    """D has the first k blocks already: only what it lacks is pulled, and lands where it belongs."""
    block, num_tokens = fleet.block_size, 4 * fleet.block_size + tail
    prompt = random_prompt(num_tokens, ("warm", warm_blocks, tail))
    if warm_blocks:
        completion(fleet.decode.base_url, prompt[: warm_blocks * block], 1)
    # vLLM always leaves the last token to compute, so a hit never covers all of the prompt.
    had = min(warm_blocks * block, (num_tokens - 1) // block * block)
    if shape[0] == HYBRID:
        before = fleet.remote_tokens()
        fleet.check_exact(prompt)
        assert eventual_value(lambda: fleet.remote_tokens() > before, True)
        assert fleet.remote_tokens() - before <= num_tokens
    else:
        with fleet.remote_tokens_grow_by(num_tokens - had):
            fleet.check_exact(prompt)


def test_the_same_prompt_again_pulls_only_what_is_not_cached(fleet: Fleet) -> None:
    prompt = random_prompt(3 * fleet.block_size + 3, "again")
    for _ in range(4):
        fleet.check_exact(prompt)
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def test_sixteen_requests_at_once(fleet: Fleet) -> None:
    prompts = [random_prompt(20 + 11 * i, ("many", i)) for i in range(16)]
    expected = [fleet.expected(prompt) for prompt in prompts]
    with fleet.remote_tokens_grow_by(sum(map(len, prompts))), ThreadPoolExecutor(16) as pool:
        got = list(pool.map(fleet.handed_off, prompts))
    assert [one.token_ids for one in got] == expected


def test_streaming(fleet: Fleet) -> None:
    """vLLM joins what its server has not yet sent, on a busy machine maybe all of it: so it has several tries."""
    num_tokens = 4 * NUM_TOKENS
    prompt = random_prompt(2 * fleet.block_size + 7, "stream")
    wanted = completion(fleet.single.base_url, prompt, num_tokens, cache_salt="alone").text

    def num_pieces() -> int:
        ticket = prefill(fleet.prefill.base_url, prompt).kv_transfer_params
        pieces = list(completion_stream(fleet.decode.base_url, prompt, num_tokens, kv_transfer_params=ticket))
        assert "".join(piece.text for piece in pieces) == wanted
        return len(pieces)

    assert any(num_pieces() > 1 for _ in range(10))


def test_same_host_peers_read_the_cache_directly(fleet: Fleet) -> None:
    before = fleet.transfer_bytes()
    fleet.check_exact(random_prompt(fleet.block_size, "direct"))
    assert eventual_value(lambda: fleet.transfer_bytes().get("shm", 0) > before.get("shm", 0), True)
    assert set(fleet.transfer_bytes()) == {"shm"}


def test_every_block_comes_back(fleet: Fleet) -> None:
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)
