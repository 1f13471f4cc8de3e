# SPDX-License-Identifier: Apache-2.0
"""The benchmark: complete, honest about wrong bytes, and clear about wrong options. How fast is not tested."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import datadist_core
from datadist_core.bench import __main__ as command
from datadist_core.bench import references
from datadist_core.bench.bars import check_bars
from datadist_core.bench.blocks import MAX_BLOCKS, PATTERNS, RUN_BLOCKS, BlockLists, fill, make_lists, matches
from datadist_core.bench.contenders import OURS, PEERS, REFERENCES, Entry
from datadist_core.bench.contract import OPS, PULL, PUSH, Contender
from datadist_core.bench.ends import ANSWER_TIMEOUT_S, End, view
from datadist_core.bench.field import Field
from datadist_core.bench.measure import measure_group, prepare
from datadist_core.bench.peer_ends import Hello, Memory, PeerEnd
from datadist_core.bench.peers import PeerContender
from datadist_core.bench.plot import plot
from datadist_core.bench.report import plain_table, to_json, write_report
from datadist_core.bench.results import (
    Findings,
    Group,
    LatencyRow,
    OutsideCopy,
    OwnerCpu,
    Results,
    Row,
    SingleCopy,
    make_rows,
)
from datadist_core.errors import LLMException, Unreachable
from datadist_core.testing.parallel import eventually
from datadist_core.testing.remote import RemoteObject
from datadist_core.tests.optional import not_available

pytestmark = pytest.mark.slow

ROOT = Path(datadist_core.__file__).parents[1]
BLOCK_BYTES = 4096
SECONDS = 0.01
TOTAL_BYTES = 64 << 10
BACKENDS = {"auto", "shm", "tcp"}
NAMES = BACKENDS | {"memcpy", "stream", "socket"}
ENTRIES = {entry.name: entry for table in (REFERENCES, PEERS, OURS) for entry in table.values()}


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
    sizes = ("--seconds", "0.02", "--total-bytes", "256K", "--block-bytes", "4K,64KiB")
    done = bench("--backends", "auto,shm,tcp", "--peers", "none", *sizes, "--json", str(file))
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
    assert "12/12" in done.stderr
    told = (
        "x stream",
        "Copy kernel: ",
        "auto uses shm",
        "Per million blocks",
        "One more link",
        "Bars",
        "as fast as one",
    )
    assert [words for words in told if words not in done.stdout] == []


def check_rows(rows: list[dict[str, object]]) -> None:
    wanted = {
        (name, op, size, (256 << 10) // size, pattern)
        for name in NAMES
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
        (["--peers", "nixl,none"], ["'none'", "nixl-tcp", "mooncake"]),
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


def test_plot_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        command.main(["--plot", "x.png"])
    assert 'pip install "vllm-datadist[plot]"' in capsys.readouterr().err


# -- wrong bytes


class Spoiled:
    """A contender whose moves are followed by `spoil(inner, op)`."""

    def __init__(self, inner: Contender, spoil: Callable[[Contender, str], None]) -> None:
        self.name = inner.name
        self._inner, self._spoil = inner, spoil
        self.prepare, self.clear = inner.prepare, inner.clear
        self.verify, self.close = inner.verify, inner.close

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        times = self._inner.move_each(op, moves, repeats)
        self._spoil(self._inner, op)
        return times


class Contenders:
    """Makes them, and closes them in the end."""

    def __init__(self) -> None:
        self.made: list[Contender] = []

    def make(self, name: str) -> Contender:
        self.made.append(ENTRIES[name].make(2 * TOTAL_BYTES))
        return self.made[-1]


@pytest.fixture
def contenders() -> Iterator[Contenders]:
    contenders = Contenders()
    yield contenders
    for contender in contenders.made:
        contender.close()


def inbox(inner: Contender, op: str) -> np.ndarray:
    return view((inner._here if op == PULL else inner._there).end.inbox)


def test_one_wrong_byte_is_found(contenders: Contenders) -> None:
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)

    def spoil(inner: Contender, op: str) -> None:
        inbox(inner, op)[lists.dst[-1], -1] ^= 1

    assert verified(contenders, "loopback", spoil) == {PULL: False, PUSH: False}


def test_one_byte_too_many_is_found(contenders: Contenders) -> None:
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    unlisted = np.setdiff1d(np.arange(lists.num_cache_blocks), lists.dst)[-1]

    def spoil(inner: Contender, op: str) -> None:
        inbox(inner, op)[unlisted, 0] = 1

    assert verified(contenders, "loopback", spoil) == {PULL: False, PUSH: False}


def test_a_move_that_does_nothing_is_found_in_the_other_process_too(contenders: Contenders) -> None:
    assert verified(contenders, "shm", lambda inner, op: inner.clear(op)) == {PULL: False, PUSH: False}


def test_wrong_bytes_in_the_references_are_found(contenders: Contenders) -> None:
    def spoil(inner: Contender, op: str) -> None:
        view(inner._end.inbox)[make_lists("random", BLOCK_BYTES, TOTAL_BYTES).dst[0], 7] ^= 0x80

    assert verified(contenders, "stream", spoil) == {PULL: False, PUSH: False}
    assert verified(contenders, "socket", lambda inner, op: inner.clear(op)) == {PULL: False, PUSH: False}


@pytest.mark.parametrize("name", ["loopback", "shm", "stream", "socket"])
def test_right_bytes_are_right(name: str, contenders: Contenders) -> None:
    assert verified(contenders, name, lambda inner, op: None) == {PULL: True, PUSH: True}


@pytest.mark.parametrize("name", ["cma", "datadist-nixl", "datadist-mooncake", "nixl", "nixl-tcp", "mooncake"])
def test_those_that_may_be_missing(name: str, contenders: Contenders) -> None:
    """They move the right bytes, and what they do not move is found; or say why they cannot be used here."""
    try:
        contender = contenders.make(name)
    except LLMException as error:
        not_available(error)
    lists = make_lists("runs", BLOCK_BYTES, TOTAL_BYTES)
    prepare(Field(Results(), [contender]), [contender], lists)
    for op in OPS:
        contender.clear(op)
        assert not contender.verify(op, lists)
        assert len(contender.move_each(op, [lists, lists], 2)) == 4
        assert contender.verify(op, lists)


def verified(contenders: Contenders, name: str, spoil: Callable[[Contender, str], None]) -> dict[str, bool]:
    """What the rows of one contender say when it is spoiled; a yardstick is measured beside it."""
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    group: list[Contender] = [Spoiled(contenders.make(name), spoil)]
    if name in {"loopback", "shm"}:
        group.append(contenders.make("memcpy"))
    field = Field(Results(), group)
    prepare(field, group, lists)
    rows = {op: measure_group(field, op, "random", lists, SECONDS) for op in OPS}
    assert all(len(rows[op]) == len(group) for op in OPS)
    assert all(row.verified for op in OPS for row in rows[op][1:])
    return {op: rows[op][0].verified for op in OPS}


def a_row(name: str, gb_per_s: float = 2.0, verified: bool = True, **ratios: float) -> Row:
    named = {key.replace("_", "-"): ratio for key, ratio in ratios.items()}
    return Row(name, PULL, 4096, 4, "random", gb_per_s, 1.0, 9.0, verified, named)


def test_wrong_bytes_fail_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results([a_row("shm", verified=False)], [LatencyRow("shm", 4096, 1.0, 2.0)], {"shm": 3.0})
    monkeypatch.setattr(command, "run", lambda plan, progress: results)
    assert command.main([]) == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "status"), [("shm", 1), ("stream", 1), ("nixl-tcp", 0)])
def test_only_a_peer_may_fail(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results([a_row("shm")], failed={name: "it fell over"})
    monkeypatch.setattr(command, "run", lambda plan, progress: results)
    assert command.main([]) == status
    assert f"FAILED {name}: it fell over" in capsys.readouterr().out


# -- the race


class Scripted:
    """A contender that does nothing but to fail at a certain move."""

    def __init__(self, name: str, fails_at: int = 1 << 30) -> None:
        self.name = name
        self.num_moves = 0
        self._fails_at = fails_at

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        self.num_moves += 1
        if self.num_moves >= self._fails_at:
            raise Unreachable(f"move {self.num_moves}")
        return [1.0]

    def prepare(self, lists: BlockLists) -> None: ...

    def clear(self, op: str) -> None: ...

    def close(self) -> None: ...

    def verify(self, op: str, lists: BlockLists) -> bool:
        return True


def test_one_that_breaks_down_leaves_the_race() -> None:
    results = Results()
    steady, weak = Scripted("steady"), Scripted("weak", fails_at=3)
    field = Field(results, [steady, weak])
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    rows = measure_group(field, PULL, "random", lists, SECONDS)
    assert [row.name for row in rows] == ["steady"]
    assert results.failed == {"weak": "move 3"}
    assert steady.num_moves > 3
    assert weak.num_moves == 3
    assert field.contenders("weak", "steady") == [steady]


def test_one_that_cannot_start_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    def unusable(cache_bytes: int) -> Contender:
        raise Unreachable("there is no such device")

    results, told = Results(), []
    with Field(results) as field:
        field.start([Entry("gone", unusable), Entry("here", lambda size: Scripted("here"))], 1, told.append)
        assert [contender.name for contender in field.contenders()] == ["here"]
    assert results.skipped == {"gone": "there is no such device"}
    assert "skipped gone: there is no such device" in told
    write_report(results)
    assert "Skipped gone: there is no such device" in capsys.readouterr().out


def test_ratios_are_of_the_same_round() -> None:
    times = {"shm": [1.0, 10.0, 4.0], "stream": [2.0, 5.0, 4.0], "memcpy": [3.0, 30.0, 12.0]}
    rows = {row.name: row for row in make_rows(Group(PULL, "random", 1 << 20, 1000), times, dict.fromkeys(times, True))}
    assert rows["shm"].ratios == {"stream": 1.0, "memcpy": 3.0}
    assert rows["memcpy"].ratios == {"stream": pytest.approx(1 / 3)}
    assert rows["stream"].ratios.keys() == {"memcpy"}
    assert rows["shm"].gb_per_s == pytest.approx((1000 << 20) / 4e9)


def test_without_the_compiled_kernel(contenders: Contenders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "native_library", lambda: None)
    assert "Python" in references.copy_kernel()
    with pytest.raises(LLMException, match="compiled copy kernel"):
        contenders.make("stream")
    assert verified(contenders, "memcpy", lambda inner, op: None) == {PULL: True, PUSH: True}


# -- bars


def all_results() -> Results:
    """Of a run in which every bar is met."""
    rows = [
        replace(row, pattern=pattern, block_bytes=block_bytes)
        for pattern in PATTERNS
        for block_bytes in (4096, 16384, 65536)
        for row in (
            replace(a_row("shm", stream=1.5, memcpy=2.5, nixl=9.0, nixl_default=10.0), gb_per_s=4.0),
            a_row("shm-1", stream=0.86, memcpy=1.5, nixl=4.0, nixl_default=4.5),
            a_row("cma", stream=0.5, memcpy=0.9, nixl=2.0, nixl_default=3.0),
            a_row("tcp", socket=0.95, mooncake=2.5, nixl_tcp=4.0),
            *(a_row(name) for name in ("stream", "memcpy", "socket", "nixl", "nixl-default", "nixl-tcp", "mooncake")),
        )
    ]
    findings = Findings(
        kernel_is_native=True,
        outside_copy=[OutsideCopy("shm", 16384, 4096, 10.0, 9.0, 0.1)],
        single_copy=[SingleCopy("shm", 9.9, "stream", 10.0, 0.99)],
        owner_cpu=[OwnerCpu("shm", 0.004, 0.003), OwnerCpu("tcp", 0.9, 0.0)],
    )
    latency = [LatencyRow("shm", 65536, 30.0, 50.0), LatencyRow("nixl", 65536, 40.0, 60.0)]
    return Results(rows, latency, {"shm": 3.0, "tcp": 4.0}, findings=findings)


def verdicts(results: Results) -> list[bool | None]:
    return [bar.met for bar in check_bars(results)]


#: The Python path is not in use.
NEVER = {15}


def test_all_bars_met() -> None:
    assert [met for i, met in enumerate(verdicts(all_results())) if i not in NEVER] == [True] * 15


def worse(name: str, block_bytes: int, pattern: str, **ratios: float) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        for i, row in enumerate(results.rows):
            if (row.name, row.block_bytes, row.pattern) == (name, block_bytes, pattern):
                changed = {key.replace("_", "-"): ratio for key, ratio in ratios.items()}
                results.rows[i] = replace(row, ratios={**row.ratios, **changed})

    return change


def slower(name: str, block_bytes: int, pattern: str, gb_per_s: float) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        for i, row in enumerate(results.rows):
            if (row.name, row.block_bytes, row.pattern) == (name, block_bytes, pattern):
                results.rows[i] = replace(row, gb_per_s=gb_per_s)

    return change


@pytest.mark.parametrize(
    ("index", "spoil"),
    [
        (0, worse("shm-1", 16384, "runs", stream=0.84)),
        (1, worse("shm-1", 4096, "random", stream=0.69)),
        (2, worse("shm", 65536, "random", nixl_default=4.9)),
        (3, worse("shm", 4096, "random", nixl_default=7.9)),
        (4, worse("shm", 65536, "random", nixl=4.9)),
        (5, worse("shm", 4096, "random", nixl=7.9)),
        (6, slower("shm", 16384, "runs", 2.1)),
        (7, lambda results: results.findings.single_copy.__setitem__(0, SingleCopy("shm", 9.0, "stream", 10.0, 0.9))),
        (8, worse("tcp", 65536, "contiguous", socket=0.89)),
        (9, worse("tcp", 16384, "random", mooncake=1.9)),
        (10, worse("tcp", 4096, "random", nixl_tcp=2.9)),
        (11, lambda results: results.latency.__setitem__(0, LatencyRow("shm", 65536, 41.0, 50.0))),
        (12, lambda results: results.link_ms.__setitem__("tcp", 21.0)),
        (13, lambda results: results.findings.outside_copy.__setitem__(0, OutsideCopy("shm", 16384, 4096, 2, 1, 0.5))),
        (14, lambda results: results.findings.owner_cpu.append(OwnerCpu("auto", 0.05, 0.001))),
    ],
)
def test_a_missed_bar_is_missed_alone(index: int, spoil: Callable[[Results], None]) -> None:
    results = all_results()
    spoil(results)
    assert [i for i, met in enumerate(verdicts(results)) if met is False] == [index]


def test_the_python_path_has_a_bar() -> None:
    results = all_results()
    results.findings.kernel_is_native = False
    assert verdicts(results)[15] is True
    worse("shm", 65536, "runs", memcpy=0.8)(results)
    assert verdicts(results)[15] is False


def test_a_bar_says_why_it_was_not_measured() -> None:
    results = Results([a_row("shm-1", stream=0.9)], skipped={"nixl": "nixl is not installed"})
    bars = check_bars(results)
    assert "nixl is not installed" in bars[5].found
    assert bars[5].met is None
    assert bars[1].met is True
    assert "0.90 x: shm-1 2.00" in bars[1].found


def test_report_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = all_results()
    write_report(results)
    told = capsys.readouterr().out
    assert [words for words in ("x nixl-tcp", "MISSED") if words in told] == ["x nixl-tcp"]
    assert {row["name"] for row in to_json(results)["rows"]} == {row.name for row in results.rows}
    if importlib.util.find_spec("matplotlib") is None:
        not_available("the picture needs matplotlib: the extra 'plot'")
    plot(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


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
    remote = RemoteObject(End, ("shm", 77, 0, 1 << 20), ANSWER_TIMEOUT_S)
    try:
        with pytest.raises(LLMException, match="does not listen"):
            remote.call("address")
        with pytest.raises(RuntimeError, match="no_such_method"):
            remote.call("no_such_method")
    finally:
        remote.close()
    assert not Path(f"/proc/{remote.pid}").exists()


def test_a_backend_that_cannot_open_is_told_here() -> None:
    with pytest.raises(LLMException, match="no-such-backend"):
        RemoteObject(End, ("no-such-backend", 77, 0, 1 << 20), ANSWER_TIMEOUT_S)


class CopyingEngine:
    """Both ends in one: copies its own outbox to its own inbox."""

    def __init__(self, is_starter: bool, seed: int, cache_bytes: int) -> None:
        self.memory = Memory(seed, cache_bytes)
        self._shape = (0, 0)

    def hello(self) -> Hello:
        return Hello("", b"", 0, 0)

    def meet(self, other: Hello) -> None: ...

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        self._shape = (num_cache_blocks, block_bytes)

    def ready(self, op: str, lists: BlockLists) -> Callable[[], None]:
        size = self._shape[0] * self._shape[1]
        source, target = (box[:size].reshape(self._shape) for box in (self.memory.outbox, self.memory.inbox))

        def move() -> None:
            target[lists.dst] = source[lists.src]

        return move


def test_a_peer_is_checked_like_ours() -> None:
    end = PeerEnd(CopyingEngine, True, 3, 2 * TOTAL_BYTES)
    lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
    end.prepare(lists.num_cache_blocks, BLOCK_BYTES)
    assert not end.matches(3, lists)
    assert len(end.move_each(PULL, [lists], 3)) == 3
    assert end.matches(3, lists)
    assert not end.matches(4, lists)
    end.clear()
    assert not end.matches(3, lists)


def state(pid: int) -> str:
    """As /proc tells: T is stopped. Empty if the process has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if found in "ZX" else found


def pids_of(peer: PeerContender) -> list[int]:
    return [peer._here.pid, peer._there.pid]


def test_a_peer_that_polls_is_stopped_between_its_turns() -> None:
    peer = PeerContender("polling", CopyingEngine, 2 * TOTAL_BYTES, busy_when_idle=True)
    try:
        lists = make_lists("random", BLOCK_BYTES, TOTAL_BYTES)
        peer.prepare(lists)
        assert len(peer.move_each(PULL, [lists, lists])) == 2
        assert eventually(lambda: [state(pid) for pid in pids_of(peer)] == ["T", "T"])
    finally:
        peer.close()
    assert [state(pid) for pid in pids_of(peer)] == ["", ""]


def test_stopped_peers_do_not_outlive_a_killed_bench() -> None:
    code = (
        "import sys; from datadist_core.tests.test_bench import CopyingEngine, PeerContender, pids_of\n"
        "if __name__ == '__main__':\n"
        "    print(*pids_of(PeerContender('x', CopyingEngine, 4096, True)), flush=True); sys.stdin.read()"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(word) for word in bench.stdout.readline().split()]
        assert len(pids) == 2
        assert eventually(lambda: [state(pid) for pid in pids] == ["T", "T"])
    finally:
        bench.kill()
        bench.wait(60)
        bench.stdin.close()
        bench.stdout.close()
    try:
        assert eventually(lambda: [state(pid) for pid in pids] == ["", ""])
    finally:
        for pid in pids:
            if state(pid):
                os.kill(pid, signal.SIGKILL)


def test_plain_table_is_aligned() -> None:
    text = plain_table("Title", ["a", "long"], [["wide cell", "1"], ["x", "2"]])
    assert text == "Title\na          long\nwide cell  1\nx          2\n\n"
