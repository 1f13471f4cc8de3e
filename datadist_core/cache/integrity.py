# SPDX-License-Identifier: Apache-2.0
"""Whether what was moved is what was meant: both ends sum the bytes where they lie now, and the numbers are compared.

With `"checksum"` the end that has pulled or pushed asks its peer, once the bytes are there, for the checksums of just
the items that the transfer named at the peer's end, makes those of its own end meanwhile, and fails the call where two
differ. It sits above the backends, so that all are checked alike: whatever changed a byte on the way, a network card, a
driver, a copy of ours, or somebody who wrote to the blocks meanwhile. Only the asking end's setting counts; the other
answers whenever it is asked.

A number stands for one block of one tensor, or for as many small ones as make up `MIN_SUM_BYTES`, so that an error can
say where. A transfer is asked about in questions of limited size and work. The owner trusts none of them: it checks ids
and ranges as for a read, refuses what is over the limits, and answers one question of a link at a time.

Both caches stay held until the answer is in: the owner cannot give the memory to anybody else before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import IntegrityError, ParamInvalid, ProtocolError, TimedOut
from ..link.link import Link
from ..link.probe import grid_info, grid_of
from ..memory.grid import Grid
from ..transfer.backend import ServedGrid
from ..transfer.checksum import Checksummer, Extent, Part, Sums, Units
from ..transfer.plan import GridPair, Op, Slice, check_items
from ..transfer.regions import RegionTable
from ..types import Deadline
from ..wire import messages as m
from .plans import Moves
from .table import CacheEntry

#: A number of 8 bytes per so many bytes at least.
MIN_SUM_BYTES = 512
#: Of one question. The bytes take some 50 ms to sum; the others keep message and work small where parts are tiny.
MAX_BYTES = 256 << 20
MAX_ITEMS = 16384
MAX_PARTS = 4096
MAX_GRIDS = 4096
MAX_SUMS = 65536
MAX_STEPS = 4 << 20
#: A larger part of an item is asked about in pieces of this size.
MAX_PART_BYTES = 64 << 20
#: So many block indices stand in an error's text.
MAX_NAMED = 8

ServeGrid = Callable[[int, Op], AbstractContextManager[ServedGrid]]
INT64, UINT64 = np.dtype("<i8"), np.dtype("<u8")


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A transfer that has come to its end.

    Attributes:
        local: the cache at this end.
        backends: what moved it, as in a report.
    """

    link: Link
    op: Op
    local: CacheEntry
    moves: Moves
    backends: str


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """Some pairs, some of the items, some of the slices of a transfer."""

    pairs: Sequence[GridPair]
    here: Units
    there: Units

    def message(self, request_id: int) -> m.AskChecksums:
        grids = [grid_info(pair.remote) for pair in self.pairs]
        parts = [m.SumPart(part.offset_bytes, part.num_bytes) for part in self.there.parts]
        return m.AskChecksums(
            request_id, grids, self.there.items.astype(INT64).tobytes(), parts, self.there.items_per_sum
        )


class Integrity:
    """What one end does to be sure of its transfers: nothing, unless `enabled`. Thread-safe."""

    def __init__(self, enabled: bool, checksummer: Checksummer, regions: RegionTable) -> None:
        self.enabled = enabled
        self._checksummer = checksummer
        self._regions = regions

    def check(self, moved: Moved, deadline: Deadline) -> None:
        """Raise IntegrityError if the two ends differ; TimedOut or what the peer says if that cannot be found out.

        The caller holds both caches.
        """
        if not self.enabled:
            return
        with _slot(moved.link.checksum_slots, deadline):
            for question in _questions(moved.moves):
                self._ask(moved, question, deadline)

    def _ask(self, moved: Moved, question: _Question, deadline: Deadline) -> None:
        ours: list[Sums] = []
        answer = moved.link.request(question.message, deadline, lambda: ours.append(self._sums_here(question)))
        if not isinstance(answer, m.Checksums) or len(answer.sums) != ours[0].nbytes:
            raise ProtocolError(f"the peer answered a question for {ours[0].size} checksums wrongly")
        theirs = np.frombuffer(answer.sums, dtype=UINT64).reshape(ours[0].shape)
        if not np.array_equal(ours[0], theirs):
            raise IntegrityError(_explain(moved, question, np.argwhere(ours[0] != theirs)))

    def _sums_here(self, question: _Question) -> Sums:
        extents = [_extent(pair.local, self._regions.region(pair.local.region_id).address) for pair in question.pairs]
        return self._checksummer.sums(extents, question.here)


class ChecksumAnswers:
    """The owner's end of a question. The peer is not trusted. Thread-safe."""

    def __init__(self, checksummer: Checksummer, serve_grid: ServeGrid) -> None:
        self._checksummer = checksummer
        self._serve_grid = serve_grid

    def answer(self, asked: m.AskChecksums) -> bytes:
        """CacheNotExist, or ParamInvalid for what the peer may not read or not ask."""
        units = _checked_units(asked)
        parts = [(part.offset_bytes, part.num_bytes) for part in units.parts]
        with ExitStack() as held:
            served = [self._serve(claimed, held) for claimed in asked.grids]
            for grid in {(one.grid.num_items, one.grid.item_bytes): one.grid for one in served}.values():
                check_items(units.items, grid, parts)
            extents = [_extent(one.grid, one.region.address) for one in served]
            return self._checksummer.sums(extents, units).astype(UINT64).tobytes()

    def _serve(self, claimed: m.GridInfo, held: ExitStack) -> ServedGrid:
        """Our grid as the peer divides it, if it lies in what is ours."""
        served = held.enter_context(self._serve_grid(claimed.grid_id, Op.READ))
        return ServedGrid(served.grid.recut(grid_of(claimed, served.region.size_bytes)), served.region)


def _extent(grid: Grid, region_address: int) -> Extent:
    return Extent(region_address + grid.offset_bytes, grid.stride_bytes)


@contextmanager
def _slot(slots: threading.BoundedSemaphore, deadline: Deadline) -> Iterator[None]:
    if not slots.acquire(timeout=deadline.timeout()):
        raise TimedOut("the checksums of other transfers on the link were not made in time")
    try:
        yield
    finally:
        slots.release()


# -- questions


def _questions(moves: Moves) -> Iterator[_Question]:
    """Together they name every byte of the transfer, each within the limits."""
    for slices in _slice_groups(moves.slices):
        bytes_of_one = sum(one.num_bytes for one in slices)
        per_sum = -(-MIN_SUM_BYTES // bytes_of_one)
        at_once = min(MAX_ITEMS, MAX_BYTES // bytes_of_one, MAX_STEPS // len(slices)) // per_sum * per_sum
        here = tuple(Part(one.local_offset, one.num_bytes) for one in slices)
        there = tuple(Part(one.remote_offset, one.num_bytes) for one in slices)
        for first in range(0, len(moves.local_items), at_once):
            some = slice(first, first + at_once)
            mine = Units(moves.local_items[some], here, per_sum)
            theirs = Units(moves.remote_items[some], there, per_sum)
            for pairs in _pair_groups(moves.pairs, mine):
                yield _Question(pairs, mine, theirs)


def _slice_groups(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    group: list[Slice] = []
    size = 0
    for piece in _pieces(slices):
        if group and (len(group) == MAX_PARTS or size + piece.num_bytes > MAX_PART_BYTES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.num_bytes
    yield group


def _pieces(slices: Sequence[Slice]) -> Iterator[Slice]:
    for one in slices:
        for at in range(0, one.num_bytes, MAX_PART_BYTES):
            size = min(MAX_PART_BYTES, one.num_bytes - at)
            yield Slice(one.local_offset + at, one.remote_offset + at, size)


def _pair_groups(pairs: Sequence[GridPair], units: Units) -> Iterator[Sequence[GridPair]]:
    steps = len(units.items) * len(units.parts)
    at_once = max(1, min(MAX_GRIDS, MAX_SUMS // units.num_sums, MAX_BYTES // units.num_bytes, MAX_STEPS // steps))
    for first in range(0, len(pairs), at_once):
        yield pairs[first : first + at_once]


def _checked_units(asked: m.AskChecksums) -> Units:
    """What a peer asks for, within the limits; whether it lies in a grid is not known yet."""
    num_items, rest = divmod(len(asked.items), INT64.itemsize)
    part_bytes = sum(part.num_bytes for part in asked.parts)
    smallest = min(num_items, len(asked.parts), len(asked.grids), asked.items_per_sum, part_bytes)
    if rest or smallest < 1 or min(part.num_bytes for part in asked.parts) < 1:
        raise ParamInvalid("a question for checksums must name grids, items, and parts of 1 byte or more")
    steps, num_grids = num_items * len(asked.parts), len(asked.grids)
    num_sums = -(-num_items // asked.items_per_sum)
    sizes = (num_items, len(asked.parts), num_grids, num_grids * num_sums)
    limits = (MAX_ITEMS, MAX_PARTS, MAX_GRIDS, MAX_SUMS)
    is_too_much = any(size > limit for size, limit in zip(sizes, limits, strict=True))
    if is_too_much or num_grids * steps > MAX_STEPS or num_grids * num_items * part_bytes > MAX_BYTES:
        raise ParamInvalid(
            f"a question for checksums of {num_items} items of {part_bytes} bytes in {len(asked.parts)} parts of "
            f"{num_grids} grids is over the limits"
        )
    items = np.frombuffer(asked.items, dtype=INT64).astype(np.int64)
    return Units(items, tuple(Part(p.offset_bytes, p.num_bytes) for p in asked.parts), asked.items_per_sum)


# -- errors


def _explain(moved: Moved, question: _Question, differing: npt.NDArray[np.int64]) -> str:
    """Where it is wrong, what that means, and what to do."""
    row, column = (int(index) for index in differing[0])
    per_sum = question.here.items_per_sum
    units = slice(column * per_sum, (column + 1) * per_sum)
    mine, theirs = question.here.items[units].tolist(), question.there.items[units].tolist()
    peer = moved.link.peer.cluster_id
    way, end = ("pull from", "here") if moved.op is Op.READ else ("push to", "at the peer")
    total = question.here.num_sums * len(question.pairs)
    return (
        f"checksums differ after a {way} cluster {peer} over {moved.backends}: tensor "
        f"{_tensor(moved.local, question.pairs[row].local)}, {_named(mine)} here and {_named(theirs)} at the peer "
        f"({len(differing)} of {total} checksums differ). The blocks {end} must not be used. The bytes were changed on "
        "the way, or one end wrote to them meanwhile: repeat the transfer; if it fails again, choose another "
        "transfer_backend, and check network and memory of both hosts"
    )


def _named(items: Sequence[int]) -> str:
    """Blocks, or what a batch entry of a contiguous cache is cut to."""
    names = ", ".join(map(str, items[:MAX_NAMED])) + (", ..." if len(items) > MAX_NAMED else "")
    return f"block {names}" if len(items) == 1 else f"blocks {names}"


def _tensor(local: CacheEntry, grid: Grid) -> int:
    return next(index for index, one in enumerate(local.grids) if one.grid_id == grid.grid_id)
