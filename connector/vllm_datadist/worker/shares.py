# SPDX-License-Identifier: Apache-2.0
"""Which of P's workers a worker of D needs, from the ticket alone: before any link, and the same at all of D's workers.

A ticket names P's workers with their ranks and the first layer of their pipeline stage. A worker of D needs, of each
layer it has, the stage of P that has it too, and there the ranks that hold its heads: `topology.holder_for`, of several
holders of a head one. Layers may differ in their number of heads, and so in the ranks of P they come from; every worker
of D therefore knows those of D's other stages too (`Description.model_layers`). So all of them come to the same count
of how many of them will read from each worker of P, which P is told with each release; and which of P's workers nobody
reads: those are let go by one worker of D each.

Whether a worker of P really has the layers and heads that it is asked for shows when it is linked: `check_brings`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..description import Description, Incompatible
from ..handoff.desk import Source, Sources
from ..messages import Endpoint, RemoteLease
from .planner import PairPlan
from .topology import Held, ModelLayer, PlanError, first_head, heads_text, held_layers, holder_for

#: Engines that are remembered; more are forgotten all at once.
MAX_ENGINES = 256


class SourceBook:
    """`find_sources` of one worker, each engine's found once. Thread-safe."""

    def __init__(self, ours: Description) -> None:
        self._ours = ours
        self._lock = threading.Lock()
        self._known: dict[tuple[Endpoint, ...], Sources | str] = {}

    def find(self, workers: tuple[Endpoint, ...]) -> Sources:
        """Raises PlanError."""
        with self._lock:
            known = self._known.get(workers)
        if known is None:
            known = self._find(workers)
            with self._lock:
                if len(self._known) >= MAX_ENGINES:
                    self._known.clear()
                self._known[workers] = known
        if isinstance(known, str):
            raise PlanError(known)
        return known

    def _find(self, workers: tuple[Endpoint, ...]) -> Sources | str:
        """Or why there are none: a ticket that does not fit may come often."""
        try:
            return find_sources(self._ours, workers)
        except PlanError as error:
            return str(error)

    def find_for(self, remote: RemoteLease) -> Sources:
        """For the engine that gave that lease. Raises PlanError."""
        return self.find(remote.workers)


def find_sources(ours: Description, workers: Sequence[Endpoint]) -> Sources:
    """This worker's share of P's `workers`.

    Raises:
        PlanError: nobody can say which ranks of P hold our heads, or there are more ranks than workers.
    """
    layers = _layers_of(ours)
    if not layers:
        return Sources(())  # and what the others read is not known here
    _check_ranks(workers)
    tp_size = _tp_size(workers)
    by_stage = {
        pp_rank: _readers_by_rank(stage, ours, layers, tp_size) for pp_rank, stage in _stages_of(workers).items()
    }
    readers = {worker: by_stage[worker.pp_rank].get(worker.tp_rank, frozenset()) for worker in workers}
    us = _Place(ours.pp_rank, ours.tp_rank)
    read = tuple(Source(worker, len(places)) for worker, places in readers.items() if us in places)
    _check_complete(ours, workers, read)
    unread = [worker for worker, places in readers.items() if not places]
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
    tp_size, stages = _tp_size(workers), _stages_of(workers)
    for held in held_layers(ours.caches):
        index = layer_index(held.layer.layer_name)
        holding = {pp_rank for pp_rank, stage in stages.items() if stage.start <= index < stage.end}
        ranks = {source.endpoint.tp_rank for source in read if source.endpoint.pp_rank in holding}
        missing = {_rank_for(head, held, ours, tp_size) for head in held.layer.heads} - ranks
        if missing:
            raise PlanError(
                f"layer {held.layer.layer_name}: the ticket names no worker of tp_rank {min(missing)} for it; it has "
                + ", ".join(f"(pp_rank {w.pp_rank}, tp_rank {w.tp_rank})" for w in workers[:8])
            )


def check_brings(ours: Description, endpoint: Endpoint, workers: Sequence[Endpoint], plan: PairPlan) -> None:
    """Raise Incompatible unless that worker of P brings us all that `find_sources` expects from it."""
    tp_size, stage = _tp_size(workers), _stages_of(workers)[endpoint.pp_rank]
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


# --- readers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a worker of ours."""

    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class _Heads:
    """How one kind of layer is cut at D: each of its ranks holds `num_heads` of `total_heads`; 0 = not known which."""

    num_heads: int
    total_heads: int


def _layers_of(ours: Description) -> tuple[ModelLayer, ...]:
    """Of all our stages."""
    if ours.model_layers:
        return ours.model_layers
    here = (held.layer for held in held_layers(ours.caches))
    return tuple({ModelLayer(layer_index(one.layer_name), one.rank_heads, one.total_heads) for one in here})


def _readers_by_rank(
    theirs: _Stage, ours: Description, layers: Sequence[ModelLayer], tp_size: int
) -> Mapping[int, frozenset[_Place]]:
    """By rank of P in one of its stages: all workers of ours that read from it, a head of a layer of that stage."""
    found: dict[int, set[_Place]] = {}
    for pp_rank, mine in enumerate(_stages(ours.stages)):
        start, end = max(theirs.start, mine.start), min(theirs.end, mine.end)
        for kind in {_Heads(one.rank_heads, one.total_heads) for one in layers if start <= one.number < end}:
            for source, readers in _ranks_by_source(kind, ours.tp_size, ours.dp_rank, tp_size).items():
                found.setdefault(source, set()).update(_Place(pp_rank, rank) for rank in readers)
    return {rank: frozenset(places) for rank, places in found.items()}


@lru_cache(maxsize=256)
def _ranks_by_source(kind: _Heads, our_size: int, dp_rank: int, tp_size: int) -> Mapping[int, Sequence[int]]:
    """By rank of P, of `tp_size`: which of our ranks have heads of such a layer from it."""
    found: dict[int, list[int]] = {}
    for rank in range(our_size):
        for source in sorted({*_ranks_for(kind, rank, our_size, dp_rank, tp_size)}):
            found.setdefault(source, []).append(rank)
    return found


def _ranks_for(kind: _Heads, rank: int, our_size: int, dp_rank: int, tp_size: int) -> Iterator[int]:
    if kind.total_heads == 0:
        yield rank
        return
    first = first_head(kind.num_heads, kind.total_heads, rank, our_size)
    for head in range(first, first + kind.num_heads):
        yield _holder(head, kind, rank, our_size, dp_rank, tp_size)


def _rank_for(head: int, held: Held, ours: Description, tp_size: int) -> int:
    kind = _Heads(held.layer.rank_heads, held.layer.total_heads)
    if kind.total_heads == 0:
        return ours.tp_rank
    return _holder(head, kind, ours.tp_rank, ours.tp_size, ours.dp_rank, tp_size)


def _holder(head: int, kind: _Heads, rank: int, our_size: int, dp_rank: int, tp_size: int) -> int:
    """The rank of P that gives our rank `rank` this head."""
    theirs = kind.num_heads if kind.num_heads == kind.total_heads and our_size > 1 else 0
    num_heads = theirs or max(1, kind.total_heads // tp_size)
    found = holder_for(head, num_heads, kind.total_heads, tp_size, dp_rank * our_size + rank)
    if found is None or (kind.total_heads % tp_size and tp_size % kind.total_heads):
        raise PlanError(
            f"tp_size is {our_size} here and {tp_size} at the peer: {kind.total_heads} KV heads cannot be cut for "
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


def _stages_of(workers: Sequence[Endpoint]) -> Mapping[int, _Stage]:
    """By pp_rank of P."""
    first_layers = {one.pp_rank: one.first_layer for one in workers}
    ranks = sorted(first_layers)
    return dict(zip(ranks, _stages([first_layers[rank] for rank in ranks]), strict=True))


def _tp_size(workers: Sequence[Endpoint]) -> int:
    return 1 + max(worker.tp_rank for worker in workers)
