# SPDX-License-Identifier: Apache-2.0
"""python -m connector.tests.simulation --schedules 100000 --jobs N      (nightly)
python -m connector.tests.simulation --seed N                           (one schedule again, with its trace)

From the repository's root. The exit status is 1 if an invariant did not hold; the seed and the end of the trace are
printed. `--first` is the first seed, and `--trace` how many lines of a trace are shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pool

from .coverage import Row, all_rows, counting
from .schedule import Outcome, Schedule, run_schedule
from .world import Violation

_BATCH = 250


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Batch:
    """What a run of consecutive seeds came to. Travels between processes."""

    def __init__(self, first: int, count: int) -> None:
        self.num_schedules = count
        self.outcomes: list[Outcome] = []
        self.violations: dict[int, str] = {}
        with counting() as met:
            for seed in range(first, first + count):
                try:
                    self.outcomes.append(run_schedule(seed))
                except Violation as violation:
                    self.violations[seed] = str(violation)
        self.met: set[Row] = set(met)


def _batch(span: tuple[int, int]) -> Batch:
    return Batch(*span)


def _batches(first: int, count: int, num_jobs: int) -> Iterator[Batch]:
    spans = [(seed, min(_BATCH, first + count - seed)) for seed in range(first, first + count, _BATCH)]
    if num_jobs == 1:
        yield from map(_batch, spans)
        return
    with Pool(num_jobs) as pool:
        yield from pool.imap_unordered(_batch, spans)


def run_many(first: int, count: int, num_jobs: int) -> int:
    """How many seeds violated an invariant."""
    started_s, done, failed = time.monotonic(), 0, 0
    met: set[Row] = set()
    totals = dict.fromkeys(("num_events", "num_requests", "num_loads", "num_failed", "num_crashes"), 0)
    for batch in _batches(first, count, num_jobs):
        done += batch.num_schedules
        failed += len(batch.violations)
        met |= batch.met
        for name in totals:
            totals[name] += sum(getattr(outcome, name) for outcome in batch.outcomes)
        for seed, text in batch.violations.items():
            _say(f"\nseed {seed}: {text}\n  again: python -m connector.tests.simulation --seed {seed}")
        rate = done / (time.monotonic() - started_s)
        sys.stderr.write(f"\r{done}/{count} schedules, {failed} violations, {rate:.0f}/s")
        sys.stderr.flush()
    sys.stderr.write("\n")
    _say(f"{done} schedules from seed {first} on, {failed} violations; {totals}")
    _say(f"rows of the tables met: {len(met & all_rows())} of {len(all_rows())}")
    return failed


def replay(seed: int, trace_length: int) -> int:
    """One schedule, with its trace. 1 if an invariant does not hold."""
    schedule = Schedule(seed, trace_length)
    try:
        outcome = schedule.run()
    except Violation as violation:
        _say(schedule.world.trace())
        _say(f"seed {seed}: {violation}")
        return 1
    _say(schedule.world.trace())
    _say(f"seed {seed}: {outcome}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", type=int, default=120)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed, options.trace)
    return 1 if run_many(options.first, options.schedules, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
