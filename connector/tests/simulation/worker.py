# SPDX-License-Identifier: Apache-2.0
"""One worker: the real machines and tables, driven on virtual time the way the threads drive them in production."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException, TimedOut
from vllm_datadist.handoff.desk import StepDesk, StepEnds, WorkerPlace
from vllm_datadist.handoff.lease import Leases, Reader
from vllm_datadist.handoff.load import LoadEnd
from vllm_datadist.handoff.renewal import RenewalTable, Watched
from vllm_datadist.messages import Endpoint, RemoteLease, RequestKey, StepWork

from .loader import CALL_TIMEOUT_S, SimLoader
from .network import Call, Link, Network
from .shape import Limits
from .world import Clock, World

if TYPE_CHECKING:
    from .engine import Engine

ARRIVAL_WAIT_S = 2.0


class SimWorker:
    """`memory[block]` holds one tag per token: who it is the KV cache of. `truth` is what the leases really are."""

    def __init__(self, engine: Engine, place: WorkerPlace, cluster_id: int, limits: Limits, clock: Clock) -> None:
        self.engine = engine
        self.world: World = engine.world
        self.network: Network = engine.network
        self.place = place
        self.cluster_id = cluster_id
        self.limits = limits
        self.clock = clock
        self.is_alive = True
        self.memory: list[list[int]] = [[0] * engine.block_tokens for _ in range(engine.num_blocks)]
        self.truth = LeaseTruth(self)
        self.leases = Leases(clock, limits.max_remembered)
        self.peers = SimPeers(self)
        self.watcher = SimRenewals(self)
        self.loader = SimLoader(self)
        self.desk: StepDesk[LoadEnd] = StepDesk(place, self.leases, self.watcher, self.loader)
        self._waiting: list[tuple[Sequence[RequestKey], Callable[[], None]]] = []
        self.network.listening[engine.name, place.index + 1] = self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.place.pp_rank, self.place.tp_rank, self.engine.name, self.place.index + 1, self.cluster_id)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Unless this worker dies before."""
        self.world.after(seconds, lambda: call() if self.is_alive else None)

    def wake_at(self, clock_s: float, call: Callable[[], None]) -> None:
        """A wait with a deadline ends then, or a little later."""
        self.clock.at(clock_s + self.world.rng.random() * self.network.faults.wakes_late_s, call)

    def wake_after(self, seconds: float, call: Callable[[], None]) -> None:
        self.wake_at(self.clock() + seconds, call)

    def die(self) -> None:
        self.is_alive = False
        self.clock.is_dead = True
        for link in self.network.links:
            if link.target is self:
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

    def take_ends(self) -> StepEnds[LoadEnd]:
        return self.desk.take_ends()

    # --- services for peers ---

    def on_renew(self, keys: Sequence[RequestKey], answer: Callable[[object], None]) -> None:
        def act() -> None:
            self.truth.renew(keys)
            answer(self.leases.renew(keys))

        self._once_known(keys, act)

    def on_release(self, keys: Sequence[RequestKey], reader: Reader, answer: Callable[[object], None]) -> None:
        def act() -> None:
            self.truth.release(keys)
            answer(self.leases.release(keys, reader))

        self._once_known(keys, act)

    def _once_known(self, keys: Sequence[RequestKey], act: Callable[[], None]) -> None:
        """At once, or when the leases are opened, or after a while (`worker.saves`)."""
        if self.leases.are_known(keys):
            act()
            return
        todo = [act]
        go_on = lambda: todo.pop()() if todo else None  # noqa: E731
        self._waiting.append((keys, go_on))
        self.clock.after(ARRIVAL_WAIT_S, go_on)

    def is_idle(self) -> bool:
        return not (self.loader.is_busy() or len(self.watcher.table) or self.leases.num_active)


class LeaseTruth:
    """What P really promised: kept by the simulator, from what really happened."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._ends_s: dict[RequestKey, float] = {}
        self._lease_s: dict[RequestKey, float] = {}
        self._latest_s = float("inf")
        self._latest_of: dict[RequestKey, float] = {}

    def open(self, key: RequestKey, lease_s: float) -> None:
        self._lease_s[key] = lease_s
        self._latest_of[key] = self._worker.clock() + 20 * lease_s
        self._ends_s[key] = min(self._latest_s, self._worker.clock() + lease_s)

    def end_within(self, limit_s: float) -> None:
        self._latest_s = min(self._latest_s, self._worker.clock() + limit_s)
        for key, ends_s in self._ends_s.items():
            self._ends_s[key] = min(ends_s, self._latest_s)

    def renew(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            if self.is_in_force(key):
                self._ends_s[key] = min(self._latest_s, self._latest_of[key], self._worker.clock() + self._lease_s[key])

    def release(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            if key in self._ends_s:
                self._ends_s[key] = float("-inf")

    def is_in_force(self, key: RequestKey) -> bool:
        return self._worker.clock() < self._ends_s.get(key, float("-inf"))

    def protects(self, key: RequestKey) -> bool:
        """Whether the blocks are D's to read: by the lease, or by vLLM before the lease has been opened."""
        if key in self._ends_s:
            return self.is_in_force(key)
        return key in self._worker.engine.held


class SimPeers:
    """As `worker.peers`: one attempt per peer at a time, shared by all who wait; a failure is forgotten."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._links: dict[int, Link] = {}
        self._attempts: dict[int, list[Callable[[Link | LLMException], None]]] = {}

    def link(self, endpoint: Endpoint) -> Link | None:
        """The link, if there is one now; else an attempt is under way."""
        link = self._links.get(endpoint.cluster_id)
        if link is None and endpoint.cluster_id not in self._attempts:
            self._attempts[endpoint.cluster_id] = []
            self._worker.network.connect(
                endpoint, lambda outcome: self._attempted(endpoint, outcome), self._worker.limits.link_timeout_s
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
            link.notice()

    def current(self, endpoint: Endpoint) -> Link | None:
        return self._links.get(endpoint.cluster_id)

    def _attempted(self, endpoint: Endpoint, outcome: Link | LLMException) -> None:
        if not self._worker.is_alive:
            return
        waiting = self._attempts.pop(endpoint.cluster_id)
        if isinstance(outcome, Link):
            self._links[endpoint.cluster_id] = outcome
            outcome.on_lost.append(lambda _: self._lost(endpoint.cluster_id, outcome))
        for done in waiting:
            done(outcome)

    def _lost(self, cluster_id: int, link: Link) -> None:
        if self._links.get(cluster_id) is link:
            del self._links[cluster_id]


class SimRenewals:
    """As the thread of `worker.renewals`: one call at a time."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table = RenewalTable()
        self._is_asking = False

    def watch(self, key: RequestKey, remote: RemoteLease, endpoint: Endpoint) -> None:
        self.table.watch(key, remote, endpoint, self._worker.clock())
        self._worker.peers.link(endpoint)
        self._worker.later(0.0, self._look)

    def unwatch(self, key: RequestKey) -> None:
        self.table.unwatch(key)

    def _look(self) -> None:
        if self._is_asking:
            return
        due = self.table.take_due(self._worker.clock())
        if due:
            self._is_asking = True
            self._ask_next(deque(due.items()))
            return
        next_s = self.table.next_due_s()
        if next_s is not None:
            self._worker.clock.at(next_s, self._look)

    def _ask_next(self, due: deque[tuple[Endpoint, list[Watched]]]) -> None:
        if not due:
            self._is_asking = False
            self._worker.later(0.0, self._look)
            return
        endpoint, watched = due.popleft()
        link = self._worker.peers.link(endpoint)
        if link is None:
            self.table.no_link(watched, self._worker.clock())
            self._ask_next(due)
            return
        keys = [one.remote.key for one in watched]

        def done(outcome: object) -> None:
            if not self._worker.is_alive:
                return
            now_s = self._worker.clock()
            if isinstance(outcome, LLMException):
                self.table.unanswered(watched, now_s)
            else:
                self.table.answered(watched, outcome, now_s)  # type: ignore[arg-type]
            self._ask_next(due)

        call = Call(self._worker.network, link, done)
        call.start(lambda p, answer: p.on_renew(keys, answer), lambda end: self._worker.wake_after(CALL_TIMEOUT_S, end))
