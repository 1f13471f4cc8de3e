# SPDX-License-Identifier: Apache-2.0
"""A prefill server, a decode server and a plain one with the same model, and what tests ask of them."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from examples.vllm_pd.servers import (
    Completion,
    VllmServer,
    completion,
    connector_config,
    metrics,
    metrics_by_label,
    prefill,
    start_all,
)
from integration_tests.gate import shut

NUM_TOKENS = 12
CHUNK_TOKENS = 256
#: 0..255 are the bytes of the tiny models' tokenizer.
VOCABULARY = range(256)

REMOTE_TOKENS = "vllm:datadist_remote_tokens_total"
LOCAL_TOKENS = "vllm:datadist_local_tokens_total"
FAILED_LOADS = "vllm:datadist_failed_loads_total"
TRANSFER_BYTES = "vllm:datadist_transfer_bytes_total"
KV_USAGE = "vllm:kv_cache_usage_perc"
#: More than the default: several servers that start, and poll, on two processors keep one another waiting.
LINK_TIMEOUT_S = 30.0
#: How many more threads may be left than there were.
POOL_THREADS = 4
#: The backend that goes wrong on purpose; both ends must name the same one, only some ends say how.
FAULTY_SHM = "integration_tests.gate:GatedShm"
#: Longer than any pause that a busy machine makes. What is waited for so long comes in a moment as a rule.
PATIENCE_S = 30.0


def random_prompt(num_tokens: int, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(VOCABULARY, k=num_tokens)


def alone(server: VllmServer, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **body: Any) -> list[int]:
    """What the server makes of it by itself."""
    return ask(server, prompt, num_tokens, cache_salt="alone", **body).token_ids


def handed_off(
    first: VllmServer, second: VllmServer, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **body: Any
) -> Completion:
    return ask(second, prompt, num_tokens, kv_transfer_params=ticket_from(first, prompt), **body)


def ticket_from(server: VllmServer, prompt: Sequence[int], **body: Any) -> dict[str, Any]:
    ticket = prefill(server.base_url, prompt, model="model", **body).kv_transfer_params
    assert ticket, f"{server.name} gave no ticket"
    return ticket


def ask(server: VllmServer, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **body: Any) -> Completion:
    return completion(server.base_url, prompt, num_tokens, **({"model": "model"} | body))


@dataclass(frozen=True)
class Fleet:
    """What `single` says is right: it computes every prompt itself. It has no connector, or it is P asked directly."""

    single: VllmServer
    prefill: VllmServer
    decode: VllmServer
    block_size: int

    def expected(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        # The salt keeps this prompt apart from those that are handed off, also in a prefix cache they share.
        return alone(self.single, prompt, num_tokens)

    def handed_off(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Completion:
        return handed_off(self.prefill, self.decode, prompt, num_tokens)

    def check_exact(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        got, want = self.handed_off(prompt, num_tokens).token_ids, self.expected(prompt, num_tokens)
        assert got == want, f"{len(prompt)} prompt tokens"

    def remote_tokens(self) -> int:
        return int(metrics(self.decode.base_url).get(REMOTE_TOKENS, 0))

    @contextmanager
    def remote_tokens_grow_by(self, num_tokens: int) -> Iterator[None]:
        """The proof that the KV cache came from P, not from a silent prefill at D."""
        before = self.remote_tokens()
        yield
        grown = eventual_value(lambda: self.remote_tokens() - before, num_tokens)
        assert grown == num_tokens, f"{grown} tokens came from P, not {num_tokens}"

    def transfer_bytes(self) -> dict[str, float]:
        return metrics_by_label(self.decode.base_url, TRANSFER_BYTES, "backend")


def eventual_value(read: Callable[[], Any], wanted: Any, seconds: float = PATIENCE_S) -> Any:
    """What `read` gives, waiting a bounded time for `wanted`: metrics follow a step behind the answer.

    It is read once more after that time, also if this process did not run in between.
    """
    end = time.monotonic() + seconds
    while True:
        is_last = time.monotonic() >= end
        if (value := read()) == wanted or is_last:
            return value
        time.sleep(0.05)


def wait_until_blocks_are_free(*servers: VllmServer, seconds: float = PATIENCE_S) -> None:
    for server in servers:
        usage = eventual_value(lambda server=server: metrics(server.base_url)[KV_USAGE], 0.0, seconds)
        assert usage == 0.0, f"{server.name} still holds {usage:.2%} of its KV blocks"


class FaultFile:
    """What goes wrong with the transfers of a server from now on: see `datadist_core.testing.faults`.

    A fault's `nth` counts from the moment it is set. Between servers with a link that is the next load.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def options(self) -> dict[str, Any]:
        """For the server's extra config."""
        return {"transfer_backend": FAULTY_SHM, "backend_options": {"GatedShm": {"fault": {"file": str(self._path)}}}}

    @contextmanager
    def fault(self, **fault: Any) -> Iterator[None]:
        """E.g. kind="fail", nth=1."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(fault))
        new.rename(self._path)
        try:
            yield
        finally:
            self._path.unlink()

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        """Transfers wait within, until the gate is opened. Only between servers that have a link: its trial waits too.

        Nothing is loaded, or pushed, as long as nothing can be, however slow or quick this test is meanwhile.
        """
        gate = Gate(shut(self._path))
        gate.path.write_bytes(b"")
        try:
            yield gate
        finally:
            gate.open()


@dataclass(frozen=True)
class Gate:
    path: Path

    def wait_for(self, num_transfers: int = 1) -> None:
        """Until so many have come to it."""
        came = lambda: self.path.stat().st_size >= num_transfers  # noqa: E731
        assert eventual_value(came, True), f"{self.path.stat().st_size} transfers wait at the gate"

    def open(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Footprint:
    """What a server holds, all its processes but the API server (whose connections come and go)."""

    fds: int
    threads: int
    mapped_pools: int

    @classmethod
    def of(cls, server: VllmServer) -> Footprint:
        found = [cls._of_process(pid) for pid in server.pids()[1:]]
        return cls(*(sum(getattr(one, field.name) for one in found) for field in fields(cls)))

    @classmethod
    def _of_process(cls, pid: int) -> Footprint:
        """Nothing, if it has just ended."""
        try:
            fds, threads = os.listdir(f"/proc/{pid}/fd"), os.listdir(f"/proc/{pid}/task")
            return cls(len(fds), len(threads), Path(f"/proc/{pid}/maps").read_text().count("/memfd:"))
        except (FileNotFoundError, ProcessLookupError):
            return cls(0, 0, 0)

    def fits_in(self, other: Footprint) -> bool:
        """Thread pools start a thread when all others are busy, so a few more may be in use by chance."""
        has_threads = self.threads <= other.threads + POOL_THREADS
        return self.fds <= other.fds and has_threads and self.mapped_pools <= other.mapped_pools


@contextmanager
def nothing_leaks(*servers: VllmServer, seconds: float = PATIENCE_S) -> Iterator[None]:
    """All blocks come back, and no file descriptor, thread, mapping or /dev/shm entry is left.

    The servers must have done before what they do within: what they make once and keep does not count.
    """
    before = {server: Footprint.of(server) for server in servers}
    shm_before = shm_entries()
    yield
    wait_until_blocks_are_free(*servers, seconds=seconds)
    for server in servers:
        fits = lambda server=server: Footprint.of(server).fits_in(before[server])  # noqa: E731
        assert eventual_value(fits, True), f"{server.name}: {before[server]} -> {Footprint.of(server)}"
    assert eventual_value(lambda: shm_entries() - shm_before, set()) == set()


def shm_entries() -> set[str]:
    """Names in /dev/shm but for those of Python's semaphores and vLLM's message queues of other processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem.mp-"))}


def config(role: str, extra: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    more = {"kv_connector_extra_config": {"link_timeout_s": LINK_TIMEOUT_S} | dict(extra or {})}
    return connector_config(role, **more, **fields)


@contextmanager
def running_fleet(
    model: Path,
    block_size: int,
    log_dir: Path,
    extra: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    plain_single: bool = False,
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    **fields: Any,
) -> Iterator[Fleet]:
    """P and D, started side by side. `fields` go into --kv-transfer-config, `extra` into its extra config.

    `plain_single`: a third server, without a connector, to compare with.
    """

    def server(name: str, transfer: dict[str, Any] | None, own_args: Sequence[str] = ()) -> VllmServer:
        return VllmServer(
            model,
            kv_transfer_config=transfer,
            name=name,
            block_size=block_size,
            extra_args=["--max-num-batched-tokens", str(CHUNK_TOKENS), *args, *own_args],
            env=env,
            log_dir=log_dir,
        )

    prefill = server("prefill", config("kv_producer", extra, **fields), prefill_args)
    decode = server("decode", config("kv_consumer", extra, **fields), decode_args)
    single = server("single", None) if plain_single else prefill
    with start_all(list(dict.fromkeys([single, prefill, decode]))):
        yield Fleet(single, prefill, decode, block_size)
