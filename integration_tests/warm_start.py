# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM servers from a process that has imported vLLM already: in 3 s of one core instead of 33.

A server's start is three processes (API server, engine core, worker) that each import the same modules for ten
seconds. Here one process imports them once and each server is forked from it; its engine core and worker are forked
from the server, as vLLM does itself on GPUs (its CPU platform asks for spawn, for the sake of OpenMP thread binding,
which the tests turn off). And they sleep where vLLM's spin, see `_sleep_where_vllm_spins`. Everything else is as with a
command line: the same arguments, environment, supervision and log. `make demo` and the benchmark's test still start
servers the slow way.

    COLD_START=1 make test      every server as a user would start it
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
#: What the three processes of a server import, as far as it takes long.
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "transformers.models.auto.tokenization_auto",
    "vllm_datadist.connector",
    "datadist_core.backends.shm",
    "datadist_core.backends.tcp",
    "integration_tests.gate",
)
#: Where the `main` of a module is, if not in itself.
MAINS = {"vllm.entrypoints.openai.api_server": "vllm.entrypoints.launchers.api_server.entry"}
MAX_MESSAGE_BYTES = 1 << 20
SPIN_PAUSE_S = 0.0001


# -- the process that forks ----------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Serve until the other end is closed."""
    link = socket.socket(fileno=descriptor)
    _fork_where_vllm_spawns()
    _sleep_where_vllm_spins()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ended: dict[int, int] = {}
    link.send(b"{}")
    while request := link.recv(MAX_MESSAGE_BYTES):
        asked = json.loads(request)
        if "command" in asked:
            answer = {"pid": _fork(lambda asked=asked: _supervise(asked, link))}
            # In a long run ids come again: it must not look ended because an earlier child of that id has.
            ended.pop(answer["pid"], None)
        else:
            _collect(ended)
            answer = {"status": ended.get(asked["pid"])}
        link.send(json.dumps(answer).encode())
    os._exit(0)  # the interpreter's own end would have things to say about vLLM's modules


def _fork_where_vllm_spawns() -> None:
    # Else a signal to a child would also be written to the event loop of the server that it was forked from.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    original = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: original("fork" if method == "spawn" else method)


def _sleep_where_vllm_spins() -> None:
    """A server's processes wait for one another by calling `os.sched_yield` again and again.

    Several servers on two processors then keep each other, and everybody else, from running: with Linux 6.18 a program
    beside three of them that sleeps for a second was late by up to ten. Here they sleep for a moment each time.
    """
    os.sched_yield = lambda: time.sleep(SPIN_PAUSE_S)


def _fork(run: Callable[[], int]) -> int:
    """Fork a child that does `run` and ends with what it returns. The parent must have no second thread."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _collect(ended: dict[int, int]) -> None:
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return


def _supervise(asked: dict[str, Any], link: socket.socket) -> int:
    """In the first child: what `supervise.main` does, but the command is a fork of this process."""
    from examples.vllm_pd import supervise

    link.close()
    os.setsid()
    log = os.open(asked["log_path"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(Path(asked["log_path"]).parent)
    os.environ.clear()
    os.environ.update(asked["env"])
    start = lambda: Forked(_fork(lambda: _serve(asked["command"])))  # noqa: E731
    return supervise.Supervisor(start, asked["grace_s"], os.getppid()).run()


@dataclass(frozen=True)
class Forked:
    pid: int


def _serve(command: list[str]) -> int:
    """In the second child: what `python -m MODULE ARGUMENTS` does, for vLLM's server and for modules with a `main`."""
    from examples.vllm_pd import supervise

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    supervise.die_with_parent()
    # Before the engine core exists, as with spawn: vLLM kills the engine core's children, and this one must stay.
    resource_tracker.ensure_running()
    module = command.index("-m") + 1
    sys.argv = command[module:]
    importlib.import_module(MAINS.get(sys.argv[0], sys.argv[0])).main()
    return 0


# -- the tests' end ------------------------------------------------------------------------------------------------


class WarmProcess:
    """The process to fork servers from. Thread-safe."""

    def __init__(self) -> None:
        from examples.vllm_pd.servers import CPU_DEFAULTS

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link, self._lock = ours, threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "integration_tests.warm_start", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**CPU_DEFAULTS, **os.environ},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            if not self._is_ready:
                self._receive()
                self._is_ready = True
            self._link.send(json.dumps(request).encode())
            return self._receive()

    def _receive(self) -> dict[str, Any]:
        answer = self._link.recv(MAX_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the warm process ended with status {self._process.wait(10)}")
        return json.loads(answer)

    def close(self) -> None:
        """Idempotent. Supervisors see that their parent is gone, and end their servers."""
        self._link.close()
        self._process.wait(30)


class WarmSupervisor:
    """A supervisor that the warm process forked; used like `subprocess.Popen`."""

    def __init__(self, warm: WarmProcess, pid: int) -> None:
        self._warm = warm
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._warm.ask(pid=self.pid)["status"]
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            time.sleep(0.05)
        return status

    def terminate(self) -> None:
        self._signal(15)

    def kill(self) -> None:
        self._signal(9)

    def _signal(self, number: int) -> None:
        # It may have been collected when somebody asked for another one: then the id may be a stranger's.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@contextmanager
def warm_servers() -> Iterator[WarmProcess | None]:
    """Within it, every `VllmServer` of this process is started from the warm process that it yields."""
    from examples.vllm_pd.process_tree import GRACE_S, ProcessTree
    from examples.vllm_pd.servers import VllmServer

    if os.environ.get("COLD_START"):
        os.environ["PYTHONPATH"] = str(ROOT)  # for `integration_tests.gate`
        yield None
        return
    warm = WarmProcess()

    class WarmTree(ProcessTree):
        def _start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> WarmSupervisor:
            asked = {"command": list(command), "env": dict(env), "log_path": str(self.log_path), "grace_s": GRACE_S}
            return WarmSupervisor(warm, warm.ask(**asked)["pid"])

    VllmServer.tree_type = WarmTree
    try:
        yield warm
    finally:
        VllmServer.tree_type = ProcessTree
        warm.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
