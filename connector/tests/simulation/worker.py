# SPDX-License-Identifier: Apache-2.0
"""One worker: the real machines and tables, driven on virtual time the way the threads drive them in production."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException, TimedOut
from vllm_datadist.handoff.desk import Source, Sources, StepDesk, StepEnds, WorkerPlace
from vllm_datadist.handoff.lease import Leases, Reader
from vllm_datadist.handoff.parts import GroupEnd
from vllm_datadist.messages import Endpoint, RequestKey, StepWork

from .loader import SimLoader
from .network import Link, LinkEnd, Network
from .offers import SimOffers
from .pusher import SimPusher
from .renewals import SimRenewals
from .shape import Limits, heads_of, num_readers, sources_of
from .truth import LeaseTruth
from .world import Clock, World

if TYPE_CHECKING:
    from .engine import Engine

ARRIVAL_WAIT_S = 2.0


class SimWorker:
    """`memory[head]` holds one tag per token, block after block: who it is the KV cache of. `truth` is what the leases
    really are.

    While it is stopped it does nothing; what happens to it meanwhile happens when it goes on.
    """

    def __init__(self, engine: Engine, place: WorkerPlace, cluster_id: int, limits: Limits, clock: Clock) -> None:
        self.engine = engine
        self.world: World = engine.world
        self.network: Network = engine.network
        self.place = place
        self.cluster_id = cluster_id
        self.limits = limits
        self.clock = clock
        self.is_alive = True
        self.is_stopped = False
        self.heads = heads_of(place.index, engine.shape.tp_size)
        self.memory = {head: [0] * (engine.block_tokens * engine.num_blocks) for head in self.heads}
        self.truth = LeaseTruth(self)
        self.leases = Leases(clock, limits.max_remembered)
        self.peers = SimPeers(self)
        self.watcher = SimRenewals(self)
        self.loader = SimLoader(self)
        self.offers = SimOffers(self)
        self.pusher = SimPusher(self)
        self.desk: StepDesk[GroupEnd] = StepDesk(
            place, self.leases, self.watcher, self.loader, self.offers, self.pusher,
            lambda remote: self.sources(remote.workers),
        )  # fmt: skip
        #: Links that others have made to this worker, by their cluster id.
        self.inbound: dict[int, LinkEnd] = {}
        self._lost: set[int] = set()
        #: How much later than usual its pushes and offers hear of lost links.
        self.hears_late_s = 0.0
        self._waiting: list[tuple[Sequence[RequestKey], Callable[[], None]]] = []
        self._held_up: deque[Callable[[], None]] = deque()
        self.network.listening[engine.name, place.index + 1] = self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.place.pp_rank, self.place.tp_rank, self.engine.name, self.place.index + 1, self.cluster_id)

    @property
    def name(self) -> str:
        return f"{self.engine.name}.{self.place.index}"

    def sources(self, workers: Sequence[Endpoint]) -> Sources:
        """P's workers that this worker needs, and its share of those that nobody needs."""
        rank, tp_size = self.place.index, self.engine.shape.tp_size
        counts = [num_readers(other, tp_size, len(workers)) for other in range(len(workers))]
        return Sources(
            tuple(Source(workers[other], counts[other]) for other in sources_of(rank, tp_size, len(workers))),
            tuple(workers[other] for other in range(rank, len(workers), tp_size) if counts[other] == 0),
        )

    # --- life of the process ---

    def act(self, call: Callable[[], None]) -> None:
        """Something happens in this process: now, when it goes on, or not at all."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._held_up.append(call)
        else:
            call()

    def stop(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT later. Its peers hear nothing from it, and give up their links after a while."""
        if self.is_stopped or not self.is_alive:
            return
        self.world.note("%s stops for %g s", self.name, seconds)
        self.is_stopped = True
        rng = self.world.rng
        for link in self.network.links:
            if self in link_workers(link) and rng.random() < 0.8:
                other = link.near if link.far.worker is self else link.far
                self.world.after(rng.uniform(0.5, 3), lambda other=other: self._give_up(other))  # type: ignore[misc]
        self.world.after(seconds, self._go_on)

    def _give_up(self, other: LinkEnd) -> None:
        if self.is_stopped and other.link.is_up:
            other.link.is_up = False
            other.worker.act(other.close)
            self.act(other.other.close)

    def _go_on(self) -> None:
        self.is_stopped = False
        self.world.note("%s goes on", self.name)
        held_up, self._held_up = list(self._held_up), deque()
        if self.world.rng.random() < 0.5:
            self.world.rng.shuffle(held_up)  # its threads wake in any order
        for call in held_up:
            self.act(call)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Unless this worker dies before."""
        self.world.after(seconds, call, self)

    def wake_at(self, clock_s: float, call: Callable[[], None]) -> None:
        """A wait with a deadline ends then, or a little later."""
        wait_s = self.world.rng.random() * self.network.faults.wakes_late_s
        self.clock.at(clock_s + wait_s, call, self)

    def wake_after(self, seconds: float, call: Callable[[], None]) -> None:
        self.wake_at(self.clock() + seconds, call)

    def die(self) -> None:
        self.is_alive = False
        self.clock.is_dead = True
        for link in self.network.links:
            if self in link_workers(link):
                link.cut(self.world)

    # --- the engine's step ---

    def start(self, work: StepWork) -> None:
        for lease in work.leases:
            self.truth.open(lease.key, lease.lease_s)
        self.desk.start(work)
        waiting, self._waiting = self._waiting, []
        for keys, go_on in waiting:
            if self.leases.are_known(keys):
                go_on()
            else:
                self._waiting.append((keys, go_on))

    def end_within(self, limit_s: float) -> None:
        self.truth.end_within(limit_s)
        self.leases.end_within(limit_s)

    def take_ends(self) -> StepEnds[GroupEnd]:
        return self.desk.take_ends()

    # --- services for peers ---

    def on_renew(self, keys: Sequence[RequestKey], answer: Callable[[object], None]) -> None:
        def act() -> None:
            self.truth.renew(keys)
            answer(self.leases.renew(keys))

        self._once_known(keys, act)

    def on_release(
        self, keys: Sequence[RequestKey], reader: Reader, num_readers: int, answer: Callable[[object], None]
    ) -> None:
        def act() -> None:
            self.truth.release(keys, reader, num_readers)
            answer(self.leases.release(keys, reader, num_readers))

        self._once_known(keys, act)

    def _once_known(self, keys: Sequence[RequestKey], act: Callable[[], None]) -> None:
        """At once, or when the leases are opened, or after a while (`worker.saves`)."""
        if self.leases.are_known(keys):
            act()
            return
        todo = [act]
        go_on = lambda: todo.pop()() if todo else None  # noqa: E731
        self._waiting.append((keys, go_on))
        self.clock.after(ARRIVAL_WAIT_S, go_on, self)

    def linked_by(self, end: LinkEnd) -> None:
        """Another worker has linked to this one. An older link of its is no more."""
        cluster_id = end.other.worker.cluster_id
        old = self.inbound.get(cluster_id)
        self.inbound[cluster_id] = end
        if old is not None:
            old.close()
        end.on_lost.append(lambda _: self._inbound_lost(cluster_id, end))

    def _inbound_lost(self, cluster_id: int, end: LinkEnd) -> None:
        if self.inbound.get(cluster_id) is end:
            del self.inbound[cluster_id]
        self._lost.add(cluster_id)
        late_s = self.world.rng.choice((0.0, 0.05, 1.0)) * self.world.rng.random() + self.hears_late_s
        self.later(late_s, lambda: self._tell_lost(cluster_id))

    def _tell_lost(self, cluster_id: int) -> None:
        """Later than the loss, by any time; another link of that worker may be in use by now."""
        if cluster_id in self._lost and self.is_alive:
            self._lost.discard(cluster_id)
            self.pusher.link_lost(cluster_id)

    def is_idle(self) -> bool:
        busy = self.loader.is_busy() or self.offers.is_busy() or self.pusher.is_busy()
        return not (busy or len(self.watcher.table) or self.leases.num_active)


def link_workers(link: Link) -> tuple[SimWorker, SimWorker]:
    return link.near.worker, link.far.worker


class SimPeers:
    """As `worker.peers`: one attempt per peer at a time, shared by all who wait; a failure is forgotten."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._links: dict[int, Link] = {}
        self._attempts: dict[int, list[Callable[[Link | LLMException], None]]] = {}
        #: Every link that this worker has made to a peer, and that P may still write over.
        self._unfenced: dict[int, list[Link]] = {}

    def link(self, endpoint: Endpoint) -> Link | None:
        """The link, if there is one now; else an attempt is under way."""
        link = self._links.get(endpoint.cluster_id)
        if link is None and endpoint.cluster_id not in self._attempts:
            self._attempts[endpoint.cluster_id] = []
            self._worker.network.connect(
                self._worker,
                endpoint,
                lambda outcome: self._attempted(endpoint, outcome),
                self._worker.limits.link_timeout_s,
            )
        return link

    def ready(self, endpoint: Endpoint, deadline_s: float, done: Callable[[Link | LLMException], None]) -> None:
        link = self.link(endpoint)
        if link is not None:
            self._worker.later(0.0, lambda: done(link))
            return
        todo = [done]
        once = lambda outcome: todo.pop()(outcome) if todo else None  # noqa: E731
        self._attempts[endpoint.cluster_id].append(once)
        self._worker.wake_at(deadline_s, lambda: once(TimedOut("no link in time")))

    def drop(self, link: Link) -> None:
        cluster_id = link.target.cluster_id
        if self._links.get(cluster_id) is link:
            del self._links[cluster_id]
            link.drop(self._worker.world)

    def current(self, endpoint: Endpoint) -> LinkEnd | None:
        link = self._links.get(endpoint.cluster_id)
        return None if link is None else link.near

    def is_fenced(self, cluster_id: int) -> bool:
        """Whether no former link to it can be written over by it."""
        left = [link for link in self._unfenced.get(cluster_id, ()) if not link.is_fenced]
        self._unfenced[cluster_id] = left
        return not [link for link in left if link is not self._links.get(cluster_id)]

    def _attempted(self, endpoint: Endpoint, outcome: Link | LLMException) -> None:
        waiting = self._attempts.pop(endpoint.cluster_id)
        if isinstance(outcome, Link):
            self._unfenced.setdefault(endpoint.cluster_id, []).append(outcome)
            if not outcome.near.is_closed:
                self._links[endpoint.cluster_id] = outcome
            outcome.near.on_lost.append(lambda _: self._lost(endpoint.cluster_id, outcome))
        for done in waiting:
            done(outcome)

    def _lost(self, cluster_id: int, link: Link) -> None:
        if self._links.get(cluster_id) is link:
            del self._links[cluster_id]
