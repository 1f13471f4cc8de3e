# SPDX-License-Identifier: Apache-2.0
"""One random schedule: who asks for what, what goes wrong and when; and the checks at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_datadist.handoff.load import LoadMachine, LoadState
from vllm_datadist.handoff.offer import OfferMachine, OfferPhase
from vllm_datadist.handoff.push import PushMachine, PushPhase

from .blocks import Prompt, Request
from .engine import Engine
from .network import Faults, Network, any_faults
from .quiet import check_calm, check_quiet
from .retries import Retries
from .shape import any_shape
from .worker import SimWorker
from .world import Violation, World, all_at_once

#: Faults end here, and everything must have ended by `QUIET_S`.
FAULTS_S = 20.0
QUIET_S = 400.0
_RARE = (
    LoadState.PAUSED, LoadState.READ_PAUSED, LoadState.RELINKING,
    OfferPhase.PAUSED, OfferPhase.WITHDRAWING, OfferPhase.FENCING,
    PushPhase.ASKING, PushPhase.READY, PushPhase.SENDING,
    PushPhase.RETRACTING, PushPhase.TAKEN_BACK, PushPhase.CUT_OFF, PushPhase.FAILING,
)  # fmt: skip


Machine = LoadMachine | OfferMachine | PushMachine


@dataclass(frozen=True)
class Outcome:
    """What happened, to see that a schedule did something."""

    num_events: int
    num_requests: int
    num_loads: int
    num_failed: int
    num_crashes: int


class Schedule:
    """P, one or two Ds, and a router that passes tickets on. `calm`: nothing goes wrong; `pushes`: their share.

    None = the seed decides.
    """

    def __init__(
        self, seed: int, trace_length: int = 120, calm: bool | None = None, pushes: float | None = None
    ) -> None:
        self.seed = seed
        self.world = World(seed, trace_length)
        self.rng = self.world.rng
        self.network = Network(self.world)
        is_calm = self.rng.random() < 0.15
        self.is_calm = is_calm if calm is None else calm
        # A lease lasts 20 times its time at most: in calm longer than any queue.
        self.lease_s = self.rng.choice((3.0 if self.is_calm else 2.0, 4.0, 8.0, 15.0))
        share = self.rng.choice((0.0, 0.0, 0.5, 1.0))
        self.pushes = share if pushes is None else pushes
        #: Links break just where P has been granted what it has not computed yet, or has not asked yet.
        self.glitch_at: PushPhase | OfferPhase | None = None
        if not self.is_calm and self.pushes > 0 and self.rng.random() < 0.3:
            self.glitch_at = self.rng.choice((PushPhase.READY, PushPhase.READY, OfferPhase.AWAITING))
        self.strikes = self.rng.choice((0.0, 0.04, 0.15))
        self.tp_sizes = self.rng.choice(((1,), (1,), (2,), (1, 2), (1, 2), (1, 2, 4)))
        self.names = ["P", "D", "E"] if self.rng.random() < 0.4 else ["P", "D"]
        self.shapes = {name: any_shape(self.rng, self.lease_s, self.tp_sizes, self.is_calm) for name in self.names}
        if self.glitch_at is not None:  # many steps for one prompt
            for shape in self.shapes.values():
                shape.step_tokens = 3
        self.engines: dict[str, Engine] = {}
        self.incarnations: dict[str, int] = {}
        self.num_open = 0
        self.num_requests = 0
        self.num_transfers = 0
        self.num_crashes = 0
        self.open_ids: dict[str, set[str]] = {name: set() for name in self.names}
        self.retries = Retries(seed)
        self.tickets: dict[str, list[tuple[Prompt, dict[str, Any]]]] = {}
        for name in self.names:
            self._start(name)
        self._plan()

    # --- set-up ---

    def _start(self, name: str) -> None:
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        self.engines[name] = Engine(
            self.world, self.network, name, self.incarnations[name], self.shapes[name], self._strike
        )
        self.open_ids[name] = set()

    def _plan(self) -> None:
        rng = self.rng
        width_s = rng.choice((1.0, FAULTS_S * 0.7))
        is_mutual = not self.is_calm and self.lease_s == 2.0 and rng.random() < 0.35
        if is_mutual:
            self._hand_off_both_ways()
        for _ in range(0 if is_mutual else rng.randint(2, 10)):
            kind = self._new_push if rng.random() < self.pushes else self._new_handoff
            self.world.after(rng.uniform(0, width_s), kind)
        for _ in range(rng.randint(0, 4)):
            self.world.after(rng.uniform(0, FAULTS_S), self._new_local)
        if self.is_calm:
            self.network.faults = Faults(delay_s=rng.choice((0.001, 0.02, 0.1)))
        elif not is_mutual or rng.random() < 0.5:
            self._plan_faults()
        else:
            self.strikes = 0.0
            self.world.after(FAULTS_S, self._heal)

    def _plan_faults(self) -> None:
        rng = self.rng
        self.network.faults = any_faults(rng)
        kinds = (
            (self._crash, 2), (self._cut, 2), (self._jump, 3), (self._outage, 1), (self._drain, 1), (self._stop, 3)
        )  # fmt: skip
        for kind, most in kinds:
            for _ in range(rng.randint(0, most) if rng.random() < 0.5 else 0):
                self.world.after(rng.uniform(0, FAULTS_S), kind)
        self.world.after(FAULTS_S, self._heal)

    def _heal(self) -> None:
        self.network.faults = Faults()
        self.network.is_cut = False
        for shape in self.shapes.values():
            shape.stops = shape.preempts = 0.0

    # --- faults ---

    def _strike(self, worker: SimWorker, machine: Machine) -> None:
        """Something happens just when a machine has moved on, most likely in a state that is rare."""
        rng = self.rng
        state: LoadState | OfferPhase | PushPhase
        if isinstance(machine, LoadMachine):
            state, is_ahead = machine.state, worker.loader.is_ahead_of_p(machine)
        else:
            state, is_ahead = machine.phase, False
        if state is self.glitch_at:
            self._glitch(worker, machine)
            return
        chance = self.strikes * (6 if state in _RARE or is_ahead else 1)
        if rng.random() >= chance or self.world.now > FAULTS_S:
            return
        engine, request = worker.engine, self._request_of(worker.engine, machine)
        if request is not None and rng.random() < (1.0 if self.is_calm else 0.4):
            self.world.after(rng.random() * 0.1, lambda: self._give_up(engine, request))
        elif not self.is_calm:
            left_s = max(0.0, machine.deadline_s - worker.clock()) + 0.01
            overtake = lambda: worker.clock.jump(left_s)  # noqa: E731
            stop = lambda: worker.stop(rng.uniform(0.5, 12))  # noqa: E731
            preempt = lambda: engine.preempt_soon(request)  # noqa: E731
            kinds = (self._crash, self._cut, self._jump, self._outage, self._drain, overtake, overtake, stop, stop)
            part = lambda: self._cut_and_abort(worker, machine)  # noqa: E731
            linger = lambda: worker.stop(left_s + rng.uniform(2.5, 6))  # noqa: E731
            pushing = (preempt, preempt, preempt, preempt, part, part, linger, linger)
            kind = rng.choice((*kinds, *pushing) if isinstance(machine, PushMachine) else kinds)
            self.world.after(rng.choice((0.0, 0.1)) * rng.random(), kind)

    def _glitch(self, worker: SimWorker, machine: Machine) -> None:
        """Both ends hear late that their link is lost: when there is another already."""
        rng = self.rng
        if rng.random() < 0.2:
            self.glitch_at = None
        worker.hears_late_s = rng.uniform(0.5, 6)
        when_s = rng.choice((0.0, 0.1)) * rng.random()
        if isinstance(machine, PushMachine):
            worker.engine.stops_next = True
            self.world.after(when_s, lambda: self._cut_and_abort(worker, machine))
        elif isinstance(machine, OfferMachine):
            for p in self.engines[machine.endpoint.host].workers:
                p.hears_late_s = rng.uniform(0.5, 6)
            self.world.after(when_s, self._cut)
            at_d, prompt = self._push_params(machine.endpoint.host), Prompt(4, rng.randint(2, 20))
            self._ask_d(worker.engine.name, prompt, at_d, when_s + rng.uniform(0.0, 0.5))

    def _cut_and_abort(self, p: SimWorker, push: Machine) -> None:
        """D loses its link to P and gives up one of its requests; others go on, and another comes."""
        rng = self.rng
        self._cut()
        for engine in self.engines.values():
            for key, request in list(engine.load_targets.items()):
                if isinstance(push, PushMachine) and key.request_id == push.ref.request.request_id and engine.is_alive:
                    engine.abort(request)
                    if engine is not p.engine:
                        at_d, prompt = self._push_params(p.engine.name), Prompt(4, rng.randint(2, 20))
                        self._ask_d(engine.name, prompt, at_d, rng.uniform(0.0, 1.0))

    def _request_of(self, engine: Engine, machine: Machine) -> Request | None:
        """Whom it hits if that machine's request is aborted. P's own, in calm, is to come to its end."""
        if not isinstance(machine, PushMachine):
            return engine.load_targets.get(machine.key)
        key = machine.source.key
        return None if key is None or self.is_calm else engine.pushed.get(key)

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
        self.world.after(self.rng.uniform(0.3, 5), lambda: setattr(self.network, "is_cut", False))

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

    def _jump(self) -> None:
        worker = self.rng.choice(self.engines[self.rng.choice(self.names)].workers)
        seconds = self.rng.choice((0.1, 1.0, 3.0, 10.0))
        self.world.note("the clock of %s.%d jumps %g s", worker.engine.name, worker.place.index, seconds)
        worker.clock.jump(seconds)

    def _stop(self) -> None:
        """A worker does nothing for a while, and goes on with whatever it was at."""
        worker = self.rng.choice(self.engines[self.rng.choice(self.names)].workers)
        worker.stop(self.rng.choice((0.5, 4.0, 15.0)) * self.rng.uniform(0.3, 1))

    # --- clients ---

    def _new_handoff(self, source: str = "", mode: str = "pull", num_tokens: int = 0) -> None:
        prompt = Prompt(self.rng.randint(1, 3), num_tokens or self.rng.randint(2, 18))
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_mode": mode}
        source = source or ("P" if self.is_calm or self.rng.random() < 0.7 else self.rng.choice(self.names))
        self._submit(source, prompt, params, 1, lambda request: self._prefilled(source, prompt, request))

    def _hand_off_both_ways(self) -> None:
        """P and D for each other, with hardly a block to spare: each may hold what the other's queue waits for."""
        for name in ("P", "D"):
            self.shapes[name].num_blocks = 10
            self.engines[name].die()
            self._start(name)
            for _ in range(3):
                self.world.after(self.rng.uniform(0, 0.3), lambda name=name: self._new_handoff(name, num_tokens=18))  # type: ignore[misc]

    def _prefilled(self, source: str, prompt: Prompt, request: Request) -> None:
        if request.ticket is None:
            return
        rng = self.rng
        if not self.is_calm and rng.random() < 0.08:
            self.world.note("the ticket of %s is lost", request.request_id)
            return
        delay_s = rng.uniform(0, 0.2)
        if not self.is_calm and rng.random() < 0.4:
            delay_s = rng.choice((rng.uniform(0, 2.5), rng.uniform(0.9, 1.4))) * self.lease_s
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

    def _new_push(self) -> None:
        """A router that calls P and D at the same time, or one after the other, in either order."""
        rng = self.rng
        if rng.random() < 0.3:
            self._new_handoff(mode="push")  # one after the other, with the ticket
            return
        prompt = Prompt(rng.randint(1, 3), rng.choice((rng.randint(2, 20), rng.randint(14, 20))))
        source = "P" if self.is_calm or rng.random() < 0.7 else rng.choice(self.names)
        at_d = self._push_params(source)
        at_p = {"do_remote_decode": True, "transfer_mode": "push", "transfer_id": at_d["transfer_id"]}
        others = [other for other in self.names if other != source]
        # In calm D is to have announced itself well before the time of P's lease is over.
        width_s = rng.choice((0.02, 0.3, min(2.0, self.lease_s / 4)) if self.is_calm else (0.02, 0.3, 2.0, 8.0))
        p_s, d_s = rng.uniform(0, width_s), rng.uniform(0, width_s)
        odd = 0.0 if self.is_calm else rng.random()
        if rng.random() < 0.12:
            self._ask_d_in_vain(others, prompt, at_d, d_s)
            p_s = d_s + rng.uniform(0, 1.5)
        elif odd < 0.84 or odd > 0.92:
            self._ask_d(rng.choice(others), prompt, at_d, d_s)
        if odd < 0.92:
            self.world.after(p_s, lambda: self._submit(source, prompt, at_p, 1, lambda _: None))
        if not self.is_calm and rng.random() < 0.15:  # a router that tries again
            self._ask_d(rng.choice(others), prompt, at_d, d_s + rng.uniform(0, 4))
        if not self.is_calm and rng.random() < 0.1:
            self.world.after(p_s + rng.uniform(0, 4), lambda: self._submit(source, prompt, at_p, 1, lambda _: None))

    def _push_params(self, source: str) -> dict[str, Any]:
        """What D is told of another push, which may come or not."""
        self.num_transfers += 1
        return {
            "do_remote_prefill": True, "transfer_mode": "push", "transfer_id": f"T{self.num_transfers}",
            "remote_host": source, "remote_port": 1,
        }  # fmt: skip

    def _ask_d_in_vain(self, others: list[str], prompt: Prompt, params: dict[str, Any], delay_s: float) -> None:
        """The client of the first D is gone soon, or that D is too slow: the router asks again, maybe another."""
        rng = self.rng
        name, again_s = rng.choice(others), delay_s + rng.uniform(0.05, 0.6)
        self.world.after(delay_s, lambda: self._submit(name, prompt, params, 4, lambda _: None, again_s - delay_s))
        self._ask_d(rng.choice(others), prompt, params, again_s + rng.uniform(0.0, 0.3))

    def _ask_d(self, name: str, prompt: Prompt, params: dict[str, Any], delay_s: float) -> None:
        num_children = self.rng.choice((1, 1, 1, 2))
        self.world.after(delay_s, lambda: self._pass_on(name, prompt, params, num_children))

    def _pass_on(self, name: str, prompt: Prompt, params: dict[str, Any], num_children: int) -> None:
        is_pushed = params.get("datadist") is None
        if self.rng.random() < 0.05 and not (is_pushed and self.is_calm):
            prompt = Prompt(prompt.family + 10, prompt.num_tokens)
        if self.rng.random() < 0.1:
            self._pass_further(name, prompt, params)
            return
        for _ in range(num_children):
            num_out = self.rng.randint(1, self.rng.choice((4, 4, 16)))
            self._submit(name, prompt, params, num_out, lambda request: None)

    def _pass_further(self, name: str, prompt: Prompt, params: dict[str, Any]) -> None:
        """What D has taken over it hands on, by itself a P."""
        both = {**params, "do_remote_decode": True}
        self._submit(name, prompt, both, 1, lambda request: self._prefilled(name, prompt, request))

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
        aborted_s: float | None = None,
        is_at_once: bool = False,
    ) -> None:
        """`aborted_s`: after so long the client is gone; None: it may be, at any time. `is_at_once`: it comes again."""
        engine = self.engines[name]
        if not engine.is_alive:
            return
        request_id = self._free_id(engine)
        self.num_requests += 1
        self.num_open += 1

        def ended(request: Request) -> None:
            self.num_open -= 1
            self.open_ids[name].discard(request_id)
            self.retries.ended(request)
            done(request)

        request = Request(request_id, prompt, params, num_out, ended)
        if params is not None and "do_remote_prefill" in params:
            self.retries.asked(request, is_at_once)
        self.open_ids[name].add(request_id)
        self.world.note("%s gets %s, prompt %d/%d, %s", name, request_id, prompt.family, prompt.num_tokens, params)
        engine.submit(request)
        is_p = params is not None and params.get("transfer_mode") == "push" and "do_remote_decode" in params
        if aborted_s is None and self.rng.random() < 0.2 and not (self.is_calm and is_p):
            aborted_s = self.rng.choice((0.02, 0.2, 2.0, 8.0)) * self.rng.random()
        if aborted_s is not None:
            self.world.after(aborted_s, lambda: self._give_up(engine, request))

    def _give_up(self, engine: Engine, request: Request) -> None:
        """Its client is gone, or asks again in the same moment."""
        if engine.is_alive:
            comes_again = self.retries.comes_again(request)
            engine.abort(request)
            if comes_again:
                params, num_out = request.kv_transfer_params, request.max_tokens - request.num_prompt_tokens
                self._submit(engine.name, request.prompt, params, num_out, lambda _: None, is_at_once=True)

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
        engines = self.engines.values()
        served = {taker for engine in engines for worker in engine.workers for taker in worker.pusher.served}
        for engine in engines if self.is_calm else ():
            check_calm(engine, lambda transfer_id: self.retries.may_fail(transfer_id, served))
        return Outcome(
            self.world.num_events,
            self.num_requests,
            sum(len(engine.load_targets) for engine in engines),
            sum(len(engine.failed_loads) for engine in engines),
            self.num_crashes,
        )

    def _busy(self) -> str:
        return ", ".join(f"{engine.name} {list(engine.requests)}" for engine in self.engines.values())


def run_schedule(seed: int, calm: bool | None = None, pushes: float | None = None) -> Outcome:
    """Without a trace. Raises Violation."""
    with all_at_once():
        return Schedule(seed, 0, calm, pushes).run()
