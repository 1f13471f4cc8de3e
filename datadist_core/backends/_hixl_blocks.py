# SPDX-License-Identifier: Apache-2.0
"""Byte ranges as block lists: the vendor moves whole blocks of a registered blocks cache, we move ranges of regions.

A region is registered as a blocks cache of one tensor of bytes, shape (region bytes // block bytes, block bytes), once
for each of a few block sizes: all of them powers of two, so that each divides the next. A range moves in the largest
blocks in which both its ends agree: 64 KiB of a KV block as 4 blocks of 16 KiB, 18 KiB as 36 of 512 bytes; what does
not fill a block at either end, and ranges that lie askew to each other, in the smallest ones.

Where the local memory is not registered, or the smallest common block is too large for a READ, the bytes go through a
*staging* buffer that is: there each range gets a place where it lies as it does at the peer. A WRITE of less than the
smallest block is refused: writing the whole block would change bytes that are none of the batch's.

Pure functions: nothing here touches memory or the vendor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ParamInvalid
from ..transfer.plan import CopyList, Items, Op

MAX_BLOCKS = 1 << 16
MAX_BYTES = 16 << 20
"""Of one call: what a cancelled batch may have to wait for."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """One call of `pull_blocks` or `push_blocks`: indices of blocks of `block_bytes`."""

    block_bytes: int
    local: Items
    remote: Items


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """`counts[i]` neighbouring blocks from index `local[i]` here and `remote[i]` there."""

    block_bytes: int
    local: Items
    remote: Items
    counts: Items

    def calls(self) -> Iterator[BlockCall]:
        """The blocks, in lists of bounded length."""
        ends = np.cumsum(self.counts)
        limit = max(1, min(MAX_BLOCKS, MAX_BYTES // self.block_bytes))
        for first in range(0, int(ends[-1]), limit):
            flat = np.arange(first, min(first + limit, int(ends[-1])), dtype=np.int64)
            run = np.searchsorted(ends, flat, side="right")
            within = flat - (ends - self.counts)[run]
            yield BlockCall(self.block_bytes, self.local[run] + within, self.remote[run] + within)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Ranges that go through the staging buffer, at once.

    Attributes:
        runs: between staging and the peer.
        copies: `local` is the offset in the local region, `remote` that in the staging buffer.
    """

    runs: list[BlockRuns]
    copies: CopyList


def divides(ranges: CopyList, block_bytes: int) -> bool:
    """Whether blocks of that size cover the ranges exactly, on both sides."""
    return not np.any((ranges.local | ranges.remote | ranges.num_bytes) & (block_bytes - 1))


def to_runs(ranges: CopyList, sizes: Sequence[int]) -> list[BlockRuns]:
    """The ranges in blocks of `sizes`, as large ones as possible. ParamInvalid if the smallest does not divide them."""
    found: list[BlockRuns] = []
    rest = ranges
    for size in sorted(sizes, reverse=True):
        start = -(-rest.local // size) * size
        end = (rest.local + rest.num_bytes) // size * size
        fits = ((rest.local - rest.remote) & (size - 1) == 0) & (end > start)
        if fits.any():
            body = _picked(rest, fits)
            first, last = start[fits], end[fits]
            there = body.remote + first - body.local
            found.append(BlockRuns(size, first // size, there // size, (last - first) // size))
            rest = _joined(_picked(rest, ~fits), _edges(body, first, last))
    if len(rest.num_bytes):
        raise ParamInvalid(
            f"{int(rest.num_bytes[0])} bytes at {int(rest.remote[0])} are no whole blocks of {min(sizes)} bytes, the "
            "smallest that both ends have registered this memory in"
        )
    return found


def stage(ranges: CopyList, sizes: Sequence[int], op: Op, remote_bytes: int, staging_bytes: int) -> Iterator[Staged]:
    """The ranges by way of a staging buffer of `staging_bytes`, one filling after the other.

    Args:
        sizes: block sizes that staging and the peer's region have in common.
        remote_bytes: size of the peer's region.

    Raises ParamInvalid, at once, for what no blocks cover.
    """
    smallest = min(sizes)
    wide = ranges if op is Op.WRITE else _covered(ranges, smallest)
    check_remote(wide, smallest, op, remote_bytes)
    return _fillings(ranges, sizes, op, staging_bytes)


def check_remote(ranges: CopyList, smallest: int, op: Op, remote_bytes: int) -> None:
    """Raise ParamInvalid unless whole blocks of the peer's region cover the ranges exactly."""
    askew = ((ranges.remote | ranges.num_bytes) & (smallest - 1)) != 0
    askew |= ranges.remote + ranges.num_bytes > remote_bytes // smallest * smallest
    if askew.any():
        which = int(np.flatnonzero(askew)[0])
        raise ParamInvalid(
            f"a {op.name} of {int(ranges.num_bytes[which])} bytes at {int(ranges.remote[which])} of the peer's region "
            f"of {remote_bytes} bytes needs smaller blocks than {smallest} bytes: give the cann option block_bytes a "
            'smaller size, at both ends, or use another transfer_backend, such as "auto"'
        )


def _fillings(ranges: CopyList, sizes: Sequence[int], op: Op, staging_bytes: int) -> Iterator[Staged]:
    smallest, largest = min(sizes), max(sizes)
    # Room for a range, the blocks around it, and its place within the largest block.
    for part in _parts(_split_long(ranges, staging_bytes // 4), staging_bytes - 2 * largest, 3 * smallest):
        wide = part if op is Op.WRITE else _covered(part, smallest)
        places = _places(wide, sizes)
        copies = CopyList(part.local, places + part.remote - wide.remote, part.num_bytes)
        yield Staged(to_runs(CopyList(places, wide.remote, wide.num_bytes), sizes), copies)


def _places(ranges: CopyList, sizes: Sequence[int]) -> Items:
    """Where in the staging buffer each range goes: as far from a block's start as it is at the peer."""
    steps = np.sort(np.array(sizes, dtype=np.int64))
    align = steps[np.maximum(np.searchsorted(steps, ranges.num_bytes, side="right") - 1, 0)]
    room = ranges.num_bytes + align - steps[0]
    starts = np.cumsum(room) - room
    places: Items = starts + (ranges.remote - starts) % align
    return places


def _covered(ranges: CopyList, block_bytes: int) -> CopyList:
    """Whole blocks of the peer around each range; `local` is meaningless then."""
    start = ranges.remote // block_bytes * block_bytes
    end = -(-(ranges.remote + ranges.num_bytes) // block_bytes) * block_bytes
    return CopyList(ranges.local, start, end - start)


def _parts(ranges: CopyList, max_bytes: int, extra_bytes: int) -> Iterator[CopyList]:
    """Parts of at most `max_bytes`, where a range counts twice (its place may need as much) and `extra_bytes`."""
    ends = np.cumsum(2 * ranges.num_bytes + extra_bytes)
    first, total = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, total + max_bytes, side="right")))
        yield _picked(ranges, slice(first, last))
        first, total = last, int(ends[last - 1])


def _split_long(ranges: CopyList, max_bytes: int) -> CopyList:
    """The same bytes in ranges of at most `max_bytes`, a power of two."""
    counts = -(-ranges.num_bytes // max_bytes)
    of_range = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(of_range)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
    left = ranges.num_bytes[of_range] - offsets
    return CopyList(ranges.local[of_range] + offsets, ranges.remote[of_range] + offsets, np.minimum(left, max_bytes))


def _edges(body: CopyList, first: Items, last: Items) -> CopyList:
    """What of the ranges lies before `first` and behind `last` (offsets here)."""
    shift, end = body.remote - body.local, body.local + body.num_bytes
    heads = CopyList(body.local, body.remote, first - body.local)
    tails = CopyList(last, last + shift, end - last)
    both = _joined(heads, tails)
    return _picked(both, both.num_bytes > 0)


def _picked(ranges: CopyList, chosen: slice | npt.NDArray[np.bool_]) -> CopyList:
    return CopyList(ranges.local[chosen], ranges.remote[chosen], ranges.num_bytes[chosen])


def _joined(first: CopyList, second: CopyList) -> CopyList:
    return CopyList(
        np.concatenate((first.local, second.local)),
        np.concatenate((first.remote, second.remote)),
        np.concatenate((first.num_bytes, second.num_bytes)),
    )
