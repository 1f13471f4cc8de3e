# SPDX-License-Identifier: Apache-2.0
"""The fault-injecting backends do what they are told, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from datadist_core.errors import Cancelled, ClosedError, ParamInvalid, PeerLost, RemoteError
from datadist_core.memory.grid import Grid
from datadist_core.testing.child import import_by_name
from datadist_core.testing.end import LocalEnd, is_ok
from datadist_core.testing.pair import A_KNOWS_B_AS, BackendPair, naive_copy
from datadist_core.transfer.backend import CompletionStatus
from datadist_core.transfer.plan import Batch, Op, Slice

FAULTY = ["FaultyLoopback", "FaultyShm", "FaultyTcp"]
HOUR_S = 3600.0

every_backend = pytest.mark.parametrize("name", FAULTY)


@contextmanager
def linked(name: str, fault: dict[str, Any] | None) -> Iterator[BackendPair[LocalEnd]]:
    make = import_by_name(f"datadist_core.testing.faults:{name}")
    with BackendPair.in_process(make, options={} if fault is None else {"fault": fault}) as pair:
        pair.link()
        yield pair
    assert pair.a.log.pending() == []
    assert pair.a.log.excessive() == []


def a_batch(pair: BackendPair[LocalEnd], op: Op = Op.READ, slices: tuple[Slice, ...] | None = None) -> Batch:
    mine = [pair.a.add_grid(8, 256, gap_bytes=16) for _ in range(2)]
    theirs = [pair.b.add_grid(8, 256) for _ in range(2)]
    pair.a.fill(1)
    pair.b.fill(2)
    return pair.batch(op, mine, theirs, [1, 2, 5], [7, 0, 3], slices)


def after_naive_copy(pair: BackendPair[LocalEnd], batch: Batch) -> np.ndarray:
    """The local region as it should be after `batch`."""
    local, remote = pair.a.region.region_id, pair.b.region.region_id
    expected = pair.a.snapshot(local)
    naive_copy(batch, {local: expected}, {remote: pair.b.snapshot(remote)})
    return expected


def local_bytes(pair: BackendPair[LocalEnd]) -> np.ndarray:
    return pair.a.snapshot(pair.a.region.region_id)


def item_range(grid: Grid, item: int, part: Slice) -> slice:
    start = grid.offset_bytes + item * grid.stride_bytes + part.local_offset
    return slice(start, start + part.num_bytes)


@every_backend
def test_name_says_so(name: str) -> None:
    backend = import_by_name(f"datadist_core.testing.faults:{name}")()
    assert backend.name == "faulty-" + name.removeprefix("Faulty").lower()


@every_backend
def test_without_a_fault_nothing_is_wrong(name: str) -> None:
    with linked(name, None) as pair:
        batch = a_batch(pair)
        expected = after_naive_copy(pair, batch)
        assert is_ok(pair.a.transfer(batch))
        assert np.array_equal(local_bytes(pair), expected)


@every_backend
@pytest.mark.parametrize("slices", [None, (Slice(0, 64, 64), Slice(128, 0, 32))], ids=["whole", "heads"])
def test_corrupt_inverts_one_block(name: str, slices: tuple[Slice, ...] | None) -> None:
    with linked(name, {"kind": "corrupt", "nth": 2, "index": 1}) as pair:
        batch = a_batch(pair, slices=slices)
        expected = after_naive_copy(pair, batch)
        assert is_ok(pair.a.transfer(batch))
        assert np.array_equal(local_bytes(pair), expected), "only the second batch may be spoiled"
        assert is_ok(pair.a.transfer(batch))
        for grids in batch.pairs:
            for part in batch.slices:
                where = item_range(grids.local, 2, part)
                expected[where] = ~expected[where]
        assert np.array_equal(local_bytes(pair), expected), "exactly one block is inverted, in every grid"
        assert is_ok(pair.a.transfer(batch))
        assert np.array_equal(local_bytes(pair), after_naive_copy(pair, batch))


@every_backend
def test_drop_lasts_until_cancel(name: str) -> None:
    with linked(name, {"kind": "drop", "nth": 1}) as pair:
        batch = a_batch(pair)
        before = local_bytes(pair)
        dropped = pair.a.submit(batch)
        assert is_ok(pair.a.transfer(pair.batch(Op.WRITE, batch.pairs[0].local, batch.pairs[0].remote, [3], [3])))
        assert pair.a.log.pending() == [dropped]
        pair.a.backend.cancel(dropped)
        completion = pair.a.log.wait(dropped)
        assert completion.status is CompletionStatus.CANCELLED
        assert isinstance(completion.error, Cancelled)
        assert np.array_equal(local_bytes(pair), before)


@every_backend
def test_drop_lasts_until_disconnect(name: str) -> None:
    with linked(name, {"kind": "drop"}) as pair:
        dropped = pair.a.submit(a_batch(pair))
        pair.a.disconnect(A_KNOWS_B_AS + 1)
        assert pair.a.log.pending() == [dropped]
        pair.a.disconnect(A_KNOWS_B_AS)
        completion = pair.a.log.wait(dropped)
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, PeerLost)


@every_backend
def test_drop_lasts_until_close(name: str) -> None:
    with linked(name, {"kind": "drop", "nth": 1}) as pair:
        batch = a_batch(pair)
        dropped = pair.a.submit(batch)
        pair.a.backend.close()
        assert isinstance(pair.a.log.wait(dropped).error, ClosedError)
        with pytest.raises(ClosedError):
            pair.a.submit(batch)


@every_backend
def test_fail_fails(name: str) -> None:
    with linked(name, {"kind": "fail", "nth": 1}) as pair:
        batch = a_batch(pair)
        before = local_bytes(pair)
        completion = pair.a.transfer(batch)
        assert completion.status is CompletionStatus.FAILED
        assert isinstance(completion.error, RemoteError)
        assert "injected" in str(completion.error)
        assert np.array_equal(local_bytes(pair), before)
        assert is_ok(pair.a.transfer(batch))


@every_backend
@pytest.mark.parametrize(
    "fault", [{"kind": "delay", "seconds": 0.01}, {"kind": "throttle", "bytes_per_s": 1e6}], ids=["delay", "throttle"]
)
def test_late_is_right(name: str, fault: dict[str, Any]) -> None:
    with linked(name, fault) as pair:
        batch = a_batch(pair)
        expected = after_naive_copy(pair, batch)
        submitted = [pair.a.submit(batch) for _ in range(3)]
        assert all(is_ok(pair.a.log.wait(batch_id)) for batch_id in submitted)
        assert np.array_equal(local_bytes(pair), expected)


@pytest.mark.parametrize(
    "fault",
    [{"kind": "delay", "seconds": HOUR_S}, {"kind": "throttle", "bytes_per_s": 0.1}],
    ids=["delay", "throttle"],
)
def test_late_can_be_cancelled(fault: dict[str, Any]) -> None:
    with linked("FaultyLoopback", {**fault, "nth": 1}) as pair:
        batch = a_batch(pair)
        late = pair.a.submit(batch)
        assert is_ok(pair.a.transfer(batch))
        assert pair.a.log.pending() == [late]
        pair.a.backend.cancel(late)
        assert pair.a.log.wait(late).status is CompletionStatus.CANCELLED


def test_throttle_is_shared() -> None:
    """The second batch queues behind the first, so a slow first one holds it up."""
    with linked("FaultyLoopback", {"kind": "throttle", "bytes_per_s": 0.1}) as pair:
        batch = a_batch(pair)
        submitted = [pair.a.submit(batch), pair.a.submit(batch)]
        assert pair.a.log.pending() == submitted
        due = [held.due_s for held in pair.a.backend._held._all()]
        assert due[1] - due[0] == pytest.approx(batch.num_bytes / 0.1)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"kind": "explode"}, "explode"),
        ({"kind": "drop", "when": 3}, "when"),
        ({"nth": 3}, "kind"),
        ({"kind": "drop", "nth": -1}, "out of range"),
        ({"kind": "throttle", "bytes_per_s": 0}, "out of range"),
    ],
)
def test_nonsense_is_refused(fault: dict[str, Any], named: str) -> None:
    make = import_by_name("datadist_core.testing.faults:FaultyLoopback")
    with pytest.raises(ParamInvalid, match=named):
        LocalEnd(make(), options={"fault": fault})
