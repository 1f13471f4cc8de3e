# SPDX-License-Identifier: Apache-2.0
"""The C sources of the kernel under the compiler's sanitizers, and on another processor than this one.

`c/copy_check.c` copies with several threads and helpers and compares all bytes; a race, an access out of bounds or
undefined behaviour ends it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from datadist_core._copy.build_hook import HERE, find_compiler
from datadist_core.tests.optional import not_available

CHECK = Path(__file__).with_name("c") / "copy_check.c"
SOURCES = [HERE / name for name in ("kernel.c", "items.c", "threads.c")]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-DDATADIST_NATIVE_ABI=1", "-pthread", "-Wall", "-Wextra", "-Werror"]
RUN_TIMEOUT_S = 240


def build(compiler: list[str], target: Path, *flags: str, sources: list[Path] = SOURCES) -> None:
    command = [*compiler, *FLAGS, *flags, "-o", str(target), str(CHECK), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        not_available("this compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stderr


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # Sanitizers must be loaded first. vLLM, once imported in this process, has its children preload other libraries.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, env=env)


def native() -> list[str]:
    if shutil.which("gcc") is None:
        not_available("needs gcc")
    return find_compiler()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("-O3",),
        ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        ("-O1", "-g", "-fsanitize=thread"),
    ],
    ids=["optimized", "address", "thread"],
)
def test_here(flags: tuple[str, ...], tmp_path: Path) -> None:
    build(native(), tmp_path / "check", *flags)
    done = run(str(tmp_path / "check"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
    assert "WARNING" not in done.stderr


@pytest.mark.slow
def test_on_aarch64(tmp_path: Path) -> None:
    """In an emulator: what the processors of Ascend hosts would run."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        not_available("needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    build([compiler], tmp_path / "check", "-O3", "-static")
    done = run(emulator, str(tmp_path / "check"))
    assert (done.returncode, done.stdout) == (0, "variant 0\nok\n"), done.stderr


@pytest.mark.slow
def test_a_kernel_that_copies_wrongly_is_seen(tmp_path: Path) -> None:
    """One byte less per item is enough."""
    broken = tmp_path / "items.c"
    text = (HERE / "items.c").read_text()
    assert text.count("run * plan->bytes_per_item)") == 1
    broken.write_text(text.replace("run * plan->bytes_per_item)", "run * plan->bytes_per_item - 1)"))
    build(native(), tmp_path / "check", "-O3", f"-I{HERE}", sources=[SOURCES[0], broken, SOURCES[2]])
    assert run(str(tmp_path / "check")).returncode == 1
