# SPDX-License-Identifier: Apache-2.0
"""The measuring itself. No clock decides anything here but when to stop.

Within a group (one operation, pattern and block size) all contenders move the same lists once per round, in an order
that changes, so that a disturbance hits all of them alike and none always finds the caches as the same other one left
them. Each is first run once on cleared memory and all its bytes are checked: that also maps and touches every page.
What is measured besides (memory, the owner's processor time, ...) is in `findings.py`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import LLMException
from .blocks import CACHE_TRANSFERS, BlockLists, make_lists, single_block
from .contenders import OUR_NAMES, PEERS, BackendContender, Entry, entries_of
from .contract import PULL, Contender
from .field import MIN_ROUNDS, Field, Progress
from .findings import find_all
from .results import Group, LatencyRow, Results, Row, make_rows

MAX_LINKS = 50
LATENCY_BLOCK_BYTES = (4096, 65536)
_LATENCY_BLOCKS = 64
_LATENCY_REPEATS = 2
"""So that the first of a turn, for which a peer's process has to wake up, is less than one in a hundred."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; each row takes about `seconds`."""

    backends: tuple[str, ...]
    peers: tuple[str, ...]
    ops: tuple[str, ...]
    patterns: tuple[str, ...]
    block_bytes: tuple[int, ...]
    total_bytes: int
    seconds: float

    @property
    def entries(self) -> list[Entry]:
        return entries_of(self.backends, self.peers)

    @property
    def cache_bytes(self) -> int:
        """Of the largest cache that any part of this needs."""
        sizes = [make_lists("contiguous", size, self.total_bytes).num_bytes for size in self.block_bytes]
        return CACHE_TRANSFERS * max(*sizes, _LATENCY_BLOCKS * max(LATENCY_BLOCK_BYTES))


def run(plan: Plan, progress: Progress) -> Results:
    """Measure everything that `plan` names. Raises LLMException if none of our backends or peers can start."""
    results = Results()
    with Field(results) as field:
        field.start(plan.entries, plan.cache_bytes, progress)
        if not field.contenders(*OUR_NAMES, *PEERS):
            raise LLMException(f"nothing to measure: {results.skipped}")
        _measure_throughput(plan, field, results, progress)
        _measure_latency(plan, field, results, progress)
        _measure_links(plan, field, results, progress)
        find_all(field, results.findings, plan.total_bytes, plan.cache_bytes, plan.seconds, progress)
    return results


def _measure_throughput(plan: Plan, field: Field, results: Results, progress: Progress) -> None:
    num_groups = len(plan.block_bytes) * len(plan.patterns) * len(plan.ops)
    done = 0
    for block_bytes in plan.block_bytes:
        prepare(field, field.contenders(), make_lists("contiguous", block_bytes, plan.total_bytes))
        for pattern in plan.patterns:
            lists = make_lists(pattern, block_bytes, plan.total_bytes)
            for op in plan.ops:
                done += 1
                progress(f"{done}/{num_groups} {op} {lists.num_blocks} x {block_bytes} bytes, {pattern}")
                results.rows.extend(measure_group(field, op, pattern, lists, plan.seconds))


def prepare(field: Field, contenders: Sequence[Contender], lists: BlockLists) -> None:
    for contender in contenders:
        field.ask(contender, functools.partial(contender.prepare, lists))


def measure_group(field: Field, op: str, pattern: str, lists: BlockLists, seconds: float) -> list[Row]:
    """One row per contender, in about `seconds` each. They must be prepared for lists of this shape."""
    contenders = field.contenders()
    checks = {c.name: field.ask(c, functools.partial(_move_verified, c, op, lists)) for c in contenders}
    samplers = {c.name: functools.partial(c.move_each, op, [lists]) for c in field.contenders()}
    times = field.alternate(samplers, seconds)
    verified = {name: check is True for name, check in checks.items()}
    return make_rows(Group(op, pattern, lists.block_bytes, lists.num_blocks), times, verified)


def _move_verified(contender: Contender, op: str, lists: BlockLists) -> bool:
    contender.clear(op)
    contender.move_each(op, [lists])
    return contender.verify(op, lists)


def _measure_latency(plan: Plan, field: Field, results: Results, progress: Progress) -> None:
    for block_bytes in LATENCY_BLOCK_BYTES:
        progress(f"latency of one block of {block_bytes} bytes")
        results.latency.extend(measure_latency(field, block_bytes, plan.seconds))


def measure_latency(field: Field, block_bytes: int, seconds: float) -> list[LatencyRow]:
    """Pull blocks at random places one at a time, again and again. One row per contender that is no reference."""
    lists = make_lists("random", block_bytes, _LATENCY_BLOCKS * block_bytes)
    singles = [single_block(lists, i) for i in range(lists.num_blocks)]
    contenders = field.contenders(*OUR_NAMES, *PEERS)
    prepare(field, contenders, lists)
    for contender in contenders:  # the first one looks the cache up at the peer
        field.ask(contender, functools.partial(contender.move_each, PULL, singles))
    samplers = {
        c.name: functools.partial(c.move_each, PULL, singles, _LATENCY_REPEATS)
        for c in field.contenders(*OUR_NAMES, *PEERS)
    }
    return [_latency(name, block_bytes, times) for name, times in field.alternate(samplers, seconds).items()]


def _latency(name: str, block_bytes: int, times: Sequence[float]) -> LatencyRow:
    samples_us = sorted(1e6 * seconds for seconds in times)
    p99_us = samples_us[int(0.99 * len(samples_us))]
    return LatencyRow(name, block_bytes, statistics.median(samples_us), p99_us)


def _measure_links(plan: Plan, field: Field, results: Results, progress: Progress) -> None:
    for contender in field.contenders():
        if isinstance(contender, BackendContender):
            progress(f"linking {contender.name}")
            median_ms = field.ask(contender, functools.partial(_median_link_ms, contender, plan.seconds))
            if median_ms is not None:
                results.link_ms[contender.name] = median_ms


def _median_link_ms(contender: BackendContender, seconds: float) -> float:
    samples_ms: list[float] = []
    stop_s = time.perf_counter() + seconds
    while len(samples_ms) < MAX_LINKS and (time.perf_counter() < stop_s or len(samples_ms) < MIN_ROUNDS):
        contender.unlink()
        samples_ms.append(1e3 * contender.link_s())
    return statistics.median(samples_ms)
