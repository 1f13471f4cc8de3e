# SPDX-License-Identifier: Apache-2.0
"""Checksums of what was moved: one changed bit fails the call, whatever moved it; without them it is not seen.

The flips are real: in memory after a copy, or by a relay in the packets between two ends. Tests with "off" show that
each flip gets through without the checksums, which is the known limit, and that nothing else would have found it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from datadist_core import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from datadist_core.bench.blocks import make_lists
from datadist_core.bench.contenders import CHECKED, OURS
from datadist_core.bench.contract import PULL, PUSH
from datadist_core.cache import integrity
from datadist_core.cache.desc import UNSET_ID
from datadist_core.cache.plans import Moves
from datadist_core.errors import (
    CacheNotExist,
    ClosedError,
    IntegrityError,
    LLMException,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    TimedOut,
)
from datadist_core.link.link import Link
from datadist_core.link.turns import Turns
from datadist_core.memory.grid import Grid
from datadist_core.testing.parallel import eventually
from datadist_core.tests.core_ends import config, desc, filled_cache, manager, must_link, plain_cache
from datadist_core.tests.flipping import (
    MARKER,
    RELAY_HOST,
    flip_after_next,
    forget_flips,
    is_pending,
    relay_before,
)
from datadist_core.transfer import checksum
from datadist_core.transfer.checksum import Checksummer, Extent, Part, Units
from datadist_core.transfer.plan import GridPair, Slice
from datadist_core.types import Deadline
from datadist_core.wire import messages as m

FLIPPING = {
    "loopback": "datadist_core.tests.flipping:FlippingLoopback",
    "shm": "datadist_core.tests.flipping:FlippingShm",
}
WAIT_S = 20.0
_ids = iter(range(70_000, 80_000))

every_flipping = pytest.mark.parametrize("backend", FLIPPING)


def an_end(backend: str, integrity: str, listen: str | None = None, **options: Any) -> LLMDataDist:
    made = config(FLIPPING.get(backend, backend), listen)
    made.integrity = integrity
    for name, value in options.items():
        setattr(made, name, value)
    end = LLMDataDist(LLMRole.MIX, next(_ids))
    end.init(made)
    return end


@contextmanager
def two_ends(backend: str, of_p: str = "off", of_d: str = "checksum") -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    with an_end(backend, of_p, "127.0.0.1:0") as p, an_end(backend, of_d) as d:
        must_link(d, p)
        yield p, d
    forget_flips()


def byte_of(cache: Cache, tensor: int, block: int, offset: int = 100) -> int:
    return cache.tensor_addrs[tensor] + block * cache.cache_desc.size // cache.cache_desc.shape[0] + offset


def assert_moved(source: Cache, target: Cache, src: list[int], dst: list[int]) -> None:
    for theirs, ours in zip(source.numpy(), target.numpy(), strict=True):
        np.testing.assert_array_equal(ours[dst], theirs[src])


# -- the numbers


def naive_sums(memory: np.ndarray, grids: list[tuple[int, int]], units: Units) -> list[list[int]]:
    """By the xxHash library, over copies of the bytes."""
    rows = []
    for offset, stride in grids:
        pieces = [
            b"".join(
                memory[at : at + part.num_bytes].tobytes()
                for part in units.parts
                for at in [offset + item * stride + part.offset_bytes]
            )
            for item in units.items.tolist()
        ]
        per = units.items_per_sum
        rows.append([xxhash.xxh3_64_intdigest(b"".join(pieces[i : i + per])) for i in range(0, len(pieces), per)])
    return rows


@st.composite
def some_units(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Units]:
    item_bytes = draw(st.integers(1, 200))
    stride = item_bytes + draw(st.integers(0, 40))
    num_items = draw(st.integers(1, 12))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, item_bytes - 1))
        parts.append(Part(offset, draw(st.integers(1, item_bytes - offset))))
    items = draw(st.lists(st.integers(0, num_items - 1), min_size=1, max_size=20))
    grids = [(draw(st.integers(0, 64)) + i * num_items * stride, stride) for i in range(draw(st.integers(1, 3)))]
    per_sum = draw(st.integers(1, len(items) + 1))
    return grids, Units(np.array(items, dtype=np.int64), tuple(parts), per_sum)


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "python"])
def test_checksums_are_those_of_the_library(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native:
        assert checksum.native_library() is not None
    else:
        monkeypatch.setattr(checksum, "native_library", lambda: None)
    memory = np.random.default_rng(0).integers(0, 256, 16_384, dtype=np.uint8)
    summer = Checksummer()

    @settings(max_examples=100, deadline=None)
    @given(some_units())
    def check(case: tuple[list[tuple[int, int]], Units]) -> None:
        grids, units = case
        extents = [Extent(memory.ctypes.data + offset, stride) for offset, stride in grids]
        assert summer.sums(extents, units).tolist() == naive_sums(memory, grids, units)

    check()


def test_large_items_by_several_threads() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 24 << 20, dtype=np.uint8)
    size = (5 << 20) + 13  # more than is summed between two looks at the stop flag
    units = Units(np.array([3, 0, 2], dtype=np.int64), (Part(1, size - 2),), 1)
    [sums] = Checksummer().sums([Extent(memory.ctypes.data, size)], units).tolist()
    assert [sums] == naive_sums(memory, [(0, size)], units)


def test_closing_ends_what_runs_and_waits_for_it() -> None:
    """Finalize unmaps the memory next."""
    memory = np.zeros(64 << 20, dtype=np.uint8)
    units = Units(np.zeros(200, dtype=np.int64), (Part(0, memory.nbytes),), 1)  # 12.5 GiB: seconds
    summer, ended = Checksummer(), list[LLMException]()

    def run() -> None:
        with pytest.raises(ClosedError) as caught:
            summer.sums([Extent(memory.ctypes.data, memory.nbytes)], units)
        ended.append(caught.value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert eventually(lambda: summer._num_running == 1, WAIT_S)
    summer.close()
    assert summer._num_running == 0
    thread.join(WAIT_S)
    assert len(ended) == 1
    with pytest.raises(ClosedError):
        summer.sums([Extent(memory.ctypes.data, 1)], Units(units.items[:1], (Part(0, 1),), 1))


# -- questions


@settings(max_examples=60, deadline=None)
@given(
    num_pairs=st.integers(1, 5),
    num_items=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    limits=st.fixed_dictionaries(
        {
            "MIN_SUM_BYTES": st.sampled_from([1, 64, 256]),
            "MAX_PART_BYTES": st.sampled_from([512, 1024]),
            "MAX_PARTS": st.sampled_from([2, 4]),
            "MAX_GRIDS": st.sampled_from([2, 100]),
            "MAX_SUMS": st.sampled_from([300, 5000]),
        }
    ),
)
def test_questions_name_every_byte_once_within_the_limits(
    num_pairs: int, num_items: int, sizes: list[int], limits: dict[str, int]
) -> None:
    starts = np.cumsum([0, *sizes])
    slices = tuple(Slice(int(at), int(at) + 7, size) for at, size in zip(starts, sizes, strict=False))
    item_bytes = int(starts[-1]) + 7
    grid = Grid(1, 1, 0, item_bytes, item_bytes, 2 * num_items)
    local = np.random.default_rng(num_items).permutation(2 * num_items)[:num_items]
    remote = local[::-1].copy()
    asked = np.zeros((2 * num_items, item_bytes), dtype=int)  # how often, per local item and byte of it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**limits, "MAX_ITEMS": 300, "MAX_BYTES": 2048, "MAX_STEPS": 1024}.items():
            patch.setattr(integrity, name, value)
        for question in integrity._questions(Moves([GridPair(grid, grid)] * num_pairs, local, remote, slices)):
            theirs = integrity._checked_units(question.message(1))  # the owner accepts it
            assert theirs.items.tolist() == question.there.items.tolist()
            assert theirs.num_sums == question.here.num_sums
            pairs = zip(question.here.items.tolist(), theirs.items.tolist(), strict=True)
            assert set(pairs) <= set(zip(local.tolist(), remote.tolist(), strict=True))
            for here, there in zip(question.here.parts, theirs.parts, strict=True):
                assert there == Part(here.offset_bytes + 7, here.num_bytes)
                columns = slice(here.offset_bytes, here.offset_bytes + here.num_bytes)
                asked[question.here.items, columns] += len(question.pairs)
    expected = np.zeros_like(asked)
    expected[local, : sum(sizes)] = num_pairs
    np.testing.assert_array_equal(asked, expected)


# -- blocks


@every_flipping
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_flipped_bit_fails_the_call_and_the_next_one_is_right(backend: str, way: str) -> None:
    with two_ends(backend) as (p, d):
        of_4k = desc(block=1024)
        theirs, mine = filled_cache(p, 1, the_desc=of_4k), plain_cache(d, 2, of_4k)
        key = BlocksCacheKey(p.cluster_id, 0)
        blocks = [3, 4, 9], [1, 2, 7]
        source, target = (theirs, mine) if way == "pull" else (mine, theirs)

        def move() -> None:
            move_blocks = manager(d).pull_blocks if way == "pull" else manager(d).push_blocks
            move_blocks(key, mine, *blocks)
            assert_moved(source, target, *blocks)

        for _ in range(3):  # the long way; then the short one, which such an error does not end
            flip_after_next(byte_of(target, tensor=2, block=7))
            with pytest.raises(IntegrityError) as caught:
                move()
            assert not is_pending()
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            here, there, end = (7, 9, "here") if way == "pull" else (9, 7, "at the peer")
            text = (
                f"checksums differ after a {way} {'from' if way == 'pull' else 'to'} cluster {p.cluster_id} over "
                f"flipping-{backend}: tensor 2, block {here} here and block {there} at the peer (1 of 12 checksums "
                f"differ). The blocks {end} must not be used. The bytes were changed on the way, "
            )
            assert str(caught.value).startswith(text)
            move()


@every_flipping
def test_without_checksums_wrong_bytes_arrive(backend: str) -> None:
    """The known limit, and the proof that the tests above flip what nothing else would notice."""
    with two_ends(backend, of_d="off") as (p, d):
        theirs, mine = filled_cache(p, 1), plain_cache(d, 2)
        for _ in range(2):
            flip_after_next(byte_of(mine, 0, 5))
            manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, [3], [5])
            assert not is_pending()
            assert not np.array_equal(mine.numpy()[0][5], theirs.numpy()[0][3])
            np.testing.assert_array_equal(mine.numpy()[1][5], theirs.numpy()[1][3])


def count_questions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    ask = integrity.Integrity._ask

    def counted(self: Any, moved: Any, *rest: Any) -> None:
        asked.append(moved.link.peer.cluster_id)
        ask(self, moved, *rest)

    monkeypatch.setattr(integrity.Integrity, "_ask", counted)
    return asked


def test_only_the_asking_ends_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_questions(monkeypatch)
    with two_ends("shm", of_p="checksum", of_d="off") as (p, d):
        theirs, mine = filled_cache(p, 1), filled_cache(d, 2)
        manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, [3], [5])
        assert asked == []
        manager(p).pull_blocks(BlocksCacheKey(d.cluster_id, 0), theirs, [5], [6])
        assert asked == [d.cluster_id]
        flip_after_next(byte_of(theirs, 0, 7))
        with pytest.raises(IntegrityError):
            manager(p).pull_blocks(BlocksCacheKey(d.cluster_id, 0), theirs, [5], [7])


@pytest.mark.parametrize("integrity", ["checksum", "off"])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_relay_flips_a_bit_in_the_tcp_payload(way: str, integrity: str) -> None:
    """B46."""
    to_relay = f'{{"tcp": {{"advertise_host": "{RELAY_HOST}"}}}}'
    with ExitStack() as ends:
        p = ends.enter_context(an_end("tcp", "off", "127.0.0.1:0", global_resource_config=to_relay))
        relay = ends.enter_context(relay_before(p))
        d = ends.enter_context(an_end("tcp", integrity))
        must_link(d, p)
        theirs, mine = filled_cache(p, 1), plain_cache(d, 2)
        source, target = (theirs, mine) if way == "pull" else (mine, theirs)
        source.numpy()[1][4].view(np.uint8)[:] = np.tile(np.frombuffer(MARKER, dtype=np.uint8), 64)
        move = manager(d).pull_blocks if way == "pull" else manager(d).push_blocks
        arguments = (BlocksCacheKey(p.cluster_id, 0), mine, [3, 4], [7, 8])
        relay.armed = True
        if integrity == "checksum":
            with pytest.raises(IntegrityError, match=r"over tcp: tensor 1, block \d here and block \d at"):
                move(*arguments)
        else:
            move(*arguments)
        assert relay.num_flipped == 1
        wrong = np.bitwise_xor(target.numpy()[1][8].view(np.uint8), source.numpy()[1][4].view(np.uint8))
        assert np.unpackbits(wrong).sum() == 1
        move(*arguments)
        assert_moved(source, target, [3, 4], [7, 8])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_between_processes(name: str) -> None:
    """As the bench measures it: right bytes, in several questions, pulled and pushed."""
    lists = make_lists("random", 4096, 8 << 20)
    contender = OURS[name].make(4 * lists.num_bytes)
    try:
        contender.prepare(lists)
        for op in (PULL, PUSH):
            contender.clear(op)
            contender.move_each(op, [lists])
            assert contender.verify(op, lists)
    finally:
        contender.close()


def test_slices_are_checked_and_nothing_beside_them() -> None:
    """As the connector pulls heads: parts of blocks, each to another place."""
    with two_ends("shm") as (p, d):
        filled_cache(p, 1)
        mine = plain_cache(d, 2)
        slices = [(0, 512, 128), (256, 0, 64)]  # (here, there, bytes)

        def pull() -> None:
            manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, [3, 9], [1, 2], slices=slices)

        for offset, is_moved in (
            (0, True),
            (127, True),
            (128, False),
            (255, False),
            (256, True),
            (319, True),
            (320, False),
        ):
            flip_after_next(byte_of(mine, 3, 2, offset))
            if is_moved:
                with pytest.raises(IntegrityError, match="tensor 3, block"):
                    pull()
            else:
                pull()
            assert not is_pending()


def test_many_small_slices_share_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends("loopback") as (p, d):
        filled_cache(p, 1)
        mine = plain_cache(d, 2)
        flip_after_next(byte_of(mine, 0, 13, 0))
        with pytest.raises(IntegrityError, match=r"blocks 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. here .*\(1 of 4 checksums"):
            manager(d).pull_blocks(
                BlocksCacheKey(p.cluster_id, 0), mine, list(range(16)), list(range(16)), slices=[(0, 0, 8)]
            )


def test_every_part_of_a_transfer_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one question is not enough: the flip is in the last."""
    monkeypatch.setattr(integrity, "MAX_ITEMS", 5)
    monkeypatch.setattr(integrity, "MAX_GRIDS", 3)
    monkeypatch.setattr(integrity, "MAX_PART_BYTES", 512)
    asked = count_questions(monkeypatch)
    with two_ends("shm") as (p, d):
        theirs, mine = filled_cache(p, 1), plain_cache(d, 2)
        blocks = list(range(16))
        for _ in range(2):
            flip_after_next(byte_of(mine, 3, 0, 1023))
            with pytest.raises(IntegrityError, match="tensor 3, block 0 here and block 15 at the peer"):
                manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, blocks, blocks[::-1])
        manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, blocks, blocks[::-1])
        assert_moved(theirs, mine, blocks, blocks[::-1])
    assert len(asked) == 3 * (4 * 2 * 2)


# -- contiguous caches, keys, layers


def entries(end: LLMDataDist, seed: int, keys: list[CacheKey] | None = None, batch_dim: int = 0) -> Cache:
    shape = (4, 256) if batch_dim == 0 else (8, 4, 32)
    made = CacheDesc(4, shape, DataType.DT_FLOAT, Placement.HOST, batch_dim_index=batch_dim)
    cache = manager(end).allocate_cache(made, keys or [])
    for tensor in cache.numpy():
        tensor[:] = np.random.default_rng(seed).random(tensor.shape, dtype=np.float32)
    return cache


@every_flipping
@pytest.mark.parametrize("prefix", [False, True], ids=["request", "prefix"])
def test_a_key_is_not_consumed_by_a_pull_that_failed(backend: str, prefix: bool) -> None:
    with two_ends(backend) as (p, d):
        key = CacheKey(p.cluster_id, UNSET_ID, prefix_id=5) if prefix else CacheKey(p.cluster_id, req_id=5)
        theirs, mine, blocks = entries(p, 1, [key]), entries(d, 2), plain_cache(d, 3, desc(num_tensors=4, block=64))
        flip_after_next(mine.tensor_addrs[1] + 1024 + 5)
        with pytest.raises(IntegrityError, match="tensor 1"):
            manager(d).pull_cache(key, mine, batch_index=1)
        flip_after_next(blocks.tensor_addrs[1] + 3 * 256)
        with pytest.raises(IntegrityError, match="blocks 3, 9 here and blocks 2, 3 at the peer"):
            manager(d).pull_blocks(key, blocks, dst_blocks=[6, 1, 3, 9])
        manager(d).pull_cache(key, mine, batch_index=1)
        for ours, others in zip(mine.numpy(), theirs.numpy(), strict=True):
            np.testing.assert_array_equal(ours[1], others[0])
        with pytest.raises(CacheNotExist):
            manager(d).pull_cache(key, mine)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_contiguous_caches_by_id(batch_dim: int) -> None:
    with two_ends("shm") as (p, d):
        theirs, mine = entries(p, 1, batch_dim=batch_dim), entries(d, 2, batch_dim=batch_dim)
        key = CacheKeyByIdAndIndex(p.cluster_id, theirs.cache_id, 2)
        for move, target, index in ((manager(d).pull_cache, mine, 1), (manager(d).push_cache, theirs, 2)):
            view = target.numpy()[3]
            changed = view[index] if batch_dim == 0 else view[5, index]
            flip_after_next(changed.ctypes.data + 17)
            with pytest.raises(IntegrityError, match="tensor 3"):
                move(key, mine, 1)
            move(key, mine, 1)
            pairs = zip(mine.numpy(), theirs.numpy(), strict=True)
            assert all(np.array_equal(a.take(1, batch_dim), b.take(2, batch_dim)) for a, b in pairs)


class AllReady(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int) -> bool:
        return True


@every_flipping
@pytest.mark.parametrize("to", ["key", "address"])
def test_layer_by_layer(backend: str, to: str) -> None:
    with two_ends(backend) as (p, d):
        theirs, mine = filled_cache(p, 1), plain_cache(d, 2)
        if to == "key":
            destination: Any = TransferWithCacheKeyConfig(BlocksCacheKey(p.cluster_id, 0))
        else:
            destination = TransferConfig(p.cluster_id, theirs.tensor_addrs)

        def send() -> list[LLMStatusCode]:
            task = manager(d).transfer_cache_async(mine, AllReady(), [destination], [1, 2], [8, 9])
            return task.get_results(int(WAIT_S * 1000))

        flip_after_next(byte_of(theirs, 1, 9))
        assert send() == [LLMStatusCode.LLM_FAILED]
        assert not is_pending()
        assert send() == [LLMStatusCode.LLM_SUCCESS]
        assert_moved(mine, theirs, [1, 2], [8, 9])


# -- the owner's end


@dataclass
class Asker:
    """D, which can ask P anything."""

    p: LLMDataDist
    d: LLMDataDist
    theirs: Cache

    @property
    def link(self) -> Link:
        return self.d._open().links.get(self.p.cluster_id)

    def grid(self, cache: Cache | None = None, **changes: int) -> m.GridInfo:
        grid = self.p._open().table.by_id((cache or self.theirs).cache_id).grids[0]
        names = ("grid_id", "region_id", "offset_bytes", "stride_bytes", "item_bytes", "num_items")
        return m.GridInfo(**{name: getattr(grid, name) for name in names} | changes)

    def ask(self, deadline_s: float = WAIT_S, **changes: Any) -> m.AnyMessage:
        question: dict[str, Any] = {
            "grids": [self.grid()], "items": np.array([0, 3], "<i8").tobytes(), "parts": [m.SumPart(0, 1024)],
            "items_per_sum": 1,
        }  # fmt: skip
        question |= changes
        return self.link.request(lambda i: m.AskChecksums(i, **question), Deadline.after(deadline_s))


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with two_ends("shm", of_d="off") as (p, d):
        plain_cache(p, 2)  # so that there is something before the next one
        yield Asker(p, d, filled_cache(p, 1))


def test_an_honest_question_is_answered(asker: Asker) -> None:
    blocks = asker.theirs.numpy()[0]
    expected = [xxhash.xxh3_64_intdigest(blocks[i].tobytes()) for i in (0, 3)]
    answer = asker.ask()
    assert isinstance(answer, m.Checksums)
    assert np.frombuffer(answer.sums, "<u8").tolist() == expected


def items(*indices: int) -> bytes:
    return np.array(indices, "<i8").tobytes()


BAD_QUESTIONS: dict[str, Callable[[Asker], dict[str, Any]]] = {
    "no grid": lambda a: {"grids": []},
    "no item": lambda a: {"items": b""},
    "half an item": lambda a: {"items": items(1)[:4]},
    "no part": lambda a: {"parts": []},
    "an empty part": lambda a: {"parts": [m.SumPart(0, 0)]},
    "a negative part": lambda a: {"parts": [m.SumPart(0, -1), m.SumPart(0, 100)]},
    "a part before the item": lambda a: {"parts": [m.SumPart(-1, 8)]},
    "a part behind the item": lambda a: {"parts": [m.SumPart(1000, 25)]},
    "a part of 2**63 bytes": lambda a: {"parts": [m.SumPart(0, 2**63)]},
    "an offset of 2**64-1": lambda a: {"parts": [m.SumPart(2**64 - 1, 8)]},
    "no items per sum": lambda a: {"items_per_sum": 0},
    "an item behind the last": lambda a: {"items": items(16)},
    "a negative item": lambda a: {"items": items(-1)},
    "an item of 2**63-1": lambda a: {"items": items(2**63 - 1)},
    "an unknown grid": lambda a: {"grids": [a.grid(grid_id=10**9)]},
    "a grid of 2**64-1": lambda a: {"grids": [a.grid(grid_id=2**64 - 1)]},
    "a grid before its memory": lambda a: {"grids": [a.grid(offset_bytes=0)]},
    "a grid over its end": lambda a: {"grids": [a.grid(num_items=17)]},
    "a grid without a stride": lambda a: {"grids": [a.grid(stride_bytes=0)]},
    "too many items": lambda a: {"items": items(*[0] * 16385), "parts": [m.SumPart(0, 8)]},
    "too many parts": lambda a: {"parts": [m.SumPart(0, 1)] * 4097},
    "too many grids": lambda a: {"grids": [a.grid()] * 4097, "parts": [m.SumPart(0, 1)]},
    "too many numbers": lambda a: {"grids": [a.grid()] * 5, "items": items(*[0] * 14000), "parts": [m.SumPart(0, 8)]},
    "too many steps": lambda a: {"items": items(*[0] * 16384), "parts": [m.SumPart(0, 1)] * 257, "items_per_sum": 99},
    "too many bytes": lambda a: {"grids": [a.grid()] * 17, "items": items(*[0] * 16384), "items_per_sum": 16384},
}


@pytest.mark.parametrize("bad", BAD_QUESTIONS)
def test_bad_questions_are_refused(asker: Asker, bad: str) -> None:
    with pytest.raises((ParamInvalid, CacheNotExist)):
        asker.ask(**BAD_QUESTIONS[bad](asker))
    asker.ask()


def test_only_what_peers_may_read_is_summed(asker: Asker) -> None:
    own = np.zeros(16 * 256, dtype=np.float32)
    one_tensor = desc(num_tensors=1)
    private = manager(asker.p).register_blocks_cache(one_tensor, [own.ctypes.data], remote_accessible=False)
    with pytest.raises(ParamInvalid, match="not accessible"):
        asker.ask(grids=[asker.grid(private)])
    freed = plain_cache(asker.p, 1, one_tensor)
    grid = asker.grid(freed)
    asker.ask(grids=[grid])
    manager(asker.p).deallocate_blocks_cache(freed)
    again = plain_cache(asker.p, 1, one_tensor)  # the same memory under another number
    assert again.tensor_addrs == freed.tensor_addrs
    with pytest.raises(CacheNotExist):
        asker.ask(grids=[grid])


def test_a_transfer_waits_for_the_answer_and_gives_up_in_time(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: a link has one question answered at a time, and other requests and other links go on meanwhile."""
    server = asker.p._open().server
    may_go_on, running, answer = threading.Event(), list[int](), server.checksums

    def slow(asked: m.AskChecksums) -> bytes:
        running.append(len(running))
        may_go_on.wait(WAIT_S)
        return answer(asked)

    monkeypatch.setattr(server, "checksums", slow)
    key = BlocksCacheKey(asker.p.cluster_id, 0)
    with two_more(asker.p, "checksum") as (first, second):
        mine = plain_cache(first, 3)

        def times_out(end: LLMDataDist, target: Cache) -> bool:
            with pytest.raises(TimedOut):
                manager(end).pull_blocks(key, target, [1], [2], deadline_s=0.02)
            return True

        # On a busy machine it may be over before it has asked.
        assert eventually(lambda: times_out(first, mine) and running == [0])
        assert all(times_out(first, mine) for _ in range(4))
        assert running == [0]  # the others wait behind it
        manager(asker.d).pull_blocks(key, plain_cache(asker.d, 3), [1], [2])  # does not ask
        other = plain_cache(second, 3)
        assert eventually(lambda: times_out(second, other) and running == [0, 1])
        assert first._open().links.get(asker.p.cluster_id).checksum_slots._value == 8
        may_go_on.set()
        manager(first).pull_blocks(key, mine, [1], [2])
        assert_moved(asker.theirs, mine, [1], [2])


def test_an_answer_of_a_wrong_size_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends("loopback") as (p, d):
        theirs, mine = filled_cache(p, 1), plain_cache(d, 2)
        server, key = p._open().server, BlocksCacheKey(p.cluster_id, 0)
        answer = server.checksums
        for wrong in (b"", b"1234567"):
            monkeypatch.setattr(server, "checksums", lambda asked, wrong=wrong: wrong)
            with pytest.raises(ProtocolError, match="8 checksums wrongly"):
                manager(d).pull_blocks(key, mine, [1, 2], [3, 4])
        monkeypatch.setattr(server, "checksums", answer)
        manager(d).pull_blocks(key, mine, [1, 2], [3, 4])
        assert_moved(theirs, mine, [1, 2], [3, 4])


def test_an_owner_that_goes_away_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends("shm") as (p, d):
        filled_cache(p, 1)
        mine, asked, gone = plain_cache(d, 2), threading.Event(), threading.Event()
        monkeypatch.setattr(p._open().server, "checksums", lambda _: (asked.set(), gone.wait(WAIT_S), b"")[2])
        ended: list[LLMException] = []

        def pull() -> None:
            with pytest.raises(LLMException) as caught:
                manager(d).pull_blocks(BlocksCacheKey(p.cluster_id, 0), mine, [1], [2], deadline_s=10 * WAIT_S)
            ended.append(caught.value)

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        assert asked.wait(WAIT_S)
        p._open().links.get(d.cluster_id).close()
        thread.join(WAIT_S)
        gone.set()
        assert [type(one) for one in ended] == [PeerLost]


@contextmanager
def two_more(p: LLMDataDist, integrity: str) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    with an_end("shm", integrity) as first, an_end("shm", integrity) as second:
        for end in (first, second):
            must_link(end, p)
        yield first, second


def test_turns_are_fair_and_bounded() -> None:
    turns, gate, order = Turns(num_threads=1, max_waiting=2, name="test"), threading.Event(), list[str]()

    def piece(name: str) -> Callable[[], None]:
        return lambda: (gate.wait(WAIT_S), order.append(name))[1]

    try:
        assert [turns.submit("a", piece(f"a{i}")) for i in range(4)] == [True, True, True, False]
        assert [turns.submit("b", piece(f"b{i}")) for i in range(2)] == [True, True]
        gate.set()
        assert eventually(lambda: len(order) == 5, WAIT_S)
        assert order == ["a0", "b0", "a1", "b1", "a2"]
        assert eventually(lambda: not turns._waiting, WAIT_S)  # nothing is kept of keys that are done
    finally:
        turns.close()
    turns.submit("a", piece("late"))
    assert order[-1] == "a2"
