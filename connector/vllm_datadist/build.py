# SPDX-License-Identifier: Apache-2.0
"""Makes the two halves from what vLLM hands to a connector."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import trace
from ._vllm import (
    VLLM_VERSION,
    KVCacheConfig,
    VllmConfig,
    current_platform,
    get_ip,
    get_pp_group,
    get_tp_group,
    init_logger,
)
from .config import ConnectorConfig
from .drain import DrainNotice, drain_limit_s
from .engine import (
    check_parallel,
    describe_engine,
    engine_facts,
    group_content,
    head_share,
    kv_cache_bytes,
    transfer_config,
    transfer_groups,
    worker_port,
)
from .interiors import kernel_interiors
from .scheduler.side import SchedulerSide
from .versions import warn_if_untested
from .worker.exchange import PushLimits
from .worker.kv_layout import describe_caches
from .worker.loads import LoadLimits
from .worker.node import DataDistNode
from .worker.side import WorkerPlace, WorkerSide, check_memory, device_unsupported

logger = init_logger(f"vllm.{__name__}")


def connector_config(vllm_config: VllmConfig) -> ConnectorConfig:
    return ConnectorConfig.from_extra_config(transfer_config(vllm_config).kv_connector_extra_config)


def build_scheduler_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerSide:
    warn_if_untested(VLLM_VERSION, logger)
    start_trace(vllm_config, "scheduler")
    return SchedulerSide(engine_facts(vllm_config, kv_cache_config, connector_config(vllm_config)), logger)


def build_drain_notice(vllm_config: VllmConfig) -> DrainNotice:
    """Says in the log what SIGTERM will do to hand-offs."""
    shutdown_timeout_s = float(getattr(vllm_config, "shutdown_timeout", 0))
    limit_s = drain_limit_s(connector_config(vllm_config).drain_timeout_s, shutdown_timeout_s)
    if transfer_config(vllm_config).is_kv_producer and shutdown_timeout_s == 0:
        logger.info(
            "SIGTERM will end this engine at once, also with hand-offs outstanding. Start it with "
            "--shutdown-timeout SECONDS to let them end first."
        )
    return DrainNotice(limit_s)


def worker_drain_limit_s(vllm_config: VllmConfig) -> float:
    """How long a worker that is being ended may wait for its hand-offs."""
    return drain_limit_s(connector_config(vllm_config).drain_timeout_s, 0.0)


def build_worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """Raises ListenError, UnsupportedMemory, UnsupportedModel or ConfigError: the engine cannot start like this."""
    config = connector_config(vllm_config)
    if not current_platform.is_cpu():
        raise device_unsupported(current_platform.device_type, "this engine")
    check_parallel(vllm_config)
    transfer_groups(kv_cache_config)
    place = worker_place(vllm_config)
    start_trace(vllm_config, f"worker {place.index}")
    port = worker_port(vllm_config, config, place)
    node = DataDistNode(
        listen_host(config),
        port,
        config.transfer_backend,
        kv_cache_bytes(kv_cache_config),
        config.backend_options,
        config.huge_pages,
        config.integrity,
        config.security,
    )
    limits = LoadLimits(config.load_timeout_s, config.link_timeout_s, config.load_threads)
    pushes = PushLimits(config.push_timeout_s, config.push_threads, layers_come_once(vllm_config))
    return WorkerSide(node, place, limits, logger, pushes)


def register_kv_caches(
    side: WorkerSide,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Tell the worker side where the layers lie. Raises UnsupportedMemory or LayoutError."""
    check_memory(tensors)
    place = worker_place(vllm_config)
    groups = transfer_groups(kv_cache_config)
    kinds = [group_content(kv_cache_config, group.index) for group in groups]
    heads = head_share(vllm_config, place)
    interiors = kernel_interiors(vllm_config, tensors)
    caches = describe_caches(tensors, groups, kinds, kv_cache_config.num_blocks, heads, interiors)
    side.register(tensors, caches, describe_engine(vllm_config, place, [cache.description for cache in caches]))


def worker_place(vllm_config: VllmConfig) -> WorkerPlace:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    return WorkerPlace(get_pp_group().rank_in_group, get_tp_group().rank_in_group, tp_size, tp_size * pp_size)


def start_trace(vllm_config: VllmConfig, part: str) -> None:
    """If the settings ask for one. Raises TraceError."""
    directory = connector_config(vllm_config).trace
    if directory:
        role = transfer_config(vllm_config).kv_role
        name = {"kv_producer": "P", "kv_consumer": "D"}.get(str(role), "P and D")
        trace.start(directory, f"{name} {part}")


def layers_come_once(vllm_config: VllmConfig) -> bool:
    """Whether a forward pass comes to each layer once, so that the layer's hook says that it is computed.

    A drafting model runs several times in a step; micro-batches bring every layer a part of the step's tokens each.
    """
    drafts = vllm_config.speculative_config is not None and vllm_config.speculative_config.use_eagle()
    return not drafts and not getattr(vllm_config.parallel_config, "use_ubatching", False)


def listen_host(config: ConnectorConfig) -> str:
    """The configured host, else the one vLLM finds. An address that means "any" cannot be put into tickets."""
    host = config.host or get_ip()
    if host in ("0.0.0.0", "::"):
        logger.warning("no address of this host is known: listening on 127.0.0.1, for engines on this host only")
        return "127.0.0.1"
    return host
