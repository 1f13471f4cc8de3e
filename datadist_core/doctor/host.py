# SPDX-License-Identifier: Apache-2.0
"""What this host gives a process: interpreter, processors, clock, threads, open files, and a container's limits."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .._copy import build_hook
from .._copy.helpers import MAX_THREADS
from ..bench.references import copy_kernel, kernel_is_native
from .findings import Finding, fail, note, ok, warn

_CGROUP = Path("/sys/fs/cgroup")
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "tod"}
_SLOW_CALL_S = 2e-6
#: What one link may hold open at one end: its control connection, shared memory both ways, streams of tcp, its process.
FILES_PER_LINK = 8
FILES_OF_AN_END = 64
THREADS_OF_AN_END = 128


def check_host(num_links: int) -> Iterator[Finding]:
    yield _python()
    yield _system()
    yield _processors()
    yield _kernel_library()
    yield _clock()
    yield _open_files(num_links)
    yield _threads()
    yield _memory_limit()


def _python() -> Finding:
    text = f"Python {platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return warn("python", f"{text}; tested with 3.10 to 3.13", "use one of these versions")
    return ok("python", text)


def _system() -> Finding:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return fail("kernel", text, "this package needs Linux")
    return ok("kernel", text)


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    threads = min(MAX_THREADS, usable)
    text = f"{_processor_name()}, {usable} of {os.cpu_count()} usable"
    if quota is None:
        return ok("processors", text, usable=usable)
    text += f"; this container may use {quota:g}"
    if quota < threads:
        return warn(
            "processors",
            f"{text}, but a large copy may be shared by {threads} threads, which the quota then stops for a while",
            f'set the option {{"shm": {{"copy_threads": {max(1, math.floor(quota))}}}}}, or raise the quota '
            "(docker: --cpus, Kubernetes: limits.cpu)",
            usable=usable,
            quota=quota,
        )
    return ok("processors", text, usable=usable, quota=quota)


def _processor_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _kernel_library() -> Finding:
    text = copy_kernel()
    if kernel_is_native():
        return ok("copy kernel", text, native=True)
    return warn(
        "copy kernel",
        "not compiled for this installation: copies go through Python, at a fraction of the speed",
        f"with a C compiler (gcc or clang) installed, run: {sys.executable} {build_hook.__file__}",
        native=False,
    )


def _clock() -> Finding:
    name = next(iter(_lines(_CLOCK)), "unknown").strip()
    started = time.perf_counter()
    for _ in range(1000):
        time.monotonic()
    each_s = (time.perf_counter() - started) / 1000
    text = f"clock source {name}, {each_s * 1e9:.0f} ns to read"
    if name not in _FAST_CLOCKS and name != "unknown" and each_s > _SLOW_CALL_S:
        return warn(
            "clock",
            f"{text}: each look at the time is a system call, and every transfer looks a few times",
            "let the kernel use tsc (boot option clocksource=tsc tsc=reliable, or the hypervisor's settings)",
            read_ns=each_s * 1e9,
        )
    return ok("clock", text, read_ns=each_s * 1e9)


def _open_files(num_links: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_AN_END + FILES_PER_LINK * num_links
    most = _count((soft - FILES_OF_AN_END) // FILES_PER_LINK) if soft != resource.RLIM_INFINITY else "any number of"
    text = f"limit of open files {_limit(soft)} (hard {_limit(hard)}): enough for {most} links"
    values = {"soft": soft, "hard": hard, "needed": needed}
    if soft != resource.RLIM_INFINITY and soft < needed:
        return fail(
            "open files",
            f"{text}; {num_links} were asked for, which may need {needed} files",
            f"ulimit -n {max(needed, 65536) if _allows(hard, 65536) else needed} (systemd: LimitNOFILE=, docker: "
            "--ulimit nofile=65536)",
            **values,
        )
    return ok("open files", text, **values)


def _threads() -> Finding:
    rooms = {f"{name} ({limit})": limit - used for name, limit, used in _thread_limits()}
    if not rooms:
        return ok("threads", "no limit")
    name, room = min(rooms.items(), key=lambda item: item[1])
    text = f"room for {max(room, 0)} more by the tightest limit, {name}"
    if room < THREADS_OF_AN_END:
        return warn(
            "threads",
            f"{text}; one process may start {THREADS_OF_AN_END}",
            "raise it (ulimit -u, docker: --pids-limit, Kubernetes: podPidsLimit, systemd: TasksMax=)",
            room=room,
        )
    return ok("threads", text, room=room)


def _thread_limits() -> Iterator[tuple[str, int, int]]:
    """(name, limit, used) of every limit that there is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        yield "ulimit -u", soft, _tasks_of_user()
    limit = cgroup_value("pids.max")
    used = cgroup_value("pids.current")
    if limit is not None and used is not None and limit.isdigit():
        yield "pids.max of the control group", int(limit), int(used)
    if text := next(iter(_lines(Path("/proc/sys/kernel/threads-max"))), ""):
        running = next(iter(_lines(Path("/proc/loadavg"))), "").split()
        tasks = running[3].partition("/")[2] if len(running) > 3 else "0"
        yield "kernel.threads-max", int(text), int(tasks)


def _tasks_of_user() -> int:
    mine, total = os.getuid(), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == mine:
                    total += len(os.listdir(entry / "task"))
            except OSError:
                continue  # it has ended
    return total


def _memory_limit() -> Finding:
    limit = cgroup_value("memory.max") or _first_line(_CGROUP / "memory/memory.limit_in_bytes")
    if limit is None or not limit.isdigit() or int(limit) >= 1 << 60:
        return ok("memory limit", "none by a control group")
    used = cgroup_value("memory.current") or _first_line(_CGROUP / "memory/memory.usage_in_bytes") or "0"
    room = int(limit) - int(used)
    return note(
        "memory limit",
        f"the control group allows {int(limit) / 2**30:.1f} GiB, {room / 2**30:.1f} GiB of it free; memory pools count "
        "as soon as they are touched",
        limit_bytes=int(limit),
        free_bytes=room,
    )


def cpu_quota() -> float | None:
    """Processors that the control groups allow, None without a limit."""
    quotas = []
    for folder in _own_groups():
        words = (_first_line(folder / "cpu.max") or "max").split()
        if words[0] != "max" and len(words) == 2:
            quotas.append(int(words[0]) / int(words[1]))
    quota, period = (_first_line(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota and period and int(quota) > 0:
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_value(name: str) -> str | None:
    """A file of the innermost control group (version 2) that has it."""
    return next((text for folder in _own_groups() if (text := _first_line(folder / name)) is not None), None)


def _own_groups() -> Iterator[Path]:
    """This process's control group and those above it."""
    for line in _lines(Path("/proc/self/cgroup")):
        if line.startswith("0::"):
            inner = _CGROUP / line[3:].strip().lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder == _CGROUP or _CGROUP in folder.parents)


def _first_line(path: Path) -> str | None:
    lines = _lines(path)
    return lines[0].strip() if lines else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _count(value: int) -> str:
    return str(max(value, 0))


def _allows(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted
