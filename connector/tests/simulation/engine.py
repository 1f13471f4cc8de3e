# SPDX-License-Identifier: Apache-2.0
"""A small model of vLLM around the real scheduler side: queues, blocks, steps, and vLLM's own assertions.

What matters to a hand-off is as in vLLM 0.32 (v1/core/sched/scheduler.py, kv_connector/utils.py): when the hooks are
called and in which order, that a block is given away again at once, what is done with a load's report, and that an id
vLLM does not know stops the engine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from vllm_datadist.groups import GroupInfo
from vllm_datadist.handoff.desk import StepEnds, WorkerPlace
from vllm_datadist.handoff.parts import GroupEnd
from vllm_datadist.messages import RequestKey, StepWork, WorkerNotes
from vllm_datadist.scheduler.requests import HandoffTable
from vllm_datadist.scheduler.side import EngineFacts, SchedulerSide

from .aggregator import Aggregator
from .blocks import BLOCK_TOKENS, BLOCKS, STATUS, BlockPool, Request
from .checks import Checks
from .loader import Read
from .network import Network
from .output import scheduler_output
from .shape import EngineShape
from .worker import SimWorker
from .world import Clock, Violation, World

GROUP = GroupInfo(0, BLOCK_TOKENS, None, ("layer",))
_quiet = logging.getLogger("simulation")
_quiet.setLevel(logging.CRITICAL + 1)


class Step:
    """One step under way: tokens per request, and the workers' reports as they come in."""

    def __init__(self, scheduled: list[tuple[Request, int, int]], work: StepWork) -> None:
        self.scheduled = scheduled
        self.work = work
        self.has_work = not work.is_empty()
        self.reports: dict[int, StepEnds[GroupEnd]] = {}
        self.freed_later: list[Request] = []


class Engine:
    """One incarnation of one engine: a scheduler and its workers."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        incarnation: int,
        shape: EngineShape,
        nemesis: Callable[[SimWorker, object], None],
    ) -> None:
        self.world, self.network, self.name = world, network, name
        self.block_tokens, self.num_blocks = BLOCK_TOKENS, shape.num_blocks
        self.shape = shape
        #: Called whenever a machine has moved on: it may strike at the worst moment.
        self.nemesis = nemesis
        self.is_alive = True
        self.pool = BlockPool(shape.num_blocks, shape.caches_prefixes, shape.takes_last)
        self.checks = Checks(self)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: dict[RequestKey, Request] = {}
        self.load_targets: dict[RequestKey, Request] = {}
        #: By (rank here, rank at P).
        self.reads_of: dict[RequestKey, dict[tuple[int, int], Read]] = {}
        #: What pushes have really written: (rank, head, token).
        self.written: dict[RequestKey, set[tuple[int, int, int]]] = {}
        #: P: requests that are or were pushed, and their transfer ids.
        self.pushed: dict[RequestKey, Request] = {}
        self.transfers: dict[RequestKey, str] = {}
        self.failed_loads: list[Request] = []
        self.stops_next = False
        self._to_preempt: Request | None = None
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._aggregator = Aggregator(shape.tp_size)
        self._step: Step | None = None
        self._todo: deque[Callable[[], None]] = deque()
        self._submitted: list[Request] = []
        facts = EngineFacts(f"{name}-{incarnation}", True, True, (GROUP,), shape.tp_size, 1, shape.lease_s)
        self.side = SchedulerSide(facts, _quiet)
        self.side._handoffs = HandoffTable(shape.limits.max_remembered)
        self.workers = [self._worker(rank, incarnation) for rank in range(shape.tp_size)]
        self.side.set_workers([worker.endpoint for worker in self.workers])
        world.after(0.0, self.wake)

    def _worker(self, rank: int, incarnation: int) -> SimWorker:
        shape, rng = self.shape, self.world.rng
        place = WorkerPlace(0, rank, shape.tp_size, shape.tp_size)
        clock = Clock(self.world, rng.choice((1.0, 1.0, rng.uniform(0.9, 1.1))))
        return SimWorker(self, place, cluster_id_of(self.name, rank, incarnation), shape.limits, clock)

    def die(self) -> None:
        self.world.note("%s dies", self.name)
        self.is_alive = False
        for worker in self.workers:
            worker.die()
        for request in self._submitted:
            if not request.is_finished:
                request.status = STATUS["FINISHED_ERROR"]
                request.done(request)

    # --- what clients do ---

    def submit(self, request: Request) -> None:
        self._submitted.append(request)
        self._between_steps(lambda: self._add(request))

    def abort(self, request: Request) -> None:
        is_known = self.requests.get(request.request_id) is request
        if self.is_alive and self.shape.aborts_at_once and self._step is not None and is_known:
            self._finish([request], "FINISHED_ABORTED")
        else:
            self._between_steps(lambda: self._finish([request], "FINISHED_ABORTED"))

    def _between_steps(self, call: Callable[[], None]) -> None:
        self._todo.append(call)
        self.wake()

    def _add(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise Violation("model", "the client used an id twice")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.on_new_request(request)

    # --- steps ---

    def wake(self) -> None:
        if self.is_alive and self._step is None:
            while self._todo:
                self._todo.popleft()()
            if self._has_requests():
                self._begin_step()

    def _has_requests(self) -> bool:
        return bool(self.requests) or self.side.has_work()

    def _begin_step(self) -> None:
        scheduled = self._schedule()
        work = self.side.take_work(scheduler_output(scheduled) if scheduled or len(self.side._pushes) else None)
        self._note_pushes(work)
        step = self._step = Step(scheduled, work)
        if step.has_work:
            self.world.note("%s step: %s", self.name, work)
        for worker in self.workers:
            worker.later(self._lag_s(), lambda worker=worker: self._execute(step, worker))  # type: ignore[misc]

    def _note_pushes(self, work: StepWork) -> None:
        for opened in work.push_opens:
            request = self.requests.get(opened.key.request_id)
            if request is not None:
                request.is_pushed = True
                self.pushed[opened.key] = request
                self.transfers[opened.key] = opened.transfer_id

    def _lag_s(self) -> float:
        rng = self.world.rng
        if self.stops_next or rng.random() < self.shape.stops:
            self.stops_next = False
            return rng.uniform(0.5, 6)
        return rng.random() * self.shape.step_s

    def _execute(self, step: Step, worker: SimWorker) -> None:
        if not self.is_alive:
            return
        if step.has_work:
            worker.start(step.work)
        worker.later(self._lag_s(), lambda: self._forward(step, worker))

    def _forward(self, step: Step, worker: SimWorker) -> None:
        if not self.is_alive:
            return
        for request, first, end in step.scheduled:
            if not request.is_freed:
                self.checks.tags(request, worker, first)
                for head in worker.heads:
                    tags, memory = request.tags[head], worker.memory[head]
                    for i in range(first, end):
                        memory[request.blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS] = tags[i]
        for chunk in step.work.push_chunks:
            worker.pusher.computed(chunk.key, chunk.end_token)
        step.reports[worker.place.index] = worker.take_ends()
        if len(step.reports) == len(self.workers):
            idle = not step.scheduled
            pause_s = self.world.rng.uniform(0.5, 8) * self.shape.idle_step_s if idle else 0.0
            self.world.after(pause_s, lambda: self._update(step))

    # --- scheduling ---

    def _schedule(self) -> list[tuple[Request, int, int]]:
        scheduled: list[tuple[Request, int, int]] = []
        if not (self.running or self.waiting):
            self._to_preempt = None
            return scheduled
        budget = self.shape.step_tokens
        preempted = False
        for request in list(self.running):
            if request.status.name != "RUNNING" or budget <= 0:
                continue
            end = min(request.num_tokens, request.num_computed_tokens + budget)
            while not self._grow(request, end):
                victim = self.running[-1]
                self._preempt(victim)
                scheduled = [one for one in scheduled if one[0] is not victim]
                preempted = True
                if victim is request:
                    break
            else:
                scheduled.append((request, request.num_computed_tokens, end))
                budget -= end - request.num_computed_tokens
        chosen, self._to_preempt = self._to_preempt, None
        if self.running and (chosen in self.running or self.world.rng.random() < self.shape.preempts):
            victim = chosen if chosen is not None and chosen in self.running else self.running[-1]
            self._preempt(victim)
            scheduled = [one for one in scheduled if one[0] is not victim]
            preempted = True
        if self.waiting and not preempted:
            self._schedule_waiting(scheduled, budget)
        return scheduled

    def preempt_soon(self, request: Request | None) -> None:
        """With the next step, if it is running then."""
        self._to_preempt = request

    def _grow(self, request: Request, end: int) -> bool:
        count = -(-end // BLOCK_TOKENS) - len(request.blocks)
        if count > 0:
            if not self.pool.can_allocate(count, []):
                return False
            request.blocks += self.pool.allocate(count, [])
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.was_preempted = True
        request.status = STATUS["PREEMPTED"]
        self.waiting.appendleft(request)

    def _schedule_waiting(self, scheduled: list[tuple[Request, int, int]], budget: int) -> None:
        """Those that hold blocks come first, as in vLLM."""
        skipped: list[Request] = []
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.blocks))
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_running:
            request = self.waiting[0]
            if request.status.name == "WAITING_FOR_REMOTE_KVS" and not self._promote(request):
                skipped.append(self.waiting.popleft())
                continue
            hits: list[int] = []
            num_external, is_async = 0, False
            if request.num_computed_tokens == 0:
                hits = self.pool.hits(request)
                count, is_async = self.side.num_new_matched_tokens(request, len(hits) * BLOCK_TOKENS)
                if count is None:
                    skipped.append(self.waiting.popleft())
                    continue
                num_external = count
            first = request.num_computed_tokens or len(hits) * BLOCK_TOKENS + num_external
            end = first if is_async else min(request.num_tokens, first + budget)
            have = len(request.blocks) or len(hits)
            if not self.pool.can_allocate(max(0, -(-end // BLOCK_TOKENS) - have), hits):
                break
            request.blocks += self.pool.allocate(max(0, -(-end // BLOCK_TOKENS) - have), hits)
            num_loads = self._num_loads()
            self.side.update_state_after_alloc(request, [[BLOCKS[i] for i in request.blocks]], num_external)
            self.waiting.popleft()
            request.num_computed_tokens = first
            if is_async:
                self._await_load(request, num_loads)
                skipped.append(request)
                continue
            self.running.append(request)
            request.status = STATUS["RUNNING"]
            scheduled.append((request, first, end))
            budget -= end - first
        self.waiting.extendleft(reversed(skipped))

    def _num_loads(self) -> int:
        return len(self.side._work.loads) + len(self.side._work.offers)

    def _await_load(self, request: Request, num_loads: int) -> None:
        request.status = STATUS["WAITING_FOR_REMOTE_KVS"]
        work = self.side._work
        if self._num_loads() != num_loads + 1:
            raise Violation("ends", f"{request.request_id} waits for a load that was not given to the workers")
        jobs = [job for job in (*work.loads, *work.offers) if job.key.request_id == request.request_id]
        request.load_key = jobs[-1].key
        request.awaits_load = True
        request.num_load_from = jobs[-1].first_token
        self.load_targets[request.load_key] = request
        if any(job.key == request.load_key for job in work.offers):
            self.written[request.load_key] = set()

    def _promote(self, request: Request) -> bool:
        """As `_update_waiting_for_remote_kv`."""
        if request.request_id not in self._received:
            return False
        self._received.discard(request.request_id)
        request.awaits_load = False
        self.checks.nobody_writes(request)
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            self.pool.release(request.blocks)
            request.blocks = []
        else:
            self.checks.loaded(request)
            self.pool.remember(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        request.status = STATUS["WAITING"]
        return True

    # --- after a step ---

    def _update(self, step: Step) -> None:
        if not self.is_alive:
            return
        self._step = None
        sent, received, failed, notes = self._aggregator.aggregate(step.reports)
        errors = self._handle_failed(failed)
        for request, first, end in step.scheduled:
            if request.status.name == "RUNNING" and request.num_computed_tokens == first:
                request.num_computed_tokens = end
                self._sampled(request)
        if errors:
            self._finish(errors, "FINISHED_ERROR")
        self._transfers_finished(sent, received, failed, notes)
        for request in step.freed_later:
            self._give_back(request)
        self.wake()

    def _handle_failed(self, failed: set[str]) -> list[Request]:
        affected = []
        for request_id in sorted(failed):
            request = self.requests.get(request_id)
            if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
                self.failed_loads.append(request)
                if self.shape.recomputes:
                    request.num_computed_tokens = 0
                    self._failed.add(request_id)
                else:
                    affected.append(request)
        return affected

    def _sampled(self, request: Request) -> None:
        self.pool.remember(request, request.num_computed_tokens)
        if request.num_computed_tokens < request.num_tokens:
            return
        request.num_tokens += 1
        if request.num_tokens >= request.max_tokens:
            self._finish([request], "FINISHED_STOPPED")

    def _transfers_finished(self, sent: set[str], received: set[str], failed: set[str], notes: WorkerNotes) -> None:
        """As `_update_from_kv_xfer_finished`, with vLLM's assertions."""
        if not (sent or received or failed) and notes.is_empty():
            return
        output = SimpleNamespace(
            finished_sending=sent, finished_recving=received, failed_recving=failed, kv_connector_worker_meta=notes
        )
        self.side.update_output(output)
        sent, received = output.finished_sending or set(), output.finished_recving or set()
        self.world.note("%s reports sent %s received %s failed %s", self.name, sent, received, failed)
        for request_id in sorted(received):
            request = self._known(request_id)
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                self._received.add(request_id)
            elif request.is_finished:
                self._free(request)
            else:
                raise Violation(
                    "unknown", f"{self.name}: {request_id} is reported as received, but did not wait for it"
                )
        for request_id in sorted(sent):
            self._free(self._known(request_id))

    def _known(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise Violation("unknown", f"{self.name}: vLLM is told the end of {request_id}, which it does not know")
        return request

    # --- ends ---

    def _finish(self, requests: list[Request], status: str) -> None:
        """As `finish_requests` and `_free_request`."""
        for request in requests:
            if request.is_finished or self.requests.get(request.request_id) is not request:
                continue
            keeps = False
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                keeps = request.request_id not in self._received
                self._received.discard(request.request_id)
                self._failed.discard(request.request_id)
            if request in self.running:
                self.running.remove(request)
            elif request in self.waiting:
                self.waiting.remove(request)
            request.status = STATUS[status]
            blocks = request.blocks[: -(-request.num_computed_tokens // BLOCK_TOKENS)]
            delayed, request.ticket = self.side.request_finished(request, (blocks,))
            if delayed:
                self._hold(request)
            if not (keeps or delayed):
                self._free(request)
            self.world.note("%s request %s is %s", self.name, request.request_id, status)
            request.done(request)

    def _hold(self, request: Request) -> None:
        request.hold_key = self.side._work.leases[-1].key
        self.held[request.hold_key] = request

    def _free(self, request: Request) -> None:
        """vLLM lets go of it, and of its blocks (later, if a step that is under way may still write them)."""
        self.checks.may_be_freed(request)
        del self.requests[request.request_id]
        if request.hold_key is not None:
            del self.held[request.hold_key]
        step = self._step
        if step is not None and any(one[0] is request for one in step.scheduled):
            step.freed_later.append(request)
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        request.is_freed = True
        self.pool.release(request.blocks)


def cluster_id_of(name: str, rank: int, incarnation: int) -> int:
    """New with every start (`worker.node`)."""
    return 1 + sum(map(ord, name)) * 10_000 + incarnation * 100 + rank
