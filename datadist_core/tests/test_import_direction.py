# SPDX-License-Identifier: Apache-2.0
"""Imports go one way: errors, types -> config -> memory -> transfer -> wire -> link -> cache -> datadist.

So that every layer can be read, and tested, without those above it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import datadist_core

ROOT = Path(datadist_core.__file__).parent
PACKAGE = "datadist_core"

# Each may import itself and what stands before it. `services` and `cluster` are plain tables and values.
LAYERS = [
    ["errors", "types"],
    ["checks", "security", "settings", "config", "_copy", "services", "cluster", "forks"],
    ["memory"],
    ["transfer"],
    ["wire"],
    ["link"],
    ["cache"],
    ["parts"],
    ["datadist"],
    ["__init__"],
]
# Tools on top of everything: they may import any layer, and no layer may import them.
TOOLS = {"bench", "testing", "doctor", "__main__"}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Stricter than their rank.
NOT_FROM = {"wire": {"memory", "transfer"}, "_copy": {name for names in LAYERS[:2] for name in names} - {"_copy"}}
FOR_BACKENDS = (
    "transfer.backend",
    "transfer.plan",
    "transfer.item_copy",
    "memory",
    "security",
    "types",
    "errors",
    "_copy",
)
SERIALISERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True, slots=True)
class Import:
    """`module` imports `target`; both relative to the package, e.g. "memory.pool", unless `target` is foreign."""

    module: str
    target: str
    line: int
    ours: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """All imports in `source`, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            for alias in node.names:
                yield _import(module, f"{base}.{alias.name}", node.lineno)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *module.split(".")] if module != "__init__" else [PACKAGE, ""]
    parents = here[: len(here) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _import(module: str, target: str, line: int) -> Import:
    ours = target == PACKAGE or target.startswith(PACKAGE + ".")
    return Import(module, target[len(PACKAGE) + 1 :] if ours else target, line, ours)


@cache
def all_imports(with_tests: bool = False) -> tuple[Import, ...]:
    found: list[Import] = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "tests" and not with_tests:
            continue
        is_package = len(parts) > 1 and parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += imports_of(path.read_text(), module, is_package)
    return tuple(found)


def top(name: str) -> str:
    return name.split(".")[0]


def wrong_direction(imports: Iterable[Import]) -> list[str]:
    wrong = []
    for found in imports:
        module, target = top(found.module), top(found.target)
        if not found.ours or module == target or module in {"backends", *TOOLS}:
            continue
        if target not in RANK or RANK[target] > RANK[module] or target in NOT_FROM.get(module, ()):
            wrong.append(str(found))
    return wrong


def wrong_in_backends(imports: Iterable[Import]) -> list[str]:
    backends = {path.stem for path in (ROOT / "backends").glob("[!_]*.py")}
    return [
        str(found)
        for found in imports
        if found.ours and top(found.module) == "backends" and not _backend_may(found, backends)
    ]


def _backend_may(found: Import, backends: set[str]) -> bool:
    if top(found.target) == "backends":
        owner = _owner(found.target, backends)
        return owner is None or owner == _owner(found.module, backends)
    return any(found.target == allowed or found.target.startswith(allowed + ".") for allowed in FOR_BACKENDS)


def _owner(module: str, backends: set[str]) -> str | None:
    """The backend that `backends.NAME` or `backends._NAME_*` belongs to; None for what they share."""
    stem = module.split(".")[1]
    if not stem.startswith("_"):
        return stem
    return next((name for name in backends if stem[1:] == name or stem[1:].startswith(name + "_")), None)


def test_every_module_has_its_layer() -> None:
    tops = {top(found.module) for found in all_imports()}
    assert tops - RANK.keys() <= {"backends", *TOOLS}


def test_imports_go_one_way() -> None:
    assert wrong_direction(all_imports()) == []


def test_backends_import_only_the_contract() -> None:
    assert wrong_in_backends(all_imports()) == []


def test_nothing_builds_on_the_tools() -> None:
    users = [str(i) for i in all_imports() if i.ours and top(i.target) in TOOLS and top(i.module) not in TOOLS]
    assert users == []


def test_nothing_unsafe_is_deserialised() -> None:
    """B39."""
    assert [str(found) for found in all_imports() if not found.ours and top(found.target) in SERIALISERS] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memory.pool", "from ..transfer.plan import Batch"),
        ("memory.pool", "import datadist_core.cache.table"),
        ("memory.pool", "def f():\n    from datadist_core import datadist"),
        ("wire.codec", "from ..memory.grid import Grid"),
        ("wire.codec", "from ..transfer import plan"),
        ("errors", "from .config import LLMConfig"),
        ("transfer.engine", "from ..backends import tcp"),
        ("cache.table", "from ..testing import pair"),
        ("cache.table", "from ..bench import anything"),
        ("_copy", "from ..errors import LLMException"),
    ],
)
def test_wrong_direction_is_caught(module: str, source: str) -> None:
    assert wrong_direction(list(imports_of(source, module, is_package=module == "_copy"))) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("backends.tcp", "from .shm import ShmBackend"),
        ("backends._tcp_loop", "from . import shm"),
        ("backends.tcp", "from . import _shm_protocol"),
        ("backends.tcp", "from ..wire.codec import encode"),
        ("backends.tcp", "from ..transfer.engine import TransferEngine"),
        ("backends.tcp", "from ..cache import table"),
    ],
)
def test_wrong_import_of_a_backend_is_caught(module: str, source: str) -> None:
    assert wrong_in_backends(list(imports_of(source, module))) != []


def test_import_is_light() -> None:
    """Neither torch nor vLLM, and no backend that nobody asked for, is loaded by importing the package."""
    code = "import sys, datadist_core; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr
    modules = set(loaded.stdout.split())
    assert PACKAGE in modules
    heavy = {"torch", "vllm", "vllm_datadist", "pytest", "hypothesis", f"{PACKAGE}.testing", f"{PACKAGE}.backends.tcp"}
    assert modules & heavy == set()
