# SPDX-License-Identifier: Apache-2.0
"""The shared secret and TLS of control connections: who gets a link, who does not, and what the two users are told.

Attackers are sockets that speak the protocol by hand (`attacker`). Where a check is what keeps one out, a test takes
the check away and sees the same attacker come in.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, LLMDataDist, LLMRole, LLMStatusCode
from datadist_core.errors import ParamInvalid
from datadist_core.link import answers, authentication
from datadist_core.link import manager as manager_module
from datadist_core.security import MIN_SECRET_BYTES, Limits, Security
from datadist_core.tests.attacker import Attacker, frame, hello, said
from datadist_core.tests.core_ends import LINK_MS, cluster_info, config, filled_cache, manager, plain_cache, remote_info
from datadist_core.tests.pki import DOCS, run_documented_commands, tls
from datadist_core.wire import channel, codec, gate, log_limit
from datadist_core.wire import messages as m
from datadist_core.wire.codec import MAX_PROOF_BYTES, PREAMBLE

SECRET, OTHER_SECRET = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"
HOLDER = Security(SECRET.encode())
SERVER, CLIENT = 501, 502


@pytest.fixture(autouse=True)
def secrets_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", SECRET)
    monkeypatch.setenv("TEST_OTHER_SECRET", OTHER_SECRET)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    folder = tmp_path_factory.mktemp("pki")
    run_documented_commands(folder)
    return folder


@pytest.fixture(scope="module")
def strange_pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another authority, which looks just the same."""
    folder = tmp_path_factory.mktemp("strange")
    run_documented_commands(folder)
    return folder


WITH_SECRET = '{"secret_env": "TEST_SECRET"}'
WITH_OTHER = '{"secret_env": "TEST_OTHER_SECRET"}'


@contextmanager
def end(
    security: str | None, listen: str | None = None, cluster_id: int = SERVER, backend: str = "shm"
) -> Iterator[LLMDataDist]:
    made = config(backend, listen)
    if security is not None:
        made.security = security
    with LLMDataDist(LLMRole.MIX, cluster_id) as one:
        one.init(made)
        yield one


@contextmanager
def two_ends(listening: str | None, dialling: str | None, backend: str = "shm") -> Iterator[list[LLMDataDist]]:
    with end(listening, "127.0.0.1:0", SERVER, backend) as server, end(dialling, None, CLIENT, backend) as client:
        yield [server, client]


def link(client: LLMDataDist, server: LLMDataDist, timeout: int = LINK_MS) -> tuple[LLMStatusCode, str]:
    _, [status] = client.link_clusters([cluster_info(server)], timeout=timeout)
    return status, str(client.link_failure(server.cluster_id))


def links_of(one: LLMDataDist) -> set[int]:
    return {link.peer.cluster_id for link in one._open().links.links()}


def port_of(one: LLMDataDist) -> int:
    address = one.listen_address
    assert address is not None
    return address.port


# -- the option


def private(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return f'{{"secret_file": "{path}"}}'


def test_a_secret_comes_from_a_file_or_the_environment_without_one_newline(tmp_path: Path) -> None:
    text = private(tmp_path / "s", b" sixteen bytes!!\n\n")
    assert Security.parse(text, "o").secret == b" sixteen bytes!!\n"
    assert Security.parse(private(tmp_path / "g", b"x" * 16, 0o640), "o").secret == b"x" * 16
    (tmp_path / "link").symlink_to(tmp_path / "g")  # as Kubernetes mounts them
    assert Security.parse(f'{{"secret_file": "{tmp_path}/link"}}', "o").secret == b"x" * 16
    assert Security.parse(WITH_SECRET, "o").secret == SECRET.encode()
    assert Security.parse("{}", "o") == Security()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_a_secret_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ParamInvalid, match=rf"llm\.Security: secret_file=.*mode {mode:04o}.*chmod 600"):
        Security.parse(private(tmp_path / "s", b"x" * 32, mode), "llm.Security")


def test_bad_secrets_are_refused_by_name_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "x" * (MIN_SECRET_BYTES - 1))
    os.mkfifo(tmp_path / "fifo", 0o600)
    cases = {
        private(tmp_path / "short", b"x" * 15 + b"\n"): "15 bytes; .*openssl rand",
        private(tmp_path / "long", b"x" * 5000): "4096",
        '{"secret_env": "SHORT"}': "SHORT.*15 bytes",
        '{"secret_env": "NOT_SET_AT_ALL"}': "NOT_SET_AT_ALL.*not in the environment",
        f'{{"secret_file": "{tmp_path}/none"}}': "none.*No such file",
        f'{{"secret_file": "{tmp_path}/fifo"}}': "fifo.*not a regular file",
        f'{{"secret_file": "{tmp_path}"}}': "name a file",
    }
    for text, why in cases.items():
        with pytest.raises(ParamInvalid, match=f"^the_option: secret.*{why}"):
            Security.parse(text, "the_option")


@pytest.mark.parametrize("text", ['{"secret": "%s"}', '{"secret": "%s"', '["%s"]', '{"secret": ["%s"], "tls": 1}'])
def test_a_secret_in_the_option_itself_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ParamInvalid, match=r"^the_option.*secret_file.*secret_env") as caught:
        Security.parse(text % SECRET, "the_option")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None  # nor in what is printed with it


def test_bad_files_for_tls_are_refused_by_name(tmp_path: Path, pki: Path) -> None:
    subprocess.run(
        ["openssl", "ec", "-in", pki / "node.key", "-aes256", "-passout", "pass:abc", "-out", tmp_path / "locked"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (tmp_path / "locked").chmod(0o600)
    (tmp_path / "open").write_bytes((pki / "node.key").read_bytes())
    (tmp_path / "open").chmod(0o644)
    good = {"cert": pki / "node.crt", "key": pki / "node.key", "ca": pki / "ca.crt"}
    for part, path, why in (
        ("key", tmp_path / "locked", "passphrase"),
        ("key", tmp_path / "open", "mode 0644.*chmod 600"),
        ("key", pki / "ca.key", "cannot be used"),
        ("cert", pki / "datadist.secret", "PEM"),
        ("ca", tmp_path / "none", "No such file"),
    ):
        files = ", ".join(f'"{name}": "{value}"' for name, value in (good | {part: path}).items())
        with pytest.raises(ParamInvalid, match=f"the_option: .*{path.name}.*{why}"):
            Security.parse(f'{{"tls": {{{files}}}}}', "the_option")


def test_the_secret_is_in_no_text_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with two_ends(WITH_SECRET, WITH_SECRET) as (server, client), end(WITH_OTHER, None, 503) as other:
        assert link(client, server)[0] is LLMStatusCode.LLM_SUCCESS
        assert link(other, server)[0] is LLMStatusCode.LLM_LINK_FAILED
        parts = client._open()
        texts = [repr(parts.settings), repr(parts.links.get(SERVER).session), caplog.text]
    assert "linked to cluster" in caplog.text
    for text in texts:
        assert SECRET not in text
        assert OTHER_SECRET not in text


def test_proofs_are_of_one_role_and_of_these_parts_only() -> None:
    proof = HOLDER.prove("a", b"bc", b"d")
    assert HOLDER.check(proof, "a", b"bc", b"d")
    others = [("ab", b"c", b"d"), ("a", b"b", b"cd"), ("a", b"bcd"), ("a", b"bc", b"d", b""), ("b", b"bc", b"d")]
    assert not any(HOLDER.check(proof, role, *parts) for role, *parts in others)
    assert not any(HOLDER.check(bad, "a", b"bc", b"d") for bad in (b"", proof[:-1], proof + b"\0", bytes(32)))
    assert not Security(OTHER_SECRET.encode()).check(proof, "a", b"bc", b"d")


# -- two real ends


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["secret", "tls", "both"])
def test_ends_with_the_same_settings_link_and_move_blocks(kind: str, backend: str, pki: Path) -> None:
    both = f'{{"secret_env": "TEST_SECRET", {tls(pki)}}}'
    text = {"secret": WITH_SECRET, "tls": f"{{{tls(pki)}}}", "both": both}[kind]
    with two_ends(text, text, backend) as (server, client):
        theirs, mine = filled_cache(server, 1), plain_cache(client, 2)
        assert link(client, server) == (LLMStatusCode.LLM_SUCCESS, "None")
        manager(client).pull_blocks(BlocksCacheKey(SERVER), mine, [3], [4])
        assert np.array_equal(theirs.numpy()[0][3], mine.numpy()[0][4])
        assert client.unlink_clusters([cluster_info(server)], timeout=LINK_MS)[0] is LLMStatusCode.LLM_SUCCESS


SECRET_THERE = r"refused the link: this end requires a shared secret, and the dialling end has none; set the same"
SECRET_HERE = r"refused the link: the dialling end requires a shared secret, and this end has none; set the same"
DIFFERENT = r"refused the link: the shared secrets of the two ends differ; set the same .*llm\.Security"


@pytest.mark.parametrize(
    ("listening", "dialling", "reason"),
    [
        (WITH_SECRET, WITH_OTHER, DIFFERENT),
        (WITH_SECRET, None, SECRET_THERE),
        (None, WITH_SECRET, SECRET_HERE),
        ("tls", None, r"closed the control connection.*TLS.*llm\.Security|the peer asks for TLS"),
        (None, "tls", r"cannot connect.*TLS is on at this end: it must be on at both ends, or at neither"),
        ("tls", "strange", r"certificate must be signed by the authority in llm\.Security"),
        ("tls", "unsigned", r"closed the control connection.*(unknown.ca|certificate|signed)"),
        ("tls", "tls and secret", SECRET_HERE),
    ],
)
def test_who_does_not_belong_gets_a_reason_and_no_link(
    listening: str | None, dialling: str | None, reason: str, pki: Path, strange_pki: Path
) -> None:
    names = {
        "tls": f"{{{tls(pki)}}}",
        "strange": f"{{{tls(strange_pki)}}}",
        "unsigned": f"{{{tls(strange_pki, authority=pki)}}}",  # it believes us, and has nothing to show
        "tls and secret": f'{{"secret_env": "TEST_SECRET", {tls(pki)}}}',
    }
    good, bad = names.get(str(listening), listening), names.get(str(dialling), dialling)
    with two_ends(good, bad) as (server, client), end(good, None, 503) as member:
        status, text = link(client, server)
        assert status is LLMStatusCode.LLM_LINK_FAILED
        assert re.search(reason, text), text
        assert links_of(server) == links_of(client) == set()
        assert link(member, server)[0] is LLMStatusCode.LLM_SUCCESS  # nothing else was wrong


def test_a_wrong_cluster_id_is_told_to_members_only() -> None:
    with two_ends(WITH_SECRET, WITH_SECRET) as (server, client), end(WITH_OTHER, None, 503) as stranger:
        info = remote_info(999, "127.0.0.1", port_of(server))
        assert client.link_clusters([info], timeout=LINK_MS)[0] is LLMStatusCode.LLM_PARAM_INVALID
        assert "but this is cluster 501" in str(client.link_failure(999))
        assert stranger.link_clusters([info], timeout=LINK_MS)[0] is LLMStatusCode.LLM_LINK_FAILED
        assert "501" not in str(stranger.link_failure(999)).replace(str(port_of(server)), "")


# -- attackers that dial


def early(one: m.AnyMessage | bytes) -> Callable[[Attacker], None]:
    return lambda attacker: attacker.say(one)


def after_challenge(*what: m.AnyMessage | bytes) -> Callable[[Attacker], None]:
    def attack(attacker: Attacker) -> None:
        attacker.say(attacker.challenge(CLIENT, SERVER))
        assert isinstance(attacker.hear(), m.CounterChallenge)
        attacker.say(*what)

    return attack


def proves_as(role: str, security: Security = HOLDER, hello_id: int = CLIENT) -> Callable[[Attacker], None]:
    """Negative control with the role "dialling end": then it belongs."""

    def attack(attacker: Attacker) -> None:
        challenge = attacker.challenge(CLIENT, SERVER)
        attacker.say(challenge)
        counter = attacker.hear()
        assert isinstance(counter, m.CounterChallenge)
        attacker.say(m.Proof(security.prove(role, *said(challenge, counter))), hello(hello_id, SERVER))

    return attack


EARLY: dict[str, m.AnyMessage | bytes] = {
    "hello": hello(CLIENT, SERVER),
    "ping": m.Ping(),
    "lookup": m.Lookup(1, "blocks", SERVER),
    "call": m.Call(1, "service", b""),
    "locate": m.Locate(1, [0]),
    "checksums": m.AskChecksums(1, [], b"", [], 1),
    "unlink": m.Unlink(),
    "refuse": m.Refuse(1, "x"),
    "proof": m.Proof(bytes(32)),
    "ready": m.Ready(["shm"]),
    "pickle": frame(pickle.dumps({"a": 1})),
    "too large": frame(bytes(MAX_PROOF_BYTES + 1)),
    "a lie about its length": b"\xff\xff\xff\xff",
    "short nonce": m.Challenge(m.PROTOCOL_VERSION, CLIENT, SERVER, b"x" * 31),
    "no nonce": m.Challenge(m.PROTOCOL_VERSION, CLIENT, SERVER, b""),
    "other version": m.Challenge(m.PROTOCOL_VERSION - 1, CLIENT, SERVER, b"x" * 32),
    "huge ids": m.Challenge(m.PROTOCOL_VERSION, -(2**63), 2**64 - 1, b""),
}
ATTACKS: dict[str, Callable[[Attacker], None]] = {
    **{f"{name} first": early(one) for name, one in EARLY.items()},
    **{
        f"{name} after the challenge": after_challenge(EARLY[name])
        for name in ("hello", "lookup", "proof", "pickle", "too large", "ready")
    },
    "challenge twice": after_challenge(m.Challenge(m.PROTOCOL_VERSION, CLIENT, SERVER, b"x" * 32)),
    "empty proof, then hello": after_challenge(m.Proof(b""), hello(CLIENT, SERVER)),
    "another secret": proves_as("dialling end", Security(OTHER_SECRET.encode())),
    "the right secret in the other role": proves_as("listening end"),
    "proof for one cluster, hello of another": proves_as("dialling end", hello_id=77),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_who_has_not_proved_itself_gets_nothing_but_a_refusal(server: LLMDataDist, name: str) -> None:
    """B39."""
    with Attacker.dials(port_of(server)) as attacker:
        ATTACKS[name](attacker)
        heard = {type(one) for one in attacker.hear_all()}
        if name != "proof for one cluster, hello of another":
            assert heard <= {m.CounterChallenge, m.Refuse}
        if name.endswith(" first"):
            assert heard <= {m.Refuse}
        assert m.Welcome not in heard
    assert CLIENT not in links_of(server)


def test_the_same_client_with_the_right_proof_is_let_in(server: LLMDataDist) -> None:
    with Attacker.dials(port_of(server)) as member:
        proves_as("dialling end")(member)
        assert [type(one) for one in member.hear_until(m.Welcome)] == [m.Proof, m.Welcome]
    with Attacker.dials(port_of(server)) as member:
        assert member.prove(HOLDER, CLIENT, SERVER)
        assert member.link(CLIENT, SERVER)


def test_without_the_comparison_a_wrong_secret_would_be_let_in(
    server: LLMDataDist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Security, "check", lambda self, proof, role, *parts: True)
    with Attacker.dials(port_of(server)) as attacker:
        ATTACKS["another secret"](attacker)
        assert m.Welcome in {type(one) for one in attacker.hear_until(m.Welcome)}


@pytest.fixture(scope="module")
def server() -> Iterator[LLMDataDist]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TEST_SECRET", SECRET)
        with end(WITH_SECRET, "127.0.0.1:0") as one:
            yield one


def recorded(port: int) -> list[m.AnyMessage]:
    """What a member said to get in."""
    with Attacker.dials(port) as member:
        challenge = member.challenge(CLIENT, SERVER)
        member.say(challenge)
        counter = member.hear()
        assert isinstance(counter, m.CounterChallenge)
        proof = m.Proof(HOLDER.prove("dialling end", *said(challenge, counter)))
        member.say(proof)
        assert isinstance(member.hear(), m.Proof)
        return [challenge, proof]


def replay(port: int, recording: list[m.AnyMessage]) -> m.AnyMessage | None:
    with Attacker.dials(port) as attacker:
        attacker.say(recording[0])
        assert isinstance(attacker.hear(), m.CounterChallenge)
        attacker.say(recording[1])
        return attacker.hear()


def test_a_replayed_conversation_is_of_no_use(server: LLMDataDist) -> None:
    recording = recorded(port_of(server))
    answer = replay(port_of(server), recording)
    assert isinstance(answer, m.Refuse)
    assert "differ" in answer.message


def test_it_would_be_with_the_same_nonce_every_time(server: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication.secrets, "token_bytes", lambda number: b"n" * number)
    assert isinstance(replay(port_of(server), recorded(port_of(server))), m.Proof)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(100), b"DDIST\x00\xff\xff"])
def test_other_protocols_are_hung_up_on(server: LLMDataDist, data: bytes) -> None:
    with Attacker.dials(port_of(server), preamble=data) as stranger:
        assert stranger.hear_all() == []
        assert stranger.heard in (PREAMBLE, b"")


# -- attackers that are dialled, or stand in between


@contextmanager
def impostor(client: LLMDataDist, expected: int = SERVER) -> Iterator[tuple[Attacker, Callable[[], str]]]:
    """The attacker that `client` has dialled, and a wait for what `link_clusters` says in the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        info = remote_info(expected, "127.0.0.1", listener.getsockname()[1])
        call = pool.submit(client.link_clusters, [info], LINK_MS)
        with Attacker(listener.accept()[0]) as attacker:
            attacker.say(PREAMBLE)

            def outcome() -> str:
                attacker.sock.shutdown(socket.SHUT_WR)
                assert call.result(20)[0] is not LLMStatusCode.LLM_SUCCESS
                return str(client.link_failure(expected))

            yield attacker, outcome


def test_the_dialling_end_says_nothing_of_value_to_who_proves_nothing() -> None:
    with end(WITH_SECRET, None, CLIENT) as client, impostor(client) as (attacker, outcome):
        assert isinstance(attacker.hear(), m.Challenge)
        attacker.say(m.Welcome(m.PROTOCOL_VERSION, "x", SERVER, b"i" * 16, 3, True, [], hello(1, 2).beacon, 4.0))
        assert attacker.hear_all() == []
        assert "cannot receive Welcome while the link is challenged" in outcome()


def echo_of_the_proof(attacker: Attacker) -> list[m.AnyMessage]:
    """Answer the dialling end's proof with the same proof."""
    assert isinstance(attacker.hear(), m.Challenge)
    attacker.say(m.CounterChallenge(os.urandom(32)))
    proof = attacker.hear()
    assert isinstance(proof, m.Proof)
    attacker.say(proof)
    return attacker.hear_until(m.Hello)


def test_a_reflected_proof_is_not_believed() -> None:
    with end(WITH_SECRET, None, CLIENT) as client, impostor(client) as (attacker, outcome):
        assert echo_of_the_proof(attacker) == []
        assert "has not proved that it knows the shared secret" in outcome()


def test_it_would_be_if_both_ends_proved_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_LISTENING", authentication._DIALLING)
    with end(WITH_SECRET, None, CLIENT) as client, impostor(client) as (attacker, outcome):
        assert m.Hello in {type(one) for one in echo_of_the_proof(attacker)}
        outcome()


@pytest.mark.parametrize("other_member", ["the dialling end itself", "a third end"])
def test_the_proof_of_one_member_cannot_be_passed_off_as_that_of_another(other_member: str) -> None:
    """The attacker was dialled in place of SERVER and passes on what it hears to a member that would prove itself."""
    with end(WITH_SECRET, "127.0.0.1:0", CLIENT) as client, end(WITH_SECRET, "127.0.0.1:0", 503) as third:
        victim = client if other_member == "the dialling end itself" else third
        with impostor(client) as (attacker, outcome), Attacker.dials(port_of(victim)) as relay:
            for here, there in ((attacker, relay), (relay, attacker), (attacker, relay)):
                message = here.hear()
                assert message is not None
                there.say(message)
            answer = relay.hear()
            assert isinstance(answer, m.Refuse)
            assert f"remote_cluster_id={SERVER} was asked for" in answer.message
            attacker.say(answer)
            assert attacker.hear_all() == []
            outcome()


def test_a_token_that_was_overheard_is_not_the_one_that_the_data_path_uses(server: LLMDataDist) -> None:
    with end(WITH_SECRET, None, CLIENT) as client:
        assert link(client, server)[0] is LLMStatusCode.LLM_SUCCESS
        mine, theirs = client._open().links.get(SERVER).session, server._open().links.get(CLIENT).session
        assert mine == theirs
        overheard = b"t" * 16
        assert mine.token(overheard) == theirs.token(overheard) != overheard
        assert len(mine.token(overheard)) == 16
        client.unlink_clusters([cluster_info(server)], timeout=LINK_MS)
        assert link(client, server)[0] is LLMStatusCode.LLM_SUCCESS
        assert client._open().links.get(SERVER).session.token(overheard) != mine.token(overheard)


def test_a_refusal_from_a_stranger_is_one_short_line() -> None:
    with end(WITH_SECRET, None, CLIENT) as client, impostor(client) as (attacker, outcome):
        attacker.hear()
        attacker.say(m.Refuse(5, "all is well\nERROR root: run this\x1b[2J" + "x" * 10_000))
        text = outcome()
        assert "all is well?ERROR root: run this?[2J" in text
        assert len(text) < 3000


# -- the page


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)((?:::\w+)*)`", DOCS.read_text(encoding="utf-8"))
    assert len(named) > 10
    for file, names in named:
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        for name in filter(None, names.split("::")):
            assert re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE), f"{file}::{name}"


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for value, text in (
        (codec.MAX_PROOF_BYTES, 16 << 10),
        (codec.MAX_HELLO_BYTES, 64 << 10),
        (codec.MAX_MESSAGE_BYTES, 16 << 20),
        (channel.MAX_UNSENT_BYTES, 64 << 20),
        (answers.MAX_BYTES_WAITING, 64 << 20),
    ):
        assert value == text
    for text in (
        f"{gate.HELLO_TIMEOUT_S:.0f} s",
        f"{Limits().strangers}, at most half",
        f"| {Limits().connections};",
        f"| {answers.MAX_REQUESTS_WAITING}, and 64 MiB",
        f"{log_limit.LINES} in {log_limit.WINDOW_S:.0f} s",
        f"| {manager_module.ACCEPT_TIMEOUT_S:.0f} s |",
        f"one of {manager_module.ACCEPT_THREADS}",
    ):
        assert text in page, text
