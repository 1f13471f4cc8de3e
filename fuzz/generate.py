# SPDX-License-Identifier: Apache-2.0
"""Values of msgspec types, by introspection: of any message there is now or will be."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
from msgspec import inspect

INTEGERS = (0, 1, 2, 3, 7, 8, 16, 63, 64, 127, 128, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
LARGE = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63))
TEXTS = (
    "",
    "a",
    "tcp",
    "shm",
    "loopback",
    "blocks",
    "cache",
    "id",
    "DT_FLOAT",
    "DT_UINT8",
    "datadist.renew",
    "\x00",
    "é" * 9,
)
#: Stands for a value nested deeper than any recursion goes.
DEEP = "\x01deep\x01"
_DEEP_BYTES = msgspec.msgpack.encode(DEEP)
_DEPTH = 1500
SIZES = (0, 1, 8, 16, 32, 40, 64, 65, 300)


def value_of(kind: object, choice: random.Random) -> Any:
    """A random value that encodes as this type. `kind`: a type, or what `msgspec.inspect` says of one."""
    info = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    return _MAKERS[type(info)](info, choice)


def _struct(info: inspect.StructType, choice: random.Random) -> Any:
    given = {one.name: value_of(one.type, choice) for one in info.fields if one.required or choice.random() < 0.7}
    return info.cls(**given)


def _integer(info: inspect.IntType, choice: random.Random) -> int:
    return choice.choice(INTEGERS if choice.random() < 0.8 else LARGE)


def _bytes(info: inspect.BytesType, choice: random.Random) -> bytes:
    if choice.random() < 0.3:  # arrays of int64 travel as bytes
        return struct.pack("<4q", *(choice.choice(INTEGERS) for _ in range(4)))
    return choice.randbytes(choice.choice(SIZES))


def _list(info: inspect.ListType, choice: random.Random) -> list[Any]:
    return [value_of(info.item_type, choice) for _ in range(choice.choice((0, 1, 1, 1, 2, 3)))]


def _dict(info: inspect.DictType, choice: random.Random) -> dict[Any, Any]:
    keys = [value_of(info.key_type, choice) for _ in range(choice.choice((0, 1, 2)))]
    return {key: value_of(info.value_type, choice) for key in keys}


_MAKERS: dict[type, Any] = {
    inspect.StructType: _struct,
    inspect.IntType: _integer,
    inspect.BytesType: _bytes,
    inspect.ListType: _list,
    inspect.DictType: _dict,
    inspect.BoolType: lambda info, choice: choice.random() < 0.5,
    inspect.StrType: lambda info, choice: choice.choice(TEXTS),
    inspect.FloatType: lambda info, choice: choice.choice((0.0, 1.0, 4.0, -1.0, 1e308, float("inf"), float("nan"))),
    inspect.NoneType: lambda info, choice: None,
    inspect.EnumType: lambda info, choice: choice.choice(list(info.cls)),
    inspect.UnionType: lambda info, choice: value_of(choice.choice(info.types), choice),
    inspect.AnyType: lambda info, choice: choice.choice((None, 1, "a", [], {})),
    inspect.TupleType: lambda info, choice: tuple(value_of(one, choice) for one in info.item_types),
    inspect.VarTupleType: lambda info, choice: tuple(_list(info, choice)),
}


def mutated(body: bytes, choice: random.Random) -> bytes:
    """MessagePack with one value in it changed, or the body itself if it is none."""
    try:
        tree = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    try:
        encoded = msgspec.msgpack.encode(_changed(tree, choice))
        return encoded.replace(_DEEP_BYTES, choice.choice((b"\x91", b"\x81\xa0")) * _DEPTH + b"\xc0")
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError, RecursionError):
        return body


def _changed(tree: Any, choice: random.Random) -> Any:
    if isinstance(tree, dict) and tree and choice.random() < 0.9:
        key = choice.choice(list(tree))
        if choice.random() < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        if choice.random() < 0.05:
            return {**tree, "unknown": DEEP if choice.random() < 0.5 else [1, {}]}
        return {**tree, key: _changed(tree[key], choice)}
    if isinstance(tree, list) and tree and choice.random() < 0.9:
        at = choice.randrange(len(tree))
        if choice.random() < 0.2:
            longer = [*tree, DEEP if choice.random() < 0.2 else tree[at]]
            return [*tree[:at], *tree[at + 1 :]] if choice.random() < 0.5 else longer
        return [*tree[:at], _changed(tree[at], choice), *tree[at + 1 :]]
    return _other(tree, choice)


def _other(value: Any, choice: random.Random) -> Any:
    if choice.random() < 0.1:
        return choice.choice((None, True, -1, 2**64 - 1, 1.5, "", b"", [], {}, [[]], {"": 0}, DEEP))
    if isinstance(value, int):
        return choice.choice((*INTEGERS, *LARGE, value ^ 1, value - 1 if value > -(2**63) else 0))
    if isinstance(value, bytes):
        return _bytes(inspect.BytesType(), choice)
    if isinstance(value, str):
        return choice.choice((*TEXTS, value + value))
    return choice.choice((0, "", b"", [], {}, None))
