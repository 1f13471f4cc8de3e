# SPDX-License-Identifier: Apache-2.0
"""How an engine is set up, for all its incarnations; and who holds which heads, in engines of different shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

#: KV heads of the model. Engines with more workers than that hold each head several times.
NUM_HEADS = 2


@dataclass(frozen=True)
class Limits:
    load_timeout_s: float
    push_timeout_s: float
    link_timeout_s: float
    num_threads: int
    max_remembered: int


@dataclass
class EngineShape:
    """`stops`: chance that a step is held up for seconds. `takes_last`: the free list gives away what came last."""

    num_blocks: int
    tp_size: int
    lease_s: float
    limits: Limits
    recomputes: bool
    caches_prefixes: bool
    takes_last: bool
    max_running: int
    aborts_at_once: bool
    step_s: float
    idle_step_s: float
    step_tokens: int
    stops: float
    preempts: float


def any_shape(rng: Random, lease_s: float, tp_sizes: Sequence[int], is_calm: bool) -> EngineShape:
    return EngineShape(
        # With few blocks P and D may wait for each other until a lease or a deadline ends it: that is not calm.
        num_blocks=96 if is_calm else rng.choice((10, 16, 32)),
        tp_size=rng.choice(tp_sizes),
        lease_s=lease_s,
        limits=_any_limits(rng, is_calm),
        recomputes=rng.random() < 0.6,
        caches_prefixes=rng.random() < 0.5,
        takes_last=rng.random() < 0.7,
        max_running=rng.choice((1, 2, 4)),
        aborts_at_once=rng.random() < 0.5,
        step_s=rng.choice((0.01, 0.05, 0.15)),
        idle_step_s=rng.choice((0.06, 0.1 if is_calm else 0.25)),
        step_tokens=rng.choice((3, 5, 16)),
        stops=0.0 if is_calm else rng.choice((0.0, 0.01, 0.1)),
        preempts=rng.choice((0.0, 0.05, 0.2)),
    )


def _any_limits(rng: Random, is_calm: bool) -> Limits:
    if is_calm:
        return Limits(300.0, 300.0, 10.0, rng.choice((1, 2)), 4096)
    push_timeout_s = rng.choice((2.0, 6.0, 20.0))
    return Limits(
        rng.choice((1.0, 3.0, 12.0)), push_timeout_s, rng.choice((1.0, 4.0)), rng.choice((1, 2)), rng.choice((1, 4096))
    )


@cache
def heads_of(rank: int, tp_size: int) -> range:
    """The heads that a worker holds."""
    if tp_size > NUM_HEADS:
        head = rank * NUM_HEADS // tp_size
        return range(head, head + 1)
    count = NUM_HEADS // tp_size
    return range(rank * count, (rank + 1) * count)


@cache
def sources_of(rank: int, tp_size: int, remote_tp_size: int) -> tuple[int, ...]:
    """The workers of P that a worker of D needs: for each head one of those that hold it."""
    chosen = set()
    for head in heads_of(rank, tp_size):
        holders = [other for other in range(remote_tp_size) if head in heads_of(other, remote_tp_size)]
        chosen.add(holders[rank % len(holders)])
    return tuple(sorted(chosen))


@cache
def num_readers(remote_rank: int, tp_size: int, remote_tp_size: int) -> int:
    """How many workers of D need that worker of P."""
    return sum(remote_rank in sources_of(rank, tp_size, remote_tp_size) for rank in range(tp_size))
