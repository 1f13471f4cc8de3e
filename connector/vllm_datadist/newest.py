# SPDX-License-Identifier: Apache-2.0
"""A table that cannot grow without end: what peers and requests leave behind is remembered only so far."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """A dict that keeps its newest entries, at most `max_entries`, which is > 0.

    A key that gets another value stays as old as it was, as in any dict.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._max_entries:
            self.popitem(last=False)
