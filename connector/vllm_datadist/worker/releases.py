# SPDX-License-Identifier: Apache-2.0
"""D's releases without a load: P's workers are told that nothing is needed (any more).

A P that cannot be reached, or does not answer, must not keep the others waiting: a release holds a thread for its call
only, not while a link is made, and there is one call at a time to each worker of P. P may not have opened the lease yet
when D already needs nothing: it says UNKNOWN, and would hold the blocks for the whole lease if D left it at that. So D
asks again, less and less often, until the lease would be over.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from datadist_core.errors import LLMException
from datadist_core.types import Deadline

from ..description import Incompatible
from ..messages import Endpoint, LeaseState, ReleaseJob
from .later import WorkPool
from .lease_calls import LeaseCalls
from .peer_pool import PeerPool
from .peers import Peer, PeerDirectory

#: Calls at the same time, each as long as P waits for a lease to be opened; and to one worker of P.
NUM_THREADS, CALLS_PER_PEER = 4, 1
#: Between two releases of a lease that P does not know yet: the first, doubled each time, the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class _Release:
    """`until_s`: when the lease would be over, had P opened it when this was given."""

    job: ReleaseJob
    endpoint: Endpoint
    num_readers: int
    until_s: float
    pause_s: float = FIRST_PAUSE_S
    is_first: bool = True


class ReleaseRunner:
    """Thread-safe."""

    def __init__(self, peers: PeerDirectory, leases: LeaseCalls, link_timeout_s: float, log: logging.Logger) -> None:
        self._peers = peers
        self._leases = leases
        self._link_timeout_s = link_timeout_s
        self._log = log
        # Nearly every engine needs them sooner or later: so the number of threads says nothing of what was released.
        self._calls = PeerPool("release", NUM_THREADS, CALLS_PER_PEER, log, starts_now=True)
        self._later = WorkPool("release-later", 1, log, starts_now=True)

    def submit(self, job: ReleaseJob, endpoint: Endpoint, num_readers: int) -> None:
        """Tell that worker of P that nothing is needed, one of so many workers of ours that do. Never waits."""
        self._begin(_Release(job, endpoint, num_readers, time.monotonic() + job.remote.lease_s))

    def close(self, timeout_s: float) -> None:
        """End all threads. Idempotent."""
        deadline = Deadline.after(timeout_s)
        self._later.close(deadline.remaining_s())
        self._calls.close(deadline.remaining_s())

    def _begin(self, release: _Release) -> None:
        future = self._peers.prepare(release.endpoint)
        # What is asked again, in vain maybe, has a turn of its own: a call may last as long as P waits for the lease.
        turn = release.endpoint.cluster_id if release.is_first else -release.endpoint.cluster_id
        future.add_done_callback(lambda done: self._calls.now(turn, lambda: self._linked(release, done)))

    def _linked(self, release: _Release, future: Future[Peer]) -> None:
        if not release.is_first and time.monotonic() > release.until_s:
            return
        error = future.exception()
        if isinstance(error, LLMException) and not isinstance(error, Incompatible):
            self._not_told(release, error)
            return
        try:
            state = self._ask(release)
        except LLMException as failure:
            self._not_told(release, failure)
            return
        if state is LeaseState.UNKNOWN:
            self._ask_later(release)

    def _ask(self, release: _Release) -> LeaseState:
        job, endpoint = release.job, release.endpoint
        deadline = Deadline.after(self._link_timeout_s)
        with self._peers.linked(endpoint, deadline):
            [state] = self._leases.release(endpoint, [job.remote.key], job.key, deadline, release.num_readers)
        return state

    def _ask_later(self, release: _Release) -> None:
        next_s = time.monotonic() + release.pause_s
        if next_s < release.until_s:
            again = replace(release, pause_s=min(LONGEST_PAUSE_S, 2 * release.pause_s), is_first=False)
            self._later.at(next_s, lambda: self._begin(again))

    def _not_told(self, release: _Release, error: LLMException) -> None:
        self._log.info(
            "request %s: P was not told that nothing is needed (%s); its lease ends by itself",
            release.job.key.request_id,
            error,
        )
