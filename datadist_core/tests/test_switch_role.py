# SPDX-License-Identifier: Apache-2.0
"""`switch_role`: the role changes, and the listener starts, moves or stops with it."""

from __future__ import annotations

import json
import logging
import socket

import pytest

from datadist_core import LLMDataDist, LLMException, LLMRole, LLMStatusCode
from datadist_core.testing.ports import free_port
from datadist_core.tests.core_ends import LINK_MS, cluster_info, config, make_end, must_link, remote_info

PROMPT, DECODER = LLMRole.PROMPT, LLMRole.DECODER
KEYS = ["llm.listenIpInfo", "listen_ip_info"]


def at(host: str, port: int) -> dict[str, str]:
    return {"llm.listenIpInfo": f"{host}:{port}"}


def accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=30):
            return True
    except ConnectionRefusedError:
        return False


@pytest.fixture
def taken():
    """A port that somebody else listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def prompt():
    with make_end(listen=f"127.0.0.1:{free_port()}", role=PROMPT) as end:
        yield end


@pytest.mark.parametrize("backend", ["auto", "shm", "tcp"])
def test_two_ends_change_places_and_back(backend):
    with make_end(backend, f"127.0.0.1:{free_port()}", PROMPT) as one, make_end(backend, role=DECODER) as two:
        server, client = one, two
        for _ in range(3):
            must_link(client, server)
            client.check_link_status(server.cluster_id)
            server.check_link_status(client.cluster_id)
            address = server.listen_address
            assert client.unlink_clusters([cluster_info(server)], timeout=LINK_MS)[0] is LLMStatusCode.LLM_SUCCESS
            server.switch_role(DECODER)
            assert (server.role, server.listen_address) == (DECODER, None)
            client.switch_role(PROMPT, at(address.host, address.port))
            assert (client.role, client.listen_address) == (PROMPT, address)
            server, client = client, server


@pytest.mark.parametrize("key", KEYS)
def test_the_listener_moves(prompt, key):
    old = prompt.listen_address
    prompt.switch_role(PROMPT, {key: "127.0.0.1:0"})
    assert prompt.listen_address.port not in (0, old.port)
    assert not accepts(old.host, old.port)
    with make_end(role=DECODER) as decoder:
        must_link(decoder, prompt)


def test_without_the_option_the_end_stops_to_listen(prompt):
    for options in (None, {}, {"llm.somethingElse": "1"}):
        prompt.switch_role(PROMPT, {"listen_ip_info": "127.0.0.1:0"})
        old = prompt.listen_address
        prompt.switch_role(DECODER, options)
        assert prompt.listen_address is None
        assert not accepts(old.host, old.port)
        with make_end() as client:
            _, each = client.link_clusters([remote_info(prompt.cluster_id, old.host, old.port)], timeout=LINK_MS)
            assert each == [LLMStatusCode.LLM_LINK_FAILED]


def test_the_same_address_may_be_named_again(prompt):
    old = prompt.listen_address
    prompt.switch_role(DECODER, at(old.host, old.port))
    assert (prompt.role, prompt.listen_address) == (DECODER, old)
    with make_end() as client:
        must_link(client, prompt)


@pytest.mark.parametrize(("first", "second"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_the_same_port_at_a_wider_or_narrower_address(first, second):
    with make_end(listen=f"{first}:0") as end, make_end() as client:
        port = end.listen_address.port
        end.switch_role(PROMPT, at(second, port))
        assert end.listen_address.host == second
        assert (
            client.link_clusters([remote_info(end.cluster_id, "127.0.0.1", port)], timeout=LINK_MS)[0]
            is LLMStatusCode.LLM_SUCCESS
        )


def test_a_taken_address_leaves_listener_and_role_as_they_were(prompt, taken):
    old = prompt.listen_address
    with pytest.raises(LLMException, match=f"127.0.0.1:{taken}") as caught:
        prompt.switch_role(DECODER, at("127.0.0.1", taken))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert (prompt.role, prompt.listen_address) == (PROMPT, old)
    with make_end() as client:
        must_link(client, prompt)


def test_an_address_of_another_host_on_the_same_port_leaves_all_as_it_was(prompt):
    old = prompt.listen_address
    with pytest.raises(LLMException, match=r"192\.0\.2\.1"):
        prompt.switch_role(DECODER, at("192.0.2.1", old.port))
    assert (prompt.role, prompt.listen_address) == (PROMPT, old)
    with make_end() as client:
        must_link(client, prompt)


@pytest.mark.parametrize("linked_by", ["accepting", "dialling"])
def test_links_forbid_it_at_both_ends(prompt, linked_by):
    with make_end(role=DECODER) as decoder:
        must_link(decoder, prompt)
        end, old = (prompt, PROMPT) if linked_by == "accepting" else (decoder, DECODER)
        before = end.listen_address
        with pytest.raises(LLMException, match="unlink_clusters") as caught:
            end.switch_role(LLMRole.MIX, {"listen_ip_info": "127.0.0.1:0"})
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        assert (end.role, end.listen_address) == (old, before)


def test_a_communicator_that_is_preparing_forbids_it(prompt):
    devices = [{"device_id": r, "device_ip": "127.0.0.1", "rank_id": r} for r in (0, 1)]
    table = json.dumps({"server_list": [{"device": devices}]})
    comm_id = prompt.link("switching", {prompt.cluster_id: 0, 1: 1}, table)
    with pytest.raises(LLMException) as caught:
        prompt.switch_role(DECODER)
    assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
    prompt.unlink(comm_id)
    prompt.switch_role(DECODER)


@pytest.mark.parametrize("enabled", [True, False])
def test_v1_needs_the_option(enabled):
    made = config(v2=False, listen="127.0.0.1:0")
    if enabled:
        made.enable_switch_role = True
    with LLMDataDist(PROMPT, 1) as end:
        end.init(made)
        before = end.listen_address
        if enabled:
            end.switch_role(DECODER)
            assert (end.role, end.listen_address) == (DECODER, None)
            return
        with pytest.raises(LLMException, match="enable_switch_role") as caught:
            end.switch_role(DECODER)
        assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert (end.role, end.listen_address) == (PROMPT, before)


def test_unknown_options_are_ignored_with_one_line(prompt, caplog):
    with caplog.at_level(logging.INFO, logger="datadist_core"):
        prompt.switch_role(DECODER, {"llm.b": "1", "llm.a": "2", "llm.listenIpInfo": "127.0.0.1:0"})
    lines = [record.getMessage() for record in caplog.records if "switch_options" in record.getMessage()]
    assert len(lines) == 1
    assert "llm.a, llm.b" in lines[0]
    assert prompt.listen_address is not None


@pytest.mark.parametrize(
    ("role", "options", "error", "text"),
    [
        (1, None, TypeError, "role must be LLMRole"),
        (None, None, TypeError, "role must be LLMRole"),
        (DECODER, "127.0.0.1:1", TypeError, "switch_options must be dict"),
        (DECODER, {"llm.listenIpInfo": 5}, TypeError, r"switch_options\['llm.listenIpInfo'\] must be str"),
        (DECODER, {"other": None}, TypeError, r"switch_options\['other'\] must be str"),
        (DECODER, {5: "x"}, TypeError, "key of switch_options"),
        (DECODER, {"listen_ip_info": "nowhere"}, LLMException, r"switch_options\['listen_ip_info'\]='nowhere'"),
        (DECODER, {"llm.listenIpInfo": "127.0.0.1:65536"}, LLMException, "65536"),
        (DECODER, {"llm.listenIpInfo": ""}, LLMException, r"switch_options\['llm.listenIpInfo'\]=''"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(prompt, role, options, error, text):
    before = prompt.listen_address
    with pytest.raises(error, match=text) as caught:
        prompt.switch_role(role, options)
    if error is LLMException:
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert (prompt.role, prompt.listen_address) == (PROMPT, before)


def test_before_init_and_after_finalize():
    end = LLMDataDist(PROMPT, 1)
    with pytest.raises(LLMException, match="init"):
        end.switch_role(DECODER)
    end.init(config())
    end.finalize()
    with pytest.raises(LLMException) as caught:
        end.switch_role(DECODER)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
