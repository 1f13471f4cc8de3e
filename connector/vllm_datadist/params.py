# SPDX-License-Identifier: Apache-2.0
"""Tickets: the `kv_transfer_params` that P returns and that a router hands to D, untouched.

The outer names are those that routers for vLLM's P/D mode already pass on; what only this connector needs is under
"datadist". Cluster ids travel as strings, because a router may read JSON numbers as doubles.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .messages import Endpoint, RemoteLease, RequestKey

TICKET_VERSION = 1
_MAX_WORKERS = 65536
_MAX_ID = 2**31 - 1


class TicketError(ValueError):
    """A ticket that cannot be used. The text names the key, its value and what was expected."""


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """Enough of a prompt to see that another one differs. `digest` is "" where there are no token ids."""

    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """What P promises: its lease, and where the KV cache of the first `num_tokens` tokens lies.

    Attributes:
        block_ids: per KV cache group, index = token position // block size; 0 = no block (out of the window).
        block_size: tokens per block of each group.
        prompt: of the prompt that P has prefilled.
    """

    remote: RemoteLease
    block_ids: tuple[tuple[int, ...], ...]
    block_size: tuple[int, ...]
    num_tokens: int
    tp_size: int
    prompt: PromptDigest

    def to_params(self) -> dict[str, Any]:
        remote, first = self.remote, self.remote.workers[0]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(ids) for ids in self.block_ids],
            "remote_engine_id": remote.engine_id,
            "remote_request_id": remote.key.request_id,
            "remote_host": first.host,
            "remote_port": first.port,
            "tp_size": self.tp_size,
            "remote_num_tokens": self.num_tokens,
            "transfer_mode": "pull",
            "datadist": {
                "version": TICKET_VERSION,
                "attempt": remote.key.attempt,
                "lease_s": remote.lease_s,
                "block_size": list(self.block_size),
                "prompt_tokens": self.prompt.num_tokens,
                "prompt_digest": self.prompt.digest,
                "workers": [_endpoint_params(worker) for worker in remote.workers],
            },
        }


def prompt_digest(token_ids: Sequence[int] | None, num_tokens: int) -> PromptDigest:
    """Of the first `num_tokens` tokens; None = the prompt is not given as token ids."""
    if token_ids is None:
        return PromptDigest(num_tokens, "")
    packed = array("q", token_ids[:num_tokens]).tobytes()
    return PromptDigest(num_tokens, blake2b(packed, digest_size=16).hexdigest())


def asks_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether this engine shall prefill and hand off (P)."""
    return params is not None and params.get("do_remote_decode") is True


def asks_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether this engine shall take over what another one prefilled (D)."""
    return params is not None and params.get("do_remote_prefill") is True


def parse_ticket(params: Mapping[str, Any]) -> Ticket:
    """Raises TicketError for anything that is missing or does not fit."""
    own = _get(params, "datadist", dict, "params")
    version = _get(own, "version", int, "datadist")
    if version != TICKET_VERSION:
        raise TicketError(f"datadist.version is {version}, this side understands {TICKET_VERSION}")
    key = RequestKey(_get(params, "remote_request_id", str, "params"), _count(own, "attempt", "datadist"))
    workers = tuple(_parse_endpoint(item) for item in _items(own, "workers", "datadist"))
    if not 0 < len(workers) <= _MAX_WORKERS:
        raise TicketError(f"datadist.workers has {len(workers)} entries, expected 1..{_MAX_WORKERS}")
    lease = RemoteLease(_get(params, "remote_engine_id", str, "params"), key, _lease_s(own), workers)
    return Ticket(
        lease,
        _parse_block_ids(params),
        tuple(_block_ids(_items(own, "block_size", "datadist"), "datadist.block_size")),
        _count(params, "remote_num_tokens", "params"),
        _count(params, "tp_size", "params"),
        PromptDigest(_count(own, "prompt_tokens", "datadist"), _get(own, "prompt_digest", str, "datadist")),
    )


def _endpoint_params(worker: Endpoint) -> dict[str, Any]:
    return {
        "pp_rank": worker.pp_rank,
        "tp_rank": worker.tp_rank,
        "host": worker.host,
        "port": worker.port,
        "cluster_id": str(worker.cluster_id),
    }


def _parse_endpoint(item: Any) -> Endpoint:
    if not isinstance(item, Mapping):
        raise TicketError(f"datadist.workers must hold objects, found {_show(item)}")
    where = "datadist.workers"
    text = _get(item, "cluster_id", str, where)
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) < 2**64):
        raise TicketError(f"{where}.cluster_id must be the digits of a uint64 > 0, is {_show(text)}")
    port = _count(item, "port", where)
    if not 0 < port < 65536:
        raise TicketError(f"{where}.port must be 1..65535, is {port}")
    ranks = _count(item, "pp_rank", where), _count(item, "tp_rank", where)
    return Endpoint(*ranks, _get(item, "host", str, where), port, int(text))


def _parse_block_ids(params: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    groups = _items(params, "remote_block_ids", "params")
    for group in groups:
        if not isinstance(group, Sequence) or isinstance(group, str):
            raise TicketError(f"remote_block_ids must hold one list per KV cache group, found {_show(group)}")
    return tuple(tuple(_block_ids(group, "remote_block_ids")) for group in groups)


def _block_ids(values: Sequence[Any], name: str) -> Sequence[int]:
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_ID:
            raise TicketError(f"{name} must hold whole numbers 0..{_MAX_ID}, found {_show(value)}")
    return values


def _lease_s(own: Mapping[str, Any]) -> float:
    value: Any = own.get("lease_s")
    if type(value) not in (int, float) or not 0 < value <= 86400:
        raise TicketError(f"datadist.lease_s must be seconds > 0 and <= 86400, is {_show(value)}")
    return float(value)


def _count(params: Mapping[str, Any], key: str, where: str) -> int:
    value: int = _get(params, key, int, where)
    if not 0 <= value <= 2**53:
        raise TicketError(f"{where}.{key} must be 0..2**53, is {value}")
    return value


def _items(params: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value: Sequence[Any] = _get(params, key, (list, tuple), where)
    return value


def _get(params: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = params.get(key)
    if not isinstance(value, kind) or (kind is int and type(value) is not int):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TicketError(f"{where}.{key} must be {names}, is {_show(value)}")
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
