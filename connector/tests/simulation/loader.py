# SPDX-License-Identifier: Apache-2.0
"""Drives the machines of a worker's loads on virtual time, as the threads of `worker.loads` do on the real clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from datadist_core.errors import LLMException, PeerLost, RemoteError, TimedOut
from vllm_datadist.handoff.lease import Reader
from vllm_datadist.handoff.load import RELINK_PAUSE_S, Effect, LoadEnd, LoadMachine, LoadState, LoadTable
from vllm_datadist.messages import Endpoint, LoadJob, ReleaseJob, RequestKey

from .network import Call, Link
from .world import Violation

if TYPE_CHECKING:
    from .blocks import Request
    from .worker import SimWorker

CALL_TIMEOUT_S = 5.0


class SimLoader:
    """As the threads of `worker.loads`: `num_threads` loads at the same time, and one release without a load."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.table = LoadTable()
        self.reads: dict[RequestKey, Read] = {}
        self._queue: deque[LoadMachine] = deque()
        self._num_running = 0
        self._pauses: dict[RequestKey, Callable[[], None]] = {}
        self._links: dict[RequestKey, Link] = {}
        self._releases: deque[tuple[ReleaseJob, Endpoint]] = deque()
        self._is_releasing = False

    def is_busy(self) -> bool:
        return bool(len(self.table) or self._queue or self._num_running or self._releases or self._is_releasing)

    def is_ahead_of_p(self, machine: LoadMachine) -> bool:
        """It asks for a lease that P has not opened yet."""
        link = self._links.get(machine.job.key)
        return (
            machine.state is LoadState.CONFIRMING
            and link is not None
            and not link.target.leases.are_known([machine.job.remote.key])
        )

    # --- what the desk calls ---

    def submit_load(self, job: LoadJob, endpoint: Endpoint) -> None:
        machine = LoadMachine(job, endpoint, self._worker.clock(), self._worker.limits.load_timeout_s)
        if self.table.add(machine):
            self._queue.append(machine)
            self._run_next()

    def fail_load(self, job: LoadJob, error: LLMException) -> None:
        self.table.report(LoadEnd(job.key, error))

    def submit_release(self, job: ReleaseJob, endpoint: Endpoint) -> None:
        self._releases.append((job, endpoint))
        self._release_next()

    def cancel(self, key: RequestKey) -> None:
        machine = self.table.cancel(key)
        if machine is None:
            return
        if self.table.take(machine):
            self._queue.remove(machine)
            self._start(machine)
        elif key in self._pauses:
            self._pauses.pop(key)()

    def take_results(self) -> Sequence[LoadEnd]:
        return self.table.take_ends()

    # --- loads ---

    def _run_next(self) -> None:
        if self._queue and self._num_running < self._worker.limits.num_threads:
            machine = self._queue.popleft()
            self.table.take(machine)
            self._start(machine)

    def _start(self, machine: LoadMachine) -> None:
        self._num_running += 1
        self._worker.later(0.0, lambda: self._perform(machine, machine.started(self._worker.clock())))

    def _perform(self, machine: LoadMachine, effects: tuple[Effect, ...]) -> None:
        self._worker.world.note(
            "%s.%d load %s -> %s", self._worker.engine.name, self._worker.place.index, machine.job.key, effects
        )
        for effect in effects:
            _PERFORM[effect](self, machine)
        self._worker.engine.nemesis(self._worker, machine)

    def _outcome(self, machine: LoadMachine, outcome: object) -> None:
        """Feed the machine with how its effect ended."""
        if not self._worker.is_alive:
            return
        now_s = self._worker.clock()
        if isinstance(outcome, LLMException):
            effects = machine.failed(outcome, now_s)
        elif isinstance(outcome, Link):
            self._links[machine.job.key] = outcome
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
        read = Read(self._worker, machine, self._links[machine.job.key], lambda end: self._outcome(machine, end))
        read.start()

    def _ask_release(self, machine: LoadMachine) -> None:
        job, worker = machine.job, self._worker
        timeout_s = max(0.0, min(CALL_TIMEOUT_S, machine.deadline_s - worker.clock()))
        self._ask(job.remote.key, job.key, machine.endpoint, timeout_s, lambda end: self._outcome(machine, end))

    def _ask(
        self,
        lease: RequestKey,
        reader_key: RequestKey,
        endpoint: Endpoint,
        timeout_s: float,
        done: Callable[[object], None],
    ) -> None:
        worker = self._worker
        reader = Reader(worker.cluster_id, reader_key)
        call = Call(worker.network, worker.peers.current(endpoint), done)
        call.start(
            lambda p, answer: p.on_release([lease], reader, answer), lambda end: worker.wake_after(timeout_s, end)
        )

    def _pause(self, machine: LoadMachine) -> None:
        key = machine.job.key

        def go_on() -> None:
            timer.cancel()
            self._pauses.pop(key, None)
            self._perform(machine, machine.pause_over(self._worker.clock()))

        timer = self._worker.clock.after(RELINK_PAUSE_S, go_on)
        self._pauses[key] = lambda: self._worker.later(0.0, lambda: go_on() if timer.call is not None else None)

    def _drop_link(self, machine: LoadMachine) -> None:
        link = self._links.pop(machine.job.key, None)
        if link is not None:
            self._worker.peers.drop(link)

    def _let_go(self, machine: LoadMachine) -> None:
        self.submit_release(ReleaseJob(machine.job.key, machine.job.remote), machine.endpoint)

    def _report(self, machine: LoadMachine) -> None:
        self._links.pop(machine.job.key, None)
        self.table.report(LoadEnd(machine.job.key, machine.error))
        self._num_running -= 1
        self._run_next()

    # --- releases without a load ---

    def _release_next(self) -> None:
        if self._is_releasing or not self._releases:
            return
        self._is_releasing = True
        job, endpoint = self._releases.popleft()
        deadline_s = self._worker.clock() + self._worker.limits.link_timeout_s

        def linked(outcome: Link | LLMException) -> None:
            if isinstance(outcome, Link):
                left_s = max(0.0, min(CALL_TIMEOUT_S, deadline_s - self._worker.clock()))
                self._ask(job.remote.key, job.key, endpoint, left_s, self._released)
            else:
                self._released(outcome)

        self._worker.peers.ready(endpoint, deadline_s, linked)

    def _released(self, outcome: object) -> None:
        if self._worker.is_alive:
            self._is_releasing = False
            self._release_next()


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

    def __init__(self, worker: SimWorker, machine: LoadMachine, link: Link, done: Callable[[object], None]) -> None:
        self.worker = worker
        self.job = machine.job
        self.link = link
        self.was_protected = True
        self.request: Request | None = worker.engine.load_targets.get(self.job.key)
        self._deadline_s = machine.deadline_s
        self._done: Callable[[object], None] | None = done
        job, size = machine.job, worker.engine.block_tokens
        tables = job.groups[0]
        self._todo = deque(
            (tables.source[i], tables.target[i]) for i in range(job.first_token // size, -(-job.end_token // size))
        )

    def start(self) -> None:
        worker = self.worker
        if self.request is None or self.request.is_freed:
            raise Violation("blocks", f"{self.job.key}: a read starts into blocks that are not its request's any more")
        worker.loader.reads[self.job.key] = self
        worker.engine.reads_of.setdefault(self.job.key, {})[worker.place.index] = self
        self.link.on_lost.append(self._end)
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
        if not p.is_alive or self.link.is_noticed:
            self._end(PeerLost("the peer is gone"))
            return
        source, target = self._todo.popleft()
        if source is None or target is None:
            raise Violation("tags", f"{self.job.key}: a block of the load is missing")
        content = list(p.memory[source])
        self.worker.later(self.worker.network.faults.delay_s * 0.1, lambda: self._put(target, content))

    def _put(self, target: int, content: list[int]) -> None:
        if self._done is None:
            return
        if self.request is None or self.request.is_freed:
            raise Violation("blocks", f"{self.job.key}: block {target} was written after vLLM had it back")
        if not self.link.target.truth.protects(self.job.remote.key):
            self.was_protected = False
        self.worker.memory[target][:] = content
        self._next_block()

    def _end(self, outcome: object) -> None:
        """Fenced: nothing is written after it."""
        if self._done is not None and self.worker.is_alive:
            done, self._done = self._done, None
            self.worker.loader.reads.pop(self.job.key, None)
            done(outcome)
