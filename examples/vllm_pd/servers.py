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

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from .service import HOST, START_TIMEOUT_S, HttpService, Progress, ServerFailed, free_port

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
