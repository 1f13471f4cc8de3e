# SPDX-License-Identifier: Apache-2.0
"""Connecting, disconnecting, closing: each can be repeated, refused, or done for nothing, and leaves nothing."""

from __future__ import annotations

import os

import pytest

from ..errors import LLMException, ProtocolError, TimedOut, Unreachable
from ..transfer.plan import Op
from ._suite_base import SuiteBase, check_completions, check_refused, check_works, make_grids, require_ok
from .end import LocalEnd
from .leaks import nothing_left_behind
from .pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair, make_batch
from .parallel import WAIT_S, eventually, require_all

NOBODY = 4711
SHORT_S = 0.3
"""For a connect that cannot succeed and is expected to use up its time."""

CONNECT_ERRORS = (Unreachable, TimedOut, ProtocolError)


class LinkSuite(SuiteBase):
    def test_wrong_token_is_refused(self, pair: BackendPair[LocalEnd]) -> None:
        failures = pair.try_connect(os.urandom(16), os.urandom(16), SHORT_S)
        assert any(failures), "a link came about although the ends have different tokens"
        for failure in failures:
            assert failure is None or isinstance(failure, CONNECT_ERRORS), repr(failure)
        self._check_no_link(pair, failures)

    def test_right_token_after_a_wrong_one(self, pair: BackendPair[LocalEnd]) -> None:
        """What a failed attempt left would be in the way now."""
        pair.try_connect(os.urandom(16), os.urandom(16), SHORT_S)
        pair.disconnect()
        pair.link()
        check_works(pair)

    @pytest.mark.parametrize("identity", [b"", b"\xff" * 64, b"\x00" * 4096], ids=["empty", "ones", "zeros"])
    def test_garbage_identity_is_refused(self, pair: BackendPair[LocalEnd], identity: bytes) -> None:
        with pytest.raises(CONNECT_ERRORS):
            pair.a.connect(A_KNOWS_B_AS, identity, True, os.urandom(16), SHORT_S)

    def test_connect_to_a_closed_peer_is_refused(self, pair: BackendPair[LocalEnd]) -> None:
        identity = pair.b.identity()
        pair.b.close()
        with pytest.raises(CONNECT_ERRORS):
            pair.a.connect(A_KNOWS_B_AS, identity, True, os.urandom(16), SHORT_S)

    def test_submit_to_nobody_is_refused(self, linked: BackendPair[LocalEnd]) -> None:
        mine, theirs = make_grids(linked)
        check_refused(linked.a, make_batch(NOBODY, Op.READ, mine, theirs, [1], [1]))

    def test_attach_to_nobody_is_refused(self, pair: BackendPair[LocalEnd]) -> None:
        self.one_sided()
        (export,) = pair.b.exports()
        with pytest.raises(LLMException):
            pair.a.attach(NOBODY, export, WAIT_S)

    def test_no_ops(self, linked: BackendPair[LocalEnd]) -> None:
        linked.a.disconnect(NOBODY)
        linked.a.backend.detach(NOBODY, NOBODY)
        linked.a.backend.detach(A_KNOWS_B_AS, NOBODY)
        linked.a.backend.unregister(NOBODY)
        linked.attach()
        check_works(linked)

    def test_close_is_idempotent(self, linked: BackendPair[LocalEnd]) -> None:
        linked.a.backend.close()
        linked.a.backend.close()
        linked.a.disconnect(A_KNOWS_B_AS)
        linked.a.backend.unregister(linked.a.region.region_id)

    def test_close_from_two_threads(self, linked: BackendPair[LocalEnd]) -> None:
        require_all([linked.a.backend.close, linked.b.backend.close, linked.a.backend.close])

    def test_close_without_links(self, pair: BackendPair[LocalEnd]) -> None:
        pair.a.backend.close()

    def test_close_ends_a_connect(self, pair: BackendPair[LocalEnd]) -> None:
        """Whoever waits for a peer that never comes is not held up by it when we shut down."""
        identity_b = pair.b.identity()

        def connect() -> None:
            # A backend that has nobody to wait for may well succeed.
            try:
                pair.a.connect(A_KNOWS_B_AS, identity_b, False, os.urandom(16), SHORT_S)
            except LLMException:
                return

        require_all([connect, pair.a.backend.close])

    def test_reconnect(self, linked: BackendPair[LocalEnd]) -> None:
        for _ in range(3):
            linked.disconnect()
            linked.link()
            check_works(linked)

    def test_disconnect_by_the_peer_ends_service(self, linked: BackendPair[LocalEnd]) -> None:
        self.serving()
        mine, theirs = make_grids(linked)
        linked.b.disconnect(B_KNOWS_A_AS)
        check_refused(linked.a, linked.batch(Op.READ, mine, theirs, [1], [1]))

    def test_fenced_once_both_ends_are_down(self, linked: BackendPair[LocalEnd]) -> None:
        backend = linked.a.backend
        assert backend.is_fenced(NOBODY)
        linked.disconnect()
        assert eventually(lambda: backend.is_fenced(A_KNOWS_B_AS), WAIT_S)

    def test_three_ends(self, linked: BackendPair[LocalEnd]) -> None:
        """Two peers of one backend: losing the one does not touch the other."""
        third = LocalEnd(self.make_backend(), options=self.options)
        other = BackendPair(third, linked.b)
        try:
            _connect_as(third, linked.b, NOBODY)
            for export in linked.b.exports():
                third.attach(A_KNOWS_B_AS, export, WAIT_S)
            check_works(linked)
            linked.disconnect()
            mine, theirs = make_grids(other)
            require_ok(third.transfer(other.batch(Op.READ, mine, theirs, [0, 2], [1, 3])))
        finally:
            third.close()
        check_completions(third)

    def test_leaves_nothing_behind(self) -> None:
        if not self.in_process:
            pytest.skip("not within one process")
        with nothing_left_behind():
            for _ in range(2):
                self._live_once()

    def _live_once(self) -> None:
        """A whole life, with a failed connect in it."""
        with self.open_local() as pair:
            pair.try_connect(os.urandom(16), os.urandom(16), SHORT_S)
            pair.disconnect()
            pair.link()
            check_works(pair)
            pair.disconnect()
            pair.link()

    def _check_no_link(self, pair: BackendPair[LocalEnd], failures: list[BaseException | None]) -> None:
        """The end whose connect failed refuses batches."""
        mine, theirs = make_grids(pair)
        if failures[0] is not None:
            check_refused(pair.a, pair.batch(Op.READ, mine, theirs, [1], [1]))
        if failures[1] is not None:
            check_refused(pair.b, pair.reversed_batch(Op.READ, theirs, mine, [1], [1]))


def _connect_as(a: LocalEnd, b: LocalEnd, b_knows_a_as: int) -> None:
    """Like `BackendPair.connect`, with another id for `a` at `b`, which has an `a` already."""
    token, identity_a, identity_b = os.urandom(16), a.identity(), b.identity()
    require_all(
        [
            lambda: a.connect(A_KNOWS_B_AS, identity_b, True, token, WAIT_S),
            lambda: b.connect(b_knows_a_as, identity_a, False, token, WAIT_S),
        ]
    )
