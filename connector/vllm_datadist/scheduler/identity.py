# SPDX-License-Identifier: Apache-2.0
"""What the KV cache of a request's first tokens depends on, as a digest that P and D compare.

Two requests whose digests over the same number of tokens are equal have the same KV cache there (on engines that have
found each other compatible). It takes in what vLLM's own prefix cache takes into its block hashes
(`generate_block_hash_extra_keys`), for the same reasons:

    tokens          prompt and generated ones alike, so that a ticket can be held against any later turn
    LoRA adapter    its name and path: K and V come out of adapted weights
    cache salt      who may share a cache with whom; also across engines
    multimodal      of each item that begins among these tokens: vLLM's identifier (the hash of its content, or the
                    uuid that the client gave) and its place. The tokens there are the same placeholder for any image
    embeddings      the bytes of the prompt's embeddings, where a prompt has no token ids

Nothing of vLLM or torch is imported; requests are read by the attributes they have.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

_DIGEST_BYTES = 16


def kv_digest(request: Any, num_tokens: int) -> str:
    """Of everything that the KV cache of the first `num_tokens` tokens depends on, as hexadecimal digits.

    Args:
        request: a vLLM request, or anything with its `all_token_ids` (or `prompt_token_ids`).
        num_tokens: how many tokens to take in. A request with fewer gets another digest than one that has them all.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for label, content in _parts(request, num_tokens):
        _add(digest, label, content)
    return digest.hexdigest()


def kv_digests(request: Any, ends: Sequence[int]) -> tuple[str, ...]:
    """One per end, which increase: as `kv_digest` for so many tokens, but each token is hashed once only.

    Not the same digests: tokens come without their length.
    """
    running = blake2b(digest_size=_DIGEST_BYTES)
    digests, start = [], 0
    for end in ends:
        running.update(array("q", _token_ids(request)[start:end]).tobytes())
        digest = running.copy()
        digest.update(b"%d tokens" % end)
        for label, content in _other_parts(request, end):
            _add(digest, label, content)
        digests.append(digest.hexdigest())
        start = end
    return tuple(digests)


def _add(digest: blake2b, label: str, content: bytes) -> None:
    """Lengths first: no two different lists of parts give the same bytes."""
    digest.update(b"%d:%d:" % (len(label), len(content)))
    digest.update(label.encode())
    digest.update(content)


def _parts(request: Any, num_tokens: int) -> Iterator[tuple[str, bytes]]:
    yield "tokens", array("q", _token_ids(request)[:num_tokens]).tobytes()
    yield from _other_parts(request, num_tokens)


def _other_parts(request: Any, num_tokens: int) -> Iterator[tuple[str, bytes]]:
    yield from _lora(getattr(request, "lora_request", None))
    if salt := getattr(request, "cache_salt", None):
        yield "cache_salt", str(salt).encode()
    yield from _multimodal(getattr(request, "mm_features", None) or (), num_tokens)
    yield from _embeddings(request, num_tokens)


def _token_ids(request: Any) -> Sequence[int]:
    """vLLM puts zeros where a prompt is given as embeddings."""
    token_ids = getattr(request, "all_token_ids", None)
    return (request.prompt_token_ids or ()) if token_ids is None else token_ids


def _lora(adapter: Any) -> Iterator[tuple[str, bytes]]:
    if adapter is not None:
        yield "lora_name", str(adapter.lora_name).encode()
        yield "lora_path", str(adapter.lora_path).encode()


def _multimodal(features: Sequence[Any], num_tokens: int) -> Iterator[tuple[str, bytes]]:
    for feature in features:
        position = feature.mm_position
        if position.offset < num_tokens:
            place = f"{feature.modality} {position.offset} {position.length} "
            yield "multimodal", (place + str(feature.identifier)).encode()


def _embeddings(request: Any, num_tokens: int) -> Iterator[tuple[str, bytes]]:
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None:
        return
    rows = embeds[:num_tokens].detach().cpu().contiguous()
    yield "prompt_embeds", f"{rows.dtype} {tuple(rows.shape)} ".encode() + _bytes_of(rows)
    mask = getattr(request, "prompt_is_token_ids", None)
    if mask is not None:
        yield "prompt_is_token_ids", bytes(mask[:num_tokens])


def _bytes_of(rows: Any) -> bytes:
    """Of a contiguous tensor in CPU memory, whatever its dtype; NumPy has no bfloat16."""
    return ctypes.string_at(rows.data_ptr(), rows.numel() * rows.element_size())
