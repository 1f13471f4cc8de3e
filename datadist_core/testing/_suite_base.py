# SPDX-License-Identifier: Apache-2.0
"""What the conformance suites share: settings, fixtures, and the check that follows every test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from ..errors import Unreachable
from ..memory.grid import Grid
from ..transfer.backend import Backend, Capabilities, Completion
from ..transfer.plan import Batch, Op
from .child import ChildEnd, import_by_name
from .end import End, LocalEnd, is_ok
from .pair import BackendPair

IN_PROCESS = "in-process"
TWO_PROCESSES = "two-processes"

both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


class SuiteBase:
    """Settings of a conformance run.

    Attributes:
        factory: "module:callable" that makes an unopened backend when called without arguments. By name, because
            spawned processes need it too.
        options: for `BackendContext.options`, at both ends.
        in_process: two ends in one process can be linked.
        two_processes: two ends in two processes of this host can be linked.
        serves_grids: whoever owns the memory looks up every grid a peer names. What `capabilities` implies if None.
        stopped_peers_go_on: a process that was stopped in mid-transfer is sound when it goes on. If not, it is killed.
        may_be_unavailable: skip, naming the reason, where the backend says Unreachable on opening or linking.
    """

    factory: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    in_process: ClassVar[bool] = True
    two_processes: ClassVar[bool] = True
    serves_grids: ClassVar[bool | None] = None
    stopped_peers_go_on: ClassVar[bool] = True
    may_be_unavailable: ClassVar[bool] = False

    def make_backend(self) -> Backend:
        backend: Backend = import_by_name(self.factory)()
        return backend

    def capabilities(self) -> Capabilities:
        return self.make_backend().capabilities()

    @contextmanager
    def open_local(self, pool_bytes: int = 1 << 20) -> Iterator[BackendPair[LocalEnd]]:
        """Two ends of this process, not yet linked; checked and closed afterwards."""
        with self._skip_unreachable(), BackendPair.in_process(self.make_backend, pool_bytes, self.options) as pair:
            yield pair
        check_completions(pair.a)
        check_completions(pair.b)

    @contextmanager
    def open_child(self, pool_bytes: int = 4 << 20) -> Iterator[BackendPair[ChildEnd]]:
        """`b` in a process of its own, not yet linked; checked and closed afterwards."""
        if not self.two_processes:
            pytest.skip("not between processes")
        with self._skip_unreachable(), BackendPair.two_processes(self.factory, pool_bytes, self.options) as pair:
            yield pair
        check_completions(pair.a)

    @pytest.fixture
    def pair(self) -> Iterator[BackendPair[LocalEnd]]:
        if not self.in_process:
            pytest.skip("not within one process")
        with self.open_local() as pair:
            yield pair

    @pytest.fixture
    def linked(self, pair: BackendPair[LocalEnd]) -> BackendPair[LocalEnd]:
        pair.link()
        return pair

    @pytest.fixture
    def child_pair(self) -> Iterator[BackendPair[ChildEnd]]:
        with self.open_child() as pair:
            pair.link()
            yield pair

    @pytest.fixture(params=[IN_PROCESS, TWO_PROCESSES])
    def any_linked(self, request: pytest.FixtureRequest) -> BackendPair[End]:
        """A linked pair of either kind."""
        name = "linked" if request.param == IN_PROCESS else "child_pair"
        pair: BackendPair[End] = request.getfixturevalue(name)
        return pair

    def serving(self) -> None:
        """Skip the test unless the owner of the memory sees the requests."""
        serves = not self.capabilities().one_sided if self.serves_grids is None else self.serves_grids
        if not serves:
            pytest.skip("one-sided: nobody serves")

    def one_sided(self) -> None:
        """Skip the test unless the peer's processor takes no part."""
        if not self.capabilities().one_sided:
            pytest.skip("two-sided")

    def asynchronous(self) -> None:
        """Skip the test unless a peer that serves slowly leaves a batch pending after `submit`."""
        self.serving()
        if self.capabilities().inline:
            pytest.skip("completes inline: nothing is ever pending")

    @contextmanager
    def _skip_unreachable(self) -> Iterator[None]:
        try:
            yield
        except Unreachable as error:
            if not self.may_be_unavailable:
                raise
            pytest.skip(f"not available here: {error}")


def check_completions(end: LocalEnd) -> None:
    """After `close`: every accepted batch has had exactly one completion."""
    assert end.log.pending() == [], "batches without a completion after close"
    assert end.log.excessive() == [], "batches with more completions than they may have"


def require_ok(completion: Completion) -> None:
    if not is_ok(completion):
        raise AssertionError(f"expected success, got {completion}") from completion.error


def make_grids(pair: BackendPair[End], num_items: int = 16, item_bytes: int = 512) -> tuple[Grid, Grid]:
    """A grid of the same shape at both ends."""
    return pair.a.add_grid(num_items, item_bytes), pair.b.add_grid(num_items, item_bytes)


def check_works(pair: BackendPair[End]) -> None:
    """The link moves bytes, over grids made for this."""
    mine, theirs = make_grids(pair, 4)
    pair.b.fill(3)
    require_ok(pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 1, 3], [3, 2, 0])))
    check_equal_items(pair, mine, theirs, [0, 1, 3], [3, 2, 0])


def check_equal_items(
    pair: BackendPair[End], mine: Grid, theirs: Grid, local_items: list[int], remote_items: list[int]
) -> None:
    here, there = pair.a.snapshot(mine.region_id), pair.b.snapshot(theirs.region_id)
    for i, j in zip(local_items, remote_items, strict=True):
        at = mine.offset_bytes + i * mine.stride_bytes
        of = theirs.offset_bytes + j * theirs.stride_bytes
        assert bytes(here[at : at + mine.item_bytes]) == bytes(there[of : of + theirs.item_bytes]), f"items {i}, {j}"


def check_refused(end: LocalEnd, batch: Batch) -> Completion:
    """The batch fails, with an error of ours, in whichever of the two allowed ways."""
    completion = end.transfer(batch)
    assert not is_ok(completion), "a batch that had to be refused was carried out"
    assert completion.error is not None, "a failure must carry its error"
    return completion
