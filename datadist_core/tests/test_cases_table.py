# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md: every known fault has a test, and every test that the page names exists.

A test names a fault in its own name (`test_b15_...`) or in its docstring (`B15`).
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
#: Of the faults that users of connectors of this kind have met.
NUMBERS = (1, 3, 5, 6, 7, 9, 11, 15, 17, 18, 21, 22, 23, 25, 26, 28, 31, 32, 33, 35, 37, 39, 40, 42, 44, 46, 48)
IDS = [f"B{number:02}" for number in NUMBERS]
TEST = re.compile(r"`(?P<path>[\w/]+\.py)::(?P<name>\w+)`")
ROW = re.compile(r"^\| (?P<id>B\d\d) \|(?P<text>.*)\|$", re.MULTILINE)


@functools.cache
def faults_by_test(path: Path) -> dict[str, set[str]]:
    """Test functions of a file, also in classes, and the faults that each of them names."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: _named(node) for node in functions if node.name.startswith("test_")}


def _named(node: ast.FunctionDef) -> set[str]:
    in_name = {f"B{number}" for number in re.findall(r"_b(\d\d)(?=_)", node.name)}
    return in_name | set(re.findall(r"\bB\d\d\b", ast.get_docstring(node) or ""))


def problems(page: str) -> list[str]:
    """What is wrong with the page."""
    rows = {row["id"]: row["text"] for row in ROW.finditer(page)}
    found = [f"{fault}: no row" for fault in IDS if fault not in rows]
    found += [f"{fault}: not one of the known faults" for fault in rows if fault not in IDS]
    found += [f"{match[0]}: no such test" for match in TEST.finditer(page) if not _exists(match)]
    for fault, text in rows.items():
        tests = [match for match in TEST.finditer(text) if _exists(match)]
        if not any(fault in faults_by_test(ROOT / match["path"])[match["name"]] for match in tests):
            found.append(f"{fault}: no test in its row names it")
    return found


def _exists(match: re.Match[str]) -> bool:
    path = ROOT / match["path"]
    return path.is_file() and match["name"] in faults_by_test(path)


def test_every_known_fault_has_a_test_and_every_named_test_exists() -> None:
    assert problems(PAGE.read_text()) == []


@pytest.mark.parametrize("fault", IDS)
def test_a_row_that_is_missing_is_missed(fault: str) -> None:
    page = PAGE.read_text()
    lines = [line for line in page.splitlines() if not line.startswith(f"| {fault} |")]
    assert problems("\n".join(lines)) == [f"{fault}: no row"]


def test_a_wrong_name_is_found() -> None:
    page = PAGE.read_text()
    first = next(TEST.finditer(page))
    for wrong in (f"`{first['path']}::test_renamed`", f"`datadist_core/tests/test_gone.py::{first['name']}`"):
        assert f"{wrong}: no such test" in problems(page.replace(first[0], wrong))


def test_a_test_of_another_fault_does_not_count() -> None:
    page = "\n".join(f"| {fault} | x | `{_path()}::test_a_wrong_name_is_found` |" for fault in IDS)
    assert problems(page) == [f"{fault}: no test in its row names it" for fault in IDS]


def _path() -> str:
    return str(Path(__file__).relative_to(ROOT))
