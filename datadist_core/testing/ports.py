# SPDX-License-Identifier: Apache-2.0
"""Ports for tests that have to be named before anybody listens there, or where nobody shall listen.

A port that the system has just given out, and got back, it may give to anybody next: every connection needs one. So
these are looked for outside the range from which it gives.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

#: Below Linux's default net.ipv4.ip_local_port_range, and where few services are.
_FIRST, _LAST = 10_000, 19_999
_ATTEMPTS = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """Free at `host` now, and taken by nobody who just wants any port."""
    chosen = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = chosen.randint(_FIRST, _LAST)
        with suppress(OSError), socket.socket(_family(host)) as probe:
            probe.bind((host, port))
            return port
    raise OSError(f"no free port of {host} in {_FIRST}..{_LAST}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
