# SPDX-License-Identifier: Apache-2.0
"""Who offers what, who will, and which workers of D need nothing of a transfer whose lease at P is not open yet.

For `pushes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..messages import LeaseRef, OfferRef, RequestKey
from ..newest import Newest
from .lease import Reader

#: Workers of D that are remembered for one transfer; more are no use, no engine is that large.
MAX_READERS = 1024
#: Transfers of which it is remembered that an offer will come; the oldest go.
MAX_ANNOUNCED = 65536


@dataclass(frozen=True, slots=True)
class OfferId:
    """Who offers what."""

    cluster_id: int
    transfer_id: str
    request: LeaseRef

    @property
    def reader(self) -> Reader:
        return Reader(self.cluster_id, RequestKey(self.request.request_id, self.request.attempt))


def request_key(ref: OfferRef) -> RequestKey:
    """D's request that offers."""
    return RequestKey(ref.request.request_id, ref.request.attempt)


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
        self._served: Newest[str, list[Served]] = Newest(max_transfers)

    def __len__(self) -> int:
        """Transfers of which somebody needs nothing."""
        return len(self._served)

    def note(self, transfer_id: str, served: Served) -> None:
        waiting = self._served.setdefault(transfer_id, [])
        if served not in waiting and len(waiting) < MAX_READERS:
            waiting.append(served)

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


@dataclass(frozen=True, slots=True)
class _Announced:
    key: RequestKey
    until_s: float


class Announcements:
    """Which request of D will offer, by transfer id: the latest that has said so. Not thread-safe.

    An announcement may arrive after what it announces, and is then nothing to wait for.

    Args:
        max_come: how many are remembered that have offered, or need nothing.
    """

    def __init__(self, max_come: int) -> None:
        self._announced: Newest[str, _Announced] = Newest(MAX_ANNOUNCED)
        self._come: Newest[tuple[str, RequestKey], None] = Newest(max_come)

    def __len__(self) -> int:
        return len(self._announced)

    def __iter__(self) -> Iterator[str]:
        return iter(self._announced)

    def note(self, transfer_id: str, key: RequestKey, until_s: float) -> bool:
        """It is waited for until then, at the latest. False: it has come already."""
        if (transfer_id, key) in self._come:
            return False
        self._announced.pop(transfer_id, None)
        self._announced[transfer_id] = _Announced(key, until_s)
        return True

    def has_come(self, transfer_id: str, key: RequestKey) -> None:
        """It has offered, or needs nothing. Whether another will offer it cannot say."""
        self._come[transfer_id, key] = None
        if self.key_of(transfer_id) == key:
            del self._announced[transfer_id]

    def key_of(self, transfer_id: str) -> RequestKey | None:
        announced = self._announced.get(transfer_id)
        return None if announced is None else announced.key

    def expire(self, now_s: float) -> None:
        for transfer_id in [name for name, one in self._announced.items() if one.until_s <= now_s]:
            del self._announced[transfer_id]
