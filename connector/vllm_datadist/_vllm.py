# SPDX-License-Identifier: Apache-2.0
"""The only file that names vLLM import paths. They move between versions; nothing else here has to know."""

from __future__ import annotations

from vllm import __version__ as VLLM_VERSION
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.outputs import KVConnectorOutput

#: Before 0.31 vLLM makes its KV cache without asking the connector for a context to do it in.
ASKS_FOR_MEM_POOL_CONTEXT = hasattr(KVConnectorBase_V1, "get_mem_pool_context")

__all__ = [
    "ASKS_FOR_MEM_POOL_CONTEXT",
    "VLLM_VERSION",
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "current_platform",
    "get_ip",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "get_pp_group",
    "get_pp_indices",
    "get_tp_group",
    "init_logger",
]
