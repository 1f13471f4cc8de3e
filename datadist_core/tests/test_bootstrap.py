# SPDX-License-Identifier: Apache-2.0
"""`tools/bootstrap.py` and `.ci/run`: which extras are installed, and when. Nothing is really installed here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTS_ITS_ENVIRONMENT = '#!/bin/sh\necho "$@ extras=$DATADIST_EXTRAS all=$DATADIST_REQUIRE_ALL"\n'


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", ROOT / "tools" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The optional extras of every installation. What takes minutes is replaced."""
    made: list[tuple[str, ...]] = []

    def create(environment: object) -> None:
        python: Path = environment.python  # type: ignore[attr-defined]
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    monkeypatch.setattr(tool.Environment, "create", create)
    monkeypatch.setattr(tool.Environment, "install", lambda environment, extras: made.append(tuple(extras)))
    for name in ("remove_broken_companions", "verify"):
        monkeypatch.setattr(tool.Environment, name, lambda environment: None)
    monkeypatch.setattr(tool.Environment, "report_extras", lambda environment, extras: None)
    monkeypatch.setattr(tool, "check_machine", lambda: None)
    return made


def test_is_made_once(tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path) -> None:
    for _ in range(2):
        tool.bootstrap(tmp_path)
    assert installed == [()]


def test_extras_are_added_and_stay(tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path) -> None:
    for extras in ((), ("nixl",), ("nixl",), (), ("mooncake", "nixl"), ("mooncake",)):
        tool.bootstrap(tmp_path, extras)
    assert installed == [(), ("nixl",), ("nixl", "mooncake")]


def test_extras_stay_when_the_project_has_changed(
    tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.bootstrap(tmp_path, ("plot",))
    monkeypatch.setattr(tool, "fingerprint", lambda: "another")
    tool.bootstrap(tmp_path)
    assert installed == [("plot",), ("plot",)]


def test_stamp_of_an_earlier_version_counts(tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path) -> None:
    """It was the fingerprint alone."""
    tool.Environment(tmp_path).create()
    (tmp_path / ".bootstrap-stamp").write_text(tool.fingerprint() + "\n")
    tool.bootstrap(tmp_path)
    assert installed == []


def test_what_was_interrupted_is_made_again(
    tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(environment: object) -> None:
        raise tool.BootstrapError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(tool.Environment, "verify", fail)
        with pytest.raises(tool.BootstrapError):
            tool.bootstrap(tmp_path, ("nixl",))
    tool.bootstrap(tmp_path, ("nixl",))
    assert installed == [("nixl",), ("nixl",)]


@pytest.mark.parametrize("text", ["nixl,mooncake", " nixl  mooncake ", "nixl, mooncake,nixl", "nixl,mooncake,"])
def test_lists_of_extras(tool: ModuleType, text: str) -> None:
    assert tool.parse_extras(text) == ("nixl", "mooncake")


def test_extras_come_from_the_environment(
    tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATADIST_EXTRAS", "mooncake")
    assert tool.main(["--venv", str(tmp_path)]) == 0
    monkeypatch.delenv("DATADIST_EXTRAS")
    assert tool.main(["--venv", str(tmp_path), "--extras", "nixl"]) == 0
    assert installed == [("mooncake",), ("mooncake", "nixl")]


def test_unknown_extra_is_named(
    tool: ModuleType, installed: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--venv", str(tmp_path), "--extras", "nixl,nixel"]) == 1
    told = capsys.readouterr().err
    assert "nixel cannot be installed" in told
    assert "choose from nixl, mooncake, plot" in told
    assert installed == []


def test_every_optional_extra_is_one_of_the_project(tool: ModuleType) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra in (*tool.EXTRAS, *tool.OPTIONAL_EXTRAS):
        assert f"\n{extra} = [" in project
    assert set(tool.USED_BY_EXTRA) == set(tool.OPTIONAL_EXTRAS)


def test_extra_that_cannot_be_used_is_told(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = tool.Environment(tmp_path)
    environment.python = Path(sys.executable)
    monkeypatch.setitem(tool.USED_BY_EXTRA, "nixl", "datadist_no_such_module")
    monkeypatch.setitem(tool.USED_BY_EXTRA, "mooncake", "json")
    environment.report_extras(["nixl", "mooncake"])
    told = capsys.readouterr().out
    assert "nixl is installed but cannot be used here: ModuleNotFoundError: No module named" in told
    assert "mooncake is installed but" not in told


@pytest.fixture
def run_ci(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `.ci/run` where make, apt-get and python3 are stand-ins."""
    (tmp_path / "make").write_text(PRINTS_ITS_ENVIRONMENT)

    def run(python_rc: int, apt_rc: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / "python3").write_text(f"#!/bin/sh\nexit {python_rc}\n")
        (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho apt-get "$@"\nexit {apt_rc}\n')
        for name in ("make", "python3", "apt-get"):
            (tmp_path / name).chmod(0o755)
        env = {key: value for key, value in os.environ.items() if key != "PYTHON"}
        env["PATH"] = f"{tmp_path}:{env['PATH']}"
        return subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=120)

    return run


def test_ci_installs_the_engines_and_lets_nothing_be_skipped(
    run_ci: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_ci(python_rc=0, apt_rc=1)
    lines = [line for line in done.stdout.splitlines() if "extras=" in line]
    suffix = "extras=nixl,mooncake,plot,fuzz all=1"
    assert lines == [f"{target} {suffix}" for target in ("venv", "lint", "test")], done.stderr


@pytest.mark.parametrize("apt_rc", [0, 100])
def test_ci_goes_on_without_system_packages(
    run_ci: Callable[..., subprocess.CompletedProcess[str]], apt_rc: int
) -> None:
    """Every library is missing here. Whether apt can bring them or not: the tests decide."""
    done = run_ci(python_rc=1, apt_rc=apt_rc)
    assert done.returncode == 0
    assert "test extras=" in done.stdout
    assert ("install -y --no-install-recommends libibverbs1 libnuma1 libcurl4" in done.stdout) is (apt_rc == 0)
    assert ("WARNING: could not install" in done.stderr) is (apt_rc != 0)
