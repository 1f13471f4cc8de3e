# SPDX-License-Identifier: Apache-2.0
"""One link of the cma backend: a process, the regions of it that may be touched, and moving bytes from and to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .._copy.cma import Fault, ProofGone, RemoteCopy, RemoteProcess, read_remote
from ..errors import LLMException, ParamInvalid, PeerLost, RemoteError, Unreachable
from ..transfer.plan import Batch, CopyList, Op
from ._attached import AttachedRegions
from ._cma_host import ProcessWatch
from ._cma_permission import why_refused

_PIECE_BYTES = 32 << 20  # some milliseconds; between two pieces a batch can be ended


@dataclass(frozen=True, slots=True)
class AttachedRegion:
    """Where a region of the peer lies, in its memory."""

    address: int
    size_bytes: int


class Peer:
    """The process at the other end. Thread-safe; it holds nothing that has to be closed."""

    def __init__(self, peer_id: int, watch: ProcessWatch, process: RemoteProcess) -> None:
        self._peer_id = peer_id
        self._watch = watch
        self._process = process

    def check_up(self) -> None:
        """Raise PeerLost if the process or the peer's end of the link is gone."""
        self._check_alive()
        try:
            self._process.check()
        except (ProofGone, OSError) as error:
            raise self._blame(error) from error

    def has_ended(self) -> bool:
        """Whether it copies no more: its process has ended, or it has taken its proof away. False if unknown."""
        try:
            self.check_up()
        except PeerLost:
            return True
        except LLMException:
            return False
        return False

    def move(self, ranges: CopyList, op: Op, check_wanted: Callable[[], None]) -> None:
        """Move `ranges` (absolute addresses). Between two pieces, `check_wanted` may raise to end it.

        Raises PeerLost, Unreachable if the kernel does not permit it any more, RemoteError for memory that the peer
        has not, ParamInvalid for memory that we have not.
        """
        self._check_alive()
        copy = RemoteCopy(self._process, ranges.local, ranges.remote, ranges.num_bytes, op is Op.WRITE)
        try:
            while not copy.exhausted:
                check_wanted()
                copy.move(_PIECE_BYTES)
        except Fault as fault:
            raise self._blame_fault(fault, op) from fault
        except (ProofGone, OSError) as error:
            raise self._blame(error) from error

    def touch(self, region: AttachedRegion) -> None:
        """Read a region's first and last byte. Raises like `move`."""
        scratch = np.empty(2, dtype=np.uint8)
        local = scratch.ctypes.data + np.arange(2, dtype=np.int64)
        remote = np.array([region.address, region.address + region.size_bytes - 1], dtype=np.int64)
        self.move(CopyList(local, remote, np.ones(2, dtype=np.int64)), Op.READ, lambda: None)

    def _check_alive(self) -> None:
        """Another process with the same number must not even be looked at."""
        if self._watch.has_ended():
            raise PeerLost(f"peer {self._peer_id}: its process {self._process.pid} has ended")

    def _blame(self, error: ProofGone | OSError) -> LLMException:
        pid = self._process.pid
        if isinstance(error, ProofGone):
            return PeerLost(f"peer {self._peer_id} has taken the link down, or process {pid} runs another program now")
        if error.errno == errno.ESRCH:
            return PeerLost(f"peer {self._peer_id}: its process {pid} has ended")
        if error.errno == errno.EPERM:
            return Unreachable(why_refused(pid))
        return RemoteError(f"the kernel does not move bytes from or to process {pid}: {error}")

    def _blame_fault(self, fault: Fault, op: Op) -> LLMException:
        """Of the side that is read, the kernel can be asked whether that is possible; if so, it is the other one."""
        try:
            if op is Op.READ:
                read_remote(self._process.pid, fault.remote_address, 1)
                return _no_such_memory_here(fault)
            read_remote(os.getpid(), fault.local_address, 1)
        except OSError as error:
            if error.errno != errno.EFAULT:
                return self._blame(error)
            if op is Op.WRITE:
                return _no_such_memory_here(fault)
        return RemoteError(
            f"address {fault.remote_address:#x} of peer {self._peer_id} is not mapped there"
            f"{', or may not be written to' if op is Op.WRITE else ''}; did it free registered memory?"
        )


def _no_such_memory_here(fault: Fault) -> ParamInvalid:
    return ParamInvalid(
        f"address {fault.local_address:#x} of this process is not mapped, or not with the right access; was "
        "registered memory freed?"
    )


class CmaLink:
    """A peer and its attached regions. Thread-safe."""

    def __init__(self, peer_id: int, peer: Peer) -> None:
        self.peer_id = peer_id
        self.peer = peer
        self._regions: AttachedRegions[AttachedRegion] = AttachedRegions(peer_id)

    def attach(self, region_id: int, region: AttachedRegion) -> None:
        """Raises Unreachable if it cannot be read; PeerLost."""
        if self._regions.get(region_id) == region:
            return
        try:
            self.peer.touch(region)
        except RemoteError as error:
            raise Unreachable(f"region {region_id} of peer {self.peer_id}: {error}") from error
        self._regions.put(region_id, region)

    def detach(self, region_id: int) -> None:
        self._regions.remove(region_id)

    def bases_of(self, batch: Batch) -> dict[int, int]:
        """Where the peer's regions that a batch names begin. ParamInvalid unless its remote grids lie in them."""
        return {region_id: region.address for region_id, region in self._regions.of(batch).items()}
