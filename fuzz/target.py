# SPDX-License-Identifier: Apache-2.0
"""What a target is, and which there are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parent
NAMES = ("control", "link", "tcp", "packets", "tickets", "options")
#: With a mistake in it, for tests of the runner.
PLANTED = "planted"


class Target(Protocol):
    """A module `fuzz.targets.NAME`. It may also have `mutate(data, max_size, seed) -> bytes`."""

    def run(self, data: bytes) -> None:
        """One input. Catches the declared errors; whatever is raised is a finding."""

    def seeds(self) -> list[bytes]:
        """Inputs to begin with: at least one of each kind of message there is."""


def load(name: str) -> Target:
    module: Target = importlib.import_module(f"fuzz.targets.{name}")  # type: ignore[assignment]
    return module


def corpus_of(name: str) -> Path:
    return ROOT / "corpus" / name


def inputs_of(name: str) -> list[bytes]:
    """The kept inputs, then the seeds."""
    kept = [path.read_bytes() for path in sorted(corpus_of(name).glob("*"))]
    return [*kept, *load(name).seeds()]
