# SPDX-License-Identifier: Apache-2.0
"""Runs one command and guarantees that nothing of it outlives its caller. Standard library only.

A vLLM server is a tree: API server, engine core, workers, resource trackers, some in process groups of their own. If
the API server is killed, or the test run that started it, the rest would stay and keep gigabytes. So each server
runs under this process, which

- is the tree's *subreaper*: whatever is orphaned in the tree becomes its child, so nothing can slip out of sight;
- ends the tree when it gets SIGTERM, SIGINT or SIGHUP, when the command itself has ended, or when its caller is gone
  (seen by a changed parent id, which works also if the caller was killed with SIGKILL);
- returns only when it has no descendant left: SIGTERM first, SIGKILL after the grace time. Python's resource trackers
  go last, since they are what removes the shared memory of processes that were killed.

    python supervise.py GRACE_SECONDS CALLER_PID COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
TRACKERS_GRACE_S = 5.0


def descendants(root_pid: int) -> list[int]:
    """Ids of all live processes below `root_pid`, parents before children. Zombies count: they are not reaped yet."""
    children: dict[int, list[int]] = {}
    for pid, parent in _process_table():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root_pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _process_table() -> list[tuple[int, int]]:
    """(pid, parent pid) of every process. A process that ends meanwhile is left out."""
    table = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", "rb") as stat,
            ):
                # The command name may hold spaces and brackets; the fields begin after the last bracket.
                table.append((int(name), int(stat.read().rpartition(b")")[2].split()[1])))
    return table


def is_resource_tracker(pid: int) -> bool:
    """Python's process that removes a dead program's shared memory, if it is given the time to."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command_line:
        return b"multiprocessing.resource_tracker" in command_line.read()
    return False


def signal_each(pids: list[int], number: int) -> None:
    """Send signal `number` to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """The last resort: were the supervisor itself killed with SIGKILL, at least the command goes too."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Started(Protocol):
    """A child process."""

    @property
    def pid(self) -> int: ...


class Supervisor:
    """Owns one command's process tree from start to the last reaped process.

    Args:
        start: starts the command as a child of this process.
        grace_s: how long the tree may take to end after SIGTERM.
        caller_pid: this process's parent; when it is gone the tree is ended.
    """

    def __init__(self, start: Callable[[], Started], grace_s: float, caller_pid: int) -> None:
        self._grace_s = grace_s
        self._caller_pid = caller_pid
        self._stop_wanted = False
        self._exit_status: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._main = start()

    def run(self) -> int:
        """Wait for an end from either side, clear the tree, return the command's exit status (128+N for signal N)."""
        while self._exit_status is None and not self._should_stop():
            time.sleep(POLL_S)
            self._reap()
        self._end_tree()
        return 0 if self._exit_status is None else self._exit_status

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_wanted = True

    def _should_stop(self) -> bool:
        return self._stop_wanted or os.getppid() != self._caller_pid

    def _end_tree(self) -> None:
        """Ask the command to end its tree in order; then end all but the resource trackers by force; then those."""
        if self._exit_status is None:
            signal_each([self._main.pid], signal.SIGTERM)
            self._wait_empty(self._grace_s)
        self._kill_until_empty(lambda pid: not is_resource_tracker(pid), TRACKERS_GRACE_S)
        self._kill_until_empty(lambda _pid: True, None)

    def _kill_until_empty(self, chosen: Callable[[int], bool], limit_s: float | None) -> None:
        end = None if limit_s is None else time.monotonic() + limit_s
        while not self._wait_empty(POLL_S) and (end is None or time.monotonic() < end):
            victims = [pid for pid in descendants(os.getpid()) if chosen(pid)]
            if victims:
                print(f"supervise: SIGKILL to {victims}", flush=True)
            signal_each(victims, signal.SIGKILL)

    def _wait_empty(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self._reap():
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_S / 2)
        return True

    def _reap(self) -> bool:
        """Collect ended children; return whether any child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._main.pid:
                    self._exit_status = _shell_status(status)
        except ChildProcessError:
            return False


def _shell_status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Parse GRACE_SECONDS CALLER_PID COMMAND... and run it."""
    if len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    return Supervisor(lambda: _start(arguments[2:]), float(arguments[0]), int(arguments[1])).run()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
