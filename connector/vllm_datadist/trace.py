# SPDX-License-Identifier: Apache-2.0
"""A trace of what happens to requests, for Chrome's trace viewer and Perfetto: P and D on one timeline.

Off unless `kv_connector_extra_config` says {"trace": "DIRECTORY"}. Then every process of the engine writes one file
there. `python -m vllm_datadist.trace DIRECTORY` joins them and says, per request, how much of the transfer was hidden
behind the prefill (see `trace_report`).

    with trace.span("link", transfer_id, peer="10.0.0.2:7000"):       a piece of work of this thread
        ...
    trace.record("transfer", transfer_id, start_s, end_s, num_bytes=n)  known afterwards; times of `time.monotonic`
    trace.instant("first scheduled", transfer_id)                       a moment

The second argument joins what P and D say about one hand-off: the transfer id of a push; for a pull P's request id,
which the ticket names. Calls never raise and never wait for a disk: they put an event into a bounded queue, and one
thread writes. When tracing is off a call costs about as much as any call of a function with keyword arguments.

The file is an array of JSON objects, one a line. Its end may be missing, which viewers accept: so the file of a
process that was killed is good up to its last line. Times are microseconds of the system's clock. That is read once,
when the trace starts, and then carried on by the monotonic clock: within a file time never goes back.
"""

from __future__ import annotations

import atexit
import errno
import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

#: A file ends with a note when it has this size.
MAX_FILE_BYTES = 256 << 20
#: Events that wait to be written; more are dropped and counted.
MAX_PENDING = 1 << 16
MAX_TEXT = 200
MAX_ITEMS = 64
#: At most so much of a trace is lost when its process is killed.
WRITE_INTERVAL_S = 0.2
#: Events per write.
_BATCH = 1024
#: Work of one kind that overlaps is shown on so many lines at most.
MAX_LANES = 64
#: What `time.monotonic` never reaches.
_LATEST_S = 1e9
#: Thread ids of Linux are smaller.
_FIRST_LANE_ID = 10_000_000

Key = str | Sequence[str] | None
_log = logging.getLogger(__name__)


class TraceError(ValueError):
    """The directory for traces cannot be used. The text names it and the remedy."""


class _Event(NamedTuple):  # made many times a step, and a named tuple is made four times as fast as a frozen dataclass
    """`track`: "" = the thread's own line; else the name of the lines on which such work is shown."""

    name: str
    key: Key
    start_s: float
    end_s: float | None
    track: str
    thread_id: int
    thread_name: str
    args: dict[str, Any]


class Span:
    """One piece of work, from `__enter__` to `__exit__`, in one thread."""

    __slots__ = ("_args", "_key", "_name", "_recorder", "_start_s")

    def __init__(self, recorder: Recorder, name: str, key: Key, args: dict[str, Any]) -> None:
        self._recorder, self._name, self._key, self._args = recorder, name, key, args
        self._start_s = 0.0

    def note(self, **args: Any) -> None:
        """What is known only later, e.g. how many bytes it were."""
        self._args.update(args)

    def __enter__(self) -> Span:
        self._start_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._args["error"] = str(error) or type(error).__name__
        self._recorder.add(self._name, self._key, self._start_s, time.monotonic(), "", self._args)


class _NoSpan:
    """What `span` gives while tracing is off."""

    __slots__ = ()

    def note(self, **args: Any) -> None:
        pass

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


_NO_SPAN = _NoSpan()
_recorder: Recorder | None = None
_starting = threading.Lock()


def start(directory: str, process_name: str) -> None:
    """Record from now on, into a new file in `directory`, which is made if need be.

    A second call in one process (a scheduler and a worker may share one) adds its name. Raises TraceError.
    """
    global _recorder
    with _starting:
        if _recorder is None:
            _recorder = Recorder(directory, process_name)
        else:
            _recorder.add_name(process_name)


def stop() -> None:
    """Write what is pending, and end the file. Idempotent."""
    global _recorder
    with _starting:
        recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def is_on() -> bool:
    """For callers who would have to gather something first."""
    return _recorder is not None


def span(name: str, key: Key = None, **args: Any) -> Span | _NoSpan:
    """A context manager: from its begin to its end, this thread does `name`."""
    recorder = _recorder
    return _NO_SPAN if recorder is None else Span(recorder, name, key, args)


def record(name: str, key: Key, start_s: float, end_s: float, track: str = "", **args: Any) -> None:
    """What went on from `start_s` to `end_s` of `time.monotonic`. With `track` it may overlap others of its kind."""
    recorder = _recorder
    if recorder is not None:
        recorder.add(name, key, start_s, end_s, track, args)


def instant(name: str, key: Key = None, **args: Any) -> None:
    """Something that happened now."""
    recorder = _recorder
    if recorder is not None:
        recorder.add(name, key, time.monotonic(), None, "", args)


class Recorder:
    """One process's file and the thread that writes it. Thread-safe.

    Args:
        max_file_bytes, max_pending: see MAX_FILE_BYTES and MAX_PENDING.
    """

    def __init__(
        self,
        directory: str,
        process_name: str,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._max_file_bytes = max_file_bytes
        self._max_pending = max_pending
        self._pending: deque[_Event] = deque()
        self._num_dropped = 0
        self._names = [process_name]
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._encoder = _Encoder(os.getpid(), _wall_offset_s())
        self.path, self._file = _new_file(directory)
        self._num_bytes = 0
        self._write(b"[\n" + self._encoder.process(process_name))
        self._thread = threading.Thread(target=self._run, name="datadist-trace", daemon=True)
        self._thread.start()

    def add(self, name: str, key: Key, start_s: float, end_s: float | None, track: str, args: dict[str, Any]) -> None:
        """Put one event into the queue. Never raises, never waits."""
        if len(self._pending) >= self._max_pending or self._ending.is_set():
            self._num_dropped += 1
            return
        thread = threading.current_thread()
        self._pending.append(_Event(name, key, start_s, end_s, track, thread.native_id or 0, thread.name, args))

    def add_name(self, process_name: str) -> None:
        if process_name not in self._names:
            self._names.append(process_name)
            with self._writing:
                self._write(self._encoder.process(" + ".join(self._names)))

    def flush(self) -> None:
        """Write what is pending now; not what comes meanwhile, which may never end."""
        with self._writing:
            num_left = len(self._pending)
            while num_left > 0:
                batch = [self._pending.popleft() for _ in range(min(num_left, _BATCH))]
                num_left -= len(batch)
                self._write(b"".join(map(self._encoder.event, batch)))

    def close(self) -> None:
        """Write the rest. Idempotent."""
        self._ending.set()
        self.flush()
        with self._writing:
            self._write(self._encoder.note("end of trace", num_dropped=self._num_dropped))
            self._close_file()

    def forget(self) -> None:
        """In a forked child: the file and the thread are the parent's."""
        self._close_file()

    def _run(self) -> None:
        while not self._ending.wait(WRITE_INTERVAL_S):
            self.flush()

    def _write(self, lines: bytes) -> None:
        """Whole lines at once. A trace that cannot be written any more ends; nothing else does."""
        if self._file < 0 or not lines:
            return
        is_full = self._num_bytes + len(lines) > self._max_file_bytes
        if is_full:
            self._num_dropped += lines.count(b"\n")
            lines = self._encoder.note("trace is full", max_bytes=self._max_file_bytes, num_dropped=self._num_dropped)
        try:
            if os.write(self._file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._num_bytes += len(lines)
        except OSError as error:
            _log.warning("the trace in %s ends here: %s", self.path, error)
            with suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
            is_full = True
        if is_full:
            self._ending.set()
            self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Encoder:
    """Events to lines of JSON. Used by one thread at a time."""

    def __init__(self, pid: int, wall_offset_s: float) -> None:
        self._pid = pid
        self._wall_offset_s = wall_offset_s
        self._json = msgspec.json.Encoder()
        self._thread_names: dict[int, str] = {}
        self._lanes: dict[str, list[_Lane]] = {}
        self._num_lanes = 0

    def process(self, name: str) -> bytes:
        return self._line({"ph": "M", "name": "process_name", "pid": self._pid, "tid": 0, "args": {"name": name}})

    def note(self, name: str, **args: Any) -> bytes:
        now_us = self._us(time.monotonic())
        return self._line({"ph": "i", "s": "p", "name": name, "ts": now_us, "pid": self._pid, "tid": 0, "args": args})

    def event(self, event: _Event) -> bytes:
        """Its line, after one that names its thread, if that is new."""
        if not all(0 <= time_s < _LATEST_S for time_s in (event.start_s, event.end_s or 0.0)):  # nor is NaN
            return b""
        start_us = self._us(event.start_s)
        end_us = start_us if event.end_s is None else max(start_us, self._us(event.end_s))
        thread_id, named = self._thread(event, start_us, end_us)
        shown: dict[str, Any] = {"name": _text(event.name), "cat": "datadist", "pid": self._pid, "tid": thread_id}
        shown |= {"ph": "i", "s": "t"} if event.end_s is None else {"ph": "X", "dur": end_us - start_us}
        args = {name: _plain(value) for name, value in event.args.items()}
        return named + self._line({**shown, "ts": start_us, "args": {**_keys(event.key), **args}})

    def _thread(self, event: _Event, start_us: int, end_us: int) -> tuple[int, bytes]:
        if not event.track:
            return event.thread_id, self._name_thread(event.thread_id, event.thread_name)
        lane = self._lane(_text(event.track), start_us)
        lane.end_us = max(lane.end_us, end_us)
        return lane.thread_id, self._name_thread(lane.thread_id, lane.name)

    def _lane(self, track: str, start_us: int) -> _Lane:
        """A line of this track that is free since `start_us`: what is shown on one line must not overlap."""
        lanes = self._lanes.setdefault(track, [])
        free = next((lane for lane in lanes if lane.end_us <= start_us), None)
        if free is None and (len(lanes) < MAX_LANES):
            name = track if not lanes else f"{track} {len(lanes) + 1}"
            free = _Lane(_FIRST_LANE_ID + self._num_lanes, name)
            self._num_lanes += 1
            lanes.append(free)
        return lanes[-1] if free is None else free

    def _name_thread(self, thread_id: int, name: str) -> bytes:
        if self._thread_names.get(thread_id) == name:
            return b""
        self._thread_names[thread_id] = name
        named = {"ph": "M", "name": "thread_name", "pid": self._pid, "tid": thread_id, "args": {"name": _text(name)}}
        return self._line(named)

    def _line(self, event: dict[str, Any]) -> bytes:
        try:
            return self._json.encode(event) + b",\n"
        except (TypeError, ValueError, OverflowError, RecursionError):
            return b""  # nothing that is recorded is worth an error

    def _us(self, monotonic_s: float) -> int:
        return math.floor((monotonic_s + self._wall_offset_s) * 1e6)


@dataclass(slots=True)
class _Lane:
    thread_id: int
    name: str
    end_us: int = 0


def _keys(key: Key) -> dict[str, Any]:
    if key is None:
        return {}
    return {"key": _text(key)} if isinstance(key, str) else {"keys": [_text(one) for one in list(key)[:MAX_ITEMS]]}


def _plain(value: Any) -> Any:
    """What JSON can say of it, and not too much of it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**53:  # also leaves out NaN
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_text(one) for one in list(value)[:MAX_ITEMS]]
    return _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


def _new_file(directory: str) -> tuple[str, int]:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename)[:60]
    path = os.path.join(directory, f"trace-{host}-{os.getpid()}-{secrets.token_hex(3)}.json")
    try:
        os.makedirs(directory, exist_ok=True)
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"kv_connector_extra_config: trace={directory!r} cannot hold traces: {error}. Name a directory that this "
            "process may write to, or leave the setting out."
        ) from error


def _wall_offset_s() -> float:
    """The system's clock less the monotonic one: the best of a few readings."""
    readings = []
    for _ in range(5):
        before_s, wall_s, after_s = time.monotonic(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic()
        readings.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(readings)[1]


def _forget_after_fork() -> None:
    global _recorder, _starting
    _starting = threading.Lock()
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(stop)


if __name__ == "__main__":
    from vllm_datadist.trace_report import main

    sys.exit(main(sys.argv[1:]))
