# SPDX-License-Identifier: Apache-2.0
"""`link_clusters` and `unlink_clusters` with many clusters, many threads, and clusters that are dead or silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from datadist_core import LLMDataDist, LLMException, LLMStatusCode
from datadist_core.testing.ports import free_port
from datadist_core.tests.core_ends import (
    LINK_MS,
    cluster_info,
    filled_cache,
    linked,
    make_end,
    must_link,
    plain_cache,
    remote_info,
)
from datadist_core.tests.member import Member
from datadist_core.wire import messages as m

SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
ALREADY = LLMStatusCode.LLM_ALREADY_LINK
BOUND_S = 30.0


@contextmanager
def listeners(number: int, backend: str = "auto") -> Iterator[list[LLMDataDist]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make_end(backend, "127.0.0.1:0")) for _ in range(number)]


@pytest.fixture
def silent():
    """The port of somebody who accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def links_of(end: LLMDataDist) -> set[int]:
    return {link.peer.cluster_id for link in end._open().links.links()}


def eventually(condition, what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {BOUND_S} s: {what}"
        threading.Event().wait(0.01)


# -- linking


def test_forty_clusters_in_one_call_have_one_status_each():
    with listeners(40) as servers, make_end() as client:
        must_link(client, *servers[:3])
        good = [cluster_info(server) for server in servers]
        dead = [remote_info(7000 + i, "127.0.0.1", free_port()) for i in range(5)]
        wrong = [remote_info(7200 + i, "127.0.0.1", server.listen_address.port) for i, server in enumerate(servers[:5])]
        overall, each = client.link_clusters([*good, *dead, *wrong], timeout=60_000)
        assert overall is ALREADY
        assert each[:3] == [ALREADY] * 3
        assert each[3:40] == [SUCCESS] * 37
        assert each[40:45] == [LLMStatusCode.LLM_LINK_FAILED] * 5
        assert each[45:] == [INVALID] * 5
        assert links_of(client) == {server.cluster_id for server in servers}
        for server in servers:
            client.check_link_status(server.cluster_id)
        for info in (*dead, *wrong):
            assert str(client.link_failure(info.remote_cluster_id))
        assert client.unlink_clusters(good, timeout=LINK_MS)[1] == [SUCCESS] * 40
        assert all(links_of(server) == set() for server in servers)


@pytest.mark.slow
def test_silent_clusters_do_not_keep_others_waiting_for_a_thread():
    """More of them than any pool of threads might have."""
    with make_end(listen="127.0.0.1:0") as server, make_end() as client, ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            mute = [remote_info(8000 + i, "127.0.0.1", silent.getsockname()[1]) for i in range(90)]
            call = pool.submit(client.link_clusters, [*mute, cluster_info(server)], 60_000)
            eventually(lambda: links_of(client) == {server.cluster_id}, "the other one is linked")
            assert not call.done()
        _, each = call.result(timeout=BOUND_S)  # for those who were silent have hung up
        assert each == [LLMStatusCode.LLM_LINK_FAILED] * 90 + [SUCCESS]


def test_the_same_cluster_twice_in_one_call_counts_once():
    with listeners(2) as (one, two), make_end() as client:
        infos = [cluster_info(one), cluster_info(two), cluster_info(one), cluster_info(one)]
        assert client.link_clusters(infos, timeout=LINK_MS) == (INVALID, [SUCCESS, SUCCESS, INVALID, INVALID])
        client.check_link_status(one.cluster_id)
        assert client.unlink_clusters(infos, timeout=LINK_MS) == (INVALID, [SUCCESS, SUCCESS, INVALID, INVALID])
        assert links_of(client) == links_of(one) == set()


def test_many_threads_link_and_unlink_many_clusters():
    with listeners(6) as servers, make_end() as client:
        infos = [cluster_info(server) for server in servers]
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda _: client.link_clusters(infos, timeout=LINK_MS)[1], range(8)))
            for statuses in zip(*found, strict=True):
                assert statuses.count(SUCCESS) == 1
                assert set(statuses) <= {SUCCESS, ALREADY, LLMStatusCode.LLM_PROCESSING_LINK}
            for server in servers:
                client.check_link_status(server.cluster_id)
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda _: client.unlink_clusters(infos, timeout=LINK_MS)[1], range(8)))
            for statuses in zip(*found, strict=True):
                assert statuses.count(SUCCESS) == 1
                assert set(statuses) <= {SUCCESS, NOT_YET}
            assert all(links_of(end) == set() for end in (client, *servers))


def test_dialling_each_other_at_once_leaves_one_link_that_works():
    with listeners(4) as ends:
        infos = {end: [cluster_info(other) for other in ends if other is not end] for end in ends}
        for _ in range(3):
            with ThreadPoolExecutor(4) as pool:
                each = dict(
                    zip(ends, pool.map(lambda e: e.link_clusters(infos[e], timeout=LINK_MS)[1], ends), strict=True)
                )
            allowed = {SUCCESS, ALREADY, LLMStatusCode.LLM_PROCESSING_LINK}
            assert all(set(statuses) <= allowed for statuses in each.values()), each
            for end in ends:
                assert len(links_of(end)) == 3
                for info in infos[end]:
                    end.check_link_status(info.remote_cluster_id)
            for end in ends:
                end.unlink_clusters(infos[end], timeout=LINK_MS)
            eventually(lambda: not any(links_of(end) for end in ends), "all are unlinked")


def test_a_failed_link_leaves_no_residue(silent):
    with make_end() as client, make_end(listen="127.0.0.1:0") as server:
        assert client.link_clusters([remote_info(server.cluster_id, "127.0.0.1", silent)], timeout=200)[1] == [
            LLMStatusCode.LLM_TIMEOUT
        ]
        assert links_of(client) == set()
        must_link(client, server)
        assert client.link_failure(server.cluster_id) is None


def test_finalize_ends_a_link_call_that_is_under_way(silent):
    with ThreadPoolExecutor(1) as pool:
        client = make_end()
        call = pool.submit(client.link_clusters, [remote_info(1, "127.0.0.1", silent)], 60_000)
        eventually(lambda: client._open().links._table.is_dialling(1), "the call is dialling")
        client.finalize()
        assert call.result(timeout=BOUND_S)[0] in (
            LLMStatusCode.LLM_ENGINE_FINALIZED,
            LLMStatusCode.LLM_LINK_FAILED,
        )


# -- unlinking


def test_who_unlinks_while_the_handshake_is_being_put_away_still_gets_the_answer():
    """The accepting end's own thread may come to it when the link is in use already."""
    with make_end() as client, make_end(listen="127.0.0.1:0") as server:
        must_link(client, server)
        for end in (client, server):
            [link] = end._open().links.links()
            answer = link.expect(m.Unlinked)
            link.forget_handshake()
            assert link.expect(m.Unlinked) is answer


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_unlink_from_the_listening_side_after_the_client_died(force):
    with make_end(listen="127.0.0.1:0") as server:
        info = remote_info(90, "127.0.0.1", 1)
        for _ in range(2):
            with Member(90) as client:
                client.do("link_clusters", [cluster_info(server)], timeout=LINK_MS)
                server.check_link_status(90)
                client.kill()
                status = server.unlink_clusters([info], timeout=LINK_MS, force=force)[1]
                assert status[0] in (SUCCESS, NOT_YET, LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
                assert links_of(server) == set()


@pytest.mark.slow
def test_a_silent_peer_does_not_use_up_the_time_of_the_others():
    with Member(91, listen="127.0.0.1:0") as frozen, listeners(3) as servers, make_end() as client:
        infos = [remote_info(91, frozen.host, frozen.port), *map(cluster_info, servers)]
        assert client.link_clusters(infos, timeout=LINK_MS)[0] is SUCCESS
        frozen.stop()
        with ThreadPoolExecutor(1) as pool:
            try:
                call = pool.submit(client.unlink_clusters, infos, LINK_MS)
                eventually(lambda: links_of(client) == {91}, "the others are unlinked")
                assert not call.done()
            finally:
                frozen.resume()
            assert call.result(timeout=BOUND_S) == (SUCCESS, [SUCCESS] * 4)
        assert client.link_clusters(infos, timeout=LINK_MS)[0] is SUCCESS
        frozen.stop()
        try:
            unconfirmed = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
            assert client.unlink_clusters(infos[:1], timeout=300) == (unconfirmed, [unconfirmed])
        finally:
            frozen.resume()
        assert links_of(client) == {server.cluster_id for server in servers}
        assert client.link_clusters(infos[:1], timeout=LINK_MS)[0] is SUCCESS


@pytest.mark.parametrize("backend", ["loopback", "shm", "tcp", "auto"])
@pytest.mark.parametrize("first", ["client", "server"])
def test_forced_unlink_on_both_sides_then_link_again(backend, first):
    with make_end(backend, "127.0.0.1:0") as server, make_end(backend) as client:
        to_server, to_client = [cluster_info(server)], [remote_info(client.cluster_id, "127.0.0.1", 1)]
        for _ in range(5):
            must_link(client, server)
            sides = [(client, to_server), (server, to_client)]
            for end, infos in sides if first == "client" else sides[::-1]:
                status = end.unlink_clusters(infos, timeout=LINK_MS, force=True)[1]
                assert status in ([SUCCESS], [NOT_YET])  # the second may have noticed already
            assert links_of(client) == links_of(server) == set()
        must_link(client, server)
        client.check_link_status(server.cluster_id)
        server.check_link_status(client.cluster_id)


def test_a_forced_unlink_and_a_new_link_before_the_other_side_has_noticed():
    with make_end(listen="127.0.0.1:0") as server, make_end() as client:
        filled_cache(server, 1)
        must_link(client, server)
        for _ in range(10):
            assert client.unlink_clusters([cluster_info(server)], timeout=LINK_MS, force=True)[0] is SUCCESS
            must_link(client, server)
            client.check_link_status(server.cluster_id)
        eventually(lambda: links_of(server) == {client.cluster_id}, "the server has the new link")
        server.check_link_status(client.cluster_id)


def test_unlink_waits_for_a_transfer_and_says_so_if_it_does_not_end():
    with make_end(listen="127.0.0.1:0") as server, make_end() as client:
        must_link(client, server)
        link = client._open().links.get(server.cluster_id)
        with link.transferring():
            assert client.unlink_clusters([cluster_info(server)], timeout=50)[1] == [LLMStatusCode.LLM_UNLINK_FAILED]
            client.check_link_status(server.cluster_id)
        assert client.unlink_clusters([cluster_info(server)], timeout=LINK_MS)[1] == [SUCCESS]


def test_a_cache_that_was_linked_is_forgotten_with_a_forced_unlink():
    with make_end(listen="127.0.0.1:0") as server, make_end() as client:
        cache = plain_cache(server, 1)
        must_link(client, server)
        client.unlink_clusters([cluster_info(server)], timeout=LINK_MS, force=True)
        server._open().cache_manager.deallocate_blocks_cache(cache)
        with pytest.raises(LLMException) as caught:
            client.check_link_status(server.cluster_id)
        assert caught.value.status_code is NOT_YET


@pytest.mark.parametrize("backend", ["loopback", "tcp"])
def test_a_link_that_is_being_unlinked_is_busy(backend: str) -> None:
    """The unlink waits for a running transfer; what is asked for meanwhile does not join it."""
    with linked(backend) as (prompt, decoder):
        link = decoder._open().links.get(prompt.cluster_id)
        with ThreadPoolExecutor(1) as pool:
            with link.transferring():
                ending = pool.submit(decoder.unlink_clusters, [cluster_info(prompt)], timeout=LINK_MS)
                eventually(lambda: link.parting, "it is being unlinked")
                with pytest.raises(LLMException, match="being unlinked") as caught, link.transferring():
                    pass
                assert caught.value.status_code is LLMStatusCode.LLM_LINK_BUSY
                assert not ending.done()
            assert ending.result(timeout=BOUND_S)[1] == [SUCCESS]
        assert links_of(decoder) == set()
