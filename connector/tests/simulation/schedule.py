# SPDX-License-Identifier: Apache-2.0
"""One random schedule: who asks for what, what goes wrong and when; and the checks at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_datadist.handoff.load import LoadMachine, LoadState

from .blocks import Prompt, Request
from .engine import Engine
from .network import Faults, Network
from .shape import EngineShape, Limits
from .worker import SimWorker
from .world import Violation, World

#: Faults end here, and everything must have ended by `QUIET_S`.
FAULTS_S = 20.0
QUIET_S = 400.0
_RARE = (LoadState.PAUSED, LoadState.READ_PAUSED, LoadState.RELINKING)


@dataclass(frozen=True)
class Outcome:
    """What happened, to see that a schedule did something."""

    num_events: int
    num_requests: int
    num_loads: int
    num_failed: int
    num_crashes: int


class Schedule:
    """P, one or two Ds, and a router that passes tickets on. `calm`: nothing goes wrong; None = the seed decides."""

    def __init__(self, seed: int, trace_length: int = 120, calm: bool | None = None) -> None:
        self.seed = seed
        self.world = World(seed, trace_length)
        self.rng = self.world.rng
        self.network = Network(self.world)
        is_calm = self.rng.random() < 0.15
        self.is_calm = is_calm if calm is None else calm
        self.lease_s = self.rng.choice((2.0, 4.0, 8.0))
        self.strikes = self.rng.choice((0.0, 0.04, 0.15))
        self.tp_size = 2 if self.rng.random() < 0.3 else 1
        self.names = ["P", "D", "E"] if self.rng.random() < 0.4 else ["P", "D"]
        self.shapes = {name: self._shape(name) for name in self.names}
        self.engines: dict[str, Engine] = {}
        self.incarnations: dict[str, int] = {}
        self.num_open = 0
        self.num_requests = 0
        self.num_crashes = 0
        self.open_ids: dict[str, set[str]] = {name: set() for name in self.names}
        self.tickets: dict[str, list[tuple[Prompt, dict[str, Any]]]] = {}
        for name in self.names:
            self._start(name)
        self._plan()

    # --- set-up ---

    def _shape(self, name: str) -> EngineShape:
        rng, calm = self.rng, self.is_calm
        return EngineShape(
            num_blocks=rng.choice((10, 16, 32)),
            tp_size=self.tp_size,
            lease_s=self.lease_s,
            limits=self._limits(),
            recomputes=rng.random() < 0.6,
            caches_prefixes=rng.random() < 0.5,
            takes_last=rng.random() < 0.7,
            max_running=rng.choice((1, 2, 4)),
            aborts_at_once=rng.random() < 0.5,
            step_s=rng.choice((0.01, 0.05)),
            idle_step_s=rng.choice((0.02, 0.1)),
            stops=0.0 if calm else rng.choice((0.0, 0.01, 0.1)),
            preempts=rng.choice((0.0, 0.05)),
        )

    def _limits(self) -> Limits:
        rng = self.rng
        if self.is_calm:
            return Limits(60.0, 10.0, rng.choice((1, 2)), 4096)
        return Limits(rng.choice((1.0, 3.0, 12.0)), rng.choice((1.0, 4.0)), rng.choice((1, 2)), rng.choice((1, 4096)))

    def _start(self, name: str) -> None:
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        self.engines[name] = Engine(
            self.world, self.network, name, self.incarnations[name], self.shapes[name], self._strike
        )
        self.open_ids[name] = set()

    def _plan(self) -> None:
        rng = self.rng
        width_s = rng.choice((1.0, FAULTS_S * 0.7))
        for _ in range(rng.randint(2, 10)):
            self.world.after(rng.uniform(0, width_s), self._new_handoff)
        for _ in range(rng.randint(0, 6)):
            self.world.after(rng.uniform(0, FAULTS_S), self._new_local)
        if self.is_calm:
            self.network.faults = Faults(delay_s=rng.choice((0.001, 0.02, 0.1)))
        else:
            self._plan_faults()

    def _plan_faults(self) -> None:
        rng = self.rng
        bad = rng.choice((0.0, 0.03, 0.15))
        self.network.faults = Faults(
            link_fails=rng.choice((0.0, bad)),
            link_hangs=rng.choice((0.0, bad)),
            call_breaks=rng.choice((0.0, bad)),
            answer_lost=rng.choice((0.0, bad, 0.4)),
            call_late=rng.choice((0.0, bad)),
            read_stalls=rng.choice((0.0, 0.05, 0.3)),
            read_hangs=rng.choice((0.0, 0.0, 0.03)),
            very_slow=rng.choice((0.0, 0.02)),
            odd=rng.choice((0.0, 0.0, 0.03, 0.2)),
            wakes_late_s=rng.choice((0.0, 0.3, 3.0)),
            delay_s=rng.choice((0.001, 0.01, 0.1)),
        )
        for kind, most in ((self._crash, 2), (self._cut, 2), (self._jump, 3), (self._outage, 1), (self._drain, 1)):
            for _ in range(rng.randint(0, most) if rng.random() < 0.5 else 0):
                self.world.after(rng.uniform(0, FAULTS_S), kind)
        self.world.after(FAULTS_S, self._heal)

    def _heal(self) -> None:
        self.network.faults = Faults()
        self.network.is_cut = False
        for shape in self.shapes.values():
            shape.stops = shape.preempts = 0.0

    # --- faults ---

    def _strike(self, worker: SimWorker, machine: LoadMachine) -> None:
        """Something happens just when a load has moved on, most likely in a state that is rare."""
        rng = self.rng
        chance = self.strikes * (6 if machine.state in _RARE or worker.loader.is_ahead_of_p(machine) else 1)
        if rng.random() >= chance or self.world.now > FAULTS_S:
            return
        engine, request = worker.engine, worker.engine.load_targets.get(machine.job.key)
        if request is not None and (self.is_calm or rng.random() < 0.5):
            self.world.after(rng.random() * 0.1, lambda: engine.abort(request) if engine.is_alive else None)
        elif not self.is_calm:
            left_s = max(0.0, machine.deadline_s - worker.clock()) + 0.01
            overtake = lambda: worker.clock.jump(left_s)  # noqa: E731
            kind = rng.choice((self._crash, self._cut, self._jump, self._outage, self._drain, overtake, overtake))
            self.world.after(rng.random() * 0.1, kind)

    def _crash(self) -> None:
        name = self.rng.choice(self.names)
        if self.engines[name].is_alive:
            self.num_crashes += 1
            self.engines[name].die()
            self.world.after(self.rng.uniform(0.05, 3), lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        """New requests come at once, and those who hold old tickets try again."""
        self._start(name)
        rng, old = self.rng, self.tickets.get(name)
        if old and rng.random() < 0.5:
            for _ in range(rng.randint(1, 3)):
                self._new_handoff(name)
            prompt, ticket = rng.choice(old)
            other = rng.choice([one for one in self.names if one != name])
            self.world.after(rng.uniform(0.1, 2), lambda: self._pass_on(other, prompt, ticket, 1))

    def _cut(self) -> None:
        self.world.note("all links are cut")
        self.network.cut_all()

    def _outage(self) -> None:
        self.world.note("nothing gets through")
        self.network.is_cut = True
        if self.rng.random() < 0.5:
            self.network.cut_all()
        self.world.after(self.rng.uniform(0.3, 5), self._mend)

    def _drain(self) -> None:
        """A P is told to end: no lease lasts longer than a while, then it is gone, and is started again."""
        name, limit_s = self.rng.choice(self.names), self.rng.uniform(0.1, 6)
        engine = self.engines[name]
        self.world.note("%s drains within %g s", name, limit_s)
        for worker in engine.workers:
            worker.end_within(limit_s)

        def end() -> None:
            if engine.is_alive:
                engine.die()
                self.world.after(0.5, lambda: self._restart(name))

        self.world.after(limit_s * self.rng.choice((1.0, 1.5, 3.0)), end)

    def _mend(self) -> None:
        self.network.is_cut = False

    def _jump(self) -> None:
        worker = self.rng.choice(self.engines[self.rng.choice(self.names)].workers)
        seconds = self.rng.choice((0.1, 1.0, 3.0, 10.0))
        self.world.note("the clock of %s.%d jumps %g s", worker.engine.name, worker.place.index, seconds)
        worker.clock.jump(seconds)

    # --- clients ---

    def _new_handoff(self, source: str = "") -> None:
        prompt = Prompt(self.rng.randint(1, 3), self.rng.randint(2, 18))
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        source = source or ("P" if self.is_calm or self.rng.random() < 0.7 else self.rng.choice(self.names))
        self._submit(source, prompt, params, 1, lambda request: self._prefilled(source, prompt, request))

    def _prefilled(self, source: str, prompt: Prompt, request: Request) -> None:
        if request.ticket is None:
            return
        rng = self.rng
        if not self.is_calm and rng.random() < 0.08:
            self.world.note("the ticket of %s is lost", request.request_id)
            return
        delay_s = rng.uniform(0, 0.2) if self.is_calm or rng.random() < 0.7 else rng.uniform(0, 2.5 * self.lease_s)
        others = [name for name in self.names if name != source]
        self.tickets.setdefault(source, []).append((prompt, request.ticket))
        if not self.is_calm and rng.random() < 0.1:
            self.engines[source].stops_next = True
        name = rng.choice(others)
        num_children = rng.choice((1, 1, 1, 2, 3))
        ticket = request.ticket
        self.world.after(delay_s, lambda: self._pass_on(name, prompt, ticket, num_children))
        if not self.is_calm and rng.random() < 0.3:  # a router that tries again with the ticket it has
            other, again_s = rng.choice(others), delay_s + rng.uniform(0, 4)
            self.world.after(again_s, lambda: self._pass_on(other, prompt, ticket, 1))

    def _pass_on(self, name: str, prompt: Prompt, ticket: dict[str, Any], num_children: int) -> None:
        if self.rng.random() < 0.05:
            prompt = Prompt(prompt.family + 10, prompt.num_tokens)
        for _ in range(num_children):
            num_out = self.rng.randint(1, self.rng.choice((4, 4, 16)))
            self._submit(name, prompt, ticket, num_out, lambda request: None)

    def _new_local(self) -> None:
        prompt = Prompt(self.rng.randint(1, 5), self.rng.randint(2, 18))
        self._submit(self.rng.choice(self.names), prompt, None, self.rng.randint(1, 6), lambda request: None)

    def _submit(
        self,
        name: str,
        prompt: Prompt,
        params: dict[str, Any] | None,
        num_out: int,
        done: Callable[[Request], None],
    ) -> None:
        engine = self.engines[name]
        if not engine.is_alive:
            return
        request_id = self._free_id(engine)
        self.num_requests += 1
        self.num_open += 1

        def ended(request: Request) -> None:
            self.num_open -= 1
            self.open_ids[name].discard(request_id)
            done(request)

        request = Request(request_id, prompt, params, num_out, self.tp_size, ended)
        self.open_ids[name].add(request_id)
        self.world.note("%s gets %s, prompt %d/%d, %s", name, request_id, prompt.family, prompt.num_tokens, params)
        engine.submit(request)
        if self.rng.random() < 0.2:
            wait_s = self.rng.choice((0.02, 0.2, 2.0, 8.0)) * self.rng.random()
            self.world.after(wait_s, lambda: engine.abort(request) if engine.is_alive else None)

    def _free_id(self, engine: Engine) -> str:
        """The first that the engine does not know any more: ids come back as soon as they can."""
        i = 1
        while f"r{i}" in engine.requests or f"r{i}" in self.open_ids[engine.name]:
            i += 1
        return f"r{i}"

    # --- the whole ---

    def run(self) -> Outcome:
        """Raises Violation."""
        try:
            if not self.world.run(QUIET_S):
                raise Violation("ends", f"still busy after {QUIET_S:g} s: {self._busy()}")
        except Violation:
            raise
        except Exception as error:
            raise Violation("fatal", f"an exception left the code: {error!r}") from error
        if self.num_open:
            raise Violation("ends", f"{self.num_open} requests never ended")
        for engine in self.engines.values():
            check_quiet(engine)
        if self.is_calm:
            self._check_calm()
        engines = self.engines.values()
        return Outcome(
            self.world.num_events,
            self.num_requests,
            sum(len(engine.load_targets) for engine in engines),
            sum(engine.num_failed_loads for engine in engines),
            self.num_crashes,
        )

    def _busy(self) -> str:
        return ", ".join(f"{engine.name} {list(engine.requests)}" for engine in self.engines.values())

    def _check_calm(self) -> None:
        """Nothing went wrong, so nothing may have been left to a lease's time, and no load may have failed."""
        for engine in self.engines.values():
            num_expired = sum(worker.leases.take_num_expired() for worker in engine.workers)
            if num_expired or engine.num_failed_loads:
                raise Violation(
                    "calm", f"{engine.name}: {num_expired} leases expired, {engine.num_failed_loads} loads failed"
                )


def run_schedule(seed: int, calm: bool | None = None) -> Outcome:
    """Raises Violation."""
    return Schedule(seed, calm=calm).run()


def check_quiet(engine: Engine) -> None:
    """Every table is empty, and every block is back."""
    name = engine.name
    left = {
        "requests": engine.requests,
        "holds": len(engine.side._holds),
        "hand-offs": len(engine.side._handoffs),
        "work": not engine.side._work.is_empty(),
        "counts": engine._aggregator.counts,
        "leases": [worker.leases.num_active for worker in engine.workers if worker.leases.num_active],
        "watched": [len(worker.watcher.table) for worker in engine.workers if len(worker.watcher.table)],
        "loads": [worker.place.index for worker in engine.workers if worker.loader.is_busy()],
    }
    leaks = {what: value for what, value in left.items() if value}
    if leaks:
        raise Violation("leak", f"{name}: left when all is quiet: {leaks}")
    if len(engine.pool.free) != engine.pool.num_blocks:
        raise Violation("leak", f"{name}: {engine.pool.num_blocks - len(engine.pool.free)} blocks did not come back")
