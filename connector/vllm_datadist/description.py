# SPDX-License-Identifier: Apache-2.0
"""How two workers find out, before any block moves, whether they can work together.

On every new link D sends its `Description` and P answers with its own; both compare, and both refuse a mismatch with
a text that names each differing field and both values. What follows from a worker's own place (number of blocks,
addresses) is not compared.
"""

from __future__ import annotations

from typing import Any

import msgspec

from datadist_core.errors import LLMException
from datadist_core.types import LLMStatusCode

from .worker.topology import LayerDescription

#: Raised whenever an old peer could misread a new one. Both ends must agree exactly.
PROTOCOL_VERSION = 2


class Incompatible(LLMException):
    """The two engines cannot work together. The text names the fields and both values."""

    default_code = LLMStatusCode.LLM_PARAM_INVALID


class Hello(msgspec.Struct, frozen=True):
    """The part of a description that every version can read."""

    version: int


class CacheDescription(msgspec.Struct, frozen=True):
    """One blocks cache: layers of one KV cache group whose blocks have the same size. `model_id` is its key."""

    model_id: int
    group: int
    kind: str
    block_tokens: int
    window: int | None
    layers: list[LayerDescription]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one engine. None = not known here, which fits anything."""

    version: int
    model: str
    revision: str | None
    quantization: str | None
    dtype: str
    cache_dtype: str
    use_mla: bool
    speculative: str
    tp_size: int
    pp_size: int
    tp_rank: int
    pp_rank: int
    model_config: dict[str, str]
    caches: list[CacheDescription]


_COMPARED = (
    "model", "quantization", "dtype", "cache_dtype", "use_mla", "speculative",
    "tp_size", "pp_size", "tp_rank", "pp_rank",
)  # fmt: skip
_COMPARED_IF_KNOWN = ("revision",)
_NOT_COMPARED_OF_LAYERS = frozenset({"num_blocks"})
_MAX_NAMED = 8


def encode(description: Description) -> bytes:
    return msgspec.msgpack.encode(description)


def decode(body: bytes) -> Description:
    """Raises Incompatible for another version, and for what is no description at all."""
    try:
        version = msgspec.msgpack.decode(body, type=Hello).version
        if version != PROTOCOL_VERSION:
            raise Incompatible(f"protocol version is {PROTOCOL_VERSION} here and {version} at the peer")
        return msgspec.msgpack.decode(body, type=Description)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Incompatible(f"the peer's description cannot be read: {error}") from error


def check_compatible(ours: Description, theirs: Description) -> None:
    """Raise Incompatible unless every compared field is equal."""
    found = [*_top_level(ours, theirs), *_model_config(ours, theirs), *_caches(ours, theirs)]
    if found:
        more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        raise Incompatible("; ".join(found[:_MAX_NAMED]) + more)


def _differs(name: str, ours: Any, theirs: Any) -> list[str]:
    return [] if ours == theirs else [f"{name} is {ours!r} here and {theirs!r} at the peer"]


def _top_level(ours: Description, theirs: Description) -> list[str]:
    found = []
    for name in _COMPARED:
        found += _differs(name, getattr(ours, name), getattr(theirs, name))
    for name in _COMPARED_IF_KNOWN:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine is not None and other is not None:
            found += _differs(name, mine, other)
    return found


def _model_config(ours: Description, theirs: Description) -> list[str]:
    found = []
    for name in sorted(set(ours.model_config) | set(theirs.model_config)):
        found += _differs(f"model config {name}", ours.model_config.get(name), theirs.model_config.get(name))
    return found


def _caches(ours: Description, theirs: Description) -> list[str]:
    found = _differs("number of caches", len(ours.caches), len(theirs.caches))
    if found:
        return found
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        for name in ("model_id", "group", "kind", "block_tokens", "window"):
            found += _differs(f"KV cache group {mine.group}: {name}", getattr(mine, name), getattr(other, name))
        found += _layers(mine, other)
    return found


def _layers(ours: CacheDescription, theirs: CacheDescription) -> list[str]:
    where = f"KV cache group {ours.group}"
    found = _differs(f"{where}: number of layers", len(ours.layers), len(theirs.layers))
    if found:
        return found
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for name in mine.__struct_fields__:
            if name not in _NOT_COMPARED_OF_LAYERS:
                found += _differs(f"layer {mine.layer_name}: {name}", getattr(mine, name), getattr(other, name))
    return found
