# SPDX-License-Identifier: Apache-2.0
"""P and D of different shapes, as real servers: tensor parallel, block sizes, data parallel, windows.

Every engine here is both P and D (kv_both), so that three of them make all pairs. What is planned is tested byte by
byte in connector/tests/test_shapes.py; here are vLLM's own block tables, ranks and layouts. Pipeline stages are tested
there only: with --enforce-eager and --pipeline-parallel-size 2 vLLM's CPU build (0.32) fails at its first request,
because its second stage gets its `intermediate_tensors` from a warm-up that the CPU worker leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from examples.vllm_pd.servers import VllmServer, metrics, start_all
from integration_tests.fleet import (
    REMOTE_TOKENS,
    alone,
    ask,
    config,
    eventual_value,
    random_prompt,
    ticket_from,
    wait_until_blocks_are_free,
)

SMALL, LARGE = 32, 64


def _server(model, log_dir, name: str, block_size: int, *args: str, **env: str) -> VllmServer:
    return VllmServer(
        model,
        kv_transfer_config=config("kv_both"),
        name=name,
        block_size=block_size,
        extra_args=["--max-num-batched-tokens", "256", *args],
        env=env,
        log_dir=log_dir,
    )


@dataclass(frozen=True)
class Engines:
    """By name; all have the same model."""

    servers: dict[str, VllmServer]
    reference: VllmServer

    def hand_off(self, p: str, d: str, prompt: list[int], num_remote: int | None = None, **body: object) -> None:
        """P prefills, D goes on; the text is that of one engine alone, and its KV cache came from P."""
        wanted = alone(self.reference, prompt)
        first, second = self.servers[p], self.servers[d]
        with _remote_tokens(second, len(prompt) if num_remote is None else num_remote):
            got = ask(second, prompt, kv_transfer_params=ticket_from(first, prompt), **body)
        assert got.token_ids == wanted, f"{p} -> {d}, {len(prompt)} prompt tokens"

    def check_free(self) -> None:
        wait_until_blocks_are_free(*self.servers.values())


@contextmanager
def _remote_tokens(server: VllmServer, num_tokens: int) -> Iterator[None]:
    read = lambda: int(metrics(server.base_url).get(REMOTE_TOKENS, 0))  # noqa: E731
    before = read()
    yield
    grown = eventual_value(lambda: read() - before, num_tokens)
    assert grown == num_tokens, f"{grown} tokens came from P, not {num_tokens}"


@pytest.fixture(scope="module")
def llamas(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Two KV heads: one on each rank of `tp2`."""
    model, logs = models("llama"), tmp_path_factory.mktemp("logs")
    servers = {
        "small": _server(model, logs, "small", SMALL),
        "large": _server(model, logs, "large", LARGE),
        "tp2": _server(model, logs, "tp2", SMALL, "--tensor-parallel-size", "2"),
    }
    with start_all(list(servers.values())):
        yield Engines(servers, servers["small"])


@pytest.mark.parametrize(("p", "d"), [("tp2", "small"), ("small", "tp2"), ("tp2", "large")])
def test_b31_b32_tensor_parallel_2_to_1_and_1_to_2(llamas: Engines, p: str, d: str) -> None:
    for num_tokens in (SMALL - 1, 3 * SMALL + 1):
        llamas.hand_off(p, d, random_prompt(num_tokens, (p, d, num_tokens)))
    llamas.check_free()


@pytest.mark.parametrize(("p", "d"), [("small", "large"), ("large", "small")])
def test_b33_block_sizes_both_ways(llamas: Engines, p: str, d: str) -> None:
    """The last block full, ragged, and with one token; then prompts whose prefix D has already."""
    for num_tokens in (1, SMALL, SMALL + 1, LARGE, 3 * SMALL - 1, 3 * LARGE + 1, 1000):
        llamas.hand_off(p, d, random_prompt(num_tokens, (p, d, num_tokens)))
    block = SMALL if d == "small" else LARGE
    for num_cached in (SMALL, LARGE, 3 * SMALL, 2 * LARGE):
        prompt = random_prompt(3 * LARGE + 5, (p, d, "warm", num_cached))
        ask(llamas.servers[d], prompt[:num_cached], 1)
        llamas.hand_off(p, d, prompt, len(prompt) - num_cached // block * block)
    llamas.check_free()


def test_a_block_in_a_wrong_place_changes_the_text(llamas: Engines) -> None:
    """The negative control: one block of P in the place of another.

    Two that are exchanged would change nothing: a key carries its position, and attention is a sum over all keys. That
    is what the tests of every byte are for.
    """
    for p, d in (("tp2", "large"), ("large", "small"), ("small", "tp2")):
        prompt = random_prompt(4 * LARGE, (p, d, "wrong"))
        ticket = ticket_from(llamas.servers[p], prompt)
        [blocks] = ticket["remote_block_ids"]
        blocks[0] = blocks[1]
        got = ask(llamas.servers[d], prompt, kv_transfer_params=ticket)
        assert got.token_ids != alone(llamas.reference, prompt), f"{p} -> {d}"
    llamas.check_free()


def test_data_parallel_ranks_of_p_with_blocks_of_another_size(llamas: Engines, models, tmp_path) -> None:
    """Each rank of P is an engine of its own. (B25, one port each, is in test_deployments.py.)"""
    server = _server(models("llama"), tmp_path, "dp", LARGE, "--data-parallel-size", "2")
    with server:
        ports = set()
        for rank in (0, 1):
            prompt = random_prompt(2 * LARGE + 9, ("dp", rank))
            wanted = alone(llamas.reference, prompt)
            ticket = ticket_from(server, prompt, headers={"X-data-parallel-rank": str(rank)})
            ports.add(ticket["remote_port"])
            small = llamas.servers["small"]
            with _remote_tokens(small, len(prompt)):
                assert ask(small, prompt, kv_transfer_params=ticket).token_ids == wanted
        assert len(ports) == 2
        wait_until_blocks_are_free(server, llamas.servers["small"])


def test_windows_with_block_sizes_both_ways(models, tmp_path) -> None:
    """Gemma 3: three layers with a window of 128 tokens, one without.

    A P with smaller blocks may have dropped the first part of a block that D keeps: then D computes the prompt itself,
    and P is told so at once.
    """
    model = models("gemma3_hybrid")
    chunk = ("--max-num-batched-tokens", str(4 * LARGE + SMALL))
    small, large = (_server(model, tmp_path, str(size), size, *chunk) for size in (SMALL, LARGE))
    with start_all([small, large]):
        engines = Engines({"small": small, "large": large}, small)
        for num_tokens in (SMALL + 5, 3 * LARGE + 1, 300):
            engines.hand_off("large", "small", random_prompt(num_tokens, ("window", num_tokens)))
        # The last chunk of the longest begins where P has dropped the first half of a block of 64 that D keeps.
        for num_tokens, is_loaded in ((100, True), (4 * LARGE + 10, True), (4 * LARGE + SMALL + 10, False)):
            prompt = random_prompt(num_tokens, ("window, smaller at P", num_tokens))
            engines.hand_off("small", "large", prompt, num_tokens if is_loaded else 0)
        engines.check_free()
