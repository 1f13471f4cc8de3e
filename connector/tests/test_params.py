# SPDX-License-Identifier: Apache-2.0
"""Tickets survive a router's JSON; everything malformed is refused with the key in the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from vllm_datadist.messages import Endpoint, RemoteLease, RequestKey
from vllm_datadist.params import (
    PromptDigest,
    Ticket,
    TicketError,
    asks_remote_decode,
    asks_remote_prefill,
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
        (_set("datadist.workers", [3] * 4097), "datadist.workers has 4097 entries, expected 1..4096"),
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
