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
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from ..config import HostPort, Settings
from ..errors import (
    AlreadyLinked,
    ClosedError,
    LinkFailed,
    LLMException,
    NotYetLinked,
    PeerLost,
    ProtocolError,
    TimedOut,
)
from ..transfer.engine import TransferEngine
from ..types import Deadline, LLMRole, LLMStatusCode
from ..wire import messages as m
from ..wire.channel import HELLO_TIMEOUT_S, Channel, ControlLoop
from .link import Link, LinkServices, wait_for
from .probe import BeaconMemory, ProbeResult, probe_backends
from .state import LinkState

logger = logging.getLogger(__name__)

#: A dead process shows at once, by its closed connection. Heartbeats are for hosts and networks that go silent, and
#: must not take a peer for dead that only has too little processor time.
HEARTBEAT_S = 4.0
#: A silent peer is given up after this many heartbeats.
MISSED_HEARTBEATS = 3
#: An accepted handshake may take this long in all.
ACCEPT_TIMEOUT_S = 30.0
#: When the peer unlinks, our own running transfers get this long to end.
UNLINK_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What this end says of itself in a handshake."""

    cluster_id: int
    incarnation: bytes
    v2: bool
    software: str
    beacon: m.Beacon
    memory: BeaconMemory
    role: Callable[[], LLMRole]


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
        serve_lookup: Callable[[m.Lookup, int], m.CacheInfo],
        serve_call: Callable[[str, int, bytes], bytes],
        on_link_lost: Callable[[int, LLMException], None],
    ) -> None:
        self._local = local
        self._settings = settings
        self._engine = engine
        self._on_link_lost = on_link_lost
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="datadist-link")
        self._dialler = ThreadPoolExecutor(64, thread_name_prefix="datadist-dial")
        self._services = LinkServices(engine, self._executor, serve_lookup, serve_call, self._on_unlink, self._on_down)
        self._loop = ControlLoop(str(local.cluster_id))
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._dialling: set[int] = set()
        self._accepting: set[Link] = set()
        self._failures: dict[int, LLMException] = {}
        self._link_ids = itertools.count(1)
        self._closed = False
        self._heartbeat = asyncio.run_coroutine_threadsafe(self._beat(), self._loop.loop)

    # -- the table

    def get(self, cluster_id: int) -> Link:
        """The link that is up. Raises NotYetLinked with what is known of why not."""
        with self._lock:
            link = self._links.get(cluster_id)
            reason = self._failures.get(cluster_id)
        if link is None or not link.is_up:
            raise NotYetLinked(
                f"no link to cluster {cluster_id}{f' (last: {reason})' if reason else ''}; link_clusters first"
            )
        return link

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._links.values())

    def failure(self, cluster_id: int) -> LLMException | None:
        """Why the last attempt to link to that cluster failed, or why its link broke."""
        with self._lock:
            return self._failures.get(cluster_id)

    def by_link_id(self, link_id: int) -> Link | None:
        with self._lock:
            return next((x for x in self._links.values() if x.link_id == link_id), None)

    # -- listening

    def listen(self, address: HostPort) -> HostPort:
        return self._loop.listen(address, self._accept)

    def stop_listening(self) -> None:
        self._loop.stop_listening()

    def _accept(self, channel: Channel) -> None:
        """A stranger has connected (control loop's thread)."""
        link = Link(next(self._link_ids), channel, self._services, dialling=False)
        with self._lock:
            self._accepting.add(link)
        link.expect(m.Hello).add_done_callback(lambda _: self._executor.submit(self._answer_hello, link))
        self._loop.loop.call_later(HELLO_TIMEOUT_S, self._drop_silent, link)

    def _drop_silent(self, link: Link) -> None:
        if link.state is LinkState.START:
            link.close(TimedOut(f"{link.channel.peer_address} did not say hello within {HELLO_TIMEOUT_S} s"))

    def _answer_hello(self, link: Link) -> None:
        deadline = Deadline.after(ACCEPT_TIMEOUT_S)
        try:
            hello = link.expect(m.Hello).result(0)
            if isinstance(hello, m.Hello):
                self._shake_hands(link, hello, deadline)
        except LLMException as error:
            logger.info("a link from %s was not made: %s", link.channel.peer_address, error)
            self._refuse(link, error)
        finally:
            with self._lock:
                self._accepting.discard(link)

    def _shake_hands(self, link: Link, hello: m.Hello, deadline: Deadline) -> None:
        self._check_hello(hello)
        link.peer.cluster_id, link.peer.incarnation = hello.cluster_id, hello.incarnation
        link.peer.role, link.peer.beacon, link.peer.offers = hello.role, hello.beacon, hello.offers
        link.channel.allow_large()
        link.send(self._welcome())
        result = self._probe(link, hello.link_token, deadline)
        link.send(m.Probed(result.usable, result.rejected))
        ready = wait_for(link.expect(m.Ready), deadline, "the dialling end did not finish the handshake")
        if isinstance(ready, m.Ready):
            self._enter(link, ready.backends, result)
            link.send(m.Established())
            link.established.set()

    def _check_hello(self, hello: m.Hello) -> None:
        """Raise what the dialling end will be told."""
        mine = self._local.cluster_id
        if hello.protocol_version != m.PROTOCOL_VERSION:
            raise LinkFailed(f"protocol version {hello.protocol_version} there, {m.PROTOCOL_VERSION} here")
        if hello.expected_cluster_id != mine:
            raise LinkFailed(
                f"remote_cluster_id={hello.expected_cluster_id} was asked for, but this is cluster {mine}",
                LLMStatusCode.LLM_PARAM_INVALID,
            )
        if hello.cluster_id == mine:
            raise LinkFailed(f"both ends have cluster_id={mine}; it must be unique", LLMStatusCode.LLM_PARAM_INVALID)
        if hello.v2 != self._local.v2:
            raise LinkFailed(f"enable_cache_manager (V2) is {hello.v2} there and {self._local.v2} here; set both alike")
        with self._lock:
            # Both ends dial each other at once: the smaller id's dial counts, the other one's is turned away.
            if hello.cluster_id in self._dialling and mine < hello.cluster_id:
                raise LinkFailed("this end is dialling you already", LLMStatusCode.LLM_PROCESSING_LINK)

    def _refuse(self, link: Link, error: LLMException) -> None:
        try:
            link.send(m.Refuse(int(error.status_code), str(error)))
        except LLMException:
            logger.debug("the refusal could not be sent")
        link.close(error)

    def _welcome(self) -> m.Welcome:
        end = self._local
        return m.Welcome(
            m.PROTOCOL_VERSION,
            end.software,
            end.cluster_id,
            end.incarnation,
            int(end.role()),
            end.v2,
            self._offers(),
            end.beacon,
            HEARTBEAT_S,
        )

    # -- dialling

    def link(self, targets: Sequence[Target], deadline: Deadline) -> list[LLMStatusCode]:
        """Dial all at once; one status each, in order. A failed one leaves nothing behind."""
        futures = [self._dialler.submit(self._link_one, target, deadline) for target in targets]
        statuses = []
        for target, future in zip(targets, futures, strict=True):
            try:
                statuses.append(future.result(deadline.remaining_s() + 2))
            except FutureTimeout:
                logger.warning("linking to cluster %d did not end at its deadline", target.cluster_id)
                statuses.append(LLMStatusCode.LLM_TIMEOUT)
        return statuses

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

    def _begin_dialling(self, cluster_id: int) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("finalize was called")
            link = self._links.get(cluster_id)
            if link is not None and link.is_up:
                raise AlreadyLinked(f"cluster {cluster_id} is linked already")
            if cluster_id in self._dialling:
                raise LinkFailed(f"cluster {cluster_id} is being linked already", LLMStatusCode.LLM_PROCESSING_LINK)
            self._dialling.add(cluster_id)

    def _dial(self, target: Target, deadline: Deadline) -> None:
        link = Link(next(self._link_ids), self._connect(target, deadline), self._services, dialling=True)
        try:
            self._greet(link, target, deadline)
        except LLMException as error:
            self._drop(link, error)
            raise

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

    def _greet(self, link: Link, target: Target, deadline: Deadline) -> None:
        token = secrets.token_bytes(16)
        link.send(self._hello(target.cluster_id, token))
        welcome = self._answer_of(link, m.Welcome, deadline)
        if not isinstance(welcome, m.Welcome) or welcome.cluster_id != target.cluster_id:
            raise ProtocolError(f"the other end does not say it is cluster {target.cluster_id}")
        link.peer.cluster_id, link.peer.incarnation = welcome.cluster_id, welcome.incarnation
        link.peer.role, link.peer.beacon, link.peer.offers = welcome.role, welcome.beacon, welcome.offers
        link.channel.allow_large()
        result = self._probe(link, token, deadline)
        theirs = self._answer_of(link, m.Probed, deadline)
        if isinstance(theirs, m.Probed):
            self._agree(link, result, theirs)
        self._answer_of(link, m.Established, deadline)

    def _agree(self, link: Link, mine: ProbeResult, theirs: m.Probed) -> None:
        common = [name for name in mine.usable if name in theirs.usable]
        for name, reason in theirs.rejected.items():
            mine.rejected.setdefault(name, f"from the other end: {reason}")
        if not common:
            raise LinkFailed(f"no transfer backend works between the two ends: {mine.rejected}")
        # In the table before the peer can send anything on it.
        self._enter(link, common, mine)
        link.send(m.Ready(common))
        link.established.set()

    def _hello(self, expected_cluster_id: int, token: bytes) -> m.Hello:
        end = self._local
        return m.Hello(
            m.PROTOCOL_VERSION,
            end.software,
            end.cluster_id,
            expected_cluster_id,
            end.incarnation,
            int(end.role()),
            end.v2,
            token,
            self._offers(),
            end.beacon,
            HEARTBEAT_S,
        )

    def _offers(self) -> list[m.BackendOffer]:
        return [m.BackendOffer(name, backend.identity()) for name, backend in self._engine.backends.items()]

    def _answer_of(self, link: Link, kind: type, deadline: Deadline) -> m.AnyMessage:
        """The next handshake message; a Refuse instead becomes the error it carries."""
        expected, refused = link.expect(kind), link.expect(m.Refuse)
        done = threading.Event()
        for future in (expected, refused):
            future.add_done_callback(lambda _: done.set())
        if not done.wait(deadline.timeout()):
            raise TimedOut(f"no {kind.__name__} from {link.channel.peer_address} in time")
        if refused.done() and refused.exception() is None:
            refusal = refused.result()
            if isinstance(refusal, m.Refuse):
                raise _refusal(refusal, link.channel.peer_address)
        return wait_for(expected, deadline, f"no {kind.__name__} in time")

    # -- both ends

    def _probe(self, link: Link, token: bytes, deadline: Deadline) -> ProbeResult:
        if link.peer.beacon is None:
            raise ProtocolError("the peer has no beacon")
        return probe_backends(
            self._engine,
            self._local.memory,
            link.link_id,
            link.peer.offers,
            link.peer.beacon,
            initiator=link.dialling,
            link_token=token,
            deadline=deadline,
        )

    def _enter(self, link: Link, names: Sequence[str], result: ProbeResult) -> None:
        """Put a link into the table, in place of an older one from the same cluster."""
        link.backends = [self._engine.backends[n] for n in names if n in result.usable]
        link.rejected = result.rejected
        for name in set(result.usable) - set(names):
            self._engine.backends[name].disconnect(link.link_id)
        with self._lock:
            previous = self._links.get(link.peer.cluster_id)
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

    def _drop(self, link: Link, error: LLMException) -> None:
        if isinstance(error, LinkFailed) and link.state in (LinkState.PROBING, LinkState.PROBED):
            self._refuse(link, error)
        else:
            link.close(error)

    def _on_down(self, link: Link, error: LLMException) -> None:
        """A channel has closed (executor): release what the link had."""
        for backend in self._engine.backends.values():
            backend.disconnect(link.link_id)
        with self._lock:
            self._accepting.discard(link)
            was_linked = self._links.get(link.peer.cluster_id) is link
            if was_linked:
                del self._links[link.peer.cluster_id]
                self._failures[link.peer.cluster_id] = error
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

    def unlink(self, cluster_id: int, deadline: Deadline, force: bool) -> LLMStatusCode:
        """End one link. Not forced: transfers end first, the peer cleans up its end too."""
        try:
            link = self.get(cluster_id)
        except NotYetLinked as error:
            return error.status_code
        status = LLMStatusCode.LLM_SUCCESS if force else self._part(link, deadline)
        if status is not LLMStatusCode.LLM_UNLINK_FAILED:
            self._release(link, ClosedError(f"the link to cluster {cluster_id} was unlinked here"))
        return status

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
        link.wait_idle(Deadline.after(UNLINK_WAIT_S))
        self._forget(link)
        try:
            link.send(m.Unlinked())
        except LLMException as error:
            logger.debug("the unlink could not be confirmed: %s", error)
        link.close(ClosedError(f"cluster {link.peer.cluster_id} unlinked"))

    def _part(self, link: Link, deadline: Deadline) -> LLMStatusCode:
        if not link.wait_idle(deadline):
            logger.warning("unlinking cluster %d while a transfer is running", link.peer.cluster_id)
            return LLMStatusCode.LLM_UNLINK_FAILED
        link.parting = True
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
            self._closed = True
            links = [*self._links.values(), *self._accepting]
        self._heartbeat.cancel()
        for link in links:
            link.close(ClosedError("finalize was called"))
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._dialler.shutdown(wait=False, cancel_futures=True)


def _refusal(refusal: m.Refuse, peer_address: str) -> LLMException:
    known = {int(code) for code in LLMStatusCode}
    code = LLMStatusCode(refusal.status) if refusal.status in known else LLMStatusCode.LLM_LINK_FAILED
    return LinkFailed(f"{peer_address} refused the link: {refusal.message}", code)
