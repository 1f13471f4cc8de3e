# SPDX-License-Identifier: Apache-2.0
"""`find_cluster`: who listens at an address, without a link, for those who may know."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datadist_core import LLMDataDist, LLMException, LLMRole
from datadist_core.errors import LinkFailed, PeerLost, TimedOut
from datadist_core.testing.ports import free_port
from datadist_core.tests.core_ends import config, linked, make_end, must_link
from datadist_core.tests.pki import run_documented_commands, tls

WAIT_S = 30.0


def address_of(end: LLMDataDist) -> tuple[str, int]:
    address = end.listen_address
    assert address is not None
    return address.host, address.port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_names_who_listens_and_leaves_nothing_behind(host: str) -> None:
    bind = "[::1]:0" if host == "::1" else "127.0.0.1:0"
    with make_end("shm", bind) as server, make_end("shm") as client:
        port = address_of(server)[1]
        assert client.find_cluster(host, port, WAIT_S) == server.cluster_id
        assert server._open().links.links() == client._open().links.links() == []
        assert client.link_failure(server.cluster_id) is None
        must_link(client, server)
        assert client.find_cluster(host, port, WAIT_S) == server.cluster_id  # also while it is linked
        client.check_link_status(server.cluster_id)


def test_one_may_ask_oneself_and_in_v1_both_may_ask() -> None:
    with make_end("shm", "127.0.0.1:0") as lone:
        assert lone.find_cluster(*address_of(lone), WAIT_S) == lone.cluster_id
    with linked("shm", v2=False) as (prompt, decoder), make_end("shm", v2=True) as other:
        assert decoder.find_cluster(*address_of(prompt), WAIT_S) == prompt.cluster_id
        assert prompt.find_cluster(*address_of(prompt), WAIT_S) == prompt.cluster_id
        assert other.find_cluster(*address_of(prompt), WAIT_S) == prompt.cluster_id  # linking will say what differs


@pytest.mark.parametrize("host", ["a" * 64 + ".b", "a\0b", "..", "\ud800"])
def test_what_cannot_be_a_host_name_is_a_loss_like_any_other(host: str) -> None:
    """Python's resolver has other errors for these than for a name that it does not know."""
    with make_end("shm") as client, pytest.raises(PeerLost, match="cannot connect"):
        client.find_cluster(host, 7000, WAIT_S)


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Somebody else: says `answer` to who comes, and hangs up; None says nothing and stays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    sock, _ = server.accept()
                    taken.append(sock)
                    if answer is not None:
                        sock.sendall(answer)
                        sock.close()
            except OSError:
                return

        thread = threading.Thread(target=serve, name="datadist-test-listener", daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        for sock in taken:
            sock.close()


def test_nobody_and_somebody_else_are_told_apart() -> None:
    with make_end("shm") as client:
        port = free_port()
        with pytest.raises(PeerLost, match=f"cannot connect to 127.0.0.1:{port}.*refused"):
            client.find_cluster("127.0.0.1", port, WAIT_S)
        with listener(b"HTTP/1.0 400 Bad Request\r\n\r\n") as port, pytest.raises(LLMException) as caught:
            client.find_cluster("127.0.0.1", port, WAIT_S)
        assert not isinstance(caught.value, TimedOut), caught.value
        started_s = time.monotonic()
        with listener(None) as port, pytest.raises(TimedOut, match=f"127.0.0.1:{port}"):
            client.find_cluster("127.0.0.1", port, 0.2)
        assert time.monotonic() - started_s < WAIT_S
        with pytest.raises(PeerLost, match=r"no-such-host\.invalid"):
            client.find_cluster("no-such-host.invalid", 1, WAIT_S)


def secured(cluster_id: int, security: str | None, listen: str | None = None) -> LLMDataDist:
    made = config("tcp", listen)
    if security is not None:
        made.security = security
    end = LLMDataDist(LLMRole.MIX, cluster_id)
    end.init(made)
    return end


def test_with_a_secret_members_only_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "a secret of at least so many characters")
    monkeypatch.setenv("OTHER_SECRET", "another secret of at least so many characters")
    with_secret, with_other = '{"secret_env": "TEST_SECRET"}', '{"secret_env": "OTHER_SECRET"}'
    with secured(7_654_321, with_secret, "127.0.0.1:0") as server:
        with secured(2, with_secret) as member:
            assert member.find_cluster(*address_of(server), WAIT_S) == 7_654_321
        for security in (with_other, None):
            with secured(3, security) as stranger, pytest.raises(LinkFailed, match="secret") as caught:
                stranger.find_cluster(*address_of(server), WAIT_S)
            assert "7654321" not in str(caught.value)


def test_with_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    run_documented_commands(tmp_path)
    security = f"{{{tls(tmp_path)}}}"
    with secured(7_654_321, security, "127.0.0.1:0") as server:
        with secured(2, security) as member:
            assert member.find_cluster(*address_of(server), WAIT_S) == 7_654_321
        with secured(3, None) as stranger, pytest.raises((PeerLost, TimedOut)):
            stranger.find_cluster(*address_of(server), 1.0)
