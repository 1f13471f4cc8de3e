# SPDX-License-Identifier: Apache-2.0
"""The copy kernel: exact bytes and nothing beside them, for every instruction set, and a build that cannot go stale."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import datadist_core._copy as copy_package
from datadist_core._copy import build_hook as hook
from datadist_core._copy import native_library, scatter_copy

CopyFunction = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
CANARY = 0xEE
# Around every boundary the kernel knows: a line, a step, the smallest streamed range, a page.
SIZES = [0, 1, 7, 63, 64, 65, 255, 256, 257, 511, 512, 513, 575, 576, 1023, 4095, 4096, 4097, 65536, 70001]


@pytest.fixture(autouse=True)
def _forget_library() -> Iterator[None]:
    yield
    native_library.cache_clear()


def variant(number: int) -> CopyFunction:
    library = native_library()
    if library is None:
        pytest.skip("no native library here")
    function = library.datadist_scatter_copy_variant
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def copy(dst: np.ndarray, src: np.ndarray, num_bytes: np.ndarray) -> None:
        if function(number, dst.ctypes.data, src.ctypes.data, num_bytes.ctypes.data, len(dst)) != 0:
            pytest.skip(f"this processor lacks variant {number}")

    return copy


@pytest.fixture(params=["public", "python", "memcpy", "sse2", "avx2", "avx512"])
def copy(request: pytest.FixtureRequest) -> CopyFunction:
    if request.param == "public":
        return scatter_copy
    if request.param == "python":
        return copy_package._copy_in_python
    return variant(["memcpy", "sse2", "avx2", "avx512"].index(request.param))


def int64s(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("src_skew", [0, 1, 31])
@pytest.mark.parametrize("dst_skew", [0, 1, 8, 33, 63])
def test_copies_exactly_the_ranges(copy: CopyFunction, src_skew: int, dst_skew: int) -> None:
    rng = np.random.default_rng(1)
    slot = max(SIZES) + 256
    source = rng.integers(0, 256, slot * len(SIZES), dtype=np.uint8)
    target = np.full_like(source, CANARY)
    order = rng.permutation(len(SIZES))
    expected = target.copy()
    for i, size in enumerate(SIZES):
        to, start = i * slot + dst_skew, int(order[i]) * slot + src_skew
        expected[to : to + size] = source[start : start + size]

    places = np.arange(len(SIZES), dtype=np.int64)
    copy(
        target.ctypes.data + places * slot + dst_skew,
        source.ctypes.data + order.astype(np.int64) * slot + src_skew,
        int64s(*SIZES),
    )
    np.testing.assert_array_equal(target, expected)


def test_large_scatter_takes_the_streaming_path_and_is_exact() -> None:
    rng = np.random.default_rng(2)
    block, num_blocks = 4096 + 24, 1024
    source = rng.integers(0, 256, (num_blocks, block), dtype=np.uint8)
    target = np.zeros_like(source)
    order = rng.permutation(num_blocks).astype(np.int64)
    places = np.arange(num_blocks, dtype=np.int64)
    sizes = np.full(num_blocks, block, dtype=np.int64)
    scatter_copy(target.ctypes.data + places * block, source.ctypes.data + order * block, sizes)
    np.testing.assert_array_equal(target, source[order])


def test_short_ranges_of_whole_lines(copy: CopyFunction) -> None:
    """Aligned, as the heads of tokens are; with others among them, so that each sort meets the other."""
    rng = np.random.default_rng(3)
    slot, sizes = 768, rng.permutation(np.array([64, 128, 192, 448, 512, 640, 60, 1, 65] * 200, dtype=np.int64))
    source, target = (
        memory[-memory.ctypes.data % 64 :][: slot * len(sizes)]
        for memory in (
            rng.integers(0, 256, slot * len(sizes) + 64, dtype=np.uint8),
            np.zeros(slot * len(sizes) + 64, np.uint8),
        )
    )
    order, skews = rng.permutation(len(sizes)), rng.choice([0, 0, 0, 4], len(sizes))
    expected = target.copy()
    for i, size in enumerate(sizes.tolist()):
        to, start = i * slot + int(skews[i]), int(order[i]) * slot
        expected[to : to + size] = source[start : start + size]
    places = np.arange(len(sizes), dtype=np.int64) * slot + skews
    copy(target.ctypes.data + places, source.ctypes.data + order.astype(np.int64) * slot, sizes)
    np.testing.assert_array_equal(target, expected)


def test_nothing_to_copy(copy: CopyFunction) -> None:
    copy(int64s(), int64s(), int64s())


def test_last_bytes_before_an_unmapped_page(copy: CopyFunction) -> None:
    """Reading or writing one byte beyond a range would end the process here."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page, num_pages = 4096, 4
    bases = [libc.mmap(None, page * num_pages, 3, 0x22, -1, 0) for _ in range(2)]
    try:
        ends = [base + page * (num_pages - 1) for base in bases]
        for end in ends:
            assert libc.mprotect(end, page, 0) == 0
        ctypes.memset(ends[1] - 2 * page, 0x5A, 2 * page)
        for size in (1, 63, 600, 4096, 5000):
            ctypes.memset(ends[0] - size, 0, size)
            copy(int64s(ends[0] - size), int64s(ends[1] - size), int64s(size))
            assert ctypes.string_at(ends[0] - size, size) == b"\x5a" * size
    finally:
        for base in bases:
            libc.munmap(base, page * num_pages, 0)


def test_other_threads_run_during_a_copy() -> None:
    """Another thread sees the first range copied and the last one not: possible only if the GIL is released."""
    if native_library() is None:
        pytest.skip("no native library here")
    source = np.ones(1 << 20, dtype=np.uint8)
    target, flags = np.zeros_like(source), np.zeros(2, dtype=np.uint8)
    num_repeats = 2048
    dst = np.full(num_repeats, target.ctypes.data, dtype=np.int64)
    sizes = np.full(num_repeats, source.nbytes, dtype=np.int64)
    dst[0], dst[-1] = flags.ctypes.data, flags.ctypes.data + 1
    sizes[0] = sizes[-1] = 1
    arrays = [dst, np.full(num_repeats, source.ctypes.data, dtype=np.int64), sizes]
    copier = threading.Thread(target=scatter_copy, args=arrays, name="datadist-test-copy", daemon=True)
    copier.start()
    seen = set()
    while copier.is_alive():
        seen.add(flags.tobytes())
    copier.join()
    assert b"\x01\x00" in seen
    assert flags.all()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "bad", [np.zeros(2, dtype=np.int32), np.zeros((2, 1), dtype=np.int64), np.zeros(4, dtype=np.int64)[::2]]
)
def test_wrong_arrays_are_refused(which: int, bad: np.ndarray) -> None:
    arrays = [int64s(0, 0), int64s(0, 0), int64s(0, 0)]
    arrays[which] = bad
    with pytest.raises(TypeError, match="contiguous 1-d int64"):
        scatter_copy(*arrays)


def test_lengths_and_signs_are_checked() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        scatter_copy(int64s(0), int64s(0), int64s(0, 0))
    with pytest.raises(ValueError, match="negative size: -3"):
        scatter_copy(int64s(0), int64s(0), int64s(-3))


def test_a_missing_library_is_announced_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(copy_package, "LIBRARY", tmp_path / "_native.so")
    native_library.cache_clear()
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            scatter_copy(int64s(target.ctypes.data), int64s(source.ctypes.data), int64s(100))
    np.testing.assert_array_equal(target, source)
    warnings = [r for r in caplog.records if r.name == "datadist_core._copy"]
    assert len(warnings) == 1
    assert "build_hook.py" in warnings[0].getMessage()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the C sources that the hook builds from, instead of those of the package."""
    for path in hook.source_files():
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(hook, "HERE", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_library_of_other_sources_is_refused(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = build_or_skip(sources / "_native.so")
    monkeypatch.setattr(copy_package, "LIBRARY", library)
    native_library.cache_clear()
    assert native_library() is not None

    with (sources / "kernel.c").open("a") as file:
        file.write("// changed\n")
    native_library.cache_clear()
    assert native_library() is None
    assert "other sources" in caplog.text


@pytest.mark.slow
def test_a_build_replaces_the_library_and_leaves_nothing_else(sources: Path) -> None:
    before = {path.name for path in sources.iterdir()}
    library = sources / "_native.so"
    library.write_bytes(b"stale")
    build_or_skip(library)
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert {path.name for path in sources.iterdir()} == before | {"_native.so"}


@pytest.mark.slow
def test_a_compiler_error_is_reported_with_its_text(sources: Path) -> None:
    build_or_skip(sources / "_native.so")
    (sources / "broken.c").write_text("int f(void) { return undeclared_name; }\n")
    with pytest.raises(hook.NativeBuildError, match="undeclared_name"):
        hook.build(sources / "_native.so")


def test_no_compiler_names_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(hook.NativeBuildError, match="no C compiler"):
        hook.build(tmp_path / "_native.so")


def test_cc_may_carry_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -c pass")
    assert hook.find_compiler() == [sys.executable, "-c", "pass"]


def build_or_skip(library: Path) -> Path:
    try:
        hook.find_compiler()
    except hook.NativeBuildError as error:
        pytest.skip(str(error))
    return hook.build(library)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with our hook and our build settings, so that wheels are made outside this tree."""
    pytest.importorskip("hatchling")
    copy_dir = tmp_path / "project" / "datadist_core" / "_copy"
    copy_dir.mkdir(parents=True)
    for path in [*hook.source_files(), Path(hook.__file__), Path(copy_package.__file__)]:
        shutil.copy(path, copy_dir)
    root = copy_dir.parent.parent
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "probe"\nversion = "0"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["datadist_core"]\n'
        '[tool.hatch.build.hooks.custom]\npath = "datadist_core/_copy/build_hook.py"\n'
    )
    (root / ".gitignore").write_text("*.so\n")
    (root / ".git").mkdir()  # hatchling looks for .gitignore up to here
    return root


def make_wheel(project: Path, **environment: str) -> Path:
    code = "from hatchling.build import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return project / "dist" / done.stdout.split()[-1]


@pytest.mark.slow
def test_the_wheel_carries_the_library_and_a_platform_tag(project: Path) -> None:
    build_or_skip(project / "datadist_core" / "_copy" / "probe.so").unlink()
    wheel = make_wheel(project, PATH="/usr/local/bin:/usr/bin:/bin")
    assert wheel.name == f"probe-0-py3-none-{hook.wheel_platform_tag()}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "datadist_core/_copy/_native.so" in names
    assert "datadist_core/_copy/kernel.c" in names


def test_without_a_compiler_the_wheel_is_pure(project: Path) -> None:
    (project / "datadist_core" / "_copy" / "_native.so").write_bytes(b"of other sources")
    wheel = make_wheel(project, PATH=str(project))
    assert wheel.name.endswith("-none-any.whl")
    assert "datadist_core/_copy/_native.so" not in zipfile.ZipFile(wheel).namelist()
