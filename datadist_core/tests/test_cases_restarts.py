# SPDX-License-Identifier: Apache-2.0
"""Ends that are killed and come back, networks that come back, ports that are taken. Real processes, real SIGKILL.

Every test ends with the same question: do the survivors hold what they held at the start, and do they still serve?
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from datadist_core.errors import PeerLost
from datadist_core.link.link import Link
from datadist_core.testing.parallel import eventually
from datadist_core.testing.ports import free_port
from datadist_core.testing.remote import RemoteObject
from datadist_core.testing.soak_end import FIXED, EndSetup, Holdings, PeerPlace, RemoteEnd
from datadist_core.tests.core_ends import LINK_MS, make_end, remote_info

P, D = 1, 2
HEARTBEAT = {"heartbeat_interval": 10_000}
"""Nobody is given up here because a busy machine does not let it run: what ends here closes its connections."""
BUSY_S = 20.0
"""What a busy machine may add to what is promised."""
FAILS = {"LLM_LINK_FAILED", "LLM_NOT_YET_LINK", "LLM_TIMEOUT"}
StartEnd = Callable[..., RemoteEnd]


@pytest.fixture
def start() -> Iterator[StartEnd]:
    """Starts ends and kills them all, also when the test fails."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(RemoteEnd(EndSetup(*args, options=HEARTBEAT, **kwargs)))


def again(stack_start: StartEnd, end: RemoteEnd) -> RemoteEnd:
    """Another process with the same id and content, at the same port."""
    setup, place = end.setup, end.place
    return stack_start(setup.cluster_id, setup.seed, setup.backend, f"{place.host}:{place.port}")


def must_serve(own: RemoteEnd, peer: RemoteEnd) -> None:
    """All fixed blocks, byte by byte, and a push."""
    assert own.do("pull", peer.place, list(FIXED)) == "LLM_SUCCESS"
    assert own.do("push", peer.place, 20) == "LLM_SUCCESS"


def must_hold_no_more(end: RemoteEnd, before: Holdings) -> None:
    assert eventually(lambda: not end.do("holdings").beyond(before), 60), end.do("holdings").beyond(before)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "backend"), [("P", "tcp"), ("D", "auto")])
def test_b15_b17_ten_kills_and_restarts_at_the_same_port(start: StartEnd, backend: str, victim: str) -> None:
    """B15: P is killed, D lives on. B17: D is killed, P lives on and keeps nothing of it."""
    mortal, survivor = start(P, 1, backend, f"127.0.0.1:{free_port()}"), start(D, 2, backend, "127.0.0.1:0")
    dialler, listener = (survivor, mortal) if victim == "P" else (mortal, survivor)
    dialler.link(listener)
    survivor.do("start_stream", mortal.place, 3, 2.0)
    threading.Event().wait(0.3)
    survivor.do("stop_stream", 50.0)
    must_serve(survivor, mortal)
    must_serve(mortal, survivor)
    before, pid = survivor.do("holdings"), survivor.pid
    for cycle in range(10):
        during = cycle % 2 == 0
        if during:
            survivor.do("start_stream", mortal.place, 3, 2.0)
            threading.Event().wait(random.uniform(0.0, 0.2))
        mortal.kill()
        mortal = again(start, mortal)
        if during:
            counts = survivor.do("stop_stream", 50.0)
            assert counts.wrong == []
            assert set(counts.failed) <= FAILS, counts
        dialler = survivor if victim == "P" else mortal
        dialler.link(mortal if victim == "P" else survivor)
        must_serve(survivor, mortal)
        must_serve(mortal, survivor)
    assert survivor.pid == pid
    must_hold_no_more(survivor, before)


@pytest.mark.slow
def test_b17_a_killed_peer_is_forgotten_without_a_new_one(start: StartEnd) -> None:
    survivor = start(P, 1, "auto", "127.0.0.1:0")
    before = None
    for _ in range(3):
        mortal = start(D, 2, "auto")
        mortal.link(survivor)
        must_serve(mortal, survivor)
        mortal.kill()
        assert eventually(lambda: survivor.do("holdings").num_links == 0)
        before = before or survivor.do("holdings")  # after the first one all threads that stay have been started
    must_hold_no_more(survivor, before)


def test_b17_a_link_that_ends_while_it_is_entered_leaves_no_descriptor(
    start: StartEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's process is watched from a moment on when the link is down already, and was forgotten already."""
    p = start(P, 1, "tcp", "127.0.0.1:0")
    with make_end("tcp") as end:
        processes = end._open().links._processes
        watch, forget, forgotten = processes.watch, processes.forget, threading.Event()

        def forget_and_say(link: Link) -> None:
            forget(link)
            forgotten.set()

        def watch_too_late(link: Link) -> None:
            link.close(PeerLost("the link ends now"))
            assert forgotten.wait(30)
            watch(link)
            assert processes.num_watched() == 1, "the peer's process cannot be watched here: this shows nothing"

        monkeypatch.setattr(processes, "forget", forget_and_say)
        monkeypatch.setattr(processes, "watch", watch_too_late)
        end.link_clusters([remote_info(P, p.place.host, p.place.port)], timeout=LINK_MS)
        assert eventually(lambda: processes.num_watched() == 0)
        assert eventually(lambda: not processes._pidfds)


@pytest.mark.parametrize("dialler", ["this end", "the peer"])
def test_b17_a_link_that_ends_while_its_backends_are_connected_leaves_nothing(
    start: StartEnd, monkeypatch: pytest.MonkeyPatch, dialler: str
) -> None:
    """The end of the link takes it out of the backends, and only then does one of them get its connection."""
    p = start(P, 1, "cma", "127.0.0.1:0")
    with make_end("cma", "127.0.0.1:0") as end:
        links = end._open().links
        cma = links._engine.backends["cma"]
        connect, disconnect = cma.connect, cma.disconnect
        disconnected, tried = threading.Event(), threading.Event()

        def disconnect_and_say(peer_id: int) -> None:
            disconnect(peer_id)
            disconnected.set()

        def connect_too_late(peer_id: int, *args: Any, **kwargs: Any) -> None:
            disconnected.clear()
            [link] = list(links._unfinished)
            link.close(PeerLost("the link ends now"))
            assert disconnected.wait(30)
            try:
                connect(peer_id, *args, **kwargs)  # it is up for a moment, or does not come up any more
            finally:
                tried.set()

        monkeypatch.setattr(cma, "disconnect", disconnect_and_say)
        monkeypatch.setattr(cma, "connect", connect_too_late)
        place = PeerPlace(end.cluster_id, "127.0.0.1", end.listen_address.port, 0)
        if dialler == "this end":
            end.link_clusters([remote_info(P, p.place.host, p.place.port)], timeout=LINK_MS)
        else:
            p.do("link", place)
        assert tried.wait(30)
        assert eventually(lambda: not cma._links)


# --- a network that goes and comes back -----------------------------------------------------------------------------


RELAY = "127.0.0.2"


class Relay:
    """A TCP relay for some ports, at another address, whose connections can all be cut. Lives in a RemoteObject."""

    def __init__(self, ports: list[int]) -> None:
        self._servers = [socket.create_server((RELAY, port)) for port in ports]
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._cut = False
        threading.Thread(target=self._run, daemon=True).start()

    def cut(self, cut: bool) -> int:
        """Cut every connection, and each new one at once, until it is healed. How many were cut."""
        with self._lock:
            self._cut = cut
            if not cut:
                return 0
            cut_now, self._pairs = self._pairs, {}
        for sock in cut_now:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return len(cut_now)

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([*self._servers, *self._pairs], [], [], 0.05)
            for sock in readable:
                if sock in self._servers:
                    self._admit(sock)
                else:
                    self._forward(sock)

    def _admit(self, server: socket.socket) -> None:
        near = server.accept()[0]
        if self._cut:
            near.close()
            return
        far = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        with self._lock:
            self._pairs |= {near: far, far: near}

    def _forward(self, sock: socket.socket) -> None:
        other = self._pairs.get(sock)
        data = b""
        with suppress(OSError):
            data = sock.recv(1 << 16)
            if data and other is not None:
                other.sendall(data)
                return
        with self._lock:
            self._pairs.pop(sock, None)
            if other is not None:
                self._pairs.pop(other, None)
                other.close()
        sock.close()


@pytest.mark.slow
def test_b18_a_cut_of_three_seconds_is_over_by_itself(start: StartEnd) -> None:
    """Nothing is restarted, and nobody is shut out: transfers work again within 10 s of the network's return."""
    data_port = free_port(RELAY)
    tcp = json.dumps({"tcp": {"port": data_port, "advertise_host": RELAY}})
    with ExitStack() as stack:
        p = stack.enter_context(
            RemoteEnd(
                EndSetup(P, 1, "tcp", f"127.0.0.1:{free_port()}", options={**HEARTBEAT, "global_resource_config": tcp})
            )
        )
        relay = RemoteObject(Relay, ([p.place.port, data_port],), 30.0, forkserver=True)
        stack.callback(relay.kill)
        d = start(D, 2, "tcp")
        through = PeerPlace(P, RELAY, p.place.port, 1)
        assert d.do("link", through)[0] == "LLM_SUCCESS"
        assert d.do("pull", through, list(FIXED)) == d.do("push", through, 20) == "LLM_SUCCESS"
        d.do("start_stream", through, 2, 2.0)
        threading.Event().wait(0.2)
        before = d.do("holdings")
        assert relay.call("cut", True) >= 4, "control and data, two ends each"
        threading.Event().wait(3.0)
        assert not d.do("is_linked", through)
        relay.call("cut", False)
        assert eventually(lambda: d.do("is_linked", through), 10 + BUSY_S)
        counts = d.do("stop_stream", 50.0)
        assert counts.wrong == []
        assert d.do("pull", through, list(FIXED)) == "LLM_SUCCESS"
        assert counts.good > 0
        must_hold_no_more(d, replace(before, num_transfers=0))
