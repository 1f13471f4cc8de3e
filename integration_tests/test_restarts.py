# SPDX-License-Identifier: Apache-2.0
"""Servers that are killed, started again in place, or told to end: the other side lives on, and nothing is kept.

Rows of the list of known faults: B01 (P killed), B15, B17, B21, B22, B48. RESTART_CYCLES=10 for more of it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_pd.servers import Completion, ServerFailed, VllmServer, free_port, metrics, prefill, start_all
from integration_tests.fleet import (
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
LEASE_S = 4.0
CYCLES = int(os.environ.get("RESTART_CYCLES", "3"))
LONG = 1000
#: A request whose P was killed ends by then: the link's loss is noticed, and all is computed at D. A load's own limit
#: is a minute.
DEADLINE_S = 50.0


class Pair:
    """P and D, each on ports of its own that stay the same when it is started again."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.faults = FaultFile(directory / "fault.json")
        self._model, self._directory = model, directory
        self._ports: set[int] = set()
        self.prefill = self.server("prefill", "kv_producer")
        self.decode = self.server("decode", "kv_consumer")

    def server(
        self, name: str, role: str, *args: str, env: Mapping[str, str] | None = None, **extra: Any
    ) -> VllmServer:
        extra = self.faults.options | {"lease_s": LEASE_S, "port": self._free_port()} | extra
        return VllmServer(
            self._model,
            kv_transfer_config=config(role, extra, kv_load_failure_policy="recompute"),
            name=name,
            block_size=BLOCK,
            log_dir=self._directory,
            port=self._free_port(),
            extra_args=args,
            env=env,
        )

    def _free_port(self) -> int:
        while (port := free_port()) in self._ports:
            pass
        self._ports.add(port)
        return port

    def hand_off(self, seed: object, num_tokens: int = 3 * BLOCK + 3) -> None:
        prompt = random_prompt(num_tokens, seed)
        assert handed_off(self.prefill, self.decode, prompt).token_ids == alone(self.prefill, prompt), seed

    @contextmanager
    def interrupted_handoff(self, seed: object) -> Iterator[Future[Completion]]:
        """D reads within, and gets nothing."""
        prompt = random_prompt(LONG, seed)
        ticket = ticket_from(self.prefill, prompt)
        with ThreadPoolExecutor(1) as pool, self.faults.gate() as gate:
            answer = pool.submit(ask, self.decode, prompt, kv_transfer_params=ticket)
            gate.wait_for()
            yield answer


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(models("llama"), tmp_path_factory.mktemp("restarts"))
    with start_all([pair.prefill, pair.decode]):
        pair.hand_off("first", LONG)
        yield pair


def _start_again(server: VllmServer) -> None:
    server.kill()
    server.start()
    server.wait_ready()


def test_the_prefill_server_is_killed_and_started_on_the_same_ports(pair: Pair) -> None:
    """B01, B15: during a transfer, and between transfers. D lives on, and links to the new P by its new identity."""
    right = {seed: alone(pair.decode, random_prompt(LONG, seed)) for seed in range(CYCLES)}
    pid = pair.decode.pid
    with nothing_leaks(pair.decode):
        for cycle in range(CYCLES):
            with pair.interrupted_handoff(cycle) as answer:
                pair.prefill.kill()
                assert answer.result(DEADLINE_S).token_ids == right[cycle]
            _start_again(pair.prefill)
            pair.hand_off(("after", cycle))
            prompt = random_prompt(2 * BLOCK + 5, ("between", cycle))
            wanted, ticket = alone(pair.prefill, prompt), ticket_from(pair.prefill, prompt)
            _start_again(pair.prefill)
            assert ask(pair.decode, prompt, kv_transfer_params=ticket, timeout_s=DEADLINE_S).token_ids == wanted
            pair.hand_off(("again", cycle))
    assert pair.decode.pid == pid


def test_the_decode_server_is_killed_and_started_on_the_same_ports(pair: Pair) -> None:
    """B17: P frees what the dead D had, and keeps nothing of it."""
    pid = pair.prefill.pid
    with nothing_leaks(pair.prefill):
        for cycle in range(CYCLES):
            with pair.interrupted_handoff(("d", cycle)) as answer:
                pair.decode.kill()
                assert isinstance(answer.exception(DEADLINE_S), httpx.HTTPError)
            wait_until_blocks_are_free(pair.prefill, seconds=LEASE_S + PATIENCE_S)
            _start_again(pair.decode)
            pair.hand_off(("d after", cycle))
    assert pair.prefill.pid == pid


def test_a_killed_server_leaves_nothing_in_dev_shm(pair: Pair) -> None:
    """B21: it was killed and started in place again and again by the tests above; and once more; then SIGTERM."""
    ours = lambda: {name for name in os.listdir("/dev/shm") if "datadist" in name}  # noqa: E731
    used = _shm_bytes_of(pair.decode)
    _start_again(pair.decode)
    pair.hand_off("shm")
    pair.decode.stop()
    pair.decode.start()
    pair.decode.wait_ready()
    pair.hand_off("shm again")
    assert ours() == set()
    assert eventual_value(lambda: _shm_bytes_of(pair.decode) <= used + (32 << 20), True)


def _shm_bytes_of(server: VllmServer) -> int:
    """Pages of shared memory in use by the server, named or not."""
    found = 0
    for pid in server.pids():
        status = Path(f"/proc/{pid}/status").read_text()
        found += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))
    return found


def test_an_occupied_port_is_said_at_start(pair: Pair, tmp_path: Path) -> None:
    """B22: the engine ends, and names the port."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = pair.server("unlucky", "kv_both", port=port)
        with pytest.raises(ServerFailed) as failure, server:
            pass
    assert "exit status" in str(failure.value)
    assert f":{port}" in server.log_text()
    assert "the connector cannot start on" in server.log_text()


# -- SIGTERM -------------------------------------------------------------------------------------------------------

#: vLLM's limit for the end of a server, after which it would be killed.
SHUTDOWN_TIMEOUT_S = 60


def test_sigterm_lets_handoffs_end_first(pair: Pair) -> None:
    """B48: those that D reads, and one that it has not begun to; P then ends by itself, in order, in time."""
    with pair.server("ending", "kv_producer", "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), lease_s=120.0) as ending:
        prompts = [random_prompt(LONG, ("sigterm", i)) for i in range(2)]
        late = random_prompt(BLOCK + 1, "not begun")
        wanted = [_linked(pair, ending, prompt) for prompt in [*prompts, late]]
        tickets = [ticket_from(ending, prompt) for prompt in [*prompts, late]]
        before = metrics(pair.decode.base_url)[REMOTE_TOKENS]
        with ThreadPoolExecutor(2) as pool, pair.faults.gate() as gate:
            taken = zip(prompts, tickets[:2], strict=True)
            answers = [pool.submit(ask, pair.decode, prompt, kv_transfer_params=ticket) for prompt, ticket in taken]
            gate.wait_for(2)
            start = time.monotonic()
            os.kill(ending.pid, signal.SIGTERM)
            _wait_for_log(ending, "3 hand-offs have")
            gate.open()
            got = [answer.result(DEADLINE_S).token_ids for answer in answers]
        got.append(ask(pair.decode, late, kv_transfer_params=tickets[2]).token_ids)
        assert got == wanted
        _wait_for_exit(ending)
        assert time.monotonic() - start < SHUTDOWN_TIMEOUT_S
        remote = lambda: metrics(pair.decode.base_url)[REMOTE_TOKENS] - before  # noqa: E731
        assert eventual_value(remote, 2 * LONG + BLOCK + 1) == 2 * LONG + BLOCK + 1, "something was computed at D"
        assert ending.exit_status() == 0
        assert "force killing" not in ending.log_text()


def test_sigterm_does_not_wait_for_what_nobody_takes(pair: Pair) -> None:
    """The lease is longer than its limit after the signal: it is ended by then, and so everything is closed in order.

    connector/tests/test_drain.py has how that limit follows from vLLM's own.
    """
    args = ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S))
    with pair.server("abandoned", "kv_producer", *args, lease_s=120.0, drain_timeout_s=2.0) as ending:
        ticket_from(ending, random_prompt(3 * BLOCK, "nobody"))
        start = time.monotonic()
        os.kill(ending.pid, signal.SIGTERM)
        _wait_for_log(ending, "1 hand-offs have")
        assert not _asks_in_vain(ending), "a new hand-off was promised"
        _wait_for_exit(ending)
        assert 1.0 < time.monotonic() - start < SHUTDOWN_TIMEOUT_S
        assert "request processing complete" in ending.log_text(), "it was killed before it could close in order"


def test_a_worker_that_is_ended_waits_for_its_readers(pair: Pair) -> None:
    """As by Ctrl-C, which reaches it without its engine core: what it holds stays until it has been read.

    It has four seconds, and needs some milliseconds of them.
    """
    env = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    with pair.server("interrupted", "kv_producer", env=env, lease_s=120.0) as interrupted:
        prompt = random_prompt(LONG, "interrupted")
        wanted, ticket = _linked(pair, interrupted, prompt), ticket_from(interrupted, prompt)
        before = metrics(pair.decode.base_url)[REMOTE_TOKENS]
        with ThreadPoolExecutor(1) as pool, pair.faults.gate() as gate:
            answer = pool.submit(ask, pair.decode, prompt, kv_transfer_params=ticket)
            gate.wait_for()
            os.kill(_worker_pid(interrupted), signal.SIGINT)
            _wait_for_log(interrupted, "WorkerProc handling signal")
            gate.open()
            assert answer.result(DEADLINE_S).token_ids == wanted
        remote = lambda: metrics(pair.decode.base_url)[REMOTE_TOKENS] - before  # noqa: E731
        assert eventual_value(remote, LONG) == LONG, "it was computed at D"
        _wait_for_exit(interrupted)


def _linked(pair: Pair, server: VllmServer, prompt: Sequence[int]) -> list[int]:
    """What the server makes of it; and D has a link to it from then on."""
    handed_off(server, pair.decode, random_prompt(1, server.name), 1)
    return alone(server, prompt)


def _worker_pid(server: VllmServer) -> int:
    """The process that holds the KV cache."""
    return next(pid for pid in server.pids() if "/memfd:datadist-pool" in Path(f"/proc/{pid}/maps").read_text())


def test_negative_control_sigterm_without_a_time_to_drain(pair: Pair) -> None:
    """vLLM's default kills the engine at once. The start's log says so; D computes what it lost."""
    with pair.server("cut", "kv_producer") as ending:
        assert "--shutdown-timeout SECONDS" in ending.log_text()
        prompt = random_prompt(LONG, "cut")
        wanted, ticket = _linked(pair, ending, prompt), ticket_from(ending, prompt)
        before = metrics(pair.decode.base_url)[REMOTE_TOKENS]
        with ThreadPoolExecutor(1) as pool, pair.faults.gate() as gate:
            answer = pool.submit(ask, pair.decode, prompt, kv_transfer_params=ticket)
            gate.wait_for()
            os.kill(ending.pid, signal.SIGTERM)
            assert answer.result(DEADLINE_S).token_ids == wanted
        assert metrics(pair.decode.base_url)[REMOTE_TOKENS] == before


def _asks_in_vain(server: VllmServer) -> dict[str, Any] | None:
    try:
        return prefill(server.base_url, random_prompt(3 * BLOCK, "too late"), model="model").kv_transfer_params
    except httpx.HTTPError:
        return None


def _wait_for_log(server: VllmServer, text: str) -> None:
    assert eventual_value(lambda: text in server.log_text(), True), f"{server.name} has not said: {text}"


def _wait_for_exit(server: VllmServer) -> None:
    assert eventual_value(lambda: server.running, False, 2 * PATIENCE_S) is False, "it did not end"
