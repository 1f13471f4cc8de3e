# SPDX-License-Identifier: Apache-2.0
"""Sequences of control messages to one link, at either end, with and without a shared secret.

The link, its state machine, its answers and the handshake of the listening end are the real ones, and so are the caches
behind them; the connection is a list, and whatever would run in another thread runs at once. The first byte says which
end it is. Then records (`fuzz.records`): a message that arrives, or something that this end does.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import secrets
import struct
import typing
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any
from unittest import mock

import msgspec

from datadist_core import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from datadist_core import parts as parts_module
from datadist_core.errors import LLMException, PeerLost, ProtocolError
from datadist_core.link import authentication
from datadist_core.link.authentication import Authentication
from datadist_core.link.handshake import Handshake
from datadist_core.link.link import Link
from datadist_core.link.state import LinkState
from datadist_core.security import Security
from datadist_core.types import Deadline
from datadist_core.wire import messages as m
from datadist_core.wire.codec import MAX_MESSAGE_BYTES, PREAMBLE, FrameDecoder, decode_body, encode

from ..generate import mutated, value_of
from ..records import Record, join, split
from ..records import mutate as mutate_records

KINDS = typing.get_args(m.AnyMessage)
CLUSTER_ID, PEER_ID = 7, 9
_SECRET = Security(secret=b"a secret that is long enough")
_DIALLING, _WITH_SECRET = 1, 2
_RECEIVE = 128
"""Kinds of records from here on are messages that arrive; below, things that this end does."""
_LENGTH_BYTES = 4


class Broken(Exception):
    """A promise of the link was broken."""


class _AtOnce(Executor):
    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        function(*args, **kwargs)
        return Future()


class _Turns:
    def submit(self, key: object, work: Any) -> bool:
        work()
        return True


class _Channel:
    """As much of `wire.channel.Channel` as a link uses. `data_received` is what the connection does with bytes."""

    def __init__(self) -> None:
        self.peer_address = "fuzz"
        self.last_received_s = 0.0
        self.sent: list[Any] = []
        self.closed: LLMException | None = None
        self._decoder = FrameDecoder()
        self._decoder.feed(PREAMBLE)

    def attach(self, on_message: Any, on_closed: Any) -> None:
        self._on_message, self._on_closed = on_message, on_closed

    def send(self, message: Any) -> None:
        encode(message)
        self.sent.append(message)

    def close(self, reason: LLMException | None = None) -> None:
        self.closed = self.closed or reason or PeerLost("closed")

    def abort(self, reason: LLMException) -> None:
        self.close(reason)

    def allow(self, max_bytes: int) -> None:
        self._decoder.allow(max_bytes)

    def known(self) -> None:
        """Nobody counts."""

    def has_unread(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self.close(error)

    def end(self) -> None:
        self._on_closed(self.closed or PeerLost("the connection ended"))


class _NoErrors(logging.Handler):
    """`answers` tells the peer of an unexpected error and logs it: here it is a finding."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.levelno >= logging.ERROR:
            found.append(record.exc_info[1])


found: list[BaseException | None] = []
logging.getLogger("datadist_core.link.answers").addHandler(_NoErrors())


def _make_end() -> LLMDataDist:
    config = LLMConfig()
    config.transfer_backend = "loopback"  # the others would dial what a hostile identity names
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = '{"memory_size": 1048576, "page_shift": 10}'
    end = LLMDataDist(LLMRole.MIX, CLUSTER_ID)
    end.init(config)
    manager = end.cache_manager
    manager.allocate_blocks_cache(CacheDesc(2, (8, 64), DataType.DT_UINT8, Placement.HOST), BlocksCacheKey(CLUSTER_ID))
    manager.allocate_cache(CacheDesc(2, (2, 64), DataType.DT_FLOAT, Placement.HOST), [CacheKey(CLUSTER_ID, 1)])
    return end


def _make_parts() -> Any:
    """As nothing in them depends on chance, an input means the same in another process."""
    token = mock.patch.object(parts_module, "process_token", return_value=b"p" * 16)
    with token, mock.patch.object(secrets, "token_bytes", lambda num_bytes: b"r" * num_bytes):
        parts = _make_end()._open()
    parts.services.register("echo", lambda cluster_id, body: body)
    parts.server._drop_key = lambda key, cache_id: None  # the next input shall find it
    return parts


_parts = _make_parts()
_manager = _parts.links


def _real_messages() -> list[Any]:
    """Of an end with the same caches as this one: right in every detail, for mutation to get it almost right."""
    blocks, keyed = m.Lookup(1, "blocks", CLUSTER_ID), m.Lookup(1, "cache", CLUSTER_ID, req_id=1, prefix_id=2**64 - 1)
    infos = [_parts.server.lookup(query) for query in (blocks, keyed)]
    grids, item_bytes = infos[0].grids, infos[0].grids[0].item_bytes
    cache_id, address = infos[0].cache_id, _parts.table.by_id(infos[0].cache_id).cache.tensor_addrs[0]
    return [
        *(blocks, keyed, m.Lookup(1, "id", CLUSTER_ID, cache_id=cache_id)),
        *(m.Found(1, info) for info in infos),
        m.Located(1, [m.Place(cache_id, 0, 0), m.Place(cache_id, 1, 8)], infos),
        m.Locate(1, [address, address + 8]),
        m.AskChecksums(1, grids, struct.pack("<4q", 0, 1, 2, 7), [m.SumPart(0, item_bytes)], 2),
        m.Consume(1, infos[1].cache_id, 0, 1, 2**64 - 1),
        m.Revoke(1, cache_id),
        m.Call(1, "echo", b"body"),
        *(m.Reply(1, b"body"), m.Failure(1, 1, "no"), m.Checksums(1, b"s" * 16), m.Unlink(), m.Unlinked(), m.Ping(3)),
    ]


REAL = _real_messages()


def _on_unlink(link: Link) -> None:
    with suppress(LLMException):
        link.send(m.Unlinked())
    link.close(None)


_services = dataclasses.replace(
    _manager._services,
    executor=_AtOnce(),
    ending=_AtOnce(),
    revoking=_AtOnce(),
    on_unlink=_on_unlink,
    on_down=lambda link, error: None,
    turns=_Turns(),
)


class _World:
    """One link and its other end, which is the input."""

    def __init__(self, flags: int) -> None:
        self.dialling = bool(flags & _DIALLING)
        security = _SECRET if flags & _WITH_SECRET else Security()
        self.channel = _Channel()
        self.link = Link(1, self.channel, _services, dialling=self.dialling, with_secret=security.secret is not None)  # type: ignore[arg-type]
        self.link.established.set()
        self._challenge: m.Challenge | None = None
        old = _manager._handshake
        given = {**vars(old)}
        self._handshake = Handshake.__new__(Handshake)
        vars(self._handshake).update(given)
        self._handshake.authentication = Authentication(security, CLUSTER_ID, self._handshake.refuse)
        self._handshake._enter = lambda link, names, result: None  # type: ignore[method-assign]
        self.steps = [self.link.expect(kind) for kind in (m.Welcome, m.Refuse, m.Probed, m.Ready)]
        self.waiting: list[Future[Any]] = []
        if not self.dialling:
            self._handshake.authentication.await_proof(self.link)
            self.link.expect(m.Hello).add_done_callback(self._answer_hello)

    def _answer_hello(self, future: Future[Any]) -> None:
        if future.exception() is not None:
            return
        try:
            self._handshake.answer(self.link, future.result(), Deadline.after(0.001))
        except LLMException as error:
            if self.keep_going:
                return
            self._handshake.refuse(self.link, error)

    keep_going = False

    def happens(self, record: Record) -> None:
        if record.kind >= _RECEIVE:
            self._receive(record.body)
        else:
            with suppress(LLMException):
                _ACTIONS[record.kind % len(_ACTIONS)](self, record.body)
        if self.channel.closed is not None:
            self.channel.end()

    def _receive(self, body: bytes) -> None:
        with suppress(ProtocolError):
            message = decode_body(body)
            if isinstance(message, m.Challenge):
                self._challenge = message
        self.channel.data_received(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    # -- what this end, or a peer that knows the secret, may do

    def send(self, body: bytes) -> None:
        """Whatever the state allows."""
        self.link.send(decode_body(body))

    def ask(self, body: bytes) -> None:
        """A request that waits for its answer."""
        with self.link.lock:
            number = next(self.link._request_ids)
            future: Future[Any] = Future()
            self.link._pending[number] = future
        self.waiting.append(future)

    def is_proved(self, body: bytes) -> None:
        """The right proof of the other end arrives."""
        counter = next((x for x in reversed(self.channel.sent) if isinstance(x, m.CounterChallenge)), None)
        if self._challenge is None or counter is None:
            return
        said = authentication._said(self._challenge, counter)
        mac = _SECRET.prove(authentication._DIALLING, *said)
        self._receive(encode(m.Proof(mac))[_LENGTH_BYTES:])

    def goes_on(self, body: bytes) -> None:
        """A handshake that waits for Ready goes on waiting."""
        self.keep_going = True

    def allows_large(self, body: bytes) -> None:
        self.channel.allow(MAX_MESSAGE_BYTES)

    def check(self) -> None:
        """What holds at the end of every link."""
        if self.channel.closed is None:
            self.channel.end()
        if self.link.state is not LinkState.DOWN:
            raise Broken(f"the connection has ended, but the link is {self.link.state}")
        if not all(future.done() for future in self.waiting):
            raise Broken("somebody waits for a link that has ended")
        if found:
            error = found.pop()
            raise error if error is not None else Broken("an error without an exception")


_ACTIONS = (_World.send, _World.ask, _World.is_proved, _World.goes_on, _World.allows_large)


def run(data: bytes) -> None:
    found.clear()
    world = _World(data[0] if data else 0)
    for record in split(data[1:]):
        if world.channel.closed is not None:
            break
        world.happens(record)
    world.check()


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    flags = data[:1] or b"\x00"
    if seed % 16 == 1:
        flags = bytes([seed // 16 % 4])
    return flags + mutate_records(data[1:], max_size - 1, seed, _new, _change)


def _new(choice: random.Random) -> Record:
    what = choice.random()
    if what < 0.15:
        return Record(choice.randrange(1, len(_ACTIONS)), b"")
    real = choice.random() < 0.6
    message = choice.choice(REAL) if real else _likely(value_of(choice.choice(KINDS), choice), choice)
    body = encode(message)[_LENGTH_BYTES:]
    return Record(0 if what < 0.35 else _RECEIVE, mutated(body, choice) if choice.random() < 0.5 else body)


def _likely(message: Any, choice: random.Random) -> Any:
    """Ids that the other end would really use, most of the time."""
    usual = {
        "protocol_version": m.PROTOCOL_VERSION,
        "cluster_id": CLUSTER_ID if isinstance(message, m.Lookup) else PEER_ID,
        "expected_cluster_id": CLUSTER_ID,
        "v2": True,
        "nonce": b"n" * 32,
        "service": "echo",
        "request_id": 1,
    }
    known = {name: usual[name] for name in message.__struct_fields__ if name in usual and choice.random() < 0.8}
    return msgspec.structs.replace(message, **known)


def _change(record: Record, choice: random.Random) -> Record:
    if record.kind < _RECEIVE and choice.random() < 0.3:
        return Record(choice.randrange(len(_ACTIONS)), record.body)
    return Record(record.kind, mutated(record.body, choice))


def seeds() -> list[bytes]:
    return [
        bytes([flags]) + join([*_beginning(flags), *talk])
        for flags in range(4)
        for talk in (*(_traffic(number) for number in range(len(KINDS))), _talk())
    ]


def _beginning(flags: int) -> list[Record]:
    """A handshake that goes well."""
    beacon, offers = _manager._handshake._local.beacon, _manager._handshake._offers()
    common = {"protocol_version": m.PROTOCOL_VERSION, "offers": offers, "beacon": beacon, "v2": True}
    if flags & _DIALLING:
        hello, welcome = _message(m.Hello, **common), _message(m.Welcome, **common)
        plain = [_do(0, hello), _arrives(welcome), _arrives(m.Probed(["loopback"], {})), _do(0, m.Ready(["loopback"]))]
        proofs = [
            _do(0, _message(m.Challenge, nonce=b"n" * 32)),
            _arrives(m.CounterChallenge(b"c" * 32)),
            _do(0, m.Proof(b"p" * 32)),
            _arrives(m.Proof(b"p" * 32)),
        ]
        return [*(proofs if flags & _WITH_SECRET else []), *plain, _arrives(m.Established())]
    ids = {"cluster_id": PEER_ID, "expected_cluster_id": CLUSTER_ID}
    challenge = _message(m.Challenge, protocol_version=m.PROTOCOL_VERSION, nonce=b"n" * 32, **ids)
    proofs = [_arrives(challenge), Record(2, b"")] if flags & _WITH_SECRET else []
    hello = _message(m.Hello, link_token=b"t" * 16, **common, **ids)
    return [Record(3, b""), *proofs, _arrives(hello), _arrives(m.Ready(["loopback"])), _do(0, m.Established())]


def _traffic(number: int) -> list[Record]:
    """One message of the kind with that number, as a request, an answer, and something that this end sends."""
    message = _likely(value_of(KINDS[number], random.Random(number)), random.Random(1))
    return [Record(1, b""), _arrives(message), _do(0, message), _arrives(m.Unlink())]


def _talk() -> list[Record]:
    """All that is right in every detail, as a question, and as an answer to one."""
    return [record for message in REAL[:14] for record in (Record(1, b""), _arrives(message))]


def _message(kind: type, **known: Any) -> Any:
    made = value_of(kind, random.Random(3))
    return msgspec.structs.replace(made, **{name: v for name, v in known.items() if name in kind.__struct_fields__})


def _do(action: int, message: Any) -> Record:
    return Record(action, encode(message)[_LENGTH_BYTES:])


def _arrives(message: Any) -> Record:
    return Record(_RECEIVE, encode(message)[_LENGTH_BYTES:])
