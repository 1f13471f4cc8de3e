# SPDX-License-Identifier: Apache-2.0
"""Communicators: 2 to 4 clusters that agree to be linked pairwise, from a rank table that all of them have.

Theory of operation. The member with the lowest rank hosts. Each other member links to it (trying again until it is
there), then to every member of lower rank, and tells each of them over the link that it has joined. The host's answer
has the addresses of all members as soon as all have joined; a member needs them to dial. A member that has joined all
below it is complete; when all are, the host is OK, and says so to the members, who ask it every now and then.

What one member did not succeed with must fail at all. So whoever gives up takes leave of those it knows, with the
reason, and every join carries the random id of its attempt: leave of an older attempt under the same name is nobody's
business. A member that dies shows by its broken link.

A link may serve several communicators, or may have been made by `link_clusters`. So uses are counted, and only a link
that a communicator made, and that none uses any more, is ended.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from ..checks import HostPort, check_type
from ..errors import (
    ClosedError,
    LinkFailed,
    LLMException,
    NotYetLinked,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    TimedOut,
)
from ..services import ServiceTable
from ..types import Deadline, LLMStatusCode, RegisterMemStatus
from .fanout import run_all
from .joining import JOIN, LEAVE, Join, Joined, Leave, Where, decode, difference, encode
from .link import Link
from .manager import LinkManager, Target
from .rank_table import CommunicatorPlan, Member
from .shared import SharedLinks

logger = logging.getLogger(__name__)

#: Of an attempt that may succeed later.
_MAY_COME = {
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_LINK_BUSY,
    LLMStatusCode.LLM_ALREADY_LINK,
    LLMStatusCode.LLM_PROCESSING_LINK,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_ENGINE_FINALIZED,
}
DEFAULT_TOTAL_TIME_S = 120.0
#: One attempt to dial, or one question, may take this long; then the next one.
ATTEMPT_S = 10.0
#: Between two questions to a host that waits for others.
PAUSE_S = 0.05
#: Taking leave of all members and ending the links may take this long; then they are ended by force.
END_S = 3.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What we know of another member that has joined us, or that we have joined."""

    attempt: bytes
    link: Link
    address: HostPort | None = None
    complete: bool = False


@dataclass(slots=True)
class _Communicator:
    """State of one communicator; guarded by its table's condition."""

    comm_id: int
    plan: CommunicatorPlan
    deadline: Deadline
    attempt: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    status: RegisterMemStatus = RegisterMemStatus.PREPARING
    failure: LLMException | None = None
    last_error: LLMException | None = None
    known: dict[int, _Known] = field(default_factory=dict)
    address: HostPort | None = None
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        return f"communicator {self.comm_id} ({self.plan.name!r})"

    def unknown(self) -> list[int]:
        """Members that have not joined yet."""
        return [m.cluster_id for m in self.plan.others if m.cluster_id not in self.known]

    def all_joined(self) -> bool:
        return not self.unknown()

    def all_complete(self) -> bool:
        return self.all_joined() and all(known.complete for known in self.known.values())


class CommunicatorTable:
    """The communicators of one LLMDataDist, each prepared by a thread of its own. Thread-safe.

    Args:
        total_time_s: time limit for all members to be linked; 0 = `DEFAULT_TOTAL_TIME_S`.
    """

    def __init__(self, cluster_id: int, links: LinkManager, services: ServiceTable, total_time_s: float) -> None:
        self._cluster_id = cluster_id
        self._links = links
        self._total_time_s = total_time_s or DEFAULT_TOTAL_TIME_S
        self._changed = threading.Condition()
        self._comms: dict[int, _Communicator] = {}
        self._comm_ids = itertools.count(1)
        self._uses = SharedLinks()
        self._closed = False
        services.register(JOIN, self._serve_join)
        services.register(LEAVE, self._serve_leave)
        links.on_gone = self._on_gone

    # -- what users call

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin to link with the other members. Returns the communicator's id. TypeError, ParamInvalid."""
        plan = CommunicatorPlan.parse(comm_name, cluster_rank_info, rank_table, self._cluster_id)
        with self._changed:
            if self._closed:
                raise ClosedError("finalize was called")
            self._check_free(plan.name)
            comm = _Communicator(next(self._comm_ids), plan, Deadline.after(self._total_time_s))
            self._comms[comm.comm_id] = comm
        threading.Thread(
            target=self._prepare, args=(comm,), name=f"datadist-communicator-{comm.comm_id}", daemon=True
        ).start()
        return comm.comm_id

    def unlink(self, comm_id: int) -> None:
        """End it, and the links that only it uses. While it is preparing this cancels it. ParamInvalid."""
        comm = self._find(comm_id)
        reason = ClosedError(f"cluster {self._cluster_id} called unlink")
        with self._changed:
            self._comms.pop(comm_id, None)
            preparing = comm.status is RegisterMemStatus.PREPARING
            if preparing:
                comm.failure = comm.failure or reason
                self._changed.notify_all()
        if preparing:
            comm.released.wait(END_S + 1)  # its own thread cleans up, when it is back from dialling at the latest
        else:
            self._release(comm, reason)

    def status(self, comm_id: int) -> RegisterMemStatus:
        """ParamInvalid if there is no such communicator."""
        comm = self._find(comm_id)
        with self._changed:
            return comm.status

    @property
    def preparing(self) -> bool:
        """Whether one is still waiting for members."""
        with self._changed:
            return any(comm.status is RegisterMemStatus.PREPARING for comm in self._comms.values())

    def close(self) -> None:
        """Let the threads end. The links' own end tells the other members."""
        with self._changed:
            self._closed = True
            for comm in self._comms.values():
                comm.failure = comm.failure or ClosedError("finalize was called")
            self._changed.notify_all()

    def _find(self, comm_id: int) -> _Communicator:
        check_type("comm_id", comm_id, int)
        with self._changed:
            comm = self._comms.get(comm_id)
        if comm is None:
            raise ParamInvalid(f"comm_id={comm_id} is no communicator here; use what link returned, until unlink")
        return comm

    def _check_free(self, name: str) -> None:
        comm = self._active(name)
        if comm is not None:
            raise ParamInvalid(f"comm_name={name!r} is in use by communicator {comm.comm_id}; unlink({comm.comm_id})")

    def _active(self, name: str) -> _Communicator | None:
        """The communicator of that name that still has links, or gets them. With the lock held."""
        return next((c for c in self._comms.values() if c.plan.name == name and not c.released.is_set()), None)

    # -- preparing (the communicator's own thread)

    def _prepare(self, comm: _Communicator) -> None:
        try:
            comm.address = self._listen(comm)
            if comm.plan.lower:
                self._join_all(comm)
            else:
                self._host(comm)
        except LLMException as error:
            self._give_up(comm, error)
        except Exception as error:
            logger.exception("preparing %s failed", comm.text)
            self._give_up(comm, LLMException(f"{type(error).__name__}: {error}"))

    def _listen(self, comm: _Communicator) -> HostPort | None:
        """Where members of higher rank are to dial us; the highest rank is dialled by nobody."""
        own = comm.plan.own
        if own is comm.plan.host:
            return self._links.listeners.open(comm.comm_id, comm.plan.host_address)
        if own is comm.plan.members[-1]:
            return None
        return self._links.listeners.open(comm.comm_id, HostPort(own.host, own.port or 0))

    def _host(self, comm: _Communicator) -> None:
        with self._changed:
            while not comm.all_complete():
                self._raise_if_over(comm)
                self._changed.wait(comm.deadline.timeout())
            self._set_ok(comm)

    def _join_all(self, comm: _Communicator) -> None:
        complete = False
        while True:
            answer = self._join(comm, comm.plan.host, comm.plan.host_address, complete)
            if answer is not None and answer.ready:
                break
            if answer is not None and answer.all_joined and not complete:
                complete = self._join_lower(comm, answer.members)
            else:
                self._pause(comm)
        with self._changed:
            self._set_ok(comm)

    def _join_lower(self, comm: _Communicator, members: Iterable[Where]) -> bool:
        """Join those between the host and us. False if one of them could not be reached now."""
        addresses = {where.cluster_id: HostPort(where.host, where.port) for where in members}
        for member in comm.plan.lower[1:]:
            address = addresses.get(member.cluster_id)
            answer = None if address is None else self._join(comm, member, address, False)
            if answer is None or not answer.attempt:
                return False
        return True

    def _join(self, comm: _Communicator, member: Member, address: HostPort, complete: bool) -> Joined | None:
        """Tell a member of lower rank that we have joined; its answer. None if it cannot be reached now."""
        self._check(comm)
        try:
            link = self._link_to(comm, member, address)
            return self._ask(comm, link, complete)
        except LLMException as error:
            if _is_final(error):
                raise
            comm.last_error = error
            return None

    def _link_to(self, comm: _Communicator, member: Member, address: HostPort) -> Link:
        deadline = comm.deadline.earlier(ATTEMPT_S)
        try:
            link, made = self._links.get(member.cluster_id), False
        except NotYetLinked:
            link, made = self._links.connect(Target(member.cluster_id, (address,)), deadline), True
        with self._changed:
            self._use(comm, link, made)
        return link

    def _ask(self, comm: _Communicator, link: Link, complete: bool) -> Joined:
        where = comm.address or HostPort("", 0)
        with self._changed:
            made = self._uses.is_made(link)
        join = Join(comm.plan.name, comm.plan.rank_of, comm.attempt, where.host, where.port, made, complete)
        try:
            reply = link.call(JOIN, encode(join), comm.deadline.earlier(ATTEMPT_S))
        except ProtocolError as error:  # the link was being ended just then
            raise NotYetLinked(f"the link to cluster {link.peer.cluster_id} has just ended: {error}") from error
        answer = decode(reply, Joined)
        with self._changed:
            if answer.attempt:
                self._know(comm, link, _Known(answer.attempt, link))
            elif link.peer.cluster_id in comm.known:
                raise LinkFailed(f"cluster {link.peer.cluster_id} has given up")
        return answer

    def _know(self, comm: _Communicator, link: Link, known: _Known) -> None:
        """With the lock held. NotYetLinked as `_use`."""
        self._use(comm, link, False)
        comm.known[link.peer.cluster_id] = known
        self._changed.notify_all()

    def _use(self, comm: _Communicator, link: Link, made: bool) -> None:
        """With the lock held. NotYetLinked if the link has ended: its end has been told before, or will be now."""
        self._uses.add(link, comm.comm_id, made)
        if not link.is_up:
            self._uses.drop(link)
            raise NotYetLinked(f"the link to cluster {link.peer.cluster_id} has just ended")

    def _pause(self, comm: _Communicator) -> None:
        with self._changed:
            self._changed.wait_for(lambda: comm.failure is not None, min(PAUSE_S, comm.deadline.remaining_s()))
        self._check(comm)

    def _check(self, comm: _Communicator) -> None:
        with self._changed:
            self._raise_if_over(comm)

    def _raise_if_over(self, comm: _Communicator) -> None:
        if comm.failure is not None:
            raise comm.failure
        if comm.deadline.expired:
            waiting = comm.unknown()
            who = f"clusters {waiting} have not joined" if waiting else "not all members are linked pairwise"
            raise TimedOut(
                f"{who} within {self._total_time_s:g} s (link_total_time); the host is cluster "
                f"{comm.plan.host.cluster_id} at {comm.plan.host_address}"
                f"{f'; last: {comm.last_error}' if comm.last_error else ''}"
            )

    def _set_ok(self, comm: _Communicator) -> None:
        """With the lock held."""
        if comm.failure is not None or not comm.all_joined():
            self._raise_if_over(comm)
            raise PeerLost(f"a link to one of the clusters {comm.unknown()} ended while the others were linking")
        comm.status = RegisterMemStatus.OK
        logger.info("%s is ready: clusters %s", comm.text, sorted(comm.plan.rank_of))

    # -- the end

    def _give_up(self, comm: _Communicator, error: LLMException) -> None:
        """The attempt has failed: clean up, tell the others, then say so."""
        logger.warning("%s failed: %s", comm.text, error)
        with self._changed:
            comm.failure = error
        self._release(comm, error)
        for member in comm.plan.others:
            self._links.note_failure(member.cluster_id, error)
        with self._changed:
            comm.status = RegisterMemStatus.FAILED

    def _release(self, comm: _Communicator, reason: LLMException) -> None:
        """Give back its listener and links, and tell the members that joined. Several times is a no-op."""
        with self._changed:
            known, comm.known = list(comm.known.values()), {}
            closed = self._closed
            unused = self._uses.release(comm.comm_id)
        try:
            if not closed:
                self._part(comm, known, unused, str(reason))
            self._links.listeners.release(comm.comm_id)
        except LLMException as error:
            logger.debug("%s was not released in order: %s", comm.text, error)
        finally:
            comm.released.set()

    def _part(self, comm: _Communicator, known: list[_Known], unused: list[Link], reason: str) -> None:
        deadline = Deadline.after(END_S)
        leave = encode(Leave(comm.plan.name, comm.attempt, reason))
        half = deadline.earlier(END_S / 2)
        run_all("leave", [partial(_tell, one.link, leave, half) for one in known], half, None)
        self._links.end(unused, deadline)

    def _break(self, comm: _Communicator, error: LLMException) -> None:
        """A member is gone or does not agree. With the lock held."""
        if comm.failure is not None:
            return
        comm.failure = error
        if comm.status is RegisterMemStatus.OK:
            logger.warning("%s is broken: %s", comm.text, error)
            comm.status = RegisterMemStatus.FAILED
        self._changed.notify_all()

    def _on_gone(self, link: Link, error: LLMException) -> None:
        """A link has ended, for whatever reason."""
        cluster_id = link.peer.cluster_id
        with self._changed:
            self._uses.drop(link)
            for comm in self._comms.values():
                known = comm.known.get(cluster_id)
                if known is None or known.link is not link:
                    continue
                del comm.known[cluster_id]
                # Unlinked while preparing: another communicator may have ended it; it is made again.
                if comm.status is RegisterMemStatus.OK or isinstance(error, PeerLost):
                    self._break(comm, PeerLost(f"the link to cluster {cluster_id} of {comm.text} ended: {error}"))
            self._changed.notify_all()

    # -- what other members ask

    def _serve_join(self, remote_cluster_id: int, body: bytes) -> bytes:
        join = decode(body, Join)
        link = self._links.get(remote_cluster_id)
        with self._changed:
            comm = self._active(join.name)
            if comm is None or comm.failure is not None:
                return encode(Joined())
            self._check_same(comm, link, join)
            return encode(self._joined(comm, link, join))

    def _joined(self, comm: _Communicator, link: Link, join: Join) -> Joined:
        """With the lock held."""
        before = comm.known.get(link.peer.cluster_id)
        if comm.status is not RegisterMemStatus.PREPARING and (before is None or before.attempt != join.attempt):
            return Joined()  # a new attempt of that member; ours must be unlinked first
        address = HostPort(join.host, join.port) if join.port else None
        self._know(comm, link, _Known(join.attempt, link, address, join.complete))
        self._uses.add(link, comm.comm_id, join.made and not link.dialling)
        if comm.plan.lower:
            return Joined(comm.attempt)
        ready = comm.status is RegisterMemStatus.OK
        return Joined(comm.attempt, comm.all_joined(), self._addresses(comm), ready)

    def _addresses(self, comm: _Communicator) -> list[Where]:
        return [Where(i, k.address.host, k.address.port) for i, k in comm.known.items() if k.address is not None]

    def _check_same(self, comm: _Communicator, link: Link, join: Join) -> None:
        """A member that was told something else must not be waited for. ParamInvalid, at both ends."""
        differing = difference(comm.plan, link.peer.cluster_id, join)
        if differing is not None:
            error = ParamInvalid(f"link({join.name!r}): {differing}; call link with the same arguments at all members")
            if comm.status is RegisterMemStatus.PREPARING:
                self._uses.add(link, comm.comm_id, join.made and not link.dialling)
                self._break(comm, error)
            raise error

    def _serve_leave(self, remote_cluster_id: int, body: bytes) -> bytes:
        leave = decode(body, Leave)
        with self._changed:
            comm = self._active(leave.name)
            known = None if comm is None else comm.known.get(remote_cluster_id)
            if comm is not None and known is not None and known.attempt == leave.attempt:
                self._break(comm, LinkFailed(f"cluster {remote_cluster_id} left {comm.text}: {leave.reason}"))
        return b""


def _tell(link: Link, leave: bytes, deadline: Deadline) -> None:
    try:
        link.call(LEAVE, leave, deadline)
    except LLMException as error:
        logger.debug("cluster %d was not told that we leave: %s", link.peer.cluster_id, error)


def _is_final(error: LLMException) -> bool:
    """Whether trying again makes no sense. A member that is not there yet, or just goes, may come (again)."""
    return not isinstance(error, PeerLost) and error.status_code not in _MAY_COME
