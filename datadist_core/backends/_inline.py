# SPDX-License-Identifier: Apache-2.0
"""The open batches of a backend that copies in the thread of whoever calls `submit`.

Such a batch is open only while its thread is inside `run`. Ending it early (cancel, disconnect, close) means to
leave a note that the thread finds between two pieces of the copy, and to wait until it is out: the memory may be
freed as soon as the caller of `disconnect` or `close` is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import Cancelled, LLMException
from ..transfer.backend import Completion, DoneCallback
from ..transfer.item_copy import ItemCopy, ItemList, StopFlag
from ..transfer.plan import Batch, Op

_END_TIMEOUT_S = 30.0
#: Below this a copy is over before anybody could stop it.
_STOPPABLE_BYTES = 16 << 20


class OpenBatch:
    """One batch that is being copied with one peer."""

    __slots__ = ("_stop", "end_error", "peer_id", "thread_id")

    def __init__(self, peer_id: int) -> None:
        self.peer_id = peer_id
        self.thread_id = threading.get_ident()
        self.end_error: LLMException | None = None
        self._stop: StopFlag | None = None

    def copy(
        self, items: ItemCopy, op: Op, local_items: ItemList, remote_items: ItemList, connection: int = -1
    ) -> bool:
        """As `ItemCopy.run`. Raises what ended the batch early, or ParamInvalid for an index out of range."""
        if len(local_items) * items.bytes_of_one >= _STOPPABLE_BYTES:
            self._stop = StopFlag()
        if self.end_error is not None:
            raise self.end_error
        try:
            return items.run(op, local_items, remote_items, self._stop, connection)
        except Cancelled:
            if self.end_error is None:
                raise
            raise self.end_error from None

    def end(self, error: LLMException) -> None:
        """Ask it to end; it may as well be finished first."""
        if self.end_error is None:
            self.end_error = error
        if self._stop is not None:
            self._stop.set()


class InlineBatches:
    """All open batches of one backend. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._open: set[OpenBatch] = set()
        self._by_id: dict[int, OpenBatch] = {}

    def run(self, batch_id: int, batch: Batch, done: DoneCallback, move: Callable[[OpenBatch], None]) -> None:
        """Run `move` and report how it ended: an LLMException it raises is the batch's failure."""
        running = self.enter(batch.peer_id)
        self._by_id[batch_id] = running
        try:
            done(_completion(batch_id, running, move))
        finally:
            del self._by_id[batch_id]
            self.leave(running)

    def enter(self, peer_id: int) -> OpenBatch:
        """The calling thread begins a batch; `leave` is called when it has ended."""
        running = OpenBatch(peer_id)
        with self._lock:
            self._open.add(running)
        return running

    def leave(self, running: OpenBatch) -> None:
        with self._lock:
            self._open.discard(running)
            if self._num_waiting:
                self._changed.notify_all()

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to end; it may as well be finished first. Unknown ids are a no-op."""
        running = self._by_id.get(batch_id)
        if running is not None:
            running.end(Cancelled(f"batch {batch_id} was cancelled"))

    def end(self, error: LLMException, peer_id: int | None = None) -> bool:
        """End all batches, or those with one peer, and wait until their threads have left the memory alone.

        False if one of them did not in time. Batches of the calling thread (it is in a `done` callback) are not waited
        for: they have copied what they had to copy.
        """
        return self._await(self._tell(error, peer_id), _END_TIMEOUT_S)

    def end_then(self, error: LLMException, peer_id: int, then: Callable[[], None]) -> bool:
        """The same, and call `then` when they have left it alone: before this is back, or in a thread of its own."""
        others = self._tell(error, peer_id)
        if self._await(others, _END_TIMEOUT_S):
            then()
            return True

        def wait() -> None:
            self._await(others, None)
            then()

        threading.Thread(target=wait, name="datadist-late-copy", daemon=True).start()
        return False

    def _tell(self, error: LLMException, peer_id: int | None) -> set[OpenBatch]:
        """Ask them to end. Returns those of other threads."""
        with self._lock:
            ending = [b for b in self._open if peer_id is None or b.peer_id == peer_id]
            for running in ending:
                running.end(error)
        return {b for b in ending if b.thread_id != threading.get_ident()}

    def _await(self, batches: set[OpenBatch], timeout_s: float | None) -> bool:
        with self._lock:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(lambda: batches.isdisjoint(self._open), timeout_s)
            finally:
                self._num_waiting -= 1


def _completion(batch_id: int, running: OpenBatch, move: Callable[[OpenBatch], None]) -> Completion:
    try:
        move(running)
    except Cancelled as error:
        return Completion.cancelled(batch_id, error)
    except LLMException as error:
        return Completion.failed(batch_id, error)
    return Completion.ok(batch_id)
