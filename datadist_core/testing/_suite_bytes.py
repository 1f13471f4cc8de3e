# SPDX-License-Identifier: Apache-2.0
"""A transfer moves exactly the bytes it should: those of a naive copy, and no other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from ..transfer.plan import Batch, Op, Slice, whole_item
from ._suite_base import SuiteBase, both_ops, require_ok
from .end import End, LocalEnd
from .pair import BackendPair, naive_copy
from .parallel import require_all

NUM_ITEMS = 48
ITEM_BYTES = 384


@dataclass(frozen=True, slots=True)
class Case:
    """What to move: the items on both sides, how the grids lie, which part of an item."""

    local_items: npt.NDArray[np.int64]
    remote_items: npt.NDArray[np.int64]
    slices: tuple[Slice, ...] = whole_item(ITEM_BYTES)
    local_gap_bytes: int = 0
    remote_gap_bytes: int = 0
    num_pairs: int = 1


def _scattered(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(NUM_ITEMS)[:count].astype(np.int64)


def _run(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


_HEADS = (Slice(0, 64, 64), Slice(256, 0, 64), Slice(65, 301, 7))
#: 6 tokens x 4 heads of 16 bytes: token-major here, head-major there; in an order that suits neither end, one, or both.
_PERMUTING = tuple(
    Slice((token * 4 + head) * 16, (head * 6 + token) * 16, 16) for token in range(6) for head in range(4)
)

CASES = {
    "one-block": Case(_run(5, 1), _run(7, 1)),
    "no-block": Case(_run(0, 0), _run(0, 0)),
    "last-block": Case(_run(NUM_ITEMS - 1, 1), _run(NUM_ITEMS - 1, 1)),
    "all-blocks": Case(_run(0, NUM_ITEMS), _run(0, NUM_ITEMS)),
    "scattered": Case(_scattered(30, 1), _scattered(30, 2)),
    "run-against-scattered": Case(_run(3, 20), _scattered(20, 3)),
    "two-runs": Case(np.concatenate((_run(0, 9), _run(20, 9))), np.concatenate((_run(30, 9), _run(8, 9)))),
    "descending": Case(_run(0, 10)[::-1].copy(), _run(20, 10)[::-1].copy()),
    "same-source-twice": Case(_run(10, 6), np.array([4, 4, 9, 4, 9, 0], dtype=np.int64)),
    "several-grids": Case(_scattered(12, 4), _scattered(12, 5), num_pairs=5),
    "heads": Case(_scattered(20, 6), _scattered(20, 7), slices=_HEADS),
    "permuting": Case(_scattered(20, 10), _scattered(20, 11), slices=_PERMUTING),
    "permuting-runs": Case(
        _run(0, 40), _run(3, 40), slices=tuple(sorted(_PERMUTING, key=lambda s: s.remote_offset)), num_pairs=2
    ),
    "parts-that-are-neighbours": Case(
        _run(1, 20), _scattered(20, 12), slices=(Slice(0, 100, 64), Slice(64, 164, 30), Slice(94, 0, 100))
    ),
    "heads-of-runs": Case(_run(0, 20), _run(10, 20), slices=(Slice(0, 192, 192),)),
    "gaps": Case(_run(2, 20), _run(4, 20), local_gap_bytes=128, remote_gap_bytes=64),
    "gap-here-only": Case(_run(2, 20), _run(4, 20), local_gap_bytes=96),
    "gap-there-only": Case(_run(2, 20), _run(4, 20), remote_gap_bytes=96),
    "everything-at-once": Case(
        _scattered(25, 8), _scattered(25, 9), _HEADS, local_gap_bytes=13, remote_gap_bytes=51, num_pairs=3
    ),
}  # fmt: skip


class BytesSuite(SuiteBase):
    """Rules 2 and 3: what moved is right and visible once the completion says OK."""

    @both_ops
    @pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
    def test_moves_exactly_the_bytes(self, linked: BackendPair[LocalEnd], case: Case, op: Op) -> None:
        _check_moves(linked, _make(linked, case, op))

    @both_ops
    def test_moves_exactly_the_bytes_between_processes(self, any_linked: BackendPair[End], op: Op) -> None:
        for case in CASES.values():
            if case.num_pairs > 1 or len(case.local_items) == 1:
                _check_moves(any_linked, _make(any_linked, case, op))

    @both_ops
    def test_moves_more_than_any_buffer_holds(self, op: Op) -> None:
        num_items, item_bytes = 40, 640 << 10
        with self.open_local(pool_bytes=32 << 20) if self.in_process else self.open_child(32 << 20) as pair:
            pair.link()
            mine, theirs = pair.a.add_grid(num_items, item_bytes), pair.b.add_grid(num_items, item_bytes)
            items = np.random.default_rng(1).permutation(num_items)
            _check_moves(pair, pair.batch(op, mine, theirs, items, items[::-1].copy()))

    @both_ops
    def test_moves_memory_divided_in_another_way(self, any_linked: BackendPair[End], op: Op) -> None:
        """Blocks of one end from the middle of what is one long item at the other."""
        pair = any_linked
        mine, theirs = pair.a.add_grid(16, 1000), pair.b.add_grid(4, 12_000)
        _check_moves(pair, pair.batch(op, mine, theirs.cut(12_000, 1000, 12), [15, 3, 4, 0], [11, 1, 2, 0]))
        _check_moves(pair, pair.batch(op, mine.cut(500, 6000, 2), theirs.cut(4, 6000, 7), [0, 1], [6, 2]))

    @both_ops
    def test_moves_private_local_memory(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        """Memory that peers cannot reach may still be the local side of a batch."""
        mine, theirs = linked.a.add_private_grid(20, 1000), linked.b.add_grid(20, 1000)
        _check_moves(linked, linked.batch(op, mine, theirs, [3, 4, 19], [0, 11, 12]))

    def test_moves_both_ways_at_once(self, any_linked: BackendPair[End]) -> None:
        """Each end reads and writes; the four sets of blocks are disjoint."""
        pair = any_linked
        mine, theirs = pair.a.add_grid(64, 4096), pair.b.add_grid(64, 4096)
        pair.a.fill(1)
        pair.b.fill(2)
        from_a = [pair.batch(op, mine, theirs, _run(at, 16), _run(at, 16)) for op, at in _QUARTERS[:2]]
        from_b = [pair.reversed_batch(op, theirs, mine, _run(at, 16), _run(at, 16)) for op, at in _QUARTERS[2:]]
        expected_a, expected_b = pair.a.snapshot(mine.region_id), pair.b.snapshot(theirs.region_id)
        for batch in from_a:
            naive_copy(batch, {mine.region_id: expected_a}, {theirs.region_id: expected_b})
        for batch in from_b:
            naive_copy(batch, {theirs.region_id: expected_b}, {mine.region_id: expected_a})

        require_all(
            [partial(_transfer_ok, pair.a, batch) for batch in from_a]
            + [partial(_transfer_ok, pair.b, batch) for batch in from_b]
        )

        assert np.array_equal(pair.a.snapshot(mine.region_id), expected_a)
        assert np.array_equal(pair.b.snapshot(theirs.region_id), expected_b)

    def test_moves_batches_of_many_threads(self, any_linked: BackendPair[End]) -> None:
        """Batches in flight at once do not disturb each other."""
        pair, num_threads, per_thread = any_linked, 4, 20
        num_items = num_threads * per_thread
        mine, theirs = pair.a.add_grid(num_items, 2048), pair.b.add_grid(num_items, 2048)
        pair.b.fill(2)
        remote = np.random.default_rng(9).permutation(num_items)

        def pull(first: int) -> None:
            for item in range(first, first + per_thread):
                require_ok(pair.a.transfer(pair.batch(Op.READ, mine, theirs, [item], [remote[item]])))

        require_all([partial(pull, i * per_thread) for i in range(num_threads)])
        _check_whole(pair, pair.batch(Op.READ, mine, theirs, _run(0, num_items), remote))


def _transfer_ok(end: End, batch: Batch) -> None:
    require_ok(end.transfer(batch))


_QUARTERS = [(Op.READ, 0), (Op.WRITE, 16), (Op.READ, 32), (Op.WRITE, 48)]


def _make(pair: BackendPair[End], case: Case, op: Op) -> Batch:
    mine = [pair.a.add_grid(NUM_ITEMS, ITEM_BYTES, case.local_gap_bytes) for _ in range(case.num_pairs)]
    theirs = [pair.b.add_grid(NUM_ITEMS, ITEM_BYTES, case.remote_gap_bytes) for _ in range(case.num_pairs)]
    local_items, remote_items = case.local_items, case.remote_items
    if op is Op.WRITE and len(np.unique(remote_items)) < len(remote_items):
        # What is a source twice for a READ must be so for a WRITE too: two writes to one place have no result.
        local_items, remote_items = remote_items, local_items
    return pair.batch(op, mine, theirs, local_items, remote_items, case.slices)


def _check_moves(pair: BackendPair[End], batch: Batch) -> None:
    """Every byte of both ends' regions is afterwards what a naive copy would have made it."""
    local_id, remote_id = batch.pairs[0].local.region_id, batch.pairs[0].remote.region_id
    pair.a.fill(1)
    pair.b.fill(2)
    here, there = pair.a.snapshot(local_id), pair.b.snapshot(remote_id)
    naive_copy(batch, {local_id: here}, {remote_id: there})
    require_ok(pair.a.transfer(batch))
    assert np.array_equal(pair.a.snapshot(local_id), here), "local memory differs from a naive copy"
    assert np.array_equal(pair.b.snapshot(remote_id), there), "the peer's memory differs from a naive copy"


def _check_whole(pair: BackendPair[End], batch: Batch) -> None:
    """The READ `batch` has been carried out by others: doing it again, naively, changes nothing."""
    local_id, remote_id = batch.pairs[0].local.region_id, batch.pairs[0].remote.region_id
    here, there = pair.a.snapshot(local_id), pair.b.snapshot(remote_id)
    expected = here.copy()
    naive_copy(batch, {local_id: expected}, {remote_id: there})
    assert np.array_equal(here, expected)
