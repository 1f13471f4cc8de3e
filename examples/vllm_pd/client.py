# SPDX-License-Identifier: Apache-2.0
"""What the demo and the tests ask of a running server: greedy completions, streamed chats, metrics.

Everything is greedy (temperature 0), because the point is always to compare two texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

DEFAULT_TIMEOUT_S = 300.0
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of /v1/completions.

    Attributes:
        text: the generated text.
        token_ids: the generated tokens.
        finish_reason: "stop" or "length".
        logprobs: of the generated tokens, if asked for.
        cached_tokens: prompt tokens that the server did not compute itself (if it reports them).
        kv_transfer_params: the ticket, in answers of a prefill server.
        raw: the whole JSON answer.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[float] | None = None
    cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer and how long after the request it came."""

    text: str
    elapsed_s: float


def _client(timeout_s: float) -> httpx.Client:
    """A client that ignores proxy settings of the environment: the servers are on this host, and speak plain HTTP.

    `verify=False` saves the time to load certificates that nobody asks for.
    """
    return httpx.Client(timeout=timeout_s, trust_env=False, verify=False)


def model_name(base_url: str) -> str:
    """The name under which the server serves its first model."""
    with _client(30.0) as client:
        return str(_checked(client.get(f"{base_url}/v1/models")).json()["data"][0]["id"])


def completion(
    base_url: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    logprobs: bool = False,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **body: Any,
) -> Completion:
    """Greedy completion of a text or of token ids; further keyword arguments go into the request body as they are.

    Raises:
        httpx.HTTPStatusError: the server answered with an error; the message holds its body.
    """
    request: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    request |= {"max_tokens": max_tokens, "temperature": 0.0, "return_token_ids": True}
    if logprobs:
        request["logprobs"] = 1
    if "model" not in body:
        request["model"] = model_name(base_url)
    sent_headers = dict(headers or {}) | ({"X-Request-Id": request_id} if request_id else {})
    with _client(timeout_s) as client:
        answer = client.post(f"{base_url}/v1/completions", json=request | body, headers=sent_headers)
    return _parse_completion(_checked(answer).json())


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        reason = f"{answer.request.method} {answer.request.url} -> {answer.status_code}: {answer.text[:2000]}"
        raise httpx.HTTPStatusError(reason, request=answer.request, response=answer)
    return answer


def _parse_completion(answer: dict[str, Any]) -> Completion:
    choice = answer["choices"][0]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Completion(
        text=choice["text"],
        token_ids=list(choice.get("token_ids") or []),
        finish_reason=choice.get("finish_reason"),
        logprobs=(choice.get("logprobs") or {}).get("token_logprobs"),
        cached_tokens=details.get("cached_tokens"),
        kv_transfer_params=answer.get("kv_transfer_params"),
        raw=answer,
    )


def prefill(base_url: str, prompt: str | Sequence[int], **keywords: Any) -> Completion:
    """Stage one of P/D: the prompt runs on the prefill server, whose answer carries the ticket."""
    return completion(base_url, prompt, 1, kv_transfer_params=dict(PREFILL_ONLY), **keywords)


def pd_completion(
    prefill_url: str, decode_url: str, prompt: str | Sequence[int], max_tokens: int, **keywords: Any
) -> Completion:
    """Both stages without a router: what a router does, in two lines.

    Raises:
        RuntimeError: the prefill server gave no ticket, so the decode server would silently compute everything.
    """
    first = prefill(prefill_url, prompt)
    if not first.kv_transfer_params:
        raise RuntimeError(f"{prefill_url} returned no kv_transfer_params; was it started with a --kv-transfer-config?")
    return completion(decode_url, prompt, max_tokens, kv_transfer_params=first.kv_transfer_params, **keywords)


def completion_stream(
    base_url: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **body: Any,
) -> Iterator[Piece]:
    """Like `completion`, streamed: yields the text pieces as they come."""
    request: dict[str, Any] = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
    }
    for event, elapsed_s in _events(f"{base_url}/v1/completions", base_url, request | body, timeout_s):
        for choice in event.get("choices", []):
            if choice.get("text"):
                yield Piece(choice["text"], elapsed_s)


def chat_stream(
    base_url: str,
    messages: str | Sequence[dict[str, str]],
    max_tokens: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **body: Any,
) -> Iterator[Piece]:
    """A streamed greedy chat: yields text pieces. The first one's `elapsed_s` is the time to first token.

    Args:
        messages: a user's question, or OpenAI-style messages.
        max_tokens: limit of the answer.
        timeout_s: limit for the connection and for the wait between two pieces.
        body: further request fields.
    """
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    request: dict[str, Any] = {"messages": asked, "max_tokens": max_tokens}
    for event, elapsed_s in _events(f"{base_url}/v1/chat/completions", base_url, request | body, timeout_s):
        for choice in event.get("choices", []):
            if text := (choice.get("delta") or {}).get("content"):
                yield Piece(text, elapsed_s)


def _events(url: str, base_url: str, body: dict[str, Any], timeout_s: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Server-sent events of a streamed request, each with the seconds since the request was sent."""
    request = {"temperature": 0.0, "stream": True} | body
    if "model" not in request:
        request["model"] = model_name(base_url)
    with _client(timeout_s) as client:
        start = time.monotonic()
        with client.stream("POST", url, json=request) as answer:
            if answer.is_error:
                answer.read()
            for line in _checked(answer).iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"{url} failed in mid-stream: {event['error']}")
                    yield event, time.monotonic() - start


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


def metric_samples(base_url: str) -> list[Sample]:
    """Every sample of the server's /metrics with its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with _client(30.0) as client:
        text = _checked(client.get(f"{base_url}/metrics")).text
    families = text_string_to_metric_families(text)
    return [Sample(s.name, dict(s.labels), s.value) for family in families for s in family.samples]


def metrics(base_url: str) -> dict[str, float]:
    """The server's metrics by sample name, summed over all labels."""
    totals: dict[str, float] = {}
    for sample in metric_samples(base_url):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def metrics_by_label(base_url: str, name: str, label: str) -> dict[str, float]:
    """The values of sample `name`, summed per value of `label`; empty if the server does not export it."""
    totals: dict[str, float] = {}
    for sample in metric_samples(base_url):
        if sample.name == name:
            key = sample.labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals
