# SPDX-License-Identifier: Apache-2.0
"""All links of one LLMDataDist: dialling many at once, accepting, replacing dead ones, heartbeats, unlinking."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ..checks import HostPort
from ..errors import (
    AlreadyLinked,
    ClosedError,
    LinkBusy,
    LinkFailed,
    LLMException,
    NotYetLinked,
    PeerLost,
    TimedOut,
)
from ..settings import Settings
from ..transfer.engine import TransferEngine
from ..types import Deadline, LLMStatusCode
from ..wire import messages as m
from ..wire.channel import HELLO_TIMEOUT_S, Channel, ControlLoop
from .answers import CacheService
from .fanout import run_all
from .handshake import HEARTBEAT_S, Handshake, LocalEnd
from .link import Link, LinkServices, wait_for
from .listening import Listeners
from .probe import ProbeResult
from .state import LinkState

logger = logging.getLogger(__name__)

#: A silent peer is given up after this many heartbeats.
MISSED_HEARTBEATS = 3
#: An accepted handshake may take this long in all.
ACCEPT_TIMEOUT_S = 30.0
#: When the peer unlinks, our own running transfers get this long to end.
UNLINK_WAIT_S = 3.0
#: Calls look at their deadline themselves; this is for one that is stuck somewhere else.
LATE_S = 2.0
_PARTED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster to dial: its id, its addresses in order of trial, a local address to dial from or None."""

    cluster_id: int
    addresses: tuple[HostPort, ...]
    local_host: str | None = None


class LinkManager:
    """Thread-safe. Links are in the table from the moment they are up until they are down."""

    def __init__(
        self,
        local: LocalEnd,
        settings: Settings,
        engine: TransferEngine,
        caches: CacheService,
        serve_call: Callable[[str, int, bytes], bytes],
        on_link_lost: Callable[[int, LLMException], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._on_link_lost = on_link_lost
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="datadist-link")
        self._services = LinkServices(engine, self._executor, caches, serve_call, self._on_unlink, self._on_down)
        self._handshake = Handshake(local, engine, self._enter, self._is_dialling)
        self._loop = ControlLoop(str(local.cluster_id))
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._dialling: set[int] = set()
        #: In the handshake, at either end.
        self._unfinished: set[Link] = set()
        self._failures: dict[int, LLMException] = {}
        self._link_ids = itertools.count(1)
        self._closed = False
        #: Peers that asked to part and have no answer yet; see `close`.
        self._answering: set[Link] = set()
        self._answered = threading.Condition(self._lock)
        self.listeners = Listeners(self._loop, self._accept, engine.listen)
        #: Told of every link that has ended, also of one that we ended ourselves. Must not block.
        self.on_gone: Callable[[Link, LLMException], None] = lambda link, error: None
        self._heartbeat = asyncio.run_coroutine_threadsafe(self._beat(), self._loop.loop)

    # -- the table

    def get(self, cluster_id: int) -> Link:
        """The link that is up. Raises NotYetLinked with what is known of why not, LinkBusy while it is unlinked."""
        with self._lock:
            link = self._links.get(cluster_id)
            reason = self._failures.get(cluster_id)
        if link is not None and link.state in (LinkState.UNLINKING, LinkState.UNLINKING_PEER):
            raise LinkBusy(f"the link to cluster {cluster_id} is being unlinked")
        if link is None or not link.is_up:
            last = f" (last: {reason})" if reason else ""
            raise NotYetLinked(f"no link to cluster {cluster_id}{last}; link_clusters first")
        return link

    def peek(self, cluster_id: int) -> Link | None:
        """The link, in whatever state; None if there is none."""
        return self._links.get(cluster_id)

    def links(self) -> list[Link]:
        """All that have not ended."""
        with self._lock:
            return [link for link in self._links.values() if link.state is not LinkState.DOWN]

    def failure(self, cluster_id: int) -> LLMException | None:
        """Why the last attempt to link to that cluster failed, or why its link broke."""
        with self._lock:
            return self._failures.get(cluster_id)

    def by_link_id(self, link_id: int) -> Link | None:
        with self._lock:
            return next((x for x in self._links.values() if x.link_id == link_id), None)

    def note_failure(self, cluster_id: int, error: LLMException) -> None:
        """Have `failure` say this until that cluster is linked."""
        with self._lock:
            if cluster_id not in self._links:
                self._failures[cluster_id] = error

    # -- accepting

    def _accept(self, channel: Channel) -> None:
        """A stranger has connected (control loop's thread)."""
        link = Link(next(self._link_ids), channel, self._services, dialling=False)
        with self._lock:
            self._unfinished.add(link)
        link.expect(m.Hello).add_done_callback(lambda _: self._hello_came(link))
        self._loop.loop.call_later(HELLO_TIMEOUT_S, self._drop_silent, link)

    def _drop_silent(self, link: Link) -> None:
        if link.state is LinkState.START:
            link.close(TimedOut(f"{link.channel.peer_address} did not say hello within {HELLO_TIMEOUT_S} s"))

    def _hello_came(self, link: Link) -> None:
        try:
            self._executor.submit(self._answer_hello, link)
        except RuntimeError:
            logger.debug("a link was asked for while finalizing")

    def _answer_hello(self, link: Link) -> None:
        deadline = Deadline.after(ACCEPT_TIMEOUT_S)
        try:
            hello = link.expect(m.Hello).result(0)
            if isinstance(hello, m.Hello):
                self._handshake.answer(link, hello, deadline)
        except LLMException as error:
            logger.info("a link from %s was not made: %s", link.channel.peer_address, error)
            self._handshake.refuse(link, error)
        finally:
            with self._lock:
                self._unfinished.discard(link)

    # -- dialling

    def link(self, targets: Sequence[Target], deadline: Deadline) -> list[LLMStatusCode]:
        """Dial all at once; one status each, in order. A failed one leaves nothing behind.

        A cluster that is named again gets LLM_PARAM_INVALID there; its first place counts.
        """
        again = _repeated([target.cluster_id for target in targets])
        calls = [
            partial(self._refuse_repeated, t.cluster_id) if i in again else partial(self._link_one, t, deadline)
            for i, t in enumerate(targets)
        ]
        return run_all("link", calls, _late(deadline), LLMStatusCode.LLM_TIMEOUT)

    def connect(self, target: Target, deadline: Deadline) -> Link:
        """Dial once. Raises what went wrong, AlreadyLinked among it."""
        self._begin_dialling(target.cluster_id)
        try:
            return self._dial(target, deadline)
        finally:
            with self._lock:
                self._dialling.discard(target.cluster_id)

    def _refuse_repeated(self, cluster_id: int) -> LLMStatusCode:
        logger.warning("cluster %d is named twice in one call; only its first place counts", cluster_id)
        return LLMStatusCode.LLM_PARAM_INVALID

    def _link_one(self, target: Target, deadline: Deadline) -> LLMStatusCode:
        try:
            self._dial_with_retries(target, deadline)
        except LLMException as error:
            if not isinstance(error, AlreadyLinked):
                logger.warning("link to cluster %d failed: %s", target.cluster_id, error)
                with self._lock:
                    self._failures[target.cluster_id] = error
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    def _dial_with_retries(self, target: Target, deadline: Deadline) -> None:
        self._begin_dialling(target.cluster_id)
        if self._settings.link_total_time_s:
            deadline = deadline.earlier(self._settings.link_total_time_s)
        try:
            for attempt in itertools.count(1):
                try:
                    self._dial(target, deadline)
                    return
                except PeerLost:
                    pause_s = 0.05 * 2**attempt
                    if attempt >= self._settings.link_retry_count or deadline.remaining_s() <= pause_s:
                        raise
                    threading.Event().wait(pause_s)
        finally:
            with self._lock:
                self._dialling.discard(target.cluster_id)

    def _is_dialling(self, cluster_id: int) -> bool:
        with self._lock:
            return cluster_id in self._dialling

    def _begin_dialling(self, cluster_id: int) -> None:
        with self._lock:
            self._check_open()
            link = self._links.get(cluster_id)
            if link is not None and link.is_up:
                raise AlreadyLinked(f"cluster {cluster_id} is linked already")
            if cluster_id in self._dialling:
                raise LinkFailed(f"cluster {cluster_id} is being linked already", LLMStatusCode.LLM_PROCESSING_LINK)
            self._dialling.add(cluster_id)

    def _dial(self, target: Target, deadline: Deadline) -> Link:
        link = Link(next(self._link_ids), self._connect(target, deadline), self._services, dialling=True)
        try:
            with self._lock:
                self._check_open()
                self._unfinished.add(link)
            self._handshake.greet(link, target.cluster_id, secrets.token_bytes(16), deadline)
        except LLMException as error:
            self._drop(link, error)
            raise
        finally:
            with self._lock:
                self._unfinished.discard(link)
        return link

    def _connect(self, target: Target, deadline: Deadline) -> Channel:
        last: LLMException = LinkFailed(
            f"cluster {target.cluster_id} has no remote address", LLMStatusCode.LLM_PARAM_INVALID
        )
        for address in target.addresses:
            try:
                return self._loop.dial(address, target.local_host, deadline)
            except (PeerLost, TimedOut) as error:
                last = error
        raise last

    # -- both ends

    def _enter(self, link: Link, names: Sequence[str], result: ProbeResult) -> None:
        """Put a link into the table, in place of an older one from the same cluster.

        Raises AlreadyLinked if that very peer has linked to us while we dialled it: it may be using its link already.
        """
        link.backends = [self._engine.backends[n] for n in names if n in result.usable]
        link.rejected = result.rejected
        for name in set(result.usable) - set(names):
            self._engine.backends[name].disconnect(link.link_id)
        with self._lock:
            self._check_open()
            previous = self._links.get(link.peer.cluster_id)
            if link.dialling and previous is not None and previous.is_up and _same_peer(previous, link):
                raise AlreadyLinked(f"cluster {link.peer.cluster_id} has linked to this end meanwhile")
            self._links[link.peer.cluster_id] = link
            self._failures.pop(link.peer.cluster_id, None)
        if previous is not None:
            previous.close(PeerLost("a new link from the same cluster replaced this one"))
        info = link.info()
        logger.info(
            "linked to cluster %d at %s over %s (not used: %s)",
            info.remote_cluster_id,
            info.peer_address,
            ", ".join(info.backends),
            info.rejected or "none",
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("finalize was called")

    def _drop(self, link: Link, error: LLMException) -> None:
        if isinstance(error, LinkFailed) and link.state in (LinkState.PROBING, LinkState.PROBED):
            self._handshake.refuse(link, error)
        else:
            link.close(error)

    def _on_down(self, link: Link, error: LLMException) -> None:
        """A channel has closed (executor): release what the link had."""
        for backend in self._engine.backends.values():
            backend.disconnect(link.link_id)
        with self._lock:
            self._unfinished.discard(link)
            was_linked = self._links.get(link.peer.cluster_id) is link
            if was_linked:
                del self._links[link.peer.cluster_id]
                self._failures[link.peer.cluster_id] = error
        self.on_gone(link, error)
        if was_linked and not link.parting and not isinstance(error, ClosedError):
            logger.warning("the link to cluster %d is gone: %s", link.peer.cluster_id, error)
            self._on_link_lost(link.peer.cluster_id, error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for link in self.links():
                self._beat_one(link)

    def _beat_one(self, link: Link) -> None:
        silent_s = self._loop.loop.time() - link.channel.last_received_s
        if silent_s > MISSED_HEARTBEATS * HEARTBEAT_S:
            link.close(PeerLost(f"cluster {link.peer.cluster_id} has been silent for {silent_s:.1f} s"))
        elif link.is_up:
            link.channel.send(m.Ping())

    # -- the end of links

    def unlink(self, cluster_ids: Sequence[int], deadline: Deadline, force: bool) -> list[LLMStatusCode]:
        """End links, all at once; one status each, in order. Not forced: transfers end first, and the peer is told.

        A cluster that is named again gets LLM_PARAM_INVALID there.
        """
        again = _repeated(cluster_ids)
        calls = [
            partial(self._refuse_repeated, c) if i in again else partial(self._unlink_one, c, deadline, force)
            for i, c in enumerate(cluster_ids)
        ]
        return run_all("unlink", calls, _late(deadline), LLMStatusCode.LLM_TIMEOUT)

    def end(self, links: Sequence[Link], deadline: Deadline) -> None:
        """End these links, all at once: as `unlink` does, but by force what has not ended by the deadline."""
        run_all("unlink", [partial(self._end_one, link, deadline) for link in links], _late(deadline), None)

    def _unlink_one(self, cluster_id: int, deadline: Deadline, force: bool) -> LLMStatusCode:
        link = self.peek(cluster_id)
        if link is None:
            return LLMStatusCode.LLM_NOT_YET_LINK
        if link.state is LinkState.DOWN:  # noticed already, and on its way out of the table
            status = LLMStatusCode.LLM_NOT_YET_LINK
        else:
            status = LLMStatusCode.LLM_SUCCESS if force else self._part(link, deadline)
        if force or link.state is LinkState.DOWN or status in _PARTED:
            self._release(link, ClosedError(f"the link to cluster {cluster_id} was unlinked here"))
        return status

    def _end_one(self, link: Link, deadline: Deadline) -> None:
        if self._part(link, deadline) is LLMStatusCode.LLM_NOT_YET_LINK:
            link.wait_idle(deadline)
        self._release(link, ClosedError(f"the link to cluster {link.peer.cluster_id} was unlinked here"))

    def _release(self, link: Link, reason: LLMException) -> None:
        self._forget(link)
        link.close(reason)

    def _forget(self, link: Link) -> None:
        """Out of the table and out of the backends; the connection stays."""
        cluster_id = link.peer.cluster_id
        with self._lock:
            if self._links.get(cluster_id) is link:
                del self._links[cluster_id]
                self._failures.pop(cluster_id, None)
        for backend in self._engine.backends.values():
            backend.disconnect(link.link_id)

    def _on_unlink(self, link: Link) -> None:
        """The peer asked to part (executor): our transfers end first, then our end is cleaned."""
        with self._lock:
            self._answering.add(link)
        link.wait_idle(Deadline.after(UNLINK_WAIT_S))
        self._forget(link)
        try:
            link.send(m.Unlinked())
        except LLMException as error:
            logger.debug("the unlink could not be confirmed: %s", error)
        link.close(ClosedError(f"cluster {link.peer.cluster_id} unlinked"))
        with self._lock:
            self._answering.discard(link)
            self._answered.notify_all()

    def _is_answering(self) -> bool:
        """Whether a peer waits for us to confirm its unlink. With the lock held."""
        asked = any(link.state is LinkState.UNLINKING_PEER for link in self._links.values())
        return asked or bool(self._answering)

    def _part(self, link: Link, deadline: Deadline) -> LLMStatusCode:
        """Take leave of the peer. LLM_NOT_YET_LINK if the link is not up any more, or another thread is ending it."""
        with self._lock:
            if link.parting or not link.is_up:
                return LLMStatusCode.LLM_NOT_YET_LINK
            link.parting = True
        if not link.wait_idle(deadline):
            link.parting = False
            logger.warning("unlinking cluster %d while a transfer is running", link.peer.cluster_id)
            return LLMStatusCode.LLM_UNLINK_FAILED
        try:
            link.send(m.Unlink())
            wait_for(link.expect(m.Unlinked), deadline, "the peer did not confirm the unlink in time")
        except LLMException as error:
            logger.warning("cluster %d did not clean up its end: %s", link.peer.cluster_id, error)
            return LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        return LLMStatusCode.LLM_SUCCESS

    def close(self) -> None:
        """Close every link and the listener; idempotent. Peers notice at once, because the connections close."""
        with self._lock:
            if self._closed:
                return
            # Who sees that its peer has unlinked may finalize at once; the peer is still to hear that all is well.
            self._answered.wait_for(lambda: not self._is_answering(), UNLINK_WAIT_S)
            self._closed = True
            links = [*self._links.values(), *self._unfinished]
        self._heartbeat.cancel()
        for link in links:
            link.close(ClosedError("finalize was called"))
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _repeated(cluster_ids: Sequence[int]) -> set[int]:
    """Places of ids that stand further in front already."""
    seen: set[int] = set()
    again = set()
    for i, cluster_id in enumerate(cluster_ids):
        if cluster_id in seen:
            again.add(i)
        seen.add(cluster_id)
    return again


def _late(deadline: Deadline) -> Deadline:
    return Deadline(deadline.at_s + LATE_S)


def _same_peer(one: Link, other: Link) -> bool:
    return one.peer.incarnation == other.peer.incarnation
