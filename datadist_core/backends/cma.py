# SPDX-License-Identifier: Apache-2.0
"""Same host, one-sided: the kernel copies between this process's memory and another's (process_vm_readv, _writev).

For memory that is not in a pool and so cannot be mapped by a peer: what the user has registered as it is. It is
bounded by the kernel's copy, so mapped memory (`shm`) is to be preferred where it is possible. The peer takes no part
in a transfer: it may be busy or stopped. So it cannot check what is touched, either; and whoever the kernel permits
to touch a process's memory can touch all of it, with or without a link. The checks here keep mistakes from harm, and
keep a peer from using us to get at memory that it could not touch itself:

- who the peer is, the kernel says, and not the peer (`_cma_identity`), and it has to be of the same user;
- its memory has to hold a proof made from the link's token, for as long as the link is up (`_cma_proofs`). It is read
  in the same system call as the data, or right before a write, so that a process that took over the number, or a
  program that took over the process, is never taken for the peer (`_copy/cma.c`). A pidfd is asked first;
- batches stay within regions that the peer has exported.

Not reachable: other hosts, other process or network namespaces, other users, and where the kernel forbids it, see
`_cma_permission`. `connect` says which, with the remedy.

An owner cannot stop a one-sided transfer. Before it gives memory back it has to ask its peers, as the link layer's
Revoke does. A process that was stopped in the middle of a transfer may go on with it when it is continued, up to the
next look at the proof; its own proof, which it takes away after its last copy, tells when that is over (`is_fenced`).
A page that the peer's kernel cannot supply soon (swapped out, userfaultfd) holds up a copy like it holds up the peer
itself.

Option `allow_ptrace` (false): with kernel.yama.ptrace_scope=1, let the linked peer touch our memory. Read
`_cma_permission` for what else that allows it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .._copy.cma import PROOF_BYTES, RemoteProcess, read_remote
from ..errors import ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, RemoteError, TimedOut, Unreachable
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, DoneCallback
from ..transfer.plan import Batch, expand
from ..types import Deadline
from ._attached import decode_descriptor_as, local_regions
from ._attempts import Attempt, Attempts
from ._cma_host import ProcessWatch, may_trace_all, yama_scope
from ._cma_identity import Door, Identity, check_same_host, decode_identity, encode_identity, process_behind
from ._cma_link import AttachedRegion, CmaLink, Peer
from ._cma_permission import consent, why_forbidden_here, why_refused
from ._cma_proofs import NUM_SLOTS, find_proof, prove
from ._host import this_host
from ._inline import InlineBatches, OpenBatch
from ._proof_table import ProofTable

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.002
_REFUSED_WAIT_S = 1.0
"""How long to wait for a peer that the kernel will probably not let near us: it has no way to say so."""
_END_OF_ADDRESSES = 1 << 62


class _Descriptor(msgspec.Struct, frozen=True):
    """Where a region lies in its owner's memory."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """What `open` acquires."""

    context: BackendContext
    door: Door
    proofs: ProofTable
    identity: bytes
    allow_ptrace: bool
    closing: threading.Event


@dataclass(frozen=True, slots=True, eq=False)
class _Introduction:
    """What this end shows of itself for one link, from `connect` until the link is down."""

    standing: _Standing
    slot: int

    def withdraw(self) -> None:
        """Once."""
        self.standing.proofs.withdraw(self.slot)
        consent.withdraw(self)


@dataclass(frozen=True, slots=True, eq=False)
class _UpLink:
    link: CmaLink
    introduction: _Introduction


class CmaBackend(Backend):
    """Copies between this process's memory and that of other processes of the same user on this host."""

    name = "cma"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: _Standing | None = None
        self._attempts = Attempts()
        self._links: dict[int, _UpLink] = {}
        #: Disconnected here, while the peer's own end may still be up.
        self._leaving: dict[int, Peer] = {}
        self._batches = InlineBatches()

    def capabilities(self) -> Capabilities:
        return Capabilities(one_sided=True, cross_host=False, inline=True)

    def open(self, context: BackendContext) -> None:
        allow_ptrace = _allow_ptrace(context.options)
        host, proofs = this_host(), ProofTable("cma", NUM_SLOTS)
        _check_possible(proofs)
        door = Door()
        identity = encode_identity(host, door.address, proofs.address, may_trace_all(), allow_ptrace)
        self._standing = _Standing(context, door, proofs, identity, allow_ptrace, threading.Event())

    def close(self) -> None:
        with self._lock:
            standing, self._standing = self._standing, None
            links = list(self._links.values())
            self._links.clear()
            self._leaving.update({up.link.peer_id: up.link.peer for up in links})
        if standing is not None:
            standing.closing.set()
            standing.door.close()
        for up in links:
            self._end(up, ClosedError("the cma backend was closed"))
        with self._lock:  # nobody asks any more
            self._leaving.clear()

    def identity(self) -> bytes:
        return self._opened().identity

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        standing, peer = self._opened(), decode_identity(identity)
        check_same_host(this_host(), peer)
        self.disconnect(peer_id)
        with self._attempts.begin(peer_id) as attempt:
            shown = _Introduction(standing, standing.proofs.show(prove(link_token, standing.identity)))
            try:
                meeting = _Meeting(shown, peer, prove(link_token, identity), deadline, attempt)
                self._link_up(_UpLink(CmaLink(peer_id, meeting.meet(peer_id)), shown), attempt)
            except BaseException:
                shown.withdraw()
                raise
            finally:
                standing.door.clear()

    def disconnect(self, peer_id: int) -> None:
        self._attempts.end(peer_id)
        with self._lock:
            up = self._links.pop(peer_id, None)
            if up is not None:
                self._leaving[peer_id] = up.link.peer
        if up is not None:
            self._end(up, PeerLost(f"the link to peer {peer_id} was taken down"))

    def is_fenced(self, peer_id: int) -> bool:
        with self._lock:
            if peer_id in self._links:
                return False
            peer = self._leaving.get(peer_id)
        if peer is None or not peer.has_ended():
            return peer is None
        with self._lock:
            self._leaving.pop(peer_id, None)
        return True

    def register(self, region: Region) -> bytes | None:
        if not region.for_peers:  # the kernel lets a peer of this user touch it all the same, but it is not told where
            return None
        return msgspec.msgpack.encode(_Descriptor(region.address, region.size_bytes))

    def unregister(self, region_id: int) -> None:
        """Nothing is kept of a region. Peers must have ended their transfers on it; nothing here can stop them."""

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        described = decode_descriptor_as(_Descriptor, descriptor, region_id, size_bytes)
        if described.address < 1 or size_bytes < 1 or described.address + size_bytes > _END_OF_ADDRESSES:
            raise Unreachable(f"region {region_id} of {size_bytes} bytes at {described.address:#x} cannot exist")
        self._link(peer_id).attach(region_id, AttachedRegion(described.address, size_bytes))

    def detach(self, peer_id: int, region_id: int) -> None:
        with self._lock:
            up = self._links.get(peer_id)
        if up is not None:
            up.link.detach(region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        context, link = self._opened().context, self._link(batch.peer_id)

        def move(running: OpenBatch) -> None:
            self._link(batch.peer_id)  # again, now that who ends the link waits for us
            _move(running, batch, context, link)

        self._batches.run(batch_id, batch, done, move)

    def cancel(self, batch_id: int) -> None:
        self._batches.cancel(batch_id)

    def _end(self, up: _UpLink, error: LLMException) -> None:
        """End the copies, then take the proof away: the peer takes it that its memory is touched no more.

        The link is in `_leaving` since it left `_links`.
        """
        peer_id = up.link.peer_id
        with self._lock:
            leaving = [one for one in self._leaving if one != peer_id]
        if not self._batches.end_then(error, peer_id, up.introduction.withdraw):
            _log.error("a copy with peer %d does not end; until it does its proof stays", peer_id)
        for one in leaving:  # so that few are remembered
            self.is_fenced(one)

    def _opened(self) -> _Standing:
        standing = self._standing
        if standing is None:
            raise ClosedError("the cma backend is not open")
        return standing

    def _link(self, peer_id: int) -> CmaLink:
        self._opened()
        with self._lock:
            up = self._links.get(peer_id)
        if up is None:
            raise NotYetLinked(f"peer {peer_id} is not connected")
        return up.link

    def _link_up(self, up: _UpLink, attempt: Attempt) -> None:
        with self._lock:
            attempt.check_wanted()
            if self._standing is not up.introduction.standing:
                raise ClosedError("the cma backend was closed")
            replaced = self._links.get(up.link.peer_id)
            self._links[up.link.peer_id] = up
        if replaced is not None:  # by two calls of `connect` at once
            replaced.introduction.withdraw()


class _Meeting:
    """Finding out which process the peer is, and waiting until it shows its proof."""

    def __init__(
        self, shown: _Introduction, peer: Identity, proof: bytes, deadline: Deadline, attempt: Attempt
    ) -> None:
        self._attempt = attempt
        self._shown = shown
        self._peer = peer
        self._proof = proof
        self._deadline = deadline
        self._pause_s = _FIRST_PAUSE_S
        self._refused = False

    def meet(self, peer_id: int) -> Peer:
        """Raises Unreachable, TimedOut, ClosedError."""
        while (pid := process_behind(self._peer.door)) is None:
            self._wait()
        try:
            watch = ProcessWatch(pid)
        except ProcessLookupError as error:
            raise Unreachable(f"the peer's process {pid} has ended") from error
        except OSError as error:
            raise Unreachable(f"the peer's process {pid} cannot be watched: {error}") from error
        if pid != os.getpid():
            self._settle_permission(pid)
        while (address := self._find(pid)) is None:
            self._wait()
        peer = Peer(peer_id, watch, RemoteProcess(pid, address, self._proof))
        try:
            peer.check_up()  # by now it is sure that `watch` watches the process which has the proof
        except (PeerLost, RemoteError) as error:
            raise Unreachable(f"the peer ended the cma handshake: {error}") from error
        return peer

    def _settle_permission(self, pid: int) -> None:
        """Let the peer near us if it needs that and may; if it may not, do not wait long for it."""
        scope = yama_scope()
        if scope == 0 or (scope < 3 and self._peer.traces_all):
            return
        if scope == 1 and self._shown.standing.allow_ptrace:
            consent.give(self._shown, pid)
        else:
            self._deadline = self._deadline.earlier(_REFUSED_WAIT_S)
            self._refused = True

    def _find(self, pid: int) -> int | None:
        try:
            return find_proof(pid, self._peer.proofs_address, self._proof)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise Unreachable(f"the peer's process {pid} has ended") from error
            if error.errno == errno.EPERM and self._peer.allows_ptrace and yama_scope() == 1:
                return None  # it may not have come to that yet
            if error.errno == errno.EPERM:
                raise Unreachable(why_refused(pid)) from error
            raise Unreachable(f"the peer's memory cannot be read where it says: {error}") from error

    def _wait(self) -> None:
        standing = self._shown.standing
        if standing.closing.wait(min(self._pause_s, self._deadline.remaining_s())):
            raise ClosedError("the cma backend was closed")
        self._attempt.check_wanted()
        if self._deadline.expired:
            self._give_up()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        standing.door.clear()

    def _give_up(self) -> None:
        if self._refused:
            raise Unreachable(
                f"the peer is probably not permitted to touch this process's memory: kernel.yama.ptrace_scope="
                f"{yama_scope()} and it has no CAP_SYS_PTRACE"
            )
        raise TimedOut("the other end did not show that it belongs to the link in time")


def _move(running: OpenBatch, batch: Batch, context: BackendContext, link: CmaLink) -> None:
    """Copy one batch."""
    remote = link.bases_of(batch)
    local = local_regions(context.local_region, batch.pairs)
    ranges = expand(batch, {region_id: region.address for region_id, region in local.items()}, remote)

    def check_wanted() -> None:
        if running.end_error is not None:
            raise running.end_error
        if batch.deadline.expired:
            raise TimedOut(f"a transfer of {batch.num_bytes} bytes over cma did not end within its deadline")

    link.peer.move(ranges, batch.op, check_wanted)
    link.peer.check_up()


def _allow_ptrace(options: Mapping[str, Any]) -> bool:
    """Raises ParamInvalid naming the option."""
    for name, value in options.items():
        if name != "allow_ptrace":
            raise ParamInvalid(f"cma option {name!r} is unknown; there is allow_ptrace")
        if not isinstance(value, bool):
            raise ParamInvalid(f"cma option allow_ptrace={value!r} must be true or false")
    return bool(options.get("allow_ptrace", False))


def _check_possible(proofs: ProofTable) -> None:
    """Touch our own memory that way, which the kernel permits wherever it permits the call at all."""
    try:
        read_remote(os.getpid(), proofs.address, PROOF_BYTES)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise Unreachable(why_forbidden_here()) from error
        raise Unreachable(f"this system cannot copy between processes (process_vm_readv): {error}") from error
