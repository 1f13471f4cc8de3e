# SPDX-License-Identifier: Apache-2.0
"""Former peers that may still be writing, and what is done once they cannot.

A peer that copies one-sidedly may be stopped (by a signal, a debugger, a paused container) in the middle of a copy,
and go on with it long after this end gave up the link. Memory that it was told of must not be given to anyone else
before its own end of the link, or its process, has ended: see `Backend.is_fenced`. Nor before what this end itself
moves over that link has ended.

A backend keeps something of a peer until it has seen that: a descriptor of its process, say. So it is asked also for
links that came to nothing, and where the two ends did not agree on it; no memory waits for those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ClosedError
from ..types import Deadline

if TYPE_CHECKING:
    from ..transfer.backend import Backend
    from .link import Link

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """`then` is called once none of the links' peers can write any more."""

    links: tuple[Link, ...]
    then: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Remnant:
    """Of a link over which nothing was to be moved by that backend, what it may keep of the peer."""

    backend: Backend
    link_id: int

    def is_gone(self) -> bool:
        return self.backend.is_fenced(self.link_id)


class Fences:
    """Thread-safe. Its thread runs only while a former peer is not fenced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._former: list[Link] = []
        self._remnants: set[_Remnant] = set()
        self._awaited: list[_Awaited] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def link_ends(self, link: Link) -> None:
        """Remember a link that leaves the table of links, until its peer is fenced. Twice is a no-op. Never waits."""
        with self._lock:
            if link.backends and link not in self._former:
                self._former.append(link)

    def link_disconnected(self, link: Link, backends: Iterable[Backend]) -> None:
        """These backends have let go of a link: nearly always its peer has, too. Otherwise it is looked after."""
        with self._lock:
            if self._closed:
                return
            self._remnants |= {_Remnant(backend, link.link_id) for backend in backends if backend not in link.backends}
            if self._look():
                self._start()

    def who_may_write(self, cache_id: int) -> list[Link]:
        """Links that have ended, whose peers were told of that cache of ours and may still be writing to it."""
        with self._lock:
            former = list(self._former)
        return [link for link in former if link.answers.has_told_of(cache_id) and not _is_fenced(link)]

    def when_fenced(self, links: Iterable[Link], then: Callable[[], None]) -> None:
        """Call `then` once none of these peers can write any more; at once, in this thread, if that is so already."""
        awaited = _Awaited(tuple(links), then)
        with self._lock:
            if not (is_due := self._closed or _is_due(awaited)):
                self._awaited.append(awaited)
                self._start()
        if is_due:
            then()

    def wait(self, unfenced: Callable[[], bool], deadline: Deadline) -> bool:
        """Whether `unfenced` becomes False in time. Looks at least once; raises ClosedError if `close` was called."""
        pause_s = _FIRST_POLL_S
        while True:
            if self._closed:
                raise ClosedError("finalize was called")
            if not unfenced():
                return True
            left_s = deadline.remaining_s()
            if left_s <= 0:
                return False
            self._closing.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def may_write(self, cluster_id: int) -> bool:
        """Whether the peer of a link to that cluster that has ended may still be writing."""
        with self._lock:
            former = [link for link in self._former if link.peer.cluster_id == cluster_id]
        return not all(_is_fenced(link) for link in former)

    def close(self) -> None:
        """Wait for nobody any more: everything that is awaited is done now. Idempotent."""
        with self._lock:
            self._closed = True
            awaited, self._awaited = self._awaited, []
            self._former = []
            self._remnants = set()
        self._closing.set()
        _do(awaited)

    def _start(self) -> None:
        """With the lock held."""
        if self._thread is not None or self._closed:
            return
        thread = threading.Thread(target=self._run, name="datadist-fences", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more; the next link that ends tries again
            logger.error("nobody sees when former peers can write no more: %s", error)
            return
        self._thread = thread

    def _run(self) -> None:
        pause_s = _FIRST_POLL_S
        while not self._closing.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            with self._lock:
                some_left = self._look()
                due = [awaited for awaited in self._awaited if _is_due(awaited)]
                self._awaited = [awaited for awaited in self._awaited if awaited not in due]
                is_last = not self._awaited and not some_left
                if is_last:
                    self._thread = None
            _do(due)
            if is_last:
                return

    def _look(self) -> bool:
        """Whether something is left to look after. With the lock held."""
        self._former = [old for old in self._former if not _is_fenced(old)]
        self._remnants = {remnant for remnant in self._remnants if not remnant.is_gone()}
        return bool(self._former or self._remnants)


def _is_fenced(link: Link) -> bool:
    return link.is_idle and all(backend.is_fenced(link.link_id) for backend in link.backends)


def _is_due(awaited: _Awaited) -> bool:
    return all(_is_fenced(link) for link in awaited.links)


def _do(awaited: Sequence[_Awaited]) -> None:
    for one in awaited:
        one.then()
