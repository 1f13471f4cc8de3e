# SPDX-License-Identifier: Apache-2.0
"""Frames of the tcp backend: a header and a body, then the next."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import msgspec
import numpy as np

from datadist_core.backends import _tcp_frames as frames
from datadist_core.backends._tcp_address import Identity, decode_identity
from datadist_core.errors import ProtocolError

from ..generate import mutated, value_of

_STRUCTS = {
    name: kind
    for name, kind in vars(frames).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
}


def run(data: bytes) -> None:
    """The first byte 0: an identity; otherwise frames."""
    with suppress(ProtocolError):
        if data[:1] == b"\x00":
            decode_identity(data[1:])
            return
        for frame in frames.decode_frames(data[1:]):
            if isinstance(frame.message, frames.Wanted):
                _check(frame.message)


def _check(wanted: frames.Wanted) -> None:
    """The limits that the serving end relies on."""
    counts = len(wanted.grids), len(wanted.items), len(wanted.slices)
    limits = frames.MAX_PAIRS, frames.MAX_ITEMS, frames.MAX_SLICES
    if not all(1 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
        raise AssertionError(f"{counts} grids, items and slices passed the limits {limits}")
    if wanted.items.dtype != np.int64:
        raise AssertionError(f"items of type {wanted.items.dtype}")


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """The body of the first frame changed as MessagePack, with a header that fits."""
    choice = random.Random(seed)
    head = data[: 1 + frames.HEADER_BYTES].ljust(1 + frames.HEADER_BYTES, b"\x00")
    if head[:1] == b"\x00":
        return (b"\x00" + mutated(data[1:], choice))[:max_size]
    body = mutated(data[len(head) :], choice) if choice.random() < 0.7 else _new_body(choice)
    kind = choice.choice(list(frames.Kind)) if choice.random() < 0.2 else frames.Kind(_kind_of(head))
    return (head[:1] + frames.encode_header(kind, 1, len(body)) + body)[:max_size]


def _kind_of(head: bytes) -> int:
    kind = head[4]
    return kind if kind in [int(k) for k in frames.Kind] else int(frames.Kind.READ)


def _new_body(choice: random.Random) -> bytes:
    return msgspec.msgpack.encode(value_of(choice.choice(list(_STRUCTS.values())), choice))


def seeds() -> list[bytes]:
    made = [b"\x01" + frames.encode_frame(kind) for kind in frames.Kind]
    for kind in frames.Kind:
        for number, struct_kind in enumerate(_STRUCTS.values()):
            body = msgspec.msgpack.encode(value_of(struct_kind, random.Random(number)))
            made.append(b"\x01" + frames.encode_frame(kind, 1, body))
    numbers = struct.pack("<5q", 1, 0, 64, 64, 8)
    for items, wide in ((struct.pack("<2I", 0, 1), False), (struct.pack("<2q", 0, 1), True)):
        request = msgspec.msgpack.encode([numbers, struct.pack("<2q", 0, 64), items, wide])
        made += [b"\x01" + frames.encode_frame(kind, 7, request) for kind in (frames.Kind.READ, frames.Kind.WRITE)]
    made += [b"\x00" + msgspec.msgpack.encode(value_of(Identity, random.Random(number))) for number in range(4)]
    return made
