# SPDX-License-Identifier: Apache-2.0
"""The files that the option `security` names: whether they can be used, who can read them, how long they are valid."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import suppress

from ..errors import ParamInvalid
from ..security import Security
from .findings import Finding, fail, note, ok, warn

_SOON_DAYS = 30
_DAY_S = 86400
_ROUNDS = 8


def check_security(text: str) -> Iterator[Finding]:
    """Args:
    text: the option's value. What it says is only read.
    """
    try:
        security = Security.parse(text, "security")
    except ParamInvalid as error:
        yield fail("security", str(error), "see docs/security.md")
        return
    if security.secret is None:
        yield warn(
            "secret",
            "none: whoever reaches the port may link",
            'set {"secret_file": PATH} at both ends, or keep strangers off the network',
        )
    else:
        yield ok("secret", f"{len(security.secret)} bytes, readable by its owner and group at most")
    if security.tls is None:
        yield note("TLS", "off: control and tcp data can be read on the way")
    else:
        yield _certificate(security)


def _certificate(security: Security) -> Finding:
    """By a handshake with ourselves: what a peer would check is checked here."""
    try:
        shown = _shake_hands(security)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        return fail(
            "TLS",
            f"the certificate is not accepted by its own authority: {reason}",
            "sign a new one with the authority in `ca`, valid from now on; if it is not valid yet, set the clock",
        )
    ends = str(shown.get("notAfter", ""))
    days = (ssl.cert_time_to_seconds(ends) - time.time()) / _DAY_S
    text = f"the certificate is accepted by the authority and valid until {ends} ({days:.0f} days)"
    if days < _SOON_DAYS:
        return warn("TLS", text, "sign a new one in time: links made after that day fail", days=days)
    return ok("TLS", text, days=days)


def _shake_hands(security: Security) -> dict[str, object]:
    """Our own certificate, as the accepting end sees it. Raises ssl.SSLError."""
    server_context, client_context = security.server_context(), security.client_context()
    if server_context is None or client_context is None:
        return {}
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_side=False)
    server = server_context.wrap_bio(up, down, server_side=True)
    for _ in range(_ROUNDS):
        for end in (client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return dict(server.getpeercert() or {})
