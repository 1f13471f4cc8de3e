# SPDX-License-Identifier: Apache-2.0
"""A test that fails shows what the servers had to say meanwhile: an answer 500 alone does not tell why."""

from __future__ import annotations

import re
from pathlib import Path

#: What is worth showing of a server's log.
TELLING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|^\S*(Error|Exception|LLMException)\b|vllm_datadist")
#: Known, or a line of a traceback that is not its last.
SILENT = re.compile(r"libtcmalloc|libiomp|\b(WARNING|ERROR) \S+ \S+ \[\S+\] {2}")
LINES_SHOWN = 40
LINE_LENGTH = 400


class LogMarks:
    """How long each log in a directory tree was at some moment."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sizes = {path: path.stat().st_size for path in self._logs()}

    def since(self) -> str:
        """The telling lines of each log since then; "" if there are none."""
        parts = []
        for path in self._logs():
            lines = telling_lines(path, self._sizes.get(path, 0))
            if lines:
                parts.append("\n".join([f"--- {path.relative_to(self._root)}", *lines[-LINES_SHOWN:]]))
        return "\n".join(parts)

    def _logs(self) -> list[Path]:
        return sorted(path for path in self._root.rglob("*.log") if path.is_file() and "current" not in str(path))


def telling_lines(path: Path, first_byte: int) -> list[str]:
    """From `first_byte` on."""
    with open(path, "rb") as log:
        log.seek(first_byte)
        lines = log.read().decode(errors="replace").splitlines()
    return [line[:LINE_LENGTH] for line in lines if TELLING.search(line) and not SILENT.search(line)]
