# SPDX-License-Identifier: Apache-2.0
"""How much of what one request has computed the prompt of the next turn can use: exact, and small.

An engine may be asked for both: to take over a prompt from P, and to hand off all that it has computed itself in the
end (a conversation; kv_both). Its ticket then covers generated tokens too. The next turn's prompt need not continue
them: a chat template may write them in other tokens, or leave some out. So such a ticket says the digests of its first
1, 2, 3, ... spans of tokens, and of all of them. Who gets it compares them with those of its own prompt, and takes the
KV cache of the longest prefix that agrees. What the KV cache of a token depends on are all tokens up to it (and the
rest of `identity`), and so does each digest: nothing beyond a departure can agree. A span is a block, or a few where
there would be too many digests; the whole is hashed once, not once per digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..params import MAX_PREFIX_DIGESTS, PrefixDigests, PromptDigest, Ticket, prefix_ends
from .identity import kv_digest, kv_digests


def digest_prefixes(request: Any, num_tokens: int, block_tokens: int) -> PrefixDigests | None:
    """Of the first `num_tokens` tokens, which `request` has computed. None if its prompt has no token ids."""
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    num_blocks = -(-num_tokens // block_tokens)
    span = block_tokens * max(1, -(-num_blocks // MAX_PREFIX_DIGESTS))
    return PrefixDigests(span, kv_digests(request, prefix_ends(num_tokens, span)))


def num_computed_tokens(request: Any) -> int:
    """Tokens whose KV cache is there for good.

    Not those of a step in flight, and not drafts behind the request's end: they are computed, and then cut off.
    """
    num_computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
    return max(0, min(num_computed, getattr(request, "num_tokens", num_computed)))


def num_vouched_tokens(request: Any) -> int:
    """Of those, the tokens that a ticket can vouch for.

    Where the prompt has no token ids there are no digests of what comes behind it: the ticket is for the prompt only.
    """
    num_tokens = num_computed_tokens(request)
    has_token_ids = getattr(request, "prompt_embeds", None) is None
    return num_tokens if has_token_ids else min(num_tokens, int(request.num_prompt_tokens))


def cut_to_shared(ticket: Ticket, request: Any) -> Ticket:
    """The part of it that holds for the prompt of `request` too; a ticket for a prompt only stays what it is."""
    if ticket.prefixes is None:
        return ticket
    shared = _num_shared_tokens(ticket.prefixes, ticket.num_tokens, request)
    return replace(ticket, num_tokens=shared, prompt=PromptDigest(shared, kv_digest(request, shared)), prefixes=None)


def _num_shared_tokens(prefixes: PrefixDigests, num_tokens: int, request: Any) -> int:
    ends: Sequence[int] = [end for end in prefix_ends(num_tokens, prefixes.span) if end <= request.num_prompt_tokens]
    if getattr(request, "prompt_embeds", None) is not None:
        return 0
    shared = 0
    for end, ours, theirs in zip(ends, kv_digests(request, ends), prefixes.digests, strict=False):
        if ours != theirs:
            break
        shared = end
    return shared
