# SPDX-License-Identifier: Apache-2.0
"""An object in a process of its own: spawned, made there, then asked to do one thing at a time over a pipe.

The process ends when the pipe closes, so it cannot outlive the one that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from ..errors import LLMException, PeerLost, TimedOut

_LEAVE_S, _DIE_S = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    error: BaseException | None = None


class RemoteObject:
    """`RemoteObject(make, arguments, timeout_s).call("method", 1, 2)`. Thread-safe, one call at a time.

    Args:
        make: a function or class that can be imported, called there with `arguments`.
        timeout_s: bound of every call, and of the start.
        forkserver: fork it from a server process that has imported this library already: a tenth of the start's time.

    Raises, here and in `call`, what was raised there: an LLMException as it is, anything else as a RuntimeError with
    its text. PeerLost if the process has died; TimedOut if it hangs: then it is killed.
    """

    def __init__(
        self, make: Callable[..., object], arguments: tuple[Any, ...], timeout_s: float, forkserver: bool = False
    ) -> None:
        spawn: SpawnContext | ForkServerContext
        spawn = forkserver_context() if forkserver else multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._pipe, theirs = spawn.Pipe()
        self._lock = threading.Lock()
        self._ended = False
        self._process = spawn.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()
        try:
            self._reply()
        except BaseException:
            self.kill()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """What the method returns there."""
        with self._lock:
            try:
                self._pipe.send(_Call(method, args))
            except OSError as error:
                raise PeerLost(f"the child process died before {method}") from error
            return self._reply()

    def close(self) -> None:
        """Let the process end by itself, soon. Idempotent."""
        if not self._ended:
            self._pipe.close()
            self._process.join(_LEAVE_S)
            self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._process.kill()
        self._process.join(_DIE_S)
        self._process.close()
        self._pipe.close()

    def _reply(self) -> Any:
        try:
            if not self._pipe.poll(self._timeout_s):
                self.kill()  # an answer that came after all would be taken for that to the next call
                raise TimedOut(f"the child process did not answer within {self._timeout_s} s")
            reply = self._pipe.recv()
        except (OSError, EOFError) as error:
            raise PeerLost("the child process died") from error
        if reply.error is not None:
            raise reply.error
        return reply.value


@functools.cache
def forkserver_context() -> ForkServerContext:
    """For processes that begin with this library imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__package__])
    return context


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Main function of the process."""
    try:
        hosted = make(*arguments)
    except Exception as error:
        pipe.send(_Reply(error=_portable(error)))
        return
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send(_Reply())
        while True:
            pipe.send(_execute(hosted, pipe.recv()))
    # Not everything can be torn down when its peer is gone without warning; leaving always can.
    os._exit(0)


def _execute(hosted: object, call: _Call) -> _Reply:
    try:
        return _Reply(getattr(hosted, call.method)(*call.args))
    except Exception as error:
        return _Reply(error=_portable(error))


def _portable(error: Exception) -> Exception:
    """`error`, or its text if it is of a kind that may not survive the pipe."""
    return error if isinstance(error, LLMException) else RuntimeError(f"in the child process: {error!r}")
