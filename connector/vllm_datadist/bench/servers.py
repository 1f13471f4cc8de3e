# SPDX-License-Identifier: Apache-2.0
"""Starts P and D, and ends them: whatever happens, nothing of them is left running."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .http_calls import HOST, MODEL_NAME, is_ready
from .model import ServedModel

Progress = Callable[[str], None]

START_TIMEOUT_S = 600.0
_GRACE_S = 15.0
_POLL_S = 0.25
_REPORT_S = 15.0
_PR_SET_PDEATHSIG = 1
# Several CPU servers on a few cores; each applies only where the environment does not say otherwise.
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
}
_LIBC = ctypes.CDLL(None, use_errno=True)


class ServerFailed(RuntimeError):
    """A server did not come up. The text has the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """How both servers are started.

    Attributes:
        block_tokens, num_blocks: of the KV cache.
        max_tokens: longest request.
        chunk_tokens: most tokens of a step; None = vLLM's default.
    """

    model: ServedModel
    block_tokens: int
    num_blocks: int
    max_tokens: int
    chunk_tokens: int | None = None

    @property
    def kv_cache_gib(self) -> int:
        """What vLLM is told that the KV cache may use."""
        return 1 + (self.num_blocks * self.block_tokens * self.model.kv_bytes_per_token >> 30)


class Server:
    """One `vllm serve` with all its processes. Not thread-safe."""

    def __init__(
        self, name: str, setup: ServerSetup, transfer: Mapping[str, Any], env: Mapping[str, str], log_path: Path
    ) -> None:
        self.name = name
        self.port = free_port()
        self._log_path = log_path
        size = {"VLLM_CPU_KVCACHE_SPACE": str(setup.kv_cache_gib)}
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                _command(self.port, setup, transfer),
                env={**_ENVIRONMENT, **os.environ, **size, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only us, and we end the servers
                preexec_fn=_end_with_parent,
            )

    def wait_ready(self, deadline_s: float, progress: Progress) -> None:
        """Raises ServerFailed if it ends by itself, or is not ready at `deadline_s` (monotonic)."""
        started_s = last_s = time.monotonic()
        while not is_ready(self.port):
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended by itself ({self._process.returncode}):\n{self.log_tail()}")
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise ServerFailed(f"{self.name} was not ready in time:\n{self.log_tail()}")
            if now_s - last_s > _REPORT_S:
                last_s = now_s
                progress(f"  {self.name} still starts ({now_s - started_s:.0f} s)")
            time.sleep(_POLL_S)

    def log_tail(self, num_lines: int = 15) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def use_cores(self, cores: Collection[int]) -> None:
        """Undo what a server did to its own threads: some tie themselves to one core, the same in P and in D."""
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                for thread in process.threads():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(thread.id, cores)

    def compute_on(self, core: int) -> bool:
        """Let the threads that compute, the first of each worker process, have a core. Whether they do."""
        workers = [process for process in self._tree() if _is_worker(process)]
        try:
            for process in workers:
                os.sched_setaffinity(process.pid, {core})  # of the thread with the process's id: not of the others
        except OSError:
            return False
        return bool(workers)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left of it. Returns when all of it is gone. Idempotent."""
        tree = self._tree()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        _kill_all(tree)
        self._process.wait()

    def request_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def _tree(self) -> list[psutil.Process]:
        """All processes of its session: also those whose parent has ended."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self._process.pid]


@contextmanager
def running(servers: Sequence[Callable[[], Server]], progress: Progress) -> Iterator[list[Server]]:
    """Start all side by side; all are stopped at the end. Raises ServerFailed."""
    with ExitStack() as stopping:
        started: list[Server] = []
        for make in servers:
            server = make()
            stopping.callback(server.stop)
            started.append(server)
        stopping.callback(lambda: [server.request_stop() for server in started])
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for server in started:
            server.wait_ready(deadline_s, progress)
        for server in started:
            server.use_cores(os.sched_getaffinity(0))
        yield started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _command(port: int, setup: ServerSetup, transfer: Mapping[str, Any]) -> list[str]:
    options: dict[str, object] = {
        "--host": HOST,
        "--port": port,
        "--model": setup.model.path,
        "--served-model-name": MODEL_NAME,
        "--dtype": "float32",
        "--block-size": setup.block_tokens,
        "--num-gpu-blocks-override": setup.num_blocks,
        "--max-model-len": setup.max_tokens,
        "--kv-transfer-config": json.dumps(dict(transfer)),
    }
    if setup.chunk_tokens is not None:
        options["--max-num-batched-tokens"] = setup.chunk_tokens
    flat = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *flat]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("VLLM::Worker")
    return False


def _end_with_parent() -> None:
    """Last resort, if this process is killed: the server gets SIGTERM and ends its own processes."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    """Those that are left; psutil checks that an id is still the same process."""
    _, alive = psutil.wait_procs(processes, timeout=2.0)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
