# SPDX-License-Identifier: Apache-2.0
"""The pages for users of llm_datadist: every program on them runs as it stands, and every test they name exists."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("llm_datadist*.md"))}
LIMIT_S = 200

PROGRAM = re.compile(r"^```python\n(# (\S+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)
ONE_LINE_DIFF = re.compile(r"^-(from .*)\n\+(from .*)$", re.MULTILINE)
TEST_NAME = re.compile(r"`(test_\w+)\.py(?:::(test_\w+))?`")
#: Between processes, with a listener on a fixed port: run by their own test.
PAIR = ("prompt.py", "decoder.py", "run_here.py")


def programs(page: str) -> dict[str, str]:
    return {name: text for text, name in PROGRAM.findall(PAGES[page])}


ALONE = [(page, name) for page in PAGES for name in programs(page) if name not in PAIR and not name.endswith("off.py")]


def written(page: str, folder: Path) -> Path:
    for name, text in programs(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(autouse=True)
def many_descriptors():
    """`ulimit -n`, as the page with 520 links asks for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_pages_are_there_and_alike() -> None:
    assert len(PAGES) == 2
    first, second = (set(programs(page)) for page in PAGES)
    assert first == second
    assert set(PAIR) < first


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), ALONE)
def test_programs_run(page: str, name: str, tmp_path: Path) -> None:
    args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", name] if name.startswith("test_") else [name]
    done = python(written(page, tmp_path), *args)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_script_runs_changed_and_unchanged(page: str, tmp_path: Path) -> None:
    folder = written(page, tmp_path)
    (before, after) = ONE_LINE_DIFF.findall(PAGES[page])[0]
    assert before in programs(page)["prompt.py"]
    (folder / "changed.py").write_text(programs(page)["prompt.py"].replace(before, after), encoding="utf-8")
    for prompt in (["changed.py"], ["run_here.py", "prompt.py"]):
        process = subprocess.Popen(
            [sys.executable, *prompt], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            process.stdout.readline()  # it listens
            done = python(folder, "run_here.py", "decoder.py")
            assert done.returncode == 0, done.stdout + done.stderr
            process.communicate("\n", timeout=30)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    named = set(TEST_NAME.findall(PAGES[page]))
    assert len(named) > 5
    for module, function in named:
        if f"# {module}.py" in PAGES[page]:
            continue  # a program on the page itself
        source = next(iter(ROOT.glob(f"*/tests/{module}.py")), None) or ROOT / "integration_tests" / f"{module}.py"
        assert source.exists(), f"{module}.py is named on {page}"
        assert not function or f"def {function}(" in source.read_text(encoding="utf-8"), f"{module}.py::{function}"
