# SPDX-License-Identifier: Apache-2.0
"""The other end of a pair in a real process of its own, so that it can be stopped and killed like a real peer.

The child is spawned, imports the backend by name, opens a `LocalEnd` and then does what comes over a pipe, one
call at a time. It ends when the pipe closes: no test can leave it behind, however it fails.
"""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import dataclass, field
from typing import Any, cast

from ..memory.grid import Grid
from ..transfer.backend import Backend, Completion
from ..transfer.plan import Batch
from .end import Bytes, Export, LocalEnd
from .parallel import WAIT_S
from .remote import RemoteObject


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """How the child makes its end. `factory` is "module:callable" and is called without arguments."""

    factory: str
    pool_bytes: int = 4 << 20
    options: dict[str, Any] = field(default_factory=dict)


class ChildEnd:
    """Proxy of a `LocalEnd` in a spawned process. Its methods are those of `datadist_core.testing.end.End`.

    Raises what the same call raises in the child; PeerLost if the child has died; TimedOut if it hangs.
    """

    def __init__(self, setup: ChildSetup) -> None:
        self._remote = RemoteObject(_make_end, (setup,), 2 * WAIT_S, forkserver=True)
        self._killed = False

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
        os.kill(self._remote.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._remote.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        self._killed = True
        self._remote.kill()

    def _call(self, method: str, *args: Any) -> Any:
        return self._remote.call(method, *args)


def import_by_name(path: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _make_end(setup: ChildSetup) -> LocalEnd:
    backend: Backend = import_by_name(setup.factory)()
    return LocalEnd(backend, setup.pool_bytes, setup.options)
