# SPDX-License-Identifier: Apache-2.0
"""Requests and tickets of models with Mamba-like state: a state fits after exactly one number of tokens.

See `groups`. P computes all but the last token of a prompt, so that D gets the state before that token; and D uses a
ticket only if its prompt goes on right where the state was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..groups import GroupInfo, has_state, tokens_to_hand_off
from ..params import Ticket


def leave_last_token(groups: Sequence[GroupInfo], request: Any) -> None:
    """Make P's request end before its last prompt token, where D needs that. Before vLLM has scheduled it.

    Only for requests that are there for the hand-off alone (max_tokens=1, as routers send them to P): what P itself
    answers to such a request is worth nothing afterwards. Those that ask for the prompt's logprobs, which D would
    compute itself, and those that end within an image stay as they are.
    """
    num_tokens = tokens_to_hand_off(groups, request.num_prompt_tokens)
    if num_tokens in (0, request.num_prompt_tokens) or request.max_tokens != 1:
        return
    if getattr(request, "skip_reading_prefix_cache", False) or _ends_within_an_item(request, num_tokens):
        return
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        value = getattr(request, name, None)
        if value is not None:
            setattr(request, name, value[:num_tokens])
    # `all_token_ids` is a read-only view of this list; vLLM's own connector for such models does the same.
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens


def is_state_settled(groups: Sequence[GroupInfo], request: Any, num_tokens: int) -> bool:
    """Whether the state is that after `num_tokens` tokens, and no step in flight has changed it already."""
    return not has_state(groups) or request.num_computed_tokens == num_tokens


def cut_to_state(groups: Sequence[GroupInfo], whole: Ticket, shared: Ticket, num_prompt_tokens: int) -> Ticket:
    """`shared`, the part of `whole` that holds for a prompt; nothing of it if the state is not from within the prompt.

    vLLM computes the last prompt token after a load: a state that has seen it already would see it twice.
    """
    if not has_state(groups) or shared.num_tokens == whole.num_tokens < num_prompt_tokens:
        return shared
    return replace(shared, num_tokens=0)


def _ends_within_an_item(request: Any, num_tokens: int) -> bool:
    features = getattr(request, "mm_features", None) or ()
    return any(feature.mm_position.offset + feature.mm_position.length > num_tokens for feature in features)
