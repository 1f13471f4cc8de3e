# SPDX-License-Identifier: Apache-2.0
"""What the connector has to know of the engine it is in, read from vLLM's configuration."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ._vllm import (
    KVCacheConfig,
    KVTransferConfig,
    VllmConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from .config import ConnectorConfig
from .description import PROTOCOL_VERSION, CacheDescription, Description
from .groups import GroupInfo
from .scheduler.side import EngineFacts
from .worker.kv_layout import HeadShare
from .worker.side import WorkerPlace

_SUPPORTED_KINDS = ("full_attention", "mla_attention", "sliding_window")
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
    return EngineFacts(
        engine_id=f"{transfer.engine_id}-{secrets.token_hex(4)}",
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        groups=transfer_groups(kv_cache_config),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        lease_s=config.lease_s,
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
        window = get_kv_cache_spec_sliding_window(group.kv_cache_spec)
        names = tuple(sorted(group.layer_names))
        groups.append(GroupInfo(index, group.kv_cache_spec.block_size, window, names))
    return tuple(groups)


def group_kind(kv_cache_config: KVCacheConfig, index: int) -> str:
    return get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[index].kv_cache_spec).value


def kv_cache_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Size of the one allocation that backs the KV cache of all layers; 0 if there is none."""
    tensors = kv_cache_config.kv_cache_tensors
    return tensors[0].size if tensors else 0


def head_share(vllm_config: VllmConfig, place: WorkerPlace) -> HeadShare:
    model = vllm_config.model_config
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    return HeadShare(place.tp_rank, place.tp_size, total)


def worker_port(vllm_config: VllmConfig, config: ConnectorConfig, place: WorkerPlace) -> int:
    """0, or the configured port and those behind it for the engine's other workers."""
    if config.port == 0:
        return 0
    dp_index = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return config.port + dp_index * place.world_size + place.index


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
        model_config=_flat(model.hf_text_config.to_dict()),
        caches=list(caches),
    )


def _speculative(vllm_config: VllmConfig) -> str:
    """Drafting that puts layers of its own into the KV cache or changes what is computed for a token."""
    spec = vllm_config.speculative_config
    if spec is None or not spec.use_eagle():
        return "none"
    return f"{spec.method}:{os.path.basename(str(spec.model))}"


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """The model's own parameters as text, without what does not matter to the KV cache."""
    return {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in config.items()
        if not (name.startswith("_") or name.endswith(("token_id", "token_ids")) or name in _VOLATILE)
    }
