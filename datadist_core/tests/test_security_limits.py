# SPDX-License-Identifier: Apache-2.0
"""What strangers and greedy peers can use up, and which addresses are bound. Others are served all the while."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from datadist_core import BlocksCacheKey, LLMDataDist, LLMRole, LLMStatusCode
from datadist_core.link import answers
from datadist_core.security import Security
from datadist_core.tests.attacker import BOUND_S, Attacker, hello
from datadist_core.tests.core_ends import LINK_MS, cluster_info, config, filled_cache, manager, plain_cache
from datadist_core.tests.pki import run_documented_commands, tls
from datadist_core.wire import accepting, channel, codec, gate, log_limit
from datadist_core.wire import messages as m
from datadist_core.wire.codec import PREAMBLE, encode

SECRET = "0123456789abcdef0123456789abcdef"
HOLDER = Security(SECRET.encode())
WITH_SECRET = '{"secret_env": "TEST_SECRET"}'
SERVER, CLIENT = 601, 602
STRANGERS = 200


@pytest.fixture(autouse=True)
def secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", SECRET)
    monkeypatch.setattr(gate, "HELLO_TIMEOUT_S", 10 * BOUND_S)  # but for the tests of it: nobody is dropped by time


def eventually(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {BOUND_S} s: {what}"
        threading.Event().wait(0.01)


@contextmanager
def end(
    security: str, listen: str | None = None, cluster_id: int = SERVER, backend: str = "shm"
) -> Iterator[LLMDataDist]:
    made = config(backend, listen)
    made.security = security
    with LLMDataDist(LLMRole.MIX, cluster_id) as one:
        one.init(made)
        yield one


def limited(strangers: int = 1024, connections: int = 8192, secret: bool = True) -> str:
    source = '"secret_env": "TEST_SECRET", ' if secret else ""
    return f'{{{source}"limits": {{"strangers": {strangers}, "connections": {connections}}}}}'


def port_of(one: LLMDataDist) -> int:
    address = one.listen_address
    assert address is not None
    return address.port


def must_link(client: LLMDataDist, server: LLMDataDist) -> None:
    assert client.link_clusters([cluster_info(server)], timeout=LINK_MS)[0] is LLMStatusCode.LLM_SUCCESS


def open_files() -> set[str]:
    """What this process has open, as the kernel names it."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(link))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def num_sockets() -> int:
    return sum(name.startswith("socket:") for name in open_files())


def links_of(one: LLMDataDist) -> set[int]:
    return {link.peer.cluster_id for link in one._open().links.links()}


def num_open(strangers: list[Attacker]) -> int:
    """Connections that the other end has not closed. What it said is read."""
    count = 0
    for one in strangers:
        one.sock.setblocking(False)
        try:
            while one.sock.recv(4096):
                pass
        except BlockingIOError:
            count += 1
        except OSError:
            continue
    return count


# -- what is bound


def bound_here() -> set[tuple[str, int]]:
    """Addresses at which this process listens for TCP, as the kernel sees them."""
    mine = open_files()
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                found.add((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [
        (None, set()),
        ("127.0.0.1:0", {"127.0.0.1"}),
        ("127.0.0.7:0", {"127.0.0.7"}),
        ("[::1]:0", {"::1"}),
        ("0.0.0.0:0", {"0.0.0.0"}),  # only because it was asked for
        ("*:0", {"0.0.0.0", "::"}),
    ],
)
def test_only_what_is_configured_is_bound(
    listen: str | None, hosts: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Control and data."""
    caplog.set_level(logging.INFO, "datadist_core")
    before = bound_here()
    with end("{}", listen, backend="tcp,shm") as server:
        bound = bound_here() - before
        control = {host for host, port in bound if server.listen_address and port == port_of(server)}
        assert control <= hosts
        assert {host for host, _ in bound} == hosts or listen == "*:0"
        assert len(bound) >= 2 * bool(hosts)  # control and data
        told = [text for text in caplog.messages if "accepting links at" in text]
        assert len(told) == bool(listen)
        assert all(host in told[0] for host in control)
        assert any("all interfaces" in text for text in caplog.messages) == (not hosts.isdisjoint({"0.0.0.0", "::"}))
    assert bound_here() == before


def test_a_port_that_is_taken_and_an_address_that_is_not_ours_are_named() -> None:
    with end("{}", "127.0.0.1:0") as server, LLMDataDist(LLMRole.MIX, 1) as other:
        for address in (f"127.0.0.1:{port_of(server)}", "192.0.2.1:7000"):
            with pytest.raises(Exception, match=f"cannot listen on {address}"):
                other.init(config("shm", address))


# -- strangers


def silent(attacker: Attacker) -> None:
    """It has connected."""


def half_a_frame(attacker: Attacker) -> None:
    attacker.say(PREAMBLE, encode(attacker.challenge(CLIENT, SERVER))[:-1])


def garbage(attacker: Attacker) -> None:
    attacker.say(b"\0\xff" * 500)


def asks_for_proof(attacker: Attacker) -> None:
    attacker.say(PREAMBLE, attacker.challenge(CLIENT, SERVER))


def says_hello(attacker: Attacker) -> None:
    attacker.say(PREAMBLE, hello(7000, SERVER))


@pytest.mark.parametrize(
    "behaviour",
    [
        asks_for_proof,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (silent, half_a_frame, garbage, says_hello)),
    ],
)
def test_links_are_served_while_strangers_connect(behaviour: Callable[[Attacker], None]) -> None:
    with end(limited(50), "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        theirs, mine = filled_cache(server, 1), plain_cache(client, 2)
        server.register_service("echo", lambda cluster, body: body)
        must_link(client, server)
        sockets = num_sockets()
        with ExitStack() as stack:
            strangers = []
            for number in range(STRANGERS):
                connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=BOUND_S)
                strangers.append(stack.enter_context(Attacker(connection)))
                behaviour(strangers[-1])
                if number % 20 == 0:
                    manager(client).pull_blocks(BlocksCacheKey(SERVER), mine, [number // 20], [number // 20])
                    assert client.call(SERVER, "echo", b"%d" % number, BOUND_S) == b"%d" % number
            assert (theirs.numpy()[0][9] == mine.numpy()[0][9]).all()
            eventually(lambda: num_open(strangers) <= 50, "the oldest strangers are dropped")
            with end(WITH_SECRET, None, 603) as newcomer:
                must_link(newcomer, server)  # which needs a place among them
            client.check_link_status(SERVER)
        eventually(lambda: num_sockets() <= sockets, "their descriptors come back")


def test_the_limit_is_what_drops_them() -> None:
    with end(limited(STRANGERS), "127.0.0.1:0") as server, ExitStack() as stack:
        strangers = [stack.enter_context(Attacker.dials(port_of(server))) for _ in range(60)]
        with Attacker.dials(port_of(server)) as last:  # once it is answered, all before it were accepted
            last.say(last.challenge(CLIENT, SERVER))
            assert isinstance(last.hear(), m.CounterChallenge)
        assert num_open(strangers) == 60


@pytest.mark.slow
def test_strangers_without_a_secret_do_not_take_the_threads_that_serve_links() -> None:
    """They say a valid hello, which an end without a secret has to believe, and then nothing."""
    with end("{}", "127.0.0.1:0") as server, end("{}", None, CLIENT) as client, ExitStack() as stack:
        server.register_service("echo", lambda cluster, body: body)
        must_link(client, server)
        for number in range(STRANGERS):
            stack.enter_context(Attacker.dials(port_of(server))).say(hello(7000 + number, SERVER))
        for _ in range(20):
            assert client.call(SERVER, "echo", b"x", BOUND_S) == b"x"


def test_connections_in_all_are_limited_and_links_are_not_dropped_for_strangers() -> None:
    with end(limited(connections=2, strangers=9), "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        must_link(client, server)
        with Attacker.dials(port_of(server)) as first, Attacker.dials(port_of(server)) as second:
            assert first.hear() is None  # one place besides the link's: for the newest
            with end(WITH_SECRET, None, 603) as other:
                must_link(other, server)
                assert second.hear() is None
                with Attacker.dials(port_of(server)) as third:
                    assert third.hear() is None
                client.check_link_status(SERVER)
                other.check_link_status(SERVER)


# -- time


def trickle(attacker: Attacker) -> None:
    """A byte now and then."""
    with suppress(OSError):
        for byte in PREAMBLE + encode(attacker.challenge(CLIENT, SERVER)):
            attacker.sock.sendall(bytes([byte]))
            threading.Event().wait(0.02)


def proves_and_stops(attacker: Attacker) -> bool:
    """Whether its time was enough for that."""
    attacker.say(PREAMBLE)
    return attacker.prove(HOLDER, CLIENT, SERVER)


@pytest.mark.parametrize("behaviour", [silent, half_a_frame, asks_for_proof, trickle, proves_and_stops])
def test_a_stranger_has_little_time_whatever_it_does(
    behaviour: Callable[[Attacker], bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_done() -> bool:
        started_s = time.monotonic()
        with Attacker(socket.create_connection(("127.0.0.1", port_of(server)))) as attacker:
            done = behaviour(attacker)
            assert not {m.Welcome, m.Probed} & {type(one) for one in attacker.hear_all()}
        assert time.monotonic() - started_s > 0.2
        return done is not False

    with end(WITH_SECRET, "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        must_link(client, server)
        monkeypatch.setattr(gate, "HELLO_TIMEOUT_S", 0.3)
        eventually(is_done, "the stranger has behaved like that, and was dropped")
        client.check_link_status(SERVER)  # it is no stranger, and stays


# -- memory


@pytest.mark.parametrize(
    ("secret", "proves", "limit"),
    [(False, False, codec.MAX_HELLO_BYTES), (True, False, codec.MAX_PROOF_BYTES), (True, True, codec.MAX_HELLO_BYTES)],
)
def test_a_stranger_cannot_make_us_buffer_much(secret: bool, proves: bool, limit: int) -> None:
    """It is hung up on at the mere announcement; the largest that is allowed is waited for."""
    with end(limited(secret=secret), "127.0.0.1:0") as server:
        for size, closes in ((limit, False), (limit + 1, True), (2**32 - 1, True)):
            with Attacker.dials(port_of(server)) as attacker:
                assert not proves or attacker.prove(HOLDER, CLIENT, SERVER)
                attacker.say(struct.pack("<I", size))
                if closes:
                    assert attacker.hear() is None
                else:
                    attacker.say(bytes(size))  # which is no message, but of a size that is read
                    assert attacker.hear() is None


# -- greedy peers


@pytest.mark.slow
def test_a_peer_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_UNSENT_BYTES", 1_000_000)
    with end(WITH_SECRET, "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        server.register_service("echo", lambda cluster, body: body)
        must_link(client, server)
        with Attacker.dials(port_of(server)) as greedy:
            assert greedy.prove(HOLDER, 603, SERVER)
            assert greedy.link(603, SERVER)
            for number in range(60):
                greedy.say(m.Call(number, "echo", bytes(500_000)))
            eventually(lambda: 603 not in links_of(server), "it is cut off")
        reason = "does not read its control connection"
        eventually(lambda: reason in str(server._open().links.failure(603)), "and it is said why")
        client.check_link_status(SERVER)


def test_requests_of_one_peer_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_REQUESTS_WAITING", 16)
    monkeypatch.setattr(answers, "MAX_BYTES_WAITING", 1000)
    go_on = threading.Event()
    with end(WITH_SECRET, "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        server.register_service("slow", lambda cluster, body: b"done" if go_on.wait(BOUND_S) else b"")
        server.register_service("echo", lambda cluster, body: body)
        must_link(client, server)
        with Attacker.dials(port_of(server)) as greedy:
            assert greedy.prove(HOLDER, 603, SERVER)
            assert greedy.link(603, SERVER)
            for number in range(1, 101):
                greedy.say(m.Call(number, "slow", b""))
            refused = [greedy.hear() for _ in range(84)]
            assert {one.status for one in refused if isinstance(one, m.Failure)} == {LLMStatusCode.LLM_LINK_BUSY}
            assert client.call(SERVER, "echo", b"x", BOUND_S) == b"x"  # others are served
            go_on.set()
            answered = [greedy.hear() for _ in range(16)]
            assert {one.body for one in answered if isinstance(one, m.Reply)} == {b"done"}
            greedy.say(m.Call(200, "echo", b"x" * 5000))  # larger than the limit, but alone
            assert greedy.hear() == m.Reply(200, b"x" * 5000)


# -- logs, descriptors


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limit, "WINDOW_S", 10 * BOUND_S)  # all come within one, however long that takes
    caplog.set_level(logging.DEBUG, "datadist_core")
    with end(WITH_SECRET, "127.0.0.1:0") as server:
        for behaviour in (garbage, says_hello, asks_for_proof):
            for _ in range(STRANGERS // 2):
                with Attacker(socket.create_connection(("127.0.0.1", port_of(server)))) as attacker:
                    behaviour(attacker)
                    attacker.sock.shutdown(socket.SHUT_WR)
                    attacker.hear_all()
        lines = [record for record in caplog.records if "127.0.0.1:" in record.getMessage()]
        assert log_limit.LINES <= len(lines) < 6 * log_limit.LINES  # of 300 strangers
        assert any("more such lines are left out" in record.getMessage() for record in lines)


def test_log_lines_come_again_later(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(log_limit.time, "monotonic", lambda: now_s[0])
    log = log_limit.LimitedLog(logging.getLogger("datadist_core.test"))
    for number in range(50):
        log.log(logging.WARNING, "stranger %d", number)
    now_s[0] += log_limit.WINDOW_S + 1
    log.log(logging.WARNING, "stranger %d", 50)
    assert caplog.messages[-2:] == ["40 lines about strangers were left out", "stranger 50"]
    assert len(caplog.messages) == log_limit.LINES + 2


def test_accepting_goes_on_after_descriptors_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is the only thing that is made up; `test_cases` has processes that really run out."""
    monkeypatch.setattr(accepting, "PAUSE_S", 0.05)
    with end(WITH_SECRET, "127.0.0.1:0") as server, end(WITH_SECRET, None, CLIENT) as client:
        listener = server._open().links.listeners._own
        assert listener is not None
        real, failures = listener.sockets[0], [24, 23, 24]

        class Exhausted:
            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

            def accept(self) -> tuple[socket.socket, object]:
                if failures:
                    raise OSError(failures.pop(), "too many open files")
                return real.accept()

        loop = server._open().links._loop.loop
        acceptor = server._open().links._loop._acceptor
        loop.call_soon_threadsafe(loop.remove_reader, real)
        loop.call_soon_threadsafe(acceptor._watch, listener, Exhausted(), server._open().links._accept)
        must_link(client, server)
        assert failures == []


def test_a_stranger_that_never_finishes_tls_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accepting, "HELLO_TIMEOUT_S", 10 * BOUND_S)  # which is for TLS alone, and would do it as well
    run_documented_commands(tmp_path)
    with end(f"{{{tls(tmp_path)}}}", "127.0.0.1:0") as server:
        sockets = num_sockets()
        monkeypatch.setattr(gate, "HELLO_TIMEOUT_S", 0.3)
        with Attacker(socket.create_connection(("127.0.0.1", port_of(server)))) as quiet:
            quiet.say(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a greeting
            assert quiet.hear() is None
        eventually(lambda: num_sockets() <= sockets, "the descriptor comes back")
        monkeypatch.setattr(gate, "HELLO_TIMEOUT_S", 10 * BOUND_S)
        with end(f"{{{tls(tmp_path)}}}", None, CLIENT) as client:
            must_link(client, server)
