# SPDX-License-Identifier: Apache-2.0
"""Faulty shared memory with one fault more: a gate, at which batches wait for as long as a test wants them to.

A throttled transfer is under way for some seconds, and on a busy machine a test may miss them. One that waits at a
gate is under way until the test opens it; and the test is told how many wait.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from datadist_core.testing.faults import FaultyShm, _Held, _HeldBatches
from datadist_core.transfer.backend import BackendContext, DoneCallback
from datadist_core.transfer.plan import Batch

POLL_S = 0.02


def shut(fault_file: Path) -> Path:
    """While this file is there, the gate is shut. Each batch that has come to it adds a byte."""
    return fault_file.with_suffix(".gate")


class GatedShm(FaultyShm):
    """With the option `fault` as a file: see `shut`."""

    name = "gated-shm"

    def __init__(self) -> None:
        super().__init__()
        self._held: _Gate = _Gate(self._inner.submit)
        self._shut = Path()

    def open(self, context: BackendContext) -> None:
        self._shut = shut(Path(dict(context.options["fault"])["file"]))
        super().open(context)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        if not self._shut.exists():
            super().submit(batch_id, batch, done)
            return
        self._held.hold(_Held(batch_id, batch, done, math.inf))
        self._held.open_when_gone(self._shut)


class _Gate(_HeldBatches):
    """All who are held wait without end, until it is opened."""

    def open_when_gone(self, path: Path) -> None:
        threading.Thread(target=self._watch, args=(path,), name="datadist-gate", daemon=True).start()
        with suppress(FileNotFoundError):  # it has just been opened
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, b".")
            os.close(descriptor)

    def _watch(self, path: Path) -> None:
        while path.exists() and not self._closed:
            time.sleep(POLL_S)
        with self._changed:
            self._held = {one: replace(held, due_s=time.monotonic()) for one, held in self._held.items()}
            self._changed.notify_all()
