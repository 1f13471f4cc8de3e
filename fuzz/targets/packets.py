# SPDX-License-Identifier: Apache-2.0
"""Small things of MessagePack that peers send: the first byte says what it is taken for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from datadist_core.backends import _cma_identity, _hixl_identity, _mooncake_identity, _shm_protocol, cma, shm
from datadist_core.backends._attached import decode_descriptor_as, decode_identity_as
from datadist_core.errors import ProtocolError, Unreachable
from datadist_core.link import joining
from datadist_core.link.rank_table import CommunicatorPlan

from ..generate import mutated, value_of

_SIZE_BYTES = 4096
_TABLE = {"server_list": [{"device": [{"device_id": n, "device_ip": "10.0.0.1", "rank_id": n} for n in (0, 1)]}]}
_PLAN = CommunicatorPlan.parse("name", {1: 0, 2: 1}, json.dumps(_TABLE), 1)


@dataclass(frozen=True, slots=True)
class _Way:
    kind: type
    decode: Callable[[bytes], object]


def _structs_of(module: object) -> list[type]:
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return [kind for kind in found if kind is not msgspec.Struct]


def _as_identity(kind: type) -> _Way:
    return _Way(kind, lambda data: decode_identity_as(kind, data, "any"))


def _as_descriptor(kind: type) -> _Way:
    return _Way(kind, lambda data: decode_descriptor_as(kind, data, 1, _SIZE_BYTES))


def _as_join(kind: type) -> _Way:
    return _Way(kind, lambda data: _joined(joining.decode(data, kind)))


def _joined(message: object) -> None:
    if isinstance(message, joining.Join):
        joining.difference(_PLAN, 2, message)


_DESCRIBED = [kind for module in (shm, cma) for kind in _structs_of(module)]
WAYS = [
    _Way(_cma_identity.Identity, _cma_identity.decode_identity),
    _Way(_mooncake_identity.Identity, lambda data: _mooncake_identity.decode_identity(data, "tcp")),
    _Way(_hixl_identity.Identity, _hixl_identity.decode_identity),
    _Way(_hixl_identity.Descriptor, lambda data: _hixl_identity.decode_descriptor(data, 1, _SIZE_BYTES)),
    *(_Way(kind, _shm_protocol.decode) for kind in _structs_of(_shm_protocol)),
    *(_as_descriptor(kind) if "size_bytes" in kind.__struct_fields__ else _as_identity(kind) for kind in _DESCRIBED),
    *(_as_join(kind) for kind in _structs_of(joining)),
]


def run(data: bytes) -> None:
    if not data:
        return
    try:
        WAYS[data[0] % len(WAYS)].decode(data[1:])
    except (ProtocolError, Unreachable):
        return


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    choice = random.Random(seed)
    if not data or choice.random() < 0.1:
        return _new(choice.randrange(len(WAYS)), choice)[:max_size]
    return (data[:1] + mutated(data[1:], choice))[:max_size]


def _new(number: int, choice: random.Random) -> bytes:
    return bytes([number]) + msgspec.msgpack.encode(value_of(WAYS[number].kind, choice))


def seeds() -> list[bytes]:
    return [_new(number, random.Random(n)) for number in range(len(WAYS)) for n in range(2)]
