# SPDX-License-Identifier: Apache-2.0
"""The checksums' C source under the compiler's sanitizers, without AVX2, and on another processor than this one."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xxhash

from datadist_core._copy.build_hook import HERE
from datadist_core.tests.optional import not_available
from datadist_core.tests.test_copy_c import FLAGS, native, run

SOURCES = [Path(__file__).with_name("c") / "checksum_check.c", HERE / "checksum.c", HERE / "threads.c"]
#: As on a processor without it.
WITHOUT_AVX2 = "-D__builtin_cpu_supports(name)=0"


def build(compiler: str, target: Path, *flags: str) -> None:
    command = [compiler, *FLAGS, *flags, "-o", str(target), *map(str, SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        not_available("this compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stderr


@functools.cache
def number_of_the_library() -> int:
    over_all = 0
    for size in [*range(1, 1200), *range(1200, 70_000, 4999)]:
        data = (np.arange(size, dtype=np.int64) * 131 + size).astype(np.uint8)
        over_all = (over_all * 31 + xxhash.xxh3_64_intdigest(data)) % 2**64
    return over_all


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("-O3",), ("-O3", WITHOUT_AVX2), ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")],
    ids=["optimized", "plain", "address"],
)
def test_here(flags: tuple[str, ...], tmp_path: Path) -> None:
    build(native()[0], tmp_path / "check", *flags)
    done = run(str(tmp_path / "check"))
    assert (done.returncode, done.stdout) == (0, f"{number_of_the_library()}\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_on_aarch64(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        not_available("needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    build(compiler, tmp_path / "check", "-O3", "-static")
    done = run(emulator, str(tmp_path / "check"))
    assert (done.returncode, done.stdout) == (0, f"{number_of_the_library()}\n"), done.stdout + done.stderr
