# SPDX-License-Identifier: Apache-2.0
"""Inputs that are sequences: each record is something that happens, with a body.

    one byte: what happens    two bytes, little-endian: length of the body    the body

Any bytes are a sequence: what is cut off at the end is short. Mutation moves, repeats, drops and makes whole records,
so that valid messages in a wrong order are as likely as broken ones.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_HEAD = struct.Struct("<BH")
MAX_RECORDS = 48


@dataclass(frozen=True, slots=True)
class Record:
    kind: int
    body: bytes


def split(data: bytes) -> list[Record]:
    records, at = [], 0
    while at + _HEAD.size <= len(data) and len(records) < MAX_RECORDS:
        kind, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        records.append(Record(kind, data[at : at + size]))
        at += size
    return records


def join(records: Sequence[Record]) -> bytes:
    return b"".join(_HEAD.pack(r.kind, min(len(r.body), 65535)) + r.body[:65535] for r in records[:MAX_RECORDS])


def mutate(
    data: bytes,
    max_size: int,
    seed: int,
    new: Callable[[random.Random], Record],
    change: Callable[[Record, random.Random], Record],
) -> bytes:
    """A neighbour of `data`, at most `max_size` bytes long."""
    choice = random.Random(seed)
    records = split(data) or [new(choice)]
    for _ in range(choice.choice((1, 1, 2, 4))):
        # Mostly far back: what comes first is the way to there.
        at = max(choice.randrange(len(records)), choice.randrange(len(records)))
        what = choice.random()
        if what < 0.35:
            records[at] = change(records[at], choice)
        elif what < 0.65:
            records.insert(at if choice.random() < 0.3 else len(records), new(choice))
        elif what < 0.75:
            records.insert(choice.randrange(len(records) + 1), records[at])
        elif what < 0.85 and len(records) > 1:
            del records[at]
        else:
            other = choice.randrange(len(records))
            records[at], records[other] = records[other], records[at]
    result = join(records)
    return result if len(result) <= max_size else data[:max_size]
