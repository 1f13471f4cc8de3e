# SPDX-License-Identifier: Apache-2.0
"""What a worker tells vLLM after each step, in vLLM's own types."""

from __future__ import annotations

from ._vllm import KVConnectorTransferResults
from .counts import Counts, HoldOutcome, Mode
from .handoff.lease import LeasePhase
from .messages import HoldReport, WorkerNotes
from .stats import DataDistStats
from .worker.side import WorkerSide

_HOLD_OUTCOMES = {LeasePhase.RELEASED: HoldOutcome.RELEASED, LeasePhase.EXPIRED: HoldOutcome.EXPIRED}


class WorkerReporter:
    """Called by the engine's thread, once per step each.

    vLLM calls `transfer_results` first: the notes and numbers of what it reports go along with the same step.
    """

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._counts = Counts()
        self._gauges: dict[str, int] = {}
        self._notes = WorkerNotes()

    def transfer_results(self) -> KVConnectorTransferResults:
        """Failed loads by request, never by block: block ids say nothing in a model with several groups."""
        results = self._side.take_results()
        self._notes = self._notes.aggregate(results.notes)
        for mode, ends in ((Mode.PULL, results.loads), (Mode.PUSH, results.pushes)):
            self._notes.loads += [self._side.book.close(end.key, mode, end.error) for end in ends]
        for ended in self._side.leases.take_outcomes():
            outcome = _HOLD_OUTCOMES.get(ended.phase, HoldOutcome.UNKNOWN)
            self._notes.holds.append(HoldReport(ended.key, outcome))
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def take_notes(self) -> WorkerNotes | None:
        """For the scheduler side, with the report that `transfer_results` has begun."""
        notes, self._notes = self._notes, WorkerNotes()
        return None if notes.is_empty() else notes

    def take_stats(self) -> DataDistStats | None:
        side, counts = self._side, self._counts
        counts.add(side.book.take_counts().data)
        self._gauge("links", side.num_links, side.place.index)
        if counts.is_empty():
            return None
        self._counts = Counts()
        return DataDistStats(counts.data)

    def _gauge(self, name: str, value: int, *labels: int) -> None:
        """Only what has changed is told."""
        if self._gauges.get(name, 0) != value:
            self._gauges[name] = value
            self._counts.gauge(name, value, *labels)
