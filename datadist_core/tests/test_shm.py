# SPDX-License-Identifier: Apache-2.0
"""What is particular to the shm backend: who gets a descriptor, what is mapped for how long, what is left behind.

The rules that hold for every backend are in `test_backends.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from datadist_core.backends import _inline, _shm_server, shm
from datadist_core.backends._shm_client import RegionClient
from datadist_core.backends._shm_protocol import Bye, Fetch, Hello, decode, encode, prove
from datadist_core.backends.shm import ShmBackend
from datadist_core.errors import LLMException, PeerLost, ProtocolError, TimedOut, Unreachable
from datadist_core.memory.grid import Grid
from datadist_core.memory.region import Region, SharedMapping
from datadist_core.testing.child import ChildEnd, ChildSetup
from datadist_core.testing.end import WAIT_S, Export, LocalEnd
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair
from datadist_core.testing.parallel import eventually
from datadist_core.transfer import item_copy
from datadist_core.transfer.backend import CompletionStatus
from datadist_core.transfer.item_copy import ItemCopy
from datadist_core.transfer.plan import Op
from datadist_core.types import Deadline, Placement

FACTORY = "datadist_core.backends.shm:ShmBackend"
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FILE_BYTES = 64 << 10
IDS = iter(range(1 << 20, 1 << 21))


@pytest.fixture
def pair() -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(ShmBackend) as pair:
        yield pair


@pytest.fixture
def child_pair() -> Iterator[BackendPair[ChildEnd]]:
    with BackendPair.two_processes(FACTORY) as pair:
        yield pair


@pytest.fixture
def memfd() -> Iterator[Callable[..., int]]:
    """Makes memory files."""
    made = []

    def make(size_bytes: int = FILE_BYTES, seals: int = ALL_SEALS) -> int:
        fd = os.memfd_create("datadist-pool-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made.append(fd)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    yield make
    for fd in made:
        os.close(fd)


def export_file(end: LocalEnd, fd: int, offset_bytes: int = 0, size_bytes: int = FILE_BYTES) -> Export:
    """Register a region that claims to lie in `fd`."""
    region = Region(next(IDS), 0, size_bytes, Placement.HOST, mapping=SharedMapping(fd, offset_bytes))
    descriptor = end.backend.register(region)
    assert descriptor is not None
    return Export(region.region_id, size_bytes, descriptor)


def num_mappings(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def address_of(identity: bytes) -> bytes:
    return msgspec.msgpack.decode(identity, type=shm._Identity).address


def changed_identity(identity: bytes, **changes: object) -> bytes:
    decoded = msgspec.msgpack.decode(identity, type=shm._Identity)
    return msgspec.msgpack.encode(msgspec.structs.replace(decoded, **changes))


def dial(address: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(address)
    return sock


class TestWhoGetsIn:
    @pytest.mark.parametrize("first", ["a", "b"])
    def test_either_end_may_connect_first(self, pair: BackendPair[LocalEnd], first: str) -> None:
        token, ends = os.urandom(16), {"a": pair.a, "b": pair.b}
        early, late = ends.pop(first), ends.popitem()[1]
        server = late.backend._server
        failures: list[LLMException] = []

        def connect_early() -> None:
            try:
                early.connect(1, late.identity(), True, token, WAIT_S)
            except LLMException as error:
                failures.append(error)

        thread = threading.Thread(target=connect_early, name="datadist-test-early", daemon=True)
        thread.start()
        assert eventually(lambda: any(guest.proof for guest in server._guests)), "its Hello never arrived"
        assert all(guest.admission is None for guest in server._guests), "let in before its token was known"
        late.connect(2, early.identity(), False, token, WAIT_S)
        thread.join(WAIT_S)
        assert failures == []

    @pytest.mark.parametrize(
        "packets",
        [
            [Fetch(1)],
            [Hello(b"wrong"), Fetch(1)],
            [Hello(b"wrong"), Hello(b"wrong")],
            [Bye()],
            [b"\xc1"],
            [b"\x00" * 4096],
        ],
    )
    def test_strangers_are_dropped(self, pair: BackendPair[LocalEnd], packets: list[object]) -> None:
        pair.link()
        with dial(address_of(pair.b.identity())) as stranger:
            for packet in packets:
                stranger.send(packet if isinstance(packet, bytes) else encode(packet))
            data, fds, _, _ = socket.recv_fds(stranger, 4096, 1)
        assert (data, fds) == (b"", [])

    def test_a_proof_of_another_server_is_worthless(self, pair: BackendPair[LocalEnd]) -> None:
        """Whoever was dialled by mistake cannot use what it heard."""
        token, address = os.urandom(16), address_of(pair.b.identity())
        admission = _shm_server.Admission(5, token)
        pair.b.backend._server.admit(admission)
        with dial(address) as stranger:
            stranger.send(encode(Hello(prove(token, Hello, address_of(pair.a.identity())))))
            assert eventually(lambda: any(guest.proof for guest in pair.b.backend._server._guests))
            assert admission in pair.b.backend._server._expected
        client = RegionClient(address)
        client.greet(token, Deadline.after(WAIT_S))
        client.close()

    def test_a_token_admits_once(self, pair: BackendPair[LocalEnd]) -> None:
        token = os.urandom(16)
        pair.connect(token, token)
        second = RegionClient(address_of(pair.b.identity()))
        with pytest.raises(TimedOut):
            second.greet(token, Deadline.after(0.2))
        second.close()

    def test_an_impostor_at_the_address_is_found_out(self, pair: BackendPair[LocalEnd]) -> None:
        address = b"\0datadist-test-" + os.urandom(8).hex().encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()

            def impostor() -> None:
                with listener.accept()[0] as accepted:
                    accepted.send(accepted.recv(4096).replace(b"hello", b"welcome").replace(b"\xa5w", b"\xa7w"))

            thread = threading.Thread(target=impostor, name="datadist-test-impostor", daemon=True)
            thread.start()
            with pytest.raises(ProtocolError, match="does not know the link"):
                pair.a.connect(1, changed_identity(pair.b.identity(), address=address), True, b"t" * 16, WAIT_S)
            thread.join(WAIT_S)

    def test_a_crowd_of_strangers_does_not_shut_out_peers(self, pair: BackendPair[LocalEnd]) -> None:
        server = pair.b.backend._server
        crowd = [dial(server.address) for _ in range(_shm_server._MAX_STRANGERS + 20)]
        try:
            assert eventually(lambda: len(server._guests) == _shm_server._MAX_STRANGERS)
            pair.link()
        finally:
            for sock in crowd:
                sock.close()

    def test_another_user_may_be_linked(self) -> None:
        if os.getuid() != 0:
            pytest.skip("needs root to become somebody else")
        with pair_with_child("datadist_core.tests.test_shm:backend_of_nobody") as pair:
            pair.link()
            check_reads(pair)


def backend_of_nobody() -> ShmBackend:
    """Factory for a child process that runs as another user."""
    np.random.default_rng()  # is loaded on first use, from a folder that the other user may not be able to read
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    return ShmBackend()


def pair_with_child(factory: str) -> BackendPair[ChildEnd]:
    """Like `BackendPair.two_processes`, with this process's end made the usual way."""
    a = LocalEnd(ShmBackend())
    try:
        return BackendPair(a, ChildEnd(ChildSetup(factory)))
    except BaseException:
        a.close()
        raise


def check_reads(pair: BackendPair) -> None:
    mine, theirs = pair.a.add_grid(4, 1024), pair.b.add_grid(4, 1024)
    pair.b.fill(5)
    completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 3], [2, 1]))
    assert completion.status is CompletionStatus.OK, completion.error
    here, there = grid_view(pair.a, mine), grid_view(pair.b, theirs)
    assert np.array_equal(here[[0, 3]], there[[2, 1]])


def grid_view(end: LocalEnd | ChildEnd, grid: Grid) -> np.ndarray:
    region = end.snapshot(grid.region_id)
    return region[grid.offset_bytes : grid.end_bytes].reshape(grid.num_items, grid.item_bytes)


class TestReasons:
    """What users read when a better backend than tcp was not possible."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"boot_id": "0-0"}, r"another host \(boot id 0-0, here "),
            ({"network_namespace": "net:[1]"}, r"another network namespace \(net:\[1\], here net:\[\d+\]\)"),
            ({"version": 99}, "speaks version 99"),
            ({"address": b"\0datadist-nobody"}, "has ended"),
            ({"address": b"x" * 200}, "cannot be reached: AF_UNIX path too long"),
        ],
    )
    def test_connect(self, pair: BackendPair[LocalEnd], changes: dict[str, object], reason: str) -> None:
        identity = changed_identity(pair.b.identity(), **changes)
        with pytest.raises(Unreachable, match=reason):
            pair.a.connect(1, identity, True, b"t" * 16, WAIT_S)

    def test_a_real_other_network_namespace(self, pair: BackendPair[LocalEnd]) -> None:
        code = "from datadist_core.backends._host import this_host; print(this_host().network_namespace)"
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip(f"cannot make a network namespace here: {done.stderr.strip()}")
        identity = changed_identity(pair.b.identity(), network_namespace=done.stdout.strip())
        with pytest.raises(Unreachable, match="another network namespace"):
            pair.a.connect(1, identity, True, b"t" * 16, WAIT_S)

    def test_region_that_is_not_in_a_pool(self, pair: BackendPair[LocalEnd], memfd: Callable[..., int]) -> None:
        pair.connect()
        array = np.zeros(4096, dtype=np.uint8)
        region = Region(next(IDS), array.ctypes.data, array.nbytes, Placement.HOST, array)
        assert pair.b.backend.register(region) is None
        descriptor = export_file(pair.b, memfd(), size_bytes=4096).descriptor
        with pytest.raises(Unreachable, match="not in a mappable pool"):
            pair.a.attach(A_KNOWS_B_AS, Export(region.region_id, 4096, descriptor), WAIT_S)

    def test_region_that_was_unregistered(self, pair: BackendPair[LocalEnd]) -> None:
        pair.connect()
        (export,) = pair.b.exports()
        pair.b.backend.unregister(export.region_id)
        with pytest.raises(Unreachable, match=r"not registered \(any more\)"):
            pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)


class TestPeersThatLie:
    @pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
    def test_a_file_that_could_shrink(self, pair: BackendPair[LocalEnd], memfd: Callable[..., int], seals: int) -> None:
        self.check_attach_fails(pair, export_file(pair.b, memfd(seals=seals)), "not sealed against shrinking")

    def test_a_file_that_is_not_memory(self, pair: BackendPair[LocalEnd], tmp_path: Path) -> None:
        with (tmp_path / "plain").open("wb+") as file:
            file.truncate(FILE_BYTES)
            self.check_attach_fails(
                pair, export_file(pair.b, file.fileno()), "not a(?: sealed)? memory file|not sealed"
            )

    def test_a_descriptor_without_write_access(self, pair: BackendPair[LocalEnd], memfd: Callable[..., int]) -> None:
        fd = os.open(f"/proc/self/fd/{memfd()}", os.O_RDONLY)
        try:
            self.check_attach_fails(pair, export_file(pair.b, fd), "cannot map")
        finally:
            os.close(fd)

    @pytest.mark.parametrize("offset_bytes", [-4096, 4096, 1 << 62, -(1 << 62)])
    def test_a_region_beyond_its_file(
        self, pair: BackendPair[LocalEnd], memfd: Callable[..., int], offset_bytes: int
    ) -> None:
        self.check_attach_fails(pair, export_file(pair.b, memfd(), offset_bytes), "not inside its memory file")

    def test_an_empty_file(self, pair: BackendPair[LocalEnd], memfd: Callable[..., int]) -> None:
        self.check_attach_fails(pair, export_file(pair.b, memfd(0)), "cannot map 0 bytes")

    def check_attach_fails(self, pair: BackendPair[LocalEnd], export: Export, reason: str) -> None:
        """With that reason, leaving neither a descriptor nor a mapping, and the link in order."""
        pair.link()
        with nothing_left_behind(), pytest.raises(Unreachable, match=reason):
            pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        check_reads(pair)


class TestMappings:
    def test_one_mapping_for_all_regions_of_a_file(
        self, pair: BackendPair[LocalEnd], memfd: Callable[..., int]
    ) -> None:
        fd, part = memfd(), FILE_BYTES // 16
        exports = [export_file(pair.b, fd, i * part, part) for i in range(16)]
        pair.link()
        for export in exports:
            pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        assert num_mappings("datadist-pool-test") == 1
        for export in exports[1:]:
            pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
        assert num_mappings("datadist-pool-test") == 1
        pair.a.backend.detach(A_KNOWS_B_AS, exports[0].region_id)
        assert num_mappings("datadist-pool-test") == 0

    @pytest.mark.parametrize("end_by", ["disconnect", "close"])
    def test_the_end_of_a_link_unmaps(
        self, pair: BackendPair[LocalEnd], memfd: Callable[..., int], end_by: str
    ) -> None:
        export = export_file(pair.b, memfd())
        pair.connect()
        pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        assert num_mappings("datadist-pool-test") == 1
        if end_by == "disconnect":
            pair.a.disconnect(A_KNOWS_B_AS)
        else:
            pair.a.backend.close()
        assert num_mappings("datadist-pool-test") == 0

    def test_offsets_in_the_file_are_kept(self, pair: BackendPair[LocalEnd], memfd: Callable[..., int]) -> None:
        fd, page = memfd(), 4096
        os.pwrite(fd, b"right", 3 * page)
        export = export_file(pair.b, fd, 3 * page, page)
        pair.connect()
        pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        mine, theirs = pair.a.add_grid(1, 5), Grid(next(IDS), export.region_id, 0, 5, 5, 1)
        assert pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0], [0])).error is None
        assert grid_view(pair.a, mine).tobytes() == b"right"

    def test_detach_waits_for_nothing_and_pulls_nothing_away(
        self, pair: BackendPair[LocalEnd], memfd: Callable[..., int], paused_copy: PausedCopy
    ) -> None:
        """The mapping outlives the region until the copy in another thread has ended."""
        export = export_file(pair.b, memfd())
        pair.connect()
        pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        mine, theirs = pair.a.add_grid(1, 4096), Grid(next(IDS), export.region_id, 0, 4096, 4096, 1)
        batch = pair.batch(Op.READ, mine, theirs, [0], [0])
        with paused_copy.running(lambda: pair.a.transfer(batch)):
            pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
            assert num_mappings("datadist-pool-test") == 1
        assert num_mappings("datadist-pool-test") == 0


class PausedCopy:
    """Stops every copy at its start, in whichever thread, until it is told to go on."""

    def __init__(self, real: Callable[..., bool]) -> None:
        self.real = real
        self.started = threading.Event()
        self.proceed = threading.Event()
        self.events: list[str] = []

    def __call__(self, *arguments: object) -> bool:
        self.started.set()
        if not self.proceed.wait(WAIT_S):
            raise TimedOut("the test never let the copy go on")
        is_up = self.real(*arguments)
        self.events.append("copied")
        return is_up

    def running(self, call: Callable[[], object]) -> RunningCopy:
        return RunningCopy(self, call)


class RunningCopy:
    """A call in a thread of its own that is inside a copy while this is entered, and over after it."""

    def __init__(self, paused: PausedCopy, call: Callable[[], object]) -> None:
        self._paused = paused
        self._thread = threading.Thread(target=call, name="datadist-test-copying", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._paused.started.wait(WAIT_S), "the copy never began"

    def __exit__(self, *error: object) -> None:
        self._paused.proceed.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def paused_copy(monkeypatch: pytest.MonkeyPatch) -> PausedCopy:
    paused = PausedCopy(ItemCopy.run)
    monkeypatch.setattr(ItemCopy, "run", lambda *arguments: paused(*arguments))
    return paused


class TestEndingACopy:
    @pytest.mark.parametrize("end_by", ["disconnect", "close"])
    def test_waits_until_the_memory_is_left_alone(
        self, pair: BackendPair[LocalEnd], paused_copy: PausedCopy, end_by: str
    ) -> None:
        pair.link()
        batch = pair.batch(Op.READ, pair.a.add_grid(1, 4096), pair.b.add_grid(1, 4096), [0], [0])

        def end() -> None:
            if end_by == "disconnect":
                pair.a.disconnect(A_KNOWS_B_AS)
            else:
                pair.a.backend.close()
            paused_copy.events.append("ended")

        ender = threading.Thread(target=end, name="datadist-test-end", daemon=True)
        with paused_copy.running(lambda: pair.a.transfer(batch)):
            ender.start()
            open_batches = pair.a.backend._batches._open
            assert eventually(lambda: all(running.end_error is not None for running in open_batches))
        ender.join(WAIT_S)
        assert paused_copy.events == ["copied", "ended"]

    @pytest.mark.parametrize("native", [True, False])
    def test_a_cancelled_copy_stops_between_two_pieces(
        self, pair: BackendPair[LocalEnd], monkeypatch: pytest.MonkeyPatch, native: bool
    ) -> None:
        pair.link()
        monkeypatch.setattr(_inline, "_STOPPABLE_BYTES", 1)
        if not native:
            monkeypatch.setattr(item_copy, "_functions", lambda: (None, None))
        real = ItemCopy.run

        def cancel_then_copy(*arguments: object) -> bool:
            for batch_id in list(pair.a.backend._batches._by_id):
                pair.a.backend.cancel(batch_id)
            return real(*arguments)

        monkeypatch.setattr(ItemCopy, "run", cancel_then_copy)
        mine, theirs = pair.a.add_grid(16, 1024), pair.b.add_grid(16, 1024)
        before = pair.a.snapshot(mine.region_id)
        items = np.arange(16)
        completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, items, items[::-1].copy()))
        assert completion.status is CompletionStatus.CANCELLED
        np.testing.assert_array_equal(pair.a.snapshot(mine.region_id), before)


class TestPeersThatGo:
    def test_a_killed_peer_is_reported_and_its_batches_fail(self, child_pair: BackendPair[ChildEnd]) -> None:
        pair = child_pair
        pair.link()
        mine, theirs = pair.a.add_grid(4, 512), pair.b.add_grid(4, 512)
        pair.b.kill()
        completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [1]))
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, PeerLost)
        assert eventually(lambda: A_KNOWS_B_AS in pair.a.lost_peers)
        assert isinstance(pair.a.lost_peers[A_KNOWS_B_AS], PeerLost)

    def test_data_copied_while_the_peer_went_is_not_ok(
        self, child_pair: BackendPair[ChildEnd], paused_copy: PausedCopy
    ) -> None:
        pair = child_pair
        pair.link()
        batch = pair.batch(Op.READ, pair.a.add_grid(4, 512), pair.b.add_grid(4, 512), [1], [1])
        completions = []
        with paused_copy.running(lambda: completions.append(pair.a.transfer(batch))):
            pair.b.kill()
        assert [c.status for c in completions] == [CompletionStatus.FAILED]

    def test_an_orderly_end_is_noticed_but_not_reported(self, pair: BackendPair[LocalEnd]) -> None:
        pair.link()
        batch = pair.batch(Op.READ, pair.a.add_grid(4, 512), pair.b.add_grid(4, 512), [1], [1])
        link = pair.a.backend._links[A_KNOWS_B_AS]
        pair.b.disconnect(B_KNOWS_A_AS)
        assert eventually(lambda: link.lost is not None)
        with pytest.raises(PeerLost):
            pair.a.submit(batch)
        assert pair.a.lost_peers == {}

    def test_a_stopped_peer_times_out_and_is_usable_again(self, child_pair: BackendPair[ChildEnd]) -> None:
        """The late answer to the attach that timed out must not be taken for that to another."""
        pair = child_pair
        pair.connect()
        (export,) = pair.b.exports()
        pair.b.stop()
        assert eventually(lambda: is_stopped(pair.b))
        for _ in range(2):
            with pytest.raises(TimedOut):
                pair.a.attach(A_KNOWS_B_AS, export, 0.1)
        pair.b.resume()
        with pytest.raises(Unreachable, match="not registered"):
            pair.a.attach(A_KNOWS_B_AS, Export(next(IDS), export.size_bytes, export.descriptor), WAIT_S)
        pair.attach()
        check_reads(pair)

    def test_a_killed_peer_leaves_no_name(self, child_pair: BackendPair[ChildEnd]) -> None:
        name = address_of(child_pair.b.identity())[1:].decode()
        assert name in Path("/proc/net/unix").read_text()
        child_pair.b.kill()
        assert name not in Path("/proc/net/unix").read_text()
        assert not list(Path("/dev/shm").glob("*datadist*"))

    def test_nothing_is_left_behind_by_many_links(self, pair: BackendPair[LocalEnd]) -> None:
        pair.link()
        with nothing_left_behind():
            for _ in range(30):
                pair.disconnect()
                pair.link()

    def test_no_descriptor_survives_exec(self, pair: BackendPair[LocalEnd]) -> None:
        pair.link()
        ours = re.compile(r"socket:|datadist-pool|anon_inode:\[eventpoll\]")
        found = [fd for fd in os.listdir("/proc/self/fd") if ours.match(link_target(fd))]
        assert found
        assert [fd for fd in found if os.get_inheritable(int(fd))] == []


def is_stopped(child: ChildEnd) -> bool:
    """Whether SIGSTOP has reached every thread of a child."""
    stats = Path(f"/proc/{child._remote.pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def link_target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:")
    except FileNotFoundError:  # the one that listdir itself had open
        return ""


@pytest.mark.parametrize("packet", [b"", b"\xc1", b"\x80", encode(Bye()) + b"\x00", b"\x93\x01\x02\x03"])
def test_malformed_packets_are_protocol_errors(packet: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed packet"):
        decode(packet)
