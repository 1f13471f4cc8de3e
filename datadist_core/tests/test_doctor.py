# SPDX-License-Identifier: Apache-2.0
"""`datadist doctor` as a command: on a good host, against real peers, and with everything broken on purpose.

A broken thing must be named, with its remedy. Commands run beside each other where they can.
"""

from __future__ import annotations

import contextlib
import datetime
import http.server
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import datadist_core
from datadist_core import LLMDataDist
from datadist_core.doctor.own_backends import check_yama
from datadist_core.doctor.peer import compare, rejected
from datadist_core.doctor.reading import Measured
from datadist_core.testing.lossy_network import ADDRESSES, LossyNetwork, why_unavailable
from datadist_core.tests.core_ends import make_end
from datadist_core.tests.optional import not_available
from datadist_core.wire.codec import MAGIC, PREAMBLE

ROOT = Path(datadist_core.__file__).parent.parent
#: The command `datadist`, for a machine that may stand still for seconds: who says nothing then is not a silent one.
PATIENT = """
import sys
from datadist_core.__main__ import main
from datadist_core.doctor import dialling
dialling._SILENCE_S = 4.0
sys.exit(main())
"""
DOCTOR = (sys.executable, "-c", PATIENT, "doctor", "--timeout", "30")
BOUND_S = 150.0
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
LOW_FILES = f"resource.setrlimit({resource.RLIMIT_NOFILE}, (100, 100))"
LOW_MEMLOCK = (
    f"ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_IPC_LOCK}, 0, 0, 0); "
    f"resource.setrlimit({resource.RLIMIT_MEMLOCK}, (65536, 65536))"
)


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    findings: list[dict[str, Any]]

    def of(self, topic: str, level: str) -> dict[str, Any]:
        """The finding on that topic with that level; shows everything if there is none."""
        found = [f for f in self.findings if f["topic"] == topic and f["level"] == level]
        assert found, self.findings
        return found[0]

    def says(self, topic: str, level: str, *words: str) -> dict[str, Any]:
        """Text and remedy hold all of `words`; a remedy there is for everything that is wrong."""
        finding = self.of(topic, level)
        text = f"{finding['text']} {finding['remedy']}"
        assert [word for word in words if word not in text] == [], text
        assert finding["remedy"] or level in ("OK", "NOTE")
        return finding


class Command:
    """`datadist doctor ... --json`, running."""

    def __init__(self, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, *DOCTOR, *arguments, "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )

    def result(self) -> Result:
        try:
            out, err = self._process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            pytest.fail(f"it hangs: {self._process.communicate(timeout=BOUND_S)}")
        finally:
            self._process.kill()
        assert "Traceback" not in err, err
        assert out.startswith("{"), (out, err)
        findings = json.loads(out)["findings"]
        assert json.loads(out)["ok"] == (self._process.returncode == 0)
        return Result(self._process.returncode, findings)


@contextlib.contextmanager
def far_end(*arguments: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[str]:
    """`datadist doctor --listen`; its address."""
    process = subprocess.Popen(
        [*prefix, *DOCTOR, "--listen", f"{host}:0", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        named = re.match(r"test end at (\S+:\d+),", process.stdout.readline())
        assert named is not None
        yield named[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def speaker(says: bytes) -> Iterator[str]:
    """Whoever connects is told this; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.sendall(says)
                        accepted.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Not into the test's output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def address_of(end: LLMDataDist) -> str:
    return str(end.listen_address)


def after(statement: str) -> list[str]:
    """What to put before a command, for it to run in a process that has done this."""
    return [sys.executable, "-c", f"import ctypes, os, resource, sys; {statement}; os.execv(sys.argv[1], sys.argv[1:])"]


# -- what is wrong at the port


def test_what_listens_there() -> None:
    """A dead port, a web server, another version, and something else; and a port that is in use."""
    newer = MAGIC + (int.from_bytes(PREAMBLE[-2:], "little") + 1).to_bytes(2, "little")
    with (
        web_server() as web,
        speaker(newer) as other,
        speaker(b"SSH-2.0-OpenSSH\r\n") as ssh,
        socket.socket() as reserved,
    ):
        reserved.bind(("127.0.0.1", 0))  # but does not listen
        dead = f"127.0.0.1:{reserved.getsockname()[1]}"
        commands = [Command("--connect", address) for address in (dead, web, other, ssh)]
        local = Command("--only", "network", "--try-listen", web)
        refused, http_server, version, something, occupied = (c.result() for c in (*commands, local))
    refused.says("connection", "FAIL", "refuses connections", "listen_ip_info", "kv_transfer_params")
    http_server.says("protocol", "FAIL", "HTTP server", "API", "listen_ip_info")
    there, here = (int.from_bytes(head[-2:], "little") for head in (newer, PREAMBLE))
    version.says("protocol", "FAIL", f"version {there}", f"version {here}", "same release")
    something.says("protocol", "FAIL", "something else", "SSH-2.0")
    occupied.says("listen", "FAIL", "in use", f"process {os.getpid()} (", "choose another port")
    assert {r.status for r in (refused, http_server, version, something, occupied)} == {1}


def test_rejections_and_rules() -> None:
    """What no single host can show: other hosts, Yama, a slow path."""
    elsewhere = rejected("shm", "the peer is on another host (boot id a, here b)")
    assert elsewhere.level.value == "NOTE"
    ptrace = rejected(
        "cma", "not permitted to touch the memory of process 7: kernel.yama.ptrace_scope=1 wants its consent"
    )
    assert ptrace.level.value == "WARN"
    assert "SYS_PTRACE" in ptrace.remedy
    blocked = rejected("tcp", "cannot connect to 10.0.0.1:4: timed out")
    assert "firewall" in blocked.remedy
    assert check_yama(1, may_trace=False).level.value == "WARN"
    assert check_yama(1, may_trace=True).level.value == check_yama(0, may_trace=False).level.value == "OK"
    own = [Measured("tcp", 1e-4, 3e9, 65536)]
    [slow] = compare([Measured("tcp", 1e-3, 3e8, 65536)], own, on_this_host=True)
    [usual] = compare([Measured("tcp", 1e-3, 3e8, 65536)], own, on_this_host=False)
    assert (slow.level.value, usual.level.value) == ("WARN", "OK")
    assert "MTU" in slow.remedy


# -- peers


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    """An engine (V2, V1), a test end, a blocked data port, a wrong secret: all told apart, and nothing left behind."""
    secret, other = tmp_path / "secret", tmp_path / "other"
    for path in (secret, other):
        path.write_text(f"{path} is long enough")
        path.chmod(0o600)
    mine, theirs = (json.dumps({"secret_file": str(path)}) for path in (secret, other))
    hidden = json.dumps({"tcp": {"advertise_host": "127.0.0.77"}})  # where nothing listens
    with (
        make_end(listen="127.0.0.1:0") as v2,
        make_end(listen="127.0.0.1:0", v2=False) as v1,
        far_end("--security", mine) as end,
        far_end("--backends", "tcp", "--backend-options", hidden) as blocked,
    ):
        engine, older = (Command("--connect", address_of(peer)) for peer in (v2, v1))
        good = Command("--connect", end, "--security", mine)
        bad = [Command("--connect", end, *more) for more in ((), ("--security", theirs))]
        wrong_id, port = Command("--connect", address_of(v2), "--cluster-id", "77"), Command("--connect", blocked)
        for command, kind in ((engine, "an engine"), (older, "an engine"), (good, "a test end")):
            result = command.result()
            assert result.status == 0, result.findings
            result.says("link", "OK", kind)
            for backend in ("shm", "cma", "tcp"):
                assert result.of(backend, "OK")["values"]["bytes_per_s"] > 0
            assert "bandwidth" in {f["topic"] for f in result.findings}
            assert not [f for f in result.findings if f["topic"] == "unlink"], result.findings
        for command in bad:
            command.result().says("link", "FAIL", "secret", "--security")
        wrong_id.result().says("link", "FAIL", "77", str(v2.cluster_id), "--cluster-id")
        port.result().says("data path", "FAIL", "control connection works", "firewall", "advertise_host")
        for peer in (v1, v2):
            assert peer._open().links.links() == []


@pytest.mark.slow
def test_other_network(request: pytest.FixtureRequest) -> None:
    """A peer in another network namespace: no shared memory, small packets; then no packets at all."""
    if reason := why_unavailable():
        not_available(reason)
    with LossyNetwork(mtu_bytes=900) as network:
        enter = [["ip", "netns", "exec", name] for name in network.namespaces]
        with far_end(host=ADDRESSES[0], prefix=enter[0]) as address:
            found = Command("--connect", address, prefix=enter[1]).result()
            found.says("shm", "WARN", "network namespace", "--network")
            found.says("MTU", "WARN", "small packets", "MTU")
            assert found.of("tcp", "OK")["values"]["bytes_per_s"] > 0
            network.cut()
            lost = Command("--connect", address, "--timeout", "1", prefix=enter[1]).result()
            lost.says("connection", "FAIL", "does not answer", "firewall")
            network.heal()


# -- this host


@pytest.mark.slow
def test_good_host_and_broken_ones(tmp_path: Path) -> None:
    """With limits lowered on purpose, beside one that is as it is."""
    if os.geteuid() != 0:
        not_available("limits and mount namespaces are changed as root")
    small = tmp_path / "shm.sh"
    small.write_text(
        'mount -t tmpfs -o size=1m none /dev/shm && head -c 900000 /dev/zero > /dev/shm/full && exec "$@"\n'
    )
    broken = {
        "open files": Command("--only", "host", prefix=after(LOW_FILES)),
        "locked memory": Command("--only", "memory", "--backends", "nixl", prefix=after(LOW_MEMLOCK)),
        "/dev/shm": Command("--only", "memory", prefix=["unshare", "--mount", "sh", str(small)]),
        "huge pages": Command("--only", "memory", "--huge-pages", "--pool", "900T"),
        "listen": Command("--only", "network", "--try-listen", "203.0.113.5:4000"),
        "nobody": Command("--only", "backends", "--backends", "no_such_backend"),
    }
    results = {name: command.result() for name, command in broken.items()}
    results["open files"].says("open files", "FAIL", "100", "ulimit -n")
    results["locked memory"].says("locked memory", "WARN", "64 KiB", "ulimit -l")
    results["/dev/shm"].says("/dev/shm", "WARN", "full", "--shm-size")
    results["huge pages"].says("huge pages", "FAIL", "vm.nr_hugepages=")
    results["listen"].says("listen", "FAIL", "127.0.0.1", "listen on one of these")
    results["nobody"].says("no_such_backend", "FAIL", "unknown")
    good = Command("--backends", "loopback,shm,cma,tcp").result()
    assert good.status == 0, [f for f in good.findings if f["level"] == "FAIL"]
    for backend in ("loopback", "shm", "cma", "tcp"):
        assert good.of(backend, "OK")["values"]["latency_us"] > 0
    assert good.of("copy kernel", "OK")["values"]["native"] is True


@pytest.mark.slow
def test_certificates(tmp_path: Path) -> None:
    """One that expires soon, one that has expired, a key that others can read; and ends that differ in TLS."""
    if shutil.which("openssl") is None:
        not_available("certificates are made with the command openssl")
    soon, late = (_certificate(tmp_path / name, ends) for name, ends in (("soon", 5), ("late", -5)))
    loose = _certificate(tmp_path / "loose", 400)
    os.chmod(json.loads(loose)["tls"]["key"], 0o644)
    given = [Command("--only", "security", "--security", text) for text in (soon, late, loose)]
    results = [command.result() for command in given]
    with far_end("--security", soon) as secured, far_end() as plain:
        ends = Command("--connect", secured), Command("--connect", secured, "--security", soon)
        unready = Command("--connect", plain, "--security", soon)
        ends[0].result().says("protocol", "FAIL", "speaks TLS", "--security")
        ends[1].result().says("TLS", "OK", "accepted")
        unready.result().says("TLS", "FAIL", "no TLS", "both ends")
    results[0].says("TLS", "WARN", "days", "sign a new one")
    results[1].says("TLS", "FAIL", "expired", "sign a new one")
    results[2].says("security", "FAIL", "0644", "chmod 600")


def _certificate(folder: Path, days: int) -> str:
    """A self-signed certificate that ends in that many days, as the option's text."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.timezone.utc)
    starts, ends = (f"{now + datetime.timedelta(days=n):%Y%m%d%H%M%SZ}" for n in (-10, days))
    (folder / "index").touch()
    (folder / "serial").write_text("01\n")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndir={folder}\ndatabase={folder}/index\nserial={folder}/serial\n"
        f"new_certs_dir={folder}\ndefault_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    key, request, cert = (str(folder / name) for name in ("key.pem", "request.pem", "cert.pem"))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key]
    made, valid = ["-in", request, "-out", cert], ["-startdate", starts, "-enddate", ends]
    for arguments in (
        ["req", "-new", *new_key, "-out", request, "-subj", "/CN=doctor"],
        ["ca", "-batch", "-selfsign", "-notext", "-config", str(folder / "ca.cnf"), "-keyfile", key, *made, *valid],
    ):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
    os.chmod(key, 0o600)
    return json.dumps({"tls": {"cert": cert, "key": key, "ca": cert}})
