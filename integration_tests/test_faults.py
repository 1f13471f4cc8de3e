# SPDX-License-Identifier: Apache-2.0
"""What goes wrong shows: corrupted bytes change the text, failed loads follow vLLM's policy, leases end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from examples.vllm_pd.servers import Completion, VllmServer, completion, metrics, pd_completion, prefill, start_all
from integration_tests.fleet import (
    FAILED_LOADS,
    KV_USAGE,
    NUM_TOKENS,
    REMOTE_TOKENS,
    config,
    eventual_value,
    random_prompt,
    wait_until_blocks_are_free,
)

BLOCK = 32
LEASE_S = 4.0
#: The backend that goes wrong on purpose; both ends must name the same one, only some ends say how.
FAULTY_SHM = "datadist_core.testing.faults:FaultyShm"


@dataclass(frozen=True)
class FaultyFleet:
    """One P; a D that corrupts a block of each load, one whose loads fail and recompute, one that fails requests."""

    prefill: VllmServer
    corrupting: VllmServer
    recomputing: VllmServer
    failing: VllmServer


def _extra(fault: dict[str, Any] | None = None) -> dict[str, Any]:
    extra: dict[str, Any] = {"transfer_backend": FAULTY_SHM, "lease_s": LEASE_S}
    if fault is not None:
        extra["backend_options"] = {"FaultyShm": {"fault": fault}}
    return extra


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    log_dir = tmp_path_factory.mktemp("logs")

    def server(name: str, role: str, fault: dict[str, Any] | None = None, **fields: Any) -> VllmServer:
        transfer = config(role, _extra(fault), **fields)
        return VllmServer(models("llama"), kv_transfer_config=transfer, name=name, block_size=BLOCK, log_dir=log_dir)

    # The first submit of a link is the probe of its data path; every later one is a load.
    servers = FaultyFleet(
        server("prefill", "kv_producer"),
        server("corrupting", "kv_consumer", {"kind": "corrupt", "nth": 2, "index": 1}),
        server("recomputing", "kv_consumer", {"kind": "fail", "nth": 2}, kv_load_failure_policy="recompute"),
        server("failing", "kv_consumer", {"kind": "fail", "nth": 2}, kv_load_failure_policy="fail"),
    )
    with start_all([servers.prefill, servers.corrupting, servers.recomputing, servers.failing]):
        yield servers


def _alone(server: VllmServer, prompt: list[int]) -> list[int]:
    return completion(server.base_url, prompt, NUM_TOKENS, cache_salt="alone").token_ids


def test_negative_control_one_corrupted_block_changes_the_text(fleet: FaultyFleet) -> None:
    """If this text were right, the exactness tests would prove nothing."""
    prompt = random_prompt(4 * BLOCK + 3, "corrupt")
    wanted = _alone(fleet.prefill, prompt)
    got = pd_completion(fleet.prefill.base_url, fleet.corrupting.base_url, prompt, NUM_TOKENS)
    assert got.token_ids != wanted
    clean = random_prompt(4 * BLOCK + 3, "clean")
    got = pd_completion(fleet.prefill.base_url, fleet.corrupting.base_url, clean, NUM_TOKENS)
    assert got.token_ids == _alone(fleet.prefill, clean)


def test_failed_load_with_policy_recompute_gives_the_right_text(fleet: FaultyFleet) -> None:
    prompt = random_prompt(3 * BLOCK + 3, "recompute")
    got = pd_completion(fleet.prefill.base_url, fleet.recomputing.base_url, prompt, NUM_TOKENS)
    assert got.token_ids == _alone(fleet.prefill, prompt)
    failed = eventual_value(lambda: metrics(fleet.recomputing.base_url).get(FAILED_LOADS), 1)
    assert failed == 1
    assert metrics(fleet.recomputing.base_url).get(REMOTE_TOKENS, 0) == 0
    wait_until_blocks_are_free(fleet.prefill, fleet.recomputing)


def test_failed_load_with_policy_fail_fails_that_request_only(fleet: FaultyFleet) -> None:
    prompt = random_prompt(3 * BLOCK + 3, "fail")
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        pd_completion(fleet.prefill.base_url, fleet.failing.base_url, prompt, NUM_TOKENS)
    got = pd_completion(fleet.prefill.base_url, fleet.failing.base_url, prompt, NUM_TOKENS)
    assert got.token_ids == _alone(fleet.prefill, prompt)
    wait_until_blocks_are_free(fleet.prefill, fleet.failing)


def test_a_handoff_that_nobody_takes_ends_with_its_lease(fleet: FaultyFleet) -> None:
    prompt = random_prompt(3 * BLOCK + 3, "abandoned")
    ticket = prefill(fleet.prefill.base_url, prompt).kv_transfer_params
    assert ticket is not None
    wait_until_blocks_are_free(fleet.prefill, seconds=LEASE_S + 10)
    # Too late: P's blocks may hold something else by now. D must not use them.
    got = completion(fleet.recomputing.base_url, prompt, NUM_TOKENS, kv_transfer_params=ticket)
    assert got.token_ids == _alone(fleet.prefill, prompt)


def test_a_handoff_that_the_decoder_rejects_is_freed(fleet: FaultyFleet) -> None:
    prompt = random_prompt(3 * BLOCK + 3, "rejected")
    ticket = prefill(fleet.prefill.base_url, prompt).kv_transfer_params
    with pytest.raises(httpx.HTTPStatusError):
        completion(fleet.recomputing.base_url, prompt, 100_000, kv_transfer_params=ticket)
    with pytest.raises(httpx.HTTPStatusError):
        completion(fleet.recomputing.base_url, prompt, 4, model="unknown", kv_transfer_params=ticket)
    wait_until_blocks_are_free(fleet.prefill, seconds=LEASE_S + 10)


def test_a_malformed_ticket_means_a_local_prefill(fleet: FaultyFleet) -> None:
    prompt = random_prompt(2 * BLOCK + 3, "malformed")
    for spoiled in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "datadist": {"version": 99}, "remote_block_ids": "x"},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "datadist": 5},
    ):
        got = completion(fleet.recomputing.base_url, prompt, NUM_TOKENS, kv_transfer_params=spoiled)
        assert got.token_ids == _alone(fleet.prefill, prompt)


@pytest.mark.parametrize("num_answers", [1, 3, 8])
def test_several_answers_of_one_prompt(fleet: FaultyFleet, num_answers: int) -> None:
    """All sequences of one request come with the same ticket; the first loads, the others follow it."""
    prompt = random_prompt(2 * BLOCK + 3, ("several", num_answers))
    sampling = {"n": num_answers, "temperature": 1.0, "seed": 5}
    wanted = completion(fleet.prefill.base_url, prompt, NUM_TOKENS, cache_salt="alone", **sampling)
    ticket = prefill(fleet.prefill.base_url, prompt).kv_transfer_params
    got = completion(fleet.failing.base_url, prompt, NUM_TOKENS, kv_transfer_params=ticket, **sampling)
    assert _texts(got) == _texts(wanted)
    assert len(_texts(got)) == num_answers
    wait_until_blocks_are_free(fleet.prefill, fleet.failing, seconds=LEASE_S / 2)


def _texts(answer: Completion) -> list[str]:
    return [choice["text"] for choice in sorted(answer.raw["choices"], key=lambda choice: choice["index"])]


def test_the_prefill_server_is_killed_and_started_again(fleet: FaultyFleet, models, tmp_path) -> None:
    """D lives on, and links to the new P by its new identity."""
    transfer = config("kv_producer", _extra())
    prompt = random_prompt(3 * BLOCK + 3, "restart")
    wanted = _alone(fleet.recomputing, prompt)
    pid = fleet.recomputing.pid
    for _ in range(2):
        with VllmServer(models("llama"), kv_transfer_config=transfer, name="short", log_dir=tmp_path) as short_lived:
            assert (
                pd_completion(short_lived.base_url, fleet.recomputing.base_url, prompt, NUM_TOKENS).token_ids == wanted
            )
            ticket = prefill(short_lived.base_url, prompt).kv_transfer_params
            _kill_engine(short_lived)
            got = completion(fleet.recomputing.base_url, prompt, NUM_TOKENS, kv_transfer_params=ticket)
            assert got.token_ids == wanted
    assert fleet.recomputing.pid == pid
    assert metrics(fleet.recomputing.base_url)[KV_USAGE] == pytest.approx(0.0)


def _kill_engine(server: VllmServer) -> None:
    """SIGKILL everything of a server but Python's resource trackers, which remove vLLM's own shared memory."""
    for pid in reversed(server.pids()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
