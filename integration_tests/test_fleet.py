# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode servers under load: one of each is killed and replaced, others are added and removed.

Nobody else is restarted, or told of anything: a ticket names the workers to read from, and links are made at first use.

    FLEET_REQUESTS=2000 FLEET_RATE=6 python -m pytest integration_tests/test_fleet.py      for longer
"""

from __future__ import annotations

import os
import random
import signal
import string
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from examples.vllm_pd.servers import (
    ExampleProxy,
    Router,
    VllmServer,
    completion,
    completion_stream,
    free_port,
    metrics,
    start_all,
)
from integration_tests.fleet import (
    PATIENCE_S,
    REMOTE_TOKENS,
    ask,
    config,
    eventual_value,
    random_prompt,
    ticket_from,
    wait_until_blocks_are_free,
)
from integration_tests.serving_benchmark import Outcome, ServingBenchmark

BLOCK = 32
LEASE_S = 15.0
NUM_TOKENS = 12
NUM_PROMPTS = 16
NUM_REQUESTS = int(os.environ.get("FLEET_REQUESTS", "80"))
RATE = float(os.environ.get("FLEET_RATE", "3"))
#: After a server is ready again, until the router has noticed.
NOTICE_S = 5.0
ROUTER_ARGS = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
ROUTER_ARGS += ("--health-success-threshold", "1", "--cb-timeout-duration-secs", "1")
#: A killed server refuses at once. One that only does not get to run must not look dead.
ROUTER_ARGS += ("--health-check-timeout-secs", "30")


@dataclass(frozen=True)
class Fleet2:
    """Servers on ports that stay the same when they are started again."""

    prefills: list[VllmServer]
    decodes: list[VllmServer]
    model: Path
    directory: Path

    @property
    def all(self) -> list[VllmServer]:
        return [*self.prefills, *self.decodes]


def _server(model: Path, directory: Path, role: str, name: str) -> VllmServer:
    return VllmServer(
        model,
        kv_transfer_config=config(role, {"lease_s": LEASE_S}, kv_load_failure_policy="recompute"),
        name=name,
        block_size=BLOCK,
        port=free_port(),
        # Without a prefix cache D needs all of each prompt from P, also when it comes again.
        extra_args=("--shutdown-timeout", "30", *(("--no-enable-prefix-caching",) if role == "kv_consumer" else ())),
        log_dir=directory,
    )


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet2]:
    model, directory = models("llama"), tmp_path_factory.mktemp("fleet")
    prefills = [_server(model, directory, "kv_producer", f"prefill{i}") for i in range(2)]
    decodes = [_server(model, directory, "kv_consumer", f"decode{i}") for i in range(2)]
    running = Fleet2(prefills, decodes, model, directory)
    with start_all(running.all):
        yield running


def _texts() -> list[str]:
    """Prompts that a tokenizer of bytes gives back as they are."""
    choose = random.Random("fleet")
    return ["".join(choose.choices(string.ascii_letters + " ", k=40 + 37 * i)) for i in range(NUM_PROMPTS)]


def _right_texts(server: VllmServer, prompts: Sequence[str]) -> list[str]:
    alone = lambda text: completion(server.base_url, text, NUM_TOKENS, model="model", cache_salt="alone").text  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(alone, prompts))


def _remote_tokens(server: VllmServer) -> int:
    return int(metrics(server.base_url).get(REMOTE_TOKENS, 0))


@dataclass(frozen=True)
class Outage:
    """From the kill of a server until the router may rely on it again."""

    start_s: float
    end_s: float

    def touches(self, outcome: Outcome) -> bool:
        return outcome.start_s <= self.end_s and self.start_s <= outcome.end_s + NOTICE_S


def _replace(server: VllmServer) -> Outage:
    """SIGKILL, and a new one in the same place."""
    start_s = time.monotonic()
    server.kill()
    server.start()
    server.wait_ready()
    return Outage(start_s, time.monotonic() + NOTICE_S)


@pytest.mark.timeout(600 + 2 * NUM_REQUESTS)
def test_two_and_two_behind_the_router_under_vllms_benchmark(fleet: Fleet2, tmp_path: Path) -> None:
    """Every text is right. Only requests that met a killed server may have failed."""
    prompts = _texts()
    right = _right_texts(fleet.prefills[0], prompts)
    urls = [server.base_url for server in fleet.prefills], [server.base_url for server in fleet.decodes]
    survivors = {server: server.pid for server in (fleet.prefills[1], fleet.decodes[1])}
    sent = [prompts[i % NUM_PROMPTS] for i in range(NUM_REQUESTS)]
    with (
        Router(*urls, extra_args=ROUTER_ARGS, log_dir=tmp_path) as router,
        ServingBenchmark(
            router.base_url, fleet.model, sent, num_tokens=NUM_TOKENS, request_rate=RATE, directory=tmp_path
        ) as benchmark,
    ):
        outages = []
        for share, server in ((0.2, fleet.prefills[0]), (0.5, fleet.decodes[0])):
            _wait_until_served(fleet.decodes, share * NUM_REQUESTS, benchmark)
            outages.append(_replace(server))
        outcomes = benchmark.outcomes(timeout_s=120.0 + 2 * NUM_REQUESTS / RATE)
        _check(outcomes, right, outages)
        # The router, which was not told of anything, uses the new D as well.
        new_d = lambda: _is_right(router, prompts, right) and _remote_tokens(fleet.decodes[0]) > 0  # noqa: E731
        assert eventual_value(new_d, True, 60.0)
    assert all(server.pid == pid for server, pid in survivors.items())
    wait_until_blocks_are_free(*fleet.all, seconds=LEASE_S + PATIENCE_S)


def _is_right(router: Router, prompts: Sequence[str], right: Sequence[str]) -> bool:
    """False as long as the router has no answer."""
    with suppress(httpx.HTTPStatusError):
        found = [completion(router.base_url, text, NUM_TOKENS, model="model").text for text in prompts[:4]]
        return found == list(right[:4])
    return False


def _wait_until_served(decodes: Sequence[VllmServer], num_requests: float, benchmark: ServingBenchmark) -> None:
    served = lambda: sum(metrics(d.base_url).get("vllm:request_success_total", 0.0) for d in decodes)  # noqa: E731
    eventual_value(lambda: benchmark.has_ended or served() >= num_requests, True, 240.0)
    if served() < num_requests:
        benchmark.outcomes(0.0)  # raises with its log
        raise AssertionError(f"{served()} requests, not {num_requests}")


def _check(outcomes: Sequence[Outcome], right: Sequence[str], outages: Sequence[Outage]) -> None:
    """A cut stream is no error to the benchmark: it has failed, if what came is the beginning of what is right."""
    assert len(outcomes) == NUM_REQUESTS
    failed = []
    for one in outcomes:
        wanted = right[one.index % NUM_PROMPTS]
        if one.error or one.text != wanted:
            assert wanted.startswith(one.text), one
            failed.append(one)
    assert not [one for one in failed if not any(outage.touches(one) for outage in outages)]
    assert len(failed) <= NUM_REQUESTS // 4, f"{len(failed)} of {NUM_REQUESTS} failed"


def test_servers_come_and_go_while_others_serve(fleet: Fleet2, tmp_path: Path) -> None:
    """A new P and a new D at once, known to nobody before; then an old P and an old D are told to end."""
    new_p = _server(fleet.model, tmp_path, "kv_producer", "new-prefill")
    new_d = _server(fleet.model, tmp_path, "kv_consumer", "new-decode")
    prompts = [random_prompt(60 + 9 * i, ("come and go", i)) for i in range(8)]
    right = [ask(fleet.prefills[1], prompt, NUM_TOKENS, cache_salt="alone").token_ids for prompt in prompts]
    urls = [server.base_url for server in fleet.prefills], [server.base_url for server in fleet.decodes]
    with ExampleProxy(*urls, extra_args=("--admin",), log_dir=tmp_path) as proxy, start_all([new_p, new_d]):
        through = lambda prompt: completion(proxy.base_url, prompt, NUM_TOKENS, model="model").token_ids  # noqa: E731
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(through, prompt) for prompt in prompts[:4]]
            _serve_with(proxy, [fleet.prefills[1], new_p], [fleet.decodes[1], new_d])
            answers += [pool.submit(through, prompt) for prompt in prompts[4:]]
            assert [answer.result(60.0) for answer in answers] == right
        for decode in (fleet.decodes[1], new_d):
            before = _remote_tokens(decode)
            ticket = ticket_from(new_p, prompts[0])
            assert ask(decode, prompts[0], NUM_TOKENS, kv_transfer_params=ticket).token_ids == right[0]
            pulled = lambda decode=decode, before=before: _remote_tokens(decode) - before  # noqa: E731
            assert eventual_value(pulled, len(prompts[0])) == len(prompts[0])
        _check_an_old_pair_ends_in_order(fleet, new_d)


def _serve_with(proxy: ExampleProxy, prefills: Sequence[VllmServer], decodes: Sequence[VllmServer]) -> None:
    lists = {"prefill": [p.base_url for p in prefills], "decode": [d.base_url for d in decodes]}
    httpx.put(f"{proxy.base_url}/servers", json=lists, timeout=60, trust_env=False).raise_for_status()


def _check_an_old_pair_ends_in_order(fleet: Fleet2, new_d: VllmServer) -> None:
    """P has given a ticket, D is in the middle of an answer: both finish it after SIGTERM, and end by themselves."""
    old_p, old_d, other_p = fleet.prefills[0], fleet.decodes[0], fleet.prefills[1]
    prompt, num_tokens = random_prompt(200, "the last ones"), 150
    wanted = ask(other_p, prompt, num_tokens, cache_salt="alone", ignore_eos=True).text
    waiting, running = ticket_from(old_p, prompt), ticket_from(other_p, prompt)
    pieces = completion_stream(old_d.base_url, prompt, num_tokens, kv_transfer_params=running, ignore_eos=True)
    first = next(pieces)
    for server in (old_p, old_d):
        os.kill(server.pid, signal.SIGTERM)
    got = ask(new_d, prompt, num_tokens, kv_transfer_params=waiting, ignore_eos=True).text
    assert (got, "".join(piece.text for piece in (first, *pieces))) == (wanted, wanted)
    for server in (old_p, old_d):
        assert eventual_value(lambda server=server: server.running, False, 60.0) is False, f"{server.name} did not end"
        assert server.exit_status() == 0, server.name
