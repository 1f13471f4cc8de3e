# SPDX-License-Identifier: Apache-2.0
"""The negative control of the conformance suite: backends that are broken on purpose do not pass it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from datadist_core.backends.loopback import LoopbackBackend
from datadist_core.errors import TimedOut
from datadist_core.testing import conformance, end, parallel
from datadist_core.testing._suite_base import check_works, make_grids
from datadist_core.testing._suite_bytes import CASES
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.transfer.backend import Backend, Completion, DoneCallback
from datadist_core.transfer.plan import Batch, Op


class Twice(LoopbackBackend):
    """Two completions."""

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        super().submit(batch_id, batch, done)
        done(Completion.ok(batch_id))


class Never(LoopbackBackend):
    """No completion, and none on close either."""

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        return


class RaisesToo(LoopbackBackend):
    """Completes a batch that it says it did not accept."""

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        done(Completion.ok(batch_id))
        raise TimedOut("and yet")


class MovesNothing(LoopbackBackend):
    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        done(Completion.ok(batch_id))


class MovesTooMuch(LoopbackBackend):
    """Whole blocks where a part was asked for."""

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        whole = tuple(replace(part, num_bytes=part.num_bytes + 8) for part in batch.slices)
        super().submit(batch_id, replace(batch, slices=whole), done)


class MovesTheNextBlock(LoopbackBackend):
    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        num_items = batch.pairs[0].remote.num_items
        super().submit(batch_id, replace(batch, remote_items=(batch.remote_items + 1) % num_items), done)


class ForgetsPairs(LoopbackBackend):
    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        super().submit(batch_id, replace(batch, pairs=batch.pairs[:-1]), done)


class ReadsWrites(LoopbackBackend):
    """The wrong way round."""

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        super().submit(batch_id, replace(batch, op=Op.WRITE if batch.op is Op.READ else Op.READ), done)


class Suite(conformance.BackendConformance):
    """Not collected: its name does not begin with Test. Runs single tests over a class."""

    def __init__(self, broken: type[Backend]) -> None:
        self.broken = broken

    def make_backend(self) -> Backend:
        return self.broken()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never comes need not be waited for long."""
    monkeypatch.setattr(end.CompletionLog.wait, "__defaults__", (0.2,))


def moves(name: str, op: Op) -> Callable[[Suite], None]:
    def run(suite: Suite) -> None:
        with suite.open_local() as pair:
            pair.link()
            suite.test_moves_exactly_the_bytes(pair, CASES[name], op)

    return run


def completes(suite: Suite) -> None:
    with suite.open_local() as pair:
        pair.link()
        suite.test_success_completes_once(pair, Op.READ)


def transfers(suite: Suite) -> None:
    """Does not look at the outcome: what is wrong shows when the pair is closed."""
    with suite.open_local() as pair:
        pair.link()
        pair.a.transfer(pair.batch(Op.READ, *make_grids(pair), [0], [0]))


def refuses_after_disconnect(suite: Suite) -> None:
    with suite.open_local() as pair:
        pair.link()
        suite.test_submit_after_disconnect_is_refused(pair)


BROKEN = [
    (Twice, completes),
    (Never, completes),
    (RaisesToo, transfers),
    (MovesNothing, moves("one-block", Op.READ)),
    (MovesNothing, moves("one-block", Op.WRITE)),
    (MovesNothing, refuses_after_disconnect),
    (MovesTooMuch, moves("heads-of-runs", Op.READ)),
    (MovesTheNextBlock, moves("all-blocks", Op.READ)),
    (MovesTheNextBlock, moves("scattered", Op.WRITE)),
    (ForgetsPairs, moves("several-grids", Op.READ)),
    (ReadsWrites, moves("one-block", Op.READ)),
]


@pytest.mark.parametrize(("broken", "run"), BROKEN)
def test_broken_backend_is_caught(broken: type[Backend], run: Callable[[Suite], None]) -> None:
    run(Suite(LoopbackBackend))
    with pytest.raises((AssertionError, TimedOut)):
        run(Suite(broken))


def test_leak_is_caught() -> None:
    kept = []

    def leak() -> None:
        with nothing_left_behind(timeout_s=0.1):
            kept.append(open("/dev/null"))  # noqa: SIM115 - the point of it

    with pytest.raises(AssertionError, match="/dev/null"):
        leak()
    kept.pop().close()


def test_wrong_bytes_are_caught_by_the_short_check() -> None:
    with Suite(MovesNothing).open_local() as pair:
        pair.link()
        with pytest.raises(AssertionError, match="items 0, 3"):
            check_works(pair)


def test_hanging_call_is_reported() -> None:
    released = threading.Event()
    with pytest.raises(TimedOut, match="did not return"):
        parallel.run_all([lambda: released.wait(60)], timeout_s=0.05)
    released.set()
