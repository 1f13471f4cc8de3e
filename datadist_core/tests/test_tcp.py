# SPDX-License-Identifier: Apache-2.0
"""What is particular to the tcp backend. That it keeps the contract, the conformance suite shows (test_backends.py)."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from datadist_core.backends import _tcp_accept, _tcp_frames, _tcp_loop, _tcp_memory, _tcp_requests
from datadist_core.backends._tcp_address import Endpoint, decode_identity, encode_identity
from datadist_core.backends._tcp_frames import (
    Hello,
    Kind,
    decode_header,
    decode_heard,
    decode_proof,
    encode_frame,
    encode_header,
    encode_hello,
    encode_proof,
)
from datadist_core.backends._tcp_loop import IoLoop
from datadist_core.backends._tcp_memory import GridMemory, Layout, MemoryStream
from datadist_core.backends._tcp_parts import split
from datadist_core.backends._tcp_proof import LinkKey, Meeting
from datadist_core.backends.tcp import TcpBackend
from datadist_core.errors import (
    CacheNotExist,
    Cancelled,
    ClosedError,
    LLMException,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    TimedOut,
    Unreachable,
)
from datadist_core.memory.grid import Grid
from datadist_core.testing.conformance import BackendConformance, BytesSuite
from datadist_core.testing.end import Export, LocalEnd
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair, make_batch
from datadist_core.testing.parallel import WAIT_S, eventually, require_all, run_all
from datadist_core.transfer.backend import Completion, CompletionStatus
from datadist_core.transfer.plan import Batch, Op, Slice
from datadist_core.types import Deadline

FACTORY = "datadist_core.backends.tcp:TcpBackend"
RAW = 13
"""What an end knows a `RawPeer` as."""
THEIR_REGION = 5
ITEM_BYTES = 512
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@pytest.mark.slow
class TestSeveralStreams(BackendConformance):
    factory = FACTORY
    options: ClassVar[dict[str, Any]] = {"streams": 3, "sndbuf": 1 << 16, "rcvbuf": 1 << 16}


class TestWithoutNativeLibrary(BytesSuite):
    factory = FACTORY
    two_processes = False

    @pytest.fixture(autouse=True)
    def without_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tcp_memory, "_native", lambda: None)


class RawPeer:
    """A peer that speaks the protocol by hand, and therefore can break it."""

    def __init__(self, end: LocalEnd, token: bytes | None = None) -> None:
        self.identity = decode_identity(end.identity())
        self.token = token or os.urandom(16)
        self.sock = socket.create_connection((self.identity.endpoints[0].host, self.identity.endpoints[0].port), WAIT_S)

    def link(self, end: LocalEnd) -> None:
        """Become the peer RAW of `end`, with one region attached there."""
        ours = encode_identity(os.urandom(16))
        require_all([lambda: end.connect(RAW, ours, False, self.token, WAIT_S), self.say_hello])
        end.attach(RAW, Export(THEIR_REGION, 1 << 20, b""), WAIT_S)

    def say_hello(self) -> None:
        self.await_welcome(self.prove())

    def prove(self, stream: int = 0, num_streams: int = 1) -> Meeting:
        """All that the dialling end has to say."""
        hello = Hello(self.identity.instance, os.urandom(16), stream, num_streams)
        self.send(encode_hello(hello))
        kind, _, body = self.receive()
        assert kind is Kind.HEARD
        meeting = Meeting(hello, decode_heard(body))
        self.send(encode_proof(Kind.PROOF, meeting.prove(LinkKey(self.token), Kind.PROOF)))
        return meeting

    def await_welcome(self, meeting: Meeting) -> None:
        kind, _, body = self.receive()
        assert kind is Kind.WELCOME
        assert meeting.is_proved(LinkKey(self.token), Kind.WELCOME, decode_proof(body))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> tuple[Kind, int, bytes]:
        header = decode_header(self._exactly(_tcp_frames.HEADER_BYTES))
        return header.kind, header.request_id, self._exactly(header.body_bytes)

    def is_closed(self) -> bool:
        """Whether the other end closed the connection; waits for it."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            assert part, "the connection was closed"
            data += part
        return bytes(data)


@pytest.fixture
def end() -> Iterator[LocalEnd]:
    end = LocalEnd(TcpBackend())
    try:
        yield end
    finally:
        end.close()
    assert not end.log.pending()


@pytest.fixture
def raw(end: LocalEnd) -> Iterator[RawPeer]:
    """Linked to `end`."""
    peer = RawPeer(end)
    with contextlib.closing(peer.sock):
        peer.link(end)
        yield peer


@pytest.fixture
def linked() -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(TcpBackend) as pair:
        pair.link()
        yield pair


def their_grid(num_items: int = 8) -> Grid:
    return Grid(1, THEIR_REGION, 0, ITEM_BYTES, ITEM_BYTES, num_items)


def raw_batch(op: Op, mine: Grid, num_items: int = 8, timeout_s: float = WAIT_S) -> Batch:
    items = list(range(num_items))
    batch = make_batch(RAW, op, mine, their_grid(num_items), items, items)
    return replace(batch, deadline=Deadline.after(timeout_s))


def check_pair_works(pair: BackendPair[LocalEnd]) -> None:
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    pair.b.fill(1)
    assert pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 2], [3, 1])).error is None


def failed_with(completion: Completion, error: type[LLMException]) -> bool:
    return completion.status is CompletionStatus.FAILED and isinstance(completion.error, error)


class TestHostilePeers:
    """Garbage ends the connection it came on and nothing else."""

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x00" * 64,
            struct.pack("!2sBBIQ", b"DT", 99, Kind.HELLO, 10, 0),
            struct.pack("!2sBBIQ", b"DT", 1, 200, 10, 0),
            encode_header(Kind.HELLO, 0, 1 << 20),
            encode_header(Kind.READ, 0, 1 << 20),
            encode_frame(Kind.HELLO, 0, b"\xc1\xc1"),
            encode_frame(Kind.HELLO, 0, msgspec.msgpack.encode([b"", b"", 0, 1])),
            encode_frame(Kind.CANCEL, 1),
            encode_frame(Kind.WELCOME),
            encode_hello(Hello(b"i" * 16, b"t" * 16, 0, 1)),
        ],
        ids=["http", "zeros", "version", "kind", "long", "read", "msgpack", "sizes", "cancel", "welcome", "instance"],
    )
    def test_before_the_link(self, linked: BackendPair[LocalEnd], data: bytes) -> None:
        peer = RawPeer(linked.b)
        with contextlib.closing(peer.sock):
            peer.send(data)
            assert peer.is_closed()
        check_pair_works(linked)

    @pytest.mark.parametrize("streams", [(0, 0), (3, 3), (0, 17), (-1, 2)])
    def test_hello_for_an_impossible_stream(self, end: LocalEnd, streams: tuple[int, int]) -> None:
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            peer.send(encode_hello(Hello(peer.identity.instance, peer.token, *streams)))
            assert peer.is_closed()

    @pytest.mark.parametrize(
        "data",
        [
            b"garbage" * 10,
            encode_frame(Kind.HELLO, 0, b"x"),
            encode_header(Kind.PULLED, 1, _tcp_frames.MAX_DATA_BYTES + 1),
            encode_header(Kind.READ, 1, 1 << 30),
            encode_frame(Kind.READ, 1, b"\xff\xff"),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 8, b"\0" * 16, b"\0" * 4, False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"123", b"", b"", False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 40, b"\0" * 16, b"", False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 40, b"\0" * 24, b"\0" * 4, False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 40, b"\0" * 16, b"\0" * 5, False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 40 * 5000, b"\0" * 16, b"\0" * 4, False])),
            encode_frame(Kind.READ, 1, msgspec.msgpack.encode([b"\0" * 40, b"\0" * 16 * 4096, b"\0" * 8192, False])),
            encode_frame(Kind.PULLED, 1, b"x"),
            encode_frame(Kind.PUSHED, 1, b"x"),
            encode_header(Kind.PUSHED, 1, 0),
            encode_frame(Kind.GRANT, 1),
            encode_frame(Kind.END, 1, msgspec.msgpack.encode([0, ""])),
        ],
    )
    def test_on_a_link(self, end: LocalEnd, raw: RawPeer, data: bytes) -> None:
        before = end.snapshot(end.region.region_id)
        raw.send(data)
        assert raw.is_closed()
        assert eventually(lambda: RAW in end.lost_peers)
        assert isinstance(end.lost_peers[RAW], PeerLost)
        assert isinstance(end.lost_peers[RAW].__cause__, ProtocolError)
        assert np.array_equal(end.snapshot(end.region.region_id), before)

    def test_other_links_live_on(self, linked: BackendPair[LocalEnd]) -> None:
        peer = RawPeer(linked.b)
        with contextlib.closing(peer.sock):
            peer.link(linked.b)
            peer.send(b"garbage" * 10)
            assert peer.is_closed()
        check_pair_works(linked)

    def test_more_requests_than_allowed(self, end: LocalEnd, raw: RawPeer) -> None:
        grid = end.add_grid(4, ITEM_BYTES)
        end.serving_allowed.clear()
        body = request_body([grid], [(0, ITEM_BYTES)], [1])
        for request_id in range(_tcp_frames.MAX_OPEN_REQUESTS + 1):
            raw.send(encode_frame(Kind.READ, request_id, body))
        assert raw.is_closed()
        end.serving_allowed.set()

    def test_more_bytes_than_asked_for(self, end: LocalEnd, raw: RawPeer) -> None:
        mine = end.add_grid(8, ITEM_BYTES)
        before = end.snapshot(mine.region_id)
        batch_id = end.submit(raw_batch(Op.READ, mine))
        _, request_id, _ = raw.receive()
        raw.send(encode_frame(Kind.PULLED, request_id, b"x" * (8 * ITEM_BYTES + 1)))
        assert failed_with(end.log.wait(batch_id), PeerLost)
        assert np.array_equal(end.snapshot(mine.region_id), before)

    @pytest.mark.parametrize(
        ("grid_offset", "items", "slices", "error"),
        [
            (1000, [1], [(0, ITEM_BYTES)], CacheNotExist),
            (0, [4], [(0, ITEM_BYTES)], ParamInvalid),
            (0, [1], [(1, ITEM_BYTES)], ParamInvalid),
            (0, [1], [(-1, 4)], ParamInvalid),
            (0, [1], [(0, 0)], ParamInvalid),
            (0, [1], [((1 << 63) - 1, (1 << 63) - 1)], ParamInvalid),
        ],
    )
    @both_ops
    def test_refusal_keeps_the_link(
        self, end: LocalEnd, raw: RawPeer, op: Op, grid_offset: int, items: list[int], slices: Any, error: Any
    ) -> None:
        grid = end.add_grid(4, ITEM_BYTES)
        kind = Kind.READ if op is Op.READ else Kind.WRITE
        raw.send(
            encode_frame(kind, 7, request_body([replace(grid, grid_id=grid.grid_id + grid_offset)], slices, items))
        )
        kind, request_id, body = raw.receive()
        assert (kind, request_id) == (Kind.END, 7)
        assert isinstance(_tcp_frames.decode_end(body), error)
        raw.send(encode_frame(Kind.READ, 8, request_body([grid], [(0, ITEM_BYTES)], [3])))
        assert raw.receive()[:2] == (Kind.PULLED, 8)

    def test_connections_without_a_link_are_limited(self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tcp_accept, "MAX_STRANGERS", 2)
        peers = [RawPeer(end) for _ in range(3)]
        assert peers[0].is_closed(), "the oldest has to go"
        for peer in peers:
            peer.sock.close()

    def test_connections_without_a_link_expire(self, end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_tcp_accept, "UNMATCHED_TIMEOUT_S", 0.05)
        unknown = RawPeer(end)
        with contextlib.closing(unknown.sock):
            unknown.prove()
            assert unknown.is_closed()
        monkeypatch.setattr(_tcp_accept, "HELLO_TIMEOUT_S", 0.05)
        silent = RawPeer(end)
        with contextlib.closing(silent.sock):
            assert silent.is_closed()

    def test_leave_nothing_behind(self) -> None:
        with nothing_left_behind():
            _meet_hostile_peers()


def _meet_hostile_peers() -> None:
    end = LocalEnd(TcpBackend())
    silent, peer = RawPeer(end), RawPeer(end)
    with contextlib.closing(silent.sock), contextlib.closing(peer.sock):
        peer.link(end)
        peer.send(b"garbage" * 10)
        assert peer.is_closed()
        end.close()
        assert silent.is_closed()


def request_body(grids: Sequence[Grid], slices: Sequence[tuple[int, int]], items: Sequence[int]) -> bytes:
    divided = [(grid.grid_id, *grid.division) for grid in grids]
    arrays = [np.array(values, dtype="<i8").tobytes() for values in (divided, slices, items)]
    return msgspec.msgpack.encode([*arrays, True])


class TestEndings:
    """What the memory may see after a batch was ended early: nothing."""

    def test_half_received_read_is_cancelled(self, end: LocalEnd, raw: RawPeer) -> None:
        mine, total = end.add_grid(8, ITEM_BYTES), 8 * ITEM_BYTES
        batch_id = end.submit(raw_batch(Op.READ, mine))
        _, request_id, _ = raw.receive()
        raw.send(encode_header(Kind.PULLED, request_id, total) + b"\x11" * (total // 2))
        view = end.view(mine.region_id)
        last = mine.offset_bytes + total // 2 - 1
        assert eventually(lambda: view[last] == 0x11)

        end.backend.cancel(batch_id)
        completion = end.log.wait(batch_id)
        assert completion.status is CompletionStatus.CANCELLED
        assert isinstance(completion.error, Cancelled)
        view[:] = 77
        raw.send(b"\x22" * (total // 2))
        assert raw.receive()[:2] == (Kind.CANCEL, request_id)

        self._check_next_read(end, raw)
        assert (view[: mine.end_bytes] == 77).all(), "a cancelled READ wrote after its completion"

    def test_deadline_of_a_read(self, end: LocalEnd, raw: RawPeer) -> None:
        batch_id = end.submit(raw_batch(Op.READ, end.add_grid(8, ITEM_BYTES), timeout_s=0.5))
        assert failed_with(end.log.wait(batch_id), TimedOut)
        assert raw.receive()[0] is Kind.READ
        kind, request_id, _ = raw.receive()
        assert kind is Kind.CANCEL
        raw.send(_tcp_frames.encode_end(request_id, Cancelled("as you wish")))
        self._check_next_read(end, raw)

    def test_cancelled_write_waits_for_the_peer(self, end: LocalEnd, raw: RawPeer) -> None:
        """It may go on writing until it says otherwise."""
        batch_id = end.submit(raw_batch(Op.WRITE, end.add_grid(8, ITEM_BYTES)))
        _, request_id, _ = raw.receive()
        end.backend.cancel(batch_id)
        assert raw.receive()[:2] == (Kind.CANCEL, request_id)
        assert end.log.pending() == [batch_id]
        raw.send(_tcp_frames.encode_end(request_id, Cancelled("as you wish")))
        assert end.log.wait(batch_id).status is CompletionStatus.CANCELLED
        self._check_next_read(end, raw)

    def test_cancelled_write_to_a_silent_peer(
        self, end: LocalEnd, raw: RawPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The link is given up: nothing else proves that the peer stops."""
        monkeypatch.setattr(_tcp_requests, "CANCEL_GRACE_S", 0.05)
        mine = end.add_grid(8, ITEM_BYTES)
        other_id = end.submit(raw_batch(Op.READ, mine))
        batch_id = end.submit(raw_batch(Op.WRITE, mine, timeout_s=0.5))
        assert failed_with(end.log.wait(batch_id), TimedOut)
        assert failed_with(end.log.wait(other_id), PeerLost)
        assert eventually(lambda: RAW in end.lost_peers)
        assert raw.is_closed()

    def test_peer_cancels_a_write_half_way(self, end: LocalEnd, raw: RawPeer) -> None:
        """The memory is given back, and the rest of the connection is still in step."""
        grid = end.add_grid(8, ITEM_BYTES)
        raw.send(encode_frame(Kind.WRITE, 3, request_body([grid], [(0, ITEM_BYTES)], [0, 1])))
        assert raw.receive()[:2] == (Kind.GRANT, 3)
        raw.send(encode_frame(Kind.PUSHED, 3, b"y" * ITEM_BYTES) + encode_frame(Kind.CANCEL, 3))
        kind, request_id, body = raw.receive()
        assert (kind, request_id) == (Kind.END, 3)
        assert _tcp_frames.decode_end(body) is not None
        raw.send(encode_frame(Kind.READ, 4, request_body([grid], [(0, ITEM_BYTES)], [0])))
        assert raw.receive() == (Kind.PULLED, 4, b"y" * ITEM_BYTES)

    def test_peer_leaves_half_way(self, end: LocalEnd, raw: RawPeer) -> None:
        batch_id = end.submit(raw_batch(Op.READ, end.add_grid(8, ITEM_BYTES)))
        _, request_id, _ = raw.receive()
        raw.send(encode_header(Kind.PULLED, request_id, 8 * ITEM_BYTES) + b"z" * 100)
        raw.sock.close()
        assert failed_with(end.log.wait(batch_id), PeerLost)
        assert eventually(lambda: RAW in end.lost_peers)
        with pytest.raises(PeerLost):
            end.submit(raw_batch(Op.READ, end.add_grid(8, ITEM_BYTES)))

    def test_waiting_requests_end_too(self, end: LocalEnd, raw: RawPeer) -> None:
        """More than may be with the peer: some are kept back, and can be ended all the same."""
        mine = end.add_grid(8, ITEM_BYTES)
        submitted = [end.submit(raw_batch(Op.READ, mine)) for _ in range(_tcp_frames.MAX_OPEN_REQUESTS + 3)]
        end.backend.cancel(submitted[-1])
        assert end.log.wait(submitted[-1]).status is CompletionStatus.CANCELLED
        raw.sock.close()
        for batch_id in submitted[:-1]:
            assert failed_with(end.log.wait(batch_id), PeerLost)

    def _check_next_read(self, end: LocalEnd, raw: RawPeer) -> None:
        mine = end.add_grid(1, ITEM_BYTES)
        batch_id = end.submit(raw_batch(Op.READ, mine, 1))
        _, request_id, _ = raw.receive()
        raw.send(encode_frame(Kind.PULLED, request_id, b"\x33" * ITEM_BYTES))
        assert end.log.wait(batch_id) == Completion.ok(batch_id)
        assert (end.view(mine.region_id)[mine.offset_bytes : mine.end_bytes] == 0x33).all()


class TestProcesses:
    @both_ops
    def test_killed_peer_is_reported(self, op: Op) -> None:
        with BackendPair.two_processes(FACTORY, 24 << 20) as pair:
            mine, theirs = pair.a.add_grid(16, 1 << 20), pair.b.add_grid(16, 1 << 20)
            pair.link()
            pair.b.stop()  # so that none of it is through when the end comes
            items = list(range(16))
            submitted = [pair.a.submit(pair.batch(op, mine, theirs, items, items)) for _ in range(4)]
            pair.b.kill()
            for batch_id in submitted:
                assert failed_with(pair.a.log.wait(batch_id), PeerLost)
            assert eventually(lambda: A_KNOWS_B_AS in pair.a.lost_peers)

    @pytest.mark.slow
    @both_ops
    def test_deadline_with_a_stopped_peer(self, op: Op) -> None:
        with BackendPair.two_processes(FACTORY, 24 << 20) as pair:
            mine, theirs = pair.a.add_grid(16, 1 << 20), pair.b.add_grid(16, 1 << 20)
            pair.link()
            pair.b.stop()
            items = list(range(16))
            batch = replace(pair.batch(op, mine, theirs, items, items), deadline=Deadline.after(0.2))
            assert failed_with(pair.a.log.wait(pair.a.submit(batch)), TimedOut)

    def test_many_batches_both_ways(self) -> None:
        """More than a connection's window, from both ends at once, large enough to fill every buffer."""
        num_items, item_bytes = 256, 64 << 10
        with BackendPair.two_processes(FACTORY, 64 << 20) as pair:
            mine, theirs = pair.a.add_grid(2 * num_items, item_bytes), pair.b.add_grid(2 * num_items, item_bytes)
            pair.link()
            pair.a.fill(1)
            pair.b.fill(2)
            before_a, before_b = pair.a.snapshot(mine.region_id), pair.b.snapshot(theirs.region_id)
            half = [list(range(num_items)), list(range(num_items, 2 * num_items))]
            reads = [pair.batch(Op.READ, mine, theirs, [i], [i]) for i in half[0]]
            submitted = [pair.a.submit(batch) for batch in reads]
            back = pair.reversed_batch(Op.READ, theirs, mine, half[1], half[1])
            assert pair.b.transfer(back).error is None
            for batch_id in submitted:
                assert pair.a.log.wait(batch_id).error is None
            cut = num_items * item_bytes
            here, there = slice(mine.offset_bytes, mine.end_bytes), slice(theirs.offset_bytes, theirs.end_bytes)
            after_a, after_b = pair.a.snapshot(mine.region_id)[here], pair.b.snapshot(theirs.region_id)[there]
            assert np.array_equal(after_a[:cut], before_b[there][:cut])
            assert np.array_equal(after_a[cut:], before_a[here][cut:])
            assert np.array_equal(after_b[cut:], before_a[here][cut:])
            assert np.array_equal(after_b[:cut], before_b[there][:cut])


class TestLinking:
    @pytest.mark.parametrize("host", ["::1", "localhost", "0.0.0.0", "::", ""])
    def test_hosts(self, host: str) -> None:
        if ":" in host and not _has_ipv6():
            pytest.skip("no IPv6 here")
        with _pair_on(host) as pair:
            pair.link()
            check_pair_works(pair)

    def test_dialler_may_come_first(self, end: LocalEnd) -> None:
        peer = RawPeer(end)
        with contextlib.closing(peer.sock):
            meeting = peer.prove()
            end.connect(RAW, encode_identity(os.urandom(16)), False, peer.token, WAIT_S)
            peer.await_welcome(meeting)

    def test_end_that_does_not_listen_can_dial(self) -> None:
        a = LocalEnd(TcpBackend(), listen_host=None)
        b = LocalEnd(TcpBackend())
        with BackendPair(a, b) as pair:
            pair.link()
            check_pair_works(pair)

    def test_end_that_does_not_listen_cannot_accept(self) -> None:
        a = LocalEnd(TcpBackend())
        b = LocalEnd(TcpBackend(), listen_host=None)
        with BackendPair(a, b) as pair:
            failures = pair.try_connect()
        assert [type(failure) for failure in failures] == [Unreachable, Unreachable]

    def test_wrong_host_is_passed_over(self, end: LocalEnd) -> None:
        """Under the first address there is somebody else: found out at once, without waiting for the deadline."""
        peer = decode_identity(end.identity())
        a = LocalEnd(TcpBackend())
        try:
            identity = encode_identity(
                peer.instance, [Endpoint(host, peer.endpoints[0].port) for host in ("127.0.0.2", "\0", "127.0.0.1")]
            )
            ours, token = a.identity(), os.urandom(16)
            with _something_else("127.0.0.2", peer.endpoints[0].port):
                require_all(
                    [
                        lambda: a.connect(A_KNOWS_B_AS, identity, True, token, WAIT_S),
                        lambda: end.connect(B_KNOWS_A_AS, ours, False, token, WAIT_S),
                    ]
                )
        finally:
            a.close()

    def test_refused_port(self, end: LocalEnd) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            identity = encode_identity(os.urandom(16), [Endpoint("127.0.0.1", unused.getsockname()[1])])
            with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
                end.connect(1, identity, True, os.urandom(16), WAIT_S)

    def test_other_version(self, end: LocalEnd) -> None:
        identity = msgspec.msgpack.encode([99, os.urandom(16), [["127.0.0.1", 1]]])
        with pytest.raises(ProtocolError, match="version 99"):
            end.connect(1, identity, True, os.urandom(16), WAIT_S)

    def test_silent_acceptor_is_bounded(self, end: LocalEnd) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            identity = encode_identity(os.urandom(16), [Endpoint("127.0.0.1", silent.getsockname()[1])])
            with pytest.raises(TimedOut):
                end.connect(1, identity, True, os.urandom(16), 0.1)

    def test_close_ends_a_dial(self) -> None:
        end = LocalEnd(TcpBackend())
        with socket.create_server(("127.0.0.1", 0)) as silent:
            identity = encode_identity(os.urandom(16), [Endpoint("127.0.0.1", silent.getsockname()[1])])
            accepted = threading.Event()

            def close_when_dialled() -> None:
                with silent.accept()[0]:
                    accepted.set()
                    end.close()

            failures = run_all(
                [lambda: end.connect(1, identity, True, os.urandom(16), 10 * WAIT_S), close_when_dialled]
            )
        assert accepted.is_set()
        assert isinstance(failures[0], LLMException)
        assert failures[1] is None

    def test_losing_one_stream_loses_the_link(self, end: LocalEnd) -> None:
        one = RawPeer(end)
        other = RawPeer(end, one.token)
        with contextlib.closing(one.sock), contextlib.closing(other.sock):
            for stream, peer in enumerate((one, other)):
                peer.prove(stream, 2)
            end.connect(RAW, encode_identity(os.urandom(16)), False, one.token, WAIT_S)
            one.sock.close()
            assert other.is_closed()
        assert eventually(lambda: RAW in end.lost_peers)

    def test_streams_that_do_not_fit_together(self, end: LocalEnd) -> None:
        """The one that came later goes; the link waits for the right one."""
        one = RawPeer(end)
        two, three = RawPeer(end, one.token), RawPeer(end, one.token)
        ours = encode_identity(os.urandom(16))

        def dial() -> None:
            one.prove(0, 2)
            two.prove(0, 2)
            assert two.is_closed()
            three.await_welcome(three.prove(1, 2))

        with contextlib.closing(one.sock), contextlib.closing(two.sock), contextlib.closing(three.sock):
            require_all([lambda: end.connect(RAW, ours, False, one.token, WAIT_S), dial])


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"port": -1},
            {"port": 65536},
            {"port": "80"},
            {"port": True},
            {"streams": 0},
            {"streams": 17},
            {"sndbuf": 1},
            {"rcvbuf": 1.5},
            {"advertise_host": ""},
            {"advertise_host": 3},
            {"congestion": 3},
            {"congestion": ""},
            {"congestion": "no_such_control"},
            {"no_such": 1},
        ],
    )
    def test_wrong_value_is_named(self, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(ParamInvalid, match=name):
            LocalEnd(TcpBackend(), options=options)

    def test_port_in_use(self, end: LocalEnd) -> None:
        port = decode_identity(end.identity()).endpoints[0].port
        with pytest.raises(Unreachable, match=str(port)):
            LocalEnd(TcpBackend(), options={"port": port})

    def test_listening_at_another_host_later(self) -> None:
        """What an end that had no listener is told by its owner when it begins to accept links, and when it moves."""
        end = LocalEnd(TcpBackend(), listen_host=None)
        try:
            assert decode_identity(end.identity()).endpoints == []
            for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
                end.backend.listen(host)
            endpoints = decode_identity(end.identity()).endpoints
            assert [endpoint.host for endpoint in endpoints] == ["127.0.0.2", "127.0.0.1"]
            for endpoint in endpoints:
                socket.create_connection((endpoint.host, endpoint.port), WAIT_S).close()
            with pytest.raises(Unreachable, match="no such host"):
                end.backend.listen("no such host")
        finally:
            end.close()

    def test_advertise_host(self) -> None:
        end = LocalEnd(TcpBackend(), options={"advertise_host": "kv.example"})
        try:
            assert [endpoint.host for endpoint in decode_identity(end.identity()).endpoints] == ["kv.example"]
        finally:
            end.close()


class TestCongestionControl:
    def test_peer_on_this_host(self, linked: BackendPair[LocalEnd]) -> None:
        """Nothing is congested here: no algorithm that spaces packets out, whatever the system's default is."""
        assert {_congestion_of(linked.a), _congestion_of(linked.b)} == {"reno"}

    def test_option(self) -> None:
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        for name in available:
            with BackendPair.in_process(TcpBackend, options={"congestion": name}) as pair:
                pair.link()
                check_pair_works(pair)
                assert {_congestion_of(pair.a), _congestion_of(pair.b)} == {name}


def _congestion_of(end: LocalEnd) -> str:
    (link,) = end.backend._running.links.values()
    (stream,) = link._streams
    name = stream.connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


class TestSubmitterWaits:
    """A thread that submits a small batch takes in the answer itself, and leaves at once when anything ends it."""

    @pytest.fixture
    def patient(self, end: LocalEnd, raw: RawPeer, monkeypatch: pytest.MonkeyPatch) -> None:
        """The submitter waits if it can: nobody else is at the sockets."""
        monkeypatch.setattr(_tcp_requests, "PATIENCE_S", WAIT_S)
        assert eventually(lambda: end.backend._running._loop._owner == 0)

    @both_ops
    @pytest.mark.usefixtures("patient")
    def test_answer_comes_in_the_submitters_thread(self, end: LocalEnd, raw: RawPeer, op: Op) -> None:
        batch = raw_batch(op, end.add_grid(8, ITEM_BYTES))
        threads: list[int] = []

        def submit() -> None:
            end.backend.submit(1, batch, lambda completion: threads.append(threading.get_ident()))
            assert threads == [threading.get_ident()]

        require_all([submit, lambda: _answer(raw, op)])

    @pytest.mark.usefixtures("patient")
    def test_cancel_by_another_thread(self, end: LocalEnd, raw: RawPeer) -> None:
        batch = raw_batch(Op.READ, end.add_grid(8, ITEM_BYTES))
        batch_id = end.log.expect()

        def cancel() -> None:
            _, request_id, _ = raw.receive()
            end.backend.cancel(batch_id)
            assert end.log.wait(batch_id).status is CompletionStatus.CANCELLED
            raw.send(_tcp_frames.encode_end(request_id, Cancelled("as you wish")))

        require_all([lambda: end.backend.submit(batch_id, batch, end.log.done), cancel])

    @pytest.mark.parametrize("ending", ["disconnect", "close", "peer"])
    def test_end_by_another_thread(
        self, end: LocalEnd, raw: RawPeer, monkeypatch: pytest.MonkeyPatch, ending: str
    ) -> None:
        monkeypatch.setattr(_tcp_requests, "PATIENCE_S", 0.2)
        batch_id = end.log.expect()
        batch = raw_batch(Op.READ, end.add_grid(8, ITEM_BYTES))

        def give_up() -> None:
            raw.receive()
            {"disconnect": lambda: end.disconnect(RAW), "close": end.backend.close, "peer": raw.sock.close}[ending]()

        require_all([lambda: end.backend.submit(batch_id, batch, end.log.done), give_up])
        assert end.log.wait(batch_id).status is CompletionStatus.FAILED

    def test_slow_peer_is_left_to_the_loop(self, end: LocalEnd, raw: RawPeer) -> None:
        """`submit` returns, and the answer is taken in all the same. After a few nobody waits for such a peer."""
        mine = end.add_grid(8, ITEM_BYTES)
        submitted = [end.submit(raw_batch(Op.READ, mine)) for _ in range(12)]
        assert end.log.pending() == submitted
        for batch_id in submitted:
            _answer(raw, Op.READ)
            assert end.log.wait(batch_id).error is None

    @pytest.mark.usefixtures("patient")
    def test_peers_request_meanwhile_is_served(self, end: LocalEnd, raw: RawPeer) -> None:
        mine = end.add_grid(8, ITEM_BYTES)
        batch_id = end.log.expect()
        body = request_body([mine], [(0, ITEM_BYTES)], [0])

        def ask_before_answering() -> None:
            _, request_id, _ = raw.receive()
            raw.send(encode_frame(Kind.READ, 5, body))
            assert raw.receive()[:2] == (Kind.PULLED, 5)
            raw.send(encode_frame(Kind.PULLED, request_id, b"a" * 8 * ITEM_BYTES))

        batch = raw_batch(Op.READ, mine)
        require_all([lambda: end.backend.submit(batch_id, batch, end.log.done), ask_before_answering])
        assert end.log.wait(batch_id) == Completion.ok(batch_id)

    def test_submit_in_a_callback(self, linked: BackendPair[LocalEnd]) -> None:
        """It only queues: the thread that runs the callback owns the sockets and must not wait for them."""
        mine, theirs = linked.a.add_grid(8, 512), linked.b.add_grid(8, 512)
        first, second = linked.a.log.expect(), linked.a.log.expect()
        batch = linked.batch(Op.READ, mine, theirs, [1], [2])

        def go_on(completion: Completion) -> None:
            linked.a.backend.submit(second, batch, linked.a.log.done)
            linked.a.log.done(completion)

        linked.a.backend.submit(first, batch, go_on)
        assert linked.a.log.wait(second).error is None


def _answer(raw: RawPeer, op: Op) -> None:
    """Serve one batch of 8 items by hand."""
    _, request_id, _ = raw.receive()
    if op is Op.READ:
        raw.send(encode_frame(Kind.PULLED, request_id, b"a" * 8 * ITEM_BYTES))
    else:
        raw.send(encode_frame(Kind.GRANT, request_id))
        assert raw.receive()[0] is Kind.PUSHED
        raw.send(_tcp_frames.encode_end(request_id))


def test_more_stuck_requests_than_threads(linked: BackendPair[LocalEnd]) -> None:
    """An owner that lends nothing holds up those who wait for it, and nobody else."""
    mine, theirs = linked.a.add_grid(16, 512), linked.b.add_grid(16, 512)
    linked.b.serving_allowed.clear()
    stuck = [linked.a.submit(linked.batch(Op.READ, mine, theirs, [i], [i])) for i in range(2 * _tcp_loop.MAX_AWAY)]
    for _ in range(_tcp_loop.MAX_AWAY):
        assert linked.b.serving_waits.acquire(timeout=WAIT_S)
    back = linked.reversed_batch(Op.READ, theirs, mine, [9], [9])
    assert linked.b.transfer(back).error is None
    linked.a.backend.cancel(stuck[-1])
    assert linked.a.log.wait(stuck[-1]).status is CompletionStatus.CANCELLED
    linked.b.serving_allowed.set()
    for batch_id in stuck[:-1]:
        assert linked.a.log.wait(batch_id).error is None


class TestLoop:
    @pytest.fixture
    def loop(self) -> Iterator[IoLoop]:
        loop = IoLoop(lambda: math.inf, lambda: None)
        loop.start()
        yield loop
        loop.stop()

    def test_a_command_runs_at_once_if_nobody_is_the_owner(self, loop: IoLoop) -> None:
        threads: list[int] = []
        loop.post(lambda: threads.append(threading.get_ident()))
        assert eventually(lambda: bool(threads))
        assert loop.call(lambda: loop.owned)
        assert not loop.owned

    def test_the_owner_does_what_others_posted(self, loop: IoLoop) -> None:
        owned, posted = threading.Event(), threading.Event()
        order: list[str] = []

        def hold() -> None:
            owned.set()
            assert posted.wait(WAIT_S)
            loop.post(lambda: order.append("own"))
            order.append("held")

        def post() -> None:
            assert owned.wait(WAIT_S)
            loop.post(lambda: order.append("other"))  # does not wait for the owner
            posted.set()

        require_all([lambda: loop.call(hold), post])
        assert eventually(lambda: order == ["held", "other", "own"])

    def test_errors_of_a_call_come_back(self, loop: IoLoop) -> None:
        def fail() -> None:
            raise ParamInvalid("no")

        with pytest.raises(ParamInvalid):
            loop.call(fail)
        assert loop.call(lambda: 3) == 3

    def test_wake_at(self) -> None:
        """Also when it is set by a thread that is not the loop's, while that sleeps without a limit."""
        swept = threading.Event()

        def sweep() -> float:
            swept.set()
            return math.inf

        loop = IoLoop(sweep, lambda: None)
        loop.start()
        try:
            loop.call(lambda: loop.wake_at(time.monotonic() + 0.01))
            assert swept.wait(WAIT_S)
        finally:
            loop.stop()

    def test_after_stop(self, loop: IoLoop) -> None:
        loop.stop()
        for refused in (lambda: loop.post(lambda: None), lambda: loop.call(lambda: None)):
            with pytest.raises(ClosedError):
                refused()


class TestParts:
    """A large batch over several connections."""

    @pytest.mark.parametrize(("num_grids", "num_items"), [(1, 64), (2, 33), (40, 2), (7, 1)])
    def test_split_moves_the_same(self, num_grids: int, num_items: int) -> None:
        items = np.arange(num_items, dtype=np.int64)
        batch = _batch_of(items, num_items, item_bytes=1 << 20)
        batch = replace(batch, pairs=batch.pairs * num_grids, remote_items=items[::-1])
        parts = split(batch, 4)
        assert 1 < len(parts) <= 4
        assert sum(part.num_bytes for part in parts) == batch.num_bytes
        moved = [
            (id(pair), *items)
            for part in parts
            for pair in part.pairs
            for items in zip(part.local_items.tolist(), part.remote_items.tolist(), strict=True)
        ]
        assert len(moved) == num_grids * num_items
        assert {(mine, theirs) for _, mine, theirs in moved} == set(
            zip(items.tolist(), items[::-1].tolist(), strict=True)
        )

    def test_small_stays_whole(self) -> None:
        batch = _batch_of(np.arange(8, dtype=np.int64))
        assert split(batch, 4) == [batch]

    @both_ops
    def test_one_part_is_refused(self, op: Op) -> None:
        """One completion, with the refusal, when all parts have ended; and the link goes on."""
        with BackendPair.in_process(TcpBackend, 16 << 20, {"streams": 2}) as pair:
            mine, theirs = [[end.add_grid(1, 2 << 20) for _ in range(2)] for end in (pair.a, pair.b)]
            pair.link()
            unknown = replace(theirs[1], grid_id=theirs[1].grid_id + 1000)
            completion = pair.a.transfer(pair.batch(op, mine, [theirs[0], unknown], [0], [0]))
            assert failed_with(completion, CacheNotExist)
            assert pair.a.transfer(pair.batch(op, mine, theirs, [0], [0])).error is None
            assert not pair.a.log.excessive()


class TestRequests:
    """Limits of what one request can hold, and that it survives the way there and back."""

    def test_round_trip(self) -> None:
        slices = (Slice(0, 64, 64), Slice(128, 0, 32))
        batch = _batch_of(np.array([5, 1 << 33, 0]), num_items=1 << 34, slices=slices)
        body = _tcp_frames.encode_request(batch)
        wanted = _tcp_frames.decode_request(_tcp_frames.Header(Kind.READ, len(body), 9), body)
        assert (wanted.request_id, wanted.op) == (9, Op.READ)
        (grid,) = wanted.grids
        assert (grid.grid_id, grid.division) == (1, batch.pairs[0].remote.division)
        assert wanted.items.tolist() == [5, 1 << 33, 0]
        assert wanted.slices == ((64, 64), (0, 32))

    def test_too_many_blocks(self) -> None:
        items = np.zeros(_tcp_frames.MAX_ITEMS + 1, dtype=np.int64)
        with pytest.raises(ParamInvalid, match=str(_tcp_frames.MAX_ITEMS)):
            _tcp_frames.encode_request(_batch_of(items))

    def test_largest_request_fits_its_frame(self) -> None:
        items = np.full(_tcp_frames.MAX_ITEMS, (1 << 40) - 1, dtype=np.int64)
        batch = _batch_of(items, num_items=1 << 40, slices=(Slice(0, 0, 1),) * 4)
        body = _tcp_frames.encode_request(replace(batch, pairs=batch.pairs * _tcp_frames.MAX_PAIRS))
        decode_header(encode_header(Kind.READ, 1, len(body)))


def _batch_of(
    items: np.ndarray, num_items: int = 8, slices: tuple[Slice, ...] | None = None, item_bytes: int = ITEM_BYTES
) -> Batch:
    grid = Grid(1, 1, 0, item_bytes, item_bytes, num_items)
    return make_batch(1, Op.READ, grid, grid, items, items, slices)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("budget", [1, 100, 777, 1 << 20])
def test_memory_stream(native: bool, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the budget per call, and wherever the socket blocks, the bytes come out in wire order."""
    if not native:
        monkeypatch.setattr(_tcp_memory, "_native", lambda: None)
    elif _tcp_memory._native() is None:
        pytest.skip("no compiled library")
    rng = np.random.default_rng(budget)
    source, target = rng.integers(0, 256, 60_000, dtype=np.uint8), np.zeros(60_000, dtype=np.uint8)
    items = rng.permutation(40).astype(np.int64)
    grids = [Grid(1, 1, 0, 250, 200, 40), Grid(2, 1, 20_000, 300, 300, 40)]
    slices = ((3, 50), (100, 99))
    expected = np.zeros_like(source)
    for grid in grids:
        for item in items.tolist():
            for offset, size in slices:
                at = grid.offset_bytes + item * grid.stride_bytes + offset
                expected[at : at + size] = source[at : at + size]

    sender, receiver = (
        MemoryStream(Layout(tuple(GridMemory(grid, array.ctypes.data) for grid in grids), items, slices))
        for array in (source, target)
    )
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        left.setblocking(False)
        right.setblocking(False)
        while receiver.remaining:
            assert sender.send(left, budget) + receiver.receive(right, budget), "no progress"
        assert sender.remaining == 0
        left.close()
        receiver_of_nothing = MemoryStream(Layout((GridMemory(grids[0], target.ctypes.data),), items, slices))
        with pytest.raises(OSError, match="closed"):
            receiver_of_nothing.receive(right, budget)
    assert np.array_equal(target, expected)


@contextlib.contextmanager
def _pair_on(host: str) -> Iterator[BackendPair[LocalEnd]]:
    a = LocalEnd(TcpBackend(), listen_host=host)
    try:
        b = LocalEnd(TcpBackend(), listen_host=host)
    except BaseException:
        a.close()
        raise
    with BackendPair(a, b) as pair:
        yield pair


@contextlib.contextmanager
def _something_else(host: str, port: int) -> Iterator[None]:
    """Another tcp backend that listens there."""
    other = LocalEnd(TcpBackend(), options={"port": port}, listen_host=host)
    try:
        yield
    finally:
        other.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
