# SPDX-License-Identifier: Apache-2.0
"""The tcp backend under TLS for the conformance suite, and certificates to run it with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from datadist_core.backends.tcp import TcpBackend
from datadist_core.security import Security, TlsFiles
from datadist_core.tests.pki import run_documented_commands
from datadist_core.transfer.backend import BackendContext


class TlsTcpBackend(TcpBackend):
    """Takes the directory with the files as its option `files`, so that it can be made by name in a child."""

    def open(self, context: BackendContext) -> None:
        options = dict(context.options)
        directory = Path(options.pop("files"))
        super().open(replace(context, options=options, security=Security(tls=tls_files(directory))))


def tls_files(directory: Path) -> TlsFiles:
    return TlsFiles(*(str(directory / name) for name in ("node.crt", "node.key", "ca.crt")))


def make_files(directory: Path) -> Path:
    """A new authority, and a certificate that it has signed. Returns the directory."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command")
    directory.mkdir(parents=True, exist_ok=True)
    run_documented_commands(directory)
    return directory
