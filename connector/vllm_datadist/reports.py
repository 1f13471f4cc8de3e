# SPDX-License-Identifier: Apache-2.0
"""What a worker tells vLLM after each step, in vLLM's own types."""

from __future__ import annotations

from ._vllm import KVConnectorTransferResults
from .stats import DataDistStats
from .worker.side import WorkerSide


class WorkerReporter:
    """Called by the engine's thread, once per step each."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._stats = DataDistStats()
        self._num_active = 0

    def transfer_results(self) -> KVConnectorTransferResults:
        """Failed loads by request, never by block: block ids say nothing in a model with several groups."""
        results = self._side.take_results()
        for load in results.loads:
            self._stats.add_moved(load.moved)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def take_stats(self) -> DataDistStats | None:
        if self._side.place.counts:
            self._count_leases()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, DataDistStats()
        return stats

    def _count_leases(self) -> None:
        leases = self._side.leases
        num_active = leases.num_active
        changed = num_active != self._num_active
        self._num_active = num_active
        self._stats.add_leases(leases.take_num_expired(), num_active if changed else None)
