# SPDX-License-Identifier: Apache-2.0
"""What pulls and pushes return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a finished pull or push did. (An extension.)

    Attributes:
        num_bytes: what was moved, over all tensors.
        backend: what moved it; several with "+" between them.
        seconds: how long the call took.
    """

    num_bytes: int
    backend: str
    seconds: float
