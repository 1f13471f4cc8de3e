# SPDX-License-Identifier: Apache-2.0
"""How an engine is set up, for all its incarnations; and who holds which heads, in engines of different shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
