# SPDX-License-Identifier: Apache-2.0
"""Who may link: the shared secret, the files for TLS, and the limits for strangers. See docs/security.md.

Secret and TLS are off by default. The secret itself is never an option's value: options stand in command lines, logs
and error reports. It is read from a file or from the environment, once, and is in no repr and no text here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import ssl
import stat
from dataclasses import dataclass, field
from typing import Any

from .errors import ParamInvalid

#: Anybody who dials in can try one secret per attempt; only a short one could be guessed.
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
#: Nobody but the owner and the group. A group may read, as containers get their secrets that way.
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
_HOW = '{"secret_file": PATH} or {"secret_env": NAME}'


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: this end's certificate and its key, and the authority that signed those of all ends."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one listener of control connections.

    Attributes:
        connections: accepted ones that are open, in all.
        strangers: of those, the ones that have not proved yet who they are (without a secret: have not said hello).
    """

    connections: int = 8192
    strangers: int = 1024


@dataclass(frozen=True, slots=True)
class Security:
    """What `llm.Security` says. Immutable, thread-safe. `Security()` has everything off.

    Attributes:
        secret: what all ends know and nobody else; None: links are not authenticated by a secret.
        tls: None: connections are plain TCP.
    """

    secret: bytes | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    limits: Limits = Limits()

    @classmethod
    def parse(cls, text: str, option_name: str) -> Security:
        """From the JSON object in the option `option_name`; the files are read now.

        Raises:
            ParamInvalid: naming the option, the value (never the secret) and the remedy.
        """
        values = _object(text, option_name)
        _only(values, option_name, "secret_file", "secret_env", "tls", "limits")
        security = cls(_secret(values, option_name), _tls(values, option_name), _limits(values, option_name))
        try:
            security.server_context()
            security.client_context()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ParamInvalid(
                f"{option_name}: the files of {security.tls} cannot be used: {error}; give a certificate, its key "
                "without a passphrase, and the certificate of the authority, all in PEM form"
            ) from error
        return security

    # -- TLS

    def server_context(self) -> ssl.SSLContext | None:
        """For the accepting end of any connection; None without TLS. The peer has to show a certificate, too."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext | None:
        """For the dialling end of any connection; None without TLS."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Peers are dialled by addresses out of tickets, not by names. Whoever has a certificate of this authority is
        # one of us, so the authority must be one of our own.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.tls.ca)
        context.load_cert_chain(self.tls.cert, self.tls.key, password=_no_passphrase)
        return context

    # -- the secret

    def prove(self, role: str, *parts: bytes) -> bytes:
        """32 bytes that only who knows the secret can make of these parts for this role: HMAC-SHA256.

        The same parts give something else for another role, and so do other parts that look alike put together.

        Raises:
            ValueError: there is no secret.
        """
        if self.secret is None:
            raise ValueError("nothing can be proved without a secret")
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (b"datadist", role.encode(), *parts):
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()

    def check(self, proof: bytes, role: str, *parts: bytes) -> bool:
        """Whether `proof` is what `prove` makes of these; takes as long for any wrong proof."""
        return hmac.compare_digest(self.prove(role, *parts), proof)


def _object(text: str, name: str) -> dict[str, Any]:
    """Texts here never show what they were given: it may hold a secret by mistake."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ParamInvalid(f"{name} is not JSON; give an object like {_HOW}") from None
    if not isinstance(values, dict):
        raise ParamInvalid(f"{name} must be a JSON object like {_HOW}, not {type(values).__name__}")
    if "secret" in values:
        raise ParamInvalid(
            f'{name} has "secret": a secret in an option is seen in command lines, logs and process lists. '
            f"Put it into a file that only its owner can read, or into the environment, and set {_HOW}"
        )
    return values


def _only(values: dict[str, Any], name: str, *known: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ParamInvalid(f"{name} has unknown entries {', '.join(unknown)}; known are {', '.join(known)}")


def _text(values: dict[str, Any], key: str, name: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ParamInvalid(f"{name}: {key} must be a string that is not empty, not {value!r}")
    return value


def _secret(values: dict[str, Any], name: str) -> bytes | None:
    given = [key for key in ("secret_file", "secret_env") if key in values]
    if len(given) > 1:
        raise ParamInvalid(f"{name} has both secret_file and secret_env; give one")
    if not given:
        return None
    source = _text(values, given[0], name)
    where = f"{name}: {given[0]}={source!r}"
    secret = _read_private(source, where) if given[0] == "secret_file" else _from_environment(source, where)
    secret = secret.removesuffix(b"\n")
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ParamInvalid(
            f"{where} holds a secret of {len(secret)} bytes; it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
            "make one with: openssl rand -hex 32"
        )
    return secret


def _from_environment(variable: str, where: str) -> bytes:
    value = os.environ.get(variable)
    if value is None:
        raise ParamInvalid(f"{where} is not in the environment of this process; set it, or use secret_file")
    return os.fsencode(value)


def _read_private(path: str, where: str) -> bytes:
    """The file's content. Refused if other users may read or change it: then it is no secret."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # a FIFO must not stop us
    except OSError as error:
        raise ParamInvalid(f"{where}: {error.strerror}; name a file that this process may read") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ParamInvalid(f"{where} is not a regular file")
        if status.st_mode & _OTHERS:
            raise ParamInvalid(
                f"{where} has mode {stat.S_IMODE(status.st_mode):04o}: other users can read or change it; chmod 600 "
                "it, or 640 for a group (Kubernetes: defaultMode 0440)"
            )
        return file.read(MAX_SECRET_BYTES + 2)


def _tls(values: dict[str, Any], name: str) -> TlsFiles | None:
    if "tls" not in values:
        return None
    part = values["tls"]
    if not isinstance(part, dict):
        raise ParamInvalid(f'{name}: tls must be {{"cert": PATH, "key": PATH, "ca": PATH}}')
    _only(part, f"{name}: tls", "cert", "key", "ca")
    files = TlsFiles(*(_text(part, key, f"{name}: tls") for key in ("cert", "key", "ca")))
    _read_private(files.key, f"{name}: tls: key={files.key!r}")
    return files


def _limits(values: dict[str, Any], name: str) -> Limits:
    part = values.get("limits", {})
    if not isinstance(part, dict):
        raise ParamInvalid(f'{name}: limits must be {{"connections": NUMBER, "strangers": NUMBER}}')
    _only(part, f"{name}: limits", "connections", "strangers")
    for key, number in part.items():
        if type(number) is not int or not 1 <= number <= 1_000_000:
            raise ParamInvalid(f"{name}: limits: {key}={number!r} must be a whole number of 1..1000000")
    return Limits(**part)


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")  # else OpenSSL would ask for it at the terminal
