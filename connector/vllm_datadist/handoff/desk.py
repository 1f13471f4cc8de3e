# SPDX-License-Identifier: Apache-2.0
"""Where a worker's step begins and ends: the scheduler's work goes to the machines, their ends go back to vLLM.

The engine's thread calls it; the machines behind the three protocols run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from datadist_core.errors import LinkFailed, LLMException

from ..messages import (
    AnnounceJob,
    Endpoint,
    LoadJob,
    OfferJob,
    ReleaseJob,
    RemoteLease,
    RequestKey,
    StepWork,
    Watch,
    WithdrawJob,
    WorkerNotes,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A worker of P that this worker of D reads from. `num_readers`: how many of D's workers do."""

    endpoint: Endpoint
    num_readers: int


@dataclass(frozen=True, slots=True)
class Sources:
    """This worker's share of P's workers. `unread`: nobody reads those, and this worker of D lets them go."""

    read: tuple[Source, ...]
    unread: tuple[Endpoint, ...] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (*(source.endpoint for source in self.read), *self.unread)


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

    def submit_load(self, job: LoadJob, sources: Sources) -> None: ...
    def fail_load(self, job: LoadJob, error: LLMException) -> None: ...
    def submit_release(self, job: ReleaseJob, endpoint: Endpoint) -> None: ...
    def cancel(self, key: RequestKey) -> None: ...
    def take_results(self) -> Sequence[End_co]: ...


class OfferEndsLike(Protocol):
    """`settled`: jobs whose blocks nobody writes any more; each with, or after, its end."""

    @property
    def ends(self) -> Sequence[EndLike]: ...
    @property
    def settled(self) -> Sequence[RequestKey]: ...


class Offerer(Protocol):
    """D's part of a push."""

    def announce(self, job: AnnounceJob) -> None: ...
    def submit(self, job: OfferJob) -> None: ...
    def withdraw(self, job: WithdrawJob) -> None: ...
    def cancel(self, key: RequestKey) -> None: ...
    def take_ends(self) -> OfferEndsLike: ...


class Pusher(Protocol):
    """P's part of a push."""

    def begin_step(self, work: StepWork) -> None: ...


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


@dataclass(frozen=True, slots=True)
class StepEnds(Generic[End]):
    """What this worker tells vLLM: request ids, each exactly once. `failed` is part of `received`.

    Attributes:
        pushes: jobs of pushes that are in `received`.
        notes: for the scheduler side: failed pushes whose blocks may still be written, and those that are safe now.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]
    loads: tuple[End, ...]
    pushes: tuple[EndLike, ...] = ()
    notes: WorkerNotes = field(default_factory=WorkerNotes)


class StepDesk(Generic[End]):
    """See the module. Never waits.

    Args:
        find_sources: this worker's share of P's workers; None = P's worker of our rank. Raises LLMException.
    """

    def __init__(
        self,
        place: WorkerPlace,
        leases: LeaseKeeper,
        watcher: LeaseWatcher,
        loader: Loader[End],
        offers: Offerer | None = None,
        pushes: Pusher | None = None,
        find_sources: Callable[[RemoteLease], Sources] | None = None,
    ) -> None:
        self._find_sources = find_sources or self._counterpart
        self._offers = offers
        self._pushes = pushes
        self._unsettled: set[RequestKey] = set()
        self._place = place
        self._leases = leases
        self._watcher = watcher
        self._loader = loader

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler side decided."""
        for lease in work.leases:
            self._leases.open(lease.key, lease.lease_s)
        if self._pushes is not None:
            self._pushes.begin_step(work)
        if self._offers is not None:
            self._start_offers(self._offers, work)
        for watch in work.watches:
            self._start_watch(watch)
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
        notes = WorkerNotes()
        pushes = () if self._offers is None else self._take_pushes(self._offers, notes)
        ends: tuple[EndLike, ...] = (*loads, *pushes)
        for end in ends:
            self._watcher.unwatch(end.key)
        return StepEnds(
            sent={key.request_id for key in self._leases.take_finished()},
            received={end.key.request_id for end in ends},
            failed={end.key.request_id for end in ends if end.error is not None},
            loads=loads,
            pushes=pushes,
            notes=notes,
        )

    def _take_pushes(self, offers: Offerer, notes: WorkerNotes) -> tuple[EndLike, ...]:
        """Ends of pushes; those whose blocks are not safe yet are noted now, and again when they are."""
        taken = offers.take_ends()
        settled = set(taken.settled)
        for end in taken.ends:
            if end.key not in settled:
                self._unsettled.add(end.key)
                notes.note_unsettled(end.key.request_id)
        for key in settled & self._unsettled:
            self._unsettled.discard(key)
            notes.note_settled(key.request_id)
        return tuple(taken.ends)

    def _start_offers(self, offers: Offerer, work: StepWork) -> None:
        for announcement in work.announcements:
            offers.announce(announcement)
        for job in work.offers:
            offers.submit(job)
        for withdrawal in work.withdrawals:
            self._watcher.unwatch(withdrawal.key)
            offers.withdraw(withdrawal)
        for key in work.ended:
            offers.cancel(key)

    def _start_watch(self, watch: Watch) -> None:
        try:
            sources = self._find_sources(watch.remote)
        except LLMException:
            return  # the load will say so
        for endpoint in sources.endpoints:
            self._watcher.watch(watch.key, watch.remote, endpoint)

    def _start_load(self, load: LoadJob) -> None:
        release = ReleaseJob(load.key, load.remote)
        try:
            sources = self._find_sources(load.remote)
        except LLMException as error:
            self._loader.fail_load(load, error)
            unread = self._share_of(load.remote)
        else:
            self._loader.submit_load(load, sources)
            unread = sources.unread
        for endpoint in unread:
            self._loader.submit_release(release, endpoint)

    def _counterpart(self, remote: RemoteLease) -> Sources:
        """P's worker of our rank."""
        ranks = (self._place.pp_rank, self._place.tp_rank)
        found = [worker for worker in remote.workers if (worker.pp_rank, worker.tp_rank) == ranks]
        if not found:
            raise LinkFailed(f"P has no worker of rank {self._place.index}")
        return Sources((Source(found[0], 1),))

    def _share_of(self, remote: RemoteLease) -> tuple[Endpoint, ...]:
        """The workers of P that this worker tells; together ours tell all, also if there are more or fewer."""
        return remote.workers[self._place.index :: self._place.world_size]
