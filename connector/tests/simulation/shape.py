# SPDX-License-Identifier: Apache-2.0
"""How an engine is set up, for all its incarnations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    load_timeout_s: float
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
    stops: float
    preempts: float
