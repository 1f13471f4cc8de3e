# SPDX-License-Identifier: Apache-2.0
"""A peer in a process of its own that stops or dies, without a word, at the worst moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ..errors import LLMException
from ..transfer.backend import CompletionStatus
from ..transfer.plan import Batch, Op
from ._suite_base import SuiteBase, both_ops, check_works, make_grids
from .child import ChildEnd
from .leaks import nothing_left_behind
from .pair import A_KNOWS_B_AS, BackendPair
from .parallel import run_all

POOL_BYTES = 24 << 20
NUM_BATCHES = 8


class ProcessSuite(SuiteBase):
    @both_ops
    def test_killed_peer_completes_once(self, op: Op) -> None:
        """SIGKILL while 8 batches of 16 MiB are under way: each ends, and the backend lives on."""
        with self._open_big() as pair:
            submitted = _submit_many(pair, _big_batch(pair, op))
            pair.b.kill()
            for batch_id in submitted:
                completion = pair.a.log.wait(batch_id)
                assert (completion.status is CompletionStatus.OK) == (completion.error is None), completion
            pair.a.disconnect(A_KNOWS_B_AS)
            self._check_links_again(pair)

    def test_batch_for_a_dead_peer_completes_once(self, child_pair: BackendPair[ChildEnd]) -> None:
        mine, theirs = make_grids(child_pair)
        child_pair.b.kill()
        completion = child_pair.a.transfer(child_pair.batch(Op.READ, mine, theirs, [1], [1]))
        if not self.capabilities().one_sided:
            assert completion.status is CompletionStatus.FAILED

    def test_connect_to_a_dead_peer_fails(self) -> None:
        with self.open_child() as pair:
            identity = pair.b.identity()
            pair.b.kill()
            with pytest.raises(LLMException):
                pair.a.connect(A_KNOWS_B_AS, identity, True, os.urandom(16), 2.0)

    def test_connect_to_a_stopped_peer_is_bounded(self) -> None:
        """It fails, or succeeds where the peer takes no part in it, but it does not hang."""
        with self.open_child() as pair:
            identity = pair.b.identity()
            pair.b.stop()
            failures = run_all([lambda: pair.a.connect(A_KNOWS_B_AS, identity, True, os.urandom(16), 1.0)])
            assert failures[0] is None or isinstance(failures[0], LLMException)

    @pytest.mark.parametrize("ending", ["cancel", "disconnect", "close"])
    @both_ops
    def test_batches_with_a_stopped_peer_can_be_ended(self, op: Op, ending: str) -> None:
        with self._open_big() as pair:
            batch = _big_batch(pair, op)
            pair.b.stop()
            submitted = _submit_many(pair, batch)
            _end(pair, ending, submitted)
            for batch_id in submitted:
                pair.a.log.wait(batch_id)
            if not self.stopped_peers_go_on:
                pair.b.kill()

    def test_killed_peers_leave_nothing_behind(self) -> None:
        if not self.two_processes:
            pytest.skip("not between processes")
        with nothing_left_behind():
            self._lose_one()

    @contextmanager
    def _open_big(self) -> Iterator[BackendPair[ChildEnd]]:
        with self.open_child(POOL_BYTES) as pair:
            pair.link()
            yield pair

    def _lose_one(self) -> None:
        with self.open_child() as pair:
            pair.link()
            mine, theirs = make_grids(pair)
            pair.b.kill()
            pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [1]))
            pair.a.disconnect(A_KNOWS_B_AS)

    def _check_links_again(self, pair: BackendPair[ChildEnd]) -> None:
        """A successor of the dead peer can be linked under the same id."""
        with self.open_child() as fresh:
            successor = BackendPair(pair.a, fresh.b)
            successor.link()
            check_works(successor)
            pair.a.disconnect(A_KNOWS_B_AS)


def _big_batch(pair: BackendPair[ChildEnd], op: Op) -> Batch:
    """Far more than sockets and pipes can hold."""
    mine, theirs = make_grids(pair, num_items=16, item_bytes=1 << 20)
    items = list(range(16))
    return pair.batch(op, mine, theirs, items, items[::-1])


def _submit_many(pair: BackendPair[ChildEnd], batch: Batch) -> list[int]:
    return [pair.a.submit(batch) for _ in range(NUM_BATCHES)]


def _end(pair: BackendPair[ChildEnd], ending: str, submitted: list[int]) -> None:
    if ending == "disconnect":
        pair.a.disconnect(A_KNOWS_B_AS)
    elif ending == "close":
        pair.a.backend.close()
    else:
        for batch_id in submitted:
            pair.a.backend.cancel(batch_id)
