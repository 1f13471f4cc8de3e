# SPDX-License-Identifier: Apache-2.0
"""A peer that is gone is noticed, however it went; one that is only busy stays; one that comes back is linked again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datadist_core import BlocksCacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from datadist_core.errors import PeerLost
from datadist_core.link import parting
from datadist_core.link.heartbeat import MISSED_HEARTBEATS, known_heartbeat
from datadist_core.link.link import Link
from datadist_core.link.manager import LinkManager
from datadist_core.link.process import open_pidfd, this_process
from datadist_core.link.state import LinkState
from datadist_core.testing.lossy_network import ADDRESSES, LossyNetwork, why_unavailable
from datadist_core.testing.parallel import WAIT_S, eventually
from datadist_core.testing.ports import free_port
from datadist_core.testing.remote import RemoteObject
from datadist_core.tests.core_ends import LINK_MS, cluster_info, filled_cache, make_end, manager, must_link, remote_info
from datadist_core.tests.live_end import hold_interpreter, live_end, started, started_in, stopped
from datadist_core.wire.messages import Process

P, D = 51, 52
#: What is promised on one host, and some time for a host that is busy, or stands still for seconds.
ONE_HOST_S, SLACK_S = 2.0, 20.0
#: Three of these are far more than that: what is noticed in time was not noticed by them.
LONG_MS = 60_000
QUICK_MS = 200


class Losses:
    """When and why this end lost links."""

    def __init__(self, end: LLMDataDist) -> None:
        self.seen: list[tuple[float, int, LLMException]] = []
        end.on_link_lost(lambda cluster, error: self.seen.append((time.monotonic(), cluster, error)))

    def after(self, moment_s: float) -> float:
        """How long after that moment the first came."""
        assert eventually(lambda: bool(self.seen), 60)
        return self.seen[0][0] - moment_s


@contextlib.contextmanager
def linked_to(remote: RemoteObject, heartbeat_ms: int = 4000) -> Iterator[tuple[LLMDataDist, Losses]]:
    with live_end(D, None, heartbeat_ms) as end:
        link(end, remote)
        yield end, Losses(end)


def link(end: LLMDataDist, remote: RemoteObject) -> None:
    overall, _ = end.link_clusters([remote_info(P, *remote.call("address"))], timeout=LINK_MS)
    assert overall is LLMStatusCode.LLM_SUCCESS, end.link_failure(P)


def sigkill(pid: int) -> float:
    """When that was."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def links_of(end: LLMDataDist) -> set[int]:
    return {link.peer.cluster_id for link in end._open().links.links()}


# -- death


@pytest.mark.parametrize(
    "fork", ["fork_in_c", pytest.param("fork", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)]
)
def test_death_is_noticed_although_a_child_that_was_forked_lives_on(fork: str) -> None:
    """The child holds the connections; the heartbeats are far too long to be what notices."""
    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(started(P, "127.0.0.1:0", LONG_MS))
        end, losses = stack.enter_context(linked_to(remote, LONG_MS))
        if fork:
            stack.callback(os.kill, remote.call(fork), signal.SIGKILL)
        assert losses.after(sigkill(remote.pid)) < ONE_HOST_S + SLACK_S
        assert links_of(end) == set()


@pytest.mark.slow
def test_a_restarted_end_gets_its_port_although_a_child_of_the_dead_one_lives_on() -> None:
    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(started(P, f"127.0.0.1:{free_port()}"))
        host, port = remote.call("address")
        end, losses = stack.enter_context(linked_to(remote))
        stack.callback(os.kill, remote.call("fork"), signal.SIGKILL)
        losses.after(sigkill(remote.pid))
        again = stack.enter_context(started(P, f"{host}:{port}"))
        link(end, again)
        end.check_link_status(P)


def test_which_process_a_peer_is() -> None:
    mine = this_process()
    assert mine is not None
    assert open_pidfd(mine) is None, "it is this process"
    assert open_pidfd(Process(b"\0datadist-process-nobody", 1)) is None
    assert open_pidfd(Process(b"/tmp/anything", 1)) is None


_TELL = """
import sys
from datadist_core.link.process import this_process
print(this_process().door.hex(), this_process().started, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("other_namespace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_is_watched_also_in_another_process_namespace(other_namespace: bool) -> None:
    """Such as two containers of one pod. What numbers it has there does not matter."""
    if other_namespace and os.geteuid() != 0:
        pytest.skip("needs root")
    command = [
        *(["unshare", "--pid", "--fork", "--kill-child"] if other_namespace else []),
        sys.executable,
        "-c",
        _TELL,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            door, started_at = child.stdout.readline().split()
            pidfd = open_pidfd(Process(bytes.fromhex(door), int(started_at)))
            assert pidfd is not None
            try:
                assert select.select([pidfd], [], [], 0.05)[0] == []
                child.kill()
                assert select.select([pidfd], [], [], 10)[0] == [pidfd]
            finally:
                os.close(pidfd)
        finally:
            child.kill()


def test_one_descriptor_per_process_however_many_links() -> None:
    with make_end(listen="127.0.0.1:0") as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(make_end()) for _ in range(3)]
        for client in clients:
            must_link(client, server)
            assert client._open().links._processes.num_watched() == 0, "it would watch itself"


# -- silence


@pytest.mark.slow
def test_a_stopped_peer_is_given_up_after_three_heartbeats_and_linked_again_when_it_goes_on() -> None:
    with started(P, "127.0.0.1:0", QUICK_MS) as remote, linked_to(remote, QUICK_MS) as (end, losses):
        with stopped(remote):
            taken_s = losses.after(time.monotonic())
            assert taken_s < MISSED_HEARTBEATS * QUICK_MS / 1000 + SLACK_S
            assert "silent" in str(losses.seen[0][2])
            assert links_of(end) == set()
        assert eventually(lambda: remote.call("links") == set())
        link(end, remote)
        end.check_link_status(P)


@pytest.mark.slow
def test_a_peer_that_hangs_is_given_up_as_well(tmp_path: Path) -> None:
    with started(P, "127.0.0.1:0", QUICK_MS) as remote, linked_to(remote, QUICK_MS) as (end, losses):
        lock = tmp_path / "lock"
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            hanging = threading.Thread(target=remote.call, args=("hang", str(lock)), daemon=True)
            hanging.start()
            assert losses.after(time.monotonic()) < MISSED_HEARTBEATS * QUICK_MS / 1000 + SLACK_S
        hanging.join(WAIT_S)
        assert eventually(lambda: remote.call("links") == set())
        link(end, remote)


@pytest.mark.slow
def test_that_this_end_hangs_says_nothing_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of this process runs for four heartbeats: what the peer has sent meanwhile waits to be read.

    Whoever goes by the clock gives the peer up when it next looks. The heartbeats are so long that the peer, which
    need not get to run at once, has time for a sign of life meanwhile.
    """
    beat_s, looks = 1.0, threading.Semaphore(0)
    with (
        started(P, "127.0.0.1:0", int(beat_s * 1000)) as remote,
        linked_to(remote, int(beat_s * 1000)) as (end, losses),
    ):
        remote.call("be_patient")
        heartbeats = end._open().links._heartbeats
        look = heartbeats._look_at_all
        monkeypatch.setattr(heartbeats, "_look_at_all", lambda now_s: (look(now_s), looks.release()))
        hold_interpreter((MISSED_HEARTBEATS + 1) * beat_s)
        for _ in range(3):
            assert looks.acquire(timeout=WAIT_S)
        assert losses.seen == []
        end.check_link_status(P)


def test_of_two_heartbeats_the_longer_one_counts() -> None:
    with live_end(P, "127.0.0.1:0", 700) as server, live_end(D, None, 100) as client:
        must_link(client, server)
        for end, peer in ((server, D), (client, P)):
            made = end._open().links.get(peer)
            heartbeats = end._open().links._heartbeats
            assert heartbeats._beat_s(made) == 0.7
            most_s = (heartbeats._most_silent_looks(made) + 1) * heartbeats.look_s
            assert most_s <= MISSED_HEARTBEATS * 0.7 + 1e-9
    assert known_heartbeat(float("nan"), 4.0) == known_heartbeat(1e9, 4.0) == known_heartbeat(-1.0, 4.0) == 4.0


@pytest.mark.slow
def test_half_open_connections_are_noticed_within_three_heartbeats_at_both_ends() -> None:
    """Packets vanish, nobody is told; then the cable is back, and the two link again within 10 s."""
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("DATADIST_REQUIRE_ALL") == "1":
            pytest.fail(f"{reason}, and this run must skip nothing")
        pytest.skip(reason)
    beat_s = 0.5
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(LossyNetwork(delay_s=0.005))
        names = network.namespaces
        p = stack.enter_context(started_in(names[0], P, f"{ADDRESSES[0]}:0", 500, "tcp"))
        d = stack.enter_context(started_in(names[1], D, None, 500, "tcp"))
        assert d.call("link", P, *p.call("address"))[0] == "LLM_SUCCESS"
        network.cut()
        cut_s = time.monotonic()
        for end in (p, d):
            assert eventually(lambda end=end: end.call("losses"), 60)
            taken_s = end.call("losses")[0][0] - cut_s
            assert taken_s < MISSED_HEARTBEATS * beat_s + SLACK_S
        network.heal()
        healed_s = time.monotonic()
        assert eventually(lambda: d.call("link", P, *p.call("address"), 2000)[0] == "LLM_SUCCESS", 60)
        assert time.monotonic() - healed_s < 10 + SLACK_S


# -- two processes with one cluster id


def end_with(cluster_id: int) -> LLMDataDist:
    return make_end(cluster_id=cluster_id, role=LLMRole.MIX)


def test_who_was_replaced_does_not_take_the_link_back() -> None:
    """Two processes that both think to be cluster 52 do not go on replacing one another."""
    with make_end(listen="127.0.0.1:0") as server, end_with(D) as first:
        must_link(first, server)
        lost = Losses(first)
        with end_with(D) as second:
            must_link(second, server)
            assert lost.after(0) > 0
            overall, _ = first.link_clusters([cluster_info(server)], timeout=LINK_MS)
            assert overall is LLMStatusCode.LLM_LINK_FAILED
            assert "another process has taken the place" in str(first.link_failure(server.cluster_id))
            second.check_link_status(server.cluster_id)
            server.check_link_status(D)
        assert eventually(lambda: links_of(server) == set())
        must_link(first, server)  # its successor is gone: it is as good as any
        first.check_link_status(server.cluster_id)


@pytest.mark.slow
def test_a_decoder_that_was_stopped_and_replaced_comes_back() -> None:
    with live_end(P, "127.0.0.1:0", LONG_MS) as server, started(D, None, LONG_MS) as old:
        address = server.listen_address
        assert address is not None
        there = (P, address.host, address.port)
        assert old.call("link", *there)[0] == "LLM_SUCCESS"
        with stopped(old), started(D, None, LONG_MS) as new:
            assert new.call("link", *there)[0] == "LLM_SUCCESS"
            os.kill(old.pid, signal.SIGCONT)
            assert eventually(lambda: old.call("links") == set())
            status, reason = old.call("link", *there)
            assert status == "LLM_LINK_FAILED"
            assert "another process has taken the place" in reason
            assert new.call("links") == {P}
            assert new.call("losses") == []


def test_a_loss_is_told_also_if_the_peer_is_back_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies and its successor links at once: between noticing the one and telling of it comes the other."""
    linked_anew = threading.Event()
    disconnect = LinkManager._disconnect

    def disconnect_late(self: LinkManager, link: Link) -> None:
        linked_anew.wait(WAIT_S)
        disconnect(self, link)

    with make_end(listen="127.0.0.1:0") as server, started(D, None, LONG_MS) as first:
        address = server.listen_address
        assert address is not None
        assert first.call("link", server.cluster_id, address.host, address.port)[0] == "LLM_SUCCESS"
        lost = Losses(server)
        monkeypatch.setattr(server._open().links, "_disconnect", disconnect_late.__get__(server._open().links))
        old = server._open().links.get(D)
        os.kill(first.pid, signal.SIGKILL)
        assert eventually(lambda: old.state is LinkState.DOWN)
        with end_with(D) as second:
            must_link(second, server)
            linked_anew.set()
            assert lost.after(0) > 0
            assert [cluster_id for _, cluster_id, _ in lost.seen] == [D]
            server.check_link_status(D)


# -- the end in order


@pytest.mark.parametrize("peer_closes_first", [False, True])
def test_peers_of_an_end_that_is_finalized_are_told_so(
    monkeypatch: pytest.MonkeyPatch, peer_closes_first: bool
) -> None:
    close = Link.close

    def close_late(self: Link, reason: LLMException | None = None) -> None:
        assert not isinstance(reason, PeerLost) or eventually(lambda: self._down_error is not None)
        close(self, reason)

    if peer_closes_first:
        monkeypatch.setattr(Link, "close", close_late)
    with make_end(listen="127.0.0.1:0") as server:
        client = make_end()
        must_link(client, server)
        lost = Losses(server)
        client.finalize()
        assert lost.after(0) > 0
        _, cluster_id, error = lost.seen[0]
        assert cluster_id == client.cluster_id
        assert "was finalized" in str(error)
        with pytest.raises(LLMException, match="was finalized") as caught:
            server.check_link_status(client.cluster_id)
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.parametrize("whose", ["own", "peer's"])
def test_finalize_lets_running_transfers_end(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    for name in ("FINALIZE_WAIT_S", "UNLINK_WAIT_S"):
        monkeypatch.setattr(parting, name, 2 * WAIT_S)  # however long this test does not get to run
    with make_end(listen="127.0.0.1:0") as server, make_end() as client:
        must_link(client, server)
        end, other = (client, server) if whose == "own" else (server, client)
        running = client._open().links.get(server.cluster_id)
        with running.transferring():
            ending = threading.Thread(target=end.finalize, daemon=True)
            ending.start()
            ending.join(0.2)
            assert ending.is_alive()
            assert other._open().links.links()
        ending.join(WAIT_S)
        assert not ending.is_alive()


@pytest.mark.parametrize("backend", ["loopback", "shm", "tcp"])
def test_a_pull_during_finalize_says_that_it_was_finalized(backend: str) -> None:
    """And never that there is no link, or that the peer is lost: the user has closed this end."""
    with make_end(backend, "127.0.0.1:0") as server, make_end(backend) as client:
        filled_cache(server, 1)
        target = filled_cache(client, 2)
        must_link(client, server)
        key, cache_manager = BlocksCacheKey(server.cluster_id), manager(client)
        cache_manager.pull_blocks(key, target, [0], [0])
        failures: list[LLMException] = []

        def pull_until_it_fails(blocks: list[int]) -> None:
            try:
                while True:
                    cache_manager.pull_blocks(key, target, blocks, blocks)
            except LLMException as error:
                failures.append(error)

        pullers = [threading.Thread(target=pull_until_it_fails, args=([i],), daemon=True) for i in range(4)]
        for puller in pullers:
            puller.start()
        client.finalize()
        for puller in pullers:
            puller.join(WAIT_S)
        assert {error.status_code for error in failures} == {LLMStatusCode.LLM_ENGINE_FINALIZED}, failures
        assert len(failures) == 4


@pytest.mark.slow
def test_finalize_does_not_wait_for_ever_for_a_peer_that_is_stopped() -> None:
    with started(P, "127.0.0.1:0", LONG_MS) as remote, linked_to(remote, LONG_MS) as (end, _), stopped(remote):
        started_s = time.monotonic()
        end.finalize()
        assert time.monotonic() - started_s < parting.FINALIZE_WAIT_S + ONE_HOST_S + SLACK_S
