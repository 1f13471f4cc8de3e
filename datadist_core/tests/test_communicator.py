# SPDX-License-Identifier: Apache-2.0
"""`link` / `unlink` / `query_register_mem_status`: communicators of 2 to 4 members from a rank table."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from datadist_core import (
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)
from datadist_core.link.rank_table import CommunicatorPlan, derived_port
from datadist_core.testing.ports import free_port
from datadist_core.tests.core_ends import LINK_MS, cluster_info, config, make_end, must_link, remote_info
from datadist_core.tests.member import Member

OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED
INVALID = LLMStatusCode.LLM_PARAM_INVALID
BOUND_S = 30.0
_numbers = itertools.count()


def new_name() -> str:
    """No other test, in no other process, derives the same port from it (with any likelihood)."""
    return f"comm-{os.getpid()}-{next(_numbers)}"


def rank_table(ranks: Sequence[int], host: str = "127.0.0.1", ports: dict[int, int] | None = None) -> str:
    """As the vendor's files are: one server, numbers as strings. `ports` by rank."""
    devices = []
    for rank in ranks:
        device = {"device_id": str(rank), "device_ip": host, "rank_id": str(rank)}
        if ports and rank in ports:
            device["port"] = str(ports[rank])
        devices.append(device)
    table = {"server_count": "1", "status": "completed", "version": "1.0"}
    return json.dumps({**table, "server_list": [{"server_id": "a", "host_ip": host, "device": devices}]})


def plan_of(ends: Sequence[LLMDataDist | Member]) -> tuple[dict[int, int], str]:
    """(cluster_rank_info, rank_table), ranks in the order of `ends`."""
    return {end.cluster_id: rank for rank, end in enumerate(ends)}, rank_table(range(len(ends)))


def status(end: LLMDataDist | Member, comm_id: int) -> RegisterMemStatus:
    if isinstance(end, Member):
        return end.do("query_register_mem_status", comm_id)
    return end.query_register_mem_status(comm_id)


def await_status(wanted: RegisterMemStatus, *comms: tuple[LLMDataDist | Member, int]) -> None:
    end_s = time.monotonic() + BOUND_S
    while True:
        found = [status(end, comm_id) for end, comm_id in comms]
        if all(one is wanted for one in found):
            return
        settled = wanted is OK and FAILED in found
        if settled or time.monotonic() > end_s:
            pytest.fail(f"{found}, not {wanted.name}: {reasons(comms)}")
        threading.Event().wait(0.01)


def reasons(comms: Sequence[tuple[LLMDataDist | Member, int]]) -> list[str]:
    return [
        f"{a.cluster_id}->{b.cluster_id}: {a.link_failure(b.cluster_id)}"
        for (a, _), (b, _) in itertools.permutations(comms, 2)
        if isinstance(a, LLMDataDist)
    ]


def links_of(end: LLMDataDist) -> set[int]:
    return {link.peer.cluster_id for link in end._open().links.links()}


def eventually(condition, what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {BOUND_S} s: {what}"
        threading.Event().wait(0.01)


def is_linked(end: LLMDataDist, other: LLMDataDist | Member) -> bool:
    return other.cluster_id in links_of(end)


def make_limited(total_time_s: int, listen: str | None = None, cluster_id: int | None = None) -> LLMDataDist:
    made = config(listen=listen)
    made.link_total_time = total_time_s
    end = LLMDataDist(LLMRole.MIX, next(_limited_ids) if cluster_id is None else cluster_id)
    end.init(made)
    return end


_limited_ids = itertools.count(500_000)


@contextmanager
def ends(number: int, backend: str = "auto", **settings) -> Iterator[list[LLMDataDist]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make_end(backend, **settings)) for _ in range(number)]


def link_all(
    members: Sequence[LLMDataDist], name: str | None = None, table: str | None = None
) -> list[tuple[LLMDataDist, int]]:
    info, derived = plan_of(members)
    name = name or new_name()
    comms = [(end, end.link(name, info, table or derived)) for end in members]
    assert all(comm_id > 0 for _, comm_id in comms)
    return comms


def unlink_all(comms: Sequence[tuple[LLMDataDist, int]]) -> None:
    for end, comm_id in comms:
        end.unlink(comm_id)


def free_listeners(end: LLMDataDist) -> bool:
    return not end._open().links.listeners._shared


# -- it works


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("backend", ["auto", "shm", "tcp"])
def test_members_are_linked_pairwise_and_parted_again(number, backend):
    with ends(number, backend) as members:
        comms = link_all(members)
        await_status(OK, *comms)
        for end, other in itertools.permutations(members, 2):
            end.check_link_status(other.cluster_id)
        unlink_all(comms)
        for end in members:
            eventually(lambda end=end: links_of(end) == set(), "no link is left")
            assert free_listeners(end)


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.DECODER])
def test_any_role_may_host_in_v1(role):
    other_role = LLMRole.DECODER if role is LLMRole.PROMPT else LLMRole.PROMPT
    with make_end(role=role, v2=False) as host, make_end(role=other_role, v2=False) as member:
        comms = link_all([host, member])
        await_status(OK, *comms)
        member.check_link_status(host.cluster_id)


def test_order_of_the_calls_does_not_matter_and_all_wait_for_the_last():
    with ends(3) as members:
        info, table = plan_of(members)
        name = new_name()
        comms = [(end, end.link(name, info, table)) for end in (members[2], members[0])]
        eventually(lambda: is_linked(members[0], members[2]), "the two that have called are linked")
        assert [status(*comm) for comm in comms] == [PREPARING, PREPARING]
        comms.append((members[1], members[1].link(name, info, table)))
        await_status(OK, *comms)


def test_ranks_need_not_begin_at_zero_nor_be_all_of_the_table():
    with ends(2) as (one, two):
        info = {one.cluster_id: 3, two.cluster_id: 7}
        table = rank_table([0, 3, 5, 7])
        name = new_name()
        await_status(OK, *[(end, end.link(name, info, table)) for end in (two, one)])


def test_the_host_uses_the_port_of_the_table_and_ipv6_works():
    port = free_port("::1")
    with ends(2) as members:
        comms = link_all(members, table=rank_table([0, 1], "::1", {0: port}))
        await_status(OK, *comms)
        with socket.create_connection(("::1", port), timeout=BOUND_S):
            pass


def test_without_a_port_the_host_is_where_everybody_computes_it():
    assert derived_port("a", 1) == derived_port("a", 1)
    assert len({derived_port(name, i) for name in "ab" for i in (1, 2)}) == 4
    assert all(20_000 <= derived_port(str(i), i) < 32_000 for i in range(500))
    with ends(2) as members:
        name = new_name()
        await_status(OK, *link_all(members, name))
        with socket.create_connection(("127.0.0.1", derived_port(name, members[0].cluster_id)), timeout=BOUND_S):
            pass


def test_host_ip_of_the_server_stands_in_for_a_missing_device_ip():
    table = json.dumps(
        {"server_list": [{"host_ip": "127.0.0.1", "device": [{"device_id": 0, "rank_id": r} for r in (0, 1)]}]}
    )
    with ends(2) as members:
        await_status(OK, *link_all(members, table=table))


def test_a_host_that_listens_there_already_goes_on_to_listen_after_unlink():
    with make_end(listen="127.0.0.1:0") as host, make_end() as member:
        port = host.listen_address.port
        comms = link_all([host, member], table=rank_table([0, 1], ports={0: port}))
        await_status(OK, *comms)
        unlink_all(comms)
        eventually(lambda: not is_linked(member, host), "the link has ended")
        must_link(member, host)


def test_the_same_name_may_be_used_again_after_unlink_at_all_members():
    with ends(3) as members:
        name = new_name()
        for _ in range(3):
            comms = link_all(members, name)
            await_status(OK, *comms)
            unlink_all(comms)


def test_a_new_attempt_waits_for_those_that_have_not_unlinked_the_old_one():
    with ends(2) as (host, member):
        name = new_name()
        (_, old), (_, member_old) = link_all([host, member], name)
        await_status(OK, (host, old), (member, member_old))
        info, table = plan_of([host, member])
        member.unlink(member_old)
        new = member.link(name, info, table)
        await_status(FAILED, (host, old))
        eventually(lambda: is_linked(member, host), "the member has come to the host again")
        assert status(member, new) is PREPARING
        host.unlink(old)
        await_status(OK, (host, host.link(name, info, table)), (member, new))


# -- what links are shared with


def test_two_communicators_share_their_link():
    with ends(3) as (one, two, three):
        first, second = link_all([one, two]), link_all([two, one, three])
        await_status(OK, *first, *second)
        unlink_all(first)
        for end, other in itertools.permutations((one, two, three), 2):
            end.check_link_status(other.cluster_id)
        assert [status(*comm) for comm in second] == [OK] * 3
        unlink_all(second)
        for end in (one, two, three):
            eventually(lambda end=end: links_of(end) == set(), "no link is left")


def test_many_communicators_at_once():
    with ends(4) as members:
        groups = [link_all(list(group)) for size in (2, 3, 4) for group in itertools.combinations(members, size)]
        await_status(OK, *itertools.chain(*groups))
        for comms in groups:
            unlink_all(comms)
        for end in members:
            eventually(lambda end=end: links_of(end) == set(), "no link is left")
            assert free_listeners(end)


@pytest.mark.parametrize("dialling", [0, 1])
def test_a_link_of_link_clusters_stays(dialling):
    with ends(2, listen="127.0.0.1:0") as members:
        must_link(members[dialling], members[1 - dialling])
        comms = link_all(members)
        await_status(OK, *comms)
        unlink_all(comms)
        for end, other in itertools.permutations(members, 2):
            end.check_link_status(other.cluster_id)


def test_unlink_clusters_breaks_the_communicator():
    with ends(2) as (host, member):
        comms = link_all([host, member])
        await_status(OK, *comms)
        member.unlink_clusters([remote_info(host.cluster_id, "127.0.0.1", 1)], timeout=LINK_MS)
        await_status(FAILED, *comms)
        unlink_all(comms)


# -- it fails, everywhere


def test_unlink_of_one_member_is_failed_at_the_others_which_stay_linked():
    with ends(3) as (one, two, three):
        comms = link_all([one, two, three])
        await_status(OK, *comms)
        two.unlink(comms[1][1])
        await_status(FAILED, comms[0], comms[2])
        one.check_link_status(three.cluster_id)
        one.unlink(comms[0][1])
        three.unlink(comms[2][1])
        eventually(lambda: links_of(one) | links_of(two) | links_of(three) == set(), "no link is left")


@pytest.mark.parametrize("cancelling", [0, 1])
def test_unlink_while_preparing_cancels_for_all(cancelling):
    with ends(3) as members:
        info, table = plan_of(members)
        name = new_name()
        comms = [(end, end.link(name, info, table)) for end in members[:2]]
        eventually(lambda: is_linked(members[0], members[1]), "two have met")
        canceller, other = comms[cancelling], comms[1 - cancelling]
        eventually(lambda: other[0]._open().communicators._comms[other[1]].known, "they know each other")
        eventually(lambda: canceller[0]._open().communicators._comms[canceller[1]].known, "they know each other")
        canceller[0].unlink(canceller[1])
        await_status(FAILED, other)
        assert "called unlink" in str(other[0].link_failure(canceller[0].cluster_id))
        for end in members[:2]:
            eventually(lambda end=end: links_of(end) == set() and free_listeners(end), "nothing is left")


def test_unlink_before_anybody_else_came_cancels_at_once():
    with ends(2) as members:
        info, table = plan_of(members)
        for end in members:
            comm_id = end.link(new_name(), info, table)
            end.unlink(comm_id)
            with pytest.raises(LLMException, match=str(comm_id)):
                end.query_register_mem_status(comm_id)
            assert free_listeners(end)


@pytest.mark.parametrize(
    "present", [[0, 2], *(pytest.param(p, marks=pytest.mark.slow) for p in ([0, 1], [1, 2], [0], [2]))]
)
def test_time_limit_names_who_is_missing_and_leaves_nothing(present):
    with ExitStack() as stack:
        members = [stack.enter_context(make_limited(1)) for _ in range(3)]
        info, table = plan_of(members)
        name = new_name()
        comms = [(members[i], members[i].link(name, info, table)) for i in present]
        await_status(FAILED, *comms)
        for end, _ in comms:
            assert links_of(end) == set()
            assert free_listeners(end)
        missing = next(end for i, end in enumerate(members) if i not in present)
        texts = [str(end.link_failure(missing.cluster_id)) for end, _ in comms]
        assert any(str(missing.cluster_id) in text for text in texts), texts
        # The failed name is free again, without unlink. (Linking three in a second is not promised on a busy host.)
        for end in members:
            end._open().communicators._total_time_s = 60.0
        await_status(OK, *link_all(members, name))


def test_members_that_were_told_differently_fail_with_the_field():
    with ends(3) as (host, member, third):
        name = new_name()
        table = rank_table([0, 1, 2])
        comms = [
            (host, host.link(name, {host.cluster_id: 0, member.cluster_id: 1}, table)),
            (member, member.link(name, {host.cluster_id: 0, member.cluster_id: 2}, table)),
        ]
        await_status(FAILED, *comms)
        for end, other in ((host, member), (member, host)):
            text = str(end.link_failure(other.cluster_id))
            assert f"cluster_rank_info[{member.cluster_id}] is 2 at cluster {member.cluster_id}, but 1 at" in text
        comms = [
            (host, host.link(name, {host.cluster_id: 0, member.cluster_id: 1}, table)),
            (member, member.link(name, {host.cluster_id: 0, member.cluster_id: 1, third.cluster_id: 2}, table)),
        ]
        await_status(FAILED, *comms)
        assert f"names clusters {sorted(e.cluster_id for e in (host, member, third))}" in str(
            member.link_failure(host.cluster_id)
        )
        assert links_of(host) == links_of(member) == set()


def test_a_stranger_with_the_same_name_does_not_break_a_good_communicator():
    with ends(3) as (host, member, stranger):
        name = new_name()
        comms = link_all([host, member], name)
        await_status(OK, *comms)
        odd = stranger.link(name, {host.cluster_id: 0, stranger.cluster_id: 1}, rank_table([0, 1]))
        await_status(FAILED, (stranger, odd))
        assert "names clusters" in str(stranger.link_failure(host.cluster_id))
        assert [status(*comm) for comm in comms] == [OK, OK]


def test_an_address_that_cannot_be_bound_is_named():
    with ends(2) as members, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        info, _ = plan_of(members)
        comm = (members[0], members[0].link(new_name(), info, rank_table([0, 1], ports={0: port})))
        await_status(FAILED, comm)
        assert f"127.0.0.1:{port}" in str(members[0].link_failure(members[1].cluster_id))


def test_another_cluster_at_the_host_address_fails_at_once():
    with ends(2) as members, make_end(listen="127.0.0.1:0") as wrong:
        info, _ = plan_of(members)
        table = rank_table([0, 1], ports={0: wrong.listen_address.port})
        comm = (members[1], members[1].link(new_name(), info, table))
        await_status(FAILED, comm)
        assert f"this is cluster {wrong.cluster_id}" in str(members[1].link_failure(members[0].cluster_id))


def test_finalize_while_preparing_and_while_ok_is_noticed():
    with ends(2) as (host, member), make_end() as third:
        name = new_name()
        info, table = plan_of([host, member, third])
        waiting = [(end, end.link(name, info, table)) for end in (host, third)]
        good = link_all([host, third])
        await_status(OK, *good)
        third.finalize()
        await_status(FAILED, good[0], waiting[0])
        with pytest.raises(LLMException) as caught:
            third.query_register_mem_status(good[1][1])
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


# -- death


@pytest.mark.slow
def test_a_member_that_dies_fails_the_communicator_and_its_successor_joins_the_next_one():
    with make_end() as one, make_end() as two:
        with Member(77) as third:
            comms = plan_and_link([one, two, third], name := new_name())
            await_status(OK, *comms)
            one.check_link_status(77)
            third.kill()
            await_status(FAILED, *comms[:2])
            one.check_link_status(two.cluster_id)
            unlink_all(comms[:2])
        with Member(77) as again:
            await_status(OK, *plan_and_link([one, two, again], name))


def plan_and_link(members: Sequence[LLMDataDist | Member], name: str) -> list[tuple[LLMDataDist | Member, int]]:
    info, table = plan_of(members)
    return [
        (end, end.do("link", name, info, table) if isinstance(end, Member) else end.link(name, info, table))
        for end in members
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank_of_dead", [0, 1])
def test_a_member_that_dies_while_preparing_fails_the_others_before_the_time_limit(rank_of_dead):
    with make_end() as survivor, make_end() as absent, Member(78) as dead:
        members = [survivor, absent]
        members.insert(rank_of_dead, dead)
        info, table = plan_of(members)
        name = new_name()
        comm = (survivor, survivor.link(name, info, table))
        dead.do("link", name, info, table)
        eventually(lambda: survivor._open().communicators._comms[comm[1]].known, "they know each other")
        dead.kill()
        await_status(FAILED, comm)
        assert links_of(survivor) == set()
        assert free_listeners(survivor)


# -- bad arguments

GOOD_INFO = {1: 0, 2: 1}
GOOD_TABLE = rank_table([0, 1])


def table_with(**device: object) -> str:
    good = {"device_id": "1", "device_ip": "127.0.0.1", "rank_id": "1"}
    entries = [{"device_id": 0, "device_ip": "127.0.0.1", "rank_id": 0}, {**good, **device}]
    return json.dumps({"server_list": [{"device": entries}]})


@pytest.mark.parametrize(
    ("name", "info", "table", "text"),
    [
        ("", GOOD_INFO, GOOD_TABLE, "comm_name='' has 0 characters; use 1 to 127"),
        ("x" * 128, GOOD_INFO, GOOD_TABLE, "comm_name.* has 128 characters"),
        ("\ud800", GOOD_INFO, GOOD_TABLE, "comm_name.*UTF-8"),
        ("x", {}, GOOD_TABLE, "cluster_rank_info={} names 0 clusters; name 2 to 4"),
        ("x", {1: 0}, GOOD_TABLE, "names 1 clusters"),
        ("x", {i: i for i in range(5)}, rank_table(range(5)), "names 5 clusters; name 2 to 4"),
        ("x", {5: 0, 2: 1}, GOOD_TABLE, "lacks this cluster's own id 1"),
        ("x", {1: 1, 2: 0}, GOOD_TABLE, r"ascending order, not \[1, 0\]"),
        ("x", {1: 1, 2: 1}, GOOD_TABLE, r"distinct ranks"),
        ("x", {1: -1, 2: 1}, GOOD_TABLE, r"cluster_rank_info\[1\]=-1"),
        ("x", {1: 0, -2: 1}, GOOD_TABLE, "cluster id -2"),
        ("x", {1: 0, 2**64: 1}, GOOD_TABLE, f"cluster id {2**64}"),
        ("x", GOOD_INFO, "{", "rank_table='{' is not JSON"),
        ("x", GOOD_INFO, "", "rank_table='' is not JSON"),
        ("x", GOOD_INFO, "[" * 100_000, "rank_table=.*is not JSON"),
        ("x", GOOD_INFO, "[1]", r"rank_table=\[1\] must be a JSON object"),
        ("x", GOOD_INFO, "{}", "rank_table.server_list=None must be a list"),
        ("x", GOOD_INFO, '{"server_list": []}', r"rank_table.server_list=\[\]"),
        ("x", GOOD_INFO, '{"server_list": [5]}', r"server_list\[0\]=5"),
        ("x", GOOD_INFO, '{"server_list": [{}]}', r"server_list\[0\].device=None"),
        ("x", GOOD_INFO, '{"server_list": [{"device": [5]}]}', r"server_list\[0\].device\[0\]=5"),
        ("x", GOOD_INFO, rank_table([0, 2]), "no device with rank_id 1"),
        ("x", GOOD_INFO, rank_table([0, 1, 1]), "rank_id=1 is in rank_table twice"),
        ("x", GOOD_INFO, table_with(rank_id="x"), "rank_id='x'"),
        ("x", GOOD_INFO, table_with(rank_id=True), "rank_id=True"),
        ("x", GOOD_INFO, table_with(rank_id=None), "rank_id=None"),
        ("x", GOOD_INFO, table_with(device_id="-1"), "device_id='-1'"),
        ("x", GOOD_INFO, table_with(device_ip="nowhere"), "device_ip='nowhere' is not an IP address"),
        ("x", GOOD_INFO, table_with(device_ip=5), "device_ip=5"),
        ("x", GOOD_INFO, table_with(device_ip=""), "device_ip"),
        ("x", GOOD_INFO, table_with(port=0), "port=0 must be 1..65535"),
        ("x", GOOD_INFO, table_with(port="65536"), "port=65536"),
    ],
)
def test_bad_arguments_are_named(shared_end, name, info, table, text):
    with pytest.raises(LLMException, match=text) as caught:
        shared_end.link(name, info, table)
    assert caught.value.status_code is INVALID


@pytest.mark.parametrize(
    ("name", "info", "table", "text"),
    [
        (None, GOOD_INFO, GOOD_TABLE, "comm_name"),
        ("x", None, GOOD_TABLE, "cluster_rank_info"),
        ("x", [(1, 0), (2, 1)], GOOD_TABLE, "cluster_rank_info"),
        ("x", {"1": 0, 2: 1}, GOOD_TABLE, "cluster_rank_info"),
        ("x", {1: "0", 2: 1}, GOOD_TABLE, r"cluster_rank_info\[1\]"),
        ("x", {1: True, 2: 2}, GOOD_TABLE, r"cluster_rank_info\[1\]"),
        ("x", GOOD_INFO, None, "rank_table"),
        ("x", GOOD_INFO, json.loads(GOOD_TABLE), "rank_table"),
    ],
)
def test_wrong_types_are_named(shared_end, name, info, table, text):
    with pytest.raises(TypeError, match=text):
        shared_end.link(name, info, table)


@pytest.mark.parametrize("method", ["unlink", "query_register_mem_status"])
def test_unknown_ids_are_named(shared_end, method):
    with pytest.raises(LLMException, match="comm_id=99") as caught:
        getattr(shared_end, method)(99)
    assert caught.value.status_code is INVALID
    with pytest.raises(TypeError, match="comm_id"):
        getattr(shared_end, method)("1")


@pytest.fixture(scope="module")
def shared_end():
    with make_end(cluster_id=1) as end:
        yield end


def test_a_name_in_use_is_refused():
    with ends(2) as members:
        name = new_name()
        info, table = plan_of(members)
        comm_id = members[0].link(name, info, table)
        with pytest.raises(LLMException, match=rf"in use by communicator {comm_id}; unlink\({comm_id}\)") as caught:
            members[0].link(name, info, table)
        assert caught.value.status_code is INVALID


def test_calls_before_init_and_after_finalize_are_refused():
    end = LLMDataDist(LLMRole.MIX, 1)
    for code in (LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_ENGINE_FINALIZED):
        for call in (
            lambda: end.link("x", GOOD_INFO, GOOD_TABLE),
            lambda: end.unlink(1),
            lambda: end.query_register_mem_status(1),
        ):
            with pytest.raises(LLMException) as caught:
                call()
            assert caught.value.status_code is code
        end.finalize()


def test_a_plan_knows_whom_to_dial():
    plan = CommunicatorPlan.parse("x", {5: 0, 1: 2, 9: 3}, rank_table([0, 2, 3]), 9)
    assert [m.cluster_id for m in plan.lower] == [5, 1]
    assert [m.cluster_id for m in plan.others] == [5, 1]
    assert plan.host.cluster_id == 5
    assert CommunicatorPlan.parse("x", {5: 0, 1: 2}, rank_table([0, 2]), 5).lower == ()


def test_linked_by_rank_table_is_as_good_as_by_link_clusters():
    with make_end(listen="127.0.0.1:0") as host, make_end() as member:
        comms = link_all([host, member])
        await_status(OK, *comms)
        assert member.link_clusters([cluster_info(host)], timeout=LINK_MS)[1] == [LLMStatusCode.LLM_ALREADY_LINK]
        host.register_service("echo", lambda cluster_id, body: body)
        with pytest.raises(LLMException, match="must not begin") as caught:
            host.register_service("datadist_core.communicator.join", lambda cluster_id, body: body)
        assert caught.value.status_code is INVALID
        assert member.call(host.cluster_id, "echo", b"x", BOUND_S) == b"x"
