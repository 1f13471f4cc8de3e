# SPDX-License-Identifier: Apache-2.0
"""The protocol of a hand-off in random schedules (see `simulation`), and the proof that the simulation can see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from connector.tests.simulation.coverage import all_rows, counting
from connector.tests.simulation.mutation import Mutation
from connector.tests.simulation.mutations import FOUND, LOOK_FIRST, MUTATIONS
from connector.tests.simulation.schedule import Schedule, run_schedule
from connector.tests.simulation.world import Violation

ROOT = Path(__file__).parents[2]
NUM_QUICK, NUM_SCHEDULES = 100, 2000
#: A seeded bug must be seen within so many schedules.
NUM_FOR_A_MUTATION = 300
#: Rows that no schedule can meet, and why. Unit tests meet them.
NOT_MET = {
    ("lease", "open", "opened"): "P's scheduler never uses a key twice",
    ("lease", "released", "opened"): "as above",
    ("lease", "expired", "opened"): "as above",
    ("request", "queued", "the same id came again"): "vLLM refuses an id that it knows",
    ("request", "loading", "the same id came again"): "as above",
    ("request", "settled", "the same id came again"): "as above",
    ("request", "abandoned", "the same id came again"): "as above",
    ("request", "abandoned", "finished"): "vLLM finishes a request once",
    ("load", "confirming", "deadline over"): "P's UNKNOWN has to arrive between the deadline and the caller's waking",
    ("offer", "offering", "answer: unknown"): "no P of ours answers an offer with that",
    ("parts", "reported before all parts have ended", "a part ended"): "one of several parts has to end well just then",
    ("parts", "reported before all parts have ended", "a part failed"): "as above, or fail",
    # Two rare things within one send, question, or release: met by test_simulation_pushes and _machines.
    **dict.fromkeys(
        [
            ("lease", "open", "release with another number of readers"),
            ("lease", "released", "release with another number of readers"),
            ("load", "linking after the read", "deadline over"),
            ("offer", "fencing", "linked"),
            ("offer", "asking how far it is", "answer: unknown"),
            ("offer", "asking how far it is", "deadline over"),
            ("offer", "offering", "no answer in time, no matter"),
            ("offer", "queued", "cancelled"),
            ("parts", "stopping", "a part ended"),
            ("push", "all sent so far", "time of the offer over"),
            ("push", "telling the end", "the request lost its blocks"),
            ("push", "asking whether the offer stands", "link lost"),
            *(("push", "cut off, something under way", event) for event in (
                "link lost", "nothing more will come", "the request lost its blocks", "time of the offer over",
                "tokens to send", "withdrawn",
            )),
            *(("push", "failed, something under way", event) for event in (
                "link lost", "nothing more will come", "the request lost its blocks", "tokens to send",
            )),
            *(("push", "sending what is void", event) for event in (
                "link lost", "nothing more will come", "time of the offer over", "withdrawn",
            )),
            *(("push", "withdrawn, something under way", event) for event in (
                "nothing more will come", "the request lost its blocks",
            )),
        ],
        "rare",
    ),
}  # fmt: skip


def _run(first: int, count: int) -> tuple[int, int, int]:
    """(loads, failed loads, crashes) of so many schedules. A violation names its seed."""
    loads = failed = crashes = 0
    for seed in range(first, first + count):
        try:
            outcome = run_schedule(seed)
        except Violation as violation:
            pytest.fail(f"{violation}\nagain, with its trace: python -m connector.tests.simulation --seed {seed}")
        loads, failed, crashes = loads + outcome.num_loads, failed + outcome.num_failed, crashes + outcome.num_crashes
    return loads, failed, crashes


def test_100_schedules_keep_every_invariant() -> None:
    loads, failed, crashes = _run(0, NUM_QUICK)
    assert loads > 2 * NUM_QUICK
    assert failed > NUM_QUICK / 2
    assert crashes > NUM_QUICK / 10


@pytest.mark.slow
def test_2000_schedules_keep_every_invariant_and_meet_every_row() -> None:
    with counting() as met:
        _run(0, NUM_SCHEDULES)
    assert all_rows() - set(met) <= set(NOT_MET)


def test_a_seed_decides_everything() -> None:
    def story(seed: int) -> str:
        schedule = Schedule(seed, 10_000)
        schedule.run()
        return schedule.world.trace()

    assert story(5) == story(5)
    assert story(5) != story(6)


def _seen_by(mutation: Mutation, seeds: Sequence[int]) -> str:
    """The invariant by which one of these schedules sees it."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        for seed in seeds:
            try:
                run_schedule(seed, mutation.calm, mutation.pushes)
            except Violation as violation:
                return violation.invariant
    pytest.fail(f"{mutation.name}: not seen in {len(seeds)} schedules: the simulation is too weak")


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_seeded_bug_is_seen(mutation: Mutation) -> None:
    """Each by an invariant that `MUTATIONS` names for it: the table of what sees what."""
    hint = LOOK_FIRST.get(mutation.name, 0)
    assert hint < NUM_FOR_A_MUTATION
    assert _seen_by(mutation, [hint, *range(NUM_FOR_A_MUTATION)]) in mutation.invariants


FOUND_MUTATIONS = [one for one in MUTATIONS if one.name in FOUND]


@pytest.mark.parametrize("mutation", FOUND_MUTATIONS, ids=lambda one: one.name)
def test_a_fault_that_was_found_stays_mended(mutation: Mutation) -> None:
    """Each was in the code once; its seed shows it again without the remedy, and nothing with it."""
    seed = FOUND[mutation.name]
    assert _seen_by(mutation, [seed]) in mutation.invariants
    run_schedule(seed, mutation.calm, mutation.pushes)


@pytest.mark.slow
def test_the_command_prints_the_seed_of_a_violation_and_replays_it() -> None:
    command = [sys.executable, "-m", "connector.tests.simulation"]
    good = subprocess.run([*command, "--seed", "3"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert good.returncode == 0, good.stderr
    many = [*command, "--schedules", "20", "--jobs", "2"]
    assert subprocess.run(many, cwd=ROOT, capture_output=True, text=True, timeout=120).returncode == 0
