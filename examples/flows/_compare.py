# SPDX-License-Identifier: Apache-2.0
"""Comparing what an end got with what it should have got, byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def num_bytes(value: object) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else 0


def difference(got: object, want: object) -> str | None:
    """How two values differ, in words; None if they are equal."""
    if not num_bytes(want):
        return None if got == want else f"got {got}, but {want} was expected"
    left, right = _as_bytes(got), _as_bytes(want)
    if len(left) != len(right):
        return f"got {len(left)} bytes, but {len(right)} were expected"
    num_wrong = int(np.count_nonzero(left != right))
    return f"{num_wrong} of {len(right)} bytes are wrong (same --seed on both ends?)" if num_wrong else None


def _as_bytes(value: Any) -> Array:
    parts = value if isinstance(value, list | tuple) else [value]
    return np.concatenate([np.frombuffer(np.ascontiguousarray(part).tobytes(), dtype=np.uint8) for part in parts])
