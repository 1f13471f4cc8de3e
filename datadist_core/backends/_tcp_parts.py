# SPDX-License-Identifier: Apache-2.0
"""A large batch on a link with several connections: cut into parts, one for each, and put together at the end.

One connection sends no faster than its congestion window allows, and after a loss, or far away, that is little; several
have several windows. A batch that is small stays whole: it would only be more messages.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..errors import Cancelled, LLMException, PeerLost
from ..transfer.backend import Completion, CompletionStatus, DoneCallback
from ..transfer.plan import Batch

MIN_PART_BYTES = 128 << 10


class Ending(Protocol):
    """A batch, or a part of one, that can be ended early, by the loop's owner."""

    def give_up(self, error: LLMException) -> None: ...


def split(batch: Batch, num_parts: int) -> list[Batch]:
    """At most `num_parts` batches that move the same bytes, none tiny: cut by items, or by grids if there are more."""
    num_parts = min(num_parts, batch.num_bytes // MIN_PART_BYTES)
    if num_parts < 2:
        return [batch]
    if len(batch.local_items) >= len(batch.pairs):
        return [
            replace(batch, local_items=mine, remote_items=theirs)
            for mine, theirs in zip(
                np.array_split(batch.local_items, num_parts), np.array_split(batch.remote_items, num_parts), strict=True
            )
            if len(mine)
        ]
    cuts = [len(batch.pairs) * part // num_parts for part in range(num_parts + 1)]
    return [replace(batch, pairs=batch.pairs[start:end]) for start, end in itertools.pairwise(cuts) if end > start]


class Joined:
    """Reports once, when the last part has ended: until then the memory is not the caller's. Thread-safe.

    Args:
        post: has the loop's owner do something.
    """

    def __init__(self, num_parts: int, done: DoneCallback, post: Callable[[Callable[[], None]], None]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_parts
        self._failure: Completion | None = None
        self._done, self._post = done, post
        self.parts: Sequence[Ending] = ()

    def give_up(self, error: LLMException) -> None:
        for part in self.parts:
            part.give_up(error)

    def on_part(self, completion: Completion) -> None:
        """The callback of every part. After the first failure the others are given up, too."""
        with self._lock:
            self._num_left -= 1
            is_first = completion.status is not CompletionStatus.OK and self._failure is None
            if is_first:
                self._failure = completion
            is_last = self._num_left == 0
        if is_last:
            self._done(self._failure or completion)
        elif is_first and not isinstance(completion.error, PeerLost):
            # A lost peer's parts all end anyhow.
            self._post(lambda: self.give_up(Cancelled("another part of the transfer failed")))
