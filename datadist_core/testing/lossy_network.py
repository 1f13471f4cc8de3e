# SPDX-License-Identifier: Apache-2.0
"""A network with delay, loss and broken cables, between two network namespaces of this host.

It stands in for the kernel's netem, which many kernels lack: each namespace has a TUN device as its only way out, and
a process in between moves the IP packets. What the ends run is the real kernel's TCP, over real devices.

    with LossyNetwork(delay_s=0.02, loss=0.02) as network:
        a = RemoteObject(in_namespace, (network.namespaces[0], make_end, arguments), timeout_s)
        ...
        network.cut()

Needs root, iproute2 and /dev/net/tun: `why_unavailable` says what is missing. All of it goes with the block, and the
devices with the process that moves the packets, however that ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import Unreachable
from .parallel import WAIT_S
from .remote import RemoteObject

__all__ = ["ADDRESSES", "LossyNetwork", "PacketCounts", "enter_namespace", "in_namespace", "why_unavailable"]

ADDRESSES = ("10.231.8.1", "10.231.8.2")
"""Of the two ends."""

_TUN = "/dev/net/tun"
_NAMESPACES = Path("/run/netns")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20.0
_PRIORITY = -10
"""A busy host must not add delay and loss of its own."""
_MAX_PACKET_BYTES = 1 << 16
_MAX_QUEUED = 20_000
"""Packets under way in one direction; more are lost, as in any router."""


@dataclass(frozen=True, slots=True)
class PacketCounts:
    """Of one direction since the start."""

    delivered: int
    lost: int


def why_unavailable() -> str | None:
    """What this host lacks for a `LossyNetwork`, None if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (iproute2)"
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return f"a TUN device cannot be made: {error}"
    return None


def enter_namespace(name: str) -> None:
    """Move the calling thread, and those that it starts from now on, into a network namespace.

    Raises OSError.
    """
    descriptor = os.open(_NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(descriptor)


def in_namespace(name: str, make: Callable[..., object], arguments: tuple[Any, ...]) -> object:
    """`make(*arguments)` in a namespace; for `RemoteObject`, whose process has but one thread then."""
    enter_namespace(name)
    return make(*arguments)


class LossyNetwork:
    """Two namespaces, `ADDRESSES[0]` in the first and `ADDRESSES[1]` in the second, and what lies between them.

    Args:
        delay_s: of every packet, one way; a round trip takes twice that.
        loss: the part of all packets that vanishes, in either direction.
        seed: of the choice which.
        mtu_bytes: of both devices.

    Methods may be called from any thread. Raises Unreachable on entering where it cannot be made.
    """

    def __init__(self, delay_s: float = 0.0, loss: float = 0.0, seed: int = 1, mtu_bytes: int = 1500) -> None:
        self._arguments = (delay_s, loss, seed)
        self._mtu_bytes = mtu_bytes
        self.namespaces = tuple(f"ddl{os.getpid()}{end}" for end in "ab")
        self._forwarder: RemoteObject | None = None

    def __enter__(self) -> LossyNetwork:
        reason = why_unavailable()
        if reason is not None:
            raise Unreachable(f"no network with loss and delay here: {reason}")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def shape(self, delay_s: float, loss: float) -> None:
        """Change what happens to packets from now on."""
        self._asked("shape", delay_s, loss)

    def cut(self) -> None:
        """Move no packet any more: nobody is told, as if somebody had pulled the cable."""
        self._asked("set_cut", True)

    def heal(self) -> None:
        """Undo `cut`."""
        self._asked("set_cut", False)

    def counts(self) -> tuple[PacketCounts, PacketCounts]:
        """Of packets sent by the first end, and by the second."""
        first, second = self._asked("counts")
        return first, second

    def _asked(self, method: str, *arguments: Any) -> Any:
        if self._forwarder is None:
            raise Unreachable("the network is not up")
        return self._forwarder.call(method, *arguments)

    def _build(self) -> None:
        for name in self.namespaces:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        devices = tuple(f"{name}t" for name in self.namespaces)
        self._forwarder = RemoteObject(_Forwarder, (devices, *self._arguments), 2 * WAIT_S)
        for name, device, own, other in zip(self.namespaces, devices, ADDRESSES, reversed(ADDRESSES), strict=True):
            _ip("link", "set", device, "netns", name, "mtu", str(self._mtu_bytes))
            _ip("-n", name, "addr", "add", own, "peer", other, "dev", device)
            _ip("-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder = None
        for name in self.namespaces:
            subprocess.run(
                ["ip", "netns", "delete", name], check=False, capture_output=True, timeout=_COMMAND_TIMEOUT_S
            )


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        raise Unreachable(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")


@dataclass(slots=True)
class _Direction:
    """Packets from one device to the other. `queued`: (when it is due, packet), in that order."""

    source: int
    target: int
    random: random.Random
    queued: deque[tuple[float, bytes]] = field(default_factory=deque)
    delivered: int = 0
    lost: int = 0


class _Forwarder:
    """Makes the TUN devices and moves packets between them. Lives in a process of its own."""

    def __init__(self, devices: Sequence[str], delay_s: float, loss: float, seed: int) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        self._delay_s, self._loss, self._cut = delay_s, loss, False
        first, second = (_open_tun(device) for device in devices)
        self._directions = (
            _Direction(first, second, random.Random(seed)),
            _Direction(second, first, random.Random(seed + 1)),
        )
        threading.Thread(target=self._run, name="datadist-lossy-network", daemon=True).start()

    def shape(self, delay_s: float, loss: float) -> None:
        self._delay_s, self._loss = delay_s, loss

    def set_cut(self, cut: bool) -> None:
        self._cut = cut

    def counts(self) -> tuple[PacketCounts, PacketCounts]:
        first, second = (PacketCounts(d.delivered, d.lost) for d in self._directions)
        return first, second

    def _run(self) -> None:
        poll = select.poll()
        by_source = {direction.source: direction for direction in self._directions}
        for source in by_source:
            poll.register(source, select.POLLIN)
        while True:
            for source, _ in poll.poll(self._timeout_ms()):
                self._take(by_source[source])
            for direction in self._directions:
                self._deliver(direction)

    def _timeout_ms(self) -> float | None:
        due_s = [direction.queued[0][0] for direction in self._directions if direction.queued]
        return max(0.0, min(due_s) - time.monotonic()) * 1e3 if due_s else None

    def _take(self, direction: _Direction) -> None:
        """Everything that waits at the device."""
        while True:
            try:
                packet = os.read(direction.source, _MAX_PACKET_BYTES)
            except OSError:  # nothing more, or the device is not up
                return
            vanishes = direction.random.random() < self._loss or len(direction.queued) >= _MAX_QUEUED
            if vanishes or self._cut:
                direction.lost += 1
            else:
                direction.queued.append((time.monotonic() + self._delay_s, packet))

    def _deliver(self, direction: _Direction) -> None:
        now = time.monotonic()
        while direction.queued and direction.queued[0][0] <= now:
            _, packet = direction.queued.popleft()
            with suppress(OSError):  # a device that is down, or full, loses it
                os.write(direction.target, packet)
            direction.delivered += 1


def _open_tun(device: str) -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor
