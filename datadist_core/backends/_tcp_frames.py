# SPDX-License-Identifier: Apache-2.0
"""What travels on a connection of the tcp backend: frames, their limits, and the messages in them. Sans-IO.

Every frame is a header of 16 bytes (magic, version, kind, body length, request id) and a body. Whoever starts a
batch is its requester; the other end serves it. Request ids are the requester's; both ends of a connection make
requests, and which of the two an id belongs to follows from the kind.

    READ   requester: READ           server: PULLED* (all bytes of the batch, cut anywhere), or END (refused)
    WRITE  requester: WRITE          server: GRANT (send it), or END (refused)
           requester: PUSHED*        server: END (status 0: the bytes are in place)
    CANCEL requester, at any time    server: END, unless the request was over before

The requester sends nothing more for a request after its CANCEL; the server sends nothing more after its END or
after the last byte of a READ. A WRITE waits for a GRANT, so that a refused one has nothing to drain and one whose
memory is not available yet does not hold up what comes behind it.

A connection begins with a proof of both ends that they know the link's token, which itself is never sent (what is
proved, and how, says `_tcp_proof`):

    HELLO    dialling end: which listener it means, its nonce, which stream of how many this is
    HEARD    accepting end: you have reached it; its nonce
    PROOF    dialling end: its proof
    WELCOME  accepting end: its proof; the link is up here

Only then other frames may follow.

`decode_frames` is the whole of what is decoded here, without a connection: for tests and fuzzing.

Ids, items and slices travel as raw little-endian integers: items, of which there may be a million, become NumPy
arrays without a Python object each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec
import numpy as np

from ..errors import CacheNotExist, LLMException, ParamInvalid, ProtocolError, RemoteError
from ..memory.grid import Grid
from ..transfer.plan import Batch, Items, Op, merge_parts
from ..types import LLMStatusCode

MAGIC = b"DT"
VERSION = 3
HEADER_BYTES = 16

MAX_PAIRS = 4096
MAX_SLICES = 4096
MAX_ITEMS = 1 << 20
MAX_RANGES_PER_PAIR = 1 << 22
MAX_DATA_BYTES = 16 << 20
MAX_OPEN_REQUESTS = 64
"""Requests of one end that may be open on one connection; the requester keeps the rest back."""

TOKEN_BYTES = 16
NONCE_BYTES = 16
PROOF_BYTES = 32
INSTANCE_BYTES = 16
MAX_STREAMS = 16

_HEADER = struct.Struct("!2sBBIQ")
_MAX_TEXT = 1000
_GRID_FIELDS = 5
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<i8")

T = TypeVar("T")


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    READ = 3
    WRITE = 4
    GRANT = 5
    PULLED = 6
    PUSHED = 7
    END = 8
    CANCEL = 9
    HEARD = 10
    PROOF = 11


_MAX_BODY_BYTES = {
    Kind.HELLO: 128,
    Kind.WELCOME: 64,
    Kind.READ: 8 * (MAX_ITEMS + _GRID_FIELDS * MAX_PAIRS + 2 * MAX_SLICES) + 64,
    Kind.WRITE: 8 * (MAX_ITEMS + _GRID_FIELDS * MAX_PAIRS + 2 * MAX_SLICES) + 64,
    Kind.GRANT: 0,
    Kind.PULLED: MAX_DATA_BYTES,
    Kind.PUSHED: MAX_DATA_BYTES,
    Kind.END: 4 * _MAX_TEXT + 64,
    Kind.CANCEL: 0,
    Kind.HEARD: 64,
    Kind.PROOF: 64,
}


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    body_bytes: int
    request_id: int


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the end that dialled: which listener it means, a nonce, which stream of the link this is."""

    instance: bytes
    nonce: bytes
    stream: int
    num_streams: int


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """The accepting end's nonce."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """Body of PROOF and of WELCOME."""

    proof: bytes


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a request ended. `status` is an LLMStatusCode."""

    status: int
    text: str = ""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """Body of READ and WRITE, all int64: per grid its id, offset, stride, item size and number of items in `grids`,
    (offset, size) pairs in `slices`; `items` are uint32, or int64 if `wide`."""

    grids: bytes
    slices: bytes
    items: bytes
    wide: bool


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A decoded request. Well formed, but not yet checked against any grid.

    Attributes:
        op: what the requester does.
        grids: as the requester divides them; the region is the server's to know.
        slices: (offset, num_bytes) within an item of the server's grids.
    """

    request_id: int
    op: Op
    grids: tuple[Grid, ...]
    items: Items
    slices: tuple[tuple[int, int], ...]


def encode_header(kind: Kind, request_id: int, body_bytes: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, kind, body_bytes, request_id)


def encode_frame(kind: Kind, request_id: int = 0, body: bytes = b"") -> bytes:
    return encode_header(kind, request_id, len(body)) + body


def decode_header(data: bytes | bytearray) -> Header:
    """Raises ProtocolError for what is no header of ours, or announces more than its kind may have."""
    magic, version, number, body_bytes, request_id = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"expected a frame of the tcp backend, got bytes {bytes(data[:4])!r}")
    if version != VERSION:
        raise ProtocolError(f"the peer's tcp backend speaks protocol version {version}, this one {VERSION}")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"unknown frame kind {number}")
    if body_bytes > _MAX_BODY_BYTES[kind]:
        raise ProtocolError(f"a {kind.name} frame of {body_bytes} bytes exceeds the limit {_MAX_BODY_BYTES[kind]}")
    return Header(kind, body_bytes, request_id)


def encode_hello(hello: Hello) -> bytes:
    return encode_frame(Kind.HELLO, 0, msgspec.msgpack.encode(hello))


def decode_hello(body: bytes | bytearray) -> Hello:
    hello = _decode(body, Hello)
    if len(hello.nonce) != NONCE_BYTES or len(hello.instance) != INSTANCE_BYTES:
        raise ProtocolError("HELLO has a nonce or instance of the wrong size")
    if not 1 <= hello.num_streams <= MAX_STREAMS or not 0 <= hello.stream < hello.num_streams:
        raise ProtocolError(f"HELLO for stream {hello.stream} of {hello.num_streams}; at most {MAX_STREAMS}")
    return hello


def encode_heard(nonce: bytes) -> bytes:
    return encode_frame(Kind.HEARD, 0, msgspec.msgpack.encode(Heard(nonce)))


def decode_heard(body: bytes | bytearray) -> bytes:
    """The nonce."""
    heard = _decode(body, Heard)
    if len(heard.nonce) != NONCE_BYTES:
        raise ProtocolError("HEARD has a nonce of the wrong size")
    return heard.nonce


def encode_proof(kind: Kind, proof: bytes) -> bytes:
    """PROOF or WELCOME."""
    return encode_frame(kind, 0, msgspec.msgpack.encode(Proof(proof)))


def decode_proof(body: bytes | bytearray) -> bytes:
    """The proof in PROOF or WELCOME; whether it is right, `_tcp_proof` says."""
    message = _decode(body, Proof)
    if len(message.proof) != PROOF_BYTES:
        raise ProtocolError("a proof has the wrong size")
    return message.proof


def encode_end(request_id: int, error: LLMException | None = None) -> bytes:
    end = End(LLMStatusCode.LLM_SUCCESS) if error is None else End(error.status_code, str(error)[:_MAX_TEXT])
    return encode_frame(Kind.END, request_id, msgspec.msgpack.encode(end))


def decode_end(body: bytes | bytearray) -> LLMException | None:
    """The error that a request ended with at the server, as one of our own exceptions; None for success."""
    end = _decode(body, End)
    if end.status == LLMStatusCode.LLM_SUCCESS:
        return None
    if end.status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
        return CacheNotExist(end.text)
    if end.status == LLMStatusCode.LLM_PARAM_INVALID:
        return ParamInvalid(end.text)
    return RemoteError(f"the peer could not serve the transfer (status {end.status}): {end.text}")


def encode_request(batch: Batch) -> bytes:
    """The body of READ or WRITE for a checked batch. Raises ParamInvalid if it exceeds what a request can hold."""
    parts = merge_parts([(s.remote_offset, s.num_bytes) for s in batch.slices])
    _check_limits(len(batch.pairs), len(batch.remote_items), len(parts), ParamInvalid)
    slices = [number for part in parts for number in part]
    wide = int(batch.remote_items.max()) > 0xFFFFFFFF
    items = batch.remote_items.astype(_WIDE if wide else _NARROW)
    grids = [number for pair in batch.pairs for number in (pair.remote.grid_id, *pair.remote.division)]
    return msgspec.msgpack.encode(_Request(_packed(grids), _packed(slices), items.tobytes(), wide))


def decode_request(header: Header, body: bytes | bytearray) -> Wanted:
    """Raises ProtocolError unless it is well formed and within all limits."""
    request = _decode(body, _Request)
    grids, slices = _unpacked(request.grids), _unpacked(request.slices)
    items = _integers(request.items, _WIDE if request.wide else _NARROW)
    if len(slices) % 2:
        raise ProtocolError("slices do not come in pairs of offset and size")
    if len(grids) % _GRID_FIELDS:
        raise ProtocolError(f"grids do not come as {_GRID_FIELDS} integers each")
    _check_limits(len(grids) // _GRID_FIELDS, len(items), len(slices) // 2, ProtocolError)
    return Wanted(
        header.request_id,
        Op.READ if header.kind is Kind.READ else Op.WRITE,
        tuple(_grid(*grids[i : i + _GRID_FIELDS]) for i in range(0, len(grids), _GRID_FIELDS)),
        items,
        tuple(zip(slices[::2], slices[1::2], strict=True)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame with what its body says; `message` is None for kinds without a body, and for bare data."""

    header: Header
    message: Hello | bytes | Wanted | LLMException | None = None


def decode_frames(data: bytes) -> Iterator[Frame]:
    """All whole frames in `data`, one behind the other, decoded as the receiving end of a connection does.

    The entry point for fuzzing: whatever `data` is, this yields frames, and may raise ProtocolError, and nothing
    else. It keeps no state, opens nothing, and uses memory in proportion to `data`. What a kind may hold, and whether
    it may come at that moment, is apart: `_tcp_link` and `_tcp_accept` decide on the latter.
    """
    at = 0
    while len(data) - at >= HEADER_BYTES:
        header = decode_header(data[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        body = data[at : at + header.body_bytes]
        if len(body) < header.body_bytes:
            return
        at += header.body_bytes
        yield Frame(header, _decode_body(header, body))


def _decode_body(header: Header, body: bytes) -> Hello | bytes | Wanted | LLMException | None:
    if header.kind is Kind.HELLO:
        return decode_hello(body)
    if header.kind is Kind.HEARD:
        return decode_heard(body)
    if header.kind in (Kind.PROOF, Kind.WELCOME):
        return decode_proof(body)
    if header.kind in (Kind.READ, Kind.WRITE):
        return decode_request(header, body)
    return decode_end(body) if header.kind is Kind.END else None


def _grid(grid_id: int, offset_bytes: int, stride_bytes: int, item_bytes: int, num_items: int) -> Grid:
    return Grid(grid_id, 0, offset_bytes, stride_bytes, item_bytes, num_items)


def _check_limits(num_pairs: int, num_items: int, num_slices: int, blame: type[LLMException]) -> None:
    if (
        1 <= num_pairs <= MAX_PAIRS
        and 1 <= num_slices <= MAX_SLICES
        and 1 <= num_items <= MAX_ITEMS
        and num_items * num_slices <= MAX_RANGES_PER_PAIR
    ):
        return
    for name, number, limit in (
        ("grids", num_pairs, MAX_PAIRS),
        ("blocks", num_items, MAX_ITEMS),
        ("slices", num_slices, MAX_SLICES),
        ("blocks times slices", num_items * num_slices, MAX_RANGES_PER_PAIR),
    ):
        if not 1 <= number <= limit:
            raise blame(f"a tcp transfer of {number} {name} is not possible: 1..{limit}; use several transfers")


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _unpacked(data: bytes) -> tuple[int, ...]:
    if len(data) % _WIDE.itemsize:
        raise ProtocolError(f"{len(data)} bytes are no array of {_WIDE.itemsize}-byte integers")
    return struct.unpack(f"<{len(data) // _WIDE.itemsize}q", data)


def _integers(data: bytes, kind: np.dtype[np.signedinteger | np.unsignedinteger]) -> Items:
    if len(data) % kind.itemsize:
        raise ProtocolError(f"{len(data)} bytes are no array of {kind.itemsize}-byte integers")
    return np.frombuffer(data, dtype=kind).astype(np.int64)


def _decode(body: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"malformed {kind.__name__} from the peer: {error}") from error
