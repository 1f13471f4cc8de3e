# SPDX-License-Identifier: Apache-2.0
"""The `kv_transfer_params` of requests, and tickets: those that P returns and that a router hands to D, untouched.

    P gets       {"do_remote_decode": true}                  and gives a ticket in its answer
    D gets       the ticket
    for a push   P gets {"do_remote_decode": true, "transfer_mode": "push", "transfer_id": T}, and D, at any time, the
                 ticket or {"do_remote_prefill": true, "transfer_mode": "push", "transfer_id": T, "remote_host": ...,
                 "remote_port": ...}: where P's first worker listens


The outer names are those that routers for vLLM's P/D mode already pass on; what only this connector needs is under
"datadist". A ticket that says "push" can be pulled too, as engines do that know no push. Cluster ids travel as strings,
because a router may read JSON numbers as doubles.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .address import address_error
from .config import TRANSFER_MODES
from .messages import Endpoint, PushSource, RemoteLease, RequestKey

TICKET_VERSION = 1
#: 512 digests of 32 characters are 18 KB of JSON.
MAX_PREFIX_DIGESTS = 512
#: Of one engine.
MAX_WORKERS = 1024
_MAX_ID = 2**31 - 1
_MAX_TRANSFER_ID = 512
#: Values in error texts: long ones are cut, so are deep ones.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


class TicketError(ValueError):
    """A ticket that cannot be used. The text names the key, its value and what was expected."""


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """Enough of a prompt to see that another one differs: `scheduler.identity.kv_digest` of its `num_tokens` tokens."""

    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class PrefixDigests:
    """Of the first `span`, 2 * `span`, ... tokens of a ticket, and at last of all: see `scheduler.conversation`."""

    span: int
    digests: tuple[str, ...]


def prefix_ends(num_tokens: int, span: int) -> tuple[int, ...]:
    """How many tokens each of `PrefixDigests` covers."""
    return (*range(span, num_tokens, span), num_tokens) if num_tokens > 0 else ()


@dataclass(frozen=True, slots=True)
class Ticket:
    """What P promises: its lease, and where the KV cache of the first `num_tokens` tokens lies.

    Attributes:
        block_ids: per KV cache group, index = token position // block size; 0 = no block (out of the window).
        block_size: tokens per block of each group.
        prompt: of the prompt that P has prefilled.
        prefixes: where the ticket covers generated tokens too: a later prompt may agree with the first part only.
        transfer_id: of a push; "" = the blocks are to be pulled.
    """

    remote: RemoteLease
    block_ids: tuple[tuple[int, ...], ...]
    block_size: tuple[int, ...]
    num_tokens: int
    tp_size: int
    prompt: PromptDigest
    prefixes: PrefixDigests | None = None
    transfer_id: str = ""

    @property
    def push_source(self) -> PushSource | None:
        """Where a push comes from; None for a pull."""
        first = self.remote.workers[0]
        return PushSource(self.transfer_id, first.host, first.port, self.remote) if self.transfer_id else None

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
            **_mode_params(self.transfer_id),
            "datadist": {
                "version": TICKET_VERSION,
                "attempt": remote.key.attempt,
                "lease_s": remote.lease_s,
                "block_size": list(self.block_size),
                "prompt_tokens": self.prompt.num_tokens,
                "prompt_digest": self.prompt.digest,
                "workers": [_endpoint_params(worker) for worker in remote.workers],
                **_prefix_params(self.prefixes),
            },
        }


def asks_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether this engine shall prefill and hand off (P)."""
    return params is not None and params.get("do_remote_decode") is True


def asks_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether this engine shall take over what another one prefilled (D)."""
    return params is not None and params.get("do_remote_prefill") is True


def transfer_mode(params: Mapping[str, Any], default: str) -> str:
    """How this request wants its blocks moved. Raises TicketError."""
    mode = params.get("transfer_mode")
    if mode is None:
        return default
    if not isinstance(mode, str) or mode not in TRANSFER_MODES:
        raise TicketError(f"params.transfer_mode must be one of {', '.join(TRANSFER_MODES)}, is {_show(mode)}")
    return mode


def transfer_id(params: Mapping[str, Any]) -> str:
    """What names a push for P and D; "" if the request names none. Raises TicketError."""
    value = params.get("transfer_id")
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TRANSFER_ID:
        raise TicketError(
            f"params.transfer_id must be a string of 1..{_MAX_TRANSFER_ID} characters, the same for P and D, is "
            f"{_show(value)}"
        )
    return _text(params, "transfer_id", "params")


def is_ticket(params: Mapping[str, Any]) -> bool:
    """Whether these parameters come from a P, rather than from a router that has asked no P yet."""
    return params.get("datadist") is not None or params.get("remote_block_ids") is not None


def parse_push_source(params: Mapping[str, Any]) -> PushSource:
    """Of a request for a push that comes without a ticket. Raises TicketError."""
    name = transfer_id(params)
    if not name:
        raise TicketError("params.transfer_id is missing: a push without a ticket needs the id that P gets too")
    host = _get(params, "remote_host", str, "params")
    port = _count(params, "remote_port", "params")
    if why := address_error(host, port):
        raise TicketError(
            f"params.remote_host and remote_port must say where P's first worker listens (kv_connector_extra_config "
            f'"port" at P), are {_show(host)} and {port}: {why}'
        )
    return PushSource(name, host, port)


def parse_ticket(params: Mapping[str, Any]) -> Ticket:
    """Raises TicketError for anything that is missing or does not fit."""
    own = _get(params, "datadist", dict, "params")
    version = _get(own, "version", int, "datadist")
    if version != TICKET_VERSION:
        raise TicketError(f"datadist.version is {_show(version)}, this side understands {TICKET_VERSION}")
    key = RequestKey(_text(params, "remote_request_id", "params"), _count(own, "attempt", "datadist"))
    lease = RemoteLease(_text(params, "remote_engine_id", "params"), key, _lease_s(own), _parse_workers(own))
    return Ticket(
        lease,
        _parse_block_ids(params),
        tuple(_block_ids(_items(own, "block_size", "datadist"), "datadist.block_size")),
        _count(params, "remote_num_tokens", "params"),
        _count(params, "tp_size", "params"),
        PromptDigest(_count(own, "prompt_tokens", "datadist"), _text(own, "prompt_digest", "datadist")),
        _parse_prefixes(own, _count(params, "remote_num_tokens", "params")),
        _ticket_transfer_id(params),
    )


def _mode_params(transfer_id: str) -> dict[str, Any]:
    return {"transfer_mode": "push", "transfer_id": transfer_id} if transfer_id else {"transfer_mode": "pull"}


def _ticket_transfer_id(params: Mapping[str, Any]) -> str:
    if transfer_mode(params, "pull") == "pull":
        return ""
    name = transfer_id(params)
    if not name:
        raise TicketError("params.transfer_id is missing in a ticket whose transfer_mode is push")
    return name


def _prefix_params(prefixes: PrefixDigests | None) -> dict[str, Any]:
    return {} if prefixes is None else {"prefix_span": prefixes.span, "prefix_digests": list(prefixes.digests)}


def _parse_prefixes(own: Mapping[str, Any], num_tokens: int) -> PrefixDigests | None:
    if "prefix_span" not in own:
        return None
    span, digests = _count(own, "prefix_span", "datadist"), _items(own, "prefix_digests", "datadist")
    num_expected = -(-num_tokens // span) if span > 0 else 0
    if len(digests) != num_expected or not 0 < num_expected <= MAX_PREFIX_DIGESTS:
        raise TicketError(
            f"datadist.prefix_digests has {len(digests)} entries, expected {num_expected} (1..{MAX_PREFIX_DIGESTS}) "
            f"for {num_tokens} tokens in spans of {span}"
        )
    for digest in digests:
        if not isinstance(digest, str):
            raise TicketError(f"datadist.prefix_digests must hold strings, found {_show(digest)}")
    return PrefixDigests(span, tuple(digests))


def _endpoint_params(worker: Endpoint) -> dict[str, Any]:
    return {
        "pp_rank": worker.pp_rank,
        "tp_rank": worker.tp_rank,
        "host": worker.host,
        "port": worker.port,
        "cluster_id": str(worker.cluster_id),
        "first_layer": worker.first_layer,
    }


def _parse_workers(own: Mapping[str, Any]) -> tuple[Endpoint, ...]:
    items = _items(own, "workers", "datadist")
    if not 0 < len(items) <= MAX_WORKERS:
        raise TicketError(f"datadist.workers has {len(items)} entries, expected 1..{MAX_WORKERS}")
    workers = tuple(_parse_endpoint(item) for item in items)
    if why := not_a_grid(workers):
        raise TicketError(f"datadist.workers: {why}")
    return workers


def not_a_grid(workers: Sequence[Endpoint]) -> str:
    """Why these are not the workers of one engine: one of each pp_rank and tp_rank. "" if they are."""
    if len({worker.cluster_id for worker in workers}) < len(workers):
        return f"{len(workers)} workers of which some have the same cluster_id, expected one for each"
    ranks = {(worker.pp_rank, worker.tp_rank) for worker in workers}
    num_stages = 1 + max((pp_rank for pp_rank, _ in ranks), default=-1)
    tp_size = 1 + max((tp_rank for _, tp_rank in ranks), default=-1)
    least = min((min(rank) for rank in ranks), default=0)
    if least >= 0 and len(workers) == len(ranks) == num_stages * tp_size:
        return ""
    return (
        f"{len(workers)} workers with {len(ranks)} different ranks, expected one of each pp_rank 0..{num_stages - 1} "
        f"and tp_rank 0..{tp_size - 1}"
    )


def _parse_endpoint(item: Any) -> Endpoint:
    if not isinstance(item, Mapping):
        raise TicketError(f"datadist.workers must hold objects, found {_show(item)}")
    where = "datadist.workers"
    text = _get(item, "cluster_id", str, where)
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) < 2**64):
        raise TicketError(f"{where}.cluster_id must be the digits of a uint64 > 0, is {_show(text)}")
    host, port = _get(item, "host", str, where), _count(item, "port", where)
    if why := address_error(host, port):
        raise TicketError(f"{where}.host and port are {_show(host)} and {port}: {why}")
    ranks = _count(item, "pp_rank", where), _count(item, "tp_rank", where)
    first_layer = _count(item, "first_layer", where) if "first_layer" in item else 0
    return Endpoint(*ranks, host, port, int(text), first_layer)


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


def _text(params: Mapping[str, Any], key: str, where: str) -> str:
    """A string that can be sent on: JSON can also write halves of characters."""
    value: str = _get(params, key, str, where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TicketError(f"{where}.{key} must be Unicode text, is {_show(value)}") from error
    return value


def _count(params: Mapping[str, Any], key: str, where: str) -> int:
    value: int = _get(params, key, int, where)
    if not 0 <= value <= 2**53:
        raise TicketError(f"{where}.{key} must be 0..2**53, is {_show(value)}")
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
    try:
        text = _REPR.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a long {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
