# SPDX-License-Identifier: Apache-2.0
"""One command with everything that it starts: started, watched, and above all ended, as a whole."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from . import supervise

GRACE_S = 8.0


class SupervisorHandle(Protocol):
    """What is asked of a supervisor's process: `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ProcessTree:
    """A command with everything that it starts, its output in a log file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        with open(log_path, "ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._supervisor = self._start(command, env, log)

    def _start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> SupervisorHandle:
        wrapper = [sys.executable, "-I", "-S", supervise.__file__, str(GRACE_S), str(os.getpid())]
        # Its own session: Ctrl-C in a terminal reaches only us, and we end the servers in order.
        return subprocess.Popen(
            [*wrapper, *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.log_path.parent,
            start_new_session=True,
        )

    def exit_status(self) -> int | None:
        """None while it runs; 128+N if the command was ended by signal N."""
        return self._supervisor.poll()

    def pids(self) -> list[int]:
        """The command first, then all its descendants; empty once it has ended."""
        return supervise.descendants(self._supervisor.pid) if self.exit_status() is None else []

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        if self.exit_status() is None:
            self._supervisor.terminate()

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, wait, SIGKILL. Returns when no process of the tree is left."""
        if self.exit_status() is None:
            self.request_stop()
            try:
                self._supervisor.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._kill()

    def kill(self) -> None:
        """SIGKILL to all but Python's resource trackers; the supervisor cleans up after them."""
        supervise.signal_each([pid for pid in self.pids() if not supervise.is_resource_tracker(pid)], 9)

    def _kill(self) -> None:
        """The supervisor is the subreaper, so it must go last: until then nothing can slip from under it."""
        while below := _alive(supervise.descendants(self._supervisor.pid)):
            supervise.signal_each(below, 9)
            time.sleep(0.05)
        self._supervisor.kill()
        self._supervisor.wait()


def _alive(pids: Sequence[int]) -> list[int]:
    """Those that still run; a zombie has given everything back and only waits to be counted."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
