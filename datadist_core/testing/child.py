# SPDX-License-Identifier: Apache-2.0
"""The other end of a pair in a real process of its own, so that it can be stopped and killed like a real peer.

The child is spawned, imports the backend by name, opens a `LocalEnd` and then does what comes over a pipe, one
call at a time. It ends when the pipe closes: no test can leave it behind, however it fails.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, cast

from ..errors import LLMException, PeerLost, TimedOut
from ..memory.grid import Grid
from ..transfer.backend import Backend, Completion
from ..transfer.plan import Batch
from .end import Bytes, Export, LocalEnd
from .parallel import WAIT_S


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """How the child makes its end. `factory` is "module:callable" and is called without arguments."""

    factory: str
    pool_bytes: int = 4 << 20
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    error: BaseException | None = None


class ChildEnd:
    """Proxy of a `LocalEnd` in a spawned process. Its methods are those of `datadist_core.testing.end.End`.

    Raises what the same call raises in the child; PeerLost if the child has died; TimedOut if it hangs.
    """

    def __init__(self, setup: ChildSetup) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._lock = threading.Lock()
        self._killed = False
        self._process = spawn.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        self._pid = self._process.pid or 0
        theirs.close()
        try:
            self._reply()
        except BaseException:
            self.kill()
            raise

    def identity(self) -> bytes:
        return cast(bytes, self._call("identity"))

    def exports(self) -> tuple[Export, ...]:
        return cast("tuple[Export, ...]", self._call("exports"))

    def add_grid(self, num_items: int, item_bytes: int, gap_bytes: int = 0, writable: bool = True) -> Grid:
        return cast(Grid, self._call("add_grid", num_items, item_bytes, gap_bytes, writable))

    def connect(self, peer_id: int, identity: bytes, initiator: bool, link_token: bytes, timeout_s: float) -> None:
        self._call("connect", peer_id, identity, initiator, link_token, timeout_s)

    def attach(self, peer_id: int, export: Export, timeout_s: float) -> None:
        self._call("attach", peer_id, export, timeout_s)

    def disconnect(self, peer_id: int) -> None:
        self._call("disconnect", peer_id)

    def fill(self, seed: int) -> None:
        self._call("fill", seed)

    def snapshot(self, region_id: int) -> Bytes:
        return cast(Bytes, self._call("snapshot", region_id))

    def transfer(self, batch: Batch) -> Completion:
        return cast(Completion, self._call("transfer", batch))

    def close(self) -> None:
        """Close the child's backend, then end the process. Works on one that was stopped or killed before."""
        if self._killed:
            return
        self.resume()
        try:
            self._call("close")
        finally:
            self.kill()

    def stop(self) -> None:
        """SIGSTOP: the peer still exists but does nothing any more."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        if self._killed:
            return
        self._killed = True
        self._process.kill()
        self._process.join(WAIT_S)
        self._process.close()
        self._pipe.close()

    def _call(self, method: str, *args: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send(_Call(method, args))
            except OSError as error:
                raise PeerLost(f"the child process died before {method}") from error
            return self._reply()

    def _reply(self) -> Any:
        try:
            if not self._pipe.poll(2 * WAIT_S):
                self.kill()  # an answer that came after all would be taken for that to the next call
                raise TimedOut(f"the child process did not answer within {2 * WAIT_S} s")
            reply = self._pipe.recv()
        except (OSError, EOFError) as error:
            raise PeerLost("the child process died") from error
        if reply.error is not None:
            raise reply.error
        return reply.value


def import_by_name(path: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _serve(pipe: Connection, setup: ChildSetup) -> None:
    """The child's main function."""
    try:
        backend: Backend = import_by_name(setup.factory)()
        end = LocalEnd(backend, setup.pool_bytes, setup.options)
    except Exception as error:
        pipe.send(_Reply(error=_portable(error)))
        return
    pipe.send(_Reply())
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_execute(end, pipe.recv()))
    # Not every backend can be torn down when its peer is gone without warning; leaving always can.
    os._exit(0)


def _execute(end: LocalEnd, call: _Call) -> _Reply:
    try:
        return _Reply(getattr(end, call.method)(*call.args))
    except Exception as error:
        return _Reply(error=_portable(error))


def _portable(error: Exception) -> Exception:
    """`error`, or its text if it is of a kind that may not survive the pipe."""
    return error if isinstance(error, LLMException) else RuntimeError(f"in the child process: {error!r}")
