# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md: every line has an answer, every test that it names exists, every version is a listed one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from vllm_datadist.versions import READ, TESTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
TEST = re.compile(r"`(?P<path>[\w/]+\.py)::(?P<name>\w+)`")
VERSION_ROW = re.compile(r"^\| (?P<version>\d+\.\d+\.\d+) \| (?P<how>[\w ]+) \|", re.MULTILINE)
ROW = re.compile(r"^\| (?P<line>[^|]+?) \| (?P<how>end to end|unit|refused|open) \|(?P<text>[^|]*)\|$", re.MULTILINE)
HOW = {"tested with servers": TESTED, "source compared": READ}
#: What the page must answer, by section.
LINES = {
    "Modes": (
        "pull",
        "push, P asked first",
        "push, D asked first",
        "push, both asked at once",
        "push, layer by layer while P computes",
        "push of the tail that D lacks",
        "mode by configuration, or by request",
        "trace of compute and transfer",
    ),
    "Backends": ("shm", "tcp", "cma", "nixl", "mooncake", "hixl", "KV cache in device memory (GPU)"),
    "Shapes of P and D": (
        "equal shapes",
        "tensor parallel, P smaller than D",
        "tensor parallel, P larger than D",
        "tensor parallel above the number of KV heads",
        "pipeline parallel on P",
        "data parallel",
        "blocks of 32 at P, 64 at D",
        "blocks of 64 at P, 32 at D",
        "head-major and token-major blocks",
        "all layers of a block side by side (cross-layer blocks)",
        "different numbers of blocks",
        "shapes that no plan can pair",
        "context parallel",
    ),
    "Kinds of cache": (
        "full attention",
        "MLA",
        "sliding window, hybrid groups",
        "chunked local attention",
        "Mamba-like state",
        "layers that share a KV cache",
        "fp8 KV cache",
        "speculative decoding by n-gram",
        "speculative decoding with draft layers",
        "LoRA",
        "prefix cache at D, at P, at both",
        "multimodal inputs",
    ),
    "Life of a request": (
        "several sequences (n > 1)",
        "abort at every stage",
        "preemption at P",
        "preemption at D",
        "client gone before D admits",
        "D rejects",
        "streaming",
        "priorities",
        "async scheduling",
        "chunks of 1 to 33 tokens",
        "prompts partly recomputed",
        "kv_load_failure_policy fail",
        "kv_load_failure_policy recompute",
        "MultiConnector, both orders",
        "kv_both in both directions, turn after turn",
    ),
    "Many engines": (
        "a P that D has never seen",
        "P or D added or removed",
        "draining (SIGTERM)",
        "role switch of a running engine",
        "2P2D behind vllm-router under load",
    ),
}


@functools.cache
def _tests_in(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}


def problems(page: str) -> list[str]:
    """What is wrong with the page."""
    found = [f"{match[0]}: no such test" for match in TEST.finditer(page) if not _exists(match)]
    shown = {row["version"]: row["how"] for row in VERSION_ROW.finditer(page)}
    listed = {version: how for how, versions in HOW.items() for version in versions}
    found += [f"{version}: is {shown.get(version)} on the page, {how} in versions.py" for version, how in
              listed.items() if shown.get(version) != how]  # fmt: skip
    found += [f"{version}: not in versions.py" for version in shown if version not in listed]
    for section, lines in LINES.items():
        found += _problems_of_section(section, lines, page)
    return found


def _problems_of_section(section: str, lines: tuple[str, ...], page: str) -> list[str]:
    _, _, rest = page.partition(f"### {section}\n")
    rows = {row["line"]: row for row in ROW.finditer(rest.partition("\n### ")[0])}
    found = [f"{section}: no row {line!r}, or none that says how" for line in lines if line not in rows]
    found += [f"{section}: {line!r} is not a line that was asked for" for line in rows if line not in lines]
    for line, row in rows.items():
        paths = [match["path"] for match in TEST.finditer(row["text"])]
        with_servers = any(path.startswith("integration_tests/") for path in paths)
        if row["how"] == "end to end" and not with_servers:
            found.append(f"{section}: {line!r} is end to end, but no test with servers is named")
        if row["how"] in ("unit", "refused") and not paths:
            found.append(f"{section}: {line!r} is {row['how']}, but no test is named")
    return found


def _exists(match: re.Match[str]) -> bool:
    return match["name"] in _tests_in(ROOT / match["path"])


def test_every_line_is_answered_and_every_named_test_and_version_exists() -> None:
    assert problems(PAGE.read_text()) == []


@pytest.mark.parametrize(
    ("text", "other", "wanted"),
    [
        ("| full attention |", "| full attentoin |", "no row 'full attention'"),
        ("::test_prompt_lengths`", "::test_prompt_length`", "test_prompt_length`: no such test"),
        (f"| {TESTED[0]} | tested", f"| {TESTED[0]} | rested", f"{TESTED[0]}: is rested"),
        (f"| {READ[0]} |", "| 9.99.0 |", "9.99.0: not in versions.py"),
        ("integration_tests/test_exactness.py::", "test_exactness.py::", "'full attention' is end to end, but no test"),
    ],
)
def test_negative_control_what_is_wrong_on_the_page_is_found(text: str, other: str, wanted: str) -> None:
    page = PAGE.read_text()
    assert text in page
    assert any(wanted in problem for problem in problems(page.replace(text, other)))
