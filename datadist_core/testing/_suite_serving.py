# SPDX-License-Identifier: Apache-2.0
"""The peer is not trusted (rule 6): ids and ranges are checked by whoever owns the memory, or its limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..errors import LLMException
from ..memory.grid import Grid
from ..transfer.plan import Op, Slice
from ._suite_base import (
    SuiteBase,
    both_ops,
    check_equal_items,
    check_refused,
    check_works,
    make_grids,
    require_ok,
)
from .end import Export, LocalEnd
from .pair import A_KNOWS_B_AS, BackendPair
from .parallel import WAIT_S

UNKNOWN_ID = 1 << 40


class ServingSuite(SuiteBase):
    @both_ops
    def test_unknown_grid_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        self.serving()
        mine, theirs = make_grids(linked)
        self._check_untouched(linked, op, mine, replace(theirs, grid_id=UNKNOWN_ID), [1], [1])
        check_works(linked)

    def test_write_to_a_read_only_grid_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        self.serving()
        mine, theirs = linked.a.add_grid(8, 512), linked.b.add_grid(8, 512, writable=False)
        self._check_untouched(linked, Op.WRITE, mine, theirs, [1], [1])
        check_works(linked)

    @both_ops
    def test_item_outside_the_grid_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        """The initiator believes in a larger grid than the peer has: its own check lets the batch pass."""
        self.serving()
        mine, theirs = make_grids(linked, num_items=16)
        make_grids(linked)  # what lies behind is somebody's
        self._check_untouched(linked, op, mine, replace(theirs, num_items=17), [0, 1], [3, 16])

    @both_ops
    def test_slice_outside_the_item_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        self.serving()
        mine, theirs = linked.a.add_grid(8, 1024), linked.b.add_grid(8, 512)
        larger = replace(theirs, item_bytes=1024, stride_bytes=1024)
        self._check_untouched(linked, op, mine, larger, [1], [1], (Slice(0, 256, 512),))

    @both_ops
    def test_another_division_beyond_the_grid_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        """The id is right and every item exists in the division that the initiator names, but not in the memory."""
        self.serving()
        mine, theirs = linked.a.add_grid(8, 256), linked.b.add_grid(8, 512)
        make_grids(linked)
        behind = replace(theirs, offset_bytes=theirs.offset_bytes + 256, item_bytes=256, stride_bytes=512)
        self._check_untouched(linked, op, mine, replace(behind, offset_bytes=theirs.end_bytes - 128), [1], [0])
        self._check_untouched(linked, op, mine, replace(behind, num_items=9), [1], [1])
        self._check_untouched(linked, op, mine, replace(behind, stride_bytes=128), [1], [1])

    @both_ops
    def test_item_outside_the_region_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        mine, theirs = make_grids(linked)
        beyond = linked.b.region.size_bytes // theirs.stride_bytes
        self._check_untouched(linked, op, mine, replace(theirs, num_items=beyond + 1), [1, 2], [0, beyond])

    @both_ops
    def test_region_that_is_not_attached_is_refused(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        self.one_sided()
        mine, theirs = make_grids(linked)
        self._check_untouched(linked, op, mine, replace(theirs, region_id=UNKNOWN_ID), [1], [1])
        check_works(linked)

    def test_detached_region_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        self.one_sided()
        mine, theirs = make_grids(linked)
        linked.a.backend.detach(A_KNOWS_B_AS, theirs.region_id)
        check_refused(linked.a, linked.batch(Op.READ, mine, theirs, [1], [1]))

    def test_removed_memory_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        """After `unregister` the owner may reuse the memory, and who is asked says no."""
        self.serving()
        mine, theirs = make_grids(linked)
        linked.b.remove_region(theirs.region_id)
        check_refused(linked.a, linked.batch(Op.READ, mine, theirs, [1], [1]))

    def test_local_region_that_is_not_registered_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        check_refused(linked.a, linked.batch(Op.READ, replace(mine, region_id=UNKNOWN_ID), theirs, [1], [1]))
        check_works(linked)

    def test_attach_beyond_the_region_is_refused(self, pair: BackendPair[LocalEnd]) -> None:
        """A peer that overstates its region must not make us fault later."""
        self.one_sided()
        pair.connect()
        (export,) = pair.b.exports()
        with pytest.raises(LLMException):
            pair.a.attach(A_KNOWS_B_AS, replace(export, size_bytes=export.size_bytes + (1 << 20)), WAIT_S)
        pair.attach()
        check_works(pair)

    @pytest.mark.parametrize("descriptor", [b"", b"\xff" * 64, b"\x00" * 1024], ids=["empty", "ones", "zeros"])
    def test_garbage_descriptor_is_refused(self, pair: BackendPair[LocalEnd], descriptor: bytes) -> None:
        self.one_sided()
        pair.connect()
        with pytest.raises(LLMException):
            pair.a.attach(A_KNOWS_B_AS, Export(UNKNOWN_ID, 4096, descriptor), WAIT_S)

    def test_memory_that_is_not_for_peers_is_not_exported(self, linked: BackendPair[LocalEnd]) -> None:
        """It is only the local side of batches."""
        exported = linked.a.exports()
        mine, theirs = linked.a.add_private_grid(4, 4096, for_peers=False), linked.b.add_grid(4, 4096)
        assert linked.a.exports() == exported
        linked.b.fill(4)
        require_ok(linked.a.transfer(linked.batch(Op.READ, mine, theirs, [0, 3], [2, 1])))
        check_equal_items(linked, mine, theirs, [0, 3], [2, 1])
        linked.a.backend.unregister(mine.region_id)

    def test_exports_are_small(self, pair: BackendPair[LocalEnd]) -> None:
        """They travel over the control channel, which has limits."""
        assert len(pair.a.identity()) <= 4096
        assert all(len(export.descriptor) <= 1024 for export in pair.a.exports())

    def _check_untouched(
        self,
        pair: BackendPair[LocalEnd],
        op: Op,
        mine: Grid,
        theirs: Grid,
        local_items: list[int],
        remote_items: list[int],
        slices: tuple[Slice, ...] | None = None,
    ) -> None:
        """The batch is refused and has changed nothing at the peer."""
        pair.b.fill(2)
        before = pair.b.snapshot(pair.b.region.region_id)
        check_refused(pair.a, pair.batch(op, mine, theirs, local_items, remote_items, slices))
        assert np.array_equal(pair.b.snapshot(pair.b.region.region_id), before), "a refused batch changed the peer"
