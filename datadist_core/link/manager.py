# SPDX-License-Identifier: Apache-2.0
"""All links of one LLMDataDist: dialling many at once, accepting, replacing dead ones.

`table` knows who is linked, `heartbeat` who is gone, `parting` how links end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from ..checks import HostPort
from ..errors import (
    AlreadyLinked,
    ClosedError,
    LinkFailed,
    LLMException,
    PeerLost,
    TimedOut,
)
from ..settings import Settings
from ..transfer.backend import Backend
from ..transfer.engine import TransferEngine
from ..types import Deadline, LLMStatusCode
from ..wire import messages as m
from ..wire.channel import Channel
from ..wire.control_loop import ControlLoop
from ..wire.log_limit import LimitedLog
from .answers import MAX_CHECKSUMS_WAITING, CacheService
from .authentication import OtherCluster
from .fanout import run_all
from .fences import Fences
from .handshake import Handshake, LocalEnd
from .heartbeat import Heartbeats, PeerProcesses
from .link import Link, LinkServices
from .listening import Listeners
from .parting import Partings, late, refuse_repeated, repeated
from .probe import ProbeResult
from .state import LinkState
from .table import LinkTable
from .turns import Turns
from .workers import Workers

logger = logging.getLogger(__name__)

#: An accepted handshake may take this long in all.
ACCEPT_TIMEOUT_S = 30.0
#: A backend that was being connected as its link ended is disconnected again after this time.
DISCONNECT_AGAIN_S = 0.05
#: Peers that get checksums made at the same time.
CHECKSUM_THREADS = 4
#: At most so many threads answer requests, serve handshakes, and clean up after links. Idle ones end.
SERVICE_THREADS, ACCEPT_THREADS, END_THREADS, REVOKE_THREADS = 64, 32, 32, 64
#: The pause before the first of several attempts is repeated, and the longest one.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster to dial: its id, its addresses in order of trial, a local address to dial from or None."""

    cluster_id: int
    addresses: tuple[HostPort, ...]
    local_host: str | None = None


class LinkManager:
    """Thread-safe."""

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
        self.fences = Fences()
        self._table = LinkTable(on_replaced=self.fences.link_ends)
        self._partings = Partings(self._table, self.fences, self._disconnect)
        self._accepting = Workers(ACCEPT_THREADS, "datadist-accept")
        self._turns = Turns(CHECKSUM_THREADS, MAX_CHECKSUMS_WAITING, "datadist-checksum")
        self._services = LinkServices(
            engine=engine,
            executor=Workers(SERVICE_THREADS, "datadist-service"),
            ending=Workers(END_THREADS, "datadist-link-end"),
            revoking=Workers(REVOKE_THREADS, "datadist-revoke"),
            caches=caches,
            serve_call=serve_call,
            on_unlink=self._partings.on_unlink,
            on_down=self._on_down,
            turns=self._turns,
        )
        self._handshake = Handshake(
            local, engine, self._enter, self._table.is_dialling, self._table.check_may_link, settings.security
        )
        self._loop = ControlLoop(str(local.cluster_id), settings.security)
        self._log = LimitedLog(logger)
        self._lock = threading.Lock()
        #: In the handshake, at either end.
        self._unfinished: set[Link] = set()
        #: Those of them that a thread is busy with.
        self._greeting: set[Link] = set()
        self._greeted_one = threading.Condition(self._lock)
        self._link_ids = itertools.count(1)
        self._closing = threading.Event()
        self.listeners = Listeners(self._loop, self._accept, engine.listen)
        #: Told of every link that has ended, also of one that we ended ourselves. Must not block.
        self.on_gone: Callable[[Link, LLMException], None] = lambda link, error: None
        self._heartbeats = Heartbeats(local.heartbeat_s, self.links)
        self._processes = PeerProcesses(self._loop.loop)
        self._beating = asyncio.run_coroutine_threadsafe(self._heartbeats.run(), self._loop.loop)

    # -- the table

    def get(self, cluster_id: int, link_id: int | None = None) -> Link:
        """See `LinkTable.get`."""
        return self._table.get(cluster_id, link_id)

    def peek(self, cluster_id: int) -> Link | None:
        """The link, in whatever state; None if there is none."""
        return self._table.peek(cluster_id)

    def links(self) -> list[Link]:
        """All that have not ended."""
        return [link for link in self._table.all() if link.state is not LinkState.DOWN]

    def who_may_write(self, cache_id: int) -> list[Link]:
        """Links that are gone, whose peers know that cache of ours and may be stopped in the middle of a copy to it."""
        broken = [link for link in self._table.all() if link.state is LinkState.DOWN]
        return [*(x for x in broken if x.answers.has_told_of(cache_id)), *self.fences.who_may_write(cache_id)]

    def wait_fenced(self, cluster_id: int, deadline: Deadline) -> bool:
        """Whether, in time, no peer of a former link to that cluster can write to our memory any more."""
        return self.fences.wait(lambda: self._may_write(cluster_id), deadline)

    def _may_write(self, cluster_id: int) -> bool:
        # The table first: a link is in the other before it leaves the one.
        link = self._table.peek(cluster_id)
        return (link is not None and link.is_ending) or self.fences.may_write(cluster_id)

    def failure(self, cluster_id: int) -> LLMException | None:
        """See `LinkTable.failure`."""
        return self._table.failure(cluster_id)

    def by_link_id(self, link_id: int) -> Link | None:
        return self._table.by_link_id(link_id)

    def note_failure(self, cluster_id: int, error: LLMException) -> None:
        """See `LinkTable.note_failure`."""
        self._table.note_failure(cluster_id, error)

    # -- accepting

    def _accept(self, channel: Channel) -> None:
        """A stranger has connected (control loop's thread)."""
        link = self._new_link(channel, dialling=False)
        with self._lock:
            self._unfinished.add(link)
        self._handshake.authentication.await_proof(link)
        link.expect(m.Hello).add_done_callback(lambda _: self._hello_came(link))

    def _new_link(self, channel: Channel, *, dialling: bool) -> Link:
        with_secret = self._handshake.authentication.is_on
        return Link(next(self._link_ids), channel, self._services, dialling=dialling, with_secret=with_secret)

    def _hello_came(self, link: Link) -> None:
        if link.state is LinkState.GREETED:
            link.channel.known()
        try:
            self._accepting.submit(self._answer_hello, link)
        except RuntimeError:
            logger.debug("a link was asked for while finalizing")

    def _answer_hello(self, link: Link) -> None:
        deadline = Deadline.after(ACCEPT_TIMEOUT_S)
        with self._lock:
            self._greeting.add(link)
        try:
            hello = link.expect(m.Hello).result(0)
            if isinstance(hello, m.Hello):
                self._handshake.answer(link, hello, deadline)
        except LLMException as error:
            self._log.log(logging.INFO, "a link from %s was not made: %s", link.channel.peer_address, error)
            self._handshake.refuse(link, error)
        except Exception as error:
            logger.exception("a link from %s was not made", link.channel.peer_address)
            self._handshake.refuse(link, _unexpected(error))
        finally:
            self._greeted(link)

    # -- dialling

    def link(self, targets: Sequence[Target], deadline: Deadline) -> list[LLMStatusCode]:
        """Dial all at once; one status each, in order. A failed one leaves nothing behind.

        A cluster that is named again gets LLM_PARAM_INVALID there; its first place counts.
        """
        again = repeated([target.cluster_id for target in targets])
        calls = [
            partial(refuse_repeated, t.cluster_id) if i in again else partial(self._link_one, t, deadline)
            for i, t in enumerate(targets)
        ]
        return run_all("link", calls, late(deadline), LLMStatusCode.LLM_TIMEOUT)

    def connect(self, target: Target, deadline: Deadline) -> Link:
        """Dial once. Raises what went wrong, AlreadyLinked among it."""
        self._table.begin_dialling(target.cluster_id)
        try:
            return self._dial(target, deadline)
        finally:
            self._table.end_dialling(target.cluster_id)

    def find_cluster(self, address: HostPort, deadline: Deadline) -> int:
        """The id of who listens there.

        Asking for a cluster that does not exist is asking for the one that does: see `OtherCluster`. So nothing is told
        that is not told to everybody who dials, and who may not dial learns nothing.
        """
        nobody = secrets.randbits(63) + 1
        try:
            link = self._dial(Target(nobody, (address,)), deadline)
        except OtherCluster as other:
            return other.cluster_id
        link.close(ClosedError("only its cluster id was asked for"))
        return nobody  # one chance in 2**63

    def _link_one(self, target: Target, deadline: Deadline) -> LLMStatusCode:
        try:
            self._dial_with_retries(target, deadline)
        except LLMException as error:
            if not isinstance(error, AlreadyLinked):
                logger.warning("link to cluster %d failed: %s", target.cluster_id, error)
                self._table.note_failure(target.cluster_id, error)
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    def _dial_with_retries(self, target: Target, deadline: Deadline) -> None:
        self._table.begin_dialling(target.cluster_id)
        if self._settings.link_total_time_s:
            deadline = deadline.earlier(self._settings.link_total_time_s)
        try:
            for attempt in itertools.count(1):
                try:
                    self._dial(target, deadline)
                    return
                except PeerLost:
                    pause_s = _pause_s(attempt)
                    if attempt >= self._settings.link_retry_count or deadline.remaining_s() <= pause_s:
                        raise
                    self._closing.wait(pause_s)
        finally:
            self._table.end_dialling(target.cluster_id)

    def _dial(self, target: Target, deadline: Deadline) -> Link:
        link = self._new_link(self._connect(target, deadline), dialling=True)
        try:
            with self._lock:
                self._table.check_open()
                self._unfinished.add(link)
                self._greeting.add(link)
            self._handshake.greet(link, target.cluster_id, secrets.token_bytes(16), deadline)
        except BaseException as error:
            self._drop(link, error if isinstance(error, LLMException) else _unexpected(error))
            raise
        finally:
            self._greeted(link)
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
        """Put a link into the table, in place of an older one from the same cluster. Raises as `LinkTable.enter`."""
        link.backends = [self._engine.backends[n] for n in names if n in result.usable]
        link.rejected = result.rejected
        self._disconnect_from(link, [b for b in self._engine.backends.values() if b not in link.backends])
        previous = self._table.enter(link)
        self._processes.watch(link)
        if link.state is LinkState.DOWN:  # meanwhile, and `_disconnect` may have been too early to undo that
            self._processes.forget(link)
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

    def _greeted(self, link: Link) -> None:
        """The handshake is over. If the link ended in it, `_on_down` may have come before a backend had connected."""
        with self._lock:
            self._unfinished.discard(link)
            self._greeting.discard(link)
            self._greeted_one.notify_all()
        if link.state is LinkState.DOWN:
            self._disconnect(link)

    def _end_greeting(self, link: Link) -> None:
        """The link has ended. Its handshake may have come to a backend right after `_disconnect`, and would wait there
        for the peer; so once more, until it is through. From here on it begins with no other one."""
        deadline = Deadline.after(ACCEPT_TIMEOUT_S)
        while not deadline.expired:
            with self._greeted_one:
                if self._greeted_one.wait_for(lambda: link not in self._greeting, DISCONNECT_AGAIN_S):
                    return
            self._disconnect_from(link, self._engine.backends.values())

    def _drop(self, link: Link, error: LLMException) -> None:
        if isinstance(error, LinkFailed) and link.state in (LinkState.PROBING, LinkState.PROBED):
            self._handshake.refuse(link, error)
        else:
            link.close(error)

    def _on_down(self, link: Link, error: LLMException) -> None:
        """A channel has closed (executor): release what the link had."""
        self._disconnect(link)
        with self._lock:
            self._unfinished.discard(link)
        was_linked = self._table.lose(link, error)
        self.on_gone(link, error)
        if was_linked and not link.parting and not isinstance(error, ClosedError):
            level = logging.INFO if link.peer_is_finalizing else logging.WARNING
            logger.log(level, "the link to cluster %d is gone: %s", link.peer.cluster_id, error)
            self._on_link_lost(link.peer.cluster_id, error)
        self._end_greeting(link)

    def _disconnect(self, link: Link) -> None:
        """Take it out of the backends."""
        self.fences.link_ends(link)
        self._processes.forget(link)
        self._disconnect_from(link, self._engine.backends.values())

    def _disconnect_from(self, link: Link, backends: Collection[Backend]) -> None:
        for backend in backends:
            backend.disconnect(link.link_id)
        self.fences.link_disconnected(link, backends)

    # -- the end of links

    def unlink(self, cluster_ids: Sequence[int], deadline: Deadline, force: bool) -> list[LLMStatusCode]:
        """See `Partings.unlink`."""
        return self._partings.unlink(cluster_ids, deadline, force)

    def end(self, links: Sequence[Link], deadline: Deadline) -> None:
        """See `Partings.end`."""
        self._partings.end(links, deadline)

    def close(self) -> None:
        """Part from every peer, then close what is left, and the listener. Idempotent.

        Transfers, here and at the peers, get some time to end (`parting.FINALIZE_WAIT_S`); nothing new is begun.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._partings.finish_answers()
        self._table.close()
        self._partings.take_leave(self.links())
        with self._lock:
            links = [*self._table.all(), *self._unfinished]
        self._beating.cancel()
        for link in links:
            link.close(ClosedError("finalize was called"))
        self.fences.close()
        self._loop.close()
        self._processes.close()
        self._turns.close()
        services = self._services
        for workers in (self._accepting, services.executor, services.ending, services.revoking):
            workers.shutdown(wait=False, cancel_futures=True)


def _unexpected(error: BaseException) -> LLMException:
    return LLMException(f"making the link failed unexpectedly: {type(error).__name__}: {error}")


def _pause_s(attempt: int) -> float:
    """Longer after each attempt, and not the same for all who have lost the same peer."""
    longest_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    return longest_s * random.uniform(0.5, 1.0)
