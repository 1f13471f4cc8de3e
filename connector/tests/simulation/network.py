# SPDX-License-Identifier: Apache-2.0
"""The network between workers: links, and calls over them. All of it may be slow, lost or broken.

As the real transport permits it: a call may be performed although its answer is lost; what is sent over one link may
arrive after what is sent later over another; a link may be broken for a while before its ends notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datadist_core.errors import (
    LinkFailed,
    LLMException,
    NotYetLinked,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    TimedOut,
)
from vllm_datadist.messages import Endpoint

from .world import World

if TYPE_CHECKING:
    from .worker import SimWorker


@dataclass
class Faults:
    """How bad the network is. Probabilities are per link, call or block. `odd`: errors that are no link's fault."""

    link_fails: float = 0.0
    link_hangs: float = 0.0
    call_breaks: float = 0.0
    answer_lost: float = 0.0
    call_late: float = 0.0
    read_stalls: float = 0.0
    read_hangs: float = 0.0
    very_slow: float = 0.0
    odd: float = 0.0
    wakes_late_s: float = 0.0
    delay_s: float = 0.005


class Link:
    """One connection of a D worker to a P worker. `is_up`: bytes get through; `is_noticed`: D knows that it is down."""

    def __init__(self, target: SimWorker) -> None:
        self.target = target
        self.is_up = True
        self.is_noticed = False
        self.on_lost: list[Callable[[LLMException], None]] = []

    def cut(self, world: World) -> None:
        """Nothing gets through any more; the end notices sometime later."""
        if self.is_up:
            self.is_up = False
            world.after(world.rng.choice((0.0, 0.01, 0.3, 2.0)) * world.rng.random(), self.notice)

    def notice(self) -> None:
        self.is_up = False
        if not self.is_noticed:
            self.is_noticed = True
            waiting, self.on_lost = self.on_lost, []
            for lost in waiting:
                lost(PeerLost("the connection broke"))


class Network:
    """Who listens where, and how bad things are right now."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = Faults()
        self.is_cut = False
        self.listening: dict[tuple[str, int], SimWorker] = {}
        self.links: list[Link] = []

    def delay_s(self) -> float:
        rng, faults = self.world.rng, self.faults
        delay = min(rng.expovariate(1.0), 4.0) * faults.delay_s
        return delay * 40 if rng.random() < faults.very_slow else delay

    def cut_all(self) -> None:
        for link in self.links:
            link.cut(self.world)
        self.links = [link for link in self.links if not link.is_noticed]

    def connect(self, endpoint: Endpoint, done: Callable[[Link | LLMException], None], timeout_s: float) -> None:
        """As `LLMDataDist.link_clusters`: a worker with another cluster id at that address refuses."""
        rng, faults = self.world.rng, self.faults
        if rng.random() < faults.link_hangs:
            self.world.after(timeout_s, lambda: done(TimedOut("no link in time")))
            return
        fails = rng.random() < faults.link_fails
        self.world.after(2 * self.delay_s(), lambda: self._connected(endpoint, fails, done))

    def _connected(self, endpoint: Endpoint, fails: bool, done: Callable[[Link | LLMException], None]) -> None:
        if self.world.rng.random() < self.faults.odd:
            done(ParamInvalid("the peer does not fit"))
            return
        target = self.listening.get((endpoint.host, endpoint.port))
        if fails or self.is_cut or target is None or not target.is_alive or target.cluster_id != endpoint.cluster_id:
            done(LinkFailed(f"nobody of cluster {endpoint.cluster_id} at {endpoint.host}:{endpoint.port}"))
            return
        link = Link(target)
        self.links.append(link)
        done(link)


class Call:
    """One question to P over a link; `done` hears of its end exactly once."""

    def __init__(self, network: Network, link: Link | None, done: Callable[[object], None]) -> None:
        self._network = network
        self._link = link
        self._done: Callable[[object], None] | None = done

    def start(
        self,
        perform: Callable[[SimWorker, Callable[[object], None]], None],
        time_out: Callable[[Callable[[], None]], None],
    ) -> None:
        """`perform(worker, answer)` is done at P; `time_out` sets the caller's own timer."""
        world, link = self._network.world, self._link
        if link is None or link.is_noticed:
            world.after(0.0, lambda: self._end(NotYetLinked("there is no link")))
            return
        link.on_lost.append(self._end)
        time_out(lambda: self._end(TimedOut("no answer in time")))
        faults, luck = self._network.faults, world.rng.random()
        arrives_s = self._network.delay_s()
        if luck < faults.call_breaks:
            link.cut(world)
            if world.rng.random() < 0.5:
                return
        elif luck < faults.call_breaks + faults.call_late:
            arrives_s += world.rng.uniform(1, 12)
        world.after(arrives_s, lambda: self._arrived(link, perform))

    def _arrived(self, link: Link, perform: Callable[[SimWorker, Callable[[object], None]], None]) -> None:
        if link.target.is_alive and not self._network.is_cut:
            perform(link.target, lambda answer: self._answered(link, answer))

    def _answered(self, link: Link, answer: object) -> None:
        world = self._network.world
        if world.rng.random() < self._network.faults.answer_lost:
            if world.rng.random() < 0.7:
                link.cut(world)
            return
        if world.rng.random() < self._network.faults.odd:
            answer = ProtocolError("the answer cannot be read")
        if link.is_up and not self._network.is_cut:
            world.after(self._network.delay_s(), lambda: self._end(answer))

    def _end(self, outcome: object) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(outcome)
