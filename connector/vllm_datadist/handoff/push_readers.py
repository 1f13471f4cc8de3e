# SPDX-License-Identifier: Apache-2.0
"""Who offers what, and which workers of D need nothing of a transfer whose lease at P is not open yet: for `pushes`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..messages import LeaseRef, OfferRef, RequestKey
from .lease import Reader

#: Workers of D that are remembered for one transfer; more are no use, no engine is that large.
MAX_READERS = 1024


@dataclass(frozen=True, slots=True)
class OfferId:
    """Who offers what."""

    cluster_id: int
    transfer_id: str
    request: LeaseRef

    @property
    def reader(self) -> Reader:
        return Reader(self.cluster_id, RequestKey(self.request.request_id, self.request.attempt))


def offer_id(cluster_id: int, ref: OfferRef) -> OfferId:
    return OfferId(cluster_id, ref.transfer_id, ref.request)


@dataclass(frozen=True, slots=True)
class Served:
    """A worker of D that needs nothing (any more), one of `num_readers`."""

    reader: Reader
    num_readers: int


class ServedBook:
    """By transfer id, in the order in which they said so. Not thread-safe.

    Args:
        max_transfers: how many are remembered; the oldest go.
    """

    def __init__(self, max_transfers: int) -> None:
        self._max_transfers = max_transfers
        self._served: OrderedDict[str, list[Served]] = OrderedDict()

    def __len__(self) -> int:
        """Transfers of which somebody needs nothing."""
        return len(self._served)

    def note(self, transfer_id: str, served: Served) -> None:
        waiting = self._served.setdefault(transfer_id, [])
        if served not in waiting and len(waiting) < MAX_READERS:
            waiting.append(served)
        while len(self._served) > self._max_transfers:
            self._served.popitem(last=False)

    def take(self, transfer_id: str) -> list[Served]:
        """The transfer's lease is open now, or it will never be."""
        return self._served.pop(transfer_id, [])

    def keep_only(self, transfer_id: str, key: RequestKey) -> None:
        """This request of D has the transfer now: what others needed of it says nothing any more."""
        kept = [served for served in self._served.get(transfer_id, ()) if served.reader.key == key]
        if kept:
            self._served[transfer_id] = kept
        else:
            self._served.pop(transfer_id, None)
