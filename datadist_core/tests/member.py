# SPDX-License-Identifier: Apache-2.0
"""A real process with one LLMDataDist, whose methods the test calls by name through a pipe."""

from __future__ import annotations

import os
import signal
from typing import Any

from datadist_core import LLMDataDist, LLMException, LLMRole
from datadist_core.testing.remote import forkserver_context
from datadist_core.tests.core_ends import config

ANSWER_TIMEOUT_S = 60
_spawn = forkserver_context()


class Member:
    """`with Member(3) as m: m.do("link", ...)`. Killed at the end, whatever happens."""

    def __init__(self, cluster_id: int, backend: str = "auto", listen: str | None = None) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, cluster_id, backend, listen), daemon=True)
        self._process.start()
        theirs.close()
        self.cluster_id = cluster_id
        self.host, self.port = self._answer()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)
        self._pipe.close()

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call that method of the LLMDataDist; its LLMException is raised here."""
        self._pipe.send((method, args, kwargs))
        return self._answer()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join(10)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the member's process did not answer")
        value, text, code = self._pipe.recv()
        if text is not None:
            raise LLMException(text, code)
        return value


def _serve(pipe: Any, cluster_id: int, backend: str, listen: str | None) -> None:
    end = LLMDataDist(LLMRole.MIX, cluster_id)
    end.init(config(backend, listen))
    address = end.listen_address
    pipe.send(((address.host, address.port) if address else ("", 0), None, None))
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(end, method)(*args, **kwargs), None, None))
        except LLMException as error:
            pipe.send((None, str(error), error.status_code))
