# SPDX-License-Identifier: Apache-2.0
"""What one worker of P says of its engine's workers, held against what each of them says of itself when it is linked.

Without a ticket D asks whoever listens at an address who P's workers are. It chooses by the answer which of them it
needs, and how much of each. A worker that is not what it was named as has nothing to send, and would be done at once;
or others of D are counted that never come. So a difference ends the load, with the name and both values.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from ..description import LAYER_FIELD, Description, Incompatible
from ..messages import Endpoint
from .directory import EngineClaim

#: Fields of a description that all workers of an engine have alike.
_OF_THE_ENGINE = (
    "version", "model", "revision", "quantization", "dtype", "cache_dtype", "use_mla", "speculative", "tp_size",
    "pp_size", "dp_rank", "stages", "model_layers",
)  # fmt: skip


def engine_claim(ours: Description) -> EngineClaim:
    """What this worker says of its engine."""
    block_tokens = {cache.group: cache.block_tokens for cache in ours.caches}
    return EngineClaim(ours.tp_size, ours.pp_size, ours.dp_rank, block_tokens, fingerprint(ours))


def fingerprint(description: Description) -> str:
    """Of all that the workers of an engine must say alike."""
    config = {name: value for name, value in description.model_config.items() if not name.startswith(LAYER_FIELD)}
    said = [[getattr(description, name) for name in _OF_THE_ENGINE], sorted(config.items())]
    return blake2b(msgspec.msgpack.encode(said), digest_size=16).hexdigest()


def check_claim(named: Endpoint, claim: EngineClaim | None, found: Description) -> None:
    """Raise Incompatible if the worker that was named so says something else of itself."""
    place = f"P's worker at {named.host}:{named.port}"
    if claim is None:
        raise Incompatible(f"{place}: it was named without what its engine is like")
    differences = list(_differences(named, claim, found))
    if differences:
        raise Incompatible(
            f"{place} is not what its engine's answer to datadist.workers says: " + "; ".join(differences)
        )


def _differences(named: Endpoint, claim: EngineClaim, found: Description) -> Iterator[str]:
    first_layer = found.stages[found.pp_rank] if 0 <= found.pp_rank < len(found.stages) else 0
    pairs = [
        ("tp_rank", named.tp_rank, found.tp_rank),
        ("pp_rank", named.pp_rank, found.pp_rank),
        ("tp_size", claim.tp_size, found.tp_size),
        ("pp_size", claim.pp_size, found.pp_size),
        ("dp_rank", claim.dp_rank, found.dp_rank),
        ("first_layer", named.first_layer, first_layer),
    ]
    for cache in found.caches:
        said = claim.block_tokens.get(cache.group, cache.block_tokens)
        pairs.append((f"block_tokens of KV cache group {cache.group}", said, cache.block_tokens))
    differ = [f"{name} is {said} there and {own} here" for name, said, own in pairs if said != own]
    yield from dict.fromkeys(differ)
    if not differ and claim.fingerprint != fingerprint(found):
        yield f"fingerprint is {claim.fingerprint[:64]!r} there and {fingerprint(found)!r} here"
