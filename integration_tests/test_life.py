# SPDX-License-Identifier: Apache-2.0
"""The life of a request with servers: few blocks, so that requests are dropped and come back; clients that leave.

connector/tests/test_life.py has the same for every step and size, with vLLM's scheduler alone. Rows of the list of
known faults: B03 (the client is gone before D admits), B05, B40.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from examples.vllm_pd.servers import ExampleProxy, VllmServer, completion, free_port, metrics, start_all
from integration_tests.fleet import (
    KV_USAGE,
    NUM_TOKENS,
    REMOTE_TOKENS,
    FaultFile,
    alone,
    ask,
    config,
    eventual_value,
    handed_off,
    nothing_leaks,
    random_prompt,
    ticket_from,
    wait_until_blocks_are_free,
)

BLOCK = 32
#: Whatever comes back before was given back by somebody.
LEASE_S = 30.0
SOON_S = 20.0
#: How long D waits for a push of which P never hears.
PUSH_TIMEOUT_S = 20.0
#: One of them is vLLM's own.
NUM_BLOCKS = 13
#: Of a request: it may take all others.
MAX_TOKENS = (NUM_BLOCKS - 1) * BLOCK
CHUNK_TOKENS = 64
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
HAND_OFF = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Small:
    """P and D with 12 blocks each, by priority. P may decode too, as a kv_both engine."""

    prefill: VllmServer
    decode: VllmServer
    faults: FaultFile
    port: int

    def push_params(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """For P, and for D, of a push that a router starts at both."""
        named = {"transfer_mode": "push", "transfer_id": name}
        at = {"remote_host": "127.0.0.1", "remote_port": self.port}
        return named | {"do_remote_decode": True}, named | {"do_remote_prefill": True} | at

    def push(self, seed: object) -> None:
        prompt, (to_p, to_d) = random_prompt(BLOCK, ("push", seed)), self.push_params(f"{seed} {time.monotonic()}")
        ask(self.prefill, prompt, 1, kv_transfer_params=to_p)
        ask(self.decode, prompt, 1, kv_transfer_params=to_d)


@pytest.fixture(scope="module")
def small(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    directory: Path = tmp_path_factory.mktemp("logs")
    faults = FaultFile(directory / "fault.json")

    port = free_port()

    def server(name: str, role: str, **extra: Any) -> VllmServer:
        args = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-batched-tokens", str(CHUNK_TOKENS))
        # Else vLLM admits a prompt only if all of it fits, and drops no prefill.
        args += ("--no-scheduler-reserve-full-isl", "--no-enable-prefix-caching")
        return VllmServer(
            models("llama"),
            kv_transfer_config=config(
                role,
                faults.options | {"lease_s": LEASE_S, "push_timeout_s": PUSH_TIMEOUT_S} | extra,
                kv_load_failure_policy="recompute",
            ),
            name=name,
            block_size=BLOCK,
            max_model_len=MAX_TOKENS,
            extra_args=(*args, "--max-num-seqs", "8", "--scheduling-policy", "priority"),
            log_dir=directory,
        )

    first, second = server("prefill", "kv_both", host="127.0.0.1", port=port), server("decode", "kv_consumer")
    servers = Small(first, second, faults, port)
    with start_all([servers.prefill, servers.decode]):
        with ThreadPoolExecutor(4) as pool:  # what the servers make once and keep, they make now
            for _ in range(3):
                first = lambda i: handed_off(servers.prefill, servers.decode, random_prompt(BLOCK, i))  # noqa: E731
                list(pool.map(first, range(4)))
                list(pool.map(servers.push, range(4)))
        yield servers


# --- preemption and priority ----------------------------------------------------------------------------------------


def _preemptions(server: VllmServer) -> int:
    return int(metrics(server.base_url)[PREEMPTIONS])


def _until_preempted(server: VllmServer, attempt: Callable[[int], None], num_attempts: int = 8) -> None:
    """Requests of different clients must meet in the engine. On a busy machine they may miss each other."""
    before = _preemptions(server)
    for number in range(num_attempts):
        attempt(number)
        if eventual_value(lambda: _preemptions(server) > before, True, 0.5):
            return
    raise AssertionError(f"{server.name} has preempted nothing in {num_attempts} attempts")


def test_d_drops_requests_and_computes_them_again(small: Small) -> None:
    """Any two of them need 14 blocks in the end, where there are 12. P's blocks are gone by then."""
    num_tokens = 5 * BLOCK

    def attempt(number: int) -> None:
        prompts = [random_prompt(2 * BLOCK - i, ("drops", number, i)) for i in range(3)]
        wanted = [alone(small.prefill, prompt, num_tokens, ignore_eos=True) for prompt in prompts]
        tickets = [ticket_from(small.prefill, prompt) for prompt in prompts]
        body = {"ignore_eos": True}
        send = lambda one, ticket: ask(small.decode, one, num_tokens, kv_transfer_params=ticket, **body)  # noqa: E731
        with ThreadPoolExecutor(3) as pool:
            assert [answer.token_ids for answer in pool.map(send, prompts, tickets)] == wanted

    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        _until_preempted(small.decode, attempt)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_p_drops_a_prefill_and_computes_it_again(small: Small, mode: str) -> None:
    """A more important request, which P decodes itself, has the blocks that the last chunk would need.

    In a push D has offered its blocks by then, and has got a part of the KV cache from the attempt that is dropped.
    """

    def attempt(number: int) -> None:
        long, beside = (random_prompt(n * BLOCK - 3, ("p drops", mode, number, n)) for n in (9, 4))
        wanted = alone(small.prefill, long)
        with _decoding(small.prefill, beside, 6 * BLOCK, priority=0), ThreadPoolExecutor(1) as pool:
            if mode == "pull":
                ticket = ticket_from(small.prefill, long, priority=5)
                answer = pool.submit(ask, small.decode, long, kv_transfer_params=ticket)
            else:
                to_p, to_d = small.push_params(f"p drops {number}")
                answer = pool.submit(ask, small.decode, long, kv_transfer_params=to_d)
                ask(small.prefill, long, 1, priority=5, kv_transfer_params=to_p)
            assert answer.result(60.0).token_ids == wanted

    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        _until_preempted(small.prefill, attempt)


def test_the_important_ones_overtake(small: Small) -> None:
    """At D, by vLLM's priority: it comes last, takes blocks from the others, ends before them, and all are right."""
    # Our clients may hear of the ends in another order.
    assert any(_last_to_end_of_three(small, attempt) != 2 for attempt in range(4))


def _last_to_end_of_three(small: Small, attempt: int) -> int:
    """Of requests 0 and 1, and the important 2 that comes after them."""
    prompts = [random_prompt(2 * BLOCK - i, ("priority", attempt, i)) for i in range(3)]
    lengths = (4 * BLOCK, 4 * BLOCK, BLOCK // 2)
    wanted = [alone(small.prefill, *pair, ignore_eos=True) for pair in zip(prompts, lengths, strict=True)]
    ended: list[int] = []

    def send(index: int, ticket: dict[str, Any]) -> list[int]:
        body = {"priority": 0 if index == 2 else 9, "kv_transfer_params": ticket, "ignore_eos": True}
        tokens = ask(small.decode, prompts[index], lengths[index], **body).token_ids
        ended.append(index)
        return tokens

    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S), ThreadPoolExecutor(3) as pool:
        tickets = [ticket_from(small.prefill, prompt) for prompt in prompts]
        with small.faults.gate() as gate:  # else the others may have ended before it has come at all
            answers = [pool.submit(send, i, tickets[i]) for i in (0, 1)]
            gate.wait_for(2)
            answers.append(pool.submit(send, 2, tickets[2]))
            gate.wait_for(3)
        assert [answer.result(60.0) for answer in answers] == wanted
    return ended[-1]


# --- clients that leave ---------------------------------------------------------------------------------------------


@contextmanager
def _left(server: VllmServer, prompt: Sequence[int], num_tokens: int, **body: Any) -> Iterator[None]:
    """A client that has sent a request, and closes its connection at the end without having read an answer."""
    asked = {"model": "model", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    client = HTTPConnection(urlsplit(server.base_url).netloc, timeout=30.0)
    client.request("POST", "/v1/completions", json.dumps(asked | body), {"Content-Type": "application/json"})
    try:
        yield
    finally:
        client.close()


@contextmanager
def _decoding(server: VllmServer, prompt: Sequence[int], num_tokens: int, **body: Any) -> Iterator[None]:
    """A client that has had the first piece of a stream, and closes its connection at the end."""
    asked = {"model": "model", "prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=asked | body, timeout=60.0, trust_env=False) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines()  # which closes the connection when nobody holds it any more
        next(lines)
        yield
        lines.close()


def _wait_for(server: VllmServer, name: str, is_good: Callable[[float], bool]) -> None:
    value = lambda: is_good(metrics(server.base_url)[name])  # noqa: E731
    assert eventual_value(value, True), f"{name} of {server.name} is {metrics(server.base_url)[name]}"


def _check_still_right(small: Small, seed: object) -> None:
    prompt = random_prompt(2 * BLOCK + 3, ("after", seed))
    assert handed_off(small.prefill, small.decode, prompt).token_ids == alone(small.prefill, prompt)


def test_the_client_leaves_while_p_prefills(small: Small) -> None:
    """In the middle: it cannot end as long as another one is not taken. A client that waits behind it leaves too."""
    prompt, untaken = random_prompt(11 * BLOCK, "leaves p"), random_prompt(4 * BLOCK, "not taken")
    wanted = alone(small.prefill, untaken)

    def is_in_the_middle() -> bool:
        found = metrics(small.prefill.base_url)
        return found[RUNNING] + found[WAITING] == 2.0 and found[KV_USAGE] > 0.5

    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        ticket = ticket_from(small.prefill, untaken)
        with (
            _left(small.prefill, prompt, 1, kv_transfer_params=HAND_OFF),
            _left(small.prefill, prompt, 1, kv_transfer_params=HAND_OFF),
        ):
            assert eventual_value(is_in_the_middle, True)
        _wait_for(small.prefill, KV_USAGE, lambda value: value < 0.4)
        assert ask(small.decode, untaken, kv_transfer_params=ticket).token_ids == wanted
        wait_until_blocks_are_free(small.prefill, seconds=SOON_S)
        _check_still_right(small, "prefill")


@contextmanager
def _full(small: Small) -> Iterator[None]:
    """All of D's blocks are taken: by a request that waits for a push which never comes."""
    _, to_d = small.push_params("busy")
    with _left(small.decode, random_prompt(MAX_TOKENS - 1, "busy"), 1, kv_transfer_params=to_d, priority=0):
        _wait_for(small.decode, KV_USAGE, lambda value: value > 0.9)
        yield


def test_the_client_leaves_while_it_waits_at_d(small: Small) -> None:
    """Gone before D admits it, for which it has not enough blocks: P is free long before the lease ends."""
    prompt = random_prompt(5 * BLOCK, "leaves queue")
    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S), _full(small):
        ticket = ticket_from(small.prefill, prompt)
        with _left(small.decode, prompt, 4, kv_transfer_params=ticket, priority=9):
            _wait_for(small.decode, WAITING, lambda value: value == 2.0)
        wait_until_blocks_are_free(small.prefill, seconds=SOON_S)
    _check_still_right(small, "queue")


def test_the_client_leaves_while_d_loads(small: Small) -> None:
    """D keeps its blocks until the read has ended."""
    prompt = random_prompt(5 * BLOCK, "leaves load")
    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        ticket = ticket_from(small.prefill, prompt)
        with small.faults.gate() as gate:
            with _left(small.decode, prompt, 4, kv_transfer_params=ticket):
                gate.wait_for()
            _wait_for(small.decode, WAITING, lambda value: value == 0.0)
            assert metrics(small.decode.base_url)[KV_USAGE] > 0.0
        _check_still_right(small, "load")


def test_the_client_leaves_while_d_decodes(small: Small) -> None:
    prompt = random_prompt(5 * BLOCK, "leaves decode")
    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        ticket = ticket_from(small.prefill, prompt)
        with _decoding(small.decode, prompt, 6 * BLOCK, kv_transfer_params=ticket):
            wait_until_blocks_are_free(small.prefill, seconds=SOON_S)
        _check_still_right(small, "decode")


# --- several sequences ----------------------------------------------------------------------------------------------


def test_beam_search_through_the_proxy_goes_to_d_alone(small: Small, tmp_path: Path) -> None:
    """B40: vLLM's successor of `best_of` sends a new request for each beam and token, and none with the ticket."""
    prompt = random_prompt(2 * BLOCK + 3, "beams")
    body = {"model": "model", "use_beam_search": True, "n": 3, "ignore_eos": True}
    wanted = [choice["text"] for choice in ask(small.prefill, prompt, 6, **body).raw["choices"]]
    with (
        nothing_leaks(small.prefill, small.decode, seconds=SOON_S),
        ExampleProxy([small.prefill.base_url], [small.decode.base_url], log_dir=tmp_path) as proxy,
    ):
        got = completion(proxy.base_url, prompt, 6, **body).raw["choices"]
    assert [choice["text"] for choice in got] == wanted
    assert len(set(wanted)) == 3


# --- push -----------------------------------------------------------------------------------------------------------


def test_push_through_the_proxy_at_the_same_time(small: Small, tmp_path: Path) -> None:
    prompts = [random_prompt(3 * BLOCK + i, ("same time", i)) for i in range(3)]
    wanted = [alone(small.prefill, prompt) for prompt in prompts]
    args = ("--transfer-mode", "push", "--same-time", "--prefill-worker", f"127.0.0.1:{small.port}")
    with (
        nothing_leaks(small.prefill, small.decode, seconds=SOON_S),
        ExampleProxy([small.prefill.base_url], [small.decode.base_url], extra_args=args, log_dir=tmp_path) as proxy,
        ThreadPoolExecutor(3) as pool,
    ):
        before = metrics(small.decode.base_url).get(REMOTE_TOKENS, 0.0)
        got = pool.map(lambda prompt: completion(proxy.base_url, prompt, NUM_TOKENS, model="model").token_ids, prompts)
        assert list(got) == wanted
        pushed = lambda: metrics(small.decode.base_url)[REMOTE_TOKENS] - before  # noqa: E731
        assert eventual_value(pushed, sum(map(len, prompts))) == sum(map(len, prompts))


def test_the_client_leaves_p_while_it_pushes(small: Small) -> None:
    """D is told, or gives up waiting for a P that never heard of it, and computes the prompt."""
    prompt = random_prompt(9 * BLOCK, "leaves push")
    wanted = alone(small.prefill, prompt)
    to_p, to_d = small.push_params("leaves push")
    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, small.decode, prompt, kv_transfer_params=to_d)
        _wait_for(small.decode, WAITING, lambda value: value == 1.0)
        with _left(small.prefill, prompt, 1, kv_transfer_params=to_p):
            pass
        assert answer.result(60.0).token_ids == wanted


def test_the_client_leaves_d_while_it_waits_for_a_push(small: Small) -> None:
    """Before P has heard of it, and after: D's blocks come back, and P's long before its lease ends."""
    prompt = random_prompt(5 * BLOCK, "leaves offer")
    for p_first in (True, False):
        to_p, to_d = small.push_params(f"leaves offer {p_first}")
        with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
            with small.faults.gate() as gate:
                if p_first:
                    ask(small.prefill, prompt, 1, kv_transfer_params=to_p)
                with _left(small.decode, prompt, 4, kv_transfer_params=to_d):
                    _wait_for(small.decode, WAITING, lambda value: value == 1.0)
                    gate.wait_for(int(p_first))
                _wait_for(small.decode, WAITING, lambda value: value == 0.0)
            _check_still_right(small, ("offer", p_first))


def test_d_rejects_a_request_that_p_pushes(small: Small) -> None:
    """B03, for a push that the router starts at both: unknown model, too long. P is free before its lease ends."""
    prompt = random_prompt(4 * BLOCK, "rejected push")
    with nothing_leaks(small.prefill, small.decode, seconds=SOON_S):
        for model, num_tokens in (("unknown", 4), ("model", 100_000)):
            to_p, to_d = small.push_params(f"rejected {model}")
            ask(small.prefill, prompt, 1, kv_transfer_params=to_p)
            with pytest.raises(httpx.HTTPStatusError, match="-> 40"):
                ask(small.decode, prompt, num_tokens, kv_transfer_params=to_d, model=model)
