# SPDX-License-Identifier: Apache-2.0
"""Which request of D a transfer is for, when another of D's lets go of it.

D's client goes away and comes again, in the same moment perhaps. If P hears that the first request needs nothing
before it hears of the second one, it gives away what the second one comes for. So a withdrawal names the request that
the transfer is for now, if D knows one: P keeps the lease for that, as if it had been announced before.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import Announce, OfferRef, PushSource, RequestKey, lease_ref


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The same at each P, and of another name at another one."""

    host: str
    port: int
    transfer_id: str


@dataclass(frozen=True, slots=True)
class _Heir:
    transfer: _Transfer
    until_s: float


class Heirs:
    """Requests of D whose offers are to come, or under way. Not thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[RequestKey, _Heir] = {}
        self._by_transfer: dict[_Transfer, list[RequestKey]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, key: RequestKey, source: PushSource, until_s: float) -> None:
        """It will offer, or offers, until then."""
        self.forget(key)
        transfer = _transfer(source)
        self._by_key[key] = _Heir(transfer, until_s)
        self._by_transfer.setdefault(transfer, []).append(key)

    def forget(self, key: RequestKey) -> None:
        """It needs nothing more, or nothing came of it."""
        heir = self._by_key.pop(key, None)
        if heir is None:
            return
        keys = self._by_transfer[heir.transfer]
        keys.remove(key)
        if not keys:
            del self._by_transfer[heir.transfer]

    def of(self, key: RequestKey, source: PushSource, now_s: float) -> Announce | None:
        """What P is told of the latest other one, when `key` lets go of this transfer."""
        for other in reversed(self._by_transfer.get(_transfer(source), ())):
            left_s = self._by_key[other].until_s - now_s
            if other != key and left_s > 0:
                return Announce(OfferRef(source.transfer_id, lease_ref(other)), left_s)
        return None


def _transfer(source: PushSource) -> _Transfer:
    return _Transfer(source.host, source.port, source.transfer_id)
