# SPDX-License-Identifier: Apache-2.0
"""What a trace shows of the scheduler's steps: P's chunks and prefills, and when D's requests first run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .. import trace


@dataclass(slots=True)
class _Prefill:
    """`begun_s`: when its first chunk was scheduled; None before."""

    key: str
    begun_s: float | None = None
    num_tokens: int = 0


class StepTrace:
    """Not thread-safe. While tracing is off nothing is kept."""

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._loaded: dict[str, str] = {}

    def await_prefill(self, request_id: str, key: str) -> None:
        """P: its chunks are of interest."""
        if trace.is_on():
            self._prefills[request_id] = _Prefill(key)

    def await_first(self, request_id: str, key: str) -> None:
        """D: its first step is of interest."""
        if trace.is_on():
            self._loaded[request_id] = key

    def scheduled(self, scheduler_output: Any) -> None:
        """vLLM has decided what a step computes."""
        scheduled = getattr(scheduler_output, "num_scheduled_tokens", {})
        for request_id in self._loaded.keys() & scheduled.keys():
            trace.instant("first scheduled", self._loaded.pop(request_id), request=request_id)
        for request_id in self._prefills.keys() & scheduled.keys():
            prefill = self._prefills[request_id]
            prefill.begun_s = prefill.begun_s or time.monotonic()
            prefill.num_tokens += scheduled[request_id]
            trace.instant("chunk scheduled", prefill.key, request=request_id, num_tokens=scheduled[request_id])

    def finished(self, request_id: str) -> None:
        """vLLM is done with it."""
        self._loaded.pop(request_id, None)
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None and prefill.begun_s is not None:
            now_s, begun_s = time.monotonic(), prefill.begun_s
            args = {"request": request_id, "num_tokens": prefill.num_tokens}
            trace.record("prefill", prefill.key, begun_s, now_s, "prefills", **args)
