# SPDX-License-Identifier: Apache-2.0
"""Every kind of KV cache that vLLM's CPU build can run, with real servers: text as a single engine's, KV from P.

One fleet per kind, and few prompts: around block bounds, and longer than windows, chunks and the prefill's chunks.
Prefix caching is on at both ends, at neither, or at D only; at P only in test_caches_requests.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from integration_tests.fleet import (
    CHUNK_TOKENS,
    NUM_TOKENS,
    Fleet,
    ask,
    eventual_value,
    random_prompt,
    running_fleet,
    wait_until_blocks_are_free,
)

BLOCK = 32
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, CHUNK_TOKENS + 9)


@dataclass(frozen=True)
class Kind:
    """One kind of cache.

    Attributes:
        prefill_args, decode_args: P's and D's own.
        not_handed_off: how many of a prompt's last tokens P leaves to D.
        first_block_seen: the text does not depend on what is before it.
        block_bytes: of a block of tokens, all layers together; 0 = not looked at.
    """

    model: str
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    not_handed_off: int = 0
    first_block_seen: int = 0
    block_bytes: int = 0


KINDS = {
    "mamba": Kind("granite_hybrid", NO_PREFIX_CACHE, NO_PREFIX_CACHE, not_handed_off=1),
    "mamba-aligned": Kind("lfm2", not_handed_off=1, first_block_seen=3),
    # Six layers, of which the last two have no K and V of their own: two heads of 64 values in float32, K and V.
    "shared-layers": Kind("gemma3n", block_bytes=4 * BLOCK * 2 * 64 * 4 * 2),
    "chunked-local": Kind("llama4_chunked", prefill_args=NO_PREFIX_CACHE),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def fleet(kind: Kind, models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    args = {"prefill_args": kind.prefill_args, "decode_args": kind.decode_args}
    with running_fleet(models(kind.model), BLOCK, logs, **args) as running:
        yield running


def test_text_around_block_bounds(kind: Kind, fleet: Fleet) -> None:
    """The last prompt token is one that the single engine has generated.

    So both decode it, and compute the same in the same order: vLLM's CPU kernels for short convolutions do not give
    the same bits in prefill and decode, and a random model makes another text of that.
    """
    for length in LENGTHS:
        base = random_prompt(length - 1, ("kinds", length)) if length > 1 else []
        first, *wanted = fleet.expected(base, NUM_TOKENS + 1) if base else (7, *fleet.expected([7]))
        with fleet.remote_tokens_grow_by(length - kind.not_handed_off):
            got = fleet.handed_off([*base, first]).token_ids
        assert got == wanted, f"{length} prompt tokens"
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def test_the_text_depends_on_every_block(kind: Kind, fleet: Fleet) -> None:
    """Else equal texts would say nothing: one other token in any block gives another text."""
    prompt = random_prompt(3 * BLOCK + 5, "sensitive")
    wanted = fleet.expected(prompt, 2 * NUM_TOKENS)
    for block in range(kind.first_block_seen, 4):
        other = list(prompt)
        other[block * BLOCK : (block + 1) * BLOCK] = random_prompt(BLOCK, ("other", block))
        other = other[: len(prompt)]
        assert fleet.expected(other, 2 * NUM_TOKENS) != wanted, f"block {block}"


def test_each_layers_bytes_are_moved_once(kind: Kind, fleet: Fleet) -> None:
    if not kind.block_bytes:
        return
    before = fleet.transfer_bytes().get("shm", 0)
    fleet.check_exact(random_prompt(2 * BLOCK, "bytes"))
    moved = lambda: fleet.transfer_bytes().get("shm", 0) - before  # noqa: E731
    assert eventual_value(moved, 2 * kind.block_bytes) == 2 * kind.block_bytes


def test_d_is_warm_with_a_part(kind: Kind, fleet: Fleet) -> None:
    """D has computed the first blocks before, and its prefix cache has what its kind of cache can keep of them."""
    for warm_blocks in (1, 3):
        base = random_prompt(3 * BLOCK + 4, ("warm", warm_blocks))
        first, *wanted = fleet.expected(base, NUM_TOKENS + 1)
        ask(fleet.decode, base[: warm_blocks * BLOCK], 1)
        before = fleet.remote_tokens()
        assert fleet.handed_off([*base, first]).token_ids == wanted, f"{warm_blocks} blocks are there"
        assert eventual_value(lambda: fleet.remote_tokens() > before, True)  # noqa: B023
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)
