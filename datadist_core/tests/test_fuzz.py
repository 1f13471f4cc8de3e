# SPDX-License-Identifier: Apache-2.0
"""The fuzzing of `fuzz/` in short: what is kept is replayed, and each target is fuzzed for some seconds."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import datadist_core
from datadist_core.tests.optional import not_available
from fuzz import limits
from fuzz.target import NAMES, PLANTED, corpus_of

ROOT = Path(datadist_core.__file__).parent.parent
SECONDS_EACH = 2
BOUND_S = 550

#: Each target is a process of its own, which takes longest to start: more than a minute on a machine that is busy.
pytestmark = pytest.mark.timeout(600)


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a target makes ends that stay."""
    command = [sys.executable, "-m", "fuzz", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)


def need_atheris() -> None:
    if importlib.util.find_spec("atheris") is None:
        not_available('fuzzing needs atheris: pip install ".[fuzz]"')


@pytest.mark.slow
def test_kept_inputs_find_nothing() -> None:
    done = fuzz("--replay-all")
    assert done.returncode == 0, done.stderr[-5000:]
    for name in NAMES:
        assert name in done.stdout
        assert any(corpus_of(name).iterdir())


def test_corpus_is_small() -> None:
    files = [path for name in NAMES for path in corpus_of(name).iterdir()]
    assert len(files) <= 500
    assert sum(path.stat().st_size for path in files) <= 200 << 10


def test_limits_see_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_S", 0.02)
    try:
        with pytest.raises(limits.TooMuch, match="memory"):
            limits.limited(lambda data: bytes(2 * limits.MAX_BYTES_AT_ALL), b"small")
        with pytest.raises(limits.TooMuch, match="processor time"):
            limits.limited(lambda data: hashlib.pbkdf2_hmac("sha256", data, data, 400_000), b"small")
        limits.limited(lambda data: None, b"small")
    finally:
        tracemalloc.stop()  # it would slow down all tests behind this one


@pytest.mark.slow
def test_planted_mistake_is_found(tmp_path: Path) -> None:
    """Negative control: the runner sees an exception, says which, and its input shows it again."""
    need_atheris()
    done = fuzz(PLANTED, "--seconds", "60", "--work", str(tmp_path))
    assert done.returncode == 1
    assert "IndexError" in done.stdout
    [found] = (tmp_path / PLANTED).glob("finding-*")
    again = fuzz(PLANTED, "--replay", str(found))
    assert again.returncode == 1
    assert "IndexError" in again.stderr


@pytest.mark.slow
def test_some_seconds_of_each(tmp_path: Path) -> None:
    need_atheris()
    done = fuzz("--seconds", str(SECONDS_EACH * len(NAMES)), "--jobs", "2", "--work", str(tmp_path))
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.count("no finding") == len(NAMES)
    assert " 0 executions" not in done.stdout
