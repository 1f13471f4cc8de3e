# SPDX-License-Identifier: Apache-2.0
"""Counts of the scheduler side, which sees each request once however many workers there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenTally:
    """Prompt tokens of hand-off requests: `num_remote_tokens` from P, `num_local_tokens` had or computed here."""

    num_remote_tokens: int = 0
    num_local_tokens: int = 0
    num_failed_loads: int = 0

    def count(self, num_remote: int, num_local: int) -> None:
        self.num_remote_tokens += num_remote
        self.num_local_tokens += num_local

    def is_empty(self) -> bool:
        return not (self.num_remote_tokens or self.num_local_tokens or self.num_failed_loads)
