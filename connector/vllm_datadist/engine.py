# SPDX-License-Identifier: Apache-2.0
"""What the connector has to know of the engine it is in, read from vLLM's configuration."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ._vllm import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVTransferConfig,
    UniformTypeKVCacheSpecs,
    VllmConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_pp_indices,
)
from .config import ConnectorConfig
from .description import LAYER_FIELD, PROTOCOL_VERSION, STATE_KIND, CacheDescription, Description, ModelLayer
from .groups import GroupInfo
from .scheduler.side import EngineFacts
from .worker.kv_layout import HeadShare
from .worker.shares import layer_index
from .worker.side import WorkerPlace
from .worker.topology import is_regular

_SUPPORTED_KINDS = ("full_attention", "mla_attention", "sliding_window", "chunked_local_attention", STATE_KIND)
#: Methods that draft from tokens or from the target's output. All others have layers of their own in the KV cache.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
#: vLLM's models with these choose by `max_model_len` how K comes out.
_LONG_ROPE, _LLAMA4_LIMIT = "longrope", 32768
#: Fields of a model's config that may differ between two copies of one model, or that are compared elsewhere.
_VOLATILE = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "quantization_config"}
)


class UnsupportedModel(ValueError):
    """A model or a parallel configuration whose KV cache this connector cannot hand off. The text says which."""


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig) -> EngineFacts:
    """Raises UnsupportedModel."""
    transfer, parallel = transfer_config(vllm_config), vllm_config.parallel_config
    check_parallel(vllm_config)
    check_caches(vllm_config, kv_cache_config)
    return EngineFacts(
        engine_id=f"{transfer.engine_id}-{secrets.token_hex(4)}",
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        groups=transfer_groups(kv_cache_config),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        lease_s=config.lease_s,
        transfer_mode=config.transfer_mode,
        no_push=why_no_push(vllm_config),
    )


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    if vllm_config.kv_transfer_config is None:
        raise ValueError("DataDistConnector needs a kv_transfer_config")
    return vllm_config.kv_transfer_config


def check_parallel(vllm_config: VllmConfig) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name, 1)
        if size > 1:
            raise UnsupportedModel(f"{name}={size}: the connector does not support context parallelism")


def why_no_push(vllm_config: VllmConfig) -> str:
    """Why this engine cannot push as a P; "" if it can."""
    spec, num_stages = vllm_config.speculative_config, vllm_config.parallel_config.pipeline_parallel_size
    if spec is None or num_stages == 1:
        return ""
    return (
        f"speculative decoding ({spec.method}) with pipeline_parallel_size={num_stages}: vLLM tells only the last "
        "stage's workers when a step is computed, so the others could not push; use transfer_mode pull, or start P "
        "without one of the two"
    )


def transfer_groups(kv_cache_config: KVCacheConfig) -> tuple[GroupInfo, ...]:
    """The KV cache groups to hand off. Raises UnsupportedModel for a kind of attention that cannot be."""
    groups = []
    for index in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        kind = group_kind(kv_cache_config, index)
        if kind not in _SUPPORTED_KINDS:
            raise UnsupportedModel(
                f"KV cache group {index} ({group.layer_names[0]}, ...) is {kind}; supported are: "
                + ", ".join(_SUPPORTED_KINDS)
            )
        groups.append(_group_info(index, group, kind))
    return tuple(groups)


def _group_info(index: int, group: KVCacheGroupSpec, kind: str) -> GroupInfo:
    spec = group.kv_cache_spec
    return GroupInfo(
        index,
        spec.block_size,
        get_kv_cache_spec_sliding_window(spec),
        tuple(sorted(group.layer_names)),
        chunk=getattr(spec, "attention_chunk_size", None) if kind == "chunked_local_attention" else None,
        is_state=kind == STATE_KIND,
    )


def check_caches(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedModel for settings under which a block does not hold all that a hand-off needs."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise UnsupportedModel(
            "use_replayssm=True: a Mamba state is then not complete without inputs that lie elsewhere; start without "
            "--use-replayssm"
        )
    if any(getattr(spec, "num_speculative_blocks", 0) for spec in specs):
        raise UnsupportedModel(
            "speculative decoding of a model with Mamba-like state: after accepted drafts the state lies in a block "
            "that only the worker knows; start without --speculative-config"
        )


def group_kind(kv_cache_config: KVCacheConfig, index: int) -> str:
    return get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[index].kv_cache_spec).value


def group_content(kv_cache_config: KVCacheConfig, index: int) -> str:
    """The kind of group, with everything that says what the bytes of its blocks mean; the same at P and D."""
    kind = group_kind(kv_cache_config, index)
    if kind != STATE_KIND:
        return kind
    states = {
        f"{spec.mamba_type.name.lower()} {list(map(list, spec.shapes))} {[str(dtype) for dtype in spec.dtypes]}"
        for spec in layer_specs(kv_cache_config.kv_cache_groups[index].kv_cache_spec)
    }
    return f"{kind}: {'; '.join(sorted(states))}; conv state {os.environ.get('VLLM_SSM_CONV_STATE_LAYOUT', 'SD')}"


def layer_specs(spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    """One per kind of layer in a group."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def kv_cache_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Size of the one allocation that backs the KV cache of all layers; 0 if there is none."""
    tensors = kv_cache_config.kv_cache_tensors
    return tensors[0].size if tensors else 0


def head_share(vllm_config: VllmConfig, place: WorkerPlace) -> HeadShare:
    by_layer = {name: _total_heads(vllm_config, name) for name in vllm_config.compilation_config.static_forward_context}
    return HeadShare(place.tp_rank, place.tp_size, _kv_heads(vllm_config.model_config), by_layer)


def model_layers(vllm_config: VllmConfig) -> tuple[ModelLayer, ...]:
    """How the KV heads of every layer are cut, those of other pipeline stages too. Empty where there are no others.

    All workers must come to the same. So it is read from the configuration, also for the layers that are here.
    """
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return ()
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    drafts = () if _draft_model(vllm_config) is None else (num_layers,)
    totals = {number: _total_heads(vllm_config, f"layers.{number}") for number in (*range(num_layers), *drafts)}
    return tuple(_model_layer(number, total, tp_size) for number, total in totals.items())


def _model_layer(number: int, total_heads: int, tp_size: int) -> ModelLayer:
    num_heads = max(1, total_heads // tp_size)
    return ModelLayer(number, num_heads, total_heads if is_regular(num_heads, total_heads, tp_size) else 0)


def _total_heads(vllm_config: VllmConfig, layer_name: str) -> int:
    """KV heads of that layer in the whole model, or in the whole draft model. Layers may differ in that."""
    model, index = vllm_config.model_config, layer_index(layer_name)
    is_draft = index >= model.get_total_num_hidden_layers() or layer_name.startswith("draft_model")
    draft = _draft_model(vllm_config) if is_draft else None
    if draft is not None:
        return _kv_heads(draft)
    arch = getattr(model, "model_arch_config", None)
    if model.use_mla or is_draft or getattr(arch, "per_layer_overrides", None) is None:
        return _kv_heads(model)
    return int(arch[index].total_num_kv_heads)


def _kv_heads(model: Any) -> int:
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _draft_model(vllm_config: VllmConfig) -> Any:
    """vLLM's configuration of a draft model whose layers are in the KV cache; None if there is none."""
    spec = vllm_config.speculative_config
    return None if spec is None or spec.method in _DRAFTS_WITHOUT_KV else spec.draft_model_config


def stage_starts(vllm_config: VllmConfig) -> list[int]:
    """The number of the first layer of each pipeline stage."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return [0]
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    return [get_pp_indices(num_layers, rank, size)[0] for rank in range(size)]


def worker_port(vllm_config: VllmConfig, config: ConnectorConfig, place: WorkerPlace) -> int:
    """0, or the configured port and those behind it for the engine's other workers."""
    if config.port == 0:
        return 0
    return config.port + _dp_rank(vllm_config) * place.world_size + place.index


def _dp_rank(vllm_config: VllmConfig) -> int:
    """Each data parallel rank is an engine of its own."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def describe_engine(vllm_config: VllmConfig, place: WorkerPlace, caches: Sequence[CacheDescription]) -> Description:
    """This worker, as peers see it."""
    model = vllm_config.model_config
    return Description(
        version=PROTOCOL_VERSION,
        model=os.path.basename(os.path.normpath(str(model.model))),
        revision=model.revision,
        quantization=None if model.quantization is None else str(model.quantization),
        dtype=str(model.dtype),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        use_mla=bool(model.use_mla),
        speculative=_speculative(vllm_config),
        tp_size=place.tp_size,
        pp_size=place.world_size // place.tp_size,
        tp_rank=place.tp_rank,
        pp_rank=place.pp_rank,
        dp_rank=_dp_rank(vllm_config),
        stages=tuple(stage_starts(vllm_config)),
        model_layers=model_layers(vllm_config),
        model_config=_flat(model.hf_text_config.to_dict()) | _by_context(model) | _kv_scales(vllm_config, caches),
        caches=list(caches),
    )


def _speculative(vllm_config: VllmConfig) -> str:
    """Drafting that puts layers of its own into the KV cache: both ends must have it, or a prompt's blocks of these
    layers would come from nowhere."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method in _DRAFTS_WITHOUT_KV:
        return "none"
    return f"{spec.method}:{os.path.basename(str(spec.model))}"


def _kv_scales(vllm_config: VllmConfig, caches: Sequence[CacheDescription]) -> dict[str, str]:
    """What K and V of each layer of a quantized cache are multiplied with. It is not in the blocks."""
    if not str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        return {}
    layers = vllm_config.compilation_config.static_forward_context
    names = [layer.layer_name for cache in caches for layer in cache.layers]
    scales = {name: [_scale(layers.get(name), f"_{kind}_scale_float") for kind in "kv"] for name in names}
    return {LAYER_FIELD + f"{name}: K and V scales": json.dumps(both) for name, both in scales.items()}


def _scale(layer: Any, name: str) -> float | None:
    value = getattr(layer, name, None)
    return None if value is None else float(value)


def _by_context(model: Any) -> dict[str, str]:
    """What the longest context that a model is built for changes in its KV cache, from the first token on.

    Not that length itself: for most models P and D may choose it freely.
    """
    config, length = model.hf_text_config, _built_for_tokens(model)
    limits = {f"{_LONG_ROPE}: max_model_len > {limit}": limit for limit in _long_rope_limits(config)}
    if str(getattr(config, "model_type", "")).startswith("llama4"):
        limits[f"attn_temperature_tuning: max_model_len > {_LLAMA4_LIMIT}"] = _LLAMA4_LIMIT
    return {name: json.dumps(length > limit) for name, limit in limits.items()}


def _built_for_tokens(model: Any) -> int:
    """vLLM may have made `max_model_len` fit its memory (-1), but only after the model was built."""
    if getattr(model, "original_max_model_len", None) == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def _long_rope_limits(config: Any) -> set[int]:
    """In models with such layers: from which length on vLLM takes the long factors for every token."""
    found: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    limits: set[Any] = set()
    while found:
        rope = found.pop()
        if not isinstance(rope, Mapping):
            continue
        found += rope.values()  # one per type of layer
        if _LONG_ROPE in (rope.get("rope_type"), rope.get("type")):
            limits.add(rope.get("original_max_position_embeddings"))
            limits.add(getattr(config, "original_max_position_embeddings", None))
    return {int(limit) for limit in limits if limit}


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """The model's own parameters as text, without what does not matter to the KV cache."""
    return {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in config.items()
        if not (name.startswith("_") or name.endswith(("token_id", "token_ids")) or name in _VOLATILE)
    }
