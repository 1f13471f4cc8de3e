# SPDX-License-Identifier: Apache-2.0
"""`DataDistConnector`: what vLLM calls. It forwards every hook to the half that lives in this process.

scheduler process: `scheduler.side.SchedulerSide`      decides; sends one `StepWork` with every step
each worker:       `worker.side.WorkerSide`            holds leases, links, moves bytes; reports what has ended
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from . import trace
from ._vllm import (
    ASKS_FOR_MEM_POOL_CONTEXT,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    VllmConfig,
)
from .build import (
    build_drain_notice,
    build_scheduler_side,
    build_worker_side,
    register_kv_caches,
    worker_drain_limit_s,
)
from .engine import kv_cache_bytes
from .messages import Endpoint, StepWork, WorkerNotes
from .reports import WorkerReporter
from .scheduler.side import SchedulerSide
from .stats import DataDistPromMetrics, DataDistStats
from .worker.side import WorkerSide

# vLLM wants what passes between its processes to be of its own (empty) classes.
KVConnectorMetadata.register(StepWork)
KVConnectorHandshakeMetadata.register(Endpoint)
KVConnectorWorkerMetadata.register(WorkerNotes)


class DataDistConnector(KVConnectorBase_V1, SupportsHMA):
    """P/D hand-off of KV cache over datadist_core. Roles: kv_producer, kv_consumer, kv_both."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._until_kv_caches_are_there = ExitStack()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = build_scheduler_side(vllm_config, kv_cache_config)
            self._drain = build_drain_notice(vllm_config)
            self._drain.listen()
        else:
            self._worker_side = build_worker_side(vllm_config, kv_cache_config)
            self._reporter = WorkerReporter(self._worker_side)
            if not ASKS_FOR_MEM_POOL_CONTEXT:  # this worker makes its KV cache next, in this thread
                self._until_kv_caches_are_there.enter_context(self._kv_cache_placement())

    @property
    def _scheduler(self) -> SchedulerSide:
        if self._scheduler_side is None:
            raise RuntimeError("this hook belongs to the scheduler, this is a worker's connector")
        return self._scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        if self._worker_side is None:
            raise RuntimeError("this hook belongs to a worker, this is the scheduler's connector")
        return self._worker_side

    # --- scheduler --------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.set_workers(item for item in metadata.values() if isinstance(item, Endpoint))

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler.set_workers(item for item in metadata.values() if isinstance(item, Endpoint))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        work = self._scheduler.take_work(scheduler_output)
        self._scheduler.ledger.scheduled(scheduler_output)
        work.drain_s = self._drain.take_limit_s()
        return work

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping until the workers have been told everything."""
        return self._scheduler_side is not None and self._scheduler_side.has_work()

    # --- worker -----------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._kv_cache_placement()

    def _kv_cache_placement(self) -> AbstractContextManager[Any]:
        return self._worker.place_kv_cache(kv_cache_bytes(self._kv_cache_config))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._until_kv_caches_are_there.close()
        register_kv_caches(self._worker, self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> Any:
        return self._worker.endpoint

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before the step's forward pass, so that leases open and loads start while it computes."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.start(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are under way since `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous to steps: vLLM schedules a request when its load has ended."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of the step touches blocks that requests have lost."""
        self._worker.retract(kv_connector_metadata)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whoever pushes this layer may begin. For a pull nothing is saved: D reads P's KV cache in place."""
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is waited for: pushes go on beside the next steps, and hold their blocks by leases."""
        self._worker.step_computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._reporter.transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._reporter.transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> Any:
        return self._reporter.take_notes()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker_side is not None:
            return self._reporter.take_stats()
        return DataDistStats(self._scheduler.take_counts().data)

    def shutdown(self) -> None:
        if self._worker_side is not None:
            self._worker_side.drain(worker_drain_limit_s(self._vllm_config))
            self._worker_side.close()
        trace.stop()

    # --- both -------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return DataDistStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return DataDistPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
