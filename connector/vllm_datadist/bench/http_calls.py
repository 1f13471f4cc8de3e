# SPDX-License-Identifier: Apache-2.0
"""Timed completions, and a server's counters. Standard library only, so that no client's own work is timed."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
MODEL_NAME = "model"
ANSWER_TIMEOUT_S = 180.0
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"
TRANSFER_BYTES = "vllm:datadist_transfer_bytes_total"


class RequestFailed(RuntimeError):
    """A server answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`elapsed_ms`: from the request's first byte sent to the answer's last byte read."""

    token_ids: tuple[int, ...]
    elapsed_ms: float
    ticket: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Counters:
    """What D has counted since it started: prompt tokens that came from P, and that were in its own prefix cache."""

    external_tokens: float
    local_tokens: float
    bytes_by_backend: dict[str, float]


def complete(
    port: int, prompt: Sequence[int], max_tokens: int, *, salt: str = "", ticket: dict[str, Any] | None = None
) -> Answer:
    """A greedy completion of token ids.

    Args:
        salt: keeps this request apart, in the server's prefix cache, from those of the same prompt with another salt.
        ticket: `kv_transfer_params`.

    Raises RequestFailed.
    """
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    # Without ignore_eos a prompt whose first token is the end would be no witness.
    body |= {"return_token_ids": True, "ignore_eos": True}
    body |= {"cache_salt": salt} if salt else {}
    body |= {"kv_transfer_params": ticket} if ticket is not None else {}
    sent = _exchange(port, "POST", "/v1/completions", json.dumps(body).encode())
    answer = json.loads(sent.body)
    return Answer(tuple(answer["choices"][0]["token_ids"]), sent.elapsed_ms, answer.get("kv_transfer_params"))


def is_ready(port: int) -> bool:
    try:
        _exchange(port, "GET", "/health", b"", timeout_s=5.0)
    except RequestFailed:
        return False
    return True


def read_counters(port: int) -> Counters:
    """Raises RequestFailed."""
    return parse_counters(_exchange(port, "GET", "/metrics", b"").body.decode())


def parse_counters(text: str) -> Counters:
    """From what /metrics answers."""
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:")]
    moved: dict[str, float] = {}
    for series, _, value in samples:
        if series.startswith(TRANSFER_BYTES + "{"):
            backend = series.partition('backend="')[2].partition('"')[0]
            moved[backend] = moved.get(backend, 0.0) + float(value)
    return Counters(_total(samples, EXTERNAL_HITS), _total(samples, LOCAL_HITS), moved)


def _total(samples: Sequence[tuple[str, str, str]], name: str) -> float:
    return sum(float(value) for series, _, value in samples if series.partition("{")[0] == name)


@dataclass(frozen=True, slots=True)
class _Exchanged:
    body: bytes
    elapsed_ms: float


def _exchange(port: int, method: str, path: str, body: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> _Exchanged:
    """Over a connection of its own, made before the clock starts: servers close idle ones."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.connect()
        start_s = time.perf_counter()
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        elapsed_ms = 1e3 * (time.perf_counter() - start_s)
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"{method} {path}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise RequestFailed(f"{method} {path}: {response.status} {content[:500].decode(errors='replace')}")
    return _Exchanged(content, elapsed_ms)
