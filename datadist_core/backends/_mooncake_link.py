# SPDX-License-Identifier: Apache-2.0
"""One link: the peer's regions, and a thread that moves the link's batches piece by piece.

A call into Mooncake blocks, cannot be cancelled, and keeps a core busy until it returns. So a batch is cut into
pieces; one piece of a link is under way at a time; and the batches of a link take turns, so that a small one does not
wait for a large one. A batch that is cancelled ends with its piece. If that does not end by itself soon, the
connections to the peer are shut down under Mooncake; with RDMA, only Mooncake's own time limit ends it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..errors import Cancelled, LLMException, PeerLost, RemoteError
from ..memory.region import Region
from ..transfer.backend import Completion, DoneCallback
from ..transfer.plan import Batch, CopyList, Op
from ..types import Deadline
from ._attached import AttachedRegions
from ._mooncake_engine import Initiator, Peer, interrupted_at
from ._mooncake_identity import Descriptor

PIECE_BYTES = 16 << 20
PIECE_RANGES = 1000
"""Mooncake refuses a call when more than 1024 ranges wait for one peer."""

_GRACE_S = 0.25
"""What a piece that nobody wants any more is given to end by itself; a healthy peer needs far less."""
_END_TIMEOUT_S = 150.0
_PROBE_S = 3.0
"""Generous: a busy peer must not be taken for a dead one. Where a process has ended, the answer comes at once."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """An accepted batch. `regions` keep the local memory alive."""

    batch_id: int
    batch: Batch
    done: DoneCallback
    pieces: deque[CopyList]
    regions: tuple[Region, ...]
    end_error: LLMException | None = None

    def complete(self) -> None:
        """It has been moved, or was to end early and nothing moves any more."""
        self.done(completion_of(self.batch_id, self.end_error))


@dataclass(slots=True, eq=False)
class Link:
    """One peer. Thread-safe.

    Attributes:
        peer_id: the owner's name for it.
        on_lost: called once, by the link's thread, if the peer's engine does not answer after a failure.
        end_error: why the link is down; None while it is up.
    """

    peer_id: int
    peer: Peer
    initiator: Initiator
    on_lost: Callable[[Link, LLMException], None]
    end_error: LLMException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    regions: AttachedRegions[Descriptor] = field(init=False)
    _waiting: deque[OpenBatch] = field(default_factory=deque)
    _moving: OpenBatch | None = None
    _thread: threading.Thread | None = None
    _num_reading: int = 0

    def __post_init__(self) -> None:
        self.regions = AttachedRegions(self.peer_id)

    def check_up(self) -> None:
        """Raise what ended the link."""
        if self.end_error is not None:
            raise type(self.end_error)(str(self.end_error)) from self.end_error

    def answers(self, deadline: Deadline) -> bool:
        """Whether the peer's engine answers before the deadline."""
        with self._counted():
            return self._insist(lambda: self.initiator.probe(self.peer, deadline), deadline)

    def read(self, addresses: tuple[int, ...], num_bytes: int, deadline: Deadline) -> bytes | None:
        """A few bytes from each of the peer's addresses; None if they are not to be had before the deadline."""
        with self._counted():
            scratch = np.zeros(len(addresses) * num_bytes, dtype=np.uint8)
            start = int(scratch.ctypes.data)
            self.initiator.add(start, scratch.nbytes)
            try:
                local = start + np.arange(len(addresses), dtype=np.int64) * num_bytes
                sizes = np.full(len(addresses), num_bytes, dtype=np.int64)
                ranges = CopyList(local, np.array(addresses, dtype=np.int64), sizes)
                with interrupted_at(deadline, self.peer):
                    moved = self._insist(lambda: self.initiator.move(self.peer, Op.READ, ranges), deadline)
            finally:
                self.initiator.remove(start)
            return scratch.tobytes() if moved else None

    def _insist(self, call: Callable[[], bool], deadline: Deadline) -> bool:
        """What `call` returns. It is made again if it was interrupted, but not by its deadline or the link's end."""
        while True:
            num_interrupts = self.peer.num_interrupts()
            if call():
                return True
            meant = deadline.expired or self.end_error is not None
            if meant or self.peer.num_interrupts() == num_interrupts:
                return False

    def submit(self, opened: OpenBatch) -> None:
        with self._changed:
            self.check_up()
            self._waiting.append(opened)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datadist-mooncake", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to end. Unknown ids are a no-op."""
        error = Cancelled(f"batch {batch_id} was cancelled")
        with self._changed:
            dropped = [opened for opened in self._waiting if opened.batch_id == batch_id]
            moving = self._moving
            for opened in dropped:
                self._waiting.remove(opened)
            if moving is not None and moving.batch_id == batch_id and moving.end_error is None:
                moving.end_error = error
                threading.Thread(
                    target=self._await_end, args=(moving,), name="datadist-mooncake-cancel", daemon=True
                ).start()
        _drop(dropped, error)

    def end(self, error: LLMException) -> None:
        """Complete all batches with `error`; when this returns nothing is under way. Idempotent.

        In the link's own thread (it is in a `done` callback) nothing is waited for.
        """
        with self._changed:
            self.end_error = self.end_error or error
            dropped, moving = list(self._waiting), self._moving
            self._waiting.clear()
            if moving is not None:
                moving.end_error = moving.end_error or error
            self._changed.notify_all()
        _drop(dropped, error)
        if threading.current_thread() is not self._thread:
            self._await_end(moving)

    def _await_end(self, moving: OpenBatch | None) -> None:
        """Wait until a batch, or, if the link ends, everything has ended, and see to it that it does."""
        deadline, pause = Deadline.after(_END_TIMEOUT_S), _GRACE_S
        with self._changed:
            while not self._changed.wait_for(lambda: self._has_ended(moving), pause) and not deadline.expired:
                self.peer.interrupt()  # with the lock: no other batch can be on its way now

    def _has_ended(self, moving: OpenBatch | None) -> bool:
        if self.end_error is not None and self._num_reading:
            return False
        return moving is None or self._moving is not moving

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """`end` waits for what is in this block."""
        with self._changed:
            self.check_up()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def _run(self) -> None:
        """The link's thread."""
        while (opened := self._take()) is not None:
            self._put_back(opened, self._advance(opened))

    def _take(self) -> OpenBatch | None:
        """The batch whose turn it is; None at the end of the link."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.end_error is not None)
            self._moving = self._waiting.popleft() if self._waiting else None
            return self._moving

    def _advance(self, opened: OpenBatch) -> bool:
        """Move one piece. Whether the batch has come to its end."""
        if not opened.pieces:
            return True
        num_interrupts = self.peer.num_interrupts()
        try:
            moved = self.initiator.move(self.peer, opened.batch.op, opened.pieces[0])
        except LLMException as error:
            opened.end_error = opened.end_error or error
            return True
        if moved:
            opened.pieces.popleft()
            return not opened.pieces
        if opened.end_error is None and self.peer.num_interrupts() != num_interrupts:
            return False  # somebody else was meant: the piece has another turn
        if opened.end_error is None:
            opened.end_error = self._why_not_moved(opened)
        return True

    def _put_back(self, opened: OpenBatch, ended: bool) -> None:
        """The end of a turn: the batch waits for its next one, or is complete."""
        with self._changed:
            if not ended and opened.end_error is None:
                self._waiting.append(opened)
                self._moving = None
                self._changed.notify_all()
                return
        opened.complete()
        with self._changed:
            self._moving = None
            self._changed.notify_all()

    def _why_not_moved(self, opened: OpenBatch) -> LLMException:
        """After a failure. If the peer does not answer, the link is down."""
        if self._still_answers():
            return RemoteError(
                f"Mooncake could not move a part of {opened.batch.num_bytes} bytes {_WAYS[opened.batch.op]} "
                f"{self.peer.name}, which answers; with MC_LOG_LEVEL=ERROR it says more on stderr"
            )
        error = PeerLost(f"peer {self.peer_id} is gone: its Mooncake engine at {self.peer.name} does not answer")
        self.end(error)
        self.on_lost(self, error)
        return error

    def _still_answers(self) -> bool:
        deadline = Deadline.after(_PROBE_S)
        try:
            return self._insist(lambda: self.initiator.probe(self.peer, deadline), deadline)
        except LLMException:
            return False


_WAYS = {Op.READ: "from", Op.WRITE: "to"}


def completion_of(batch_id: int, error: LLMException | None) -> Completion:
    if error is None:
        return Completion.ok(batch_id)
    if isinstance(error, Cancelled):
        return Completion.cancelled(batch_id, error)
    return Completion.failed(batch_id, error)


def cut(ranges: CopyList) -> deque[CopyList]:
    """`ranges` in pieces of at most about `PIECE_BYTES` and exactly `PIECE_RANGES`; none for no ranges."""
    ranges = _split_long(ranges)
    if not len(ranges.num_bytes):
        return deque()
    starts = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    first_of_bytes = np.diff(starts // PIECE_BYTES, prepend=-1) != 0
    cuts = [*np.flatnonzero(first_of_bytes).tolist(), len(starts)]
    pieces: deque[CopyList] = deque()
    for start, end in itertools.pairwise(cuts):
        for at in range(start, end, PIECE_RANGES):
            part = slice(at, min(at + PIECE_RANGES, end))
            pieces.append(CopyList(ranges.local[part], ranges.remote[part], ranges.num_bytes[part]))
    return pieces


def _split_long(ranges: CopyList) -> CopyList:
    """The same bytes in ranges of at most `PIECE_BYTES`."""
    counts = -(-ranges.num_bytes // PIECE_BYTES)
    if not len(counts) or int(counts.max()) == 1:
        return ranges
    of_range = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(of_range)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE_BYTES
    left = ranges.num_bytes[of_range] - offsets
    return CopyList(ranges.local[of_range] + offsets, ranges.remote[of_range] + offsets, np.minimum(left, PIECE_BYTES))


def _drop(batches: list[OpenBatch], error: LLMException) -> None:
    """Complete batches that were waiting: nothing of theirs is under way."""
    for opened in batches:
        opened.end_error = opened.end_error or error
        opened.complete()
