# SPDX-License-Identifier: Apache-2.0
"""The open batches of a backend that copies in the thread of whoever calls `submit`.

Such a batch is open only while its thread is inside `run`. Ending it early (cancel, disconnect, close) means to
leave a note that the thread finds between two pieces of the copy, and to wait until it is out: the memory may be
freed as soon as the caller of `disconnect` or `close` is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from .._copy import scatter_copy
from ..errors import Cancelled, LLMException
from ..transfer.backend import Completion, DoneCallback
from ..transfer.plan import Batch, CopyList, Op

_PIECE_BYTES = 64 << 20  # some ten milliseconds
_END_TIMEOUT_S = 30.0


class OpenBatch:
    """One batch that is being copied, as seen by its own thread."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.thread_id = threading.get_ident()
        self.end_error: LLMException | None = None

    def copy(self, ranges: CopyList) -> None:
        """Move `ranges` (absolute addresses) the way the batch goes. Raises what ended the batch early."""
        for piece in _pieces(ranges):
            if self.end_error is not None:
                raise self.end_error
            if self.batch.op is Op.READ:
                scatter_copy(piece.local, piece.remote, piece.num_bytes)
            else:
                scatter_copy(piece.remote, piece.local, piece.num_bytes)


class InlineBatches:
    """All open batches of one backend. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, OpenBatch] = {}

    def run(self, batch_id: int, batch: Batch, done: DoneCallback, move: Callable[[OpenBatch], None]) -> None:
        """Run `move` and report how it ended: an LLMException it raises is the batch's failure."""
        running = OpenBatch(batch)
        with self._changed:
            self._open[batch_id] = running
        try:
            done(_completion(batch_id, running, move))
        finally:
            with self._changed:
                del self._open[batch_id]
                self._changed.notify_all()

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to end; it may as well be finished first. Unknown ids are a no-op."""
        with self._changed:
            running = self._open.get(batch_id)
            if running is not None and running.end_error is None:
                running.end_error = Cancelled(f"batch {batch_id} was cancelled")

    def end(self, error: LLMException, peer_id: int | None = None) -> None:
        """End all batches, or those with one peer, and wait until their threads have left the memory alone.

        Batches of the calling thread (it is in a `done` callback) are not waited for.
        """
        with self._changed:
            ending = [b for b in self._open.values() if peer_id is None or b.batch.peer_id == peer_id]
            for running in ending:
                running.end_error = running.end_error or error
            others = [b for b in ending if b.thread_id != threading.get_ident()]
            self._changed.wait_for(lambda: not any(b in self._open.values() for b in others), _END_TIMEOUT_S)


def _completion(batch_id: int, running: OpenBatch, move: Callable[[OpenBatch], None]) -> Completion:
    try:
        move(running)
    except Cancelled as error:
        return Completion.cancelled(batch_id, error)
    except LLMException as error:
        return Completion.failed(batch_id, error)
    return Completion.ok(batch_id)


def _pieces(ranges: CopyList) -> Iterator[CopyList]:
    """`ranges` cut, between two ranges, into parts of about `_PIECE_BYTES`. There is at least one part."""
    ends = np.cumsum(ranges.num_bytes)
    if not len(ends) or ends[-1] <= _PIECE_BYTES:
        yield ranges
        return
    cuts = np.flatnonzero(np.diff(ends // _PIECE_BYTES)) + 1
    for start, end in zip([0, *cuts], [*cuts, len(ends)], strict=True):
        yield CopyList(ranges.local[start:end], ranges.remote[start:end], ranges.num_bytes[start:end])
