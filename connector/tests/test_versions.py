# SPDX-License-Identifier: Apache-2.0
"""A vLLM version that was not tested is named once at start-up, and never stops an engine."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import vllm_datadist
from vllm_datadist.versions import READ, TESTED, series, version_warning, warn_if_untested

NEWEST = TESTED[-1]


@pytest.mark.parametrize("version", [*TESTED, f"{NEWEST}+cpu", f"{NEWEST}+cu130", NEWEST.removesuffix(".0") + ".7"])
def test_tested_versions_and_their_patches_are_silent(version: str) -> None:
    assert version_warning(version) is None


@pytest.mark.parametrize(
    "version", ["0.29.0", "0.99.1", "1.32.0", f"{NEWEST}.dev5+g123", f"{NEWEST}rc1", "0.1.dev1+gabc", "dev", ""]
)
def test_any_other_is_named_with_those_that_were_tested_and_a_remedy(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_untested(version, logging.getLogger("engine"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for said in (f"vLLM {version} was not tested", ", ".join(TESTED), f'pip install "vllm=={NEWEST}"'):
        assert said in record.getMessage()


@pytest.mark.parametrize("version", READ)
def test_a_version_whose_source_was_compared_says_so(version: str) -> None:
    assert series(version) not in map(series, TESTED), "tested end to end: no need to list it as read"
    assert "Its source has all that the connector uses" in str(version_warning(version))


def test_it_is_said_in_the_schedulers_process_only() -> None:
    """So once per engine, however many workers it has."""
    callers = []
    for path in Path(vllm_datadist.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "warn_if_untested(" in ast.unparse(node.body):
                callers.append((path.name, node.name))
    assert callers == [("build.py", "build_scheduler_side")]
