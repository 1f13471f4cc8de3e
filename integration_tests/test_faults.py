# SPDX-License-Identifier: Apache-2.0
"""What goes wrong shows: corrupted bytes change the text, failed loads follow vLLM's policy, leases end, nothing leaks.

Rows of the list of known faults: B01, B03, B05, B06, B40, B42, B46. Those with killed servers are in test_restarts.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from examples.vllm_pd.servers import Completion, VllmServer, metrics, start_all
from integration_tests.fleet import (
    FAILED_LOADS,
    PATIENCE_S,
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
LEASE_S = 40.0
#: Whatever comes back before was given back by somebody.
SOON_S = LEASE_S / 2
#: Of an engine that hands off only what nobody takes.
SHORT_LEASE_S = 4.0
LOAD_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class FaultyFleet:
    """One P, and three Ds whose loads go wrong as `faults` says.

    recomputing: a failed load is computed here. uncached: likewise, without a prefix cache; it may be a P too, whose
    leases are short. failing: a failed load fails the request; it has checksums on.
    """

    prefill: VllmServer
    recomputing: VllmServer
    uncached: VllmServer
    failing: VllmServer
    faults: FaultFile


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    log_dir = tmp_path_factory.mktemp("logs")
    faults = FaultFile(log_dir / "fault.json")

    def server(name: str, role: str, policy: str, *args: str, **extra: Any) -> VllmServer:
        extra = faults.options | {"lease_s": LEASE_S, "load_timeout_s": LOAD_TIMEOUT_S} | extra
        return VllmServer(
            models("llama"),
            kv_transfer_config=config(role, extra, kv_load_failure_policy=policy),
            name=name,
            block_size=BLOCK,
            log_dir=log_dir,
            extra_args=args,
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )

    servers = FaultyFleet(
        server("prefill", "kv_producer", "fail"),
        server("recomputing", "kv_consumer", "recompute"),
        server("uncached", "kv_both", "recompute", "--no-enable-prefix-caching", lease_s=SHORT_LEASE_S),
        server("failing", "kv_consumer", "fail", integrity="checksum"),
        faults,
    )
    decoders = (servers.recomputing, servers.uncached, servers.failing)
    with start_all([servers.prefill, *decoders]):
        with faults.fault(kind="delay", seconds=0.01), ThreadPoolExecutor(4) as pool:
            for decode in decoders:  # the link is made and its data path tried: the next batch is the next load
                prompts = [random_prompt(BLOCK, (decode.name, i)) for i in range(4)]
                list(pool.map(lambda prompt, decode=decode: handed_off(servers.prefill, decode, prompt), prompts))
            handed_off(servers.uncached, servers.recomputing, random_prompt(BLOCK, "from uncached"))
        wait_until_blocks_are_free(servers.prefill, *decoders)
        yield servers


def _failed_loads(server: VllmServer) -> int:
    return int(metrics(server.base_url).get(FAILED_LOADS, 0))


# -- bytes that are wrong ------------------------------------------------------------------------------------------


def test_negative_control_one_corrupted_block_changes_the_text(fleet: FaultyFleet) -> None:
    """If this text were right, the exactness tests would prove nothing. Without checksums nobody notices."""
    prompt = random_prompt(4 * BLOCK + 3, "corrupt")
    wanted = alone(fleet.prefill, prompt)
    with fleet.faults.fault(kind="corrupt", nth=1, index=1):
        assert handed_off(fleet.prefill, fleet.recomputing, prompt).token_ids != wanted
    clean = random_prompt(4 * BLOCK + 3, "clean")
    assert handed_off(fleet.prefill, fleet.recomputing, clean).token_ids == alone(fleet.prefill, clean)


def test_a_corrupted_block_is_noticed_by_its_checksum(fleet: FaultyFleet) -> None:
    """B46: before the first token; the load has failed like any other."""
    prompt = random_prompt(4 * BLOCK + 3, "checksum")
    with nothing_leaks(fleet.prefill, fleet.failing):
        with (
            fleet.faults.fault(kind="corrupt", nth=1, index=1),
            pytest.raises(httpx.HTTPStatusError, match="500"),
        ):
            handed_off(fleet.prefill, fleet.failing, prompt)
        assert handed_off(fleet.prefill, fleet.failing, prompt).token_ids == alone(fleet.prefill, prompt)


# -- loads that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["recomputing", "uncached"])
def test_any_one_of_four_loads_fails_and_is_recomputed(fleet: FaultyFleet, decoder: str) -> None:
    """B42: four requests at once, two of them equal; load N fails. All texts are right, with and without a cache."""
    decode: VllmServer = getattr(fleet, decoder)
    with nothing_leaks(fleet.prefill, decode), ThreadPoolExecutor(4) as pool:
        for nth in range(1, 7):
            twin = random_prompt(3 * BLOCK + 3, ("twin", decoder, nth))
            prompts = [twin, random_prompt(2 * BLOCK, ("b42", nth)), twin, random_prompt(5, ("b42-5", nth))]
            wanted = [alone(fleet.prefill, prompt) for prompt in prompts]
            before = _failed_loads(decode)
            tickets = [ticket_from(fleet.prefill, prompt) for prompt in prompts]
            with fleet.faults.fault(kind="fail", nth=nth):
                send = lambda prompt, ticket: ask(decode, prompt, kv_transfer_params=ticket).token_ids  # noqa: E731
                assert list(pool.map(send, prompts, tickets)) == wanted, f"load {nth} failed"
            if nth <= 3:  # with a cache, the second of the twins may need no load
                assert eventual_value(lambda: _failed_loads(decode) - before, 1) == 1  # noqa: B023


def test_failed_load_with_policy_fail_fails_that_request_only(fleet: FaultyFleet) -> None:
    prompt = random_prompt(3 * BLOCK + 3, "fail")
    with nothing_leaks(fleet.prefill, fleet.failing):
        with fleet.faults.fault(kind="fail", nth=1), pytest.raises(httpx.HTTPStatusError, match="500"):
            handed_off(fleet.prefill, fleet.failing, prompt)
        assert handed_off(fleet.prefill, fleet.failing, prompt).token_ids == alone(fleet.prefill, prompt)


def test_a_load_that_never_ends_is_ended(fleet: FaultyFleet) -> None:
    """B01: bounded by load_timeout_s, then recomputed or failed; the blocks come back."""
    decoders = fleet.recomputing, fleet.failing
    prompts = [random_prompt(3 * BLOCK + 3, ("never", decode.name)) for decode in decoders]
    wanted = [alone(fleet.prefill, prompt) for prompt in prompts]
    with nothing_leaks(fleet.prefill, *decoders):
        start = time.monotonic()
        with fleet.faults.fault(kind="drop", nth=1), ThreadPoolExecutor(2) as pool:
            recomputed, failed = (
                pool.submit(handed_off, fleet.prefill, *pair) for pair in zip(decoders, prompts, strict=True)
            )
            assert recomputed.result().token_ids == wanted[0]
            with pytest.raises(httpx.HTTPStatusError, match="500"):
                failed.result()
        assert LOAD_TIMEOUT_S / 2 < time.monotonic() - start < LOAD_TIMEOUT_S + 15.0
        for decode, prompt, right in zip(decoders, prompts, wanted, strict=True):
            assert handed_off(fleet.prefill, decode, prompt).token_ids == right


# -- hand-offs that nobody takes -----------------------------------------------------------------------------------


def test_a_handoff_that_nobody_takes_ends_with_its_lease(fleet: FaultyFleet) -> None:
    """B05: while P is idle. And what D was told then comes too late: P's blocks may hold something else by now."""
    prompt = random_prompt(3 * BLOCK + 3, "abandoned")
    with nothing_leaks(fleet.uncached, fleet.recomputing):
        ticket = ticket_from(fleet.uncached, prompt)
        wait_until_blocks_are_free(fleet.uncached, seconds=SHORT_LEASE_S + PATIENCE_S)
        before = _failed_loads(fleet.recomputing)
        assert ask(fleet.recomputing, prompt, kv_transfer_params=ticket).token_ids == alone(fleet.prefill, prompt)
        assert eventual_value(lambda: _failed_loads(fleet.recomputing) - before, 1) == 1


def test_a_handoff_is_freed_while_everybody_is_idle(fleet: FaultyFleet) -> None:
    """B05: one request, then silence; nothing but /metrics is asked for. Well before the lease's end."""
    prompt = random_prompt(3 * BLOCK + 3, "silence")
    handed_off(fleet.prefill, fleet.recomputing, prompt)
    wait_until_blocks_are_free(fleet.prefill, fleet.recomputing, seconds=SOON_S)


def test_a_reset_of_the_prefix_cache_changes_no_text(fleet: FaultyFleet) -> None:
    """B05: with a hand-off outstanding, and with none."""
    prompt = random_prompt(4 * BLOCK + 3, "reset")
    wanted = alone(fleet.prefill, prompt)
    with nothing_leaks(fleet.prefill, fleet.recomputing):
        ticket = ticket_from(fleet.prefill, prompt)
        assert not _reset_prefix_cache(fleet.prefill)
        other = random_prompt(4 * BLOCK + 3, "takes freed blocks")
        alone(fleet.prefill, other)
        assert ask(fleet.recomputing, prompt, kv_transfer_params=ticket).token_ids == wanted
        wait_until_blocks_are_free(fleet.prefill, fleet.recomputing)
        assert _reset_prefix_cache(fleet.prefill)
        assert _reset_prefix_cache(fleet.recomputing)
        before = metrics(fleet.recomputing.base_url)[REMOTE_TOKENS]
        assert handed_off(fleet.prefill, fleet.recomputing, prompt).token_ids == wanted
        pulled = lambda: metrics(fleet.recomputing.base_url)[REMOTE_TOKENS] - before  # noqa: E731
        assert eventual_value(pulled, len(prompt)) == len(prompt), "D's cache was not empty"


def _reset_prefix_cache(server: VllmServer) -> bool:
    """Whether vLLM has done it: not while any block is in use."""
    answer = httpx.post(f"{server.base_url}/reset_prefix_cache", timeout=60, trust_env=False)
    return bool(answer.raise_for_status().json()["success"])


@pytest.mark.parametrize("tail", [0, 3])
def test_what_the_decoder_has_already_is_not_kept_by_the_prefiller(fleet: FaultyFleet, tail: int) -> None:
    """B06: the same prompt 20 times, exactly four blocks, or a little more."""
    prompt = random_prompt(4 * BLOCK + tail, ("twenty", tail))
    wanted = alone(fleet.prefill, prompt)
    with nothing_leaks(fleet.prefill, fleet.recomputing, seconds=SOON_S):
        for _ in range(20):
            assert handed_off(fleet.prefill, fleet.recomputing, prompt).token_ids == wanted


def test_a_handoff_that_the_decoder_rejects_is_freed(fleet: FaultyFleet) -> None:
    """B03: too long, for an unknown model, or nonsense. vLLM tells D's scheduler all the same, and D tells P."""
    prompt = random_prompt(3 * BLOCK + 3, "rejected")
    with nothing_leaks(fleet.prefill, fleet.recomputing, seconds=SOON_S):
        for num_tokens, spoiled in ((100_000, {}), (4, {"model": "unknown"}), (4, {"top_p": 2.0})):
            ticket = ticket_from(fleet.prefill, prompt)
            with pytest.raises(httpx.HTTPStatusError, match="-> 40"):
                ask(fleet.recomputing, prompt, num_tokens, kv_transfer_params=ticket, **spoiled)


def test_a_malformed_ticket_means_a_local_prefill(fleet: FaultyFleet) -> None:
    prompt = random_prompt(2 * BLOCK + 3, "malformed")
    for spoiled in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "datadist": {"version": 99}, "remote_block_ids": "x"},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "datadist": 5},
    ):
        got = ask(fleet.recomputing, prompt, kv_transfer_params=spoiled)
        assert got.token_ids == alone(fleet.prefill, prompt)


# -- several requests with one ticket or one id --------------------------------------------------------------------


@pytest.mark.parametrize("num_answers", [1, 3, 8])
def test_several_answers_of_one_prompt(fleet: FaultyFleet, num_answers: int) -> None:
    """B40: all sequences of one request come with the same ticket; the first loads, the others follow it."""
    prompt = random_prompt(2 * BLOCK + 3, ("several", num_answers))
    sampling = {"n": num_answers, "temperature": 1.0, "seed": 5}
    wanted = ask(fleet.prefill, prompt, cache_salt="alone", **sampling)
    with nothing_leaks(fleet.prefill, fleet.failing, seconds=SOON_S):
        got = handed_off(fleet.prefill, fleet.failing, prompt, **sampling)
        assert _texts(got) == _texts(wanted)
        assert len(_texts(got)) == num_answers


def _texts(answer: Completion) -> list[str]:
    return [choice["text"] for choice in sorted(answer.raw["choices"], key=lambda choice: choice["index"])]


def test_the_same_request_id_twice_at_once(fleet: FaultyFleet) -> None:
    """B40: each is right, or gets one clean error; nobody waits for ever."""
    prompts = [random_prompt(2 * BLOCK + 3, ("id", i)) for i in range(2)]
    wanted = [alone(fleet.prefill, prompt) for prompt in prompts]

    def send(prompt: list[int]) -> list[int] | None:
        body: dict[str, Any] = {"request_id": "the-same", "timeout_s": 60.0}
        try:
            ticket = ticket_from(fleet.prefill, prompt, request_id="the-same")
            return ask(fleet.failing, prompt, kv_transfer_params=ticket, **body).token_ids
        except httpx.HTTPStatusError:
            return None

    with nothing_leaks(fleet.prefill, fleet.failing, seconds=LEASE_S + PATIENCE_S), ThreadPoolExecutor(2) as pool:
        for got, right in zip(pool.map(send, prompts), wanted, strict=True):
            assert got in (right, None)


def test_every_block_comes_back(fleet: FaultyFleet) -> None:
    wait_until_blocks_are_free(fleet.prefill, fleet.recomputing, fleet.uncached, fleet.failing)
