# SPDX-License-Identifier: Apache-2.0
"""What reaches the connector from outside: tickets as JSON, and bodies of calls. The first byte says which."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from datadist_core.errors import LLMException
from datadist_core.types import Deadline
from vllm_datadist import description, messages, params
from vllm_datadist.messages import Endpoint, LeaseRef, RemoteLease, RequestKey
from vllm_datadist.worker import side
from vllm_datadist.worker.lease_calls import LeaseCalls

from ..generate import DEEP, LARGE, mutated, value_of

_HERE = Endpoint(0, 0, "127.0.0.1", 1, 7)
_KEY = RequestKey("r", 1)


@dataclass(frozen=True, slots=True)
class _Answers:
    """A peer that answers every call with the same bytes."""

    body: bytes

    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        return self.body


def _ticket(data: bytes) -> None:
    """What `vllm serve` hands on is a JSON object, whatever is in it."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(given, dict):
        return
    params.asks_remote_decode(given)
    params.asks_remote_prefill(given)
    try:
        ticket = params.parse_ticket(given)
    except params.TicketError:
        return
    if params.parse_ticket(json.loads(json.dumps(ticket.to_params()))) != ticket:
        raise AssertionError(f"{ticket} is not what it is written as")


def _lease_answer(data: bytes) -> None:
    calls = LeaseCalls(_Answers(data))
    with suppress(LLMException):
        calls.renew(_HERE, [_KEY], Deadline.after(1))


def _question(kind: type) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        with suppress(LLMException):
            side._decode("question", data, kind)

    return decode


def _description(data: bytes) -> None:
    with suppress(description.Incompatible):
        description.check_compatible(_OURS, description.decode(data))


_OURS = value_of(description.Description, random.Random(1))
WAYS = [
    (dict, _ticket),
    (messages.LeaseAnswer, _lease_answer),
    (messages.Renew, _question(messages.Renew)),
    (messages.Release, _question(messages.Release)),
    (description.Description, _description),
]


def run(data: bytes) -> None:
    if data:
        WAYS[data[0] % len(WAYS)][1](data[1:])


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    choice = random.Random(seed)
    number = (data[0] if data else 0) % len(WAYS)
    body = _other_json(data[1:], choice) if number == 0 else mutated(data[1:], choice)
    return (bytes([number]) + body)[:max_size]


def _other_json(body: bytes, choice: random.Random) -> bytes:
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return body
    return with_depth(json.dumps(_changed(tree, choice)).encode())


def with_depth(text: bytes) -> bytes:
    """JSON in which the place that stands for depth is nested deeper than any recursion goes."""
    return text.replace(json.dumps(DEEP).encode(), b"[" * 1500 + b"]" * 1500)


def _changed(tree: Any, choice: random.Random) -> Any:
    if isinstance(tree, dict) and tree and choice.random() < 0.95:
        key = choice.choice(list(tree))
        return {**tree, key: _changed(tree[key], choice)}
    if isinstance(tree, list) and tree and choice.random() < 0.8:
        at = choice.randrange(len(tree))
        return [*tree[:at], _changed(tree[at], choice), *tree[at + 1 :]]
    return choice.choice(
        (None, True, 0, 1, 1.5, float("nan"), 10**30, *LARGE, "", "1", "x" * 30, [], [0], [[1, 2]], {}, DEEP)
    )


def seeds() -> list[bytes]:
    lease = RemoteLease("engine", RequestKey("request", 3), 30.0, (Endpoint(0, 0, "10.0.0.1", 4000, 2**63), _HERE))
    ticket = params.Ticket(lease, ((1, 2, 0), (3,)), (16, 128), 40, 1, params.PromptDigest(41, "ab" * 16))
    texts = [ticket.to_params(), {"do_remote_decode": True}, {"datadist": {}}, {"datadist": {"version": 1}}]
    made = [b"\x00" + json.dumps(text).encode() for text in texts]
    for number, (kind, _) in enumerate(WAYS[1:], 1):
        made += [bytes([number]) + msgspec.msgpack.encode(value_of(kind, random.Random(n))) for n in range(3)]
    made.append(b"\x02" + msgspec.msgpack.encode(messages.Renew([LeaseRef("r", 1)])))
    made.append(b"\x04" + description.encode(_OURS))
    return made
