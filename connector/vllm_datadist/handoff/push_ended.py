# SPDX-License-Identifier: Apache-2.0
"""What P remembers of offers that are over, to answer calls that come late or again.

For `pushes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import OfferState


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
