# SPDX-License-Identifier: Apache-2.0
"""One send's bytes: which blocks of ours go into which of D's, at once or layer by layer behind the engine.

Blocks whose tokens are all computed go with one `push_blocks` per copy of the plan. Those that this very step computes
follow layer by layer, all copies side by side, with `transfer_cache_async`. What is not complete yet is left to
the send that completes them, unless D wants no more tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from datadist_core import Cache, CacheTask
from datadist_core.errors import CacheNotExist, LLMException, TimedOut

from .. import trace
from ..description import Description
from ..messages import Offer, Table
from .layer_sync import CacheLayers, StepLayers
from .load_book import LayerSpans
from .node import DataDistNode
from .planner import BlockCopy, BlockPairs, PairPlan, plan_pair
from .pulls import Moved, RegisteredCache
from .pushes import PushTask

#: Copies that follow the engine side by side, each in a thread of its own; more take turns in one.
MAX_TASKS = 8


@dataclass(frozen=True, slots=True)
class _Ready:
    """What does not change as long as D's worker says the same of itself.

    `granule`: sends begin and end at multiples of it, so that no page is cut.
    """

    theirs: Description
    plan: PairPlan
    granule: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One copy of the plan, and its pages of this send."""

    copy: BlockCopy
    cache: Cache
    pairs: BlockPairs

    @property
    def layer_bytes(self) -> int:
        """Of one tensor."""
        slices = self.copy.slices
        per_page = self.cache.cache_desc.shape[1] if slices is None else sum(part.num_bytes for part in slices)
        return len(self.pairs.source) * int(per_page)


class BlockPusher:
    """Thread-safe.

    Args:
        ours: this worker, as peers see it.
        description_of: what D's worker has said of itself when it linked. None: it has not.
    """

    def __init__(
        self,
        node: DataDistNode,
        caches: Sequence[RegisteredCache],
        ours: Description,
        description_of: Callable[[int], Description | None],
    ) -> None:
        self._node = node
        self._caches = {one.description.model_id: one.cache for one in caches}
        self._ours = ours
        self._description_of = description_of
        self._ready: dict[int, _Ready] = {}

    def forget(self, cluster_id: int) -> None:
        """The link to that worker is gone."""
        self._ready.pop(cluster_id, None)

    def why_unfit(self, cluster_id: int, offer: Offer) -> str:
        """Why the offer's tables cannot take all its tokens; "" if they can, or if D has not said how large its blocks
        are. Groups that keep no more than a window, or a state, may leave blocks out."""
        theirs = self._description_of(cluster_id)
        for cache in [] if theirs is None else theirs.caches:
            if cache.is_state or cache.window is not None or cache.chunk is not None:
                continue
            table = offer.block_ids[cache.group] if cache.group < len(offer.block_ids) else ()
            if len(table) * cache.block_tokens < offer.end_token:
                return (
                    f"the table of KV cache group {cache.group} has {len(table)} blocks of {cache.block_tokens} tokens,"
                    f" too few for {offer.end_token} tokens"
                )
        return ""

    def move(self, task: PushTask) -> list[Moved]:
        """See `pushes.Mover`."""
        ready = self._made_ready(task.cluster_id)
        targets = [tuple(block or None for block in table) for table in task.offer.block_ids]
        begin, between, end = _bounds(task, ready.granule)
        at_once = self._parts(ready.plan, task.send.tables, targets, begin, between)
        following = self._parts(ready.plan, task.send.tables, targets, between, end)
        moved = [self._push(part, part.copy.source_tensors, task) for part in at_once]
        if task.computing is not None and following:
            moved += self._follow(following, task.computing.step, task)
        return moved

    def _made_ready(self, cluster_id: int) -> _Ready:
        theirs = self._description_of(cluster_id)
        if theirs is None:
            raise CacheNotExist(f"cluster {cluster_id} has not described its KV cache")
        known = self._ready.get(cluster_id)
        if known is not None and known.theirs is theirs:
            return known
        plan = plan_pair(self._ours, theirs, by_layer=True)
        ready = self._ready[cluster_id] = _Ready(theirs, plan, lcm(1, *(meeting.period for meeting in plan.meetings)))
        return ready

    def _parts(
        self, plan: PairPlan, sources: Sequence[Table], targets: Sequence[Table], first_token: int, end_token: int
    ) -> list[_Part]:
        if first_token >= end_token:
            return []
        return [
            _Part(copy, self._caches[copy.source_model_id], move.pairs)
            for move in plan.moves(sources, targets, first_token, end_token)
            for copy in plan.meetings[move.meeting].copies
        ]

    def _push(self, part: _Part, tensors: range, task: PushTask) -> Moved:
        """These tensors, now."""
        if task.deadline.expired or not task.is_wanted():
            raise TimedOut("the time of the offer is over, or it is not wanted any more")
        begun_s = time.monotonic()
        report = self._node.push(
            task.cluster_id,
            part.copy,
            tensors,
            part.cache,
            part.pairs,
            task.deadline.remaining_s(),
            task.send.link_id,
        )
        trace.record(
            "transfer", task.transfer_id, begun_s, time.monotonic(), "transfers", mode="push", peer=task.peer,
            backend=report.backend, num_bytes=report.num_bytes,
        )  # fmt: skip
        return Moved(report.num_bytes, report.backend, report.seconds)

    # --- behind the engine ------------------------------------------------------------------------------------

    def _follow(self, parts: Sequence[_Part], step: StepLayers, task: PushTask) -> list[Moved]:
        if len(parts) > MAX_TASKS:
            return self._follow_in_turns(parts, step, task)
        backend = self._node.backend_of(task.cluster_id)
        spans = [LayerSpans(task.transfer_id, task.peer, backend, part.layer_bytes) for part in parts]
        tasks: list[CacheTask] = []
        try:
            for part, span in zip(parts, spans, strict=True):
                names = part.copy.layer_names
                layers = CacheLayers(step, part.copy.source_tensors, names, task.is_wanted, task.deadline, span)
                where = part.cache, part.pairs, task.send.link_id
                tasks.append(self._node.push_layers(task.cluster_id, part.copy, layers, *where))
        finally:
            errors = [error for one in tasks for error in _await(one)]
        if errors:
            raise errors[0]
        for span in spans:
            span.end()
        return [
            Moved(part.layer_bytes * len(part.copy.source_tensors), backend, span.seconds)
            for part, span in zip(parts, spans, strict=True)
        ]

    def _follow_in_turns(self, parts: Sequence[_Part], step: StepLayers, task: PushTask) -> list[Moved]:
        """Layers that lie in one tensor, say: a copy for each."""
        moved = []
        for part in parts:
            for index, name in enumerate(part.copy.layer_names):
                if not step.wait(name, task.deadline.timeout()):
                    raise TimedOut(f"layer {name} was not computed")
                tensor = part.copy.source_tensors.start + index
                moved.append(self._push(part, range(tensor, tensor + 1), task))
        return moved


def _bounds(task: PushTask, granule: int) -> tuple[int, int, int]:
    """(first token, first token that this step computes, end): what lies between two of them is sent alike."""
    send, offer = task.send, task.offer
    end = send.end_token if send.end_token >= offer.end_token else send.end_token - send.end_token % granule
    begin = max(offer.first_token, send.first_token - send.first_token % granule)
    if task.computing is None:
        return begin, end, end
    between = task.computing.first_token - task.computing.first_token % granule
    return begin, min(max(between, begin), end), end


def _await(task: CacheTask) -> list[LLMException]:
    """Its errors, when nothing of it is under way any more: each of its own waits ends by the offer's deadline, or by
    the core's time for one layer."""
    task.synchronize(None)
    return [error for error in task.errors if error is not None]
