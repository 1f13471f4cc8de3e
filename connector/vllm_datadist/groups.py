# SPDX-License-Identifier: Apache-2.0
"""What the connector has to know of vLLM's KV cache groups, and which blocks of each a hand-off needs.

Most groups keep K and V of every token, and a query looks back at all tokens, those of a window, or those of its own
chunk. A *state* group (Mamba, short convolutions, linear attention) keeps no tokens: one block holds what is left of
all tokens so far, and the next token changes it in place. So a state is good for exactly one number of tokens, and
vLLM, which computes at least the last prompt token after a load, must be given the state *before* that token. That is
why a P with state groups leaves the last prompt token to D: see `tokens_to_hand_off`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One KV cache group whose blocks are transferred.

    Attributes:
        index: its place in vLLM's list of groups.
        block_tokens: tokens per block.
        window: tokens a query sees, itself included; None = all.
        layer_names: its layers, sorted.
        chunk: a query sees the tokens from the last multiple of `chunk` on; None = no such limit.
        is_state: a block holds the state after a number of tokens.
    """

    index: int
    block_tokens: int
    window: int | None
    layer_names: tuple[str, ...]
    chunk: int | None = None
    is_state: bool = False

    @property
    def table_tokens(self) -> int:
        """Tokens per entry of the group's tables in tickets and jobs. Those of a state group have one entry: see
        `transfer_table`."""
        return 1 if self.is_state else self.block_tokens


def has_state(groups: Sequence[GroupInfo]) -> bool:
    return any(group.is_state for group in groups)


def tokens_to_hand_off(groups: Sequence[GroupInfo], num_prompt_tokens: int) -> int:
    """How many of a prompt's tokens P computes for D."""
    return num_prompt_tokens - 1 if has_state(groups) else num_prompt_tokens


def transfer_table(group: GroupInfo, table: Sequence[T], num_tokens: int) -> Sequence[T]:
    """What tickets and jobs say of vLLM's block `table` of a request of which `num_tokens` tokens are computed.

    The state after them lies in the block at their last position; vLLM may have more behind it, for speculation.
    """
    if not group.is_state:
        return table
    position = max(0, num_tokens - 1) // group.block_tokens
    return table[position : position + 1]


def first_token_seen(group: GroupInfo, query: int) -> int:
    """The oldest token that the query at position `query` attends to."""
    if group.chunk is not None:
        return query // group.chunk * group.chunk
    return 0 if group.window is None else max(0, query - group.window + 1)


def missing_position(
    group: GroupInfo,
    source_table: Sequence[int],
    first_token: int,
    end_token: int,
    num_prompt_tokens: int,
    source_block_tokens: int | None = None,
) -> int | None:
    """The first token D would need and cannot get by loading first_token..end_token-1, or None if all is there.

    After the load vLLM computes on from `end_token`, or from the last prompt token if all of them were loaded: it
    needs one token's logits. That query may reach further back than the next token's (by one token of a window, or by
    a whole chunk), by which both engines drop blocks; if this token's block is gone, only computing locally is exact.

    D's blocks must be filled from their first token on, also with what no query of this request sees: D's prefix cache
    offers a full block to other requests, whose windows may begin elsewhere. A P with smaller blocks may have dropped
    that first part.

    Args:
        source_table: P's blocks, 0 where it has none.
        source_block_tokens: tokens per block at P; None = as here.
    """
    if group.is_state:
        return None if any(source_table) else end_token
    seen = first_token_seen(group, min(end_token, num_prompt_tokens - 1))
    kept_by_target = first_token_seen(group, end_token) // group.block_tokens
    if seen // group.block_tokens < kept_by_target:
        return seen
    begin = max(kept_by_target * group.block_tokens, first_token)
    source_tokens = source_block_tokens or group.block_tokens
    for position in range(begin // source_tokens, -(-end_token // source_tokens)):
        if position >= len(source_table) or source_table[position] == 0:
            return position * source_tokens
    return None
