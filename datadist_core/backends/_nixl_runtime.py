# SPDX-License-Identifier: Apache-2.0
"""An open nixl backend: its two agents, its links, its transfers, and the thread that watches them.

The serving agent has all of this side's memory and is what peers know; it takes no part in what we start ourselves.
The moving agent (`_nixl_mover`) starts our transfers. If one of those cannot be brought to an end otherwise (the peer
was stopped, or NIXL reports an error, which says nothing about the transfer's other parts) the moving agent is retired:
a successor takes what comes from now on, transfers with other peers get a while to finish, then it is destroyed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import Cancelled, ClosedError, LLMException, NotYetLinked, PeerLost, TimedOut, Unreachable
from ..memory.region import Region
from ..transfer.backend import BackendContext, Completion, CompletionStatus, DoneCallback
from ..transfer.plan import Batch, Op
from ..types import Deadline
from ._nixl_agent import Agent
from ._nixl_link import Descriptor, Identity, Link, Notes, encode_descriptor, encode_identity, make_note
from ._nixl_mover import Mover, agent_name
from ._nixl_options import parse_options
from ._nixl_routes import Route, Routes
from ._nixl_transfer import Transfer

#: What has nothing to do with the reason for retiring an agent gets this long to finish on it.
DRAIN_S = 2.0
#: How long a batch may take that its caller's own thread waits for.
INLINE_S = 0.0003
_INLINE_BYTES = 1 << 20
_POLL_S = 0.0001
_IDLE_POLL_S = 0.002
_NOTE_POLL_S = 0.0005
_END_TIMEOUT_S = 30.0


class Runtime:
    """Thread-safe."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._options = parse_options(context.options)
        self._lock = threading.RLock()
        # One lock, two things to wait for. With one condition every batch would wake the watcher when it ends.
        self._changed = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._num_awaiting = 0
        self._routes = Routes()
        self._closing: ClosedError | None = None
        self._links: dict[int, Link] = {}
        self._registered: dict[int, Any] = {}
        self._watched: list[Transfer] = []
        self._retired: list[Mover] = []
        self._probes = 0
        self._notes = Notes()
        self._serving = Agent(agent_name("s"), self._options)
        self.identity = encode_identity(self._options.plugin, self._serving.name, self._serving.connection())
        self._mover: Mover | None = None
        self._current_mover()
        self._watcher = threading.Thread(target=self._watch, name="datadist-nixl", daemon=True)
        self._watcher.start()

    @property
    def plugin(self) -> str:
        return self._options.plugin

    @property
    def closed(self) -> bool:
        return self._closing is not None

    def close(self) -> None:
        """End all transfers, then destroy the agents. Idempotent, from any thread."""
        error = ClosedError("the nixl backend was closed")
        with self._changed:
            self._closing = self._closing or error
            for link in self._links.values():
                link.lost = link.lost or error
            self._links.clear()
            self._routes.clear()
            self._end(error)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_END_TIMEOUT_S)
            self._await_ended(lambda transfer: True)
        self._serving.close()

    def connect(self, peer_id: int, peer: Identity, link_token: bytes, deadline: Deadline, *, initiator: bool) -> None:
        self.disconnect(peer_id)
        link = Link(peer_id, peer)
        with self._changed:
            self._check_open()
            self._links[peer_id] = link
        try:
            self._greet(link, link_token, deadline, initiator=initiator)
            link.up = True
        except LLMException as error:
            self._drop(link, error)
            self._check_open()
            raise

    def disconnect(self, peer_id: int) -> None:
        with self._changed:
            link = self._links.get(peer_id)
        if link is not None:
            self._drop(link, PeerLost(f"the link to peer {peer_id} was taken down"))

    def register(self, region: Region) -> bytes | None:
        if not region.for_peers:  # the agents that move bytes register what they use on their own
            return None
        registered = self._serving.register(region.address, region.size_bytes)
        with self._changed:
            self._registered[region.region_id] = registered
        return encode_descriptor(region.address, region.size_bytes, self._serving.export(registered))

    def unregister(self, region_id: int) -> None:
        with self._changed:
            registered = self._registered.pop(region_id, None)
            movers = self._movers()
        for mover in movers:
            mover.drop_region(region_id)
        self._forget_routes()
        self._sweep(movers)
        if registered is not None and not self.closed:
            self._serving.deregister(registered)

    def attach(self, peer_id: int, region_id: int, described: Descriptor, deadline: Deadline) -> None:
        link = self.link(peer_id)
        if link.regions.get(region_id) == described:
            return
        try:
            self._probe(link, described, deadline)
        finally:
            self._forget_if_lost(link)
        link.check_up()
        link.regions.put(region_id, described)
        self._forget_routes()

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._changed:
            link, movers = self._links.get(peer_id), self._movers()
        if link is not None and link.regions.remove(region_id):
            self._forget(link, movers)

    def link(self, peer_id: int) -> Link:
        """The link to a peer, up at this end."""
        with self._changed:
            self._check_open()
            link = self._links.get(peer_id)
        if link is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        link.check_up()
        return link

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        transfer = self._begin_known(batch_id, batch, done) or self._begin_new(batch_id, batch, done)
        self._settle(transfer, INLINE_S if batch.num_bytes <= _INLINE_BYTES else 0.0)

    def cancel(self, batch_id: int) -> None:
        error = Cancelled(f"batch {batch_id} was cancelled")
        with self._changed:
            for mover in self._movers():
                if batch_id in mover.running:
                    mover.running[batch_id].end(error)
            self._work.notify_all()

    # Links

    def _greet(self, link: Link, link_token: bytes, deadline: Deadline, *, initiator: bool) -> None:
        """Send our note and wait for the peer's."""
        mine, theirs = self._serving.name, link.identity.name
        note = make_note(link_token, mine, theirs, initiator=initiator)
        expected = make_note(link_token, theirs, mine, initiator=not initiator)
        try:
            self._current_mover().greet(link.identity, note)
        except PeerLost as error:
            raise Unreachable(f"NIXL cannot reach the peer: {error}") from error
        while not self._has_come(expected):
            if link.lost is not None:
                raise Unreachable(f"peer {link.peer_id} was disconnected while it connected") from link.lost
            if deadline.expired:
                raise TimedOut("the peer did not say a word over NIXL in time; see NIXL's and UCX's log on stderr")
            with self._changed:
                self._changed.wait(_NOTE_POLL_S)

    def _has_come(self, note: bytes) -> bool:
        self._notes.add(self._serving.take_notes())
        return self._notes.take(note)

    def _drop(self, link: Link, error: LLMException) -> None:
        """End a link and its transfers, and wait until they have left the memory alone."""
        with self._changed:
            link.lost = link.lost or error
            if self._links.get(link.peer_id) is link:
                del self._links[link.peer_id]
            self._routes.clear()
            self._end(error, link.peer_id)
            movers = self._movers()
        if threading.current_thread() is not self._watcher:
            self._await_ended(lambda transfer: transfer.peer_id == link.peer_id)
        self._forget(link, movers)

    def _forget(self, link: Link, movers: list[Mover]) -> None:
        for mover in movers:
            mover.drop_peer(link.identity.name)
        self._forget_routes()
        self._sweep(movers)

    def _forget_if_lost(self, link: Link) -> None:
        """The link has ended while the agent was told of the peer: that would stay, for it was dropped before."""
        if link.lost is not None:
            with self._changed:
                movers = self._movers()
            self._forget(link, movers)

    def _probe(self, link: Link, described: Descriptor, deadline: Deadline) -> None:
        """Read from a region, to know now whether that is possible. Raises Unreachable."""
        ended = threading.Event()
        completions: list[Completion] = []

        def done(completion: Completion) -> None:
            completions.append(completion)
            ended.set()

        with self._changed:
            self._probes += 1
            probe_id = -self._probes
        transfer = Transfer(probe_id, link.peer_id, link.identity.name, frozenset(), done)
        mover = self._begin(transfer)
        try:
            pieces = mover.plan_probe(link.identity, described)
        except BaseException:
            self._remove(transfer)
            raise
        transfer.start(Op.READ, pieces)
        self._settle(transfer, INLINE_S)
        if not ended.wait(deadline.timeout()):
            self.cancel(probe_id)
            ended.wait(_END_TIMEOUT_S)
        if not completions or completions[0].status is not CompletionStatus.OK:
            reason = completions[0].error if completions else None
            raise Unreachable(f"a region of peer {link.peer_id} cannot be read through NIXL: {reason}") from reason

    # Transfers

    def _current_mover(self) -> Mover:
        with self._changed:
            self._check_open()
            if self._mover is None:
                self._mover = Mover(self._options, self._context.local_region)
            return self._mover

    def _movers(self) -> list[Mover]:
        """All that are not destroyed. The lock is held."""
        return [*self._retired, *([] if self._mover is None else [self._mover])]

    def _begin_known(self, batch_id: int, batch: Batch, done: DoneCallback) -> Transfer | None:
        """Ready to start, if it is like an earlier one."""
        with self._lock:
            route = self._routes.find(batch)
            if route is None:
                return None
            transfer = Transfer(batch_id, batch.peer_id, route.peer_name, route.region_ids, done)
            transfer.mover = route.mover
            route.mover.running[batch_id] = transfer
        try:
            transfer.start(batch.op, route.plan.pieces(batch))
        except BaseException:
            self._remove(transfer)
            raise
        return transfer

    def _begin_new(self, batch_id: int, batch: Batch, done: DoneCallback) -> Transfer:
        """Ready to start, after everything was checked and prepared."""
        version = self._routes.version
        link = self.link(batch.peer_id)
        remote = link.regions.of(batch)
        regions = frozenset(pair.local.region_id for pair in batch.pairs)
        transfer = Transfer(batch_id, batch.peer_id, link.identity.name, regions, done)
        mover = self._begin(transfer)
        try:
            plan = mover.plan(batch, link, remote)
            link.check_up()
            transfer.start(batch.op, plan.pieces(batch))
        except BaseException:
            self._remove(transfer)
            self._forget_if_lost(link)
            raise
        with self._lock:
            self._routes.put(Route(batch.peer_id, link.identity.name, regions, mover, plan), version)
        return transfer

    def _forget_routes(self) -> None:
        with self._lock:
            self._routes.clear()

    def _begin(self, transfer: Transfer) -> Mover:
        with self._changed:
            mover = self._current_mover()
            transfer.mover = mover
            mover.running[transfer.batch_id] = transfer
            return mover

    def _end(self, error: LLMException, peer_id: int | None = None) -> None:
        """Ask all transfers, or those with one peer, to end. The lock is held."""
        for mover in self._movers():
            for transfer in mover.running.values():
                if peer_id is None or transfer.peer_id == peer_id:
                    transfer.end(error)
        self._work.notify_all()

    def _settle(self, transfer: Transfer, inline_s: float) -> None:
        """Complete a posted transfer, here or in the watcher."""
        if transfer.wait_inline(inline_s):
            self._finish(transfer)
            return
        with self._changed:
            self._watched.append(transfer)
            self._work.notify_all()

    def _finish(self, transfer: Transfer) -> None:
        if isinstance(transfer.failure, PeerLost):
            self._report_lost(transfer.peer_id, transfer.failure)
        try:
            transfer.complete()
        finally:
            self._remove(transfer)

    def _remove(self, transfer: Transfer) -> None:
        mover = transfer.mover
        if mover is None:
            return
        with self._lock:
            mover.running.pop(transfer.batch_id, None)
            if self._watched and transfer in self._watched:
                self._watched.remove(transfer)
            if self._num_awaiting:
                self._changed.notify_all()
        if mover.has_leaving:
            self._sweep([mover])

    def _sweep(self, movers: list[Mover]) -> None:
        for mover in movers:
            if mover.has_leaving:
                mover.sweep(partial(self._running_on, mover))

    def _running_on(self, mover: Mover) -> list[Transfer]:
        with self._changed:
            return list(mover.running.values())

    def _await_ended(self, concerns: Callable[[Transfer], bool]) -> None:
        """Wait until these transfers are complete, but for those whose callback we are in."""
        here = threading.get_ident()

        def ended() -> bool:
            running = [t for mover in self._movers() for t in mover.running.values()]
            return not any(concerns(t) and t.finishing_in != here for t in running)

        with self._changed:
            self._num_awaiting += 1
            try:
                self._changed.wait_for(ended, _END_TIMEOUT_S)
            finally:
                self._num_awaiting -= 1

    def _report_lost(self, peer_id: int, error: LLMException) -> None:
        with self._changed:
            link = self._links.get(peer_id)
            if link is None or link.lost is not None or not link.up:
                return
            link.lost = error
            self._routes.clear()
        self._context.report_peer_lost(peer_id, error)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClosedError("the nixl backend is not open")

    # The watcher

    def _watch(self) -> None:
        quiet_since_s = time.monotonic()
        while True:
            with self._work:
                self._work.wait_for(lambda: self._watched or self._retired or self._closing)
                if self._closing is not None and self._mover is not None:
                    self._retire(self._mover)
                watched, retired = list(self._watched), list(self._retired)
            num_ended = sum(self._look_at(transfer) for transfer in watched)
            if num_ended:
                quiet_since_s = time.monotonic()
            for mover in retired:
                self._destroy_if_drained(mover)
            with self._work:
                if self._closing is not None and not self._movers():
                    return
                idle = time.monotonic() - quiet_since_s > 0.05
                self._work.wait(_IDLE_POLL_S if idle else _POLL_S)

    def _look_at(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended, which is then complete."""
        if transfer.advance():
            self._finish(transfer)
            return True
        if transfer.must_be_fenced(time.monotonic()) and transfer.mover is not None:
            with self._changed:
                self._retire(transfer.mover)
        return False

    def _retire(self, mover: Mover) -> None:
        """Nothing new for this one. The lock is held."""
        if mover is self._mover:
            self._mover = None
            mover.retired_at_s = time.monotonic()
            self._retired.append(mover)
            self._routes.clear()

    def _destroy_if_drained(self, mover: Mover) -> None:
        now_s = time.monotonic()
        with self._changed:
            others = [transfer for transfer in mover.running.values() if not transfer.must_be_fenced(now_s)]
            if now_s > (mover.retired_at_s or 0.0) + DRAIN_S:
                for transfer in others:
                    transfer.end(_fell_with_another(), DRAIN_S / 2)
        if others:
            return
        if not mover.agent.close():
            return
        with self._changed:
            left = [transfer for transfer in self._watched if transfer.mover is mover]
        for transfer in left:
            self._look_at(transfer)
        with self._changed:
            if not mover.running:
                self._retired.remove(mover)


def _fell_with_another() -> LLMException:
    return LLMException("NIXL's agent had to be given up to end a transfer with another peer; this one was in its way")
