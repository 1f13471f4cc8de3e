# SPDX-License-Identifier: Apache-2.0
"""The measuring itself. No clock decides anything here but when to stop.

Within a group (one operation, pattern and block size) all contenders move the same lists once per round, in an order
that changes, so that a disturbance hits all of them alike and none always finds the caches as the same other one left
them. Each is first run once on cleared memory and all its bytes are checked: that also maps and touches every page.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from .blocks import CACHE_TRANSFERS, BlockLists, make_lists, single_block
from .contenders import CONTENDERS, PULL, Contender, Linking, make_contender, with_references, yardstick

MIN_ROUNDS = 3
MIN_SAMPLES = 20
MAX_SAMPLES = 20_000
MAX_LINKS = 50
LATENCY_BLOCK_BYTES = (4096, 65536)
_LATENCY_BLOCKS = 64

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; each row takes about `seconds`."""

    backends: tuple[str, ...]
    ops: tuple[str, ...]
    patterns: tuple[str, ...]
    block_bytes: tuple[int, ...]
    total_bytes: int
    seconds: float

    @property
    def cache_bytes(self) -> int:
        """Of the largest cache that any part of this needs."""
        sizes = [make_lists("contiguous", size, self.total_bytes).num_bytes for size in self.block_bytes]
        return CACHE_TRANSFERS * max(*sizes, _LATENCY_BLOCKS * max(LATENCY_BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Row:
    """Throughput of one contender. `ratio` is to `reference`, pair by pair; None for a reference itself."""

    name: str
    op: str
    block_bytes: int
    num_blocks: int
    pattern: str
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    verified: bool
    reference: str | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Time of `pull_blocks` for a single block."""

    name: str
    block_bytes: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Results:
    rows: list[Row] = field(default_factory=list)
    latency: list[LatencyRow] = field(default_factory=list)
    link_ms: dict[str, float] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        return all(row.verified for row in self.rows)


def run(plan: Plan, progress: Progress) -> Results:
    """Measure everything that `plan` names. Raises what the contenders raise; closes them in any case."""
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for name in with_references(plan.backends):
            progress(f"starting {name}")
            contender = make_contender(name, plan.cache_bytes)
            stack.callback(contender.close)
            contenders.append(contender)
        backends = [contender for contender in contenders if contender.name in CONTENDERS]
        results = Results()
        _measure_throughput(plan, contenders, results, progress)
        _measure_latency(plan, backends, results, progress)
        _measure_links(plan, backends, results, progress)
    return results


def _measure_throughput(plan: Plan, contenders: Sequence[Contender], results: Results, progress: Progress) -> None:
    num_groups = len(plan.block_bytes) * len(plan.patterns) * len(plan.ops)
    done = 0
    for block_bytes in plan.block_bytes:
        prepare(contenders, make_lists("contiguous", block_bytes, plan.total_bytes))
        for pattern in plan.patterns:
            lists = make_lists(pattern, block_bytes, plan.total_bytes)
            for op in plan.ops:
                done += 1
                progress(f"{done}/{num_groups} {op} {lists.num_blocks} x {block_bytes} bytes, {pattern}")
                results.rows.extend(measure_group(contenders, op, pattern, lists, plan.seconds))


def prepare(contenders: Sequence[Contender], lists: BlockLists) -> None:
    for contender in contenders:
        contender.prepare(lists)


def measure_group(
    contenders: Sequence[Contender], op: str, pattern: str, lists: BlockLists, seconds: float
) -> list[Row]:
    """One row per contender, in about `seconds` each. They must be prepared for lists of this shape."""
    verified = {contender.name: _move_verified(contender, op, lists) for contender in contenders}
    times = _rounds(contenders, op, lists, seconds * len(contenders))
    return [_row(c.name, op, pattern, lists, times, verified[c.name]) for c in contenders]


def _move_verified(contender: Contender, op: str, lists: BlockLists) -> bool:
    contender.clear(op)
    contender.move(op, lists)
    return contender.verify(op, lists)


def _rounds(contenders: Sequence[Contender], op: str, lists: BlockLists, seconds: float) -> dict[str, list[float]]:
    """Seconds of every move, by contender; equally many for each."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    shuffle = random.Random(0).shuffle
    order = list(contenders)
    stop_s = time.perf_counter() + seconds
    while time.perf_counter() < stop_s or len(times[order[0].name]) < MIN_ROUNDS:
        shuffle(order)
        for contender in order:
            times[contender.name].append(_timed(lambda moving=contender: moving.move(op, lists)))  # type: ignore[misc]
    return times


def _row(name: str, op: str, pattern: str, lists: BlockLists, times: dict[str, list[float]], verified: bool) -> Row:
    speeds = [lists.num_bytes / seconds / 1e9 for seconds in times[name]]
    reference = yardstick(name)
    return Row(
        name=name,
        op=op,
        block_bytes=lists.block_bytes,
        num_blocks=lists.num_blocks,
        pattern=pattern,
        gb_per_s=statistics.median(speeds),
        gb_per_s_min=min(speeds),
        gb_per_s_max=max(speeds),
        verified=verified,
        reference=reference,
        ratio=None if reference is None else _median_ratio(times[reference], times[name]),
    )


def _median_ratio(reference_s: Sequence[float], own_s: Sequence[float]) -> float:
    """How much faster than the reference; each pair was measured in the same round."""
    return statistics.median(theirs / own for theirs, own in zip(reference_s, own_s, strict=True))


def _measure_latency(plan: Plan, backends: Sequence[Contender], results: Results, progress: Progress) -> None:
    for block_bytes in LATENCY_BLOCK_BYTES:
        lists = make_lists("random", block_bytes, _LATENCY_BLOCKS * block_bytes)
        prepare(backends, lists)
        for contender in backends:
            progress(f"latency {contender.name} {block_bytes} bytes")
            results.latency.append(measure_latency(contender, lists, plan.seconds))


def measure_latency(contender: Contender, lists: BlockLists, seconds: float) -> LatencyRow:
    """Pull the blocks of `lists` one at a time, again and again."""
    singles = [single_block(lists, i) for i in range(lists.num_blocks)]
    contender.move(PULL, singles[0])  # the first one looks the cache up at the peer
    samples_us: list[float] = []
    stop_s = time.perf_counter() + seconds
    while len(samples_us) < MAX_SAMPLES and (time.perf_counter() < stop_s or len(samples_us) < MIN_SAMPLES):
        one = singles[len(samples_us) % len(singles)]
        samples_us.append(1e6 * _timed(lambda one=one: contender.move(PULL, one)))  # type: ignore[misc]
    samples_us.sort()
    return LatencyRow(
        contender.name, lists.block_bytes, statistics.median(samples_us), samples_us[int(0.99 * len(samples_us))]
    )


def _measure_links(plan: Plan, backends: Sequence[Contender], results: Results, progress: Progress) -> None:
    for contender in backends:
        if isinstance(contender, Linking):
            progress(f"linking {contender.name}")
            results.link_ms[contender.name] = _median_link_ms(contender, plan.seconds)


def _median_link_ms(contender: Linking, seconds: float) -> float:
    samples_ms: list[float] = []
    stop_s = time.perf_counter() + seconds
    while len(samples_ms) < MAX_LINKS and (time.perf_counter() < stop_s or len(samples_ms) < MIN_ROUNDS):
        contender.unlink()
        samples_ms.append(1e3 * _timed(contender.link))
    return statistics.median(samples_ms)


def _timed(action: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s
