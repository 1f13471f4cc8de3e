# SPDX-License-Identifier: Apache-2.0
"""`python -m datadist_core.bench scale`: one end with hundreds of links.

A hub, in a process of its own, links with the ends of some crowds: processes that act as many peers each. Measured are
the time until all are linked, what the links cost the hub (memory, Python objects, open files, threads), what the
heartbeats cost while nothing happens, and a small pull with one link and with all of them. Then all links are torn
down and made anew, again and again: nothing may grow.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..checks import HostPort
from ..cluster import LLMClusterInfo
from ..errors import LLMException
from ..testing.parallel import require_all
from ..testing.remote import RemoteObject
from ..types import LLMStatusCode
from .blocks import BlockLists, make_lists
from .contract import PULL
from .ends import End
from .field import Progress
from .report import plain_table

_HUB_ID = 900_000
_CALL_TIMEOUT_S = 600.0
_LINK_TIMEOUT_MS = 120_000
_PULL_BYTES, _CACHE_BYTES = 16 << 10, 64 << 10
_SAMPLE_S = 0.002
_ATTEMPTS = 5
_IS_LINKED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
_SETTLE_S = 30.0
#: Threads that a backend starts when there is more to do, however many the links are.
BACKEND_THREADS = 4


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """What to measure.

    Attributes:
        num_links: of the hub.
        num_processes: that share the peers' ends among them.
        backend: as in `LLMConfig.transfer_backend`.
        idle_s: for how long the heartbeats are watched.
        num_pulls: per number of links.
        num_rounds: how often all links are torn down and made anew.
        heartbeat_ms: of the peers; the hub's are 4 s apart. Longer ones let a busy host take its time.
    """

    num_links: int = 512
    num_processes: int = 8
    backend: str = "auto"
    idle_s: float = 8.0
    num_pulls: int = 500
    num_rounds: int = 10
    heartbeat_ms: int = 4000


@dataclass(frozen=True, slots=True)
class Target:
    """A peer of the hub."""

    cluster_id: int
    address: HostPort


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds. `num_objects`: those that Python's garbage collector knows."""

    private_bytes: int
    num_objects: int
    num_files: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Linked:
    """How linking went.

    Attributes:
        most_threads: at the same time, while it lasted.
        num_again: links that could not be made at the first attempt, as on a host that is far too busy.
    """

    seconds: float
    most_threads: int
    num_again: int = 0


@dataclass(slots=True)
class ScaleResults:
    """Of one run. `rounds` are taken with all links made; the first is from before anything was torn down."""

    plan: ScalePlan
    before: Usage | None = None
    linked: Linked | None = None
    after: Usage | None = None
    idle_cpu: float = 0.0
    idle_cpu_of_one: float = 0.0
    pull_of_one_s: list[float] = field(default_factory=list)
    pull_of_all_s: list[float] = field(default_factory=list)
    rounds: list[Usage] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)


class Crowd:
    """Many ends in one process that listen. The first has a cache."""

    def __init__(self, backend: str, first_cluster_id: int, num_ends: int, heartbeat_ms: int) -> None:
        self._ends = [
            End(backend, first_cluster_id + i, 0, _CACHE_BYTES, listen=True, heartbeat_ms=heartbeat_ms)
            for i in range(num_ends)
        ]
        self._ends[0].prepare(_CACHE_BYTES // _PULL_BYTES, _PULL_BYTES)

    def targets(self) -> list[Target]:
        return [Target(end.dist.cluster_id, end.address()) for end in self._ends]

    def num_links(self) -> int:
        return sum(len(end.dist._open().links.links()) for end in self._ends)


class Hub:
    """The end that has all the links."""

    def __init__(self, backend: str) -> None:
        self._end = End(backend, _HUB_ID, 0, _CACHE_BYTES)
        self._end.prepare(_CACHE_BYTES // _PULL_BYTES, _PULL_BYTES)

    def link(self, targets: Sequence[Target]) -> Linked:
        """Link with all at once. LLMException naming one that failed again and again."""
        failed, num_again = list(targets), 0
        with _most_threads() as most:
            started_s = time.perf_counter()
            for attempt in range(_ATTEMPTS):
                _, each = self._end.dist.link_clusters(_infos(failed), timeout=_LINK_TIMEOUT_MS)
                if attempt == _ATTEMPTS - 1:
                    self._check("link", failed, each)
                failed = [t for t, status in zip(failed, each, strict=True) if status not in _IS_LINKED]
                if not failed:
                    break
                num_again += len(failed)
            passed_s = time.perf_counter() - started_s
        return Linked(passed_s, most(), num_again)

    def unlink(self, targets: Sequence[Target]) -> None:
        _, each = self._end.dist.unlink_clusters(_infos(targets), timeout=_LINK_TIMEOUT_MS)
        self._check("unlink", targets, each)

    def pulls(self, cluster_id: int, repeats: int) -> list[float]:
        """Seconds of each of so many pulls of one small block."""
        lists: list[BlockLists] = [make_lists("random", _PULL_BYTES, _PULL_BYTES)]
        return self._end.move_each(cluster_id, PULL, lists, repeats)

    def idle_cpu(self, seconds: float) -> float:
        """Part of one core that this process uses while nobody asks anything of it."""
        started_s, before_s = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before_s) / (time.perf_counter() - started_s)

    def usage(self, settled_threads: int | None = None) -> Usage:
        """Once no more threads are left than that, or after `_SETTLE_S`: idle ones end after some seconds."""
        deadline_s = time.monotonic() + _SETTLE_S
        while settled_threads is not None and _num_threads() > settled_threads and time.monotonic() < deadline_s:
            time.sleep(0.05)
        gc.collect()
        return Usage(_private_bytes(), len(gc.get_objects()), len(os.listdir("/proc/self/fd")), _num_threads())

    def _check(self, verb: str, targets: Sequence[Target], each: Sequence[LLMStatusCode]) -> None:
        for target, status in zip(targets, each, strict=True):
            if status is not LLMStatusCode.LLM_SUCCESS:
                reason = self._end.dist.link_failure(target.cluster_id)
                raise LLMException(f"cannot {verb} cluster {target.cluster_id}: {status.name}: {reason}", status)


def measure(plan: ScalePlan, progress: Progress = lambda text: None) -> ScaleResults:
    """Raises LLMException if a link cannot be made or ended."""
    results = ScaleResults(plan)
    with ExitStack() as undo:
        progress(f"starting {plan.num_processes} processes with {plan.num_links} ends")
        crowds = _start_crowds(plan, undo)
        targets = [target for crowd in crowds for target in crowd.call("targets")]
        hub = RemoteObject(Hub, (plan.backend,), _CALL_TIMEOUT_S)
        undo.callback(hub.kill)
        _measure_links(results, hub, targets, progress)
        _measure_rounds(results, hub, targets, progress)
        hub.call("unlink", targets)
    return results


def _start_crowds(plan: ScalePlan, undo: ExitStack) -> list[RemoteObject]:
    """All at once. Raises what went wrong in one of them."""
    crowds: dict[int, RemoteObject] = {}

    def start(i: int) -> None:
        first = plan.num_links * i // plan.num_processes
        number = plan.num_links * (i + 1) // plan.num_processes - first
        crowds[i] = RemoteObject(Crowd, (plan.backend, _HUB_ID + 1 + first, number, plan.heartbeat_ms), _CALL_TIMEOUT_S)
        undo.callback(crowds[i].kill)

    require_all([functools.partial(start, i) for i in range(plan.num_processes)], _CALL_TIMEOUT_S)
    return [crowds[i] for i in range(plan.num_processes)]


def _measure_links(results: ScaleResults, hub: RemoteObject, targets: Sequence[Target], progress: Progress) -> None:
    plan, first = results.plan, targets[0]
    hub.call("link", targets[:1])
    hub.call("pulls", first.cluster_id, plan.num_pulls)  # to warm up
    results.pull_of_one_s = hub.call("pulls", first.cluster_id, plan.num_pulls)
    results.before = hub.call("usage")
    results.idle_cpu_of_one = hub.call("idle_cpu", plan.idle_s)
    progress(f"linking {len(targets) - 1} more")
    results.linked = hub.call("link", targets[1:])
    results.after = hub.call("usage", results.before.num_threads + BACKEND_THREADS)
    progress("all are linked; pulling")
    results.pull_of_all_s = hub.call("pulls", first.cluster_id, plan.num_pulls)
    results.idle_cpu = hub.call("idle_cpu", plan.idle_s)


def _measure_rounds(results: ScaleResults, hub: RemoteObject, targets: Sequence[Target], progress: Progress) -> None:
    most_threads = None if results.before is None else results.before.num_threads + BACKEND_THREADS
    results.rounds.append(hub.call("usage", most_threads))
    num_rounds = results.plan.num_rounds
    for number in range(num_rounds):
        progress(f"round {number + 1} of {num_rounds}")
        started_s = time.perf_counter()
        hub.call("unlink", targets)
        hub.call("link", targets)
        results.round_s.append(time.perf_counter() - started_s)
        # Idle threads end after some seconds: only at the end is it worth while to wait for that.
        results.rounds.append(hub.call("usage", most_threads if number == num_rounds - 1 else None))


# -- the hub's process


def _infos(targets: Sequence[Target]) -> list[LLMClusterInfo]:
    infos = []
    for target in targets:
        info = LLMClusterInfo()
        info.remote_cluster_id = target.cluster_id
        info.append_remote_ip_info(target.address.host, target.address.port)
        infos.append(info)
    return infos


@contextmanager
def _most_threads() -> Iterator[Callable[[], int]]:
    """Looks every now and then how many threads there are, itself not counted."""
    seen, ended = [_num_threads()], threading.Event()

    def look() -> None:
        while not ended.wait(_SAMPLE_S):
            seen.append(_num_threads() - 1)

    watcher = threading.Thread(target=look, name="datadist-bench-watch", daemon=True)
    watcher.start()
    try:
        yield lambda: max(seen)
    finally:
        ended.set()
        watcher.join(10)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


# -- text


def report(results: ScaleResults) -> str:
    """Tables."""
    return _links_table(results) + _rounds_table(results)


def _links_table(results: ScaleResults) -> str:
    before, after, linked = results.before, results.after, results.linked
    if before is None or after is None or linked is None:
        return ""
    number = results.plan.num_links
    more = max(1, number - 1)
    rows = [
        ["time until all are linked", f"{linked.seconds:.2f} s", f"{linked.seconds / more * 1e3:.2f} ms per link"],
        ["tried again", str(linked.num_again), "more than 0 on a host that is too busy"],
        ["memory", _mib(after), f"{(after.private_bytes - before.private_bytes) / more / 1024:.1f} KiB per link"],
        ["Python objects", f"{after.num_objects}", f"{(after.num_objects - before.num_objects) / more:.0f} per link"],
        ["open files", f"{after.num_files}", f"{(after.num_files - before.num_files) / more:.2f} per link"],
        ["threads", f"{after.num_threads}", f"{before.num_threads} with one link; {linked.most_threads} while linking"],
        ["processor time, idle", f"{results.idle_cpu:.2%} of one", f"{results.idle_cpu_of_one:.2%} with one link"],
        ["pull of 16 KiB, median", _us(results.pull_of_all_s, 50), f"{_us(results.pull_of_one_s, 50)} with one link"],
        ["pull of 16 KiB, p99", _us(results.pull_of_all_s, 99), f"{_us(results.pull_of_one_s, 99)} with one link"],
    ]
    title = f"{number} links to {results.plan.num_processes} processes, backend {results.plan.backend}"
    return plain_table(title, ["", f"{number} links", ""], rows)


def _rounds_table(results: ScaleResults) -> str:
    rows = [
        [str(i), _mib(usage), str(usage.num_objects), str(usage.num_files), str(usage.num_threads), seconds]
        for i, (usage, seconds) in enumerate(
            zip(results.rounds, ["-", *(f"{s:.2f} s" for s in results.round_s)], strict=True)
        )
    ]
    title = f"All {results.plan.num_links} links torn down and made anew"
    return plain_table(title, ["round", "memory", "objects", "files", "threads", "time"], rows)


def _mib(usage: Usage) -> str:
    return f"{usage.private_bytes / (1 << 20):.1f} MiB"


def _us(times_s: Sequence[float], percent: int) -> str:
    if len(times_s) < 2:
        return "-"
    return f"{statistics.quantiles(times_s, n=100)[percent - 1] * 1e6:.1f} us"


# -- command line


def main(arguments: Sequence[str], progress: Progress) -> int:
    """Exit status: 0, or 1 if a link could not be made."""
    plan = _plan(arguments)
    try:
        results = measure(plan, progress)
    except LLMException as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    sys.stdout.write(report(results))
    return 0


def _plan(arguments: Sequence[str]) -> ScalePlan:
    default = ScalePlan()
    parser = argparse.ArgumentParser(prog="python -m datadist_core.bench scale", description="One end with many links.")
    add = parser.add_argument
    add("--links", type=_positive, default=default.num_links, help=f"default {default.num_links}")
    add("--processes", type=_positive, default=default.num_processes, help=f"default {default.num_processes}")
    add("--backend", default=default.backend, help=f"default {default.backend}")
    add("--idle-seconds", type=float, default=default.idle_s, help=f"default {default.idle_s:g}")
    add("--pulls", type=_positive, default=default.num_pulls, help=f"default {default.num_pulls}")
    add("--rounds", type=int, default=default.num_rounds, help=f"default {default.num_rounds}")
    add("--heartbeat-ms", type=_positive, default=default.heartbeat_ms, help="of the peers; default 4000")
    given = parser.parse_args(arguments)
    processes = min(given.processes, given.links)
    return ScalePlan(
        given.links, processes, given.backend, given.idle_seconds, given.pulls, given.rounds, given.heartbeat_ms
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)
