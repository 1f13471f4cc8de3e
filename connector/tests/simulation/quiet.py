# SPDX-License-Identifier: Apache-2.0
"""What is true of an engine when all has ended."""

from __future__ import annotations

from collections.abc import Callable

from vllm_datadist.handoff.lease import LeasePhase

from .engine import Engine
from .worker import SimWorker
from .world import Violation


def check_calm(engine: Engine, is_excused: Callable[[str], bool]) -> None:
    """Nothing went wrong, so nothing may have been left to a lease's time, and no load may have failed.

    Args:
        is_excused: of which transfer it may be otherwise.
    """
    outcomes = [ended for worker in engine.workers for ended in worker.leases.take_outcomes()]
    expired = [ended.key for ended in outcomes if ended.phase is LeasePhase.EXPIRED]
    expired = [key for key in expired if not is_excused(engine.transfers.get(key, ""))]
    failed = [request.load_key for request in engine.failed_loads if not is_excused(request.transfer_id)]
    if expired or failed:
        raise Violation("calm", f"{engine.name}: leases {expired} expired, loads {failed} failed")


def check_quiet(engine: Engine) -> None:
    """Every table is empty, and every block is back."""
    name = engine.name
    left = {
        "requests": engine.requests,
        "holds": len(engine.side._holds),
        "hand-offs": len(engine.side._handoffs),
        "work": not engine.side._work.is_empty(),
        "counts": engine._aggregator.counts,
        "leases": [worker.leases.num_active for worker in engine.workers if worker.leases.num_active],
        "watched": [len(worker.watcher.table) for worker in engine.workers if len(worker.watcher.table)],
        "loads": [worker.place.index for worker in engine.workers if worker.loader.is_busy()],
        "offers": [worker.place.index for worker in engine.workers if worker.offers.is_busy()],
        "pushes": [worker.place.index for worker in engine.workers if worker.pusher.is_busy()],
        "sources": [len(_sources(worker)) for worker in engine.workers if _sources(worker)],
        "push requests": len(engine.side._pushes),
        "settling": not engine.side._settling.is_idle,
    }
    leaks = {what: value for what, value in left.items() if value}
    if leaks:
        raise Violation("leak", f"{name}: left when all is quiet: {leaks}")
    if len(engine.pool.free) != engine.pool.num_blocks:
        raise Violation("leak", f"{name}: {engine.pool.num_blocks - len(engine.pool.free)} blocks did not come back")


def _sources(worker: SimWorker) -> list[object]:
    """What P's table of pushes still has of requests, or of offers for them."""
    table = worker.pusher.table
    sends = [*table._sends._keys, *table._sends._pinned]
    return [*table._sources, *table._by_key, *table._held, *sends, *table._doubtful, *table._line.transfer_ids()]
