# SPDX-License-Identifier: Apache-2.0
"""What the connector has to know of vLLM's KV cache groups, and which blocks of each a hand-off needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One KV cache group whose blocks are transferred.

    Attributes:
        index: its place in vLLM's list of groups.
        block_tokens: tokens per block.
        window: tokens a query sees, itself included; None = all.
        layer_names: its layers, sorted.
    """

    index: int
    block_tokens: int
    window: int | None
    layer_names: tuple[str, ...]


def first_token_seen(group: GroupInfo, query: int) -> int:
    """The oldest token that the query at position `query` attends to."""
    return 0 if group.window is None else max(0, query - group.window + 1)


def missing_position(
    group: GroupInfo, source_table: Sequence[int], first_token: int, end_token: int, num_prompt_tokens: int
) -> int | None:
    """The first token D would need and cannot get by loading first_token..end_token-1, or None if all is there.

    After the load vLLM computes on from `end_token`, or from the last prompt token if all of them were loaded: it
    needs one token's logits. That query may reach one token further back than the window of the next token, by
    which both engines drop blocks; if this token's block is gone, only computing locally is exact.
    """
    seen = first_token_seen(group, min(end_token, num_prompt_tokens - 1))
    kept_by_target = first_token_seen(group, end_token) // group.block_tokens
    if seen // group.block_tokens < kept_by_target:
        return seen
    for position in range(max(seen, first_token) // group.block_tokens, -(-end_token // group.block_tokens)):
        if position >= len(source_table) or source_table[position] == 0:
            return position * group.block_tokens
    return None
