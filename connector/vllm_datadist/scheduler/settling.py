# SPDX-License-Identifier: Apache-2.0
"""D's failed pushes whose blocks P may still write: vLLM hears of the failure at once, and gets the blocks later.

P is out of reach and its end of the link is not fenced: a process that was stopped with our memory mapped may go on
writing whenever it goes on. vLLM ends (or queues for computing anew) a request when it is told that its load failed,
and gives its blocks away when it is told that the load has ended. Usually both come in one report. Here the second is
taken out of it, and put into a later one when every worker concerned has said that nobody writes any more.
"""

from __future__ import annotations

from collections import Counter

from ..messages import WorkerNotes


class SettlingTable:
    """By vLLM's request id. Not thread-safe."""

    def __init__(self) -> None:
        #: Workers that have said "unsettled", less those that have said "settled" since.
        self._open: Counter[str] = Counter()
        #: Ends that vLLM has not been told.
        self._kept_back: set[str] = set()

    @property
    def is_idle(self) -> bool:
        return not (self._open or self._kept_back)

    def update(self, received: set[str], notes: WorkerNotes | None) -> set[str]:
        """What vLLM is to be told of `received`, ids of one report, and of those kept back before."""
        if notes is not None:
            self._open.update(notes.unsettled)
            self._open.subtract(notes.settled)
        told = {request_id for request_id in received if self._open[request_id] <= 0}
        self._kept_back |= received - told
        settled = {request_id for request_id in self._kept_back if self._open[request_id] <= 0}
        self._kept_back -= settled
        self._open = +self._open
        return told | settled
