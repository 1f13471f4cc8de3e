# SPDX-License-Identifier: Apache-2.0
"""How two workers find out, before any block moves, whether they can work together.

On every new link D sends its `Description` and P answers with its own; both compare, and both refuse a mismatch with
a text that names each differing field and both values. The model and what is computed for a token must be the same.
How the KV cache is cut and laid out may differ: parallelism, block sizes, layouts, numbers of blocks. There `planner`
says what fits, layer by layer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from datadist_core.errors import LLMException
from datadist_core.types import LLMStatusCode

from .worker.planner import fit_errors
from .worker.topology import MAX_BYTES, CacheDescription, LayerDescription, ModelLayer, PlanError, check_well_formed

__all__ = [
    "LAYER_FIELD",
    "PROTOCOL_VERSION",
    "STATE_KIND",
    "CacheDescription",
    "Description",
    "Incompatible",
    "LayerDescription",
    "ModelLayer",
    "check_compatible",
    "decode",
    "encode",
]

#: Raised whenever an old peer could misread a new one. Both ends must agree exactly.
PROTOCOL_VERSION = 4
#: vLLM's name for Mamba-like states, by which their caches' kinds begin.
STATE_KIND = "mamba"
#: Fields of `Description.model_config` that begin so are of one layer, and compared where both workers hold it.
LAYER_FIELD = "layer "


class Incompatible(LLMException):
    """The two engines cannot work together. The text names the fields and both values."""

    default_code = LLMStatusCode.LLM_PARAM_INVALID


class Hello(msgspec.Struct, frozen=True):
    """The part of a description that every version can read."""

    version: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one engine. None = not known here, which fits anything.

    Attributes:
        tp_size, pp_size, tp_rank, pp_rank, dp_rank: the worker's place. Engines may differ in all of them.
        stages: the number of the first layer of each pipeline stage.
        model_layers: every layer of the engine, of all stages, and so the same at all its workers: by it each of them
            counts how many of them read from a worker of P. Those without a KV cache count too: a worker that has no
            others reads no bytes, and releases. Empty = there are no layers but those here.
    """

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
    dp_rank: int = 0
    stages: tuple[int, ...] = (0,)
    model_layers: tuple[ModelLayer, ...] = ()
    model_config: dict[str, str]
    caches: list[CacheDescription]

    @property
    def spread(self) -> int:
        """Workers with different ones that need the same heads have them from different holders."""
        return self.dp_rank * self.tp_size + self.tp_rank


_COMPARED = ("model", "quantization", "dtype", "cache_dtype", "use_mla", "speculative")
_COMPARED_IF_KNOWN = ("revision",)
_MAX_NAMED = 8
_MAX_RANKS = 1 << 16


def encode(description: Description) -> bytes:
    return msgspec.msgpack.encode(description)


def decode(body: bytes) -> Description:
    """Raises Incompatible for another version, and for what is no description at all."""
    try:
        version = msgspec.msgpack.decode(body, type=Hello).version
        if version != PROTOCOL_VERSION:
            raise Incompatible(f"protocol version is {PROTOCOL_VERSION} here and {version} at the peer")
        description = msgspec.msgpack.decode(body, type=Description)
        _check_sane(description)
        return description
    except (msgspec.MsgspecError, RecursionError, PlanError) as error:
        raise Incompatible(f"the peer's description cannot be read: {error}") from error


def _check_sane(description: Description) -> None:
    """Raise PlanError for what no worker can be."""
    rank, size, dp_rank = description.tp_rank, description.tp_size, description.dp_rank
    if not 0 <= rank < size <= _MAX_RANKS or not 0 <= dp_rank < _MAX_RANKS:
        raise PlanError(f"tp_rank={rank} of tp_size={size}, dp_rank={dp_rank} is no place of a worker")
    for cache in description.caches:
        check_well_formed(cache)
        for layer in cache.layers:
            _check_strides(layer)


def _check_strides(layer: LayerDescription) -> None:
    """Also of what there is only one of: such a stride is no distance of anything, but is calculated with."""
    strides = [layer.head_stride_bytes]
    for strip in layer.strips:
        strides += (strip.stride_bytes, strip.token_stride_bytes)
    if max(strides) > MAX_BYTES:
        raise PlanError(f"layer {layer.layer_name}: strides {strides} are more than {MAX_BYTES} bytes")


def check_compatible(ours: Description, theirs: Description) -> None:
    """Raise Incompatible unless every compared field is equal, and the layers that both have can be paired."""
    found = [*_top_level(ours, theirs), *_model_config(ours, theirs), *fit_errors(ours, theirs)]
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
        is_in_both = name in ours.model_config and name in theirs.model_config
        if name.startswith(LAYER_FIELD) and not is_in_both:
            continue  # another pipeline stage's layer
        found += _differs(f"model config {name}", ours.model_config.get(name), theirs.model_config.get(name))
    return found
