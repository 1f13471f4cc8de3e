# SPDX-License-Identifier: Apache-2.0
"""Tickets survive a router's JSON; everything malformed is refused with the key in the text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.tests.test_scheduler import Request, _side, _ticket
from vllm_datadist.messages import Endpoint, RemoteLease, RequestKey
from vllm_datadist.params import (
    PromptDigest,
    Ticket,
    TicketError,
    address_error,
    asks_remote_decode,
    asks_remote_prefill,
    parse_push_source,
    parse_ticket,
)

TICKET = Ticket(
    RemoteLease(
        "engine-1",
        RequestKey("cmpl-1", 7),
        30.0,
        (Endpoint(0, 0, "10.0.0.1", 4000, 2**64 - 1), Endpoint(0, 1, "::1", 4001, 2**63 + 1)),
    ),
    ((3, 1, 2), (0, 0, 9)),
    (32, 32),
    70,
    2,
    PromptDigest(70, "0011"),
)


def test_a_ticket_survives_json() -> None:
    assert parse_ticket(json.loads(json.dumps(TICKET.to_params()))) == TICKET


def test_cluster_ids_survive_a_router_that_reads_numbers_as_doubles() -> None:
    lossy = json.loads(json.dumps(TICKET.to_params()), parse_int=lambda text: int(float(text)))
    assert parse_ticket(lossy) == TICKET


def test_the_names_that_routers_know_are_there() -> None:
    params = TICKET.to_params()
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[3, 1, 2], [0, 0, 9]]
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("10.0.0.1", 4000, 2)
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("engine-1", "cmpl-1")
    assert (params["remote_num_tokens"], params["transfer_mode"]) == (70, "pull")


def test_what_a_router_sends_to_p_asks_for_a_hand_off_and_is_no_ticket() -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert asks_remote_decode(params)
    assert not asks_remote_prefill(params)
    assert not asks_remote_decode(None)
    assert not asks_remote_prefill({})


def _drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda params: params.pop(key)


def _drop_worker(params: dict[str, Any]) -> None:
    del params["datadist"]["workers"][0]


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = params
        for name in parents:
            target = target[int(name) if name.isdigit() else name]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop("datadist"), "datadist"),
        (_drop("remote_request_id"), "remote_request_id"),
        (_drop("remote_engine_id"), "remote_engine_id"),
        (_drop("remote_block_ids"), "remote_block_ids"),
        (_drop("remote_num_tokens"), "remote_num_tokens"),
        (_drop("tp_size"), "tp_size"),
        (_set("datadist", []), "datadist"),
        (_set("datadist.version", 2), "datadist.version is 2, this side understands 1"),
        (_set("datadist.version", None), "datadist.version"),
        (_set("datadist.attempt", "1"), "datadist.attempt"),
        (_set("datadist.attempt", True), "datadist.attempt"),
        (_set("datadist.attempt", -1), "datadist.attempt"),
        (_set("datadist.lease_s", 0), "lease_s"),
        (_set("datadist.lease_s", float("nan")), "lease_s"),
        (_set("datadist.lease_s", "30"), "lease_s"),
        (_set("datadist.block_size", 32), "block_size"),
        (_set("datadist.block_size", [None]), "block_size"),
        (_set("datadist.prompt_digest", None), "prompt_digest"),
        (_set("datadist.prompt_tokens", -1), "prompt_tokens"),
        (_set("datadist.workers", []), "datadist.workers"),
        (_set("datadist.workers", "none"), "datadist.workers"),
        (_set("datadist.workers", [3] * 1025), "datadist.workers has 1025 entries, expected 1..1024"),
        (_set("datadist.workers.1.tp_rank", 0), "2 workers with 1 different ranks"),
        (_set("datadist.workers.1.tp_rank", 2), "expected one of each pp_rank 0..0 and tp_rank 0..2"),
        (_set("datadist.workers.1.pp_rank", 1), "expected one of each pp_rank 0..1 and tp_rank 0..1"),
        (_drop_worker, "1 workers with 1 different ranks, expected one of each pp_rank 0..0 and tp_rank 0..1"),
        (_set("datadist.workers", [3]), "datadist.workers"),
        (_set("datadist.workers.0.cluster_id", 7), "cluster_id"),
        (_set("datadist.workers.0.cluster_id", "0"), "cluster_id"),
        (_set("datadist.workers.0.cluster_id", "-1"), "cluster_id"),
        (_set("datadist.workers.0.cluster_id", str(2**64)), "cluster_id"),
        (_set("datadist.workers.0.cluster_id", "9" * 5000), "cluster_id"),
        (_set("datadist.workers.0.port", 0), "port"),
        (_set("datadist.workers.0.port", 65536), "port"),
        (_set("datadist.workers.0.host", None), "host"),
        (_set("datadist.workers.0.host", ["10.0.0.1"]), "host must be str"),
        (_set("datadist.workers.1.cluster_id", str(2**64 - 1)), "some have the same cluster_id"),
        (_set("datadist.workers.0.pp_rank", 10**4299), "pp_rank"),
        (_set("remote_request_id", "\ud800"), "remote_request_id must be Unicode text"),
        (_set("datadist.prompt_digest", "\udfff"), "prompt_digest must be Unicode text"),
        (_set("remote_engine_id", [[[[[[[[]]]]]]]] * 99), "remote_engine_id must be str"),
        (_set("datadist.workers.0.tp_rank", None), "tp_rank"),
        (_set("remote_block_ids", [1, 2]), "remote_block_ids"),
        (_set("remote_block_ids", ["12"]), "remote_block_ids"),
        (_set("remote_block_ids", [[1, -2]]), "remote_block_ids"),
        (_set("remote_block_ids", [[1, 2.0]]), "remote_block_ids"),
        (_set("remote_block_ids", [[2**40]]), "remote_block_ids"),
        (_set("remote_num_tokens", -1), "remote_num_tokens"),
        (_set("remote_num_tokens", 2**70), "remote_num_tokens"),
    ],
)
def test_malformed_tickets_are_refused_by_key(change: Callable[[dict[str, Any]], None], named: str) -> None:
    params = json.loads(json.dumps(TICKET.to_params()))
    change(params)
    with pytest.raises(TicketError, match=named) as caught:
        parse_ticket(params)
    assert len(str(caught.value)) < 300


# --- where P listens ----------------------------------------------------------------------------------------------

HOSTS = [
    "10.0.0.1", "::1", "[fe80::1]", "fe80::1%eth0", "localhost", "p-0.prefill.svc.cluster.local", "node_7", "a.b.",
    "a" * 63, ".".join(["a" * 62] * 4),
]  # fmt: skip
NO_HOSTS = [
    "", " ", "a b", "host ", "\thost", "host\n", "a\x00b", "\x1b[31m", "..", "a..b", ".a", "-a", "a-", "a" * 64,
    "a." * 150, "x" * 300, "1.2.3", "1.2.3.4.5", "256.0.0.1", "10", "[10.0.0.1", "[a]", "[]", "::1::", "fe80::1%a b",
    "a/b", "a:80", "http://p", "user@p", "\u0440\u0444", "\ud800", None, 7, True, 1.5, [], ["10.0.0.1"], {"host": "p"},
]  # fmt: skip
TO_D = {"do_remote_prefill": True, "transfer_mode": "push", "transfer_id": "t", "remote_port": 7000}


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_as_engines_have_them(host: str) -> None:
    assert address_error(host, 1) == address_error(host, 65535) == ""
    assert address_error(host, 0) == address_error(host, 65536) == "a port is 1..65535"
    assert parse_push_source({**TO_D, "remote_host": host}).host == host


@pytest.mark.parametrize("host", NO_HOSTS, ids=repr)
def test_texts_that_are_no_host_are_refused(host: Any) -> None:
    """By a ticket and by a push without one; else the whole time of a link would pass first."""
    params = json.loads(json.dumps(TICKET.to_params()))
    params["datadist"]["workers"][1]["host"] = host
    for refused in (lambda: parse_ticket(params), lambda: parse_push_source({**TO_D, "remote_host": host})):
        with pytest.raises(TicketError, match="host") as caught:
            refused()
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


# --- any JSON in any field ----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from([2**64, -1, ".."]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
WHOLE = {
    **_ticket(10), "transfer_mode": "push", "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 7000,
}  # fmt: skip
WHOLE["datadist"] |= {"prefix_span": 4, "prefix_digests": ["a", "b", "c"]}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from _paths(one, (*path, key))


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(path=st.sampled_from(list(_paths(WHOLE))), value=JSON, has_ticket=st.booleans())
def test_any_json_in_any_field_is_refused_or_fits_and_nothing_else(
    path: tuple[Any, ...], value: Any, has_ticket: bool
) -> None:
    """vLLM's scheduler must not see anything else raised: it would end the engine."""
    params: Any = copy.deepcopy(WHOLE)
    if not has_ticket:
        params["datadist"] = params["remote_block_ids"] = None
    inner = params
    for key in path[:-1]:
        inner = inner[key] if inner else None
    if inner:
        inner[path[-1]] = value
    for parse in (parse_ticket, parse_push_source):
        with suppress(TicketError):
            parse(params)
    for groups in ("engine", "other"):
        side = _side() if groups == "engine" else _side(groups=())
        request = Request("d-1", 10, params)
        side.on_new_request(request)
        count, is_async = side.num_new_matched_tokens(request, 0)
        assert is_async is bool(count)
        side.request_finished(request.finished("FINISHED_ABORTED"), ([],))
