# SPDX-License-Identifier: Apache-2.0
"""Where a worker's step begins and ends: the scheduler's work goes to the machines, their ends go back to vLLM.

The engine's thread calls it; the machines behind the three protocols run elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from datadist_core.errors import LinkFailed, LLMException

from ..messages import Endpoint, LoadJob, ReleaseJob, RemoteLease, RequestKey, StepWork


class EndLike(Protocol):
    """How a load ended."""

    @property
    def key(self) -> RequestKey: ...
    @property
    def error(self) -> LLMException | None: ...


End = TypeVar("End", bound=EndLike)
End_co = TypeVar("End_co", bound=EndLike, covariant=True)


class LeaseKeeper(Protocol):
    """P's part."""

    def open(self, key: RequestKey, lease_s: float) -> None: ...
    def take_finished(self) -> list[RequestKey]: ...


class LeaseWatcher(Protocol):
    """D's part while a request queues or loads."""

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint) -> None: ...
    def unwatch(self, key: RequestKey) -> None: ...


class Loader(Protocol[End_co]):
    """D's loads, and its releases without a load."""

    def submit_load(self, job: LoadJob, endpoint: Endpoint) -> None: ...
    def fail_load(self, job: LoadJob, error: LLMException) -> None: ...
    def submit_release(self, job: ReleaseJob, endpoint: Endpoint) -> None: ...
    def cancel(self, key: RequestKey) -> None: ...
    def take_results(self) -> Sequence[End_co]: ...


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """This worker among its engine's workers."""

    pp_rank: int
    tp_rank: int
    tp_size: int
    world_size: int

    @property
    def index(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def counts(self) -> bool:
        """Whether this worker reports what all workers see alike."""
        return self.index == 0


@dataclass(frozen=True, slots=True)
class StepEnds(Generic[End]):
    """What this worker tells vLLM: request ids, each exactly once. `failed` is part of `received`."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    loads: tuple[End, ...]


class StepDesk(Generic[End]):
    """See the module. Never waits."""

    def __init__(self, place: WorkerPlace, leases: LeaseKeeper, watcher: LeaseWatcher, loader: Loader[End]) -> None:
        self._place = place
        self._leases = leases
        self._watcher = watcher
        self._loader = loader

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler side decided."""
        for lease in work.leases:
            self._leases.open(lease.key, lease.lease_s)
        for watch in work.watches:
            endpoint = self._counterpart(watch.remote)
            if endpoint is not None:
                self._watcher.watch(watch.key, watch.remote, endpoint)
        for load in work.loads:
            self._start_load(load)
        for release in work.releases:
            self._watcher.unwatch(release.key)
            for endpoint in self._share_of(release.remote):
                self._loader.submit_release(release, endpoint)
        for key in work.ended:
            self._watcher.unwatch(key)
            self._loader.cancel(key)

    def take_ends(self) -> StepEnds[End]:
        """What has ended since the last call."""
        loads = tuple(self._loader.take_results())
        for load in loads:
            self._watcher.unwatch(load.key)
        return StepEnds(
            sent={key.request_id for key in self._leases.take_finished()},
            received={load.key.request_id for load in loads},
            failed={load.key.request_id for load in loads if load.error is not None},
            loads=loads,
        )

    def _start_load(self, load: LoadJob) -> None:
        endpoint = self._counterpart(load.remote)
        if endpoint is None:
            self._loader.fail_load(load, LinkFailed(f"P has no worker of rank {self._place.index}"))
        else:
            self._loader.submit_load(load, endpoint)

    def _counterpart(self, remote: RemoteLease) -> Endpoint | None:
        """P's worker of our rank."""
        ranks = (self._place.pp_rank, self._place.tp_rank)
        return next((worker for worker in remote.workers if (worker.pp_rank, worker.tp_rank) == ranks), None)

    def _share_of(self, remote: RemoteLease) -> tuple[Endpoint, ...]:
        """The workers of P that this worker tells; together ours tell all, also if there are more or fewer."""
        return remote.workers[self._place.index :: self._place.world_size]
