# SPDX-License-Identifier: Apache-2.0
"""What `Backend.prepare` returns moves the same bytes as a batch, again and again, and fails where a batch would."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from ..errors import LLMException, ParamInvalid
from ..memory.grid import Grid
from ..transfer.backend import Prepared
from ..transfer.plan import GridPair, Op, Slice, whole_item
from ._suite_base import SuiteBase, both_ops, check_works, make_grids
from .child import ChildEnd
from .end import Bytes, End, LocalEnd
from .pair import A_KNOWS_B_AS, BackendPair

_ITEM_BYTES = 512


def _prepared(pair: BackendPair[End], mine: Grid, theirs: Grid, slices: tuple[Slice, ...] | None = None) -> Prepared:
    pairs = (GridPair(mine, theirs),)
    prepared = pair.a.backend.prepare(A_KNOWS_B_AS, pairs, slices or whole_item(mine.item_bytes))
    if prepared is None:
        pytest.skip("nothing to prepare")
    return prepared


def _indices(*values: int) -> array[int]:
    return array("q", values)


class PreparedSuite(SuiteBase):
    @both_ops
    def test_moves_what_a_batch_moves(self, any_linked: BackendPair[End], op: Op) -> None:
        pair = any_linked
        mine, theirs = make_grids(pair)
        prepared = _prepared(pair, mine, theirs)
        for seed, (local, remote) in enumerate([([1], [2]), ([0, 1, 2, 9], [5, 6, 7, 3]), (range(16), range(16))]):
            pair.a.fill(2 * seed)
            pair.b.fill(2 * seed + 1)
            ours, others = _rows(pair.a, mine), _rows(pair.b, theirs)
            prepared.run(op, _indices(*local), np.array(remote, dtype=np.int64))
            if op is Op.READ:
                ours[list(local)] = others[list(remote)]
            else:
                others[list(remote)] = ours[list(local)]
            np.testing.assert_array_equal(_rows(pair.a, mine), ours)
            np.testing.assert_array_equal(_rows(pair.b, theirs), others)

    def test_moves_slices(self, any_linked: BackendPair[End]) -> None:
        pair = any_linked
        mine, theirs = make_grids(pair)
        prepared = _prepared(pair, mine, theirs, (Slice(3, 10, 100), Slice(200, 301, 7)))
        pair.a.fill(1)
        pair.b.fill(2)
        expected, others = _rows(pair.a, mine), _rows(pair.b, theirs)
        expected[4, 3:103], expected[4, 200:207] = others[5, 10:110], others[5, 301:308]
        prepared.run(Op.READ, _indices(4), _indices(5))
        np.testing.assert_array_equal(_rows(pair.a, mine), expected)

    @both_ops
    @pytest.mark.parametrize(("local", "remote"), [(16, 0), (-1, 0), (0, 16), (0, -1), (2**62, 0), (0, -(2**63))])
    def test_an_index_out_of_range_moves_nothing(
        self, linked: BackendPair[LocalEnd], op: Op, local: int, remote: int
    ) -> None:
        mine, theirs = make_grids(linked)
        prepared = _prepared(linked, mine, theirs)
        linked.a.fill(1)
        linked.b.fill(2)
        before = linked.a.snapshot(mine.region_id), linked.b.snapshot(theirs.region_id)
        with pytest.raises(ParamInvalid, match="out of range"):
            prepared.run(op, _indices(1, local), _indices(2, remote))
        np.testing.assert_array_equal(linked.a.snapshot(mine.region_id), before[0])
        np.testing.assert_array_equal(linked.b.snapshot(theirs.region_id), before[1])
        prepared.run(op, _indices(1), _indices(2))

    def test_fails_once_disconnected(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        prepared = _prepared(linked, mine, theirs)
        linked.a.disconnect(A_KNOWS_B_AS)
        before = linked.a.snapshot(mine.region_id)
        with pytest.raises(LLMException):
            prepared.run(Op.READ, _indices(1), _indices(2))
        np.testing.assert_array_equal(linked.a.snapshot(mine.region_id), before)

    def test_fails_once_closed(self, linked: BackendPair[LocalEnd]) -> None:
        prepared = _prepared(linked, *make_grids(linked))
        linked.a.backend.close()
        with pytest.raises(LLMException):
            prepared.run(Op.READ, _indices(1), _indices(2))

    def test_fails_once_detached_and_can_be_prepared_anew(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        prepared = _prepared(linked, mine, theirs)
        linked.a.backend.detach(A_KNOWS_B_AS, theirs.region_id)
        with pytest.raises(ParamInvalid):
            prepared.run(Op.READ, _indices(1), _indices(2))
        for export in linked.b.exports():
            linked.a.attach(A_KNOWS_B_AS, export, 5)
        _prepared(linked, mine, theirs).run(Op.READ, _indices(1), _indices(2))
        check_works(linked)

    def test_fails_once_the_peer_is_killed(self, child_pair: BackendPair[ChildEnd]) -> None:
        prepared = _prepared(child_pair, *make_grids(child_pair))
        child_pair.b.kill()
        with pytest.raises(LLMException):
            prepared.run(Op.READ, _indices(1), _indices(2))

    def test_is_refused_for_what_is_not_attached(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        _prepared(linked, mine, theirs)
        unknown = Grid(theirs.grid_id, theirs.region_id + 1000, 0, _ITEM_BYTES, _ITEM_BYTES, 1)
        with pytest.raises(LLMException):
            linked.a.backend.prepare(A_KNOWS_B_AS, (GridPair(mine, unknown),), whole_item(_ITEM_BYTES))
        with pytest.raises(LLMException):
            linked.a.backend.prepare(A_KNOWS_B_AS + 1000, (GridPair(mine, theirs),), whole_item(_ITEM_BYTES))


def _rows(end: End, grid: Grid) -> Bytes:
    """A copy of the items of a grid without gaps."""
    data = end.snapshot(grid.region_id)[grid.offset_bytes : grid.end_bytes]
    return data.reshape(grid.num_items, grid.item_bytes).copy()
