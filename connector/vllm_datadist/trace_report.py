# SPDX-License-Identifier: Apache-2.0
"""Joins the trace files of P's and D's processes into one, and says per request where the time went.

    python -m vllm_datadist.trace DIRECTORY [--output merged.json]

The merged file has every process under a number of its own (containers may have the same process id), all events in
the order of time, and arrows (flow events) from P's part of a hand-off to D's.

Hidden behind the prefill is that share of the time in which blocks of a request were moved, in which P was still
computing it. Time in which several parts were moved at once counts once. Push can hide nearly all of it; pull hides
nothing, because D begins when P has ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

#: What a forward pass computes of a request; where there is none, the whole prefill as the scheduler sees it.
COMPUTED = ("chunk", "prefill")
TRANSFER = "transfer"

Interval = tuple[float, float]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One process's events. `num_unreadable`: lines that are no event, e.g. the cut last line of a killed process."""

    path: Path
    events: list[Event]
    num_unreadable: int


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One hand-off. Times are milliseconds; None where the trace has nothing of it.

    Attributes:
        prefill_ms: from the first token computed at P to the last.
        transfer_ms: in which at least one part was being moved. `hidden_ms`: while P was still computing.
        queued_ms: at D, from its arrival to its blocks.
        load_ms: at D, from its blocks to the end of the load.
        first_ms: at D, from its arrival to the step with its first token.
    """

    key: str
    num_bytes: int
    backends: tuple[str, ...]
    prefill_ms: float | None
    transfer_ms: float | None
    hidden_ms: float | None
    queued_ms: float | None
    load_ms: float | None
    first_ms: float | None
    errors: tuple[str, ...]

    @property
    def hidden_share(self) -> float | None:
        """0..1; None without both a prefill and a transfer."""
        if not self.transfer_ms or self.hidden_ms is None:
            return None
        return self.hidden_ms / self.transfer_ms


# -- reading


def read_directory(directory: str | Path) -> list[TraceFile]:
    """Every trace file there."""
    return [read_file(path) for path in sorted(Path(directory).glob("trace-*.json"))]


def read_file(path: Path) -> TraceFile:
    """Line by line, so that a file without an end, or with a cut last line, is read as far as it goes."""
    events, num_unreadable = [], 0
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as lines:
        for line in lines:
            text = line.strip().rstrip(b",")
            if text in (b"", b"[", b"]"):
                continue
            try:
                event = decoder.decode(text)
            except (msgspec.MsgspecError, RecursionError, ValueError):
                num_unreadable += 1
                continue
            if _is_event(event):
                events.append(event)
            else:
                num_unreadable += 1
    return TraceFile(path, events, num_unreadable)


def _is_event(event: Event) -> bool:
    numbers = ("ts",) if event.get("ph") == "i" else ("ts", "dur") if event.get("ph") == "X" else ()
    return (
        event.get("ph") in ("X", "i", "M")
        and isinstance(event.get("name"), str)
        and all(isinstance(event.get(name), int) for name in (*numbers, "pid", "tid"))
        and isinstance(event.setdefault("args", {}), dict)
    )


# -- joining


def merge(files: Sequence[TraceFile]) -> list[Event]:
    """All events, each file's under a process id of its own, in the order of time, with arrows from P to D."""
    moved = [{**event, "pid": number} for number, file in enumerate(files, 1) for event in file.events]
    arrows = [arrow for number, found in enumerate(by_handoff(moved).values()) for arrow in _arrows(number, found)]
    return sorted([*moved, *arrows], key=lambda event: (event["ph"] != "M", event.get("ts", 0), -event.get("dur", 0)))


def by_handoff(events: Iterable[Event]) -> dict[str, list[Event]]:
    """What each hand-off's events are, in the order of their first one."""
    found: dict[str, list[Event]] = {}
    for event in events:
        for key in _keys(event):
            found.setdefault(key, []).append(event)
    return found


def _keys(event: Event) -> tuple[str, ...]:
    one, many = event["args"].get("key"), event["args"].get("keys")
    return (one,) if isinstance(one, str) else tuple(many) if isinstance(many, list) else ()


def _arrows(number: int, events: Sequence[Event]) -> Iterator[Event]:
    """From the first and from the last work at P to the end of D's load."""
    load = next((event for event in reversed(events) if event["name"] == "load" and event["ph"] == "X"), None)
    if load is None:
        return
    end_us = load["ts"] + max(0, load["dur"] - 1)
    works = sorted((event for event in events if _is_ps_work(event) and event["ts"] <= end_us), key=_begin_us)
    for count, work in enumerate(works[:1] + works[1:][-1:]):
        shared = {"cat": "datadist", "name": "hand-off", "id": 2 * number + count, "args": {}}
        yield {**shared, "ph": "s", "pid": work["pid"], "tid": work["tid"], "ts": work["ts"]}
        yield {**shared, "ph": "f", "bp": "e", "pid": load["pid"], "tid": load["tid"], "ts": end_us}


def _is_ps_work(event: Event) -> bool:
    is_push = event["name"] == TRANSFER and event["args"].get("mode") == "push"
    return event["ph"] == "X" and (event["name"] in COMPUTED or is_push)


def _begin_us(event: Event) -> int:
    return int(event["ts"])


# -- summing up


def summarize(events: Sequence[Event]) -> list[RequestSummary]:
    """One per hand-off of a merged trace."""
    return [_summarize(key, found) for key, found in by_handoff(events).items()]


def _summarize(key: str, events: Sequence[Event]) -> RequestSummary:
    transfers = _joined(_intervals(events, TRANSFER))
    prefill = _computed(events)
    hidden = None if prefill is None else sum(_overlap_us(one, prefill) for one in transfers)
    sent = [event for event in events if event["name"] == TRANSFER]
    errors = (event["args"].get("error") for event in events)
    return RequestSummary(
        key=key,
        num_bytes=sum(_whole(event["args"].get("num_bytes")) for event in sent),
        backends=tuple(sorted({str(event["args"]["backend"]) for event in sent if "backend" in event["args"]})),
        prefill_ms=None if prefill is None else (prefill[1] - prefill[0]) / 1000,
        transfer_ms=sum(end - begin for begin, end in transfers) / 1000 if transfers else None,
        hidden_ms=hidden / 1000 if hidden is not None and transfers else None,
        queued_ms=_longest_ms(events, "queued"),
        load_ms=_longest_ms(events, "load"),
        first_ms=_first_ms(events),
        errors=tuple(dict.fromkeys(str(error) for error in errors if error)),
    )


def _computed(events: Sequence[Event]) -> Interval | None:
    for name in COMPUTED:
        found = _intervals(events, name)
        if found:
            return min(begin for begin, _ in found), max(end for _, end in found)
    return None


def _intervals(events: Iterable[Event], name: str) -> list[Interval]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and e["ph"] == "X"]


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _overlap_us(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _longest_ms(events: Iterable[Event], name: str) -> float | None:
    return max(((end - begin) / 1000 for begin, end in _intervals(events, name)), default=None)


def _first_ms(events: Iterable[Event]) -> float | None:
    found = list(events)
    arrivals = [event["ts"] for event in found if event["name"] == "queued"]
    firsts = [event["ts"] for event in found if event["name"] == "first scheduled"]
    return (min(firsts) - min(arrivals)) / 1000 if arrivals and firsts else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# -- the command

_COLUMNS: Mapping[str, str] = {
    "prefill": "prefill_ms", "transfer": "transfer_ms", "hidden": "hidden_share", "queued": "queued_ms",
    "load": "load_ms", "first": "first_ms",
}  # fmt: skip


def table(summaries: Sequence[RequestSummary]) -> str:
    """For people. Times are milliseconds."""
    width = max([len("hand-off"), *(len(one.key) for one in summaries)])
    lines = [f"{'hand-off':{width}} {'MiB':>9} " + " ".join(f"{name:>9}" for name in _COLUMNS) + "  backend"]
    for one in summaries:
        cells = " ".join(f"{_cell(name, getattr(one, name)):>9}" for name in _COLUMNS.values())
        tail = ",".join(one.backends) + (f"  FAILED: {'; '.join(one.errors)}" if one.errors else "")
        lines.append(f"{one.key:{width}} {one.num_bytes / 2**20:9.2f} {cells}  {tail}")
    return "\n".join(lines)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name == "hidden_share" else f"{value:.1f}"


def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code: 1 if the directory has no trace."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_datadist.trace", description="Join traces of P and D; say where the time of requests went."
    )
    parser.add_argument("directory", help="the directory that the setting `trace` names at P and D")
    parser.add_argument("--output", help="write the joined trace there: open it in ui.perfetto.dev or chrome://tracing")
    options = parser.parse_args(arguments)
    files = read_directory(options.directory)
    if not files:
        print(f"{options.directory} has no file trace-*.json", file=sys.stderr)  # noqa: T201
        return 1
    merged = merge(files)
    if options.output:
        Path(options.output).write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": merged}))
    unreadable = sum(file.num_unreadable for file in files)
    print(f"{len(files)} processes, {len(merged)} events" + (f", {unreadable} unreadable lines" if unreadable else ""))  # noqa: T201
    print("Times in ms. hidden: share of the transfer's time in which P was still computing the prompt.\n")  # noqa: T201
    print(table(summarize(merged)))  # noqa: T201
    return 0
