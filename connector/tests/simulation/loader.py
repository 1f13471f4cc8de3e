# SPDX-License-Identifier: Apache-2.0
"""Drives the machines of a worker's loads on virtual time, as the threads of `worker.loads` do on the real clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.desk import Sources
from vllm_datadist.handoff.lease import Reader
from vllm_datadist.handoff.load import RELINK_PAUSE_S, Effect, LoadMachine, LoadState
from vllm_datadist.handoff.parts import GroupEnd, PartTable
from vllm_datadist.messages import Endpoint, LeaseState, LoadJob, ReleaseJob, RequestKey

from .calls import CALL_TIMEOUT_S, ask
from .network import Answering, Link
from .world import Violation

if TYPE_CHECKING:
    from .blocks import Request
    from .worker import SimWorker

#: Between two releases of a lease that P does not know yet.
LONGEST_PAUSE_S = 4.0


@dataclass(frozen=True)
class _Release:
    """As in `worker.releases`."""

    job: ReleaseJob
    endpoint: Endpoint
    num_readers: int
    until_s: float
    pause_s: float = 0.25


class SimLoader:
    """As the threads of `worker.loads`: `num_threads` parts at the same time; and of `worker.releases`."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table: PartTable[LoadMachine] = PartTable()
        self.reads: dict[LoadMachine, Read] = {}
        self._queue: deque[LoadMachine] = deque()
        self._num_running = 0
        self._pauses: dict[LoadMachine, Callable[[], None]] = {}
        self._links: dict[LoadMachine, Link] = {}
        self._num_releasing = 0

    def is_busy(self) -> bool:
        return bool(len(self.table) or self._queue or self._num_running or self._num_releasing)

    def is_reading(self, key: RequestKey) -> bool:
        return any(machine.key == key for machine in self.reads)

    def is_ahead_of_p(self, machine: LoadMachine) -> bool:
        """It asks for a lease that P has not opened yet."""
        link = self._links.get(machine)
        return (
            machine.state is LoadState.CONFIRMING
            and link is not None
            and not link.target.leases.are_known([machine.job.remote.key])
        )

    # --- what the desk calls ---

    def submit_load(self, job: LoadJob, sources: Sources) -> None:
        """One part for each worker of P that this worker needs."""
        now_s, timeout_s = self._worker.clock(), self._worker.limits.load_timeout_s
        parts = [LoadMachine(job, one.endpoint, now_s, timeout_s, one.num_readers) for one in sources.read]
        if self.table.add(job.key, parts):
            self._queue.extend(parts)
            for _ in parts:
                self._run_next()

    def fail_load(self, job: LoadJob, error: LLMException) -> None:
        self.table.fail(job.key, error)

    def submit_release(self, job: ReleaseJob, endpoint: Endpoint, count: int = 1) -> None:
        self._num_releasing += 1
        self._release(_Release(job, endpoint, count, self._worker.clock() + job.remote.lease_s))

    def cancel(self, key: RequestKey) -> None:
        self._end_early(self.table.cancel(key))

    def take_results(self) -> Sequence[GroupEnd]:
        self.table.take_settled()
        return self.table.take_ends()

    # --- loads ---

    def _end_early(self, cancelled: Sequence[LoadMachine]) -> None:
        for machine in cancelled:
            if self.table.take(machine):
                self._queue.remove(machine)
                self._start(machine)
            elif machine in self._pauses:
                self._pauses.pop(machine)()

    def _run_next(self) -> None:
        if self._queue and self._num_running < self._worker.limits.num_threads:
            machine = self._queue.popleft()
            self.table.take(machine)
            self._start(machine)

    def _start(self, machine: LoadMachine) -> None:
        self._num_running += 1
        self._worker.later(0.0, lambda: self._perform(machine, machine.started(self._worker.clock())))

    def _perform(self, machine: LoadMachine, effects: tuple[Effect, ...]) -> None:
        self._worker.world.note("%s load %s -> %s", self._worker.name, machine.job.key, effects)
        for effect in effects:
            _PERFORM[effect](self, machine)
        self._worker.engine.nemesis(self._worker, machine)

    def _outcome(self, machine: LoadMachine, outcome: object) -> None:
        """Feed the machine with how its effect ended."""
        now_s = self._worker.clock()
        if isinstance(outcome, LLMException):
            effects = machine.failed(outcome, now_s)
        elif isinstance(outcome, Link):
            self._links[machine] = outcome
            effects = machine.linked(now_s)
        elif isinstance(outcome, Read):
            effects = machine.read(now_s)
        else:
            [state] = outcome  # type: ignore[misc]
            effects = machine.answered(state, now_s)
        self._perform(machine, effects)

    def _reach(self, machine: LoadMachine) -> None:
        peers = self._worker.peers
        peers.ready(machine.endpoint, machine.deadline_s, lambda outcome: self._outcome(machine, outcome))

    def _read(self, machine: LoadMachine) -> None:
        read = Read(self._worker, machine, self._links[machine], lambda end: self._outcome(machine, end))
        read.start()

    def _ask_release(self, machine: LoadMachine) -> None:
        job, worker = machine.job, self._worker
        timeout_s = max(0.0, min(CALL_TIMEOUT_S, machine.deadline_s - worker.clock()))
        release = ReleaseJob(job.key, job.remote)
        done = lambda end: self._outcome(machine, end)  # noqa: E731
        self._ask(release, machine.endpoint, machine.num_readers, timeout_s, done)

    def _ask(self, job: ReleaseJob, endpoint: Endpoint, count: int, timeout_s: float, done: Answering) -> None:
        worker = self._worker
        reader = Reader(worker.cluster_id, job.key)
        end = worker.peers.current(endpoint)
        ask(worker, end, lambda p, answer: p.on_release([job.remote.key], reader, count, answer), timeout_s, done)

    def _pause(self, machine: LoadMachine) -> None:
        def go_on() -> None:
            timer.cancel()
            self._pauses.pop(machine, None)
            self._perform(machine, machine.pause_over(self._worker.clock()))

        timer = self._worker.clock.after(RELINK_PAUSE_S, go_on, self._worker)
        self._pauses[machine] = lambda: self._worker.later(0.0, lambda: go_on() if timer.call is not None else None)

    def _drop_link(self, machine: LoadMachine) -> None:
        link = self._links.pop(machine, None)
        if link is not None:
            self._worker.peers.drop(link)

    def _let_go(self, machine: LoadMachine) -> None:
        self.submit_release(ReleaseJob(machine.key, machine.job.remote), machine.endpoint, machine.num_readers)

    def _report(self, machine: LoadMachine) -> None:
        self._links.pop(machine, None)
        self._num_running -= 1
        self._end_early(self.table.ended(machine))
        self._run_next()

    # --- releases without a load ---

    def _release(self, release: _Release) -> None:
        """Any number at the same time: no worker of P keeps what is for others waiting."""
        worker = self._worker

        def linked(outcome: Link | LLMException) -> None:
            if not isinstance(outcome, Link):
                self._released(release, outcome)
                return
            timeout_s = min(CALL_TIMEOUT_S, worker.limits.link_timeout_s)
            done = lambda end: self._released(release, end)  # noqa: E731
            self._ask(release.job, release.endpoint, release.num_readers, timeout_s, done)

        worker.peers.ready(release.endpoint, worker.clock() + worker.limits.link_timeout_s, linked)

    def _released(self, release: _Release, outcome: object) -> None:
        """P may not have opened the lease yet: asked again until the lease would be over."""
        next_s = self._worker.clock() + release.pause_s
        if outcome == [LeaseState.UNKNOWN] and next_s < release.until_s:
            again = replace(release, pause_s=min(LONGEST_PAUSE_S, 2 * release.pause_s))
            self._worker.wake_at(next_s, lambda: self._release(again))
        else:
            self._num_releasing -= 1


_PERFORM: dict[Effect, Callable[[SimLoader, LoadMachine], None]] = {
    Effect.REACH: SimLoader._reach,
    Effect.READ: SimLoader._read,
    Effect.ASK_RELEASE: SimLoader._ask_release,
    Effect.PAUSE: SimLoader._pause,
    Effect.DROP_LINK: SimLoader._drop_link,
    Effect.LET_GO: SimLoader._let_go,
    Effect.REPORT: SimLoader._report,
}


class Read:
    """A one-sided read, block by block, while P goes on. `was_protected`: what it read was D's to read all the time."""

    def __init__(self, worker: SimWorker, machine: LoadMachine, link: Link, done: Answering) -> None:
        self.worker = worker
        self.machine = machine
        self.job = machine.job
        self.link = link
        self.was_protected = True
        self.request: Request | None = worker.engine.load_targets.get(self.job.key)
        self.heads = [head for head in worker.heads if head in link.target.heads]
        self._deadline_s = machine.deadline_s
        self._done: Answering | None = done
        job, size = machine.job, worker.engine.block_tokens
        tables = job.groups[0]
        self._todo = deque(
            (tables.source[i], tables.target[i]) for i in range(job.first_token // size, -(-job.end_token // size))
        )

    def start(self) -> None:
        worker = self.worker
        if self.request is None or self.request.is_freed:
            raise Violation("blocks", f"{self.job.key}: a read starts into blocks that are not its request's any more")
        worker.loader.reads[self.machine] = self
        worker.engine.reads_of.setdefault(self.job.key, {})[worker.place.index, self.link.target.place.index] = self
        self.link.near.on_lost.append(self._end)
        worker.wake_at(self._deadline_s, lambda: self._end(TimedOut("no time is left for the transfer")))
        self._next_block()

    def _next_block(self) -> None:
        world, faults = self.worker.world, self.worker.network.faults
        if not self._todo:
            self._end(self)
            return
        luck = world.rng.random()
        if luck < faults.read_hangs:
            return
        if world.rng.random() < faults.odd:
            error = world.rng.choice((RemoteError("the peer cannot"), TimedOut("the transfer took too long")))
            self.worker.later(0.0, lambda: self._end(error))
            return
        seconds = world.rng.expovariate(1.0) * faults.delay_s
        if luck < faults.read_hangs + faults.read_stalls:
            seconds = world.rng.uniform(0.3, 9)
        self.worker.later(seconds, self._take)

    def _take(self) -> None:
        if self._done is None:
            return
        p = self.link.target
        if not p.is_alive or self.link.near.is_closed:
            self._end(PeerLost("the peer is gone"))
            return
        source, target = self._todo.popleft()
        if source is None or target is None:
            raise Violation("tags", f"{self.job.key}: a block of the load is missing")
        size = self.worker.engine.block_tokens
        content = [(head, p.memory[head][source * size : (source + 1) * size]) for head in self.heads]
        self.worker.later(self.worker.network.faults.delay_s * 0.1, lambda: self._put(target, content))

    def _put(self, target: int, content: list[tuple[int, list[int]]]) -> None:
        if self._done is None:
            return
        if self.request is None or self.request.is_freed:
            raise Violation("blocks", f"{self.job.key}: block {target} was written after vLLM had it back")
        if not self.link.target.truth.protects(self.job.remote.key):
            self.was_protected = False
        for head, tags in content:
            self.worker.memory[head][target * len(tags) : (target + 1) * len(tags)] = tags
        self._next_block()

    def _end(self, outcome: object) -> None:
        """Fenced: nothing is written after it."""
        if self._done is not None and self.worker.is_alive:
            done, self._done = self._done, None
            self.worker.loader.reads.pop(self.machine, None)
            done(outcome)
