# SPDX-License-Identifier: Apache-2.0
"""The pages for users of llm_datadist: every program on them runs as it stands, and every test they name exists."""

from __future__ import annotations

import ast
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
#: What is told to people, in each page's language.
TELLS = ("print", "input", "SystemExit")
TEST_NAME = re.compile(r"`(test_\w+)\.py(?:::(test_\w+))?`")
#: Between processes, with a listener on a fixed port: run by their own test.
PAIR = ("prompt.py", "decoder.py", "run_here.py")


def programs(page: str) -> dict[str, str]:
    return {name: text for text, name in PROGRAM.findall(PAGES[page])}


#: The other pages have the same programs.
PAGE = next(iter(PAGES))
ALONE = [name for name in programs(PAGE) if name not in PAIR and not name.endswith("off.py")]


class WithoutTexts(ast.NodeTransformer):
    """A program less what it says to people: all that may differ between the pages."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in TELLS:
            parts = [part for arg in node.args for part in (arg.values if isinstance(arg, ast.JoinedStr) else [arg])]
            node.args = [part for part in parts if not isinstance(part, ast.Constant)]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # a docstring


def code(program: str) -> str:
    return ast.dump(WithoutTexts().visit(ast.parse(program)), indent=1)


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
    first, second = ({name: code(text) for name, text in programs(page).items()} for page in PAGES)
    assert first == second
    assert set(PAIR) < set(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_programs_run(name: str, tmp_path: Path) -> None:
    args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", name] if name.startswith("test_") else [name]
    done = python(written(PAGE, tmp_path), *args)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_script_runs_changed_and_unchanged(tmp_path: Path) -> None:
    folder = written(PAGE, tmp_path)
    assert len({tuple(ONE_LINE_DIFF.findall(text)) for text in PAGES.values()}) == 1
    (before, after) = ONE_LINE_DIFF.findall(PAGES[PAGE])[0]
    assert before in programs(PAGE)["prompt.py"]
    (folder / "changed.py").write_text(programs(PAGE)["prompt.py"].replace(before, after), encoding="utf-8")
    for prompt in (["changed.py"], ["run_here.py", "prompt.py"]):
        process = subprocess.Popen(
            [sys.executable, *prompt], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            process.stdout.readline()  # it listens
            done = python(folder, "run_here.py", "decoder.py")
            assert done.returncode == 0, done.stdout + done.stderr
            process.communicate("\n", timeout=100)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait(30)


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
