# SPDX-License-Identifier: Apache-2.0
"""Which blocks are moved, and what is in them.

The content of a block follows from a seed and the block's index alone, and no 8 bytes of it occur anywhere else. So
whoever holds the destination can check it without seeing the source, and a block in the wrong place is a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.uint8]

#: A cache has this many times the blocks that one transfer moves, so that scattered blocks have neighbours.
CACHE_TRANSFERS = 2
MAX_BLOCKS = 16384
RUN_BLOCKS = 8
WORD_BYTES = 8

_SEED_DISTANCE = 1 << 40  # words; more than any cache has
_SCRAMBLE = 0x9E3779B97F4A7C15
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Block `src[i]` of one cache goes to block `dst[i]` of another. Both have `num_cache_blocks`."""

    block_bytes: int
    num_cache_blocks: int
    src: Int64s
    dst: Int64s

    @property
    def num_blocks(self) -> int:
        return len(self.src)

    @property
    def num_bytes(self) -> int:
        return len(self.src) * self.block_bytes


def make_lists(pattern: str, block_bytes: int, total_bytes: int) -> BlockLists:
    """About `total_bytes` in blocks of that size, at most MAX_BLOCKS of them; the same ones on every call."""
    num_blocks = max(1, min(MAX_BLOCKS, total_bytes // block_bytes))
    num_cache_blocks = CACHE_TRANSFERS * num_blocks
    src, dst = PATTERNS[pattern](num_blocks, num_cache_blocks, np.random.default_rng(0))
    return BlockLists(block_bytes, num_cache_blocks, src, dst)


def single_block(lists: BlockLists, index: int) -> BlockLists:
    """Only the transfer of block `index` of `lists`."""
    one = slice(index, index + 1)
    return BlockLists(lists.block_bytes, lists.num_cache_blocks, lists.src[one], lists.dst[one])


_Pattern = Callable[[int, int, np.random.Generator], tuple[Int64s, Int64s]]


def _random(num_blocks: int, num_cache_blocks: int, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    return random.permutation(num_cache_blocks)[:num_blocks], random.permutation(num_cache_blocks)[:num_blocks]


def _runs(num_blocks: int, num_cache_blocks: int, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    length = min(RUN_BLOCKS, num_blocks)

    def scattered_runs() -> Int64s:
        starts = random.permutation(num_cache_blocks // length) * length
        return (starts[:, None] + np.arange(length)).ravel()[:num_blocks]

    return scattered_runs(), scattered_runs()


def _contiguous(num_blocks: int, num_cache_blocks: int, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    return np.arange(num_blocks), np.arange(num_cache_blocks - num_blocks, num_cache_blocks)


PATTERNS: dict[str, _Pattern] = {"random": _random, "runs": _runs, "contiguous": _contiguous}


def fill(cache: Blocks, seed: int) -> None:
    """Give every block of `cache` (one row each) its content."""
    for part in _chunks(len(cache), cache.shape[1]):
        indices = np.arange(part.start, part.stop)
        cache[part] = _content(seed, indices, cache.shape[1])


def matches(cache: Blocks, seed: int, lists: BlockLists) -> bool:
    """Whether `cache`, all zero before, now holds exactly the blocks that `lists` takes out of the cache of `seed`.

    Every byte counts, also those of the blocks that should not have been written.
    """
    untouched = np.ones(len(cache), dtype=bool)
    untouched[lists.dst] = False
    others = np.flatnonzero(untouched)
    return _moved_match(cache, seed, lists) and not any(
        cache[others[part]].any() for part in _chunks(len(others), cache.shape[1])
    )


def _moved_match(cache: Blocks, seed: int, lists: BlockLists) -> bool:
    return all(
        np.array_equal(cache[lists.dst[part]], _content(seed, lists.src[part], lists.block_bytes))
        for part in _chunks(lists.num_blocks, lists.block_bytes)
    )


def _content(seed: int, blocks: Int64s, block_bytes: int) -> npt.NDArray[Any]:
    """Odd numbers times an odd number: different for every word of every seed, and never zero."""
    num_words = block_bytes // WORD_BYTES
    words = blocks.astype(np.uint64)[:, None] * np.uint64(num_words) + np.arange(num_words, dtype=np.uint64)
    words += np.uint64(seed * _SEED_DISTANCE)
    words <<= np.uint64(1)
    words |= np.uint64(1)
    words *= np.uint64(_SCRAMBLE)
    return words.view(np.uint8)


def _chunks(num_blocks: int, block_bytes: int) -> list[slice]:
    step = max(1, _CHUNK_BYTES // block_bytes)
    return [slice(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step)]
