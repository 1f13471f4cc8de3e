# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled half of this package: every `*.c` file here into one shared library, `_native.so`.

Two ways in. hatchling runs the hook of `get_build_hook` for wheels and editable installs; a developer runs
`python datadist_core/_copy/build_hook.py` and gets the library in place. Both compile in the source tree, into
a temporary name that then replaces the old library, so that processes which have the old one loaded go on with
it. The library is plain C behind ctypes: it knows no Python version, and chooses its instructions at run time,
so one wheel per platform is enough.

The library carries a number derived from the sources it was made from; the loader refuses one that does not
match the sources beside it. So a stale library is never used by mistake.

Without a compiler the package works, slowly: the hook warns, and the loader says so again at run time.

This file must import nothing of the project: hatchling runs it by path, before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "_native.so"
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-D_GNU_SOURCE")
COMPILE_TIMEOUT_S = 120.0


class NativeBuildError(Exception):
    """The library could not be built; the text names the compiler and its complaint."""


def source_files() -> list[Path]:
    """Everything the library is made of, in a stable order."""
    return sorted([*HERE.glob("*.c"), *HERE.glob("*.h")])


def source_number() -> int:
    """63 bits of a digest over names and contents of the sources: what `datadist_native_abi()` must return."""
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}\n".encode())
        digest.update(content)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def find_compiler() -> list[str]:
    """The command line that starts a C compiler: $CC, cc, gcc or clang."""
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    for candidate in filter(None, candidates):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise NativeBuildError("no C compiler found ($CC, cc, gcc, clang)")


def build(library: Path = LIBRARY) -> Path:
    """Compile the sources into `library` and return it. Raises NativeBuildError."""
    compiler = find_compiler()
    number = source_number()
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
            output = Path(scratch) / library.name
            _compile(compiler, number, output)
            os.replace(output, library)
    except OSError as error:
        raise NativeBuildError(f"cannot write {library}: {error}") from error
    return library


def _compile(compiler: list[str], number: int, output: Path) -> None:
    sources = [str(path) for path in source_files() if path.suffix == ".c"]
    command = [*compiler, *COMPILE_FLAGS, f"-DDATADIST_NATIVE_ABI={number}LL", "-o", str(output), *sources]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{compiler[0]} did not finish within {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}")


def wheel_platform_tag() -> str:
    """The platform this library runs on, as wheel file names spell it."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def get_build_hook() -> type[Any]:
    """What hatchling calls for its hook class; imports hatchling only here, as the loader uses this file too."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeBuildHook(BuildHookInterface[Any]):
        """Compiles before a wheel or an editable install is put together, and adds the library to it."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name == "wheel":
                _add_library(build_data, Path(self.root).resolve(), self.app.display_warning)

    return NativeBuildHook


def _add_library(build_data: dict[str, Any], root: Path, warn: Callable[[str], None]) -> None:
    try:
        library = build()
    except NativeBuildError as error:
        LIBRARY.unlink(missing_ok=True)  # a library of other sources must not slip into the wheel
        warn(f"datadist_core: no native copy kernel, transfers will be slow: {error}")
        return
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{wheel_platform_tag()}"
    # .gitignore hides *.so from the wheel; an artifact is taken along nevertheless.
    build_data["artifacts"].append("/" + library.relative_to(root).as_posix())


def main() -> int:
    """Build in place; for developers."""
    try:
        library = build()
    except NativeBuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"built {library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
