# SPDX-License-Identifier: Apache-2.0
"""Copies of items: the bytes of a naive loop and none beside them; with and without the kernel, alone and helped."""

from __future__ import annotations

import os
import socket
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datadist_core._copy import helpers, native_library
from datadist_core.errors import Cancelled, ParamInvalid
from datadist_core.memory.grid import Grid
from datadist_core.transfer import item_copy
from datadist_core.transfer.item_copy import ItemCopy, StopFlag
from datadist_core.transfer.plan import GridPair, Op, Slice, whole_item

LOCAL, REMOTE = 1, 2


@dataclass
class Memory:
    """Two buffers, of which each is one region, with grids on them."""

    local: np.ndarray
    remote: np.ndarray
    pairs: tuple[GridPair, ...]
    slices: tuple[Slice, ...]

    def copy(self, max_threads: int = 1) -> ItemCopy:
        bases = {LOCAL: self.local.ctypes.data}, {REMOTE: self.remote.ctypes.data}
        return ItemCopy(self.pairs, self.slices, *bases, max_threads)

    def expected(self, op: Op, local_items: list[int], remote_items: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Both buffers afterwards, by a loop over every slice."""
        local, remote = self.local.copy(), self.remote.copy()
        for pair in self.pairs:
            for i, j in zip(local_items, remote_items, strict=True):
                for part in self.slices:
                    here = pair.local.offset_bytes + i * pair.local.stride_bytes + part.local_offset
                    there = pair.remote.offset_bytes + j * pair.remote.stride_bytes + part.remote_offset
                    mine, theirs = slice(here, here + part.num_bytes), slice(there, there + part.num_bytes)
                    if op is Op.READ:
                        local[mine] = remote[theirs]
                    else:
                        remote[theirs] = local[mine]
        return local, remote


def make_memory(
    num_pairs: int,
    num_items: int,
    item_bytes: int,
    gaps: tuple[int, int] = (0, 0),
    slices: tuple[Slice, ...] | None = None,
) -> Memory:
    """Pairs one behind the other, with 3 bytes between them; random content."""
    strides = item_bytes + gaps[0], item_bytes + gaps[1]
    steps = [num_items * stride + 3 for stride in strides]
    random = np.random.default_rng(num_pairs * num_items + item_bytes)
    local, remote = (random.integers(0, 256, num_pairs * step, dtype=np.uint8) for step in steps)
    pairs = tuple(
        GridPair(
            Grid(10 + i, LOCAL, i * steps[0], strides[0], item_bytes, num_items),
            Grid(50 + i, REMOTE, i * steps[1], strides[1], item_bytes, num_items),
        )
        for i in range(num_pairs)
    )
    return Memory(local, remote, pairs, slices or whole_item(item_bytes))


def parts_of(item_bytes: int) -> st.SearchStrategy[tuple[Slice, ...] | None]:
    """Whole items, or up to three slices that do not overlap."""

    def to_slices(cuts: list[int]) -> tuple[Slice, ...] | None:
        cuts = sorted({cut % (item_bytes + 1) for cut in cuts})
        return tuple(Slice(a, a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b > a) or None

    return st.lists(st.integers(0, 1 << 16), max_size=6).map(to_slices)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Memory, list[int], list[int]]:
    num_items = draw(st.integers(1, 40))
    item_bytes = draw(st.sampled_from([1, 7, 64, 511, 512, 1000, 4096]))
    gaps = draw(st.tuples(st.sampled_from([0, 0, 5]), st.sampled_from([0, 0, 64])))
    memory = make_memory(draw(st.integers(1, 4)), num_items, item_bytes, gaps, draw(parts_of(item_bytes)))
    # Runs are what is merged; permutations hold none to speak of.
    order = draw(st.one_of(st.permutations(range(num_items)), st.just(range(num_items))))
    other = draw(st.one_of(st.permutations(range(num_items)), st.just(range(num_items))))
    length = draw(st.integers(0, num_items))
    return memory, list(order)[:length], list(other)[:length]


@pytest.fixture(params=["native", "python"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and native_library() is None:
        pytest.skip("no native library here")
    if request.param == "python":
        monkeypatch.setattr(item_copy, "_functions", lambda: (None, None))
    return str(request.param)


def check(memory: Memory, op: Op, local_items: list[int], remote_items: list[int], max_threads: int = 1) -> None:
    expected = memory.expected(op, local_items, remote_items)
    memory.copy(max_threads).run(op, array("q", local_items), np.array(remote_items, dtype=np.int64))
    np.testing.assert_array_equal(memory.local, expected[0])
    np.testing.assert_array_equal(memory.remote, expected[1])


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("native", [True, False])
def test_copies_what_a_loop_copies(op: Op, native: bool) -> None:
    if native and native_library() is None:
        pytest.skip("no native library here")

    @settings(max_examples=settings.default.max_examples * 4 // 5, deadline=None)
    @given(scenes())
    def run(scene: tuple[Memory, list[int], list[int]]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(item_copy, "_functions", lambda: (None, None))
            check(scene[0], op, *scene[1:])

    run()


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(
    ("num_pairs", "num_items", "item_bytes"),
    [(1, 3000, 1024), (3, 200, 4096), (1, 3, 1 << 20), (5, 16, 64 << 10), (300, 4, 1024), (1, 1500, 1500)],
)
def test_large_copies_with_and_without_helpers(
    op: Op, num_pairs: int, num_items: int, item_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_copy, "helpers_for", lambda num_bytes, max_threads: max_threads - 1)
    order = np.random.default_rng(1).permutation(num_items).tolist()
    for max_threads in (1, 4):
        memory = make_memory(num_pairs, num_items, item_bytes)
        check(memory, op, order, list(range(num_items)), max_threads)
        check(memory, op, list(range(num_items)), list(range(num_items)), max_threads)


def copying_threads() -> list[int]:
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    return [task for task in tasks if Path(f"/proc/self/task/{task}/comm").read_text().strip() == "datadist-copy"]


def test_helpers_do_work() -> None:
    """They are threads of this process which are there after the first shared copy, once."""
    if native_library() is None:
        pytest.skip("no native library here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_copy, "helpers_for", lambda num_bytes, max_threads: 3)
        for _ in range(5):
            check(make_memory(1, 64, 64 << 10), Op.READ, list(range(64)), list(range(64))[::-1], 4)
    assert 3 <= len(copying_threads()) <= 16


def test_many_threads_copy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_copy, "helpers_for", lambda num_bytes, max_threads: 2)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(4):
                check(make_memory(2, 100, 20_000), Op.READ, list(range(100)), list(range(100))[::-1], 3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, name=f"datadist-test-{i}", daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


def test_a_forked_child_gets_helpers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_copy, "helpers_for", lambda num_bytes, max_threads: 3)
    check(make_memory(1, 64, 64 << 10), Op.READ, list(range(64)), list(range(64))[::-1], 4)
    child = os.fork()
    if child == 0:
        try:
            check(make_memory(1, 64, 64 << 10), Op.READ, list(range(64)), list(range(64))[::-1], 4)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("bad", [-1, 16, 2**62, -(2**63)])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_index_out_of_range_copies_nothing(kernel: str, bad: int, side: str) -> None:
    memory = make_memory(2, 16, 100)
    before = memory.local.copy(), memory.remote.copy()
    lists = {"local": array("q", [1, 2]), "remote": array("q", [3, 4])}
    lists[side] = array("q", [5, bad])
    with pytest.raises(ParamInvalid, match=str(bad)):
        memory.copy().run(Op.READ, lists["local"], lists["remote"])
    np.testing.assert_array_equal(memory.local, before[0])
    np.testing.assert_array_equal(memory.remote, before[1])


def test_a_stopped_copy_copies_nothing_more(kernel: str) -> None:
    memory = make_memory(1, 16, 1000)
    before = memory.local.copy()
    stop = StopFlag()
    stop.set()
    with pytest.raises(Cancelled):
        memory.copy().run(Op.READ, array("q", [1]), array("q", [2]), stop)
    np.testing.assert_array_equal(memory.local, before)


def test_the_smallest_grid_limits_the_items(kernel: str) -> None:
    memory = make_memory(2, 16, 100)
    first, second = memory.pairs
    smaller = Grid(second.local.grid_id, LOCAL, second.local.offset_bytes, 100, 100, 8)
    memory.pairs = first, GridPair(smaller, second.remote)
    with pytest.raises(ParamInvalid, match="9"):
        memory.copy().run(Op.READ, array("q", [9]), array("q", [9]))


class TestWhoMayHelp:
    """`helpers_for`: as many as this thread may use processors, only for copies that are worth it."""

    @pytest.mark.parametrize(
        ("usable", "max_threads", "helping"), [(8, 4, 3), (3, 4, 2), (2, 4, 1), (1, 4, 0), (8, 2, 1), (8, 1, 0)]
    )
    def test_so_many(self, usable: int, max_threads: int, helping: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(helpers.os, "sched_getaffinity", lambda pid: set(range(usable)))
        assert helpers.helpers_for(helpers.MIN_SHARED_BYTES, max_threads) == helping

    def test_small_copies_are_not_shared(self) -> None:
        assert helpers.helpers_for(helpers.MIN_SHARED_BYTES - 1) == 0


def test_a_connection_that_hangs_up_is_noticed(kernel: str) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = make_memory(1, 16, 100)
    with here:
        with there:
            there.send(b"data that nobody reads is no end")
            assert memory.copy().run(Op.READ, array("q", [1]), array("q", [2]), None, here.fileno())
        assert not memory.copy().run(Op.READ, array("q", [3]), array("q", [4]), None, here.fileno())
    assert memory.copy().run(Op.READ, array("q", [5]), array("q", [6]))
