# SPDX-License-Identifier: Apache-2.0
"""A real process with one LLMDataDist in it, driven by the test through a pipe."""

from __future__ import annotations

import os
import signal
import traceback
from typing import Any

import numpy as np

from datadist_core import BlocksCacheKey, LLMDataDist, LLMRole
from datadist_core.testing.remote import forkserver_context
from datadist_core.tests.core_ends import LINK_MS, config, desc, fill, manager, remote_info

ANSWER_TIMEOUT_S = 60
_spawn = forkserver_context()


class ChildFailed(Exception):
    """The child's command raised; the text is its exception."""


class Child:
    """`with Child(cluster_id=1, listen="127.0.0.1:0") as p: p.do("fill", 3)`. Killed at the end, whatever happens."""

    def __init__(self, **settings: Any) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.cluster_id = settings["cluster_id"]
        self.host, self.port = self._answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)
        self._pipe.close()

    def do(self, command: str, *args: Any, **kwargs: Any) -> Any:
        self.start(command, *args, **kwargs)
        return self._answer()

    def start(self, command: str, *args: Any, **kwargs: Any) -> None:
        self._pipe.send((command, args, kwargs))

    def finish(self) -> Any:
        """The answer to the command that `start` began."""
        return self._answer()

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def info(self):
        return remote_info(self.cluster_id, self.host, self.port)

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the child process did not answer")
        ok, value = self._pipe.recv()
        if not ok:
            raise ChildFailed(value)
        return value


class _Commands:
    """What a child can be told to do. Return values travel back through the pipe."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.end = LLMDataDist(settings.get("role", LLMRole.MIX), settings["cluster_id"])
        self.end.init(config(settings.get("backend", "auto"), settings.get("listen")))
        self.caches: dict[int, Any] = {}

    def fill(self, seed: int, num_blocks: int = 16, block: int = 256, num_tensors: int = 4) -> None:
        cache = manager(self.end).allocate_blocks_cache(
            desc(num_tensors, num_blocks, block), BlocksCacheKey(self.end.cluster_id)
        )
        fill(cache, seed)
        self.caches[0] = cache

    def link(self, cluster_id: int, host: str, port: int) -> list[str]:
        _, each = self.end.link_clusters([remote_info(cluster_id, host, port)], timeout=LINK_MS)
        return [each[0].name, str(self.end.link_failure(cluster_id))]

    def link_info(self, cluster_id: int):
        return self.end.link_info(cluster_id)

    def pull(self, cluster_id: int, src: list[int], dst: list[int], deadline_s: float = 30) -> list[np.ndarray]:
        manager(self.end).pull_blocks(BlocksCacheKey(cluster_id), self.caches[0], src, dst, deadline_s=deadline_s)
        return [tensor[dst].copy() for tensor in self.caches[0].numpy()]

    def push(self, cluster_id: int, src: list[int], dst: list[int]) -> None:
        manager(self.end).push_blocks(BlocksCacheKey(cluster_id), self.caches[0], src, dst)

    def read(self, blocks: list[int]) -> list[np.ndarray]:
        return [tensor[blocks].copy() for tensor in self.caches[0].numpy()]

    def check(self, cluster_id: int) -> None:
        self.end.check_link_status(cluster_id)

    def num_links(self) -> int:
        return len(self.end._open().links.links())

    def fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def finalize(self) -> None:
        self.end.finalize()


def _serve(pipe: Any, settings: dict[str, Any]) -> None:
    try:
        commands = _Commands(settings)
        address = commands.end.listen_address
        pipe.send((True, (address.host, address.port) if address else ("", 0)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(commands, name)(*args, **kwargs)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__} {getattr(error, 'status_code', '')!r}: {error}"))
