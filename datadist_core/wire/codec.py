# SPDX-License-Identifier: Apache-2.0
"""Sans-IO framing of control messages: bytes in, messages out, and back.

A connection starts with 8 bytes, `MAGIC` + protocol version, so that a stranger or another version is named as
such instead of being misread. Then frames: a 4-byte little-endian length, and that many bytes of MessagePack.
"""

from __future__ import annotations

import struct

import msgspec

from ..errors import ProtocolError
from .messages import PROTOCOL_VERSION, AnyMessage

MAGIC = b"DDIST\x00"
PREAMBLE = MAGIC + struct.pack("<H", PROTOCOL_VERSION)
#: A control message is small; a cache with thousands of tensors still fits.
MAX_MESSAGE_BYTES = 16 << 20
#: Before the peer has said a valid hello it may not make us buffer much; one with all backends has about 2 KiB.
MAX_HELLO_BYTES = 64 << 10
#: Still less before it has proved that it knows the shared secret. A hello without proof fits: it is told why not.
MAX_PROOF_BYTES = 16 << 10

_LENGTH = struct.Struct("<I")
_BOTH_ENDS = "it must be on at both ends, or at neither (llm.Security)"
#: How TLS begins (a greeting), and how it says no (an alert), to who does not expect it.
_TLS = {
    b"\x16\x03": f"the peer speaks TLS, which is off at this end; {_BOTH_ENDS}",
    b"\x15\x03": f"the peer asks for TLS, which is off at this end; {_BOTH_ENDS}",
}
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One frame. Raises ProtocolError for a message over the limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Feed it what arrives; it returns the complete messages. Raises ProtocolError once, then stays unusable."""

    def __init__(self, max_bytes: int = MAX_HELLO_BYTES) -> None:
        self._buffer = bytearray()
        self._preamble_seen = False
        self._max_bytes = max_bytes

    def allow(self, max_bytes: int) -> None:
        """The peer is better known now: this is the limit of later messages."""
        self._max_bytes = max_bytes

    @property
    def has_begun(self) -> bool:
        """Whether the peer has said that it speaks this protocol."""
        return self._preamble_seen

    def feed(self, data: bytes) -> list[AnyMessage]:
        self._buffer += data
        if not self._preamble_seen and not self._take_preamble():
            return []
        messages: list[AnyMessage] = []
        while (message := self._take_message()) is not None:
            messages.append(message)
        return messages

    def _take_preamble(self) -> bool:
        head = bytes(self._buffer[: len(PREAMBLE)])
        if head[:2] in _TLS:
            raise ProtocolError(_TLS[head[:2]])
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise ProtocolError("the peer does not speak the datadist control protocol (wrong port?)")
        if len(head) < len(PREAMBLE):
            return False
        (version,) = struct.unpack("<H", head[len(MAGIC) :])
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {version} at the peer, {PROTOCOL_VERSION} here; use one release on both"
            )
        del self._buffer[: len(PREAMBLE)]
        self._preamble_seen = True
        return True

    def _take_message(self) -> AnyMessage | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > self._max_bytes:
            raise ProtocolError(f"control message of {size} bytes; the limit is {self._max_bytes}")
        if len(self._buffer) < _LENGTH.size + size:
            return None
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        return decode_body(body)


def decode_body(body: bytes) -> AnyMessage:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed control message: {error}") from error
