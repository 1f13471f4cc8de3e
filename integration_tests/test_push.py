# SPDX-License-Identifier: Apache-2.0
"""Push between real servers: P writes into D's blocks while it prefills, and the text is a single engine's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from examples.vllm_pd.servers import Completion, VllmServer, completion, free_port, metrics, start_all
from integration_tests.fleet import (
    FAILED_LOADS,
    NUM_TOKENS,
    PATIENCE_S,
    FaultFile,
    Fleet,
    config,
    eventual_value,
    nothing_leaks,
    random_prompt,
    wait_until_blocks_are_free,
)

#: (model, block size, tokens per step). Steps of 33 tokens end just behind a block (B28).
SHAPES = [("llama", 32, 33), ("gemma3_hybrid", 32, 256)]
HYBRID = "gemma3_hybrid"
LONG = 1297
PUSH_TIMEOUT_S = 60.0
LEASE_S = 30.0


@dataclass(frozen=True)
class PushFleet(Fleet):
    """`port`: where P's first worker listens, which a router knows."""

    port: int
    kind: str
    faults: FaultFile

    def to_p(self, name: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "transfer_mode": "push", "transfer_id": name}

    def to_d(self, name: str) -> dict[str, Any]:
        at = {"remote_host": "127.0.0.1", "remote_port": self.port}
        return {"do_remote_prefill": True, "transfer_mode": "push", "transfer_id": name, **at}

    def ask_p(self, prompt: Sequence[int], name: str, **more: Any) -> Completion:
        return completion(self.prefill.base_url, prompt, 1, model="model", kv_transfer_params=self.to_p(name), **more)

    def ask_d(self, prompt: Sequence[int], name: str, **more: Any) -> Completion:
        params = self.to_d(name)
        return completion(self.decode.base_url, prompt, NUM_TOKENS, model="model", kv_transfer_params=params, **more)

    def pushed(self, prompt: Sequence[int], order: str) -> list[int]:
        name = _transfer_id()
        if order == "ticket":
            ticket = self.ask_p(prompt, name).kv_transfer_params
            assert ticket is not None
            assert (ticket["transfer_mode"], ticket["transfer_id"]) == ("push", name)
            base_url = self.decode.base_url
            return completion(base_url, prompt, NUM_TOKENS, model="model", kv_transfer_params=ticket).token_ids
        if order == "P first":
            self.ask_p(prompt, name)
            return self.ask_d(prompt, name).token_ids
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(self.ask_d, prompt, name)
            self.wait_until_d_waits()
            pool.submit(self.ask_p, prompt, name).result()
            return answer.result().token_ids

    def wait_until_d_waits(self) -> None:
        """D has given its request blocks, and so has told P or is about to."""
        waits = lambda: metrics(self.decode.base_url)["vllm:kv_cache_usage_perc"] > 0  # noqa: E731
        assert eventual_value(waits, True)


_numbers = itertools.count(1)


def _transfer_id() -> str:
    return f"transfer-{next(_numbers)}"


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}-{shape[2]}")
def fleet(request: pytest.FixtureRequest, models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PushFleet]:
    kind, block_size, chunk_tokens = request.param
    log_dir, port = tmp_path_factory.mktemp("logs"), free_port()
    faults = FaultFile(log_dir / "fault.json")

    def server(name: str, role: str, **extra: Any) -> VllmServer:
        extra = faults.options | {"push_timeout_s": PUSH_TIMEOUT_S, "lease_s": LEASE_S} | extra
        return VllmServer(
            models(kind),
            kv_transfer_config=config(role, extra),
            name=name,
            block_size=block_size,
            extra_args=["--max-num-batched-tokens", str(chunk_tokens)],
            log_dir=log_dir,
        )

    prefill = server("prefill", "kv_producer", host="127.0.0.1", port=port)
    decode = server("decode", "kv_consumer")
    with start_all([prefill, decode]):
        running = PushFleet(prefill, prefill, decode, block_size, port, kind, faults)
        running.check_exact([1])  # from now on they have a link
        yield running


LENGTHS: dict[str, Callable[[int], int]] = {
    "B-1": lambda b: b - 1, "B": lambda b: b, "3B+1": lambda b: 3 * b + 1, "long": lambda b: LONG
}  # fmt: skip
CASES = [(length, order) for length in LENGTHS for order in ("P first", "D first")] + [("long", "ticket")]


@pytest.mark.parametrize(("length", "order"), CASES)
def test_the_text_is_that_of_a_single_engine(fleet: PushFleet, length: str, order: str) -> None:
    num_tokens = LENGTHS[length](fleet.block_size)
    prompt = random_prompt(num_tokens, ("push", num_tokens, order))
    wanted = fleet.expected(prompt)
    with fleet.remote_tokens_grow_by(num_tokens):
        assert fleet.pushed(prompt, order) == wanted


def test_the_text_depends_on_every_block(fleet: PushFleet) -> None:
    """The negative control: else equal texts would say nothing about what was written where."""
    prompt = random_prompt(4 * fleet.block_size + 5, "sensitive")
    wanted = fleet.pushed(prompt, "D first")
    assert wanted == fleet.expected(prompt)
    size = fleet.block_size
    for block in range(5):
        other = list(prompt)
        other[block * size : (block + 1) * size] = random_prompt(len(prompt[block * size :][:size]), ("other", block))
        assert fleet.pushed(other, "P first") != wanted, f"block {block}"


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_d_has_the_first_blocks_already(fleet: PushFleet, num_blocks: int, shift: int) -> None:
    """B26: only what D lacks is written, where it belongs."""
    block, num_tokens = fleet.block_size, 4 * fleet.block_size + shift
    prompt = random_prompt(num_tokens, ("warm", num_blocks, shift))
    completion(fleet.decode.base_url, prompt[: num_blocks * block], 1, model="model")
    wanted, before = fleet.expected(prompt), fleet.remote_tokens()
    came = lambda: fleet.remote_tokens() - before  # noqa: E731
    assert fleet.pushed(prompt, "D first") == wanted
    if fleet.kind == HYBRID:
        assert eventual_value(lambda: came() > 0, True)
        assert came() <= num_tokens
    else:
        lacking = num_tokens - num_blocks * block
        assert eventual_value(came, lacking) == lacking


def test_pushes_and_pulls_at_once(fleet: PushFleet) -> None:
    prompts = [random_prompt(20 + 23 * i, ("mixed", i)) for i in range(12)]
    wanted = [fleet.expected(prompt) for prompt in prompts]

    def hand_off(number: int) -> list[int]:
        if number % 3 == 0:
            return fleet.handed_off(prompts[number]).token_ids
        return fleet.pushed(prompts[number], "P first" if number % 3 == 1 else "D first")

    before = metrics(fleet.decode.base_url).get(FAILED_LOADS, 0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(hand_off, range(len(prompts)))) == wanted
    assert metrics(fleet.decode.base_url).get(FAILED_LOADS, 0) == before


def test_requests_that_go_away(fleet: PushFleet) -> None:
    """The client of either leaves in the middle, or P is never asked: all blocks come back, nothing is left."""
    with nothing_leaks(fleet.prefill, fleet.decode, seconds=LEASE_S + PATIENCE_S):
        prompt = random_prompt(LONG, "away")
        for name in (_transfer_id(), _transfer_id()):
            with ThreadPoolExecutor(2) as pool, fleet.faults.gate():
                d = pool.submit(_leaves, fleet.ask_d, prompt, name, 2.0)
                p = pool.submit(_leaves, fleet.ask_p, prompt, name, 1.0)
                d.result()
                p.result()
        with pytest.raises(httpx.HTTPError):
            fleet.ask_d(random_prompt(40, "nobody"), _transfer_id(), timeout_s=2.0)
    fleet.check_exact(random_prompt(70, "after"))


def _leaves(ask: Callable[..., Completion], prompt: Sequence[int], name: str, seconds: float) -> None:
    try:
        ask(prompt, name, timeout_s=seconds)
    except httpx.HTTPError:
        return


def test_p_is_killed_in_the_middle_of_a_slow_push(fleet: PushFleet) -> None:
    """B01: D's request fails in bounded time, and D's blocks come back. The last test: P is gone."""
    prompt, name = random_prompt(LONG, "killed"), _transfer_id()
    with ThreadPoolExecutor(2) as pool, fleet.faults.gate() as gate:
        d = pool.submit(fleet.ask_d, prompt, name)
        fleet.wait_until_d_waits()
        p = pool.submit(_leaves, fleet.ask_p, prompt, name, 60.0)
        gate.wait_for()
        begun_s = time.monotonic()
        fleet.prefill.kill()
        with pytest.raises(httpx.HTTPStatusError):
            d.result()
        assert time.monotonic() - begun_s < PUSH_TIMEOUT_S
        p.result()
    wait_until_blocks_are_free(fleet.decode)
