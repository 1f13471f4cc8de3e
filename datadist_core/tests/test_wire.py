# SPDX-License-Identifier: Apache-2.0
"""Framing, limits, hostile bytes, and the table of a link's states."""

from __future__ import annotations

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datadist_core.errors import ProtocolError
from datadist_core.link.state import LinkMachine, LinkState
from datadist_core.wire import messages as m
from datadist_core.wire.codec import MAGIC, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, PREAMBLE, FrameDecoder, encode

GRID = m.GridInfo(1, 2, 0, 64, 64, 1)
BEACON = m.Beacon(GRID, m.RegionInfo(2, 4096, {"tcp": b""}), b"x" * 64)
HELLO = m.Hello(1, "test", 1, 2, b"i" * 16, 3, True, b"t" * 16, [m.BackendOffer("tcp", b"id")], BEACON, 1.0)
SOME = [HELLO, m.Ping(3), m.Call(1, "s", b"body"), m.Failure(2, 3, "text"), m.Revoke(1, 2**63), m.Unlink()]


@given(st.lists(st.sampled_from(SOME), max_size=8), st.integers(1, 7))
def test_messages_survive_any_fragmentation(messages, step):
    stream = PREAMBLE + b"".join(encode(one) for one in messages)
    decoder = FrameDecoder()
    got = [one for i in range(0, len(stream), step) for one in decoder.feed(stream[i : i + step])]
    assert got == messages


@given(st.binary(max_size=200))
def test_any_bytes_end_in_messages_or_a_protocol_error(data):
    for prefix in (b"", PREAMBLE, PREAMBLE + struct.pack("<I", len(data))):
        try:
            FrameDecoder().feed(prefix + data)
        except ProtocolError:
            continue


def test_strangers_and_other_versions_are_named():
    with pytest.raises(ProtocolError, match="does not speak"):
        FrameDecoder().feed(b"GET / HTTP/1.1\r\n")
    for version in (m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1):
        with pytest.raises(ProtocolError, match=f"version {version} at the peer, {m.PROTOCOL_VERSION} here"):
            FrameDecoder().feed(MAGIC + struct.pack("<H", version))


def test_sizes_are_limited_before_anything_is_buffered():
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match="the limit is"):
        decoder.feed(PREAMBLE + struct.pack("<I", MAX_HELLO_BYTES + 1))
    decoder = FrameDecoder()
    decoder.allow(MAX_MESSAGE_BYTES)
    assert decoder.feed(PREAMBLE + struct.pack("<I", MAX_HELLO_BYTES + 1)) == []


def test_pickles_are_not_understood():
    body = pickle.dumps(SOME)
    with pytest.raises(ProtocolError, match="malformed"):
        FrameDecoder().feed(PREAMBLE + struct.pack("<I", len(body)) + body)


def run(machine, *steps):
    for verb, message in steps:
        (machine.sending if verb == "send" else machine.received)(message)
    return machine.state


PROBED, READY = m.Probed([], {}), m.Ready([])
WELCOME = m.Welcome(1, "t", 2, b"", 1, True, [], BEACON, 1.0)


def test_the_two_ends_go_up_and_down_together():
    up = [("send", HELLO), ("receive", WELCOME), ("receive", PROBED), ("send", READY), ("receive", m.Established())]
    mirrored = [("receive" if verb == "send" else "send", message) for verb, message in up]
    dialling, listening = LinkMachine(True), LinkMachine(False)
    assert run(dialling, *up) is LinkState.UP
    assert run(listening, *mirrored) is LinkState.UP
    assert run(dialling, ("send", m.Unlink()), ("receive", m.Reply(1)), ("receive", m.Unlinked())) is LinkState.DOWN
    assert run(listening, ("receive", m.Unlink()), ("send", m.Reply(1)), ("send", m.Unlinked())) is LinkState.DOWN


CHALLENGE, COUNTER, PROOF = m.Challenge(3, 1, 2, b"n" * 32), m.CounterChallenge(b"m" * 32), m.Proof(b"p" * 32)
PROVING = [("send", CHALLENGE), ("receive", COUNTER), ("send", PROOF), ("receive", PROOF)]


def test_with_a_secret_both_ends_prove_themselves_before_the_hello():
    dialling, listening = LinkMachine(True, with_secret=True), LinkMachine(False, with_secret=True)
    for verb, message in PROVING:
        for machine in (dialling, listening):
            for early in (HELLO, WELCOME, m.Ping(), m.Call(1, "s", b""), READY):
                if (early, machine.state, machine) != (HELLO, LinkState.START, listening):
                    with pytest.raises(ProtocolError):
                        machine.received(early)
        run(dialling, (verb, message))
        run(listening, ("receive" if verb == "send" else "send", message))
    assert run(dialling, ("send", HELLO)) is run(listening, ("receive", HELLO)) is LinkState.GREETED


@pytest.mark.parametrize(("with_secret", "message"), [(True, HELLO), (False, CHALLENGE)])
def test_who_begins_in_the_other_way_can_only_be_refused(with_secret, message):
    machine = LinkMachine(False, with_secret)
    assert run(machine, ("receive", message)) is LinkState.UNWANTING
    for answer in (WELCOME, COUNTER, PROOF, PROBED, m.Reply(1)):
        with pytest.raises(ProtocolError):
            machine.sending(answer)
    for more in (HELLO, CHALLENGE, PROOF, m.Ping()):
        with pytest.raises(ProtocolError):
            machine.received(more)
    assert run(machine, ("send", m.Refuse(1, "no"))) is LinkState.DOWN


@pytest.mark.parametrize("message", [m.Call(1, "s", b""), READY, PROBED, m.Ping(), m.Unlink(), WELCOME])
def test_nothing_but_hello_may_come_first(message):
    with pytest.raises(ProtocolError, match="while the link is start"):
        LinkMachine(False).received(message)


@pytest.mark.parametrize("message", [HELLO, WELCOME, PROBED, READY, m.Unlinked()])
def test_no_handshake_message_on_a_link_that_is_up(message):
    machine = LinkMachine(True)
    machine.state = LinkState.UP
    with pytest.raises(ProtocolError):
        machine.received(message)
