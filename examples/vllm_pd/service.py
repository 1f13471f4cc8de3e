# SPDX-License-Identifier: Apache-2.0
"""A process tree that serves HTTP: a free port, readiness, its log, and what to do when it does not come up."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import httpx

from .process_tree import ProcessTree

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[str], None]

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
PORT_ATTEMPTS = 4
LOWEST_PORT = 10240
LOG_LINES_SHOWN = 30
HOST = "127.0.0.1"

PORT_TAKEN = re.compile(r"address already in use|errno 98|EADDRINUSE", re.IGNORECASE)
REMEDIES: dict[str, str] = {
    PORT_TAKEN.pattern: "Another program took the port. Run again; a free port is chosen each time.",
    r"torchvision::nms|libtorchcodec|_torchaudio": (
        "torchvision, torchaudio or torchcodec does not fit this torch; vLLM runs text models without the three: "
        "python -m pip uninstall -y torchvision torchaudio torchcodec"
    ),
    r"Unsupported connector type|No module named '?vllm_datadist": (
        "The connector is not installed in this environment: python -m pip install -e ."
    ),
    r"No module named '?vllm\b": "vLLM is not installed in this environment: make venv",
    r"No space left on device": "A disk or /dev/shm is full: see df -h.",
    r"Not enough memory|Cannot allocate memory|MemoryError|No available memory for the cache blocks": (
        "Too little memory. Close other programs, or set VLLM_CPU_KVCACHE_SPACE (GiB) to a smaller number."
    ),
    r"larger than the available KV cache memory|KV cache is needed": (
        "The KV cache is smaller than one full-length request. Set VLLM_CPU_KVCACHE_SPACE (GiB) to a larger number."
    ),
    r"No such file or directory.*vllm-router|No module named '?orjson": (
        "Install the router: python -m pip install vllm-router orjson"
    ),
}
KILLED_REMEDY = "It was killed (SIGKILL), as the kernel does when memory runs out: see dmesg, close other programs."


class ServerFailed(RuntimeError):
    """A server did not start, or ended by itself.

    Attributes:
        name: the server's name.
        log_path: its whole log.
        log_tail: the last lines of the log.
        remedy: what to do about it, or where to look.
    """

    def __init__(self, name: str, reason: str, log_path: Path, log_tail: str, remedy: str) -> None:
        super().__init__(f"{name}: {reason}\n--- end of {log_path}\n{log_tail}\n---\nRemedy: {remedy}")
        self.name, self.reason, self.log_path, self.log_tail, self.remedy = (
            name,
            reason,
            log_path,
            log_tail,
            remedy,
        )


def free_port(host: str = HOST) -> int:
    """A TCP port that was free a moment ago. Another process may take it, so users of it must be ready to try again.

    If possible it is none of those that the system gives to outgoing connections, which come and go all the time.
    """
    first_given = _first_given_port()
    for port in random.sample(range(LOWEST_PORT, first_given), 100) if first_given > LOWEST_PORT + 100 else ():
        with contextlib.suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _first_given_port() -> int:
    """0 if the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0


class HttpService:
    """A command that serves HTTP on a port chosen here; base of the services in `servers`.

    Args:
        name: for messages and the log file's name.
        command_for: the command line, given a port.
        env: the whole environment of the process.
        log_dir: where its log goes; a new temporary folder if None.
        ready_path: answers 200 once the service can be used.
        port: 0 = one that is free, chosen at each start.

    Not thread-safe; use one thread per service, or `start_all`.
    """

    #: How its processes are started.
    tree_type: ClassVar[type[ProcessTree]] = ProcessTree

    def __init__(
        self,
        name: str,
        command_for: Callable[[int], list[str]],
        env: Mapping[str, str],
        log_dir: str | os.PathLike[str] | None,
        ready_path: str,
        port: int = 0,
    ) -> None:
        self.name = name
        self.port = 0
        self._fixed_port = port
        self._command_for = command_for
        self._env = dict(env)
        self._ready_path = ready_path
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._tree: ProcessTree | None = None
        self._attempts = 0

    # - life -

    def start(self) -> None:
        """Start the process and return at once; `wait_ready` tells how it went."""
        if self._tree is not None:
            raise RuntimeError(f"{self.name} is already started")
        self._attempts += 1
        self.port = self._fixed_port or free_port()
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="vllm-datadist-logs-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        self._tree = self.tree_type(self._command_for(self.port), self._env, self.log_path.absolute())

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, on_progress: Progress | None = None) -> None:
        """Wait until the service answers.

        Args:
            timeout_s: limit for this wait.
            on_progress: called about once a second with the last line of the log.

        Raises:
            ServerFailed: it ended by itself, or was not ready in time (then it is stopped).
        """
        deadline = time.monotonic() + timeout_s
        next_report = 0.0
        while not self._is_ready():
            self._check_or_restart()
            now = time.monotonic()
            if now >= deadline:
                self._fail(f"was not ready after {timeout_s:.0f} s")
            if on_progress is not None and now >= next_report:
                on_progress(self.log_tail(1))
                next_report = now + 1.0
            time.sleep(0.25)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the whole process tree, by force if need be. Returns when nothing is left; may be called again."""
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.stop(timeout_s)

    def request_stop(self) -> None:
        """Begin to stop, and return at once; `stop` then waits. To stop several at the same time."""
        if self._tree is not None:
            self._tree.request_stop()

    def kill(self) -> None:
        """SIGKILL to every process at once, as if the host had gone; then wait until all are gone.

        Only Python's resource trackers are left a moment: they remove vLLM's own shared memory.
        """
        if self._tree is not None:
            self._tree.kill()
            self.stop()

    def exit_status(self) -> int | None:
        """None while it runs, or before `start`; 128+N if it was ended by signal N."""
        return self._tree.exit_status() if self._tree is not None else None

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # - facts -

    @property
    def base_url(self) -> str:
        """Without a slash at the end. Valid after `start`; may change while `wait_ready` tries another port."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The served command's process id (its supervisor is one above)."""
        pids = self.pids()
        if not pids:
            raise RuntimeError(f"{self.name} is not running")
        return pids[0]

    def pids(self) -> list[int]:
        """All processes of the service, the main one first."""
        return self._tree.pids() if self._tree is not None else []

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._tree is not None and self._tree.exit_status() is None

    @property
    def log_path(self) -> Path:
        """The log of the latest start."""
        return (self._log_dir or Path()) / f"{self.name}.log"

    def log_text(self) -> str:
        """The whole log so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int = LOG_LINES_SHOWN) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().rstrip().splitlines()[-num_lines:])

    # - inside -

    def _is_ready(self) -> bool:
        """Also checks that it is *our* process that answers, not one that took the port before it."""
        try:
            answer = httpx.get(f"{self.base_url}{self._ready_path}", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and self.running

    def _check_or_restart(self) -> None:
        if self.running:
            return
        if not self._fixed_port and self._attempts < PORT_ATTEMPTS and PORT_TAKEN.search(self.log_text()):
            self.stop()
            self.start()
            return
        status = self._tree.exit_status() if self._tree is not None else None
        self._fail(f"ended by itself with exit status {status}", KILLED_REMEDY if status == 137 else None)

    def _fail(self, reason: str, remedy: str | None = None) -> None:
        error = ServerFailed(self.name, reason, self.log_path, self.log_tail(), remedy or self._remedy())
        self.stop()
        raise error

    def _remedy(self) -> str:
        text = self.log_text()
        for pattern, remedy in REMEDIES.items():
            if re.search(pattern, text, re.IGNORECASE):
                return remedy
        return f"Read the log: {self.log_path}"
