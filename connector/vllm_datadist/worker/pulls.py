# SPDX-License-Identifier: Apache-2.0
"""One load's bytes: plan each cache against the peer's, and pull.

With the setting `integrity` a pull also has checksums made at both ends, and fails where they differ. P makes its own
before the pull returns, and so before D asks it to release the lease: an answer HELD then proves that P's memory was
held while they were made too, just as it does for the reading itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datadist_core import Cache
from datadist_core.errors import TimedOut
from datadist_core.types import Deadline

from ..description import CacheDescription
from ..messages import LoadJob
from .node import DataDistNode
from .peers import Peer
from .topology import BlockSlice, PlanError, block_slices, check_layers, moves_whole_blocks, pair_blocks


@dataclass(frozen=True, slots=True)
class RegisteredCache:
    """One of our blocks caches, as the core knows it and as peers do."""

    cache: Cache
    description: CacheDescription


@dataclass(frozen=True, slots=True)
class Moved:
    """What one pull moved."""

    num_bytes: int
    backend: str
    seconds: float


class BlockPuller:
    """Thread-safe."""

    def __init__(self, node: DataDistNode, caches: Sequence[RegisteredCache]) -> None:
        self._node = node
        self._caches = tuple(caches)

    def pull(self, peer: Peer, job: LoadJob, deadline: Deadline) -> list[Moved]:
        """All groups' blocks of `job`. Returns when they are there; after an error their content is undefined."""
        theirs = {cache.model_id: cache for cache in peer.description.caches}
        return [moved for mine in self._caches for moved in self._pull_cache(peer, mine, theirs, job, deadline)]

    def _pull_cache(
        self,
        peer: Peer,
        mine: RegisteredCache,
        theirs: dict[int, CacheDescription],
        job: LoadJob,
        deadline: Deadline,
    ) -> list[Moved]:
        ours = mine.description
        source = theirs.get(ours.model_id)
        if source is None or ours.group >= len(job.groups):
            raise PlanError(f"KV cache group {ours.group} (model_id {ours.model_id}) is not at the peer")
        tables = job.groups[ours.group]
        pairs = pair_blocks(tables.source, tables.target, ours.block_tokens, job.first_token, job.end_token)
        if not pairs.target:
            return []
        if deadline.expired:
            raise TimedOut("no time is left for the transfer")
        slices = _common_slices(source, ours)
        report = self._node.pull(
            peer.endpoint.cluster_id, ours.model_id, mine.cache, pairs, slices, deadline.remaining_s()
        )
        return [Moved(report.num_bytes, report.backend, report.seconds)]


def _common_slices(source: CacheDescription, target: CacheDescription) -> tuple[BlockSlice, ...] | None:
    """The slices of every layer's blocks, which are the same in one cache; None for whole blocks."""
    found = set()
    for theirs, ours in zip(source.layers, target.layers, strict=True):
        check_layers(theirs, ours)
        slices = block_slices(theirs, ours)
        found.add(None if moves_whole_blocks(slices, theirs, ours) else slices)
    if len(found) != 1:
        raise PlanError(f"the layers of KV cache group {target.group} need different slices: {len(found)} kinds")
    return found.pop()
