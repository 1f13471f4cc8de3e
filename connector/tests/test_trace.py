# SPDX-License-Identifier: Apache-2.0
"""Trace files: what viewers accept, also of a killed process; bounded; cheap; and P and D on one timeline."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_datadist import trace, trace_report
from vllm_datadist.counts import Mode
from vllm_datadist.messages import PushChunk, PushEnd, PushOpen, RequestKey, StepWork
from vllm_datadist.scheduler.tallies import Ledger
from vllm_datadist.trace import Recorder, TraceError
from vllm_datadist.trace_report import RequestSummary, by_handoff, merge, read_directory, summarize, table
from vllm_datadist.worker.step_trace import ForwardTrace

MS = 1e-3


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Path]:
    """Tracing is on; off again afterwards, also when the test fails."""
    trace.start(str(tmp_path / "traces"), "P worker 0")
    yield tmp_path / "traces"
    trace.stop()


def _events(directory: Path) -> list[dict[str, Any]]:
    trace.stop()
    return merge(read_directory(directory))


def check_format(events: list[dict[str, Any]]) -> None:
    """What the trace event format asks for, and what its viewers need to show it right."""
    open_flows: dict[int, int] = {}
    last_us = 0
    lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert event["ph"] in ("X", "i", "M", "s", "f"), event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["args"], dict), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name"), event
            continue
        assert event["ts"] >= last_us > -1, "events are in the order of time"
        last_us = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "s":
            assert event["id"] not in open_flows
            open_flows[event["id"]] = event["ts"]
        elif event["ph"] == "f":
            assert event["bp"] == "e"
            assert open_flows.pop(event["id"]) <= event["ts"]
    assert open_flows == {}, "an arrow without an end"
    for line in lines.values():
        _check_nested(line)


def _check_nested(spans: list[tuple[int, int]]) -> None:
    """On one line a span lies within another or beside it: each begin has its end."""
    open_ends: list[int] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{begin}..{end} crosses the end of another at {open_ends[-1]}"
        open_ends.append(end)


def test_crossing_spans_are_found() -> None:
    """The check above can fail."""
    _check_nested([(0, 10), (2, 5), (5, 10), (10, 12)])
    with pytest.raises(AssertionError, match="crosses"):
        _check_nested([(0, 10), (5, 12)])


# -- recording


def test_spans_records_and_instants(recording: Path) -> None:
    before_us = time.clock_gettime(time.CLOCK_REALTIME) * 1e6
    with trace.span("link", "t-1", peer="10.0.0.2:7000") as span:
        with trace.span("dial"):
            trace.instant("try", ["t-1", "t-2"])
        span.note(backend="tcp")
    with pytest.raises(RuntimeError), trace.span("load", "t-1"):
        raise RuntimeError("no such peer")
    after_us = time.clock_gettime(time.CLOCK_REALTIME) * 1e6
    now_s = time.monotonic()
    for begin_ms in (0, 1, 2, 30):
        trace.record("transfer", "t-1", now_s + begin_ms * MS, now_s + (begin_ms + 10) * MS, "transfers", num_bytes=5)
    events = _events(recording)
    check_format(events)
    by_name = {event["name"]: event for event in events}
    assert by_name["link"]["args"] == {"key": "t-1", "peer": "10.0.0.2:7000", "backend": "tcp"}
    assert by_name["try"]["args"] == {"keys": ["t-1", "t-2"]}
    assert by_name["load"]["args"]["error"] == "no such peer"
    assert before_us - 1000 <= by_name["link"]["ts"] <= after_us + 1000, "times are those of the system's clock"
    transfers = [event for event in events if event["name"] == "transfer"]
    assert len({event["tid"] for event in transfers}) == 3, "three at once need three lines, the fourth none of its own"
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"P worker 0", "MainThread", "transfers", "transfers 2", "transfers 3"} <= names


def test_many_threads_lose_nothing(recording: Path) -> None:
    def work(number: int) -> None:
        for _ in range(500):
            with trace.span("outer", f"r-{number}"), trace.span("inner", f"r-{number}"):
                pass

    threads = [threading.Thread(target=work, args=(number,), name=f"worker-{number}") for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = _events(recording)
    check_format(events)
    counts = {key: len(found) for key, found in by_handoff(events).items()}
    assert counts == {f"r-{number}": 1000 for number in range(8)}


def test_one_process_is_one_file_and_a_forked_one_another(recording: Path) -> None:
    trace.start(str(recording), "P scheduler")
    trace.instant("parent")
    child = os.fork()
    if child == 0:
        was_on = trace.is_on()
        trace.instant("lost")
        trace.start(str(recording), "P worker 1")
        trace.instant("child")
        trace.stop()
        os._exit(3 if was_on else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trace.instant("parent again")
    events = _events(recording)
    files = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {"P worker 0", "P worker 0 + P scheduler", "P worker 1"} == set(files)
    pids = {event["name"]: event["pid"] for event in events if event["ph"] == "i"}
    assert "lost" not in pids
    assert pids["parent"] == pids["parent again"] != pids["child"]


def test_a_killed_process_leaves_a_good_file(tmp_path: Path) -> None:
    program = (
        "import sys, threading\nfrom vllm_datadist import trace\ntrace.start(sys.argv[1], 'D worker 0')\n"
        "trace.instant('first', 'r')\ntrace._recorder.flush()\nprint('ready', flush=True)\n"
        "while True:\n    with trace.span('busy', 'r', text='x' * 150): pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        [path] = tmp_path.glob("trace-*.json")
        size = path.stat().st_size
        end_s = time.monotonic() + 20
        while path.stat().st_size < size + 100_000 and time.monotonic() < end_s:
            threading.Event().wait(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    text = path.read_text()
    assert text.endswith(",\n"), "the last line is whole"
    events = json.loads(text.rstrip().rstrip(",") + "]")  # as viewers take it
    assert {"first", "busy"} <= {event["name"] for event in events}
    [file] = read_directory(tmp_path)
    assert (len(file.events), file.num_unreadable) == (len(events), 0)
    path.write_text(text[:-20])  # what a full disk or a lost host may leave
    assert read_directory(tmp_path)[0].num_unreadable == 1


def test_a_file_is_bounded_and_says_so(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), "P", max_file_bytes=20_000)
    for _ in range(10):
        for _ in range(50):
            recorder.add("x", "k", 1.0, 2.0, "", {"text": "y" * 100})
        recorder.flush()
    recorder.close()
    assert Path(recorder.path).stat().st_size < 20_500
    assert read_directory(tmp_path)[0].events[-1]["name"] == "trace is full"


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), "P", max_pending=100)
    with recorder._writing:  # the disk is slow
        for _ in range(300):
            recorder.add("x", None, 1.0, 2.0, "", {})
    recorder.close()
    events = read_directory(tmp_path)[0].events
    assert sum(event["name"] == "x" for event in events) <= 200
    assert events[-1]["name"] == "end of trace"
    assert events[-1]["args"]["num_dropped"] >= 100


def test_a_disk_that_fails_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), "P")
    os.close(recorder._file)
    recorder._file = os.open("/dev/full", os.O_WRONLY)
    recorder.add("x", None, 1.0, 2.0, "", {})
    recorder.flush()
    recorder.add("x", None, 1.0, 2.0, "", {})
    recorder.flush()
    recorder.close()


@pytest.mark.parametrize("directory", ["/proc/no/such", "/dev/null/x", "\0"])
def test_a_directory_that_cannot_hold_traces_is_named(directory: str) -> None:
    with pytest.raises(TraceError, match=r"trace=.*cannot hold traces.*Name a directory"):
        trace.start(directory, "P")
    assert not trace.is_on()


_anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=300), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.text(max_size=300),
    key=st.one_of(st.none(), st.text(max_size=300), st.lists(st.text(max_size=5), max_size=90)),
    times=st.tuples(st.floats(), st.floats()),
    track=st.text(max_size=5),
    value=_anything,
)
def test_whatever_is_recorded_can_be_read(
    name: str, key: Any, times: tuple[float, float], track: str, value: Any
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _record_and_read(Path(directory), name, key, times, track, value)


def _record_and_read(directory: Path, name: str, key: Any, times: tuple[float, float], track: str, value: Any) -> None:
    recorder = Recorder(str(directory), "\ud800")
    recorder.add(name, key, *times, track, {"value": value, "huge": 10**400})
    recorder.add("good", key, 1.0, None, "", {})
    recorder.close()
    [file] = read_directory(directory)
    assert file.num_unreadable == 0
    assert "good" in [event["name"] for event in file.events]
    assert Path(recorder.path).stat().st_size < 100_000
    check_format(merge([file]))


def test_no_cost_when_off() -> None:
    """A generous bound: some microseconds, on a busy machine, for what a hot loop would call."""
    assert not trace.is_on()
    count = 20_000
    begun_s = time.perf_counter()
    for _ in range(count):
        with trace.span("x", "k", num_bytes=1):
            pass
        trace.record("x", "k", 0.0, 1.0, num_bytes=1)
    assert (time.perf_counter() - begun_s) / count < 100e-6


# -- what the connector records


def test_the_scheduler_records_prefills_queues_loads_and_leases(recording: Path) -> None:
    ledger = Ledger(logging.getLogger("test.trace"))
    p, d = RequestKey("p-1", 1), RequestKey("d-1", 2)
    step = SimpleNamespace(num_scheduled_tokens={"p-1": 64, "other": 3})
    ledger.asked("p-1", "t-1")
    ledger.scheduled(step)
    ledger.arrived(d, 100, Mode.PUSH, trace_key="t-1")
    ledger.scheduled(step)
    ledger.allocated("d-1", 100)
    ledger.finished("p-1", is_aborted=False)
    ledger.held(p, 100, Mode.PUSH, "t-1")
    ledger.load_ended("d-1", failed=False)
    for _ in range(2):
        ledger.scheduled(SimpleNamespace(num_scheduled_tokens={"d-1": 1}))
    ledger.hold_ended("p-1")
    events = _events(recording)
    check_format(events)
    names = Counter(event["name"] for event in by_handoff(events)["t-1"])
    once = ["queued", "load", "first scheduled", "prefill", "lease"]
    assert names == {"chunk scheduled": 2, **dict.fromkeys(once, 1)}
    [prefill] = [event for event in events if event["name"] == "prefill"]
    assert prefill["args"]["num_tokens"] == 128
    assert ledger.num_open() == 0


def test_a_worker_records_steps_that_compute_something_to_push(recording: Path) -> None:
    forward = ForwardTrace()
    key = RequestKey("p-1", 1)

    def step(work: StepWork) -> None:
        forward.begin(work)
        for layer in ("layers.0", "layers.1"):
            forward.layer(layer)
        forward.end()

    step(StepWork(push_opens=[PushOpen(key, "t-1", 64, "")], push_chunks=[PushChunk(key, 0, 32, ())]))
    step(StepWork())
    step(StepWork(push_chunks=[PushChunk(key, 32, 64, ())], push_ends=[PushEnd(key)]))
    step(StepWork(push_chunks=[PushChunk(RequestKey("p-2", 1), 0, 1, ())]))
    events = _events(recording)
    check_format(events)
    found = by_handoff(events)
    assert Counter(event["name"] for event in found["t-1"]) == {"chunk": 2, "layer": 4}
    assert [event["args"]["end_token"] for event in found["t-1"] if event["name"] == "chunk"] == [32, 64]
    assert Counter(event["name"] for event in found["p-2"]) == {"chunk": 1, "layer": 2}


# -- joining and summing up


def _write(directory: Path, process: str, events: list[tuple[str, float, float | None, dict[str, Any]]]) -> None:
    recorder = Recorder(str(directory), process)
    for name, begin_ms, end_ms, args in events:
        recorder.add(
            name, "t-1", begin_ms * MS, None if end_ms is None else end_ms * MS, name if end_ms else "", dict(args)
        )
    recorder.close()


def _push(directory: Path) -> None:
    """Prefill 100..200; layers sent 120..160 (two overlap), 180..190, and the last one 195..215."""
    sent = {"mode": "push", "backend": "tcp", "num_bytes": 1 << 20}
    _write(
        directory,
        "P worker 0",
        [
            ("chunk", 100, 150, {}), ("chunk", 150, 200, {}),
            ("transfer", 120, 150, sent), ("transfer", 130, 160, sent), ("transfer", 180, 190, sent),
            ("transfer", 195, 215, sent),
        ],
    )  # fmt: skip
    _write(directory, "P scheduler", [("prefill", 90, 230, {"num_tokens": 512})])
    _write(
        directory, "D scheduler", [("queued", 80, 85, {}), ("load", 85, 220, {}), ("first scheduled", 222, None, {})]
    )


def test_the_share_that_is_hidden_behind_the_prefill(tmp_path: Path) -> None:
    _push(tmp_path)
    events = merge(read_directory(tmp_path))
    check_format(events)
    [found] = summarize(events)
    assert isinstance(found, RequestSummary)
    times = (found.prefill_ms, found.transfer_ms, found.hidden_ms, found.queued_ms, found.load_ms, found.first_ms)
    assert times == pytest.approx((100, 70, 55, 5, 135, 142), abs=0.01)
    assert found.hidden_share == pytest.approx(55 / 70, abs=0.001)
    assert (found.num_bytes, found.backends, found.errors) == (4 << 20, ("tcp",), ())
    assert "78.6%" in table([found])


def test_a_pull_hides_nothing(tmp_path: Path) -> None:
    _write(tmp_path, "P scheduler", [("prefill", 100, 200, {})])
    pulled = {"mode": "pull", "num_bytes": 5, "error": "no time is left"}
    _write(tmp_path, "D worker 0", [("transfer", 205, 255, pulled)])
    [found] = summarize(merge(read_directory(tmp_path)))
    assert (found.hidden_share, found.transfer_ms) == (0.0, pytest.approx(50, abs=0.01))
    assert found.errors == ("no time is left",)
    assert "FAILED: no time is left" in table([found])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _push(tmp_path)
    merged = tmp_path / "merged.json"
    assert trace_report.main([str(tmp_path), "--output", str(merged)]) == 0
    assert "3 processes" in capsys.readouterr().out
    loaded = json.loads(merged.read_text())
    check_format(loaded["traceEvents"])
    arrows = [event for event in loaded["traceEvents"] if event["ph"] in "sf"]
    assert [event["ph"] for event in sorted(arrows, key=lambda event: event["id"])] == ["s", "f", "s", "f"]
    assert {event["pid"] for event in loaded["traceEvents"]} == {1, 2, 3}
    assert trace_report.main([str(tmp_path / "nothing")]) == 1
