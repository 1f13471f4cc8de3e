# SPDX-License-Identifier: Apache-2.0
"""What users write: option strings, addresses, rank tables, `kv_connector_extra_config`. The first byte says which.

Files that options name are not opened: `security` is given a reader that knows none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

from datadist_core import security, settings
from datadist_core.backends import _hixl_options, _mooncake_options, _nixl_options, _tcp_options, shm
from datadist_core.checks import HostPort
from datadist_core.config import LLMConfig
from datadist_core.errors import LLMException, ParamInvalid
from datadist_core.link.rank_table import CommunicatorPlan
from datadist_core.settings import Settings
from vllm_datadist.config import ConfigError, ConnectorConfig

from .tickets import _changed, with_depth

KEYS = tuple(sorted(settings._KNOWN_KEYS))
_REFUSED = (LLMException, TypeError, ValueError, ConfigError)


def _no_file(path: str, where: str) -> bytes:
    if path == "secret":
        return b"a secret that is long enough"
    raise ParamInvalid(f"{where} cannot be read here")


def _settings(data: bytes) -> None:
    """Keys and values take turns, one a line; a key may be given by its number."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    options = {_key(key): value for key, value in zip(lines[::2], lines[1::2], strict=False)}
    with suppress(LLMException):
        Settings.from_options(options)


def _key(text: str) -> str:
    return KEYS[int(text) % len(KEYS)] if text.isascii() and text.isdigit() and len(text) < 4 else text


def _address(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with suppress(LLMException):
        parsed = HostPort.parse(text)
        if HostPort.parse(str(parsed)) != parsed:
            raise AssertionError(f"{parsed!r} is not what it is written as")


def _rank_table(data: bytes) -> None:
    with suppress(LLMException):
        CommunicatorPlan.parse("name", {1: 0, 2: 1}, data.decode("utf-8", "surrogateescape"), 1)


def _extra_config(data: bytes) -> None:
    with suppress(LLMException, ConfigError):
        ConnectorConfig.from_extra_config(_object(data))


def _backend(parse: Callable[[dict[str, Any]], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with suppress(LLMException):
            parse(_object(data))

    return run


def _properties(data: bytes) -> None:
    """Setters may refuse with TypeError and ValueError as well; what they accept makes options that can be parsed."""
    config = LLMConfig()
    for name, value in _object(data).items():
        if isinstance(getattr(LLMConfig, name, None), property):
            with suppress(*_REFUSED):
                setattr(config, name, value)
    with suppress(LLMException):
        Settings.from_options(config.generate_options())


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


WAYS: list[Callable[[bytes], None]] = [
    _settings,
    _address,
    _rank_table,
    _extra_config,
    _properties,
    *(_backend(module.parse_options) for module in (_tcp_options, _nixl_options, _mooncake_options, _hixl_options)),
    _backend(shm._copy_threads),
]
_NUM_TEXTS = 2


def run(data: bytes) -> None:
    if data:
        with mock.patch.object(security, "_read_private", _no_file):
            WAYS[data[0] % len(WAYS)](data[1:])


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    choice = random.Random(seed)
    number = (data[0] if data else 0) % len(WAYS)
    return (bytes([number]) + (_lines if number < _NUM_TEXTS else _json)(data[1:], choice))[:max_size]


def _lines(body: bytes, choice: random.Random) -> bytes:
    """One value becomes another that some option takes."""
    lines = body.split(b"\n")
    at = choice.randrange(len(lines))
    lines[at] = choice.choice((*_TEXTS, *(str(choice.randrange(len(KEYS))).encode() for _ in range(4)), lines[at] * 2))
    return b"\n".join(lines)


def _json(body: bytes, choice: random.Random) -> bytes:
    try:
        return with_depth(json.dumps(_changed(json.loads(body), choice)).encode())
    except (ValueError, RecursionError):
        return body


_TEXTS = (
    b"", b"0", b"1", b"-1", b"18446744073709551616", b"nan", b"1e999", b"{}", b"[]", b'{"memory_size": 1}', b"auto",
    b'{"memory_size": 1048576, "page_shift": 31}', b"shm,tcp", b"[::1]:1", b"127.0.0.1:0", b'{"tls": {}}', b"checksum",
    b'{"secret_file": "secret"}', b'{"secret_env": "PATH"}', b'{"limits": {"strangers": 0}}', b"\xc2\xb2", b"\xff",
    b"[" * 1500, b'{"a":' * 1200,
)  # fmt: skip


def seeds() -> list[bytes]:
    made = [b"\x00" + f"{number}\n".encode() + text for number in range(len(KEYS)) for text in _TEXTS[:8]]
    made += [b"\x01" + text for text in (b"10.0.0.1:26000", b"[::1]:0", b"::1:5", b"name:65535", b"*:1")]
    table = {"server_list": [{"device": [{"device_id": "0", "device_ip": "10.0.0.1", "rank_id": n} for n in (0, 1)]}]}
    made.append(b"\x02" + json.dumps(table).encode())
    extra = {"host": "", "port": 0, "lease_s": 30, "transfer_backend": "tcp", "integrity": "off", "security": {}}
    made.append(b"\x03" + json.dumps(extra).encode())
    properties = {name: 1 for name, value in vars(LLMConfig).items() if isinstance(value, property)}
    made += [b"\x04" + json.dumps(properties).encode(), b"\x04" + json.dumps(dict.fromkeys(properties, "1")).encode()]
    for number in range(5, len(WAYS)):
        named = {"port": 0, "streams": 1, "copy_threads": 1, "plugin": "UCX", "protocol": "tcp", "options": {}}
        made += [bytes([number]) + json.dumps({name: value}).encode() for name, value in named.items()]
    return made
