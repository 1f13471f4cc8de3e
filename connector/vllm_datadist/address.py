# SPDX-License-Identifier: Apache-2.0
"""Where a worker of P can be reached: what may stand in a ticket, and so what P may be configured to listen at."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_MAX_PORT = 65535
#: Of a name in the domain name system as text, with the dot that may end it.
_MAX_HOST = 254
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_IP_CHARACTERS = re.compile(r"[0-9A-Za-z:.%_-]+")


def address_error(host: Any, port: int) -> str:
    """Why nobody can listen there; "" if somebody may. Whether a name is known is not asked."""
    if not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST:
        return f"a host is a text of 1..{_MAX_HOST} characters"
    if not 0 < port <= _MAX_PORT:
        return f"a port is 1..{_MAX_PORT}"
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare.replace(".", "").isdigit():
        return "" if _is_ip(bare) else "that is no IPv4 or IPv6 address"
    return "" if bare == host and _HOST_NAME.fullmatch(host) else "that is no host name, IPv4 or IPv6 address"


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return _IP_CHARACTERS.fullmatch(text) is not None
