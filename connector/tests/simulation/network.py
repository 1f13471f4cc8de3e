# SPDX-License-Identifier: Apache-2.0
"""The network between workers: links, and calls over them. All of it may be slow, lost or broken.

As the real transport permits it: a call may be performed although its answer is lost; what is sent over one link may
arrive after what is sent later over another; a link may be broken for a while before its ends notice, each at its own
time; and as long as P's end has not noticed, P can write to D's memory over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
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
    from .pusher import SimSend
    from .worker import SimWorker

Answering = Callable[[object], None]


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


def any_faults(rng: Random) -> Faults:
    bad = rng.choice((0.0, 0.03, 0.15))
    return Faults(
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


class LinkEnd:
    """What one worker has of a link. `is_closed`: it knows that the link is down, and uses it no more."""

    def __init__(self, link: Link, worker: SimWorker) -> None:
        self.link = link
        self.worker = worker
        self.is_closed = False
        self.on_lost: list[Callable[[LLMException], None]] = []

    @property
    def other(self) -> LinkEnd:
        return self.link.far if self.link.near is self else self.link.near

    def close(self) -> None:
        """Now, whatever the worker does: it dies, or does it itself."""
        self.link.is_up = False
        if not self.is_closed:
            self.is_closed = True
            waiting, self.on_lost = self.on_lost, []
            for lost in waiting:
                lost(PeerLost("the connection broke"))


class Link:
    """One connection that D's worker (`near`) has made to P's (`far`). `is_up`: calls get through."""

    def __init__(self, source: SimWorker, target: SimWorker, link_id: int) -> None:
        self.link_id = link_id
        self.near = LinkEnd(self, source)
        self.far = LinkEnd(self, target)
        self.is_up = True

    @property
    def target(self) -> SimWorker:
        return self.far.worker

    @property
    def is_fenced(self) -> bool:
        """P cannot write over it any more."""
        return self.far.is_closed or not self.far.worker.is_alive

    def cut(self, world: World) -> None:
        """Nothing gets through any more; the ends notice sometime later."""
        if self.is_up:
            self.is_up = False
            for end in (self.near, self.far):
                wait_s = world.rng.choice((0.0, 0.01, 0.3, 2.0)) * world.rng.random()
                world.after(wait_s, lambda end=end: end.worker.act(end.close))  # type: ignore[misc]

    def drop(self, world: World) -> None:
        """D gives it up. P will notice."""
        self.cut(world)
        self.near.close()


class Network:
    """Who listens where, and how bad things are right now."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = Faults()
        self.is_cut = False
        self.listening: dict[tuple[str, int], SimWorker] = {}
        self.links: list[Link] = []
        self._num_links = 0

    def delay_s(self) -> float:
        rng, faults = self.world.rng, self.faults
        delay = min(rng.expovariate(1.0), 4.0) * faults.delay_s
        return delay * 40 if rng.random() < faults.very_slow else delay

    def sends_to(self, cluster_id: int) -> list[SimSend]:
        """What may still be written to that worker, by whomever."""
        return [
            send
            for worker in self.listening.values()
            if worker.is_alive
            for push, send in worker.pusher.sends.items()
            if push.cluster_id == cluster_id and not send.is_cut
        ]

    def cut_all(self) -> None:
        for link in self.links:
            link.cut(self.world)
        self.links = [link for link in self.links if not (link.near.is_closed and link.far.is_closed)]

    def connect(
        self,
        source: SimWorker,
        endpoint: Endpoint,
        done: Callable[[Link | LLMException], None],
        timeout_s: float,
    ) -> None:
        """As `LLMDataDist.link_clusters`: a worker with another cluster id at that address refuses."""
        rng, faults = self.world.rng, self.faults
        attempt = [done]
        once = lambda outcome: source.act(lambda: attempt.pop()(outcome) if attempt else None)  # noqa: E731
        self.world.after(timeout_s, lambda: once(TimedOut("no link in time")))
        if rng.random() < faults.link_hangs:
            return
        fails = rng.random() < faults.link_fails
        target = self.listening.get((endpoint.host, endpoint.port))

        def arrived() -> None:
            if attempt:
                self._connected(source, endpoint, fails, once)

        if target is None or not target.is_alive:
            self.world.after(2 * self.delay_s(), arrived)
        else:
            self.world.after(2 * self.delay_s(), lambda: target.act(arrived))

    def _connected(
        self, source: SimWorker, endpoint: Endpoint, fails: bool, done: Callable[[Link | LLMException], None]
    ) -> None:
        if self.world.rng.random() < self.faults.odd:
            done(ParamInvalid("the peer does not fit"))
            return
        target = self.listening.get((endpoint.host, endpoint.port))
        if fails or self.is_cut or target is None or not target.is_alive or target.cluster_id != endpoint.cluster_id:
            done(LinkFailed(f"nobody of cluster {endpoint.cluster_id} at {endpoint.host}:{endpoint.port}"))
            return
        if not source.is_alive:
            return
        self._num_links += 1
        link = Link(source, target, self._num_links)
        self.links.append(link)
        target.linked_by(link.far)
        done(link)


class Call:
    """One question over a link, from the worker at one of its ends; `done` hears of its end exactly once."""

    def __init__(self, network: Network, end: LinkEnd | None, done: Answering) -> None:
        self._network = network
        self._end_of_caller = end
        self._done: Answering | None = done

    def start(
        self,
        perform: Callable[[SimWorker, Answering], None],
        time_out: Callable[[Callable[[], None]], None],
    ) -> None:
        """`perform(worker, answer)` is done at the other end; `time_out` sets the caller's own timer."""
        world, end = self._network.world, self._end_of_caller
        if end is None or end.is_closed:
            world.after(0.0, lambda: self._end(NotYetLinked("there is no link")))
            return
        end.on_lost.append(self._end)
        time_out(lambda: self._end(TimedOut("no answer in time")))
        faults, luck = self._network.faults, world.rng.random()
        arrives_s = self._network.delay_s()
        if luck < faults.call_breaks:
            end.link.cut(world)
            if world.rng.random() < 0.5:
                return
        elif luck < faults.call_breaks + faults.call_late:
            arrives_s += world.rng.uniform(1, 12)
        world.after(arrives_s, lambda: end.other.worker.act(lambda: self._arrived(end, perform)))

    def _arrived(self, end: LinkEnd, perform: Callable[[SimWorker, Answering], None]) -> None:
        if not self._network.is_cut:
            perform(end.other.worker, lambda answer: self._answered(end, answer))

    def _answered(self, end: LinkEnd, answer: object) -> None:
        world = self._network.world
        if world.rng.random() < self._network.faults.answer_lost:
            if world.rng.random() < 0.7:
                end.link.cut(world)
            return
        if world.rng.random() < self._network.faults.odd:
            answer = ProtocolError("the answer cannot be read")
        if end.link.is_up and not self._network.is_cut:
            world.after(self._network.delay_s(), lambda: end.worker.act(lambda: self._end(answer)))

    def _end(self, outcome: object) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(outcome)
