# SPDX-License-Identifier: Apache-2.0
"""The benchmark: complete, honest about wrong bytes, and clear about wrong options. How fast is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import datadist_core
from datadist_core.bench import __main__ as command
from datadist_core.bench.blocks import MAX_BLOCKS, PATTERNS, RUN_BLOCKS, fill, make_lists, matches
from datadist_core.bench.contenders import OPS, PULL, PUSH, Contender, make_contender
from datadist_core.bench.ends import End, Remote, view
from datadist_core.bench.measure import LatencyRow, Results, Row, measure_group, prepare
from datadist_core.errors import LLMException

pytestmark = pytest.mark.slow

ROOT = Path(datadist_core.__file__).parents[1]
BLOCK_BYTES = 4096
SECONDS = 0.01
TOTAL_BYTES = 64 << 10
REFERENCES = {"memcpy", "stream", "socket"}
BACKENDS = {"shm", "tcp", "loopback"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "datadist_core.bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_whole_run(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = bench("--seconds", "0.05", "--total-bytes", "256K", "--block-bytes", "4K,64KiB", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found.keys() == {"rows", "latency", "link_ms"}
    check_rows(found["rows"])
    assert {(row["name"], row["block_bytes"]) for row in found["latency"]} == {
        (name, size) for name in BACKENDS for size in (4096, 65536)
    }
    assert all(row.keys() == {"name", "block_bytes", "p50_us", "p99_us"} for row in found["latency"])
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in found["latency"])
    assert found["link_ms"].keys() == BACKENDS
    assert all(ms > 0 for ms in found["link_ms"].values())
    assert "stream" in done.stdout
    assert "12/12" in done.stderr


def check_rows(rows: list[dict[str, object]]) -> None:
    wanted = {
        (name, op, size, (256 << 10) // size, pattern)
        for name in BACKENDS | REFERENCES
        for op in OPS
        for size in (4096, 65536)
        for pattern in PATTERNS
    }
    keys = ("name", "op", "block_bytes", "num_blocks", "pattern")
    speeds = ("gb_per_s_min", "gb_per_s", "gb_per_s_max")
    assert len(rows) == len(wanted)
    assert {tuple(row[key] for key in keys) for row in rows} == wanted
    for row in rows:
        assert row.keys() == {*keys, *speeds, "verified"}
        low, median, high = (row[key] for key in speeds)
        assert 0 < low <= median <= high
        assert row["verified"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backends", "shm,carrier-pigeon"], ["carrier-pigeon", "shm", "tcp", "loopback"]),
        (["--pattern", "zigzag"], ["zigzag", "random", "runs", "contiguous"]),
        (["--op", "shove"], ["shove", "pull", "push"]),
        (["--block-bytes", "2K"], ["2048", "4K", "1M"]),
        (["--block-bytes", "many"], ["many", "64K"]),
        (["--seconds", "-1"], ["-1", "greater than 0"]),
        (["--seconds", "nan"], ["nan", "greater than 0"]),
        (["--total-bytes", "0"], ["at least 1"]),
        (["--json", "no/such/folder/x.json"], ["no/such/folder"]),
    ],
)
def test_a_bad_option_names_what_is_known(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    told = capsys.readouterr().err
    assert [word for word in words if word not in told] == []


# -- wrong bytes


class Spoiled:
    """A contender whose moves are followed by `spoil(inner, op)`."""

    def __init__(self, inner: Contender, spoil: Callable[[Contender, str], None]) -> None:
        self.name = inner.name
        self._inner, self._spoil = inner, spoil
        self.prepare, self.clear = inner.prepare, inner.clear
        self.verify, self.close = inner.verify, inner.close

    def move(self, op: str, lists: object) -> None:
        self._inner.move(op, lists)
        self._spoil(self._inner, op)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_one_wrong_byte_is_found(closing: ExitStack) -> None:
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)

    def spoil(inner: Contender, op: str) -> None:
        end = inner._here if op == PULL else inner._there
        view(end.inbox)[lists.dst[-1], -1] ^= 1

    assert verified(closing, "loopback", spoil) == {PULL: False, PUSH: False}


def test_one_byte_too_many_is_found(closing: ExitStack) -> None:
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    unlisted = np.setdiff1d(np.arange(lists.num_cache_blocks), lists.dst)[-1]

    def spoil(inner: Contender, op: str) -> None:
        end = inner._here if op == PULL else inner._there
        view(end.inbox)[unlisted, 0] = 1

    assert verified(closing, "loopback", spoil) == {PULL: False, PUSH: False}


def test_a_move_that_does_nothing_is_found_in_the_other_process_too(closing: ExitStack) -> None:
    assert verified(closing, "shm", lambda inner, op: inner.clear(op)) == {PULL: False, PUSH: False}


def test_wrong_bytes_in_the_references_are_found(closing: ExitStack) -> None:
    def spoil(inner: Contender, op: str) -> None:
        view(inner._end.inbox)[make_lists("random", BLOCK_BYTES, TOTAL_BYTES).dst[0], 7] ^= 0x80

    assert verified(closing, "stream", spoil) == {PULL: False, PUSH: False}
    assert verified(closing, "socket", lambda inner, op: inner.clear(op)) == {PULL: False, PUSH: False}


@pytest.mark.parametrize("name", ["loopback", "shm", "stream", "socket"])
def test_right_bytes_are_right(name: str, closing: ExitStack) -> None:
    assert verified(closing, name, lambda inner, op: None) == {PULL: True, PUSH: True}


def verified(closing: ExitStack, name: str, spoil: Callable[[Contender, str], None]) -> dict[str, bool]:
    """What the rows of one contender say when it is spoiled; the yardstick is measured beside it."""
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    cache_bytes = lists.num_cache_blocks * BLOCK_BYTES
    group: list[Contender] = [Spoiled(make_contender(name, cache_bytes), spoil)]
    closing.callback(group[0].close)
    if name in BACKENDS:
        group.append(make_contender("stream", cache_bytes))
        closing.callback(group[1].close)
    prepare(group, lists)
    rows = {op: measure_group(group, op, "random", lists, SECONDS) for op in OPS}
    assert all(row.verified for op in OPS for row in rows[op][1:])
    return {op: rows[op][0].verified for op in OPS}


def test_wrong_bytes_fail_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("shm", PULL, 4096, 4, "random", 2.0, 1.0, 3.0, False, "stream", 0.5)
    results = Results([row], [LatencyRow("shm", 4096, 1.0, 2.0)], {"shm": 3.0})
    monkeypatch.setattr(command, "run", lambda plan, progress: results)
    assert command.main([]) == 1
    assert "NO" in capsys.readouterr().out


# -- blocks


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 15, 64])
def test_lists_are_distinct_blocks_of_the_cache(pattern: str, num_blocks: int) -> None:
    lists = make_lists(pattern, BLOCK_BYTES, num_blocks * BLOCK_BYTES)
    again = make_lists(pattern, BLOCK_BYTES, num_blocks * BLOCK_BYTES)
    for blocks, same in ((lists.src, again.src), (lists.dst, again.dst)):
        assert np.array_equal(blocks, same)
        assert len(set(blocks.tolist())) == num_blocks
        assert blocks.min() >= 0
        assert blocks.max() < lists.num_cache_blocks


def test_patterns_are_what_they_are_called() -> None:
    def num_jumps(pattern: str) -> int:
        lists = make_lists(pattern, BLOCK_BYTES, 512 * BLOCK_BYTES)
        return int(np.count_nonzero((np.diff(lists.src) != 1) | (np.diff(lists.dst) != 1)))

    assert num_jumps("contiguous") == 0
    assert 512 // RUN_BLOCKS // 2 < num_jumps("runs") < 512 // RUN_BLOCKS
    assert num_jumps("random") > 500


def test_small_blocks_are_capped_in_number() -> None:
    assert make_lists("random", 4096, 1 << 30).num_blocks == MAX_BLOCKS


def test_content_differs_by_seed_and_place() -> None:
    caches = [np.empty((64, 4096), np.uint8), np.empty((64, 4096), np.uint8)]
    for seed, cache in enumerate(caches):
        fill(cache, seed)
    words = np.concatenate([cache.ravel().view(np.uint64) for cache in caches])
    assert len(np.unique(words)) == len(words)
    assert words.all()


def test_content_is_checked_against_its_own_seed() -> None:
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    source = np.empty((lists.num_cache_blocks, BLOCK_BYTES), np.uint8)
    moved = np.zeros_like(source)
    fill(source, 5)
    moved[lists.dst] = source[lists.src]
    assert matches(moved, 5, lists)
    assert not matches(moved, 6, lists)


# -- the other process


def test_an_error_in_the_other_process_is_told_here() -> None:
    remote = Remote(End, "shm", 77, 0, 1 << 20)
    try:
        with pytest.raises(LLMException, match="does not listen"):
            remote.call("address")
    finally:
        remote.close()
    assert not remote._process.is_alive()


def test_a_backend_that_cannot_open_is_told_here() -> None:
    with pytest.raises(LLMException, match=r"start in the other process.*no-such-backend"):
        Remote(End, "no-such-backend", 77, 0, 1 << 20)


def test_plain_table_is_aligned() -> None:
    text = command.plain_table("Title", ["a", "long"], [["wide cell", "1"], ["x", "2"]])
    assert text == "Title\na          long\nwide cell  1\nx          2\n\n"
