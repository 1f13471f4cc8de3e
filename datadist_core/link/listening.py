# SPDX-License-Identifier: Apache-2.0
"""Where one end accepts links: its own address (`listen_ip_info`, which may move), and those of its communicators."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..checks import HostPort
from ..errors import ParamInvalid
from ..wire.accepting import Listener
from ..wire.channel import Channel
from ..wire.control_loop import ControlLoop


@dataclass(slots=True)
class _Shared:
    listener: Listener
    users: set[int] = field(default_factory=set)


class Listeners:
    """All listeners of one end. Thread-safe. What was accepted stays when a listener is closed.

    `before_listening` is told every host before links are accepted there: the first peer, too, must find the data path.
    """

    def __init__(
        self, loop: ControlLoop, accept: Callable[[Channel], None], before_listening: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._accept = accept
        self._before_listening = before_listening
        self._lock = threading.Lock()
        self._own: Listener | None = None
        self._shared: list[_Shared] = []

    @property
    def address(self) -> HostPort | None:
        """The end's own address, with the real port."""
        own = self._own
        return None if own is None else own.address

    def move(self, address: HostPort | None) -> None:
        """Listen there instead of at the own address so far, or nowhere.

        ParamInvalid naming the address if it cannot be bound; then the old listener is as it was.
        """
        with self._lock:
            old = self._own
            if old is not None and old.address == address:
                return
            if address is not None and old is not None and old.address.port == address.port:
                self._swap(address, old)
                return
            self._own = None if address is None else self._listen(address)
            if old is not None:
                self._loop.close_listener(old)

    def open(self, user: int, address: HostPort) -> HostPort:
        """Listen there (port 0: anywhere) for a user, unless this end does already.

        Returns where it can be reached. ParamInvalid if the address cannot be bound.
        """
        with self._lock:
            if self._own is not None and _covers(self._own.address, address):
                return HostPort(address.host, self._own.address.port)
            shared = next((s for s in self._shared if _covers(s.listener.address, address)), None)
            if shared is None:
                shared = _Shared(self._listen(address))
                self._shared.append(shared)
            shared.users.add(user)
            return shared.listener.address

    def release(self, user: int) -> None:
        """That user needs none any more."""
        with self._lock:
            for shared in self._shared:
                shared.users.discard(user)
            unused = [shared for shared in self._shared if not shared.users]
            self._shared = [shared for shared in self._shared if shared.users]
        for shared in unused:
            self._loop.close_listener(shared.listener)

    def _listen(self, address: HostPort) -> Listener:
        self._before_listening("" if address.host == "*" else address.host)
        return self._loop.listen(address, self._accept)

    def _swap(self, address: HostPort, old: Listener) -> None:
        """To the same port under another name of the host: the old listener may be what stands in the way."""
        self._loop.close_listener(old)
        self._own = None
        try:
            self._own = self._listen(address)
        except ParamInvalid:
            self._own = self._listen(old.address)
            raise


def _covers(listening: HostPort, wanted: HostPort) -> bool:
    """Whether who listens there is reached at `wanted` (its port 0 stands for any)."""
    if wanted.port not in (0, listening.port):
        return False
    if listening.host in ("", "*"):
        return True
    try:
        host, other = ipaddress.ip_address(listening.host), ipaddress.ip_address(wanted.host)
    except ValueError:
        return False
    return host == other or (host.is_unspecified and host.version == other.version)
