# SPDX-License-Identifier: Apache-2.0
"""What is particular to the cma backend: whose memory is touched and whose is not, and why it may not be.

The rules that hold for every backend are in `test_backends.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from datadist_core import BlocksCacheKey
from datadist_core._copy import cma as copy_cma
from datadist_core._copy.cma import PROOF_BYTES, Fault, ProofGone, RemoteCopy, RemoteProcess, read_remote
from datadist_core.backends import _cma_host, _cma_link, _cma_permission, _cma_proofs, cma
from datadist_core.backends._cma_host import Credentials, ProcessWatch
from datadist_core.backends._cma_identity import Door, decode_identity, process_behind
from datadist_core.backends._cma_proofs import NUM_SLOTS, find_proof
from datadist_core.backends._proof_table import ProofTable
from datadist_core.backends.cma import CmaBackend
from datadist_core.errors import (
    LLMException,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    RemoteError,
    TimedOut,
    Unreachable,
)
from datadist_core.memory.grid import Grid
from datadist_core.memory.region import Region
from datadist_core.testing.child import ChildEnd, ChildSetup
from datadist_core.testing.conformance import BytesSuite, CompletionSuite
from datadist_core.testing.end import WAIT_S, Export, LocalEnd
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair
from datadist_core.testing.parallel import eventually, run_all
from datadist_core.tests.child import Child
from datadist_core.tests.core_ends import LINK_MS, desc, filled_cache, linked, make_end, manager, plain_cache
from datadist_core.transfer.backend import Completion, CompletionStatus
from datadist_core.transfer.plan import Op
from datadist_core.types import Deadline, LLMStatusCode, Placement

FACTORY = "datadist_core.backends.cma:CmaBackend"
IDS = iter(range(1 << 20, 1 << 21))
PAGE = mmap.PAGESIZE
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@pytest.fixture
def pair() -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(CmaBackend) as pair:
        yield pair


@pytest.fixture
def child_pair() -> Iterator[BackendPair[ChildEnd]]:
    with BackendPair.two_processes(FACTORY) as pair:
        yield pair


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of the copy."""
    if request.param == "python":
        monkeypatch.setattr(copy_cma, "_native", lambda: None)
    elif copy_cma._native() is None:
        pytest.skip("no native library here")
    return request.param


def changed_identity(identity: bytes, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(decode_identity(identity), **changes))


def user_grids(pair: BackendPair[ChildEnd], num_items: int = 8, item_bytes: int = 3000) -> tuple[Grid, Grid]:
    """Grids in ordinary memory of the two processes, which nobody can map."""
    theirs: Grid = pair.b._call("add_private_grid", num_items, item_bytes)
    return pair.a.add_private_grid(num_items, item_bytes), theirs


def items_of(end: LocalEnd | ChildEnd, grid: Grid) -> np.ndarray:
    region = end.snapshot(grid.region_id)
    return region[grid.offset_bytes : grid.end_bytes].reshape(grid.num_items, grid.item_bytes)


@pytest.mark.slow
class TestAllInPython(BytesSuite, CompletionSuite):
    """The contract holds without the compiled library."""

    factory = FACTORY
    two_processes = False

    @pytest.fixture(autouse=True)
    def _without_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copy_cma, "_native", lambda: None)


def test_the_fallback_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import datadist_core._copy as package

    def no_library() -> None:
        raise OSError("not built")

    monkeypatch.setattr(package, "_load", no_library)
    for cached in (package.native_library, copy_cma._native):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            memory = OwnMemory(num_bytes=64)
            for _ in range(3):
                memory.copy([0], [8], [8]).move(1 << 20)
        assert [record.message.count("no native copy kernel") for record in caplog.records] == [1]
    finally:
        for cached in (package.native_library, copy_cma._native):
            cached.cache_clear()


class OwnMemory:
    """Random bytes of this process that are taken for another's, and room for copies of them."""

    def __init__(self, num_bytes: int) -> None:
        self.here = np.zeros(num_bytes, dtype=np.uint8)
        self.there = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        self.table = ProofTable("cma", NUM_SLOTS)
        self.proof = os.urandom(PROOF_BYTES)
        self.table.show(self.proof)
        address = find_proof(os.getpid(), self.table.address, self.proof)
        assert address is not None
        self.process = RemoteProcess(os.getpid(), address, self.proof)

    def copy(self, local: list[int], remote: list[int], sizes: list[int], writing: bool = False) -> RemoteCopy:
        """By offsets."""
        arrays = [np.array(values, dtype=np.int64) for values in (local, remote, sizes)]
        at, of = arrays[0] + self.here.ctypes.data, arrays[1] + self.there.ctypes.data
        return RemoteCopy(self.process, at, of, arrays[2], writing)


def move_all(copy: RemoteCopy, budget: int) -> int:
    """In pieces of `budget`; how many that were."""
    num_pieces = 0
    while not copy.exhausted:
        copy.move(budget)
        num_pieces += 1
    return num_pieces


@pytest.fixture
def guarded() -> Iterator[Callable[[int], np.ndarray]]:
    """Makes memory of some pages with an inaccessible page behind it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    kept = []

    def make(num_pages: int, protection: int = 0) -> np.ndarray:
        memory = mmap.mmap(-1, (num_pages + 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(memory, dtype=np.uint8)
        kept.append(view)
        view[:] = 7
        assert libc.mprotect(view.ctypes.data + num_pages * PAGE, PAGE, protection) == 0
        return view

    yield make
    for view in kept:
        libc.mprotect(view.ctypes.data, view.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.usefixtures("way")
class TestRemoteCopy:
    @pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
    @pytest.mark.parametrize("budget", [1 << 30, 4096, 1000, 97])
    def test_moves_exactly_the_ranges(self, writing: bool, budget: int) -> None:
        """More ranges than one call takes, neighbours on one side, on both, on none, and none of a handy size."""
        random = np.random.default_rng(2)
        num, slot = 3000, 16
        memory = OwnMemory(num * slot)
        local, remote = np.arange(num), np.arange(num)
        random.shuffle(remote[: num // 2])
        sizes = np.where(random.random(num) < 0.5, slot, random.integers(1, slot, num))
        expected = (memory.there if writing else memory.here).copy()
        source, target = (memory.here, memory.there) if writing else (memory.there, memory.here)
        memory.here[:] ^= random.integers(0, 256, memory.here.size, dtype=np.uint8) if writing else 0
        for i in range(num):
            of, at = (local[i], remote[i]) if writing else (remote[i], local[i])
            expected[at * slot : at * slot + sizes[i]] = source[of * slot : of * slot + sizes[i]]
        copy = memory.copy((local * slot).tolist(), (remote * slot).tolist(), sizes.tolist(), writing)
        num_pieces = move_all(copy, budget)
        np.testing.assert_array_equal(target, expected)
        assert num_pieces == -(-int(sizes.sum()) // budget)

    def test_one_large_range_is_split(self) -> None:
        memory = OwnMemory(1 << 20)
        copy = memory.copy([0], [0], [1 << 20])
        copy.move(1000)
        np.testing.assert_array_equal(memory.here[:1000], memory.there[:1000])
        assert not memory.here[1000:].any()
        assert move_all(copy, 100_000) == 11
        np.testing.assert_array_equal(memory.here, memory.there)

    def test_nothing_to_move(self) -> None:
        copy = OwnMemory(16).copy([], [], [])
        assert copy.exhausted
        copy.move(100)

    @pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
    @pytest.mark.parametrize("side", ["local", "remote"])
    def test_a_fault_names_its_place(self, guarded: Callable[..., np.ndarray], writing: bool, side: str) -> None:
        memory, bad = OwnMemory(5 * PAGE), guarded(3)
        good = (memory.there if side == "local" else memory.here).ctypes.data
        places = {side: bad.ctypes.data + 100, "local" if side == "remote" else "remote": good}
        arrays = [np.array([value], dtype=np.int64) for value in (places["local"], places["remote"], 4 * PAGE)]
        copy = RemoteCopy(memory.process, *arrays, writing)
        with pytest.raises(Fault) as caught:
            move_all(copy, 1 << 20)
        found = {"local": caught.value.local_address, "remote": caught.value.remote_address}
        assert found[side] == bad.ctypes.data + 3 * PAGE
        assert {found[name] - places[name] for name in found} == {3 * PAGE - 100}

    @pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
    @pytest.mark.parametrize("change", ["other bytes", "other address", "nowhere", "withdrawn"])
    def test_another_process_is_found_out(self, writing: bool, change: str) -> None:
        memory = OwnMemory(PAGE)
        before = memory.there.copy()
        right = memory.process
        if change == "withdrawn":
            memory.table.withdraw(0)
        memory.process = {
            "other bytes": RemoteProcess(right.pid, right.proof_address, os.urandom(PROOF_BYTES)),
            "other address": RemoteProcess(right.pid, right.proof_address + PROOF_BYTES, right.proof),
            "nowhere": RemoteProcess(right.pid, PAGE, right.proof),
            "withdrawn": right,
        }[change]
        with pytest.raises(ProofGone):
            memory.copy([0], [0], [PAGE], writing).move(PAGE)
        with pytest.raises(ProofGone):
            memory.process.check()
        np.testing.assert_array_equal(memory.there, before)

    @pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
    def test_no_such_process(self, writing: bool) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait(WAIT_S)
        memory = OwnMemory(PAGE)
        memory.process = RemoteProcess(child.pid, memory.process.proof_address, memory.proof)
        with pytest.raises(ProcessLookupError):
            memory.copy([0], [0], [PAGE], writing).move(PAGE)


def test_other_threads_run_during_a_copy() -> None:
    """Another thread sees the first range copied and the last one not: possible only if the GIL is released."""
    assert any(_seen_by_another_thread() for _ in range(10)), "on a busy machine the other one need not run in time"


def _seen_by_another_thread() -> bool:
    memory = OwnMemory(1 << 20)
    memory.there[:] = 1
    num_repeats, flags = 512, np.zeros(2, dtype=np.uint8)
    sizes = np.full(num_repeats, 1 << 20, dtype=np.int64)
    local = np.full(num_repeats, memory.here.ctypes.data, dtype=np.int64)
    local[0], local[-1] = flags.ctypes.data, flags.ctypes.data + 1
    sizes[0] = sizes[-1] = 1
    remote = np.full(num_repeats, memory.there.ctypes.data, dtype=np.int64)
    copy = RemoteCopy(memory.process, local, remote, sizes, False)
    copier = threading.Thread(target=copy.move, args=[1 << 40], name="datadist-test-copy", daemon=True)
    copier.start()
    seen = set()
    while copier.is_alive():
        seen.add(flags.tobytes())
    copier.join()
    assert flags.all()
    return b"\x01\x00" in seen


class TestUserMemory:
    @both_ops
    def test_between_processes(self, child_pair: BackendPair[ChildEnd], op: Op) -> None:
        mine, theirs = user_grids(child_pair)
        child_pair.link()
        child_pair.a.fill(1)
        child_pair.b.fill(2)
        before = items_of(child_pair.a, mine), items_of(child_pair.b, theirs)
        completion = child_pair.a.transfer(child_pair.batch(op, mine, theirs, [0, 1, 5], [6, 7, 2]))
        assert completion.error is None
        if op is Op.READ:
            before[0][[0, 1, 5]] = before[1][[6, 7, 2]]
        else:
            before[1][[6, 7, 2]] = before[0][[0, 1, 5]]
        np.testing.assert_array_equal(items_of(child_pair.a, mine), before[0])
        np.testing.assert_array_equal(items_of(child_pair.b, theirs), before[1])

    def test_a_push_into_registered_arrays_of_another_process(self) -> None:
        """There is no tcp to fall back to, and shm cannot do it."""
        with Child(cluster_id=1, backend="shm,cma", listen="127.0.0.1:0") as prompt, make_end("shm,cma") as decoder:
            memory = np.zeros((4, 16, 256), dtype=np.float32)
            cache = manager(decoder).register_blocks_cache(
                desc(), [tensor.ctypes.data for tensor in memory], BlocksCacheKey(decoder.cluster_id), True
            )
            prompt.do("fill", 4)
            overall, _ = decoder.link_clusters([prompt.info()], timeout=LINK_MS)
            assert overall is LLMStatusCode.LLM_SUCCESS
            prompt.do("push", decoder.cluster_id, [1, 2], [9, 4])
            np.testing.assert_array_equal(memory[:, [9, 4]], prompt.do("read", [1, 2]))
            assert not memory[:, [0, 1, 2, 3, 5, 6, 7, 8]].any()
            manager(decoder).unregister_cache(cache.cache_id)

    def test_auto_takes_shm_for_the_pool(self) -> None:
        with Child(cluster_id=1, backend="auto", listen="127.0.0.1:0") as prompt, make_end() as decoder:
            prompt.do("fill", 4)
            overall, _ = decoder.link_clusters([prompt.info()], timeout=LINK_MS)
            assert overall is LLMStatusCode.LLM_SUCCESS
            assert decoder.link_info(1).backends == ("shm", "cma", "tcp")
            report = manager(decoder).pull_blocks(BlocksCacheKey(1), plain_cache(decoder, 5), [1, 2], [3, 4])
            assert report.backend == "shm"

    def test_a_pull_of_registered_arrays_goes_over_cma(self) -> None:
        with linked("shm,cma,tcp") as (prompt, decoder):
            memory = np.random.default_rng(11).random((2, 16, 256), dtype=np.float32)
            own = manager(prompt).register_blocks_cache(
                desc(num_tensors=2), [part.ctypes.data for part in memory], BlocksCacheKey(prompt.cluster_id), True
            )
            filled_cache(prompt, 6, model_id=1)
            target, other = plain_cache(decoder, 12, desc(num_tensors=2)), plain_cache(decoder, 13)
            report = manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [3, 4], [0, 1])
            assert report.backend == "cma"
            np.testing.assert_array_equal(target.numpy()[1][:2], memory[1, 3:5])
            assert manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 1), other, [0], [0]).backend == "shm"
            manager(prompt).unregister_cache(own.cache_id)

    def test_memory_that_is_not_there_cannot_be_attached(
        self, pair: BackendPair[LocalEnd], guarded: Callable[..., np.ndarray]
    ) -> None:
        pair.link()
        memory = guarded(1)
        with pytest.raises(Unreachable, match=r"region \d+ of peer 71: address 0x[0-9a-f]+ .* is not mapped there"):
            pair.a.attach(A_KNOWS_B_AS, export_of(pair.b, memory.ctypes.data, 2 * PAGE), WAIT_S)

    @pytest.mark.parametrize(("address", "size"), [(0, 4096), (-4096, 4096), (1 << 62, 4096), (PAGE, 1 << 62)])
    def test_impossible_regions(self, pair: BackendPair[LocalEnd], address: int, size: int) -> None:
        pair.link()
        with pytest.raises(Unreachable, match="cannot exist"):
            pair.a.attach(A_KNOWS_B_AS, export_of(pair.b, address, size), WAIT_S)

    @pytest.mark.parametrize(("op", "protection"), [(Op.READ, 0), (Op.WRITE, 0), (Op.WRITE, mmap.PROT_READ)])
    def test_memory_the_peer_freed_is_the_peers_fault(
        self, pair: BackendPair[LocalEnd], guarded: Callable[..., np.ndarray], op: Op, protection: int
    ) -> None:
        error = self._fault(pair, op, theirs=guarded(1, protection), mine=np.zeros(3 * PAGE, dtype=np.uint8))
        assert isinstance(error, RemoteError), error

    @pytest.mark.parametrize(("op", "protection"), [(Op.READ, 0), (Op.WRITE, 0), (Op.READ, mmap.PROT_READ)])
    def test_memory_we_freed_is_our_fault(
        self, pair: BackendPair[LocalEnd], guarded: Callable[..., np.ndarray], op: Op, protection: int
    ) -> None:
        error = self._fault(pair, op, theirs=np.zeros(3 * PAGE, dtype=np.uint8), mine=guarded(1, protection))
        assert isinstance(error, ParamInvalid), error

    def _fault(self, pair: BackendPair[LocalEnd], op: Op, theirs: np.ndarray, mine: np.ndarray) -> LLMException | None:
        """How a batch over two pages ends of which the second cannot be touched on one side."""
        pair.link()
        export = export_of(pair.b, theirs.ctypes.data, 3 * PAGE)
        pair.a.backend._links[A_KNOWS_B_AS].link._regions._regions[export.region_id] = _cma_link.AttachedRegion(
            theirs.ctypes.data, 3 * PAGE
        )
        region = Region(next(IDS), mine.ctypes.data, 3 * PAGE, Placement.HOST, mine)
        pair.a.add_region(region)
        local, remote = Grid(0, region.region_id, 0, PAGE, PAGE, 2), Grid(0, export.region_id, 0, PAGE, PAGE, 2)
        error = pair.a.transfer(pair.batch(op, local, remote, [0, 1], [0, 1])).error
        pair.a.remove_region(region.region_id)
        return error


def export_of(end: LocalEnd, address: int, size_bytes: int) -> Export:
    region = Region(next(IDS), address, size_bytes, Placement.HOST)
    descriptor = end.backend.register(region)
    assert descriptor is not None
    return Export(region.region_id, size_bytes, descriptor)


class TestPeersThatGo:
    @both_ops
    def test_killed_between_two_pieces(
        self, child_pair: BackendPair[ChildEnd], monkeypatch: pytest.MonkeyPatch, op: Op
    ) -> None:
        mine, theirs = user_grids(child_pair)
        child_pair.link()
        monkeypatch.setattr(_cma_link, "_PIECE_BYTES", 4096)
        num_pieces = kill_after_first_piece(child_pair.b, monkeypatch)
        completion = child_pair.a.transfer(child_pair.batch(op, mine, theirs, range(8), range(8)))
        assert isinstance(completion.error, PeerLost)
        assert len(num_pieces) == 2

    @both_ops
    def test_killed_during_one_of_many_transfers(self, child_pair: BackendPair[ChildEnd], op: Op) -> None:
        mine, theirs = user_grids(child_pair, 16, 1 << 20)
        child_pair.link()
        batch = child_pair.batch(op, mine, theirs, range(16), range(16))
        completions: list[Completion] = []
        started = threading.Event()

        def transfer() -> None:
            while not completions or completions[-1].error is None:
                completions.append(child_pair.a.transfer(batch))
                started.set()

        thread = threading.Thread(target=transfer, name="datadist-test-transfers", daemon=True)
        thread.start()
        assert started.wait(WAIT_S)
        child_pair.b.kill()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert isinstance(completions[-1].error, PeerLost)

    def test_killed_after_the_last_byte(
        self, child_pair: BackendPair[ChildEnd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody is told that memory of a dead process was written."""
        mine, theirs = user_grids(child_pair)
        child_pair.link()
        kill_after_first_piece(child_pair.b, monkeypatch)
        completion = child_pair.a.transfer(child_pair.batch(Op.WRITE, mine, theirs, [0], [0]))
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, PeerLost)

    @both_ops
    def test_another_program_in_the_peers_place(self, op: Op) -> None:
        """exec keeps the number, the start time and the pidfd; the memory is another's."""
        with pair_with_child("datadist_core.tests.test_cma:backend_that_execs") as pair:
            mine, theirs = user_grids(pair)
            pair.link()
            pid = process_behind(decode_identity(pair.b.identity()).door)
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
            assert eventually(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes())
            completion = pair.a.transfer(pair.batch(op, mine, theirs, [0], [0]))
            assert isinstance(completion.error, PeerLost)
            assert "another program" in str(completion.error)
            pair.b.kill()

    def test_a_link_that_the_peer_took_down(self, pair: BackendPair[LocalEnd]) -> None:
        pair.link()
        batch = pair.batch(Op.WRITE, pair.a.add_grid(4, 512), pair.b.add_grid(4, 512), [1], [1])
        pair.b.close()
        assert isinstance(pair.a.transfer(batch).error, PeerLost)

    def test_a_stopped_peer_is_no_hindrance(self, child_pair: BackendPair[ChildEnd]) -> None:
        mine, theirs = user_grids(child_pair)
        child_pair.link()
        child_pair.b.stop()
        try:
            assert child_pair.a.transfer(child_pair.batch(Op.READ, mine, theirs, [0], [0])).error is None
        finally:
            child_pair.b.resume()

    def test_nothing_is_left_behind_by_many_links(self, pair: BackendPair[LocalEnd]) -> None:
        pair.link()
        free = list(pair.a.backend._standing.proofs._free)
        with nothing_left_behind():
            for _ in range(30):
                pair.disconnect()
                assert pair.a.backend.is_fenced(A_KNOWS_B_AS)
                assert pair.b.backend.is_fenced(B_KNOWS_A_AS)
                pair.link()
        assert len(pair.a.backend._standing.proofs._free) == len(free)

    def test_a_killed_peer_leaves_no_name(self, child_pair: BackendPair[ChildEnd]) -> None:
        name = decode_identity(child_pair.b.identity()).door[1:].decode()
        assert name in Path("/proc/net/unix").read_text()
        child_pair.b.kill()
        assert name not in Path("/proc/net/unix").read_text()


def kill_after_first_piece(child: ChildEnd, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every piece."""
    pieces: list[int] = []
    real = RemoteCopy.move

    def move(self: RemoteCopy, budget: int) -> None:
        pieces.append(budget)
        real(self, budget)
        child.kill()

    monkeypatch.setattr(RemoteCopy, "move", move)
    return pieces


_kept: list[socket.socket] = []


def backend_that_execs() -> CmaBackend:
    """Factory for a child process that becomes another program on SIGUSR1."""
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(tell.fileno())  # written to at once, whatever the main thread is waiting for

    def wait() -> None:
        told.recv(1)
        os.execvp("sleep", ["sleep", "600"])

    threading.Thread(target=wait, name="datadist-test-exec", daemon=True).start()
    _kept.append(tell)
    return CmaBackend()


def pair_with_child(factory: str) -> BackendPair[ChildEnd]:
    a = LocalEnd(CmaBackend())
    try:
        return BackendPair(a, ChildEnd(ChildSetup(factory)))
    except BaseException:
        a.close()
        raise


class TestEndingATransfer:
    @pytest.mark.parametrize("end_by", ["cancel", "disconnect", "close"])
    def test_between_two_pieces(
        self, pair: BackendPair[LocalEnd], monkeypatch: pytest.MonkeyPatch, end_by: str
    ) -> None:
        """A single range, larger than a piece, is no reason to go on."""
        pair.link()
        monkeypatch.setattr(_cma_link, "_PIECE_BYTES", 4096)
        pieces: list[int] = []
        end = {
            "cancel": lambda: [pair.a.backend.cancel(key) for key in list(pair.a.backend._batches._by_id)],
            "disconnect": lambda: pair.a.disconnect(A_KNOWS_B_AS),
            "close": lambda: pair.a.backend.close(),
        }[end_by]

        def end_after_first(self: RemoteCopy, budget: int) -> None:
            pieces.append(budget)
            assert len(pieces) < 10, "the transfer goes on"
            end()

        monkeypatch.setattr(RemoteCopy, "move", end_after_first)
        batch = pair.batch(Op.READ, pair.a.add_grid(1, 1 << 20), pair.b.add_grid(1, 1 << 20), [0], [0])
        completion = pair.a.transfer(batch)
        assert completion.status is (CompletionStatus.CANCELLED if end_by == "cancel" else CompletionStatus.FAILED)
        assert len(pieces) == 1

    def test_a_transfer_that_is_out_of_time(self, pair: BackendPair[LocalEnd], monkeypatch: pytest.MonkeyPatch) -> None:
        pair.link()
        monkeypatch.setattr(_cma_link, "_PIECE_BYTES", 4096)
        batch = pair.batch(Op.READ, pair.a.add_grid(1, 1 << 20), pair.b.add_grid(1, 1 << 20), [0], [0])
        pieces: list[int] = []

        def time_passes(copy: RemoteCopy, budget: int) -> None:
            pieces.append(budget)
            assert len(pieces) < 10, "the transfer goes on"
            monkeypatch.setattr(Deadline, "expired", True)

        monkeypatch.setattr(RemoteCopy, "move", time_passes)
        completion = pair.a.transfer(batch)
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, TimedOut)


class TestWhoIsTouched:
    """A peer must not be able to lead us to somebody else's memory."""

    def test_a_peer_cannot_pass_another_process_off_as_itself(self, pair: BackendPair[LocalEnd]) -> None:
        """Whatever address it names, it is looked up in the process that the kernel says it is."""
        with BackendPair.two_processes(FACTORY) as other:
            door = decode_identity(other.b.identity()).door
            identity = changed_identity(pair.b.identity(), door=door)
            failures = run_all([lambda: pair.a.connect(1, identity, True, b"t" * 16, 0.3)])
        assert isinstance(failures[0], Unreachable | TimedOut)

    def test_a_wrong_address_of_proofs(self, pair: BackendPair[LocalEnd], guarded: Callable[..., np.ndarray]) -> None:
        identity = changed_identity(pair.b.identity(), proofs_address=guarded(0).ctypes.data)
        with pytest.raises(Unreachable, match="cannot be read where it says"):
            pair.a.connect(1, identity, True, b"t" * 16, WAIT_S)

    @pytest.mark.parametrize("address", [0, -1, 1 << 62])
    def test_an_impossible_address_of_proofs(self, pair: BackendPair[LocalEnd], address: int) -> None:
        with pytest.raises(ProtocolError, match="impossible address"):
            pair.a.connect(1, changed_identity(pair.b.identity(), proofs_address=address), True, b"t" * 16, WAIT_S)

    def test_a_proof_is_of_one_end_only(self, pair: BackendPair[LocalEnd]) -> None:
        """An end that shows us our own proof knows nothing."""
        token = os.urandom(16)
        mirrored = _cma_proofs.prove(token, pair.a.identity())
        pair.b.backend._standing.proofs.show(mirrored)
        with pytest.raises(TimedOut):
            pair.a.connect(1, pair.b.identity(), True, token, 0.2)

    def test_another_user_is_refused(self) -> None:
        if os.getuid() != 0:
            pytest.skip("needs root to become somebody else")
        with pair_with_child("datadist_core.tests.test_cma:backend_of_nobody") as pair:
            failures = pair.try_connect()
        assert [type(failure) for failure in failures] == [Unreachable, Unreachable]
        assert "another user (user id 65534, here 0)" in str(failures[0])

    def test_the_number_of_an_ended_process(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        watches = [ProcessWatch(child.pid), watch_by_start_time(child.pid)]
        assert not any(watch.has_ended() for watch in watches)
        child.communicate(b"\n", WAIT_S)
        assert all(watch.has_ended() for watch in watches)
        with pytest.raises(ProcessLookupError):
            ProcessWatch(child.pid)
        with pytest.raises(ProcessLookupError):
            watch_by_start_time(child.pid)

    def test_a_number_that_was_given_to_another_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = watch_by_start_time(os.getpid())
        started = _cma_host.start_time(os.getpid())
        assert not watch.has_ended()
        monkeypatch.setattr(_cma_host, "start_time", lambda pid: started + 1)
        assert watch.has_ended()

    def test_an_ended_process_is_not_looked_at(
        self, child_pair: BackendPair[ChildEnd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its number may be another's by now."""
        mine, theirs = user_grids(child_pair)
        child_pair.link()
        child_pair.b.kill()
        looks: list[object] = []
        monkeypatch.setattr(RemoteCopy, "move", lambda *args: looks.append(args))
        monkeypatch.setattr(RemoteProcess, "check", lambda *args: looks.append(args))
        completion = child_pair.a.transfer(child_pair.batch(Op.READ, mine, theirs, [0], [0]))
        assert isinstance(completion.error, PeerLost)
        assert looks == []


def watch_by_start_time(pid: int) -> ProcessWatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cma_host, "_open_pidfd", lambda pid: None)
        return ProcessWatch(pid)


def backend_of_nobody() -> CmaBackend:
    """Factory for a child process that runs as another user."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    return CmaBackend()


class TestReasons:
    """What users read when cma was not possible."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"boot_id": "0-0"}, r"another host \(boot id 0-0, here "),
            ({"pid_namespace": "pid:[1]"}, r"another process namespace \(pid:\[1\], here pid:\[\d+\]\)"),
            ({"network_namespace": "net:[1]"}, r"another network namespace \(net:\[1\], here net:\[\d+\]\)"),
            ({"version": 99}, "speaks version 99"),
            ({"door": b"\0datadist-nobody"}, "has ended"),
            ({"door": b"x" * 200}, "cannot be reached: AF_UNIX path too long"),
        ],
    )
    def test_connect(self, pair: BackendPair[LocalEnd], changes: dict[str, object], reason: str) -> None:
        with pytest.raises(Unreachable, match=reason):
            pair.a.connect(1, changed_identity(pair.b.identity(), **changes), True, b"t" * 16, WAIT_S)

    def test_a_real_other_process_namespace(self) -> None:
        """Even if a peer lied about its namespace: the kernel has no number for a process it cannot show us."""
        with contextlib.closing(Door()) as door:
            assert process_behind(door.address) == os.getpid()
            code = f"from datadist_core.backends._cma_identity import process_behind; process_behind({door.address!r})"
            done = run_python(code, ["unshare", "--user", "--map-root-user", "--pid", "--fork"])
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip(f"cannot make a process namespace here: {done.stderr.strip()}")
        assert "Unreachable: the peer is in a process namespace that this process cannot see" in done.stderr

    @pytest.mark.parametrize("option", [{"allow_ptrace": 1}, {"allow_ptrace": "yes"}, {"ptrace": True}])
    def test_wrong_options(self, option: dict[str, object]) -> None:
        with pytest.raises(ParamInvalid, match=f"cma option '?{next(iter(option))}"):
            LocalEnd(CmaBackend(), options=option)

    def test_a_seccomp_filter(self) -> None:
        done = run_python(SECCOMP)
        if "no filter" in done.stdout:
            pytest.skip("cannot set a seccomp filter here")
        assert done.stdout.startswith("Unreachable: a seccomp filter"), (done.stdout, done.stderr)

    def test_a_protected_process(self) -> None:
        if os.getuid() != 0:
            pytest.skip("needs root to give up its capabilities")
        assert "it is protected (PR_SET_DUMPABLE" in self._refused("os.setresuid(65534, 65534, 65534); protect(0)")

    def test_another_user(self) -> None:
        if os.getuid() != 0:
            pytest.skip("needs root to become somebody else")
        text = self._refused("os.setresuid(65533, 65533, 65533); protect(1)")
        assert "it runs with user ids (65533, 65533, 65533), this process with (65534, 65534, 65534)" in text

    def _refused(self, become: str) -> str:
        """What a process of user 65534 is told about one that became something else."""
        done = run_python(REFUSED.format(become=become))
        assert done.returncode == 0, done.stderr
        return done.stdout

    @pytest.mark.parametrize(
        ("scope", "reason"),
        [
            (1, "ptrace_scope=1 wants its consent; set the option allow_ptrace"),
            (2, "ptrace_scope=2 wants a capability; give both ends CAP_SYS_PTRACE"),
            (3, "ptrace_scope=3 forbids it to everybody"),
            (None, "SELinux"),
        ],
    )
    def test_yama(self, yama: Callable[[int | None], None], scope: int | None, reason: str) -> None:
        yama(scope)
        assert reason in _cma_permission.why_refused(os.getpid())

    def test_capabilities_that_only_the_peer_has(
        self, yama: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        yama(1)
        mine = _cma_permission.credentials("self")
        there = {"self": mine, 1: replace(mine, permitted=mine.permitted | 0x80)}
        monkeypatch.setattr(_cma_permission, "credentials", there.__getitem__)
        assert "it has capabilities (0x80) that this process has not" in _cma_permission.why_refused(1)

    def test_a_process_that_has_ended(self) -> None:
        assert "has ended" in _cma_permission.why_refused(1 << 22)


@pytest.fixture
def yama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int | None], None]:
    """Makes this look like an ordinary user's process on a host with that setting; None for no Yama."""

    def pretend(scope: int | None) -> None:
        file = tmp_path / "ptrace_scope"
        if scope is not None:
            file.write_text(f"{scope}\n")
        monkeypatch.setattr(_cma_host, "_YAMA_SCOPE", file)
        ids = (os.getuid(),) * 3
        plain = Credentials(ids, ids, permitted=0, effective=0)
        monkeypatch.setattr(_cma_permission, "credentials", lambda process: plain)

    return pretend


class Kernel:
    """Refuses a child's memory, like Yama does, until told otherwise; and takes note of who is named as tracer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named: list[int] = []
        self.num_refused = 0
        self.permits_after = 1 << 30
        monkeypatch.setattr(_cma_permission, "_name_tracer", self.named.append)
        monkeypatch.setattr(cma, "find_proof", self._find)

    def _find(self, pid: int, address: int, proof: bytes) -> int | None:
        if self.num_refused < self.permits_after:
            self.num_refused += 1
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return find_proof(pid, address, proof)


class TestConsent:
    """With kernel.yama.ptrace_scope=1. Yama itself is played: few test machines have it in this setting."""

    def test_without_the_option_it_is_refused_at_once(
        self, child_pair: BackendPair[ChildEnd], yama: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        yama(1)
        kernel = Kernel(monkeypatch)
        with pytest.raises(Unreachable, match="set the option allow_ptrace"):
            child_pair.a.connect(A_KNOWS_B_AS, child_pair.b.identity(), True, b"t" * 16, WAIT_S)
        assert (kernel.num_refused, kernel.named) == (1, [])

    def test_with_the_option_the_peer_is_named_and_waited_for(
        self, yama: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        yama(1)
        kernel = Kernel(monkeypatch)
        kernel.permits_after = 3
        with BackendPair.two_processes(FACTORY, options={"allow_ptrace": True}) as pair:
            real = pair.b.identity()
            pid = process_behind(decode_identity(real).door)
            pretended = changed_identity(real, traces_all=False)  # this kernel would let root do anything
            monkeypatch.setattr(pair.b, "identity", lambda: pretended)

            def prove(token: bytes, identity: bytes) -> bytes:
                return _cma_proofs.prove(token, real if identity == pretended else identity)

            monkeypatch.setattr(cma, "prove", prove)
            pair.connect()
            assert (kernel.num_refused, kernel.named) == (3, [pid])
            pair.a.disconnect(A_KNOWS_B_AS)
            assert kernel.named == [pid, 0]

    def test_one_tracer_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        named: list[int] = []
        monkeypatch.setattr(_cma_permission, "_name_tracer", named.append)
        consent = _cma_permission.Consent()
        first, second, third = object(), object(), object()
        consent.give(first, 11)
        consent.give(second, 11)
        with pytest.raises(Unreachable, match="lets process 11 touch its memory and can not name 12 as well"):
            consent.give(third, 12)
        consent.withdraw(third)
        consent.withdraw(first)
        assert named == [11]
        consent.withdraw(second)
        consent.give(third, 12)
        assert named == [11, 0, 12]

    def test_where_there_is_no_yama_nobody_can_be_named(self) -> None:
        if Path("/proc/sys/kernel/yama").exists():
            pytest.skip("this host has Yama")
        with pytest.raises(Unreachable, match="Invalid argument"):
            _cma_permission.Consent().give(object(), os.getppid())


def test_more_links_than_slots() -> None:
    table = ProofTable("cma", NUM_SLOTS)
    slots = [table.show(os.urandom(PROOF_BYTES)) for _ in range(NUM_SLOTS)]
    with pytest.raises(Unreachable, match=f"{NUM_SLOTS} links"):
        table.show(os.urandom(PROOF_BYTES))
    table.withdraw(slots[5])
    proof = os.urandom(PROOF_BYTES)
    assert table.show(proof) == slots[5]
    assert read_remote(os.getpid(), table.address + slots[5] * PROOF_BYTES, PROOF_BYTES) == proof


def run_python(code: str, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(prefix or []), sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


#: A process that forbids itself the two system calls, as containers do, and then opens the backend.
SECCOMP = """
import ctypes, platform, struct
from datadist_core.backends.cma import CmaBackend
from datadist_core.errors import Unreachable
from datadist_core.transfer.backend import BackendContext
number = {"x86_64": 310, "aarch64": 270}.get(platform.machine(), -1)
deny, allow = (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
ops = [(0x20, 0, 0, 0), (0x15, 1, 0, number), (0x15, 0, 1, number + 1), deny, allow]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *op) for op in ops))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(ops), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
if number < 0 or prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.addressof(program), 0, 0):
    print("no filter")
else:
    try:
        CmaBackend().open(BackendContext(None, None, None))
        print("opened")
    except Unreachable as error:
        print("Unreachable:", error)
"""

#: A process of user 65534 that looks at another one, its child. Root's capabilities go with its user id.
REFUSED = """
import ctypes, os, sys
from datadist_core._copy.cma import read_remote
from datadist_core.backends._cma_permission import why_refused
prctl = ctypes.CDLL(None).prctl
def protect(dumpable):
    prctl(4, dumpable, 0, 0, 0)
ready, told = os.pipe()
end, leave = os.pipe()
os.setgroups([])
os.setresgid(65534, 65534, 65534)
memory = ctypes.create_string_buffer(64)
child = os.fork()
if child == 0:
    {become}
    os.close(leave)
    os.write(told, b"x")
    os.read(end, 1)
    os._exit(0)
os.close(end)
os.read(ready, 1)
os.setresuid(65534, 65534, 65534)
try:
    read_remote(child, ctypes.addressof(memory), 64)
    print("it was permitted")
except PermissionError:
    print(why_refused(child))
finally:
    os.close(leave)
    os.waitpid(child, 0)
"""
