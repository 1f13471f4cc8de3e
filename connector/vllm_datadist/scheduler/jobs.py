# SPDX-License-Identifier: Apache-2.0
"""What D's workers are told to load, as a pull or as a push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..messages import BlockTables, LoadJob, OfferJob, Table
from ..params import PromptDigest
from .identity import kv_digest
from .requests import Handoff


class BlockLike(Protocol):
    """What is read of a vLLM block."""

    block_id: int
    is_null: bool


def load_job(
    handoff: Handoff, sources: Sequence[Sequence[int]], targets: tuple[Table, ...], first_token: int, end_token: int
) -> LoadJob | OfferJob | None:
    """Tokens first_token..end_token-1 into `targets`. `sources`: P's blocks per group, where they are known."""
    key, prompt = handoff.key, handoff.prompt
    if handoff.source is not None:
        return OfferJob(key, handoff.source, targets, first_token, end_token, prompt.num_tokens, prompt.digest)
    if handoff.remote is None:
        return None
    tables = tuple(BlockTables(_source_table(ids), table) for ids, table in zip(sources, targets, strict=True))
    return LoadJob(key, handoff.remote, tables, first_token, end_token)


def target_table(blocks: Sequence[BlockLike]) -> Table:
    return tuple(None if block.is_null else block.block_id for block in blocks)


def prompt_digest(request: Any) -> PromptDigest:
    return PromptDigest(request.num_prompt_tokens, kv_digest(request, request.num_prompt_tokens))


def _source_table(ids: Sequence[int]) -> Table:
    """P writes 0, the id of vLLM's null block, where a window group has no block."""
    return tuple(block_id or None for block_id in ids)
