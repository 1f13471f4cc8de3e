# SPDX-License-Identifier: Apache-2.0
"""The bytes of one part of a load: what comes from one worker of P. Planned once per link, then pulled.

With the setting `integrity` a pull also has checksums made at both ends, and fails where they differ. P makes its own
before the pull returns, and so before D asks it to release the lease: an answer HELD then proves that P's memory was
held while they were made too, just as it does for the reading itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from datadist_core import Cache
from datadist_core.errors import TimedOut
from datadist_core.types import Deadline

from ..description import CacheDescription, Description
from ..messages import Endpoint, LoadJob
from .copies import BlockCopy
from .node import DataDistNode, Pull
from .peers import Peer
from .shares import check_brings


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


@dataclass(frozen=True, slots=True)
class _Ready:
    """What does not change as long as a link lasts and tickets say the same. `pulls`: of each of the plan's meetings.

    `endpoint`: the peer, as a ticket names it; the link may have been made with what another one says of its ranks.
    """

    endpoint: Endpoint
    workers: tuple[Endpoint, ...]
    pulls: tuple[tuple[Pull, ...], ...]


class BlockPuller:
    """Thread-safe.

    Args:
        ours: this worker, as peers see it.
    """

    def __init__(self, node: DataDistNode, caches: Sequence[RegisteredCache], ours: Description) -> None:
        self._node = node
        self._ours = ours
        self._caches = {one.description.model_id: one.cache for one in caches}
        self._ready: WeakKeyDictionary[Peer, _Ready] = WeakKeyDictionary()

    def pull(self, peer: Peer, endpoint: Endpoint, job: LoadJob, deadline: Deadline) -> list[Moved]:
        """All that `job` needs of this peer. Returns when it is there; after an error the blocks are undefined.

        Args:
            endpoint: this peer in the job's ticket.
        """
        ready = self._made_ready(peer, endpoint, job.remote.workers)
        sources, targets = [tables.source for tables in job.groups], [tables.target for tables in job.groups]
        moved = []
        for move in peer.plan.moves(sources, targets, job.first_token, job.end_token):
            for pull in ready.pulls[move.meeting]:
                if deadline.expired:
                    raise TimedOut("no time is left for the transfer")
                report = self._node.pull(pull, move.pairs, deadline.remaining_s())
                moved.append(Moved(report.num_bytes, report.backend, report.seconds))
        return moved

    def _made_ready(self, peer: Peer, endpoint: Endpoint, workers: tuple[Endpoint, ...]) -> _Ready:
        """Raises Incompatible for a peer that does not have what its ticket says."""
        known = self._ready.get(peer)
        if known is not None and known.endpoint == endpoint and known.workers == workers:
            return known
        check_brings(self._ours, endpoint, workers, peer.plan)
        pulls = tuple(tuple(self._pull(peer, copy) for copy in meeting.copies) for meeting in peer.plan.meetings)
        ready = self._ready[peer] = _Ready(endpoint, workers, pulls)
        return ready

    def _pull(self, peer: Peer, copy: BlockCopy) -> Pull:
        return self._node.prepare(peer.endpoint.cluster_id, copy, self._caches[copy.target_model_id])
