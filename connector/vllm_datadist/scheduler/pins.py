# SPDX-License-Identifier: Apache-2.0
"""Blocks of a sliding window that P keeps for a push, although vLLM gives them back when the prompt is computed.

D's blocks may be larger than P's. The first one that D keeps may then begin with tokens which no query of this request
sees any more, and whose blocks vLLM frees at P. D wants them all the same: other requests find the whole block in D's
prefix cache. P does not know D's size of blocks: it keeps what a D with blocks of up to `LARGEST_TARGET_BLOCK` tokens
could want, by one more reference to each of these blocks, as vLLM's block pool offers it to connectors. Where P has
found the prompt's begin in its prefix cache, vLLM gives the request no blocks before the window: they are looked up
there too, and may be gone.

Only groups with a window or chunks have such blocks. Full attention must not: there vLLM concludes from the number of
references which blocks all running requests share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..groups import GroupInfo, first_token_seen

#: Tokens per block at D, up to which a push is served exactly.
LARGEST_TARGET_BLOCK = 128


class BlockPool(Protocol):
    """What is used of vLLM's block pool. `blocks` by id."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    @property
    def hash_block_size(self) -> int: ...
    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(slots=True)
class Pins:
    """Of one request: the block at each position that is kept, per group of vLLM."""

    by_group: dict[int, dict[int, int]] = field(default_factory=dict)

    def at(self, group_index: int, position: int) -> bool:
        return position in self.by_group.get(group_index, {})

    def filled(self, group_index: int, table: Sequence[int]) -> Sequence[int]:
        """The table, with what vLLM has given back already (0) as it was."""
        kept = self.by_group.get(group_index)
        return [block or kept.get(place, 0) for place, block in enumerate(table)] if kept else table

    @property
    def block_ids(self) -> Iterator[int]:
        return (block for kept in self.by_group.values() for block in kept.values())


class BlockPins:
    """Takes and gives back these references. Deterministic; not thread-safe.

    Until `bind` nothing is kept. What has been handed over by `hold` is kept until the request's leases have ended.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[str, list[int]] = {}

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def keep(self, pins: Pins, group: GroupInfo, table: Sequence[int], first_new: int, request: Any) -> None:
        """Of the blocks from position `first_new` on, which a step has just been given, those that D may want."""
        if self._pool is None or (group.window is None and group.chunk is None):
            return
        seen = first_token_seen(group, request.num_prompt_tokens)
        begin = max(0, seen - LARGEST_TARGET_BLOCK + 1) // group.block_tokens
        kept = pins.by_group.setdefault(group.index, {})
        for position in range(max(begin, first_new), min(seen // group.block_tokens, len(table))):
            if position in kept:
                continue
            block_id = table[position] or _cached(self._pool, group, request, position)
            if block_id:
                self._pool.touch([self._pool.blocks[block_id]])
                kept[position] = block_id

    def drop(self, pins: Pins) -> None:
        """The request has lost its blocks, or nobody wants them any more: nothing is sent from them after this step."""
        self._free(list(pins.block_ids))
        pins.by_group.clear()

    def hold(self, request_id: str, pins: Pins) -> None:
        """The request has ended, and its blocks are under leases."""
        if ids := list(pins.block_ids):
            self._held.setdefault(request_id, []).extend(ids)

    def leases_ended(self, request_id: str) -> None:
        self._free(self._held.pop(request_id, []))

    def _free(self, block_ids: Sequence[int]) -> None:
        if self._pool is not None and block_ids:
            pool = self._pool
            pool.free_blocks([pool.blocks[block_id] for block_id in reversed(block_ids)])


def _cached(pool: BlockPool, group: GroupInfo, request: Any, position: int) -> int:
    """The block in P's prefix cache with the tokens at that position of the request; 0 if there is none.

    It is there as soon as a step has been given its tokens, and nobody writes into it afterwards.
    """
    hashes = getattr(request, "block_hashes", ())
    if pool.hash_block_size != group.block_tokens or position >= len(hashes):
        return 0
    found = pool.get_cached_block(hashes[position], [group.index])
    return int(found[0].block_id) if found else 0
