# SPDX-License-Identifier: Apache-2.0
"""What is particular to the mooncake backend: that Mooncake lets go of memory, its limits, its absence.

The rules that hold for every backend are in `test_backends.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import datadist_core
from datadist_core import BlocksCacheKey
from datadist_core.backends import _mooncake_link
from datadist_core.backends._mooncake_binding import environment, load
from datadist_core.backends._mooncake_engine import Engine, Initiator, Peer, interrupted_at
from datadist_core.backends._mooncake_identity import NUM_SLOTS, Descriptor, decode_identity, prove, shows
from datadist_core.backends._mooncake_link import PIECE_BYTES, PIECE_RANGES, Link, OpenBatch, cut
from datadist_core.backends._mooncake_options import MooncakeOptions, address_of, parse_options
from datadist_core.backends._mooncake_sockets import listening_ports, own_sockets, shut_connections, shut_listener
from datadist_core.backends._proof_table import ProofTable
from datadist_core.backends.mooncake import MooncakeBackend
from datadist_core.errors import ParamInvalid, PeerLost, RemoteError, Unreachable
from datadist_core.testing.child import ChildEnd
from datadist_core.testing.end import LocalEnd
from datadist_core.testing.pair import A_KNOWS_B_AS, BackendPair
from datadist_core.testing.parallel import WAIT_S, eventually, run_all
from datadist_core.tests.core_ends import filled_cache, linked, manager, plain_cache
from datadist_core.tests.optional import not_available
from datadist_core.transfer.backend import CompletionStatus
from datadist_core.transfer.plan import Batch, CopyList, Op, expand
from datadist_core.transfer.registry import AUTO_ORDER, create_backend
from datadist_core.types import Deadline

FACTORY = "datadist_core.backends.mooncake:MooncakeBackend"
ROOT = Path(datadist_core.__file__).parent.parent
LATE_S = 0.3
"""How long to look for what must not happen."""
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@pytest.fixture
def mooncake() -> None:
    """Needs the real Mooncake."""
    try:
        load()
    except Unreachable as error:
        not_available(error)


@pytest.fixture
def pair(mooncake: None) -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(MooncakeBackend, pool_bytes=24 << 20) as pair:
        yield pair


@pytest.fixture
def child_pair(mooncake: None) -> Iterator[BackendPair[ChildEnd]]:
    """With a time limit of Mooncake's own that no test waits for: what ends early is ended by the backend."""
    with BackendPair.two_processes(FACTORY, pool_bytes=24 << 20, options={"timeout_s": 600}) as pair:
        pair.link()
        yield pair


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("MC_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, env={**env, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def is_moving(end: LocalEnd) -> bool:
    """Whether a call into Mooncake is under way."""
    assert isinstance(end.backend, MooncakeBackend)
    return any(link._moving is not None for link in end.backend._links.values())


def big_batch(pair: BackendPair[ChildEnd], op: Op) -> Batch:
    """16 MiB: more than sockets hold."""
    mine, theirs = pair.a.add_grid(16, 1 << 20), pair.b.add_grid(16, 1 << 20)
    return pair.batch(op, mine, theirs, list(range(16)), list(range(16))[::-1])


def link_of(end: LocalEnd) -> Link:
    assert isinstance(end.backend, MooncakeBackend)
    return end.backend._link(A_KNOWS_B_AS)


def check_let_go(pair: BackendPair[ChildEnd]) -> None:
    """The memory of completed batches is overwritten; then the peer goes on. Neither end may notice the other."""
    view = pair.a.view(pair.a.region.region_id)
    view[:] = 77
    pair.b.resume()
    assert not eventually(lambda: not (view == 77).all(), LATE_S), "written to after the completion"
    (export,) = pair.b.exports()
    assert not (pair.b.snapshot(export.region_id) == 77).any(), "sent after the completion"


def connect_as(a: LocalEnd, b: ChildEnd, peer_id: int) -> None:
    """Link the two ends, once more perhaps, with `b` known as `peer_id`."""
    token, identity_a, identity_b = os.urandom(16), a.identity(), b.identity()
    failures = run_all(
        [
            lambda: a.connect(peer_id, identity_b, True, token, WAIT_S),
            lambda: b.connect(peer_id, identity_a, False, token, WAIT_S),
        ]
    )
    assert failures == [None, None]
    for export in b.exports():
        a.attach(peer_id, export, WAIT_S)


# Without Mooncake


def test_importing_the_package_does_not_load_mooncake() -> None:
    result = run_python("import sys, datadist_core; print('mooncake' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def test_is_not_part_of_auto() -> None:
    assert "mooncake" not in AUTO_ORDER
    assert isinstance(create_backend("mooncake"), MooncakeBackend)


OPEN = """
    from datadist_core.backends.mooncake import MooncakeBackend
    from datadist_core.errors import Unreachable
    from datadist_core.testing.end import LocalEnd
    try:
        LocalEnd(MooncakeBackend())
    except Unreachable as error:
        print(error)
"""


def test_not_installed_is_said_with_the_remedy() -> None:
    result = run_python("    import sys; sys.modules['mooncake'] = None\n" + OPEN)
    assert "Mooncake is not installed" in result.stdout, result.stderr
    assert 'pip install "vllm-datadist[mooncake]"' in result.stdout


def test_not_loadable_is_said_with_the_reason(tmp_path: Path) -> None:
    """A stand-in whose import fails like the real one's without the RDMA library."""
    make_unloadable(tmp_path)
    result = run_python(OPEN, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "libibverbs.so.1" in result.stdout, result.stderr
    assert "libibverbs1" in result.stdout


def make_unloadable(path: Path) -> None:
    package = path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")


@pytest.mark.slow
@pytest.mark.parametrize("require_all", ["0", "1"])
def test_suite_is_skipped_with_the_reason_unless_nothing_may_be(tmp_path: Path, require_all: str) -> None:
    make_unloadable(tmp_path)
    result = run_python(
        """
        import sys, pytest
        row = "datadist_core/tests/test_backends.py::TestMooncake::test_wrong_token_is_refused"
        own = "datadist_core/tests/test_mooncake.py::test_engine_tells_its_ports"
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", row, own]))
        """,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
        DATADIST_REQUIRE_ALL=require_all,
    )
    assert "package libibverbs1" in result.stdout, result.stdout + result.stderr
    assert ("2 skipped" in result.stdout, "2 errors" in result.stdout) == (require_all == "0", require_all == "1")


@pytest.mark.slow
def test_another_interface_is_said(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("class TransferEngine: pass")
    result = run_python(OPEN, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "another interface" in result.stdout, result.stderr


# Options and addresses


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"protocol": "nvlink"}, "tcp, rdma"),
        ({"protocol": 3}, "protocol=3"),
        ({"timeout_s": 4}, "5..600"),
        ({"timeout_s": True}, "5..600"),
        ({"timeout_s": "9"}, "5..600"),
        ({"host": ""}, "host=''"),
        ({"device": "x" * 201}, "device="),
        ({"devices": "mlx5_0"}, "device, host, protocol, timeout_s"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ParamInvalid, match=named):
        parse_options(options)


def test_options() -> None:
    assert parse_options({}) == MooncakeOptions("tcp", "", None, 8)
    given_options = {"protocol": "rdma", "device": "mlx5_0", "host": "127.0.0.1", "timeout_s": 5}
    assert parse_options(given_options) == MooncakeOptions("rdma", "mlx5_0", "127.0.0.1", 5)


def test_address_that_peers_are_told() -> None:
    assert address_of("127.0.0.1") == address_of("localhost") == "127.0.0.1"
    assert address_of(None) == address_of("0.0.0.0") == address_of("::") != "0.0.0.0"
    with pytest.raises(Unreachable, match="IPv4"):
        address_of("::1")


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_OF_THE_USER", "1")
    monkeypatch.delenv("MC_OURS", raising=False)
    with environment({"MC_OF_THE_USER": "2", "MC_OURS": "3"}):
        assert (os.environ["MC_OF_THE_USER"], os.environ["MC_OURS"]) == ("1", "3")
    assert os.environ["MC_OF_THE_USER"] == "1"
    assert "MC_OURS" not in os.environ


# Cutting batches into pieces

ranges_strategy = st.lists(
    st.one_of(st.integers(1, 4096), st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])),
    max_size=60,
)


@settings(deadline=None)
@given(ranges_strategy, st.integers(1, 20))
def test_pieces_hold_the_same_bytes(sizes: list[int], most: int) -> None:
    num_bytes = np.array(sizes, dtype=np.int64)
    starts = 1000 + 2 * (np.cumsum(num_bytes) - num_bytes)  # gaps on both sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mooncake_link, "PIECE_RANGES", most)
        pieces = cut(CopyList(starts, starts * 3, num_bytes))
    assert all(1 <= len(piece.num_bytes) <= most and piece.total_bytes <= 2 * PIECE_BYTES for piece in pieces)
    assert covered(pieces, 0) == [(int(at), int(size)) for at, size in zip(starts, num_bytes, strict=True)]
    assert covered(pieces, 1) == [(int(3 * at), int(size)) for at, size in zip(starts, num_bytes, strict=True)]


def covered(pieces: Any, side: int) -> list[tuple[int, int]]:
    """(start, size) of all ranges on one side, neighbours put together again."""
    found: list[tuple[int, int]] = []
    for piece in pieces:
        for at, size in zip((piece.local, piece.remote)[side].tolist(), piece.num_bytes.tolist(), strict=True):
            if found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((at, size))
    return found


@both_ops
def test_more_ranges_than_mooncake_takes_at_once(pair: BackendPair[LocalEnd], op: Op) -> None:
    num_items = 5 * PIECE_RANGES
    mine, theirs = pair.a.add_grid(num_items, 256, gap_bytes=64), pair.b.add_grid(num_items, 256, gap_bytes=64)
    pair.link()
    pair.a.fill(1)
    pair.b.fill(2)
    items = np.random.default_rng(3).permutation(num_items)
    assert pair.a.transfer(pair.batch(op, mine, theirs, items, items)).status is CompletionStatus.OK
    here, there = pair.a.view(mine.region_id), pair.b.view(theirs.region_id)
    for i in range(num_items):
        at, of = mine.offset_bytes + i * 320, theirs.offset_bytes + i * 320
        assert np.array_equal(here[at : at + 256], there[of : of + 256])
        assert not np.array_equal(here[at + 256 : at + 320], there[of + 256 : of + 320])


def test_one_range_longer_than_a_piece(pair: BackendPair[LocalEnd]) -> None:
    size = PIECE_BYTES + 12345
    mine, theirs = pair.a.add_grid(1, size), pair.b.add_grid(1, size)
    pair.link()
    pair.b.fill(2)
    assert pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0], [0])).status is CompletionStatus.OK
    here, there = pair.a.view(mine.region_id), pair.b.view(theirs.region_id)
    assert np.array_equal(here[:size], there[:size])
    assert not here[size:].any()


# Whose memory it is


@both_ops
def test_nothing_moves_after_a_cancelled_batch(child_pair: BackendPair[ChildEnd], op: Op) -> None:
    """The peer stops in mid-transfer; when it goes on, nothing may land from it, or be taken for it, any more."""
    pair, batch = child_pair, big_batch(child_pair, op)
    pair.a.view(pair.a.region.region_id)[:] = 1
    pair.b.stop()
    submitted = [pair.a.submit(batch) for _ in range(3)]
    assert eventually(lambda: is_moving(pair.a))
    for batch_id in submitted:
        pair.a.backend.cancel(batch_id)
    completions = [pair.a.log.wait(batch_id) for batch_id in submitted]
    assert {completion.status for completion in completions} == {CompletionStatus.CANCELLED}
    check_let_go(pair)


@pytest.mark.slow
@both_ops
def test_nothing_moves_after_a_part_has_failed(child_pair: BackendPair[ChildEnd], op: Op) -> None:
    """Mooncake returns with the first range that fails, while the others go on."""
    pair, batch = child_pair, big_batch(child_pair, op)
    pair.a.view(pair.a.region.region_id)[:] = 1
    link = link_of(pair.a)
    ((region_id, described),) = link.regions._regions.items()
    # Such that the first item of the batch lies just behind the peer's region, and the others in it.
    shift = described.size_bytes - batch.pairs[0].remote.end_bytes + (1 << 20)
    link.regions.put(region_id, Descriptor(described.address + shift, described.size_bytes))
    completion = pair.a.transfer(batch)
    assert completion.status is CompletionStatus.FAILED
    assert isinstance(completion.error, RemoteError), completion
    assert "MC_LOG_LEVEL" in str(completion.error)
    check_let_go(pair)


@pytest.mark.slow
def test_peer_that_is_stuck_does_not_hold_up_others(child_pair: BackendPair[ChildEnd]) -> None:
    """Also not while a failed batch waits for the engine's last calls."""
    pair, batch = child_pair, big_batch(child_pair, Op.READ)
    with BackendPair.two_processes(FACTORY, pool_bytes=24 << 20) as fresh:
        other = BackendPair(pair.a, fresh.b)
        connect_as(pair.a, fresh.b, 4711)
        mine, theirs = pair.a.add_grid(4, 512), fresh.b.add_grid(4, 512)
        pair.b.stop()
        batch_id = pair.a.submit(batch)
        small = replace(other.batch(Op.READ, mine, theirs, [0, 2], [1, 3]), peer_id=4711)
        for _ in range(3):
            assert pair.a.transfer(small).status is CompletionStatus.OK
        pair.a.backend.cancel(batch_id)
        assert pair.a.log.wait(batch_id).status is CompletionStatus.CANCELLED
        assert pair.a.transfer(small).status is CompletionStatus.OK
        pair.b.resume()


@pytest.mark.slow
def test_batches_of_a_link_take_turns(child_pair: BackendPair[ChildEnd]) -> None:
    """A small batch is over before a large one that came first."""
    pair = child_pair
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    small, large = pair.batch(Op.READ, mine, theirs, [1], [2]), big_batch(pair, Op.READ)
    link, ended = link_of(pair.a), list[int]()
    pair.b.stop()  # so that both are there before the first one can end
    for batch_id, batch in enumerate((large, small)):
        theirs_at = {region_id: described.address for region_id, described in link.regions.of(batch).items()}
        pieces = cut(expand(batch, {mine.region_id: pair.a.region.address}, theirs_at))
        pieces.extend(list(pieces) * 20 if batch is large else [])
        link.submit(OpenBatch(batch_id, batch, lambda completion: ended.append(completion.batch_id), pieces, ()))
    pair.b.resume()
    assert eventually(lambda: len(ended) == 2)
    assert ended == [1, 0]


def test_killed_peer_is_reported(child_pair: BackendPair[ChildEnd]) -> None:
    pair, batch = child_pair, big_batch(child_pair, Op.READ)
    pair.b.stop()  # so that none of it is through when the end comes
    submitted = [pair.a.submit(batch) for _ in range(8)]
    pair.b.kill()
    completions = [pair.a.log.wait(batch_id) for batch_id in submitted]
    assert all(isinstance(completion.error, PeerLost) for completion in completions), completions
    assert eventually(lambda: A_KNOWS_B_AS in pair.a.lost_peers)
    with pytest.raises(PeerLost):
        pair.a.submit(batch)


def test_unregistered_memory_is_not_given(pair: BackendPair[LocalEnd]) -> None:
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    pair.link()
    pair.b.backend.unregister(theirs.region_id)
    assert isinstance(pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [2])).error, RemoteError)
    (export,) = pair.b.exports()
    pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
    with pytest.raises(Unreachable, match="does not give region"):
        pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)


def test_overlapping_region_cannot_be_reached(pair: BackendPair[LocalEnd]) -> None:
    """Mooncake does not take the same memory twice. Taking the second back leaves the first alone."""
    part = replace(pair.b.region, region_id=1 << 30, size_bytes=4096)
    assert pair.b.backend.register(part) is None
    pair.b.backend.unregister(part.region_id)
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    pair.link()
    assert pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [2])).status is CompletionStatus.OK


@pytest.mark.slow
def test_end_of_a_life_leaves_no_thread_of_mooncake(mooncake: None) -> None:
    def live() -> None:
        with BackendPair.in_process(MooncakeBackend) as pair:
            mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
            pair.link()
            pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [2]))

    live()
    before = len(os.listdir("/proc/self/task"))
    live()
    assert eventually(lambda: len(os.listdir("/proc/self/task")) <= before)


# Interrupts


def test_connections_that_were_shut_are_not_used_again(pair: BackendPair[LocalEnd]) -> None:
    """Mooncake keeps connections, and would fail with the dead ones: an interrupt can come too late for its call."""
    pair.link()
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    batch, link = pair.batch(Op.READ, mine, theirs, [1], [2]), link_of(pair.a)
    (export,) = pair.b.exports()
    for _ in range(3):
        assert pair.a.transfer(batch).status is CompletionStatus.OK
        link.peer.interrupt()
        pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
        pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        link.peer.interrupt()


@pytest.mark.slow
@both_ops
def test_batch_outlives_an_interrupt_that_was_not_meant_for_it(child_pair: BackendPair[ChildEnd], op: Op) -> None:
    pair, batch = child_pair, big_batch(child_pair, op)
    link = link_of(pair.a)
    pair.b.stop()
    batch_id = pair.a.submit(batch)
    assert eventually(lambda: is_moving(pair.a))
    before = link.peer.num_interrupts()
    assert eventually(lambda: [link.peer.interrupt()] and link.peer.num_interrupts() > before)
    pair.b.resume()
    assert pair.a.log.wait(batch_id).status is CompletionStatus.OK


def test_interrupts_end_with_their_block() -> None:
    """One that began in the block, and takes its time, ends before the block does."""
    calls, go_on = list[str](), threading.Event()

    class SlowPeer(Peer):
        def interrupt(self) -> None:
            calls.append("began")
            go_on.wait(WAIT_S)
            calls.append("ended")

    with interrupted_at(Deadline.after(0.0), SlowPeer("127.0.0.1", 1, 2)):
        assert eventually(lambda: bool(calls))
        threading.Timer(0.05, go_on.set).start()
    assert calls == ["began", "ended"]
    assert not eventually(lambda: len(calls) > 2, LATE_S)


def test_replaced_engine_ends_with_its_last_call() -> None:
    """Those that are on it when it is replaced are not disturbed, and nobody waits for them."""
    engines: list[StandInEngine] = []

    def make() -> StandInEngine:
        engines.append(StandInEngine())
        return engines[-1]

    initiator = Initiator(make, registers=False)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        slow, peer = Peer("127.0.0.1", 1, 0), Peer("127.0.0.1", server.getsockname()[1], 0)
        engines[0].held.clear()
        call = threading.Thread(target=initiator.move, args=(slow, Op.READ, NOTHING), name="datadist-test", daemon=True)
        call.start()
        assert engines[0].entered.wait(WAIT_S)
        peer.interrupt()
        assert initiator.move(peer, Op.READ, NOTHING)
        assert [(engine.num_moves, engine.closed) for engine in engines] == [(1, False), (1, False)]
        engines[0].held.set()
        call.join(WAIT_S)
        assert [engine.closed for engine in engines] == [True, False]
        initiator.close()
        assert [engine.closed for engine in engines] == [True, True]


NOTHING = CopyList(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


class StandInEngine:
    """An engine that moves nothing; `held` keeps its calls from returning."""

    def __init__(self) -> None:
        self.entered, self.held = threading.Event(), threading.Event()
        self.held.set()
        self.num_moves, self.closed = 0, False

    def move(self, peer: Peer, op: Op, ranges: CopyList) -> bool:
        self.num_moves += 1
        self.entered.set()
        return self.held.wait(WAIT_S)

    def close(self) -> None:
        self.closed = True


# Engines and their sockets


def test_rdma_without_a_device_is_unreachable(mooncake: None) -> None:
    """Mooncake itself would start with another transport and say nothing."""
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("there is an RDMA device here")
    with pytest.raises(Unreachable, match="no RDMA device"):
        LocalEnd(MooncakeBackend(), options={"protocol": "rdma"})


def test_other_protocol_is_unreachable(pair: BackendPair[LocalEnd]) -> None:
    theirs = decode_identity(pair.b.identity(), "tcp")
    with pytest.raises(Unreachable, match="'rdma'"):
        pair.a.connect(
            A_KNOWS_B_AS, msgspec.msgpack.encode(msgspec.structs.replace(theirs, protocol="rdma")), True, b"t" * 16, 1.0
        )


def test_engine_tells_its_ports(mooncake: None) -> None:
    engine = Engine(MooncakeOptions(), "127.0.0.1")
    try:
        assert {engine.port, engine.data_port} <= listening_ports()
    finally:
        engine.close()
    assert not {engine.port, engine.data_port} & listening_ports()
    engine.close()


def test_peers_are_told_where_links_are_accepted(pair: BackendPair[LocalEnd]) -> None:
    assert decode_identity(pair.a.identity(), "tcp").host == "127.0.0.1"
    pair.a.backend.listen("127.0.0.2")
    assert decode_identity(pair.a.identity(), "tcp").host == "127.0.0.2"
    pair.link()
    mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
    batch = pair.reversed_batch(Op.READ, theirs, mine, [1], [2])
    assert pair.b.transfer(batch).status is CompletionStatus.OK


def test_sockets_are_found_and_shut_by_their_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as bystander:
        port, other = server.getsockname()[1], bystander.getsockname()[1]
        assert {port, other} <= listening_ports()
        address, elsewhere = ("127.0.0.1", port), ("127.0.0.1", other)
        with socket.create_connection(address) as mine, socket.create_connection(elsewhere) as its:
            found = [(each.fd, each.remote_host) for each in own_sockets() if each.remote_port == port]
            assert found == [(mine.fileno(), "127.0.0.1")]
            shut_connections("127.0.0.2", frozenset({port}))
            shut_connections("127.0.0.1", frozenset({port}))
            assert mine.recv(1) == b""
            its.setblocking(False)
            with pytest.raises(BlockingIOError):
                its.recv(1)
        shut_listener(port)
        with pytest.raises(OSError, match="Invalid argument"):
            server.accept()
        assert other in listening_ports()


# Proofs


def test_proofs_come_and_go() -> None:
    table = ProofTable("mooncake", NUM_SLOTS)
    proofs = [prove(bytes([at]) * 16, b"i" * 16) for at in range(NUM_SLOTS)]
    slots = [table.show(proof) for proof in proofs]
    assert all(shows(table._slots.tobytes(), proof) for proof in proofs)
    with pytest.raises(Unreachable, match="256 links"):
        table.show(proofs[0])
    table.withdraw(slots[3])
    assert not shows(table._slots.tobytes(), proofs[3])
    assert table.show(proofs[3]) == slots[3]


def test_proof_is_of_one_token_and_one_end() -> None:
    assert len({prove(token * 16, end * 16) for token in (b"a", b"b") for end in (b"c", b"d")}) == 4


# With everything above


@pytest.mark.slow
def test_says_nothing_on_stderr(mooncake: None) -> None:
    """Neither in a normal life, nor when something fails and becomes an exception."""
    result = run_python(
        """
        from datadist_core.backends.mooncake import MooncakeBackend
        from datadist_core.testing.pair import BackendPair
        from datadist_core.transfer.plan import Op
        with BackendPair.in_process(MooncakeBackend) as pair:
            mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
            pair.link()
            batch = pair.batch(Op.READ, mine, theirs, [1], [2])
            print(pair.a.transfer(batch).status.value)
            pair.b.backend.unregister(theirs.region_id)
            print(pair.a.transfer(batch).status.value)
        """
    )
    assert (result.stdout, result.stderr) == ("ok\nfailed\n", "")


@pytest.mark.slow
def test_log_level_of_the_user_counts(mooncake: None) -> None:
    result = run_python("    from datadist_core.testing.end import LocalEnd\n" + OPEN, MC_LOG_LEVEL="INFO")
    assert "Transfer Engine" in result.stderr


def test_pull_and_push_between_two_ends(mooncake: None) -> None:
    with linked("mooncake") as (prompt, decoder):
        theirs, mine = filled_cache(prompt, 1), plain_cache(decoder, 2)
        key = BlocksCacheKey(prompt.cluster_id, 0)
        pulled = manager(decoder).pull_blocks(key, mine, [1, 2, 5], [3, 4, 0])
        pushed = manager(decoder).push_blocks(key, mine, [7, 8], [9, 15])
        for here, there in zip(mine.numpy(), theirs.numpy(), strict=True):
            assert np.array_equal(here[[3, 4, 0]], there[[1, 2, 5]])
            assert np.array_equal(here[[7, 8]], there[[9, 15]])
        assert (pulled.backend, pushed.backend) == ("mooncake", "mooncake")
