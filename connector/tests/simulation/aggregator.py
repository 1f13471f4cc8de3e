# SPDX-License-Identifier: Apache-2.0
"""vLLM's KVOutputAggregator: an id counts when every worker has reported it."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_datadist.handoff.desk import StepEnds
from vllm_datadist.handoff.parts import GroupEnd
from vllm_datadist.messages import WorkerNotes


class Aggregator:
    """`counts`: how many reports are still missing, by kind and id."""

    def __init__(self, num_workers: int) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self._num_workers = num_workers
        self._failed: set[str] = set()

    def aggregate(self, reports: Mapping[int, StepEnds[GroupEnd]]) -> tuple[set[str], set[str], set[str], WorkerNotes]:
        """(sent, received, failed, what the workers tell the scheduler side) of one step."""
        notes = WorkerNotes()
        sent: set[str] = set()
        received: set[str] = set()
        for report in reports.values():
            if not (report.sent or report.received or report.failed) and report.notes.is_empty():
                continue
            self._count("sent", report.sent, sent)
            self._count("received", report.received, received)
            self._failed |= report.failed
            if not report.notes.is_empty():
                notes = notes.aggregate(report.notes)
        failed = self._failed & received
        self._failed -= failed
        return sent, received, failed, notes

    def _count(self, kind: str, ids: set[str], complete: set[str]) -> None:
        for request_id in ids:
            left = self.counts.get((kind, request_id), self._num_workers) - 1
            self.counts[kind, request_id] = left
            if left == 0:
                complete.add(request_id)
                del self.counts[kind, request_id]
