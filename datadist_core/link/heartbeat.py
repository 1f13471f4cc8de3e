# SPDX-License-Identifier: Apache-2.0
"""Noticing that a peer is gone: by its process where that can be seen, else by its silence.

Theory of operation. A process that ends closes its connections; that is noticed at once, without anything here. Two
things remain.

A process on this host may have died while a child of it holds its connections. Its peers watch the process itself
(`process`), and give it up soon after its end; not at once, because what it has sent before is still to be read.

A host or a network may go silent, and a process may be stopped or hang. So each end sends a Ping every heartbeat, and
a peer of which nothing has come for three heartbeats is given up. That a peer is stopped does not mean that it is dead:
it may be in a debugger, or in a container that is moved. But nobody can wait for it longer than for a dead one; if it
comes back, it finds its link closed, and may link again.

A busy host must not make a peer look silent. What counts is not the clock, but how often this end has looked and found
nothing new: if our own thread did not run for a minute, that counts as one look and not as a minute of silence, and
what has come in meanwhile is read first. Each end says how long its heartbeats are, and the longer ones of both count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import PeerLost
from ..wire import messages as m
from .process import open_pidfd

if TYPE_CHECKING:
    from .link import Link

logger = logging.getLogger(__name__)

#: A silent peer is given up after this many heartbeats.
MISSED_HEARTBEATS = 3
#: And it is late after so many.
LATE_HEARTBEATS = 1.5
#: This often within a heartbeat the links are looked at.
LOOKS_PER_HEARTBEAT = 4
#: Heartbeats that are longer or shorter than this are nonsense, whoever says so.
SHORTEST_HEARTBEAT_S, LONGEST_HEARTBEAT_S = 0.05, 60.0
#: Between two warnings that this end is late.
WARNING_PAUSE_S = 60.0
#: What a process has sent before its end is read for so long.
LAST_WORDS_S = 0.5


class Pulse:
    """What the heartbeats know of one link. Changed in the control loop's thread only.

    `is_late`: a sign of life is overdue, so that the peer may be gone, but it is not given up yet.
    """

    __slots__ = ("heard_s", "is_late", "next_ping_s", "silent_looks")

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.next_ping_s = 0.0
        self.silent_looks = 0
        self.is_late = False


class Heartbeats:
    """Looks at all links of one LLMDataDist, in its control loop's thread.

    Args:
        interval_s: between two Pings that we send.
        links: those that have not ended.
    """

    def __init__(self, interval_s: float, links: Callable[[], Iterable[Link]]) -> None:
        self._links = links
        self._interval_s = interval_s
        self.look_s = interval_s / LOOKS_PER_HEARTBEAT
        self._ping = m.Ping()
        self._next_warning_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(self.look_s)
            now_s = time.monotonic()
            self._warn_if_late(now_s - before_s - self.look_s)
            self._look_at_all(now_s)

    def _look_at_all(self, now_s: float) -> None:
        """Not in `run`, which lives on and would keep the last one alive."""
        for link in self._links():
            self._look_at(link, now_s)

    def _warn_if_late(self, late_s: float) -> None:
        """Peers may give us up in the meantime; then this is why."""
        now_s = time.monotonic()
        if late_s > self._interval_s / 2 and now_s >= self._next_warning_s and any(True for _ in self._links()):
            self._next_warning_s = now_s + WARNING_PAUSE_S
            logger.warning(
                "heartbeats were sent %.1f s late: the threads of this process do not get to run (too little processor "
                "time, or a library that holds the interpreter lock); a longer heartbeat_interval makes peers wait",
                late_s,
            )

    def _look_at(self, link: Link, now_s: float) -> None:
        pulse, heard_s = link.pulse, link.channel.last_received_s
        pulse.silent_looks = pulse.silent_looks + 1 if heard_s == pulse.heard_s else 0
        pulse.heard_s = heard_s
        pulse.is_late = pulse.silent_looks * self.look_s > LATE_HEARTBEATS * self._beat_s(link)
        if pulse.silent_looks >= self._most_silent_looks(link) and not link.channel.has_unread():
            link.close(PeerLost(f"cluster {link.peer.cluster_id} {self._silence(link)}"))
        elif link.is_up and now_s >= pulse.next_ping_s:
            # By the clock, because this end may look too seldom; and rather too early, at its next look, than too late.
            pulse.next_ping_s = now_s + self._interval_s - self.look_s / 2
            link.channel.send(self._ping)

    def _most_silent_looks(self, link: Link) -> int:
        """Two less than there are in the time: the first comes at any moment after the last sign of life, and each may
        be a little late."""
        return max(2, math.floor(MISSED_HEARTBEATS * self._beat_s(link) / self.look_s) - 2)

    def _beat_s(self, link: Link) -> float:
        return max(self._interval_s, known_heartbeat(link.peer.heartbeat_s, self._interval_s))

    def _silence(self, link: Link) -> str:
        silent_s = link.pulse.silent_looks * self.look_s
        return f"has been silent for {silent_s:.1f} s or more; its heartbeats are {self._beat_s(link):g} s apart"


def known_heartbeat(said_s: float, otherwise_s: float) -> float:
    """What a peer says its heartbeats are; the peer is not trusted."""
    return said_s if SHORTEST_HEARTBEAT_S <= said_s <= LONGEST_HEARTBEAT_S else otherwise_s


@dataclass(slots=True)
class _Watched:
    pidfd: int
    links: set[Link] = field(default_factory=set)


class PeerProcesses:
    """The processes at the other ends of links, as far as they are on this host. Thread-safe.

    One descriptor per process, however many links lead there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._watched: dict[bytes, _Watched] = {}
        self._pidfds: set[int] = set()
        self._closed = False

    def watch(self, link: Link) -> None:
        """Give the link up soon after its peer's process has ended. No-op where that cannot be seen."""
        process = link.peer.process
        if process is None:
            return
        with self._lock:
            if self._closed:
                return
            watched = self._watched.get(process.door)
            if watched is None:
                pidfd = open_pidfd(process)
                if pidfd is None:
                    return
                watched = self._watched[process.door] = _Watched(pidfd)
                self._pidfds.add(pidfd)
                self._in_loop(self._loop.add_reader, pidfd, self._ended, process.door)
            watched.links.add(link)

    def forget(self, link: Link) -> None:
        """Idempotent."""
        process = link.peer.process
        with self._lock:
            watched = None if process is None else self._watched.get(process.door)
            if process is None or watched is None:
                return
            watched.links.discard(link)
            if not watched.links:
                del self._watched[process.door]
                self._in_loop(self._stop, watched.pidfd)

    def close(self) -> None:
        """The loop has stopped. Nothing is watched any more, nor will be."""
        with self._lock:
            self._closed = True
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._pidfds.clear()
            self._watched.clear()

    def num_watched(self) -> int:
        with self._lock:
            return len(self._watched)

    def _in_loop(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has stopped: `close` does the rest
            self._loop.call_soon_threadsafe(function, *args)

    def _stop(self, pidfd: int) -> None:
        with self._lock:
            if pidfd in self._pidfds:
                self._pidfds.discard(pidfd)
                self._loop.remove_reader(pidfd)
                os.close(pidfd)

    def _ended(self, door: bytes) -> None:
        """A process has ended (loop's thread)."""
        with self._lock:
            watched = self._watched.get(door)
        if watched is not None:
            self._loop.remove_reader(watched.pidfd)
            self._loop.call_later(LAST_WORDS_S, self._give_up, door)

    def _give_up(self, door: bytes) -> None:
        with self._lock:
            watched = self._watched.pop(door, None)
        if watched is None:
            return
        self._stop(watched.pidfd)
        for link in watched.links:
            link.close(PeerLost(f"the process of cluster {link.peer.cluster_id} has ended"))
