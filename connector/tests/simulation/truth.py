# SPDX-License-Identifier: Apache-2.0
"""What P really promised: kept by the simulator, from what really happened. The code under test never sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_datadist.handoff.lease import Reader
from vllm_datadist.messages import RequestKey

if TYPE_CHECKING:
    from .worker import SimWorker


@dataclass
class _Promise:
    lease_s: float
    ends_s: float
    latest_s: float
    num_readers: int = 0
    readers: set[Reader] = field(default_factory=set)
    let_go: set[Reader] = field(default_factory=set)


class LeaseTruth:
    """A lease is in force until its time is over, or until all who said that they would read it have let it go."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._promises: dict[RequestKey, _Promise] = {}
        self._latest_s = float("inf")
        #: Who has what it wants of a transfer, or wants nothing of it.
        self._let_go: dict[str, list[tuple[Reader, int]]] = {}
        #: By transfer: the request of D whose offers P has taken on last, and the one that will offer, until when.
        self._owners: dict[str, RequestKey] = {}
        self._expected: dict[str, tuple[RequestKey, float]] = {}
        self._came: set[tuple[str, RequestKey]] = set()

    def open(self, key: RequestKey, lease_s: float) -> None:
        now_s = self._worker.clock()
        self._promises[key] = _Promise(lease_s, min(self._latest_s, now_s + lease_s), now_s + 20 * lease_s)
        for reader, count in self._let_go.get(self._worker.engine.transfers.get(key, ""), ()):
            self._let(key, reader, count)

    def let_go(self, transfer_id: str, reader: Reader, num_readers: int) -> None:
        """D's worker needs nothing (more) of this transfer, whether or not its lease has been opened.

        Unless it is another request's by now, which has only said so far that it will offer.
        """
        expected = self.has_come(transfer_id, reader.key)
        if expected is not None and transfer_id not in self._owners:
            return
        self._let_go.setdefault(transfer_id, []).append((reader, num_readers))
        for key, name in self._worker.engine.transfers.items():
            if name == transfer_id:
                self._let(key, reader, num_readers)

    def _let(self, key: RequestKey, reader: Reader, num_readers: int) -> None:
        """Whose the transfer is P knows better: here any request of D ends the lease with the last of its readers."""
        promise = self._promises.get(key)
        if promise is not None:
            promise.let_go.add(reader)
            if sum(other.key == reader.key for other in promise.let_go) >= num_readers:
                promise.ends_s = float("-inf")

    def takes_over(self, transfer_id: str, key: RequestKey) -> None:
        """P has taken on offers of this request of D. What others needed before, or did not, counts for nothing."""
        self._owners[transfer_id] = key
        self._keep_only(transfer_id, key)

    def expects(self, transfer_id: str, key: RequestKey, until_s: float) -> None:
        """P hears that this request of D will offer. While nobody has, the transfer is its."""
        if (transfer_id, key) in self._came:
            return  # it has offered, or said that it needs nothing: what it announced is overtaken
        self._expected[transfer_id] = (key, until_s)
        if transfer_id not in self._owners:
            self._keep_only(transfer_id, key)

    def has_come(self, transfer_id: str, key: RequestKey) -> RequestKey | None:
        """This request has offered, or needs nothing. Returns the other one that is still expected."""
        self._came.add((transfer_id, key))
        expected, until_s = self._expected.get(transfer_id, (None, 0.0))
        if expected == key or until_s <= self._worker.clock():
            self._expected.pop(transfer_id, None)
            return None
        return expected

    def _keep_only(self, transfer_id: str, key: RequestKey) -> None:
        self._let_go[transfer_id] = [one for one in self._let_go.get(transfer_id, ()) if one[0].key == key]

    def end_within(self, limit_s: float) -> None:
        self._latest_s = min(self._latest_s, self._worker.clock() + limit_s)
        for promise in self._promises.values():
            promise.ends_s = min(promise.ends_s, self._latest_s)

    def renew(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            if self.is_in_force(key):
                promise = self._promises[key]
                promise.ends_s = min(self._latest_s, promise.latest_s, self._worker.clock() + promise.lease_s)

    def release(self, keys: Sequence[RequestKey], reader: Reader, num_readers: int) -> None:
        for key in keys:
            promise = self._promises.get(key)
            if promise is None or any(other.key != reader.key for other in promise.readers):
                continue
            promise.num_readers = promise.num_readers or num_readers
            if promise.num_readers != num_readers:
                continue
            promise.readers.add(reader)
            if len(promise.readers) >= promise.num_readers:
                promise.ends_s = float("-inf")

    def is_in_force(self, key: RequestKey) -> bool:
        promise = self._promises.get(key)
        return promise is not None and self._worker.clock() < promise.ends_s

    def protects(self, key: RequestKey) -> bool:
        """Whether the blocks are D's to read: by the lease, or by vLLM before the lease has been opened."""
        if key in self._promises:
            return self.is_in_force(key)
        return key in self._worker.engine.held
