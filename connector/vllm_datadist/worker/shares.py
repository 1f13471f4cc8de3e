# SPDX-License-Identifier: Apache-2.0
"""Which of P's workers a worker of D needs, from the ticket alone: before any link, and the same at all of D's workers.

A ticket names P's workers with their ranks and the first layer of their pipeline stage. A stage of D needs the stages
of P that have layers of its own; within each the ranks that hold its heads: `topology.holder_for`, of several holders
of a head one. So every worker of D knows for each worker of P how many of D's workers will read from it, which P is
told with each release; and which of P's workers nobody reads: those are let go by one worker of D each.

Whether a worker of P really has the layers and heads that it is asked for shows when it is linked: `check_brings`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..description import Description, Incompatible
from ..handoff.desk import Source, Sources
from ..messages import Endpoint, RemoteLease
from .planner import PairPlan
from .topology import Held, PlanError, first_head, heads_text, held_layers, holder_for

#: Engines that are remembered; more are forgotten all at once.
MAX_ENGINES = 256


class SourceBook:
    """`find_sources` of one worker, each engine's found once. Thread-safe."""

    def __init__(self, ours: Description) -> None:
        self._ours = ours
        self._lock = threading.Lock()
        self._known: dict[tuple[Endpoint, ...], Sources] = {}

    def find(self, workers: tuple[Endpoint, ...]) -> Sources:
        """Raises PlanError."""
        with self._lock:
            known = self._known.get(workers)
        if known is not None:
            return known
        found = find_sources(self._ours, workers)
        with self._lock:
            if len(self._known) >= MAX_ENGINES:
                self._known.clear()
            self._known[workers] = found
        return found

    def find_for(self, remote: RemoteLease) -> Sources:
        """For the engine that gave that lease. Raises PlanError."""
        return self.find(remote.workers)


@dataclass(frozen=True, slots=True)
class _Heads:
    """How one kind of layer is cut at D: each of its ranks holds `num_heads` of `total_heads`; 0 = not known which."""

    num_heads: int
    total_heads: int


def find_sources(ours: Description, workers: Sequence[Endpoint]) -> Sources:
    """This worker's share of P's `workers`.

    Raises:
        PlanError: nobody can say which ranks of P hold our heads, or there are more ranks than workers.
    """
    if not any(cache.layers for cache in ours.caches):
        return Sources(())  # and what the others read is not known here
    _check_ranks(workers)
    tp_size = 1 + max(worker.tp_rank for worker in workers)
    readers = [_ranks_read_by(rank, ours, tp_size) for rank in range(ours.tp_size)]
    stages_of = {worker: _stages_with(worker, ours, workers) for worker in workers}
    read = tuple(
        Source(worker, len(stages_of[worker]) * sum(worker.tp_rank in ranks for ranks in readers))
        for worker in workers
        if ours.pp_rank in stages_of[worker] and worker.tp_rank in readers[ours.tp_rank]
    )
    _check_complete(ours, workers, read)
    unread = [w for w in workers if not stages_of[w] or not any(w.tp_rank in ranks for ranks in readers)]
    index, count = ours.pp_rank * ours.tp_size + ours.tp_rank, ours.pp_size * ours.tp_size
    return Sources(read, tuple(unread[index::count]))


def _check_ranks(workers: Sequence[Endpoint]) -> None:
    """Raise PlanError for ranks that so many workers cannot have: what follows takes time for each rank there is."""
    for name, ranks in (("tp_rank", [w.tp_rank for w in workers]), ("pp_rank", [w.pp_rank for w in workers])):
        if min(ranks, default=0) < 0 or max(ranks, default=0) >= len(workers):
            raise PlanError(
                f"P's {len(workers)} workers have {name} {min(ranks, default=0)}..{max(ranks, default=0)}; expected 0.."
                f"{len(workers) - 1} at most"
            )


def _check_complete(ours: Description, workers: Sequence[Endpoint], read: Sequence[Source]) -> None:
    """Raise PlanError unless every head of ours has a worker to come from: a ticket may name too few."""
    tp_size = 1 + max(worker.tp_rank for worker in workers)
    stages = {source.endpoint: _stage_of(source.endpoint, workers) for source in read}
    for held in held_layers(ours.caches):
        index = layer_index(held.layer.layer_name)
        ranks = {worker.tp_rank for worker, stage in stages.items() if stage.start <= index < stage.end}
        missing = {_rank_for(head, held, ours, tp_size) for head in held.layer.heads} - ranks
        if missing:
            raise PlanError(
                f"layer {held.layer.layer_name}: the ticket names no worker of tp_rank {min(missing)} for it; it has "
                + ", ".join(f"(pp_rank {w.pp_rank}, tp_rank {w.tp_rank})" for w in workers[:8])
            )


def check_brings(ours: Description, endpoint: Endpoint, workers: Sequence[Endpoint], plan: PairPlan) -> None:
    """Raise Incompatible unless that worker of P brings us all that `find_sources` expects from it."""
    tp_size = 1 + max(worker.tp_rank for worker in workers)
    stage = _stage_of(endpoint, workers)
    for held in held_layers(ours.caches):
        layer = held.layer
        if not stage.start <= layer_index(layer.layer_name) < stage.end:
            continue
        expected = [head for head in layer.heads if _rank_for(head, held, ours, tp_size) == endpoint.tp_rank]
        coming = plan.heads.get(layer.layer_name, frozenset())
        if not coming.issuperset(expected):
            raise Incompatible(
                f"layer {layer.layer_name}: heads {heads_text(expected)} should come from P's worker of pp_rank "
                f"{endpoint.pp_rank} and tp_rank {endpoint.tp_rank}, which has {heads_text(sorted(coming))} of them"
            )


def layer_index(layer_name: str) -> int:
    """The layer's number in the model: the first number in its name. 0 if there is none."""
    found = re.search(r"\d+", layer_name)
    return int(found.group()) if found else 0


# --- ranks --------------------------------------------------------------------------------------------------------


def _ranks_read_by(rank: int, ours: Description, tp_size: int) -> frozenset[int]:
    """The tp ranks of P, of `tp_size`, that our rank `rank` reads from."""
    kinds = {_Heads(held.layer.rank_heads, held.layer.total_heads) for held in held_layers(ours.caches)}
    return frozenset(read for kind in kinds for read in _ranks_for(kind, rank, ours, tp_size))


def _ranks_for(kind: _Heads, rank: int, ours: Description, tp_size: int) -> Iterator[int]:
    if kind.total_heads == 0:
        yield rank
        return
    first = first_head(kind.num_heads, kind.total_heads, rank, ours.tp_size)
    for head in range(first, first + kind.num_heads):
        yield _holder(head, kind, rank, ours, tp_size)


def _rank_for(head: int, held: Held, ours: Description, tp_size: int) -> int:
    kind = _Heads(held.layer.rank_heads, held.layer.total_heads)
    return ours.tp_rank if kind.total_heads == 0 else _holder(head, kind, ours.tp_rank, ours, tp_size)


def _holder(head: int, kind: _Heads, rank: int, ours: Description, tp_size: int) -> int:
    """The rank of P that gives our rank `rank` this head."""
    theirs = kind.num_heads if kind.num_heads == kind.total_heads and ours.tp_size > 1 else 0
    num_heads = theirs or max(1, kind.total_heads // tp_size)
    spread = ours.dp_rank * ours.tp_size + rank
    found = holder_for(head, num_heads, kind.total_heads, tp_size, spread)
    if found is None or (kind.total_heads % tp_size and tp_size % kind.total_heads):
        raise PlanError(
            f"tp_size is {ours.tp_size} here and {tp_size} at the peer: {kind.total_heads} KV heads cannot be cut for "
            f"{tp_size} ranks"
        )
    return found


# --- stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stage:
    """Layers `start` .. `end - 1`."""

    start: float
    end: float


def _stages(starts: Sequence[int]) -> list[_Stage]:
    """What is before the first or behind the last layer, such as draft layers, belongs to the first or last stage."""
    return [_Stage(start, end) for start, end in pairwise([-math.inf, *starts[1:], math.inf])]


def _stage_of(worker: Endpoint, workers: Sequence[Endpoint]) -> _Stage:
    first_layers = {one.pp_rank: one.first_layer for one in workers}
    ranks = sorted(first_layers)
    return _stages([first_layers[rank] for rank in ranks])[ranks.index(worker.pp_rank)]


def _stages_with(worker: Endpoint, ours: Description, workers: Sequence[Endpoint]) -> list[int]:
    """Our pipeline stages that have layers of that worker's stage."""
    theirs = _stage_of(worker, workers)
    return [
        rank
        for rank, mine in enumerate(_stages(ours.stages))
        if max(theirs.start, mine.start) < min(theirs.end, mine.end)
    ]
