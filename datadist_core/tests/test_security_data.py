# SPDX-License-Identifier: Apache-2.0
"""Who gets a tcp data connection, what others can do to the end that listens, and what can be read on the way."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from datadist_core import BlocksCacheKey, LLMDataDist, LLMRole
from datadist_core.backends import (
    _tcp_accept,
    _tcp_frames,
    _tcp_options,
    _tcp_serve,
)
from datadist_core.backends._tcp_address import Endpoint, decode_identity, encode_identity
from datadist_core.backends._tcp_frames import Hello, Kind, encode_frame, encode_header, encode_hello, encode_proof
from datadist_core.backends._tcp_memory import GridMemory, Layout, MemoryStream
from datadist_core.backends._tcp_proof import LinkKey, Meeting
from datadist_core.backends._tcp_tls import Tls, TlsStream
from datadist_core.backends.tcp import TcpBackend
from datadist_core.errors import LLMException, ProtocolError, RemoteError, TimedOut, Unreachable
from datadist_core.memory.grid import Grid
from datadist_core.security import Security
from datadist_core.testing.end import LocalEnd
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair
from datadist_core.testing.parallel import WAIT_S, eventually, require_all, run_all
from datadist_core.tests.core_ends import config, filled_cache, manager, must_link, plain_cache
from datadist_core.tests.pki import tls
from datadist_core.tests.test_tcp import RAW, RawPeer, check_pair_works, request_body
from datadist_core.tests.tls_backend import TlsTcpBackend, make_files, tls_files
from datadist_core.transfer.plan import Op

ITEM_BYTES = 512
SOON_S = 0.3


@pytest.fixture
def end() -> Iterator[LocalEnd]:
    with contextlib.closing(LocalEnd(TcpBackend())) as end:
        yield end


@pytest.fixture
def linked() -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(TcpBackend) as pair:
        pair.link()
        yield pair


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another authority."""
    return make_files(tmp_path_factory.mktemp("others"))


class Tap:
    """Stands between the end that dials and the one that listens, and writes down what passes."""

    def __init__(self, identity: bytes) -> None:
        real = decode_identity(identity)
        self._target = (real.endpoints[0].host, real.endpoints[0].port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        here = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.identity = encode_identity(real.instance, [here], real.tls)
        self.from_dialler, self.from_listener = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._relay, name="datadist-test-tap", daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        with self._listener.accept()[0] as near, socket.create_connection(self._target, WAIT_S) as far:
            ways = {near: (far, self.from_dialler), far: (near, self.from_listener)}
            while True:
                for sock in select.select(list(ways), [], [], WAIT_S)[0]:
                    other, record = ways[sock]
                    try:
                        data = sock.recv(1 << 16)
                        record += data
                        other.sendall(data)
                    except OSError:
                        return
                    if not data:
                        return

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT_S)


def tapped_link(a: LocalEnd, b: LocalEnd, token: bytes) -> Tap:
    tap = Tap(b.identity())
    ours = a.identity()
    require_all(
        [
            lambda: a.connect(A_KNOWS_B_AS, tap.identity, True, token, WAIT_S),
            lambda: b.connect(B_KNOWS_A_AS, ours, False, token, WAIT_S),
        ]
    )
    return tap


def read_across(a: LocalEnd, b: LocalEnd, data: bytes) -> None:
    """A batch whose bytes are `data`."""
    pair = BackendPair(a, b)
    pair.attach()
    mine, theirs = a.add_grid(1, len(data)), b.add_grid(1, len(data))
    b.view(theirs.region_id)[theirs.offset_bytes : theirs.end_bytes] = memoryview(data)
    assert a.transfer(pair.batch(Op.READ, mine, theirs, [0], [0])).error is None
    assert bytes(a.view(mine.region_id)[mine.offset_bytes : mine.end_bytes]) == data


class TestProofs:
    def test_the_token_is_never_sent(self) -> None:
        token = os.urandom(16)
        with BackendPair.in_process(TcpBackend) as pair:
            tap = tapped_link(pair.a, pair.b, token)
            read_across(pair.a, pair.b, b"so much can be read by who listens" * 10)
            assert b"can be read" in tap.from_listener, "the tap sees what there is"
            assert len(tap.from_dialler) > 100
            assert token not in tap.from_dialler
            assert token not in tap.from_listener
        tap.close()

    @pytest.mark.parametrize("fresh", [True, False], ids=["fresh-nonces", "without-the-defence"])
    def test_a_replay_is_of_no_use(self, monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
        """The dialling end's whole side of a conversation, said again to an end that waits for that very token."""
        if not fresh:
            monkeypatch.setattr(_tcp_accept, "new_nonce", lambda: b"n" * 16)
        token = os.urandom(16)
        with BackendPair.in_process(TcpBackend) as pair:
            tap = tapped_link(pair.a, pair.b, token)
            recorded = bytes(tap.from_dialler)
            pair.disconnect()
            tap.close()
            thief = RawPeer(pair.b, os.urandom(16))
            with contextlib.closing(thief.sock):
                thief.send(recorded)
                ours = pair.a.identity()
                (failure,) = run_all([lambda: pair.b.connect(RAW, ours, False, token, SOON_S)])
                assert isinstance(failure, TimedOut) if fresh else failure is None
                assert thief.receive()[0] is Kind.HEARD
                if not fresh:
                    assert thief.receive()[0] is Kind.WELCOME

    @pytest.mark.parametrize("roles", [True, False], ids=["roles", "without-the-defence"])
    def test_a_reflected_proof_is_not_believed(
        self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch, roles: bool
    ) -> None:
        """Whoever listens knows nothing, and sends the dialling end's own proof back to it."""
        if not roles:
            prove = Meeting.prove
            monkeypatch.setattr(Meeting, "prove", lambda self, key, kind: prove(self, key, Kind.PROOF))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            identity = encode_identity(os.urandom(16), [Endpoint("127.0.0.1", listener.getsockname()[1])])

            def reflect() -> None:
                with listener.accept()[0] as sock:
                    hello = _tcp_frames.decode_hello(receive(sock, Kind.HELLO))
                    sock.sendall(_tcp_frames.encode_heard(hello.nonce))
                    sock.sendall(encode_frame(Kind.WELCOME, 0, receive(sock, Kind.PROOF)))

            dial, _ = run_all([lambda: dial_once(end, identity), reflect])
        assert (dial is None) == (not roles)
        if roles:
            assert "does not know the link's token" in str(dial)

    @pytest.mark.parametrize("field", ["key", "nonce", "stream"])
    def test_a_proof_of_something_else_is_not_believed(
        self, end: LocalEnd, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is kept for a link to come, like that of a peer that is early, and goes after a while."""
        monkeypatch.setattr(_tcp_accept, "UNMATCHED_TIMEOUT_S", SOON_S)
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            hello = Hello(peer.identity.instance, os.urandom(16), 0, 1)
            peer.send(encode_hello(hello))
            meeting = Meeting(hello, _tcp_frames.decode_heard(peer.receive()[2]))
            key = LinkKey(peer.token)
            proof = {
                "key": lambda: meeting.prove(LinkKey(os.urandom(16)), Kind.PROOF),
                "nonce": lambda: replace(meeting, nonce=os.urandom(16)).prove(key, Kind.PROOF),
                "stream": lambda: Meeting(msgspec.structs.replace(hello, num_streams=2), meeting.nonce).prove(
                    key, Kind.PROOF
                ),
            }[field]()
            peer.send(encode_proof(Kind.PROOF, proof))
            with pytest.raises(TimedOut):
                end.connect(RAW, encode_identity(os.urandom(16)), False, peer.token, SOON_S)
            assert peer.is_closed()

    @pytest.mark.parametrize(
        "data",
        [
            encode_frame(Kind.READ, 1, b"\x94\xc4\x00\xc4\x00\xc4\x00\xc2"),
            encode_proof(Kind.PROOF, b"p" * 32),
            encode_frame(Kind.PROOF, 0, b"\x91\xc4\x01x"),
        ],
        ids=["read", "second-proof", "short-proof"],
    )
    def test_nothing_but_the_next_step_is_understood(self, end: LocalEnd, data: bytes) -> None:
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            peer.prove()
            peer.send(data)
            assert peer.is_closed()

    def test_another_version_is_named(self, end: LocalEnd) -> None:
        """Here and there, by both numbers; also that of an identity of version 2, which had fewer fields."""
        old = msgspec.msgpack.encode([2, os.urandom(16), [["127.0.0.1", 1]]])
        with pytest.raises(ProtocolError, match="version 2, this one 3"):
            end.connect(RAW, old, True, os.urandom(16), SOON_S)
        with pytest.raises(ProtocolError, match="version 2, this one 3"):
            end.connect(RAW, old, False, os.urandom(16), SOON_S)
        with pytest.raises(ProtocolError, match="version 2, this one 3"):
            _tcp_frames.decode_header(struct.pack("!2sBBIQ", b"DT", 2, Kind.HELLO, 10, 0))


def receive(sock: socket.socket, kind: Kind) -> bytes:
    """The body of the next frame."""
    header = _tcp_frames.decode_header(sock.recv(_tcp_frames.HEADER_BYTES, socket.MSG_WAITALL))
    assert header.kind is kind
    return sock.recv(header.body_bytes, socket.MSG_WAITALL)


def dial_once(end: LocalEnd, identity: bytes) -> None:
    end.connect(RAW, identity, True, os.urandom(16), WAIT_S)


class TestTls:
    def test_nothing_can_be_read_on_the_way(self, files: Path) -> None:
        with tls_pair(files, files) as pair:
            tap = tapped_link(pair.a, pair.b, os.urandom(16))
            read_across(pair.a, pair.b, b"nothing can be read by who listens" * 1000)
            assert b"can be read" not in tap.from_listener
            assert len(tap.from_listener) > 34_000
        tap.close()

    @pytest.mark.parametrize("dialler_has_it", [True, False])
    def test_one_end_alone(self, files: Path, dialler_has_it: bool) -> None:
        """Both are told, before any byte is exchanged."""
        ends = [LocalEnd(TlsTcpBackend(), options={"files": str(files)}), LocalEnd(TcpBackend())]
        with BackendPair(*(ends if dialler_has_it else ends[::-1])) as pair:
            for failure in pair.try_connect():
                assert isinstance(failure, Unreachable)
                assert "TLS for tcp data is on at" in str(failure) or "TLS for tcp data is off at" in str(failure)

    @pytest.mark.parametrize("stranger_dials", [True, False])
    def test_a_certificate_of_another_authority(self, files: Path, other_files: Path, stranger_dials: bool) -> None:
        mine, theirs = (other_files, files) if stranger_dials else (files, other_files)
        with tls_pair(mine, theirs) as pair:
            with pytest.raises(Unreachable, match=r"certificate|unknown ca|refused the link"):
                pair.a.connect(A_KNOWS_B_AS, pair.b.identity(), True, os.urandom(16), WAIT_S)
            assert not pair.b.backend._running.links

    def test_strangers_are_closed_and_links_live_on(self, files: Path) -> None:
        with tls_pair(files, files) as pair:
            pair.link()
            for data in (b"GET / HTTP/1.1\r\n\r\n", encode_hello(Hello(b"i" * 16, b"n" * 16, 0, 1)), b"\x16\x03\x01"):
                stranger = RawPeer(pair.b)
                with contextlib.closing(stranger.sock):
                    stranger.send(data)
                    stranger.sock.shutdown(socket.SHUT_WR)
                    assert stranger.is_closed()
            check_pair_works(pair)

    @pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 777, 1 << 20])
    def test_any_ranges_in_any_steps(self, files: Path, budget: int) -> None:
        """Large ranges and small ones, wherever the socket or a record ends: the bytes come out in wire order."""
        rng = np.random.default_rng(budget)
        size = 6_000 if budget == 1 else 600_000
        source, target = rng.integers(0, 256, size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
        edge = size // 3
        grids = [Grid(1, 1, 0, 250, 200, edge // 250), Grid(2, 1, edge, edge, edge, 2)]
        items, parts = np.array([1, 0]), ((3, 50), (100, 99))

        def both(grids: list[Grid], parts: tuple[tuple[int, int], ...]) -> list[MemoryStream]:
            places = [tuple(GridMemory(grid, array.ctypes.data) for grid in grids) for array in (source, target)]
            return [MemoryStream(Layout(place, items, parts), True) for place in places]

        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        near.setblocking(False)
        far.setblocking(False)
        contexts = Tls.of(Security(tls=tls_files(files)))
        assert contexts is not None
        sending, receiving = (
            TlsStream(near, contexts.client, server_side=False),
            TlsStream(far, contexts.server, server_side=True),
        )
        with contextlib.closing(sending), contextlib.closing(receiving):
            for sender, receiver in (both(grids, parts), both(grids[1:], ((0, edge),))):
                while receiver.remaining:
                    sender.send(sending, budget)
                    sending.flush()
                    receiver.receive(receiving, budget)
                assert sender.remaining == 0
                assert not sending.unflushed
            sending.close()
            with pytest.raises(OSError, match=r"closed|reset"):
                both(grids, parts)[1].receive(receiving, budget)
        expected = np.zeros_like(source)
        for grid in grids:
            for item in (0, 1):
                for offset, num_bytes in parts:
                    at = grid.offset_bytes + item * grid.stride_bytes + offset
                    expected[at : at + num_bytes] = source[at : at + num_bytes]
        expected[edge : 3 * edge] = source[edge : 3 * edge]
        assert np.array_equal(target, expected)

    def test_all_the_way(self, files: Path) -> None:
        """What the option `security` says reaches the data path, with secret and TLS both on."""
        option = f'{{"secret_file": "{files}/datadist.secret", {tls(files)}}}'
        with secured_end(option, "127.0.0.1:0") as prompt, secured_end(option) as decoder:
            must_link(decoder, prompt)
            cache, mine = filled_cache(prompt, 1), plain_cache(decoder, 2)
            manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 0), mine, [3, 1], [0, 2])
            assert np.array_equal(mine.numpy()[0][[0, 2]], cache.numpy()[0][[3, 1]])
            for end in (prompt, decoder):
                (link,) = end._open().engine.backends["tcp"]._running.links.values()
                assert link.encrypted

    def test_leaves_nothing_behind(self, files: Path) -> None:
        with nothing_left_behind():
            _link_once(files)


@contextlib.contextmanager
def secured_end(option: str, listen: str | None = None) -> Iterator[LLMDataDist]:
    settings = config("tcp", listen)
    settings.security = option
    with LLMDataDist(LLMRole.MIX, 7000 + (listen is not None)) as end:
        end.init(settings)
        yield end


def _link_once(files: Path) -> None:
    with tls_pair(files, files) as pair:
        pair.link()
        check_pair_works(pair)


def tls_pair(mine: Path, theirs: Path) -> BackendPair[LocalEnd]:
    a = LocalEnd(TlsTcpBackend(), options={"files": str(mine)})
    return BackendPair(a, LocalEnd(TlsTcpBackend(), options={"files": str(theirs)}))


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def speaks_garbage(peer: RawPeer) -> None:
    with contextlib.suppress(OSError):
        peer.send(b"\x00\xff" * 100)


def begins_a_frame(peer: RawPeer) -> None:
    with contextlib.suppress(OSError):
        peer.send(encode_header(Kind.HELLO, 0, 100))


def proves_nothing(peer: RawPeer) -> None:
    """It has seen the instance somewhere, and says so much that only a proof is missing."""
    with contextlib.suppress(OSError, AssertionError):
        peer.prove()


def is_let_in(end: LocalEnd) -> bool:
    """Whether a newcomer is linked before its little time is over, which a busy machine may let pass."""
    newcomer = RawPeer(end)
    with contextlib.closing(newcomer.sock):
        try:
            newcomer.link(end)
        except (AssertionError, OSError, LLMException):
            return False
        finally:
            end.disconnect(RAW)
    return True


class TestLimits:
    @pytest.mark.parametrize(
        "stranger", [speaks_garbage, pytest.param(begins_a_frame, marks=pytest.mark.slow), proves_nothing]
    )
    def test_two_hundred_strangers(
        self, linked: BackendPair[LocalEnd], monkeypatch: pytest.MonkeyPatch, stranger: Callable[[RawPeer], None]
    ) -> None:
        """Links go on, new ones are made while the strangers are there, and what they took comes back."""
        monkeypatch.setattr(_tcp_accept, "HELLO_TIMEOUT_S", 1.5)
        monkeypatch.setattr(_tcp_accept, "UNMATCHED_TIMEOUT_S", 1.0)
        before = num_open_files()
        strangers: list[RawPeer] = []
        try:
            for _ in range(200):
                strangers.append(RawPeer(linked.b))
                stranger(strangers[-1])
            check_pair_works(linked)
            assert eventually(lambda: is_let_in(linked.b), 4 * WAIT_S)
            held = num_open_files() - before - len(strangers)
            assert held <= _tcp_accept.MAX_STRANGERS + 2 or stranger is proves_nothing
            for peer in strangers:
                assert peer.is_closed(), "every stranger is shown out in time"
        finally:
            for peer in strangers:
                peer.sock.close()
        assert eventually(lambda: num_open_files() <= before)
        check_pair_works(linked)

    def test_who_has_named_this_listener_is_not_kept_out_by_who_has_not(
        self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An early peer, whose link is not expected here yet, stays while strangers come and go."""
        monkeypatch.setattr(_tcp_accept, "MAX_STRANGERS", 4)
        early = RawPeer(end)
        with contextlib.closing(early.sock), contextlib.ExitStack() as stack:
            meeting = early.prove()
            strangers = [stack.enter_context(contextlib.closing(RawPeer(end).sock)) for _ in range(20)]
            assert eventually(lambda: _is_at_end(strangers[0]))
            end.connect(RAW, encode_identity(os.urandom(16)), False, early.token, WAIT_S)
            early.await_welcome(meeting)

    def test_slow_speech_wins_no_time(self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        """One byte at a time of a HELLO that is all right."""
        monkeypatch.setattr(_tcp_accept, "HELLO_TIMEOUT_S", SOON_S)
        peer = RawPeer(end)
        hello = encode_hello(Hello(peer.identity.instance, os.urandom(16), 0, 1))
        with contextlib.closing(peer.sock):
            num_sent = 0
            with contextlib.suppress(OSError):
                while num_sent < len(hello) - 1:
                    peer.send(hello[num_sent : num_sent + 1])
                    num_sent += 1
                    if _is_at_end(peer.sock, 0.1):
                        break
            assert 0 < num_sent < len(hello) - 1

    def test_a_peer_that_never_reads(self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        """It asks for much and takes nothing: the link is given up, and the memory it was lent comes back."""
        monkeypatch.setattr(_tcp_options, "_UNANSWERED_MS", 500)
        grid = end.add_grid(1, 2 << 20)
        lent = threading.Semaphore(0)
        serve_grid = end._serve_grid

        @contextlib.contextmanager
        def counted(grid_id: int, op: Op) -> Iterator[Any]:
            with serve_grid(grid_id, op) as served:
                yield served
            lent.release()

        running = end.backend._running
        running._context = replace(running._context, serve_grid=counted)
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.link(end)
            for request_id in range(8):
                body = request_body([grid], [(0, 2 << 20)], [0])
                peer.send(encode_frame(Kind.READ, request_id, body))
            assert eventually(lambda: RAW in end.lost_peers)
            for _ in range(8):
                assert lent.acquire(timeout=WAIT_S)

    def test_open_requests_hold_a_bounded_number_of_ranges(
        self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a few bytes stand for is worked out for a few requests at a time; the others wait, and are answered."""
        monkeypatch.setattr(_tcp_serve, "MAX_RANGES", 8)
        grid = end.add_grid(4, ITEM_BYTES)
        end.serving_allowed.clear()
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            peer.link(end)
            body = request_body([grid], [(0, 1)], [0, 1, 2, 3])
            for request_id in range(10):
                peer.send(encode_frame(Kind.READ, request_id, body))
            peer.send(encode_frame(Kind.CANCEL, 9))
            assert peer.receive()[:2] == (Kind.END, 9)
            for _ in range(2):
                assert end.serving_waits.acquire(timeout=WAIT_S)
            assert not end.serving_waits.acquire(timeout=0.1), "a third one was prepared"
            end.serving_allowed.set()
            assert {peer.receive()[:2] for _ in range(9)} == {(Kind.PULLED, i) for i in range(9)}

    def test_open_requests_hold_a_bounded_number_of_bytes(self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tcp_serve, "MAX_ASKED_BYTES", 1000)
        grid = end.add_grid(4, ITEM_BYTES)
        end.serving_allowed.clear()
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            peer.link(end)
            large = request_body([grid], [(0, 1)], [0] * 200)
            peer.send(encode_frame(Kind.READ, 1, large) + encode_frame(Kind.READ, 2, large))
            kind, request_id, body = peer.receive()
            assert (kind, request_id) == (Kind.END, 2)
            assert isinstance(_tcp_frames.decode_end(body), RemoteError)
            end.serving_allowed.set()
            assert peer.receive()[:2] == (Kind.PULLED, 1)
            peer.send(encode_frame(Kind.READ, 3, large))
            assert peer.receive()[:2] == (Kind.PULLED, 3)


def _is_at_end(sock: socket.socket, timeout_s: float = 0.0) -> bool:
    if not select.select([sock], [], [], timeout_s)[0]:
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:
        return True


class TestListening:
    @pytest.mark.parametrize(
        ("host", "bound_at"),
        [
            (None, set()),
            ("127.0.0.1", {"127.0.0.1"}),
            ("127.0.0.3", {"127.0.0.3"}),
            ("localhost", {"127.0.0.1", "::1"}),
            ("::1", {"::1"}),
            ("*", {"0.0.0.0"}),
        ],
    )
    def test_only_the_configured_host_is_bound(self, host: str | None, bound_at: set[str]) -> None:
        """As the kernel has it."""
        before = listening_here()
        with contextlib.closing(LocalEnd(TcpBackend(), listen_host=host)) as end:
            found = {address for address, _ in listening_here() - before}
            assert found <= bound_at
            assert bool(found) == bool(bound_at)
            ports = {endpoint.port for endpoint in decode_identity(end.identity()).endpoints}
            assert ports == {port for _, port in listening_here() - before}
        assert listening_here() == before


def listening_here() -> set[tuple[str, int]]:
    """Address and port of every listening socket of this process, from /proc."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                packed = struct.pack(f"={len(words)}I", *words)
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
