# SPDX-License-Identifier: Apache-2.0
"""A decoder with a mistake, for tests of the runner: it believes a length that it reads."""

from __future__ import annotations


def run(data: bytes) -> None:
    if data[:1] == b"D" and data[1:2] == b"T" and len(data) > 3:
        count = data[2]
        if count > 200:
            _ = data[3 + count]  # IndexError if it is not that long


def seeds() -> list[bytes]:
    return [b"DT\x02ab", b"something else"]
