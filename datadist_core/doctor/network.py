# SPDX-License-Identifier: Apache-2.0
"""Interfaces, the address that peers would use, and whether an address can be listened on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends._tcp_address import _ipv4_addresses, _ipv6_addresses
from ..checks import HostPort
from .findings import Finding, fail, note, ok, warn

_INTERFACES = Path("/sys/class/net")
_LEAST_USUAL_MTU = 1400
_LISTENING = "0A"
_SIOCGIFADDR = 0x8915
#: Nothing is sent there: connecting a datagram socket only asks the kernel for the route.
_FAR_AWAY = (("8.8.8.8", socket.AF_INET), ("2001:4860:4860::8888", socket.AF_INET6))


@dataclass(frozen=True, slots=True)
class Interface:
    """`speed_mbit` is None where the driver does not say."""

    name: str
    mtu_bytes: int
    state: str
    speed_mbit: int | None


def check_network(addresses: Sequence[HostPort]) -> Iterator[Finding]:
    """Args:
    addresses: to be tried to listen on.
    """
    yield _interfaces()
    yield _default_address()
    for address in addresses:
        yield from check_listen(address)
    if not addresses:
        yield from check_listen(HostPort("127.0.0.1", 0))


def _interfaces() -> Finding:
    found = [interface for _, name in socket.if_nameindex() if (interface := interface_of(name))]
    listed = "; ".join(f"{i.name} {i.state}, MTU {i.mtu_bytes}{_speed(i)}" for i in found)
    addresses = ", ".join(own_addresses()) or "none"
    return note("interfaces", f"{listed or 'none'}. Addresses: {addresses}")


def _default_address() -> Finding:
    host = default_host()
    if host is None:
        return warn(
            "default address",
            "there is no route to other hosts: peers elsewhere cannot be told an address that works",
            'on one host use 127.0.0.1; otherwise set the address that peers reach (listen_ip_info, vLLM: "host" in '
            "kv_connector_extra_config)",
        )
    name = interface_with(host)
    interface = interface_of(name) if name else None
    text = f"{host}{f' on {name}' if name else ''}: what peers are told if no host is set"
    if interface is not None and interface.mtu_bytes < _LEAST_USUAL_MTU:
        return warn(
            "default address",
            f"{text}; its MTU is only {interface.mtu_bytes} bytes, which costs throughput",
            "raise the MTU if the network allows it, or use another interface (set the host)",
            mtu_bytes=interface.mtu_bytes,
        )
    return ok("default address", text, host=host)


def default_host() -> str | None:
    """The address of this host on the way to others, as vLLM finds it; None without a route."""
    for target, family in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 80))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def own_addresses() -> list[str]:
    return sorted({*_ipv4_addresses(), *_ipv6_addresses()})


def interface_with(host: str) -> str | None:
    """The name of the interface that has an IPv4 address, or loopback for what begins with 127."""
    for _, name in socket.if_nameindex():
        if host in _addresses_of(name) or (name == "lo" and host.startswith("127.")):
            return name
    return None


def _addresses_of(name: str) -> list[str]:
    found = [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
        for line in _lines("/proc/net/if_inet6")
        if (words := line.split())[-1] == name
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(reply[20:24]))
    return found


def interface_of(name: str) -> Interface | None:
    try:
        folder = _INTERFACES / name
        mtu = int((folder / "mtu").read_text())
        state = (folder / "operstate").read_text().strip()
    except (OSError, ValueError):
        return None
    speed = None
    with contextlib.suppress(OSError, ValueError):
        speed = int((folder / "speed").read_text())
    up = "up" if state in ("up", "unknown") else state
    return Interface(name, mtu, up, speed if speed and speed > 0 else None)


def _speed(interface: Interface) -> str:
    return f", {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""


# -- listening


def check_listen(address: HostPort) -> Iterator[Finding]:
    """Really binds and listens for a moment."""
    host = "" if address.host == "*" else address.host
    try:
        found = socket.getaddrinfo(host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        yield fail("listen", f"{address}: {error}", "give an address of this host, or a name that has one")
        return
    for family, kind, protocol, _, place in found[:1]:
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(place)
                sock.listen(1)
            except OSError as error:
                yield _not_listening(address, error)
                return
            yield ok("listen", f"{address}: port {sock.getsockname()[1]} can be listened on")
    yield from _ephemeral(address.port)


def _not_listening(address: HostPort, error: OSError) -> Finding:
    text = f"{address} cannot be listened on: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return fail(
            "listen",
            f"{text}, by {user_of_port(address.port)}",
            f"end that process, or choose another port than {address.port} (0: any free one)",
            port=address.port,
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return fail("listen", f"{text}; this host has {', '.join(own_addresses())}", "listen on one of these")
    if error.errno == errno.EACCES:
        return fail("listen", text, "ports below 1024 need CAP_NET_BIND_SERVICE; choose a higher one")
    return fail("listen", text, "choose another address, or port 0")


def _ephemeral(port: int) -> Iterator[Finding]:
    """A fixed port among those that the system gives to outgoing connections may be gone at the next start."""
    words = [int(word) for line in _lines("/proc/sys/net/ipv4/ip_local_port_range") for word in line.split()]
    if port and len(words) == 2 and words[0] <= port <= words[1]:
        yield note(
            "listen",
            f"port {port} is one of those ({words[0]} to {words[1]}) that the system gives to outgoing connections: it "
            "may be taken at the next start",
            f"choose one outside, or sysctl net.ipv4.ip_local_reserved_ports={port}",
        )


def user_of_port(port: int) -> str:
    """Which process listens on a port, as far as this one may see."""
    inodes = {
        words[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in _lines(table)[1:]
        if (words := line.split())[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port
    }
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return f"process {process.name} ({_command(process)})"
    return "a process that this one may not see (another user, another container, or it is just closing)"


def _command(process: Path) -> str:
    with contextlib.suppress(OSError):
        return " ".join((process / "cmdline").read_text(errors="replace").split("\0")).strip()[:80]
    return "?"


def _holds(process: Path, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry)[8:-1] in inodes and os.readlink(entry).startswith("socket:["):
                    return True
    return False


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
