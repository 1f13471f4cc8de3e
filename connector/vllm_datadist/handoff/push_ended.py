# SPDX-License-Identifier: Apache-2.0
"""What P remembers of offers and transfers that are over, to answer calls that come late or again. The oldest go.

For `pushes`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..messages import OfferState
from .push_readers import OfferId


@dataclass(frozen=True, slots=True)
class Answer:
    """To a call of D's."""

    state: OfferState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of an offer: its latest number, and how that ended."""

    number: int
    answer: Answer


class EndedOffers:
    """Not thread-safe."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._ended: OrderedDict[OfferId, Ended] = OrderedDict()

    def note(self, who: OfferId, number: int, answer: Answer) -> Answer:
        self._ended[who] = Ended(number, answer)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        return answer

    def get(self, who: OfferId) -> Ended | None:
        return self._ended.get(who)

    def forget(self, who: OfferId) -> None:
        """It has been made again."""
        self._ended.pop(who, None)


class GoneTransfers:
    """Transfers of which nothing is left, and why. Not thread-safe."""

    def __init__(self, max_gone: int) -> None:
        self._max_gone = max_gone
        self._gone: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._gone

    def note(self, transfer_id: str, reason: str) -> None:
        self._gone[transfer_id] = reason
        while len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def reason(self, transfer_id: str) -> str:
        """ "" if it is not known."""
        return self._gone.get(transfer_id, "")

    def forget(self, transfer_id: str) -> None:
        """It has come again."""
        self._gone.pop(transfer_id, None)
