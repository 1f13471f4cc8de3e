# SPDX-License-Identifier: Apache-2.0
"""Starts and, above all, *ends* vLLM servers, the router and the example proxy. For the demo and the integration tests.

    with VllmServer("path/to/model", kv_transfer_config=connector_config("kv_both")) as server:
        print(completion(server.base_url, "Hello", 8).text)

Several servers start at the same time with `start_all`. Each one has its own log file, and runs under `supervise`,
so that its whole process tree ends with it, or with the process that started it, however that one ends. A server
that does not come up raises `ServerFailed`, which carries the end of its log and, where the log is understood, what
to do about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol

import httpx

from . import supervise
from .client import (
    Completion,
    Piece,
    Sample,
    chat_stream,
    completion,
    completion_stream,
    metric_samples,
    metrics,
    metrics_by_label,
    pd_completion,
    prefill,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Completion",
    "ExampleProxy",
    "HttpService",
    "Piece",
    "Progress",
    "Router",
    "Sample",
    "ServerFailed",
    "StartReport",
    "VllmServer",
    "chat_stream",
    "completion",
    "completion_stream",
    "connector_config",
    "free_port",
    "metric_samples",
    "metrics",
    "metrics_by_label",
    "pd_completion",
    "prefill",
    "start_all",
    "stop_all",
]

Progress = Callable[[str], None]

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
GRACE_S = 8.0
PORT_ATTEMPTS = 4
LOG_LINES_SHOWN = 30
HOST = "127.0.0.1"

# What several vLLM CPU servers on a few cores need; each applies only where the environment does not say otherwise.
CPU_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
}
NIXL_DEFAULTS = {"UCX_TLS": "self,sm,tcp"}

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
    """A TCP port that was free a moment ago. Another process may take it, so users of it must be ready to try again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


# -- one supervised process tree -------------------------------------------------------------------


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


# -- a process tree that serves HTTP ---------------------------------------------------------------


class HttpService:
    """A command that serves HTTP on a port chosen here; base of the three services below.

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
        if PORT_TAKEN.search(self.log_text()) and self._attempts < PORT_ATTEMPTS:
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


# -- the three services ----------------------------------------------------------------------------


class VllmServer(HttpService):
    """vLLM's own OpenAI server, started as a user would start it.

    Args:
        model: the model's directory.
        kv_transfer_config: see `connector_config`; None for a server without a connector.
        name: for messages and the log file's name.
        extra_args: further command line arguments; they win over the ones set here.
        env: environment variables; they win over the caller's, and those over the CPU defaults. A value of None unsets.
        block_size: tokens per KV block. vLLM's CPU attention takes multiples of 32, MLA models multiples of 16.
        max_model_len: longest request in tokens.
        served_model_name: the model's name in requests.
        log_dir: where the log goes.
        port: 0 = one that is free, chosen at each start.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        kv_transfer_config: Mapping[str, Any] | None = None,
        name: str = "vllm",
        extra_args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        block_size: int = 32,
        max_model_len: int = 4096,
        served_model_name: str = "model",
        log_dir: str | os.PathLike[str] | None = None,
        port: int = 0,
    ) -> None:
        arguments = ["--model", str(model), "--served-model-name", served_model_name, "--dtype", "float32"]
        arguments += [
            "--enforce-eager",
            "--block-size",
            str(block_size),
            "--max-model-len",
            str(max_model_len),
        ]
        if kv_transfer_config is not None:
            arguments += ["--kv-transfer-config", json.dumps(dict(kv_transfer_config))]
        self._arguments = [*arguments, *extra_args]
        self.served_model_name = served_model_name
        self.kv_transfer_config = dict(kv_transfer_config) if kv_transfer_config is not None else None
        super().__init__(name, self._command, _server_env(kv_transfer_config, env or {}), log_dir, "/health", port)

    def _command(self, port: int) -> list[str]:
        server = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            HOST,
            "--port",
            str(port),
        ]
        return [*server, *self._arguments]


def connector_config(role: str, connector: str = "DataDistConnector", **extra: Any) -> dict[str, Any]:
    """What goes into --kv-transfer-config: role "kv_producer", "kv_consumer" or "kv_both", and options if any."""
    return {"kv_connector": connector, "kv_role": role} | extra


def _server_env(config: Mapping[str, Any] | None, overrides: Mapping[str, str | None]) -> dict[str, str]:
    defaults = dict(CPU_DEFAULTS)
    if config is not None and config.get("kv_connector") == "NixlConnector":
        # vLLM's own connector needs a port of its own per server, and a UCX setting to be fast between CPU servers.
        defaults |= NIXL_DEFAULTS | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return _merged(defaults, overrides)


def _merged(defaults: Mapping[str, str], overrides: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**defaults, **os.environ, **overrides}
    return {name: value for name, value in merged.items() if value is not None}


class Router(HttpService):
    """The ready-made `vllm-router` in prefill/decode mode.

    ``--kv-connector nixl`` is its name for "run P with max_tokens=1, hand P's kv_transfer_params to D"; nothing of NIXL
    itself is involved.

    Args:
        prefill_urls: base URLs of the prefill servers.
        decode_urls: base URLs of the decode servers.
        policy: how it chooses among several servers.
        extra_args: further command line arguments.
        log_dir: where the log goes.
        name: for messages and the log file's name.
    """

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        *,
        policy: str = "round_robin",
        extra_args: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        name: str = "router",
    ) -> None:
        self._arguments = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", policy]
        for url in prefill_urls:
            self._arguments += ["--prefill", url]
        for url in decode_urls:
            self._arguments += ["--decode", url]
        self._arguments += extra_args
        super().__init__(name, self._command, _merged({"NO_COLOR": "1"}, {}), log_dir, "/health")

    def _command(self, port: int) -> list[str]:
        program = str(Path(sys.executable).with_name("vllm-router"))
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        return [program, "--host", HOST, *ports, *self._arguments]


class ExampleProxy(HttpService):
    """The small proxy of this folder (`proxy.py`), with the same arguments as `Router`."""

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        *,
        extra_args: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        name: str = "proxy",
    ) -> None:
        self._arguments = ["--prefill", *prefill_urls, "--decode", *decode_urls, *extra_args]
        super().__init__(name, self._command, _merged({"PYTHONUNBUFFERED": "1"}, {}), log_dir, "/health")

    def _command(self, port: int) -> list[str]:
        program = str(Path(__file__).with_name("proxy.py"))
        return [sys.executable, program, "--host", HOST, "--port", str(port), *self._arguments]


# -- several at once -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartReport:
    """How far a service is: passed to `start_all`'s `on_progress`."""

    service: HttpService
    ready: bool
    elapsed_s: float
    last_line: str


@contextmanager
def start_all(
    services: Sequence[HttpService],
    timeout_s: float = START_TIMEOUT_S,
    on_progress: Callable[[StartReport], None] | None = None,
) -> Iterator[Sequence[HttpService]]:
    """Start services side by side, yield when all are ready, and stop all at the end, also if one of them fails.

    Raises:
        ServerFailed: the first one that did not come up.
    """
    start = time.monotonic()
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait_ready(timeout_s - (time.monotonic() - start), _reporter(service, start, on_progress))
            if on_progress is not None:
                on_progress(StartReport(service, True, time.monotonic() - start, ""))
        yield services
    finally:
        stop_all(services)


def stop_all(services: Sequence[HttpService]) -> None:
    """Stop services side by side. A Ctrl-C in between does not leave any of them running."""
    with ExitStack() as stack:
        for service in services:
            stack.callback(service.stop)
            service.request_stop()


def _reporter(service: HttpService, start: float, on_progress: Callable[[StartReport], None] | None) -> Progress | None:
    if on_progress is None:
        return None
    return lambda line: on_progress(StartReport(service, False, time.monotonic() - start, line))
