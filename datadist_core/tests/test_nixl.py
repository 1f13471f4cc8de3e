# SPDX-License-Identifier: Apache-2.0
"""What is particular to the nixl backend: its options, its lists, and what it does where NIXL guarantees nothing.

The rules that hold for every backend are in `test_backends.py`. Tests with real agents are left out, with the reason,
where the nixl package cannot be used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from datadist_core.backends import _nixl_agent
from datadist_core.backends._nixl_agent import IndexedPiece, Piece
from datadist_core.backends._nixl_link import Notes, decode_identity, encode_identity, make_note
from datadist_core.backends._nixl_lists import MAX_PREPARED, PIECE_BYTES, Plan, PreparedLists, make_plan
from datadist_core.backends._nixl_mover import Mover
from datadist_core.backends._nixl_options import UCX_SETTINGS, parse_options
from datadist_core.backends._nixl_routes import MAX_ROUTES
from datadist_core.backends.nixl import NixlBackend
from datadist_core.errors import Cancelled, LLMException, ParamInvalid, ProtocolError, Unreachable
from datadist_core.memory.grid import Grid
from datadist_core.testing.child import ChildEnd, ChildSetup
from datadist_core.testing.end import WAIT_S, LocalEnd
from datadist_core.testing.pair import A_KNOWS_B_AS, BackendPair, make_batch
from datadist_core.testing.parallel import eventually, require_all
from datadist_core.tests.optional import not_available
from datadist_core.transfer.backend import BackendContext, CompletionStatus
from datadist_core.transfer.plan import Batch, GridPair, Op, Slice, expand
from datadist_core.transfer.registry import AUTO_ORDER, create_backend
from datadist_core.types import Deadline

FACTORY = "datadist_core.backends.nixl:NixlBackend"
TCP: dict[str, Any] = {"ucx": {"TLS": "tcp"}}


@pytest.fixture
def nixl() -> None:
    """Needs the real NIXL."""
    try:
        _nixl_agent._import_nixl()
    except Unreachable as error:
        not_available(error)


@contextmanager
def local_pair(options: dict[str, Any] | None = None) -> Iterator[BackendPair[LocalEnd]]:
    try:
        pair = BackendPair.in_process(NixlBackend, options=options)
    except Unreachable as error:
        not_available(error)
    with pair:
        yield pair


@contextmanager
def child_pair(options: dict[str, Any] | None = None, pool_bytes: int = 4 << 20) -> Iterator[BackendPair[ChildEnd]]:
    try:
        pair = BackendPair.two_processes(FACTORY, pool_bytes, options)
    except Unreachable as error:
        not_available(error)
    with pair:
        yield pair


def check_reads(pair: BackendPair[Any], mine: Grid, theirs: Grid) -> None:
    pair.b.fill(5)
    completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 3], [2, 1]))
    assert completion.status is CompletionStatus.OK, completion.error
    here, there = (
        end.snapshot(grid.region_id)[grid.offset_bytes : grid.end_bytes].reshape(grid.num_items, -1)
        for end, grid in ((pair.a, mine), (pair.b, theirs))
    )
    assert np.array_equal(here[[0, 3]], there[[2, 1]])


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"threads": 2}, "'threads' is unknown; there are num_threads, params, plugin, ucx"),
            ({"plugin": 3}, "plugin=3 must be the name"),
            ({"num_threads": True}, "num_threads=True must be an integer"),
            ({"num_threads": -1}, r"num_threads=-1 must be an integer in 0\.\.64"),
            ({"ucx": "TLS=tcp"}, "ucx='TLS=tcp' must be a JSON object"),
            ({"ucx": {"TLS": ["tcp"]}}, r"ucx\['TLS'\]=\['tcp'\] must be a string"),
            ({"ucx": {"TLS": "tcp,self"}}, "set the environment variable UCX_TLS instead"),
            ({"params": 1}, "params=1 must be a JSON object"),
        ],
    )
    def test_wrong_ones_are_named(self, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ParamInvalid, match=reason):
            parse_options(options)

    def test_what_the_plugin_gets(self) -> None:
        params = parse_options({"num_threads": 2, "ucx": {"UCX_TLS": "tcp"}, "params": {"x": 1}}).plugin_params()
        settings = {**UCX_SETTINGS, "TLS": "tcp"}
        assert params == {
            "engine_config": ",".join(f"{name}={value}" for name, value in settings.items()),
            "num_threads": "2",
            "x": "1",
        }

    def test_a_setting_of_ours_is_replaced(self) -> None:
        params = parse_options({"ucx": {"KEEPALIVE_INTERVAL": "20s"}}).plugin_params()
        assert params["engine_config"].count("KEEPALIVE_INTERVAL") == 1
        assert "KEEPALIVE_INTERVAL=20s" in params["engine_config"]

    def test_other_plugins_get_nothing_of_ucx(self) -> None:
        assert parse_options({"plugin": "LIBFABRIC", "params": {"a": "b"}}).plugin_params() == {"a": "b"}


class TestImport:
    def test_is_not_imported_before_open(self) -> None:
        code = (
            "import sys, datadist_core, datadist_core.backends.nixl as n; n.NixlBackend().capabilities(); "
            "print([m for m in sys.modules if m.partition('.')[0].startswith('nixl')])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.strip() == "[]"

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_nixl_agent, "_BUILDS", ())
        monkeypatch.setitem(sys.modules, "nixl", None)
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        with pytest.raises(Unreachable, match=r'pip install "vllm-datadist\[nixl\]"'):
            NixlBackend().open(context())

    @pytest.mark.parametrize(
        ("built", "loaded", "torch", "chosen"),
        [
            (("nixl_cu12",), (), "2.9.0", "nixl_cu12"),
            (("nixl_cu13", "nixl_cu12"), (), "2.9.0+cpu", "nixl_cu13"),
            (("nixl_cu13", "nixl_cu12"), (), None, "nixl_cu13"),
            (("nixl_cu13", "nixl_cu12"), (), "2.9.0", "nixl"),
            (("nixl_cu13", "nixl_cu12"), ("nixl_cu12",), "2.9.0", "nixl_cu12"),
            ((), (), None, "nixl"),
        ],
    )
    def test_of_several_builds_one_is_chosen(
        self,
        built: tuple[str, ...],
        loaded: tuple[str, ...],
        torch: str | None,
        chosen: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def version(name: str) -> str:
            if torch is None:
                raise PackageNotFoundError(name)
            return torch

        monkeypatch.setattr(_nixl_agent.importlib.util, "find_spec", lambda name: name if name in built else None)
        monkeypatch.setattr(_nixl_agent.importlib.metadata, "version", version)
        for name in _nixl_agent._BUILDS:
            monkeypatch.delitem(sys.modules, f"{name}._bindings", raising=False)
        for name in loaded:
            monkeypatch.setitem(sys.modules, f"{name}._bindings", sys)
        assert _nixl_agent._choose_package() == chosen

    def test_found_by_name_but_not_by_auto(self) -> None:
        assert isinstance(create_backend("nixl"), NixlBackend)
        assert "nixl" not in AUTO_ORDER


def context(**options: Any) -> BackendContext:
    def nothing(*args: Any) -> Any:
        raise ParamInvalid("there is nothing")

    return BackendContext(serve_grid=nothing, local_region=nothing, listen_host=None, options=options)


class RecordingAgent:
    """Stands in for an agent where only lists are made."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[np.uint64]] = []

    def prepare(self, peer_name: str, rows: npt.NDArray[np.uint64]) -> int:
        self.rows.append(rows)
        return len(self.rows) - 1


def ranges_of(agent: RecordingAgent, pieces: tuple[Piece, ...]) -> list[tuple[int, int, int]]:
    """(local address, remote address, size) of all that `pieces` move, in order."""
    found = []
    for piece in pieces:
        if isinstance(piece, IndexedPiece):
            sides = [
                blocks(agent.rows[prepared])[indices]
                for prepared, indices in ((piece.local, piece.local_indices), (piece.remote, piece.remote_indices))
            ]
        else:
            sides = [piece.local[:, :2], piece.remote[:, :2]]
        assert np.array_equal(sides[0][:, 1], sides[1][:, 1])
        found += [(int(a), int(b), int(n)) for (a, n), (b, _) in zip(*sides, strict=True)]
    return found


def blocks(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """(address, size) of every block of strided rows."""
    return np.array(
        [(at + i * stride, size) for at, size, _, stride, count in rows.astype(np.int64) for i in range(count)]
    )


def bytes_moved(ranges: list[tuple[int, int, int]]) -> dict[int, int]:
    """Destination address -> source address of every byte."""
    return {here + i: there + i for here, there, size in ranges for i in range(size)}


LOCAL, REMOTE = {1: 1 << 20}, {2: 1 << 30}


def pieces_of(batch: Batch, lists: PreparedLists) -> Sequence[Piece]:
    return make_plan(batch, lists, "peer", LOCAL, REMOTE).pieces(batch)


def grids(num_items: int = 32, item_bytes: int = 24, gap_bytes: int = 0) -> tuple[Grid, Grid]:
    stride = item_bytes + gap_bytes
    return Grid(1, 1, 64, stride, item_bytes, num_items), Grid(2, 2, 128, stride, item_bytes, num_items)


class TestLists:
    @pytest.mark.parametrize("gap_bytes", [0, 8])
    @pytest.mark.parametrize("slices", [(Slice(0, 0, 24),), (Slice(0, 8, 8), Slice(9, 1, 5))])
    @pytest.mark.parametrize(
        ("local_items", "remote_items"),
        [([3], [4]), ([5, 1, 9], [2, 30, 31]), (range(2, 22), range(3, 23)), ([7, 6, 5], [0, 1, 2])],
    )
    def test_pieces_are_the_bytes_of_the_batch(
        self, local_items: list[int], remote_items: list[int], slices: tuple[Slice, ...], gap_bytes: int
    ) -> None:
        mine, theirs = grids(gap_bytes=gap_bytes)
        second = replace(mine, offset_bytes=4096), replace(theirs, offset_bytes=8192)
        batch = make_batch(
            0, Op.READ, (mine, second[0]), (theirs, second[1]), list(local_items), list(remote_items), slices
        )
        agent = RecordingAgent()
        pieces = pieces_of(batch, PreparedLists(agent))
        wanted = expand(batch, LOCAL, REMOTE)
        plain = list(zip(wanted.local.tolist(), wanted.remote.tolist(), wanted.num_bytes.tolist(), strict=True))
        assert bytes_moved(ranges_of(agent, pieces)) == bytes_moved(plain)

    def test_scattered_blocks_are_prepared_once(self) -> None:
        agent, (mine, theirs) = RecordingAgent(), grids()
        lists = PreparedLists(agent)
        for items in ([1, 5, 9], [2, 4], [8]):
            batch = make_batch(0, Op.READ, mine, theirs, items, items)
            (piece,) = pieces_of(batch, lists)
            assert isinstance(piece, IndexedPiece)
        assert len(agent.rows) == 2

    def test_runs_are_not_prepared(self) -> None:
        agent, (mine, theirs) = RecordingAgent(), grids()
        batch = make_batch(0, Op.READ, mine, theirs, range(2, 12), range(4, 14))
        pieces = pieces_of(batch, PreparedLists(agent))
        assert len(ranges_of(agent, pieces)) == 1
        assert agent.rows == []

    def test_lists_are_bounded(self) -> None:
        agent = RecordingAgent()
        lists = PreparedLists(agent)
        for i in range(MAX_PREPARED):
            mine, theirs = (replace(grid, offset_bytes=i * 8) for grid in grids())
            pieces_of(make_batch(0, Op.READ, mine, theirs, [1], [3]), lists)
        assert len(agent.rows) == 2 * MAX_PREPARED
        assert len(lists) == MAX_PREPARED

    def test_what_is_forgotten_is_prepared_again(self) -> None:
        agent, (mine, theirs) = RecordingAgent(), grids()
        lists = PreparedLists(agent)
        batch = make_batch(0, Op.READ, mine, theirs, [1, 3], [1, 5])
        pieces_of(batch, lists)
        lists.forget("other")
        pieces_of(batch, lists)
        assert len(agent.rows) == 2
        lists.forget("peer")
        pieces_of(batch, lists)
        assert len(agent.rows) == 3

    @pytest.mark.parametrize("item_bytes", [PIECE_BYTES // 4, PIECE_BYTES - 1, PIECE_BYTES + 1, 3 * PIECE_BYTES])
    def test_large_batches_come_in_pieces(self, item_bytes: int) -> None:
        agent, (mine, theirs) = RecordingAgent(), grids(16, item_bytes)
        batch = make_batch(0, Op.READ, mine, theirs, [1, 3, 5, 8, 7], [2, 4, 9, 6, 0])
        pieces = pieces_of(batch, PreparedLists(agent))
        sizes = [sum(size for _, _, size in ranges_of(agent, (piece,))) for piece in pieces]
        assert sum(sizes) == batch.num_bytes
        assert all(0 < size < 2 * PIECE_BYTES for size in sizes)
        wanted = expand(batch, LOCAL, REMOTE)
        starts = {here: there for here, there, _ in ranges_of(agent, pieces)}
        assert all(starts[h] == t for h, t in zip(wanted.local.tolist(), wanted.remote.tolist(), strict=True))

    def test_rows_beyond_32_bit_indices_are_ranges(self) -> None:
        many = 1 << 31
        mine, theirs = Grid(1, 1, 0, 1, 1, many), Grid(2, 2, 0, 1, 1, many)
        batch = Batch(
            0,
            Op.READ,
            (GridPair(mine, theirs),),
            np.array([3, many - 1]),
            np.array([9, 1]),
            (Slice(0, 0, 1),),
            Deadline.after(WAIT_S),
        )
        agent = RecordingAgent()
        pieces = pieces_of(batch, PreparedLists(agent))
        assert ranges_of(agent, pieces) == [(LOCAL[1] + 3, REMOTE[2] + 9, 1), (LOCAL[1] + many - 1, REMOTE[2] + 1, 1)]

    def test_no_block_is_no_piece(self) -> None:
        batch = make_batch(0, Op.READ, *grids(), [], [])
        assert pieces_of(batch, PreparedLists(RecordingAgent())) == ()


class TestIdentity:
    def test_another_plugin(self) -> None:
        with pytest.raises(Unreachable, match="uses NIXL's plugin LIBFABRIC, this one UCX"):
            decode_identity(encode_identity("LIBFABRIC", "s", b""), "UCX")

    def test_too_many_devices(self) -> None:
        with pytest.raises(Unreachable, match="UCX_NET_DEVICES"):
            encode_identity("UCX", "s", bytes(4096))

    def test_garbage(self) -> None:
        with pytest.raises(ProtocolError):
            decode_identity(b"\x00", "UCX")

    def test_a_note_is_for_one_direction_of_one_link(self) -> None:
        token = bytes(16)
        notes = {
            make_note(key, *names, initiator=initiator)
            for key in (token, b"x" * 16)
            for names in (("a", "b"), ("b", "a"))
            for initiator in (True, False)
        }
        assert len(notes) == 8

    def test_notes_are_taken_once_and_bounded(self) -> None:
        notes = Notes()
        notes.add([b"%d" % i for i in range(2000)])
        assert not notes.take(b"0")
        assert notes.take(b"1999")
        assert not notes.take(b"1999")


class TestRealAgents:
    def test_unknown_plugin(self, nixl: None) -> None:
        with pytest.raises(ParamInvalid, match=r"plugin='NONE' is not installed; there are \["):
            NixlBackend().open(context(plugin="NONE"))

    def test_a_plugin_that_cannot_be_opened(self, nixl: None) -> None:
        with pytest.raises(Unreachable, match="cannot open its plugin UCX here"):
            NixlBackend().open(context(params={"ucx_error_handling_mode": "wrong"}))

    @pytest.mark.slow
    def test_nothing_is_printed_on_standard_output(self, nixl: None) -> None:
        code = (
            "from datadist_core.tests.test_nixl import NixlBackend, context\n"
            "b = NixlBackend(); b.open(context()); b.close()"
        )
        env = {key: value for key, value in os.environ.items() if key != "NIXL_LOG_LEVEL"}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("tls", ["tcp", "no_such_transport"])
    def test_environment_of_the_user_wins(self, nixl: None, tls: str) -> None:
        """Over our settings of UCX, and over the option."""
        code = (
            "from datadist_core.tests.test_nixl import NixlBackend, Unreachable, context\n"
            "b = NixlBackend()\n"
            "try: b.open(context(ucx={'TLS': 'tcp'}))\n"
            "except Unreachable: print('refused')\n"
            "b.close()"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "UCX_TLS": tls}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert ("refused" in done.stdout) is (tls != "tcp"), done.stdout + done.stderr

    def test_threads_of_nixl_end_with_close(self) -> None:
        with local_pair() as pair:
            pair.link()
            num_threads = len(os.listdir("/proc/self/task"))
            pair.close()
            assert eventually(lambda: len(os.listdir("/proc/self/task")) <= num_threads - 4)

    @pytest.mark.parametrize("options", [{}, TCP], ids=["default", "tcp"])
    def test_idle_costs_nothing(self, options: dict[str, Any]) -> None:
        """NIXL's own default is a thread per agent that never sleeps; here there are four agents."""
        with local_pair(options) as pair:
            pair.link()
            begun_s, before_s = time.monotonic(), time.process_time()
            threading.Event().wait(0.5)  # or longer, on a busy machine
            assert time.process_time() - before_s < 0.4 * (time.monotonic() - begun_s)

    def test_agent_that_somebody_else_refers_to_is_not_called_destroyed(self) -> None:
        with local_pair() as pair:
            agent = pair.a.backend._running._mover.agent
            other_reference = agent._agent.agent
            assert not agent.close()
            assert agent.closed
            assert not agent.destroyed
            del other_reference
            assert agent.close()
            assert agent.destroyed

    def test_what_nixl_raises_does_not_keep_its_agent(self) -> None:
        with local_pair() as pair:
            agent = pair.a.backend._running._mover.agent
            rows = np.array([[4096, 16, 0, 16, 4]], dtype=np.uint64)
            with pytest.raises(LLMException) as raised:
                agent.prepare("", rows)
            assert raised.value.__cause__ is not None
            assert agent.close()

    def test_attached_again_after_detach(self) -> None:
        with local_pair() as pair:
            pair.link()
            mine, theirs = pair.a.add_grid(4, 1024), pair.b.add_grid(4, 1024)
            for _ in range(3):
                check_reads(pair, mine, theirs)
                pair.a.backend.detach(A_KNOWS_B_AS, theirs.region_id)
                pair.attach()
            check_reads(pair, mine, theirs)

    def test_same_memory_registered_again(self) -> None:
        """An owner frees memory and registers it anew, in another division."""
        with local_pair() as pair:
            pair.link()
            mine = pair.a.add_grid(4, 1024)
            (export,) = pair.b.exports()
            pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
            whole = pair.b.region
            pair.b.remove_region(whole.region_id)
            pair.b.add_region(whole)
            pair.attach()
            check_reads(pair, mine, pair.b.add_grid(4, 1024))

    def test_peer_that_describes_somebody_else(self) -> None:
        with local_pair() as pair:
            identity = decode_identity(pair.b.identity(), "UCX")
            lie = encode_identity("UCX", "somebody", identity.connection)
            with pytest.raises(Unreachable, match="calls itself somebody describes"):
                pair.a.connect(A_KNOWS_B_AS, lie, True, bytes(16), WAIT_S)

    def test_lists_are_reused_between_batches(self) -> None:
        with local_pair() as pair:
            pair.link()
            mine, theirs = pair.a.add_grid(8, 512), pair.b.add_grid(8, 512)
            lists = pair.a.backend._running._mover._lists
            check_reads(pair, mine, theirs)
            before = len(lists)
            for item in range(8):
                pair.a.transfer(pair.batch(Op.READ, mine, theirs, [item], [7 - item]))
            assert len(lists) == before


class TestRoutes:
    """What was checked for one batch holds for the next of its kind, until something changes."""

    def test_batches_of_one_kind_are_planned_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.running() as (pair, batch):
            mover = pair.a.backend._running._mover
            planned = self.count_plans(mover, monkeypatch)
            for item in range(4):
                again = replace(batch, local_items=np.array([item]), remote_items=np.array([7 - item]))
                pair.b.fill(item)
                assert pair.a.transfer(again).status is CompletionStatus.OK
                self.check_item(pair, again)
            write = replace(batch, op=Op.WRITE)
            pair.a.fill(9)
            assert pair.a.transfer(write).status is CompletionStatus.OK
            self.check_item(pair, write)
            assert planned == []
            part = replace(batch, slices=(Slice(0, 0, 100),))
            assert pair.a.transfer(part).status is CompletionStatus.OK
            assert planned == [part]

    def test_equal_pairs_that_are_others_are_planned_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tuple that was freed may have had the same address."""
        with self.running() as (pair, batch):
            planned = self.count_plans(pair.a.backend._running._mover, monkeypatch)
            same = replace(batch, pairs=copy_of(batch.pairs))
            assert pair.a.transfer(same).status is CompletionStatus.OK
            assert planned == [same]

    @pytest.mark.parametrize("change", ["detach", "unregister", "disconnect", "close"])
    def test_are_not_used_after_a_change(self, change: str) -> None:
        with self.running() as (pair, batch):
            mine, theirs = batch.pairs[0].local, batch.pairs[0].remote
            changes: dict[str, Callable[[], object]] = {
                "detach": lambda: pair.a.backend.detach(A_KNOWS_B_AS, theirs.region_id),
                "unregister": lambda: pair.a.remove_region(mine.region_id),
                "disconnect": lambda: pair.a.disconnect(A_KNOWS_B_AS),
                "close": pair.a.backend.close,
            }
            before = pair.a.snapshot(mine.region_id)
            pair.b.fill(77)
            view = pair.a.view(mine.region_id)
            changes[change]()
            assert pair.a.transfer(batch).status is CompletionStatus.FAILED
            assert np.array_equal(view, before)

    def test_live_on_after_detach_and_attach(self) -> None:
        with self.running() as (pair, batch):
            for seed in range(3):
                pair.a.backend.detach(A_KNOWS_B_AS, batch.pairs[0].remote.region_id)
                pair.attach()
                pair.b.fill(seed)
                for _ in range(2):
                    assert pair.a.transfer(batch).status is CompletionStatus.OK
                self.check_item(pair, batch)

    def test_what_was_planned_before_a_change_is_not_kept(self) -> None:
        with self.running() as (pair, batch):
            running = pair.a.backend._running
            routes, version = running._routes, running._routes.version
            route = routes.find(batch)
            assert route is not None
            routes.clear()
            routes.put(route, version)
            assert routes.find(batch) is None
            running._mover.drop_region(4711)
            routes.put(route, routes.version)
            assert routes.find(batch) is None

    def test_are_bounded(self) -> None:
        with self.running() as (pair, batch):
            routes = pair.a.backend._running._routes
            kept = [copy_of(batch.pairs) for _ in range(3 * MAX_ROUTES)]
            for pairs in kept:
                assert pair.a.transfer(replace(batch, pairs=pairs)).status is CompletionStatus.OK
                assert 1 <= len(routes._routes) <= MAX_ROUTES

    @contextmanager
    def running(self) -> Iterator[tuple[BackendPair[LocalEnd], Batch]]:
        """A pair on which this batch has succeeded already."""
        with local_pair() as pair:
            pair.link()
            batch = pair.batch(Op.READ, pair.a.add_grid(8, 512), pair.b.add_grid(8, 512), [2], [5])
            assert pair.a.transfer(batch).status is CompletionStatus.OK
            yield pair, batch

    def check_item(self, pair: BackendPair[LocalEnd], batch: Batch) -> None:
        mine, theirs = batch.pairs[0].local, batch.pairs[0].remote
        at = mine.offset_bytes + int(batch.local_items[0]) * mine.stride_bytes
        of = theirs.offset_bytes + int(batch.remote_items[0]) * theirs.stride_bytes
        here, there = pair.a.view(mine.region_id)[at : at + 512], pair.b.view(theirs.region_id)[of : of + 512]
        assert np.array_equal(here, there)

    def count_plans(self, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
        planned: list[Batch] = []
        plan = mover.plan

        def counted(batch: Batch, *args: Any) -> Plan:
            planned.append(batch)
            return plan(batch, *args)

        monkeypatch.setattr(mover, "plan", counted)
        return planned


def copy_of(pairs: tuple[GridPair, ...]) -> tuple[GridPair, ...]:
    """An equal tuple at another address: `tuple` would return the same one."""
    return (*pairs,) if len(pairs) != 1 else (pairs[0],)


class TestHandles:
    """NIXL's handles call their agent when they go: never beside another call, and never after its end."""

    def test_of_lists_go_with_the_next_call(self) -> None:
        with local_pair() as pair:
            agent = pair.a.backend._running._mover.agent
            rows = np.array([[pair.a.region.address, 16, 0, 16, 4]], dtype=np.uint64)
            agent.register(pair.a.region.address, 4096)
            prepared = agent.prepare("", rows)
            assert not agent._dropped
            del prepared
            assert len(agent._dropped) == 1
            agent.prepare("", rows)
            agent.take_notes()
            assert not agent._dropped

    def test_of_requests_go_when_they_are_done(self) -> None:
        with TestRoutes().running() as (pair, batch):
            agent = pair.a.backend._running._mover.agent
            (piece,) = pair.a.backend._running._routes.find(batch).plan.pieces(batch)
            request = agent.start(Op.READ, piece)
            assert eventually(request.is_done)
            assert request._handle is None
            assert not agent._requests

    def test_of_failed_requests_do_not_keep_the_agent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with TestRoutes().running() as (pair, batch):
            agent = pair.a.backend._running._mover.agent
            monkeypatch.setattr(agent._agent, "transfer", lambda handle: "ERR")
            completion = pair.a.transfer(batch)
            assert completion.status is CompletionStatus.FAILED
            assert "NIXL reports that the transfer failed" in str(completion.error)
            assert agent.destroyed


@pytest.mark.slow
class TestFence:
    """Over UCX's TCP, a peer that is stopped keeps transfers from ending: the moving agent is given up."""

    def test_nothing_lands_after_a_fenced_read(self) -> None:
        with self.stuck() as (pair, batch_id, batch):
            pair.a.backend.cancel(batch_id)
            completion = pair.a.log.wait(batch_id)
            assert completion.status is CompletionStatus.CANCELLED
            assert isinstance(completion.error, Cancelled)
            view = pair.a.view(batch.pairs[0].local.region_id)
            view[:] = 77
            pair.b.resume()
            self.check_lives_on(pair)
            assert (view[: pair.a.region.size_bytes // 2] == 77).all(), "a fenced READ wrote after its completion"
            pair.b.kill()

    def test_other_peers_do_not_notice(self) -> None:
        with self.stuck() as (pair, batch_id, _):
            with BackendPair(pair.a, ChildEnd(ChildSetup(FACTORY, options=TCP))) as other:
                self.link_as(other, 5)
                mine, theirs = pair.a.add_grid(4, 1024), other.b.add_grid(4, 1024)
                batch = make_batch(5, Op.READ, mine, theirs, [0, 1], [3, 2])
                pair.a.backend.cancel(batch_id)
                while pair.a.log.pending():
                    assert pair.a.transfer(batch).status is CompletionStatus.OK
                assert pair.a.transfer(batch).status is CompletionStatus.OK
                other.b.kill()
            pair.b.kill()

    def test_region_that_is_in_use_stays_registered(self) -> None:
        with self.stuck() as (pair, batch_id, batch):
            region_id = batch.pairs[0].local.region_id
            mover = pair.a.backend._running._mover
            pair.a.backend.unregister(region_id)
            assert region_id in mover._locals
            pair.a.disconnect(A_KNOWS_B_AS)
            assert pair.a.log.wait(batch_id).status is CompletionStatus.FAILED
            pair.b.kill()

    @contextmanager
    def stuck(self) -> Iterator[tuple[BackendPair[ChildEnd], int, Batch]]:
        """A pair with a READ in progress whose peer does nothing any more."""
        with child_pair(TCP, 32 << 20) as pair:
            pair.link()
            mine, theirs = pair.a.add_grid(16, 1 << 20), pair.b.add_grid(16, 1 << 20)
            pair.b.fill(3)
            check_reads(pair, mine, theirs)
            batch = pair.batch(Op.READ, mine, theirs, list(range(16)), list(range(15, -1, -1)))
            pair.b.stop()
            yield pair, pair.a.submit(batch), batch

    def check_lives_on(self, pair: BackendPair[ChildEnd]) -> None:
        """What comes next uses a new agent: with a peer that has not seen the old one."""
        with BackendPair(pair.a, ChildEnd(ChildSetup(FACTORY, options=TCP))) as fresh:
            self.link_as(fresh, 6)
            mine, theirs = pair.a.add_private_grid(4, 1024), fresh.b.add_grid(4, 1024)
            batch = make_batch(6, Op.READ, mine, theirs, [0, 1], [3, 2])
            assert pair.a.transfer(batch).status is CompletionStatus.OK
            fresh.b.kill()

    def link_as(self, pair: BackendPair[ChildEnd], peer_id: int) -> None:
        """`BackendPair.link` under an id of its own at `a`."""
        token, identity_a, identity_b = os.urandom(16), pair.a.identity(), pair.b.identity()
        require_all(
            [
                lambda: pair.a.connect(peer_id, identity_b, True, token, WAIT_S),
                lambda: pair.b.connect(1, identity_a, False, token, WAIT_S),
            ]
        )
        for export in pair.b.exports():
            pair.a.attach(peer_id, export, WAIT_S)


@pytest.mark.slow
def test_a_reader_that_dies_leaves_its_owner_alone() -> None:
    """The child reads from us, in a loop, when it is killed."""
    with child_pair(pool_bytes=32 << 20) as pair:
        pair.link()
        mine, theirs = pair.a.add_grid(16, 1 << 20), pair.b.add_grid(16, 1 << 20)
        batch = pair.reversed_batch(Op.READ, theirs, mine, range(16), range(16))
        began = threading.Event()

        def read() -> None:
            while True:
                pair.b.transfer(batch)
                began.set()

        reader = threading.Thread(target=_until_lost, args=(read,), name="datadist-test-reader", daemon=True)
        reader.start()
        assert began.wait(WAIT_S)
        pair.b.kill()
        reader.join(WAIT_S)
        pair.a.disconnect(A_KNOWS_B_AS)


def _until_lost(call: Any) -> None:
    try:
        call()
    except (LLMException, OSError, EOFError):
        return
