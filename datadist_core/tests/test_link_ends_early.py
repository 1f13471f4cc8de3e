# SPDX-License-Identifier: Apache-2.0
"""Links that end while they are made, or while something is acquired for them: nothing stays, nobody waits in vain.

For each resource of a link the orders of its acquisition and of the link's end that are not the usual one, each brought
about on purpose; and, slow, thousands of random ones in two processes that break each other's links.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from datadist_core import (
    BlocksCacheKey,
    Cache,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMStatusCode,
    TransferConfig,
)
from datadist_core.backends import _inline, cma
from datadist_core.backends._cma_identity import process_behind
from datadist_core.backends._shm_client import RegionClient
from datadist_core.backends._tcp_dial import Dialler
from datadist_core.backends.cma import CmaBackend
from datadist_core.backends.loopback import LoopbackBackend
from datadist_core.backends.nixl import NixlBackend
from datadist_core.backends.shm import ShmBackend
from datadist_core.backends.tcp import TcpBackend
from datadist_core.checks import HostPort
from datadist_core.errors import NotYetLinked, PeerLost, RemoteError, TimedOut, Unreachable
from datadist_core.link import manager as link_manager
from datadist_core.link import peer_caches
from datadist_core.link.answers import Answers
from datadist_core.link.fences import Fences
from datadist_core.link.link import Link
from datadist_core.link.probe import BeaconMemory
from datadist_core.link.workers import Workers
from datadist_core.testing._suite_base import check_works
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair
from datadist_core.testing.parallel import WAIT_S, eventually, run_all
from datadist_core.testing.remote import RemoteObject
from datadist_core.testing.soak_end import FIXED, EndSetup, PeerPlace, RemoteEnd, SoakEnd
from datadist_core.tests.core_ends import (
    cluster_info,
    desc,
    filled_cache,
    linked,
    make_end,
    manager,
    must_link,
    remote_info,
)
from datadist_core.tests.optional import not_available
from datadist_core.transfer.backend import Backend
from datadist_core.types import Deadline
from datadist_core.wire import messages as m
from datadist_core.wire.control_loop import ControlLoop

P, D = 1, 2
#: Of a call that is to be ended long before.
LONG_S = 10 * WAIT_S


@pytest.fixture(scope="module")
def p() -> Iterator[RemoteEnd]:
    """In a process of its own, with all the backends of this host."""
    with RemoteEnd(EndSetup(P, 1, "auto", "127.0.0.1:0")) as end:
        yield end


def links_of(end: LLMDataDist) -> Any:
    return end._open().links


def dial(end: LLMDataDist, peer: RemoteEnd, timeout: int = 30_000) -> LLMStatusCode:
    info = remote_info(peer.place.cluster_id, peer.place.host, peer.place.port)
    return end.link_clusters([info], timeout=timeout)[1][0]


# --- the backends: a disconnect while a connect is under way ----------------------------------------------------------


def nothing_of(backend: Backend) -> bool:
    """Whether a backend keeps nothing of any peer."""
    if isinstance(backend, TcpBackend):
        running = backend._running
        assert running is not None
        acceptor = running._acceptor
        assert acceptor is not None
        return not running.links and not acceptor._expected and not running._dialler._dialling
    if isinstance(backend, CmaBackend):
        assert backend._standing is not None
        return not backend._links and len(backend._standing.proofs._free) == cma.NUM_SLOTS
    if isinstance(backend, ShmBackend):
        assert backend._server is not None
        return not backend._links and not backend._server._expected
    return not backend._links  # type: ignore[attr-defined]


@pytest.mark.parametrize("initiator", [True, False], ids=["dials", "accepts"])
@pytest.mark.parametrize("make", [ShmBackend, CmaBackend, TcpBackend, LoopbackBackend])
def test_a_disconnect_ends_a_connect_that_waits(make: Callable[[], Backend], initiator: bool) -> None:
    """Of a link whose other end is gone: it would wait for its peer until the deadline."""
    with BackendPair.in_process(make) as pair:
        backend, identity = pair.a.backend, pair.b.identity()
        raised: list[BaseException | None] = []
        connect = lambda: pair.a.connect(A_KNOWS_B_AS, identity, initiator, os.urandom(16), LONG_S)  # noqa: E731
        thread = threading.Thread(target=lambda: raised.extend(run_all([connect], LONG_S)), daemon=True)
        thread.start()

        def has_ended() -> bool:  # one that comes before the connect is no concern of it
            backend.disconnect(A_KNOWS_B_AS)
            return not thread.is_alive()

        assert eventually(has_ended, WAIT_S), "it still waits"
        assert isinstance(raised[0], Unreachable), repr(raised)
        assert eventually(lambda: nothing_of(backend), WAIT_S)
        pair.link()
        check_works(pair)


def test_cma_a_disconnect_right_before_the_link_is_up_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with BackendPair.in_process(CmaBackend) as pair:
        meet, a = cma._Meeting.meet, pair.a.backend
        taken: list[int] = []
        met_by_b = threading.Event()  # else it waits for what the disconnect takes away

        def meet_and_lose(meeting: Any, peer_id: int) -> Any:
            peer = meet(meeting, peer_id)
            if peer_id == A_KNOWS_B_AS:
                assert met_by_b.wait(WAIT_S)
                a.disconnect(peer_id)
                taken.append(peer_id)
            else:
                met_by_b.set()
            return peer

        monkeypatch.setattr(cma._Meeting, "meet", meet_and_lose)
        of_a, _ = pair.try_connect()
        assert taken, "this shows nothing"
        assert isinstance(of_a, Unreachable)
        assert nothing_of(a)


def test_tcp_a_disconnect_right_before_the_link_is_up_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with BackendPair.in_process(TcpBackend) as pair:
        really, a = Dialler.dial, pair.a.backend

        def dial_and_lose(dialler: Dialler, *args: Any) -> Any:
            wires = really(dialler, *args)
            a.disconnect(A_KNOWS_B_AS)
            return wires

        monkeypatch.setattr(Dialler, "dial", dial_and_lose)
        of_a, _ = pair.try_connect()
        assert isinstance(of_a, Unreachable)
        assert nothing_of(a)
        b = pair.b.backend._running  # type: ignore[attr-defined]
        assert eventually(lambda: all(link.lost for link in b.links.values()), WAIT_S), "the connection is still there"


def test_shm_what_is_attached_while_the_link_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its goodbye the peer gives the memory away: nothing may be mapped, and copied to, any more."""
    with BackendPair.in_process(ShmBackend) as pair:
        pair.connect()
        [link] = pair.a.backend._links.values()  # type: ignore[attr-defined]
        fetch = RegionClient.fetch

        def fetch_and_lose(client: RegionClient, *args: Any) -> int:
            descriptor = fetch(client, *args)
            pair.a.disconnect(A_KNOWS_B_AS)
            return descriptor

        monkeypatch.setattr(RegionClient, "fetch", fetch_and_lose)
        [export] = pair.b.exports()
        with nothing_left_behind():
            with suppress(PeerLost):
                pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
            assert not link._regions._regions
            assert not list(link._files.values())


def test_nixl_what_an_agent_learns_while_the_link_ends_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        pair = BackendPair.in_process(NixlBackend)
    except Unreachable as error:
        not_available(error)
    with pair:
        pair.connect()
        runtime = pair.a.backend._running  # type: ignore[attr-defined]
        mover, begin = runtime._mover, runtime._begin

        def begin_too_late(transfer: Any) -> Any:
            pair.a.disconnect(A_KNOWS_B_AS)
            return begin(transfer)

        monkeypatch.setattr(runtime, "_begin", begin_too_late)
        [export] = pair.b.exports()
        with suppress(LLMException):
            pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        assert eventually(lambda: not mover._loaded, WAIT_S), "the agent still knows the peer"


@pytest.mark.parametrize("make", [ShmBackend, CmaBackend])
def test_a_copy_that_ends_late_is_waited_for(make: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer learns that it is touched no more as soon as that is so, if not by the end of `disconnect`."""
    monkeypatch.setattr(_inline, "_END_TIMEOUT_S", 0.05)
    with BackendPair.in_process(make) as pair:
        pair.link()
        batches = pair.a.backend._batches  # type: ignore[attr-defined]
        entered, may_leave = threading.Event(), threading.Event()

        def copy() -> None:
            running = batches.enter(A_KNOWS_B_AS)
            entered.set()
            may_leave.wait(LONG_S)
            batches.leave(running)

        copying = threading.Thread(target=copy, daemon=True)
        copying.start()
        assert entered.wait(WAIT_S)
        pair.disconnect()
        assert not pair.b.backend.is_fenced(B_KNOWS_A_AS)
        may_leave.set()
        assert eventually(lambda: pair.b.backend.is_fenced(B_KNOWS_A_AS), WAIT_S)
        assert eventually(lambda: nothing_of(pair.a.backend), WAIT_S)


def test_cma_that_is_closed_keeps_nothing_of_peers_that_live_on() -> None:
    with BackendPair.in_process(CmaBackend) as pair:
        pair.link()
        pair.a.backend.close()
        assert not pair.a.backend._leaving  # type: ignore[attr-defined]


@contextmanager
def no_file_left() -> Iterator[None]:
    """For calls of this thread that open none but the one that they fail with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("dial_peer", [RegionClient, process_behind], ids=["shm", "cma"])
def test_without_a_descriptor_left_the_peer_is_unreachable(dial_peer: Callable[[bytes], object]) -> None:
    """Any other error would end the handshake without a word to the other end."""
    with no_file_left(), pytest.raises(Unreachable, match="Too many open files"):
        dial_peer(b"\0datadist-nobody")


# --- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cma", "tcp"])
def test_a_handshake_whose_link_has_ended_holds_no_thread(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else some dozens of peers that die while they dial keep an end from answering for half its time limit."""
    with make_end(backend, "127.0.0.1:0") as listening, make_end(backend) as dialling:
        waits, disconnected, through = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(link_manager, "ACCEPT_TIMEOUT_S", LONG_S)
        greeted, itself = links_of(listening)._greeted, links_of(listening)._engine.backends[backend]
        connect, disconnect = itself.connect, itself.disconnect

        def greeted_and_say(link: Link) -> None:
            greeted(link)
            through.set()

        def disconnect_and_say(peer_id: int) -> None:
            disconnect(peer_id)
            disconnected.set()

        def connect_too_late(peer_id: int, *args: Any, **kwargs: Any) -> None:
            waits.set()
            assert disconnected.wait(WAIT_S)
            connect(peer_id, *args, **kwargs)

        def break_off(peer_id: int, *args: Any, **kwargs: Any) -> None:
            assert waits.wait(WAIT_S)
            [link] = links_of(dialling)._unfinished
            link.close(PeerLost("the link ends now"))
            raise Unreachable("on purpose")

        monkeypatch.setattr(links_of(listening), "_greeted", greeted_and_say)
        monkeypatch.setattr(itself, "disconnect", disconnect_and_say)
        monkeypatch.setattr(itself, "connect", connect_too_late)
        monkeypatch.setattr(links_of(dialling)._engine.backends[backend], "connect", break_off)
        dialling.link_clusters([cluster_info(listening)], timeout=30_000)
        assert through.wait(WAIT_S), "a thread still waits for the peer of a link that has ended"


@pytest.mark.parametrize("who", ["dialling", "listening"])
def test_a_handshake_that_fails_unexpectedly_ends_at_both_ends(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_end("tcp", "127.0.0.1:0") as listening, make_end("tcp") as dialling:
        failing = listening if who == "listening" else dialling

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("on purpose")

        monkeypatch.setattr(links_of(failing)._engine.backends["tcp"], "connect", fail)
        outcome: list[Any] = []

        def link() -> None:
            with suppress(OSError):
                outcome.append(dialling.link_clusters([cluster_info(listening)], timeout=int(1000 * LONG_S)))

        thread = threading.Thread(target=link, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the other end was not told"
        assert eventually(lambda: not links_of(listening)._unfinished, WAIT_S), "the connection is still open"
        if who == "listening":
            assert "on purpose" in str(dialling.link_failure(listening.cluster_id))


def test_a_link_that_is_late_does_not_come_up(p: RemoteEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it was told that it failed."""
    with make_end("tcp") as end:
        handshake = links_of(end)._handshake
        probed_by = handshake._probed_by

        def too_late(link: Link, mine: Any, deadline: Deadline) -> Any:
            theirs = probed_by(link, mine, deadline)
            object.__setattr__(deadline, "at_s", 0.0)
            return theirs

        monkeypatch.setattr(handshake, "_probed_by", too_late)
        assert dial(end, p) is LLMStatusCode.LLM_TIMEOUT
        assert links_of(end).peek(P) is None


@pytest.mark.parametrize("backend", ["cma", "auto"])
def test_a_backend_that_is_not_agreed_on_lets_go_of_the_peer(
    p: RemoteEnd, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the link goes on without it or not, and although no link ends later."""
    with make_end(backend) as end:
        of_cma = links_of(end)._engine.backends["cma"]
        read, met = BeaconMemory.read, list[int]()

        def read_nothing(memory: BeaconMemory, engine: Any, by: Backend, peer_id: int, *args: Any) -> None:
            if by is of_cma:
                assert of_cma._links
                met.append(peer_id)
                raise Unreachable("on purpose")
            read(memory, engine, by, peer_id, *args)

        monkeypatch.setattr(BeaconMemory, "read", read_nothing)
        status = dial(end, p)
        assert met, "this shows nothing"
        assert (status is LLMStatusCode.LLM_SUCCESS) is (backend == "auto")
        assert eventually(lambda: not of_cma._leaving, WAIT_S), "it still watches the peer's process"
        assert eventually(lambda: not links_of(end).fences._remnants, WAIT_S)


def test_who_rejects_a_backend_does_not_keep_the_peer_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer looks for this end when that has tried the backend already, in vain; it would look for 15 s."""
    with make_end("auto") as end, make_end("auto", "127.0.0.1:0") as peer:
        of_cma, of_peer = (links_of(one)._engine.backends["cma"] for one in (end, peer))
        read, meet, rejected = BeaconMemory.read, cma._Meeting.meet, threading.Event()

        def read_nothing(memory: BeaconMemory, engine: Any, by: Backend, *args: Any) -> None:
            if by is of_cma:
                rejected.set()
                raise Unreachable("on purpose")
            read(memory, engine, by, *args)

        def meet_late(meeting: Any, peer_id: int) -> Any:
            if meeting._shown.standing is of_peer._standing:
                assert rejected.wait(WAIT_S)
                eventually(lambda: not of_cma._links, 0.3)
            return meet(meeting, peer_id)

        monkeypatch.setattr(BeaconMemory, "read", read_nothing)
        monkeypatch.setattr(cma._Meeting, "meet", meet_late)
        [status] = end.link_clusters([cluster_info(peer)], timeout=10_000)[1]
        assert status is LLMStatusCode.LLM_SUCCESS
        assert "on purpose" in end.link_info(peer.cluster_id).rejected["cma"]
        assert nothing_of(of_cma)


def test_a_data_path_that_breaks_while_the_link_is_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be up for ever, and good for nothing."""
    with linked("tcp") as (owner, user):
        filled_cache(owner, 1)
        mine, key = manager(user).allocate_blocks_cache(desc()), BlocksCacheKey(owner.cluster_id)
        user.unlink_clusters([cluster_info(owner)], timeout=30_000)

        def after_a_break(end: LLMDataDist) -> Callable[..., None]:
            enter = links_of(end)._handshake._enter

            def enter_late(link: Link, *args: Any) -> None:
                running = links_of(end)._engine.backends["tcp"]._running
                data_path = running.links[link.link_id]
                running._loop.call(lambda: data_path.lose(PeerLost("on purpose")))
                enter(link, *args)

            return enter_late

        with monkeypatch.context() as patch:
            for end in (owner, user):
                patch.setattr(links_of(end)._handshake, "_enter", after_a_break(end))
            must_link(user, owner)
        with pytest.raises(LLMException):
            manager(user).pull_blocks(key, mine, [0], [0])
        assert eventually(lambda: links_of(user).peek(owner.cluster_id) is None), "the link is still up"
        must_link(user, owner)
        manager(user).pull_blocks(key, mine, [0], [0])


def test_what_ends_after_finalize_is_watched_no_more(p: RemoteEnd) -> None:
    """By a handshake's thread that comes to it late."""
    end = make_end("tcp")
    try:
        assert dial(end, p) is LLMStatusCode.LLM_SUCCESS
        links = links_of(end)
        link, processes = links.peek(P), links._processes
        assert processes.num_watched() == 1, "the peer's process cannot be watched here: this shows nothing"
    finally:
        end.finalize()
    processes.watch(link)
    processes.forget(link)
    assert not processes._pidfds


def test_fences_go_on_after_a_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = threading.Event()
    backend = SimpleNamespace(is_fenced=lambda link_id: fenced.is_set())
    link, done, fences = SimpleNamespace(link_id=1, is_idle=True, backends=[backend]), threading.Event(), Fences()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with suppress(RuntimeError):
            fences.when_fenced([link], done.set)  # type: ignore[list-item]
    fences.when_fenced([link], lambda: None)  # type: ignore[list-item]
    fenced.set()
    assert done.wait(WAIT_S)


# --- what a link knows of its peer's caches ---------------------------------------------------------------------------


def regions_of(end: LLMDataDist, peer: LLMDataDist) -> set[int]:
    """Regions of the peer that are mapped, but for that of its beacon."""
    link = links_of(end).peek(peer.cluster_id)
    mapped = links_of(end)._engine.backends["shm"]._links[link.link_id]._regions._regions
    return set(mapped) - {link.peer.beacon.region.region_id}


def test_a_cache_that_is_freed_while_it_is_attached_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked("shm") as (owner, user):
        theirs = manager(owner).allocate_blocks_cache(desc(), BlocksCacheKey(owner.cluster_id))
        mine = manager(user).allocate_blocks_cache(desc())
        known = links_of(user).peek(owner.cluster_id).peer_caches
        attach, freeing = peer_caches.attach_region, list[threading.Thread]()

        def attach_late(*args: Any) -> None:
            freeing.append(threading.Thread(target=manager(owner).deallocate_cache, args=(theirs,), daemon=True))
            freeing[0].start()
            assert eventually(lambda: not known._caches, WAIT_S)
            eventually(lambda: not known._leaving, 0.5)  # it is to wait for us, and does not come to that
            attach(*args)

        monkeypatch.setattr(peer_caches, "attach_region", attach_late)
        with pytest.raises(LLMException):
            manager(user).pull_blocks(BlocksCacheKey(owner.cluster_id), mine, [0], [0])
        freeing[0].join(WAIT_S)
        assert not freeing[0].is_alive()
        assert eventually(lambda: not regions_of(user, owner), WAIT_S), "the freed memory is still mapped"


def test_a_cache_that_is_used_for_longer_than_its_owner_waits_is_detached_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caches, "REVOKE_WAIT_S", 0.05)
    with linked("shm") as (owner, user):
        theirs = manager(owner).allocate_blocks_cache(desc(), BlocksCacheKey(owner.cluster_id))
        link = links_of(user).peek(owner.cluster_id)
        query = m.Lookup(0, "blocks", owner.cluster_id, model_id=0)
        found = link.peer_caches.find(query, Deadline.after(WAIT_S))
        answers: Answers = links_of(owner).peek(user.cluster_id).answers
        with found.cache.hold():
            with pytest.raises((RemoteError, TimedOut)):
                answers.revoke(theirs.cache_id, Deadline.after(WAIT_S))
            assert regions_of(user, owner)
        assert eventually(lambda: not regions_of(user, owner), WAIT_S), "the freed memory is still mapped"
        assert not link.peer_caches._leaving
        assert link.is_up


class BeforeTheSecondLayer(LayerSynchronizer):
    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if layer_index == 1:
            self._act()
        return True


def test_layers_do_not_go_to_memory_that_was_freed_while_there_was_no_link() -> None:
    """Nobody could tell the sender, which knows the addresses from the link before."""
    with linked("shm") as (sender, target):
        source = manager(sender).allocate_blocks_cache(desc(num_tensors=4))
        for tensor in source.numpy():
            tensor[:] = 1
        freed, key = manager(target).allocate_blocks_cache(desc(num_tensors=4)), BlocksCacheKey(target.cluster_id)
        taken: list[Cache] = []

        def free_it_meanwhile() -> None:
            assert eventually(lambda: bool((freed.numpy()[1][3] == 1).all())), "the first layer is there"
            target.unlink_clusters([cluster_info(sender)], timeout=30_000)
            manager(target).deallocate_blocks_cache(freed)
            taken.append(manager(target).allocate_blocks_cache(desc(num_tensors=4), key))
            for tensor in taken[0].numpy():
                tensor[:] = 2
            must_link(target, sender)
            manager(sender).pull_blocks(key, source, [0], [0])  # so that the new link reaches that memory, too

        task = manager(sender).transfer_cache_async(
            source,
            BeforeTheSecondLayer(free_it_meanwhile),
            [TransferConfig(target.cluster_id, freed.tensor_addrs)],
            [3],
            [3],
        )
        results = task.get_results(int(1000 * LONG_S))
        assert taken[0].tensor_addrs == freed.tensor_addrs, "this shows nothing"
        assert all((tensor == 2).all() for tensor in taken[0].numpy()), "a layer was written to freed memory"
        assert results == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST]


# --- connections and threads ------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    loop = ControlLoop("test")
    yield loop
    loop.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        yield listening


def place_of(listening: socket.socket) -> HostPort:
    return HostPort(*listening.getsockname())


def has_been_closed(accepted: socket.socket) -> bool:
    accepted.settimeout(WAIT_S)
    try:
        while accepted.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_a_connection_that_comes_too_late_is_closed(
    loop: ControlLoop, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, but whoever dialled has stopped waiting for it."""
    may_end, dial_really = threading.Event(), loop._dial

    async def dial_late(address: HostPort, local_host: str | None, deadline: Deadline) -> Any:
        channel = await dial_really(address, local_host, Deadline.after(WAIT_S))
        may_end.wait(LONG_S)  # the loop's thread does not get to run
        return channel

    monkeypatch.setattr(loop, "_dial", dial_late)
    with pytest.raises(TimedOut):
        loop.dial(place_of(listener), None, Deadline.after(0))
    accepted, _ = listener.accept()
    with accepted:
        may_end.set()
        assert has_been_closed(accepted)


def test_a_listener_that_comes_too_late_is_closed(loop: ControlLoop) -> None:
    may_end, made = threading.Event(), list[Any]()

    async def listen_late() -> Any:
        made.append(await loop._acceptor.listen(HostPort("127.0.0.1", 0), lambda channel: None))
        may_end.wait(LONG_S)
        return made[0]

    with pytest.raises(TimedOut):
        loop.run(listen_late(), Deadline.after(0.05), loop._acceptor.close_listener)
    may_end.set()
    assert eventually(lambda: not made[0].is_open, WAIT_S)


def test_a_channel_that_is_given_up_before_it_is_there_is_closed(loop: ControlLoop, listener: socket.socket) -> None:
    channel = loop.dial(place_of(listener), None, Deadline.after(WAIT_S))
    again = type(channel)(loop.loop, set())
    again.close(PeerLost("not wanted any more"))

    async def connect() -> None:
        await loop.loop.create_connection(lambda: again, *listener.getsockname())

    ended: list[LLMException] = []
    again.attach(lambda message: None, ended.append)
    loop.run(connect(), Deadline.after(WAIT_S))
    assert eventually(lambda: bool(ended), WAIT_S)
    assert "not wanted any more" in str(ended[0])


def test_connections_end_with_the_loop_and_their_owners_are_told(listener: socket.socket) -> None:
    """Also one whose peer does not read, so that what was sent last waits for ever."""
    loop = ControlLoop("test")
    channel = loop.dial(place_of(listener), None, Deadline.after(WAIT_S))
    ended: list[LLMException] = []
    channel.attach(lambda message: None, ended.append)
    accepted, _ = listener.accept()
    with accepted:
        for _ in range(8):
            channel.send(m.Reply(1, bytes(1 << 20)))
        channel.close(PeerLost("it ends"))
        loop.close()
        assert len(ended) == 1
        assert has_been_closed(accepted)


def test_a_call_of_a_loop_that_stops_ends(loop: ControlLoop) -> None:
    """Also one that has not begun."""
    blocked, may_go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        may_go_on.wait(LONG_S)

    async def never() -> None:
        await asyncio.Event().wait()

    loop.loop.call_soon_threadsafe(block)
    assert blocked.wait(WAIT_S)
    raised: list[BaseException | None] = []
    waiting = threading.Thread(
        target=lambda: raised.extend(run_all([lambda: loop.run(never(), Deadline.after(LONG_S))], LONG_S)), daemon=True
    )
    loop.loop.call_soon_threadsafe(loop.loop.stop)
    waiting.start()
    assert eventually(lambda: bool(loop._running), WAIT_S)
    may_go_on.set()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert type(raised[0]).__name__ == "ClosedError"


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_work_that_finds_no_thread_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told that it will not be done does it in another way."""
    workers, done = Workers(2, "datadist-test"), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError):
            workers.submit(done.append, "refused")
    workers.submit(done.append, "taken").result(WAIT_S)
    workers.submit(done.append, "last").result(WAIT_S)
    assert done == ["taken", "last"]
    workers.shutdown()


def test_a_communicator_keeps_no_link_that_has_ended_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after it was made, and before it is known whose it is."""
    with make_end("tcp", "127.0.0.1:0") as host, make_end("tcp") as member:
        links, table = links_of(member), member._open().communicators
        connect, on_gone, gone = links.connect, links.on_gone, threading.Event()

        def on_gone_and_say(link: Link, error: LLMException) -> None:
            on_gone(link, error)
            gone.set()

        def connect_and_lose(*args: Any) -> Link:
            link: Link = connect(*args)
            link.close(PeerLost("the link ends now"))
            assert gone.wait(WAIT_S)
            return link

        monkeypatch.setattr(links, "on_gone", on_gone_and_say)
        monkeypatch.setattr(links, "connect", connect_and_lose)
        comm = SimpleNamespace(comm_id=1, deadline=Deadline.after(WAIT_S))
        with pytest.raises(NotYetLinked):
            table._link_to(comm, SimpleNamespace(cluster_id=host.cluster_id), host.listen_address)
        assert not table._uses._users
        assert not table._uses._made


# --- all of it at random ----------------------------------------------------------------------------------------------


class RacingEnd(SoakEnd):
    """Dials, moves blocks, unlinks, and breaks connections, most of them in the handshake."""

    def start_racing(self, peer: PeerPlace, seed: int) -> None:
        self._over = threading.Event()
        self._good = 0
        self._wrong: list[BaseException | None] = []
        chosen = [random.Random(f"{seed} {i}") for i in range(4)]
        calls = [
            lambda: self._dial(peer, chosen[0]),
            lambda: self._dial(peer, chosen[1]),
            lambda: self._break(chosen[2]),
            lambda: self._move_blocks(peer, chosen[3]),
        ]
        self._racing = threading.Thread(
            target=lambda: self._wrong.extend(run_all(calls, LONG_S)), name="datadist-soak-races", daemon=True
        )
        self._racing.start()

    def stop_racing(self, peer: PeerPlace) -> tuple[int, list[str]]:
        """How many transfers were good, and what went wrong that may not."""
        self._over.set()
        self._racing.join(LONG_S)
        self.unlink(peer, force=True)
        return self._good, [repr(error) for error in self._wrong if error is not None]

    def kept(self) -> dict[str, int]:
        """What is left of links, by where it is."""
        links = links_of(self._end)
        tables = {
            "unfinished": links._unfinished,
            "replaced": links._table._lost,
            "linked": links._table._links,
            "former": links.fences._former,
            "remnants": links.fences._remnants,
            "watched": links._processes._pidfds,
            "channels": links._loop._channels,
        }
        backends = links._engine.backends
        if "cma" in backends:
            tables |= {"cma": backends["cma"]._links, "cma leaving": backends["cma"]._leaving}
        if "shm" in backends:
            server = backends["shm"]._server
            tables |= {"shm": backends["shm"]._links, "expected": server._expected, "guests": server._guests}
        if "tcp" in backends:
            running = backends["tcp"]._running
            tables |= {"tcp": running.links, "newcomers": running._acceptor._newcomers}
            tables |= {"awaited": running._acceptor._expected, "dialled": running._dialler._dialling}
        return {name: len(table) for name, table in tables.items() if len(table)}

    def _dial(self, peer: PeerPlace, choose: random.Random) -> None:
        while not self._over.wait(choose.choice([0.0, 0.005, 0.05, 0.2])):
            self.link(peer, choose.choice([5, 20, 50, 1000, 5000]))
            if choose.random() < 0.3:
                self.unlink(peer, choose.random() < 0.5)

    def _break(self, choose: random.Random) -> None:
        links = links_of(self._end)
        while not self._over.wait(choose.uniform(0.0, 0.05)):
            with links._lock:
                young = list(links._unfinished)
            link = choose.choice(young or links.links() or [None])
            if link is not None and choose.random() < 0.7:
                link.channel._in_loop(_reset, link.channel)
            elif link is not None:
                link.close(PeerLost("on purpose"))

    def _move_blocks(self, peer: PeerPlace, choose: random.Random) -> None:
        while not self._over.wait(0.002):
            status = self.pull(peer, choose.sample(FIXED, 4), 1.0)
            self._good += status == "LLM_SUCCESS"
            if status.startswith("WRONG"):
                raise AssertionError(status)


def _reset(channel: Any) -> None:
    """As by a firewall."""
    if channel._transport is not None:
        with suppress(OSError):
            sock = channel._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channel._transport.abort()


class Racer(RemoteEnd):
    def __init__(self, setup: EndSetup) -> None:
        self.setup = setup
        self._remote = RemoteObject(RacingEnd, (setup,), LONG_S, forkserver=True)
        self.place = self._remote.call("place")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_links_that_end_at_any_moment_leave_nothing(backend: str) -> None:
    options, chosen = {"heartbeat_interval": 400}, random.Random(backend)
    with ExitStack() as stack:
        ends = [stack.enter_context(Racer(EndSetup(i, i, backend, "127.0.0.1:0", options=options))) for i in (P, D)]
        pairs = [(ends[0], ends[1]), (ends[1], ends[0])]
        for own, peer in pairs:  # what is started once, and stays
            own.link(peer)
            assert own.do("pull", peer.place, list(FIXED[:8])) == "LLM_SUCCESS"
            own.do("unlink", peer.place)
        assert eventually(lambda: not any(end.do("kept") for end in ends))
        before = [end.do("holdings") for end in ends]
        for seed, (own, peer) in enumerate(pairs):
            own.do("start_racing", peer.place, seed)
        for _ in range(6):
            threading.Event().wait(0.4)  # they race meanwhile
            victim = chosen.choice(ends)
            victim.signal(signal.SIGSTOP)
            threading.Event().wait(chosen.choice([0.01, 0.1, 0.3]))
            victim.signal(signal.SIGCONT)
        for own, peer in pairs:
            _, wrong = own.do("stop_racing", peer.place)
            assert not wrong
        assert eventually(lambda: not any(end.do("kept") for end in ends)), [end.do("kept") for end in ends]
        more = lambda: [end.do("holdings").beyond(at_first) for end, at_first in zip(ends, before, strict=True)]  # noqa: E731
        assert eventually(lambda: not any(more())), more()
        ends[0].link(ends[1])
        assert ends[0].do("pull", ends[1].place, list(FIXED[:8])) == "LLM_SUCCESS"
