# SPDX-License-Identifier: Apache-2.0
"""P's table of requests whose blocks vLLM keeps for a hand-off, until the workers say that the lease has ended."""

from __future__ import annotations

import itertools

from ..messages import RequestKey
from ..newest import Newest


class HoldTable:
    """Which request ids vLLM waits for, and the attempt numbers. Not thread-safe."""

    def __init__(self, max_remembered: int = 4096) -> None:
        self._attempts = itertools.count(1)
        self._held: dict[str, RequestKey] = {}
        self._ended: Newest[str, None] = Newest(max_remembered)

    def __len__(self) -> int:
        return len(self._held)

    def next_key(self, request_id: str) -> RequestKey:
        """A key that this engine has never used."""
        return RequestKey(request_id, next(self._attempts))

    def hold(self, key: RequestKey) -> None:
        self._held[key.request_id] = key
        self._ended.pop(key.request_id, None)

    def end(self, request_id: str) -> bool:
        """The workers' leases have ended. False if that was known before (then vLLM must not hear it again)."""
        if self._held.pop(request_id, None) is not None:
            self._ended[request_id] = None
            return True
        return request_id not in self._ended
