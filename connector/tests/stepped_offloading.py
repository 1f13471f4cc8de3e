# SPDX-License-Identifier: Apache-2.0
"""`stepped_engine` with ours beside vLLM's CPU offloading in a MultiConnector.

The offloading's own copies need CUDA; its scheduler half does not. So all that decides who loads, who stores and who
holds blocks is vLLM's and ours, and the toy copies what the offloading says as well.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from connector.tests.stepped_engine import Engine


class OffloadingEngine(Engine):
    """An engine whose blocks go to the host's memory as well, and come back from there."""

    def __init__(self, role: str, peers: dict[int, Engine], *, ours_first: bool, is_async: bool = False) -> None:
        ours = {"kv_connector": "DataDistConnector", "kv_role": role}
        ours["kv_connector_module_path"] = "vllm_datadist.connector"
        other = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
        other["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 20}
        children = [ours, other] if ours_first else [other, ours]
        self._ours, self._other = (0, 1) if ours_first else (1, 0)
        self._host: dict[int, list[int]] = {}
        self._stored: dict[int, int] = {}
        self.num_blocks_from_host = 0
        transfer = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
        transfer["kv_connector_extra_config"] = {"connectors": children}
        super().__init__(role, peers, is_async=is_async, transfer=transfer)

    def work(self, work: Any) -> None:
        offload = work.metadata[self._other]
        for host, block in zip(offload.load_cpu_blocks, offload.load_gpu_blocks, strict=True):
            self.memory[block] = list(self._host[host])
            self.num_blocks_from_host += 1
        self.received(offload.load_event_to_reqs.get(offload.load_event, ()))
        super().work(work.metadata[self._ours])

    def after_execute(self, metadata: Any) -> None:
        offload = metadata.metadata[self._other]
        for host, block in zip(offload.store_cpu_blocks, offload.store_gpu_blocks, strict=True):
            self._host[host] = list(self.memory[block])
        if offload.store_gpu_blocks:
            self._stored[offload.store_event] = 1

    def take_worker_meta(self) -> Any:
        if not self._stored:
            return None
        metas: list[Any] = [None, None]
        metas[self._other] = SimpleCPUOffloadWorkerMetadata(self._stored)
        self._stored = {}
        return MultiKVConnectorWorkerMetadata(metadata=tuple(metas))
