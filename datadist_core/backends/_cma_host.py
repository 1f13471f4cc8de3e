# SPDX-License-Identifier: Apache-2.0
"""Which host and namespaces this process is in, and what the kernel says of processes."""

from __future__ import annotations

import os
import select
import weakref
from dataclasses import dataclass
from pathlib import Path

CAP_SYS_PTRACE = 19
_YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of a process, as the kernel compares them. `user_ids` and `group_ids`: real, effective, saved."""

    user_ids: tuple[int, ...]
    group_ids: tuple[int, ...]
    permitted: int
    effective: int


def yama_scope() -> int:
    """`kernel.yama.ptrace_scope`: who may touch whom; 0, all processes of one user, where there is no Yama."""
    try:
        return int(_YAMA_SCOPE.read_text())
    except (OSError, ValueError):
        return 0


def credentials(process: int | str) -> Credentials:
    """Raises OSError if there is no such process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.partition(":")[::2] for line in lines)
    user_ids, group_ids = (tuple(int(word) for word in fields[name].split()[:3]) for name in ("Uid", "Gid"))
    return Credentials(user_ids, group_ids, int(fields["CapPrm"], 16), int(fields["CapEff"], 16))


def may_trace_all() -> bool:
    """Whether this process has CAP_SYS_PTRACE."""
    try:
        return bool(credentials("self").effective >> CAP_SYS_PTRACE & 1)
    except (OSError, KeyError, ValueError):
        return False


class ProcessWatch:
    """Tells whether a process still exists, and is not another one with the same number. Thread-safe.

    By a pidfd; where there are none, by the time the process was started. Raises ProcessLookupError if there is no
    such process to begin with. There is no close: a pidfd goes with the last reference.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = _open_pidfd(pid)
        self._started = start_time(pid) if self._pidfd is None else 0
        if self._pidfd is not None:
            weakref.finalize(self, os.close, self._pidfd).atexit = False

    def has_ended(self) -> bool:
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            return bool(poller.poll(0))
        try:
            return start_time(self._pid) != self._started
        except ProcessLookupError:
            return True


def start_time(pid: int) -> int:
    """When a process was started, in clock ticks since boot. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
    # Field 22; the second one, in parentheses, may hold anything.
    return int(stat.rpartition(")")[2].split()[19])


def _open_pidfd(pid: int) -> int | None:
    """None where the kernel is too old (before 5.3), or a filter forbids it."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
