# SPDX-License-Identifier: Apache-2.0
"""Bytes, cut anywhere, to the framing and decoding of control messages. The first byte says how they are cut."""

from __future__ import annotations

import random
import typing

from datadist_core.errors import ProtocolError
from datadist_core.wire import messages as m
from datadist_core.wire.codec import MAX_MESSAGE_BYTES, PREAMBLE, FrameDecoder, decode_body, encode

from ..generate import value_of

KINDS = typing.get_args(m.AnyMessage)
_LENGTH_BYTES = 4


def run(data: bytes) -> None:
    step = data[0] + 1 if data else 1
    decoder, seen = FrameDecoder(), []
    try:
        for at in range(1, len(data), step):
            seen += decoder.feed(data[at : at + step])
            if seen:
                decoder.allow(MAX_MESSAGE_BYTES)
    except ProtocolError:
        return
    for message in seen:
        body = encode(message)[_LENGTH_BYTES:]
        if decode_body(body) != message and "nan" not in repr(message):
            raise AssertionError(f"{message} is not what it is encoded to")


def seeds() -> list[bytes]:
    made = [b"\xff" + PREAMBLE, b"\x00DDIST\x00\xff\xff", b"\xffGET / HTTP/1.1\r\n\r\n", b"\x02\x16\x03\x01"]
    for number, kind in enumerate(KINDS):
        for _ in range(2):
            frame = encode(value_of(kind, random.Random(number)))
            made.append(b"\xff" + PREAMBLE + frame)
    return made
