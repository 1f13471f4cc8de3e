# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by the commands that docs/security.md tells users to run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import datadist_core

DOCS = Path(datadist_core.__file__).parent.parent / "docs" / "security.md"


def run_documented_commands(folder: Path) -> None:
    """Those of docs/security.md that make a secret, an authority and a certificate."""
    blocks = re.findall(r"```bash\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (script,) = [block for block in blocks if "openssl req -x509" in block]
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, capture_output=True, timeout=60)


def tls(folder: Path, authority: Path | None = None) -> str:
    ca = (authority or folder) / "ca.crt"
    return f'"tls": {{"cert": "{folder}/node.crt", "key": "{folder}/node.key", "ca": "{ca}"}}'
