# SPDX-License-Identifier: Apache-2.0
"""Exactly one completion per accepted batch, whatever ends it (rules 1, 2 and 5).

That there is never a second one is checked after every test, when the pair is closed.
"""

from __future__ import annotations

import pytest

from ..errors import Cancelled, ClosedError, LLMException, PeerLost
from ..transfer.backend import Completion, CompletionStatus
from ..transfer.plan import Batch, Op
from ._suite_base import SuiteBase, both_ops, check_refused, check_works, make_grids, require_ok
from .end import LocalEnd
from .pair import A_KNOWS_B_AS, BackendPair
from .parallel import WAIT_S

NUM_PENDING = 12


class CompletionSuite(SuiteBase):
    @both_ops
    def test_success_completes_once(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        mine, theirs = make_grids(linked)
        batch_id = linked.a.submit(linked.batch(op, mine, theirs, [1], [2]))
        completion = linked.a.log.wait(batch_id)
        assert completion == Completion.ok(batch_id)

    def test_inline_means_complete_on_return(self, linked: BackendPair[LocalEnd]) -> None:
        if not self.capabilities().inline:
            pytest.skip("not inline")
        mine, theirs = make_grids(linked)
        linked.a.submit(linked.batch(Op.READ, mine, theirs, [1], [2]))
        assert linked.a.log.pending() == []

    @both_ops
    def test_cancel_completes_once(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        submitted = _submit_many(linked, op)
        for batch_id in submitted:
            linked.a.backend.cancel(batch_id)
        for batch_id in submitted:
            _check_end(linked.a.log.wait(batch_id), CompletionStatus.CANCELLED, Cancelled)

    def test_cancel_after_the_end_is_no_op(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        batch_id = linked.a.submit(linked.batch(Op.READ, mine, theirs, [1], [2]))
        require_ok(linked.a.log.wait(batch_id))
        linked.a.backend.cancel(batch_id)
        linked.a.backend.cancel(batch_id + 1_000_000)
        check_works(linked)

    @both_ops
    def test_disconnect_completes_once(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        submitted = _submit_many(linked, op)
        linked.a.disconnect(A_KNOWS_B_AS)
        for batch_id in submitted:
            _check_end(linked.a.log.wait(batch_id), CompletionStatus.FAILED, PeerLost)

    @both_ops
    def test_close_completes_once(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        submitted = _submit_many(linked, op)
        linked.a.backend.close()
        for batch_id in submitted:
            _check_end(linked.a.log.wait(batch_id), CompletionStatus.FAILED, ClosedError)

    @both_ops
    def test_peers_close_completes_once(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        submitted = _submit_many(linked, op)
        linked.b.backend.close()
        for batch_id in submitted:
            _check_end(linked.a.log.wait(batch_id), CompletionStatus.FAILED, LLMException)

    @both_ops
    def test_stuck_batch_can_be_cancelled(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        batch_id, _ = self._submit_stuck(linked, op)
        linked.a.backend.cancel(batch_id)
        completion = linked.a.log.wait(batch_id)
        assert completion.status is CompletionStatus.CANCELLED
        assert isinstance(completion.error, Cancelled)

    def test_nothing_lands_after_a_cancelled_read(self, linked: BackendPair[LocalEnd]) -> None:
        """Rule 2: after the completion the destination may belong to somebody else."""
        linked.a.fill(1)
        linked.b.fill(2)
        batch_id, batch = self._submit_stuck(linked, Op.READ)
        linked.a.backend.cancel(batch_id)
        linked.a.log.wait(batch_id)
        region_id = batch.pairs[0].local.region_id
        linked.a.view(region_id)[:] = 77
        linked.b.serving_allowed.set()
        mine, theirs = make_grids(linked)
        require_ok(linked.a.transfer(linked.batch(Op.WRITE, mine, theirs, [0], [1])))
        linked.close()
        assert (linked.a.snapshot(region_id) == 77).all(), "a cancelled READ wrote after its completion"

    @both_ops
    def test_stuck_batch_ends_with_disconnect(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        batch_id, _ = self._submit_stuck(linked, op)
        linked.a.disconnect(A_KNOWS_B_AS)
        completion = linked.a.log.wait(batch_id)
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, PeerLost)

    @both_ops
    def test_stuck_batch_ends_with_close(self, linked: BackendPair[LocalEnd], op: Op) -> None:
        batch_id, _ = self._submit_stuck(linked, op)
        linked.a.backend.close()
        completion = linked.a.log.wait(batch_id)
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, ClosedError)

    def test_stuck_batch_does_not_hold_up_others(self, linked: BackendPair[LocalEnd]) -> None:
        """Rule 4 has a use: what the other end asks for meanwhile gets through."""
        batch_id, batch = self._submit_stuck(linked, Op.READ)
        pair = batch.pairs[0]
        require_ok(linked.b.transfer(linked.reversed_batch(Op.READ, pair.remote, pair.local, [1], [1])))
        linked.b.serving_allowed.set()
        require_ok(linked.a.log.wait(batch_id))

    def test_submit_after_close_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        linked.a.backend.close()
        completion = check_refused(linked.a, linked.batch(Op.READ, mine, theirs, [1], [2]))
        assert isinstance(completion.error, ClosedError)

    def test_submit_after_disconnect_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        linked.disconnect()
        check_refused(linked.a, linked.batch(Op.READ, mine, theirs, [1], [2]))

    def _submit_stuck(self, pair: BackendPair[LocalEnd], op: Op) -> tuple[int, Batch]:
        """A batch that the peer has begun to serve and will not finish before `serving_allowed`."""
        self.asynchronous()
        mine, theirs = make_grids(pair)
        pair.b.serving_allowed.clear()
        batch = pair.batch(op, mine, theirs, [1, 2, 3], [4, 5, 6])
        batch_id = pair.a.submit(batch)
        assert pair.b.serving_waits.acquire(timeout=WAIT_S), "the peer never began to serve"
        return batch_id, batch


def _submit_many(pair: BackendPair[LocalEnd], op: Op) -> list[int]:
    """Enough work that some of it is still open when this returns, unless the backend works inline."""
    mine, theirs = make_grids(pair, num_items=8, item_bytes=128 << 10)
    batch = pair.batch(op, mine, theirs, [0, 2, 4, 6], [1, 3, 5, 7])
    return [pair.a.submit(batch) for _ in range(NUM_PENDING)]


def _check_end(completion: Completion, status: CompletionStatus, error: type[LLMException]) -> None:
    """It was over before, or it ended with `status` and that kind of error."""
    if completion.status is not CompletionStatus.OK:
        assert completion.status is status
        assert isinstance(completion.error, error)
