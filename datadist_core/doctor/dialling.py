# SPDX-License-Identifier: Apache-2.0
"""The way to a peer's control port, step by step: name, TCP connection, who speaks there."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..checks import HostPort
from ..security import Security
from ..wire.codec import MAGIC, PREAMBLE
from ..wire.messages import PROTOCOL_VERSION
from .findings import Finding, fail, ok, warn
from .network import interface_of, interface_with

#: An end of ours speaks first; who says nothing for this long waits for us to speak.
_SILENCE_S = 3.0
_SMALL_SEGMENT_BYTES = 1200
_FAR_S = 0.05
_HTTP_QUESTION = b"GET / HTTP/1.0\r\nHost: datadist-doctor\r\n\r\n"
_WHERE = (
    "give the port at which the peer's LLMDataDist listens: listen_ip_info; with vLLM the workers' log lines name it, "
    "and so do tickets (kv_transfer_params: remote_host, remote_port)"
)


@dataclass(slots=True)
class Dialled:
    """What has been learned on the way. `speaks`: whether an end of ours, of our version, answers there."""

    speaks: bool = False
    local_host: str = ""
    remote_host: str = ""
    connect_s: float = 0.0


def check_dial(address: HostPort, security: Security, timeout_s: float, learned: Dialled) -> Iterator[Finding]:
    """Findings as they come, each step only if the one before went well."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield fail("name", f"{address.host!r} has no address here: {error}", "check the spelling, DNS, or /etc/hosts")
        return
    target = str(found[0][4][0])
    if target != address.host:
        yield ok("name", f"{address.host} is {', '.join(dict.fromkeys(str(place[4][0]) for place in found))}")
    try:
        sock, learned.connect_s = _connected(address, timeout_s)
    except OSError as error:
        yield _no_connection(address, error, timeout_s)
        return
    with sock:
        learned.local_host, learned.remote_host = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        yield from _path(address, sock, learned.connect_s)
        yield from _who_speaks(address, sock, security, timeout_s, learned)


def _connected(address: HostPort, timeout_s: float) -> tuple[socket.socket, float]:
    started = time.perf_counter()
    sock = socket.create_connection((address.host, address.port), timeout_s)
    return sock, time.perf_counter() - started


def _no_connection(address: HostPort, error: OSError, timeout_s: float) -> Finding:
    if isinstance(error, ConnectionRefusedError):
        return fail(
            "connection",
            f"{address} refuses connections: the host is there, but nothing listens on that port at that address",
            f"start the peer; {_WHERE}. An end that listens on 127.0.0.1 cannot be reached from other hosts: set its "
            "host to an address that they reach",
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return fail(
            "connection",
            f"{address} does not answer at all within {timeout_s:g} s: packets are dropped on the way, or no host has "
            "this address",
            "allow this TCP port in the firewall (also the cloud's security groups and Kubernetes network policies) "
            "from this host to the peer, and check the address",
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return fail(
            "connection",
            f"{address}: {error.strerror}: this host has no way there",
            "check the address, the routes (ip route get ADDRESS) and whether both ends are in the same network",
        )
    return fail("connection", f"{address}: {error}", f"check the address; {_WHERE}")


def _path(address: HostPort, sock: socket.socket, connect_s: float) -> Iterator[Finding]:
    local = str(sock.getsockname()[0])
    text = f"TCP connection to {address} in {connect_s * 1e3:.2f} ms, from {local}"
    values = {"connect_ms": connect_s * 1e3}
    if connect_s > _FAR_S:
        yield warn(
            "connection",
            f"{text}: far away, or a packet was lost",
            'one tcp stream moves at most one window per round trip: set {"tcp": {"streams": 4}} where one dials',
            **values,
        )
    else:
        yield ok("connection", text, **values)
    yield _mtu(sock, local)


def _mtu(sock: socket.socket, local: str) -> Finding:
    segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    name = interface_with(local)
    interface = interface_of(name) if name else None
    text = f"segments of {segment} bytes" + (f"; {name} has MTU {interface.mtu_bytes}" if interface else "")
    values = {"segment_bytes": segment}
    if segment < _SMALL_SEGMENT_BYTES:
        return warn(
            "MTU",
            f"{text}: the path carries small packets only, which costs throughput and processor time",
            "raise the MTU of the interfaces and tunnels between the two ends (1500, or 9000 where all of it allows)",
            **values,
        )
    return ok("MTU", text, **values)


def _who_speaks(
    address: HostPort, sock: socket.socket, security: Security, timeout_s: float, learned: Dialled
) -> Iterator[Finding]:
    if security.tls is not None:
        yield from _speaks_tls(address, sock, security, timeout_s, learned)
        return
    head = _first_bytes(sock)
    if head:
        yield _named(head, learned)
    elif _offers_tls(address, timeout_s):
        yield fail(
            "protocol",
            f"{address} speaks TLS, and this end was not told to",
            'give --security \'{"tls": {"cert": PATH, "key": PATH, "ca": PATH}}\' with files of the same authority',
        )
    else:
        yield _silent(address, timeout_s)


def _speaks_tls(
    address: HostPort, sock: socket.socket, security: Security, timeout_s: float, learned: Dialled
) -> Iterator[Finding]:
    context = security.client_context()
    if context is None:
        return
    sock.settimeout(timeout_s)
    try:
        secured = context.wrap_socket(sock)
    except ssl.SSLCertVerificationError as error:
        yield fail(
            "TLS",
            f"the peer's certificate is not accepted here: {error.verify_message}",
            "both ends need certificates of the authority in `ca`, valid now; check the clocks",
        )
        return
    except OSError as error:
        yield fail(
            "TLS",
            f"no TLS at {address}: {error}",
            "the peer does not use TLS, or another authority: set the same `tls` at both ends",
        )
        return
    with secured:
        yield ok("TLS", f"{secured.version()}, the peer's certificate is accepted")
        yield _named(_first_bytes(secured), learned)


def _first_bytes(sock: socket.socket) -> bytes:
    """The first eight bytes that the other side says by itself."""
    head = b""
    deadline = time.monotonic() + _SILENCE_S
    with contextlib.suppress(OSError):
        while len(head) < len(PREAMBLE) and (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(len(PREAMBLE) - len(head))
            if not data:
                break
            head += data
    return head


def _named(head: bytes, learned: Dialled) -> Finding:
    if not head.startswith(MAGIC) or len(head) < len(PREAMBLE):
        return fail("protocol", f"something else listens there; it says {head!r}", _WHERE)
    (version,) = struct.unpack("<H", head[len(MAGIC) : len(PREAMBLE)])
    if version != PROTOCOL_VERSION:
        return fail(
            "protocol",
            f"the peer speaks version {version} of the control protocol, this end version {PROTOCOL_VERSION}",
            "install the same release of vllm-datadist on both",
            peer_version=version,
            own_version=PROTOCOL_VERSION,
        )
    learned.speaks = True
    return ok("protocol", f"an end of ours, version {version} of the control protocol", peer_version=version)


def _silent(address: HostPort, timeout_s: float) -> Finding:
    """Who waits for us to speak is asked as a web server is."""
    answer = b""
    with contextlib.suppress(OSError):
        sock, _ = _connected(address, timeout_s)
        with sock:
            sock.settimeout(_SILENCE_S)
            sock.sendall(_HTTP_QUESTION)
            answer = sock.recv(64)
    if answer.startswith(b"HTTP/"):
        return fail(
            "protocol",
            f"an HTTP server listens at {address}, perhaps vLLM's API or the router",
            f"that is another port: {_WHERE}",
        )
    said = f"answers {answer!r}" if answer else "says nothing"
    return fail(
        "protocol",
        f"whoever listens at {address} {said}: no end of ours, or one that is stopped or refuses this host",
        f"{_WHERE}. If the port is right: is the process stopped (SIGSTOP, debugger), or at its limit of connections?",
    )


def _offers_tls(address: HostPort, timeout_s: float) -> bool:
    """Whether the other side speaks TLS. No certificate is checked, and nothing is sent but a greeting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        sock, _ = _connected(address, timeout_s)
        with sock:
            sock.settimeout(_SILENCE_S)
            with context.wrap_socket(sock):
                return True
    except OSError:
        return False
