# SPDX-License-Identifier: Apache-2.0
"""The engine: opens the backends and runs each batch to its one completion.

A blocking call on an inline backend runs in the caller's thread from end to end. Others complete from their own
threads while the caller sleeps on an event. Backends that need polling share one thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import LLMException, ParamInvalid, TimedOut, Unreachable
from ..types import Deadline
from .backend import Backend, BackendContext, Completion, CompletionStatus
from .plan import Batch
from .registry import backend_names, create_backend

logger = logging.getLogger(__name__)

#: A cancelled batch completes "soon" by contract; this bounds the damage of a backend that breaks it.
CANCEL_GRACE_S = 10.0
POLL_INTERVAL_S = 0.0002
IDLE_INTERVAL_S = 0.5


class TransferEngine:
    """All backends of one LLMDataDist. Thread-safe."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._unavailable: dict[str, str] = {}
        self._batch_ids = itertools.count(1)
        self._num_running = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._poller: threading.Thread | None = None

    def open(self, transfer_backend: str, context: BackendContext, options: Mapping[str, Any]) -> None:
        """Open what `transfer_backend` asks for. Raises ParamInvalid if none of it can be opened.

        With "auto" a backend that does not work on this host is left out, with the reason kept for users.
        """
        for name in backend_names(transfer_backend):
            self._open_one(name, replace(context, options=_options_of(name, options)))
        if not self._backends:
            self.close()
            raise ParamInvalid(f"transfer_backend={transfer_backend!r} cannot be used here: {self._unavailable}")
        if any(b.capabilities().needs_poll for b in self._backends.values()):
            self._poller = threading.Thread(target=self._poll_loop, name="datadist-poll", daemon=True)
            self._poller.start()

    def close(self) -> None:
        """Close all backends; open batches complete with ClosedError. Idempotent."""
        self._closed.set()
        self._wake.set()
        for backend in self._backends.values():
            backend.close()
        if self._poller is not None:
            self._poller.join(timeout=5)

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Open backends by name, best first."""
        return self._backends

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Backends asked for that could not be opened here, with the reason."""
        return self._unavailable

    def listen(self, host: str) -> None:
        """Links are accepted at `host` from now on: backends that dial must be reachable there too.

        One that cannot be is left out of links made there; the others remain.
        """
        for backend in self._backends.values():
            try:
                backend.listen(host)
            except Unreachable as error:
                logger.warning("transfer backend %s cannot be reached at %r: %s", backend.name, host, error)

    def run(self, backend: Backend, batch: Batch) -> None:
        """Run one batch to its end. Raises its error; TimedOut when `batch.deadline` passed first."""
        waiter = _Waiter()
        batch_id = next(self._batch_ids)
        with self._counted():
            backend.submit(batch_id, batch, waiter.done)
            if not waiter.wait(batch.deadline):
                backend.cancel(batch_id)
                self._await_cancelled(backend, waiter)
        waiter.raise_unless_ok(batch)

    def _open_one(self, name: str, context: BackendContext) -> None:
        backend = create_backend(name)
        try:
            backend.open(context)
        except Unreachable as error:
            self._unavailable[name] = str(error)
            logger.info("transfer backend %s is not available here: %s", name, error)
            return
        self._backends[backend.name] = backend

    def _await_cancelled(self, backend: Backend, waiter: _Waiter) -> None:
        if not waiter.wait(Deadline.after(CANCEL_GRACE_S)):
            logger.error("backend %s did not complete a cancelled batch; its memory stays pinned", backend.name)
            raise TimedOut(f"backend {backend.name} did not end a cancelled transfer within {CANCEL_GRACE_S} s")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Keeps the poller awake while a batch runs."""
        if self._poller is None:
            yield
            return
        self._count(1)
        self._wake.set()
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_running += change

    def _poll_loop(self) -> None:
        pollable = [b for b in self._backends.values() if b.capabilities().needs_poll]
        while not self._closed.is_set():
            if self._num_running == 0:
                self._wake.wait(IDLE_INTERVAL_S)
                self._wake.clear()
            for backend in pollable:
                backend.poll()
            self._closed.wait(POLL_INTERVAL_S)


class _Waiter:
    """Receives one completion and lets one thread wait for it. A lock is the cheapest thing there is to wait on."""

    def __init__(self) -> None:
        self._pending = threading.Lock()
        self._pending.acquire()
        self._completion: Completion | None = None

    def done(self, completion: Completion) -> None:
        if self._completion is None:
            self._completion = completion
            self._pending.release()

    def wait(self, deadline: Deadline) -> bool:
        if self._completion is not None:
            return True
        timeout_s = deadline.timeout()
        if not self._pending.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._pending.release()  # whoever waits again finds it open
        return True

    def raise_unless_ok(self, batch: Batch) -> None:
        completion = self._completion
        if completion is None:
            raise TimedOut("the transfer did not complete")
        if completion.status is CompletionStatus.OK:
            return
        if completion.status is CompletionStatus.CANCELLED and batch.deadline.expired:
            raise TimedOut(
                f"a transfer of {batch.num_bytes} bytes did not end within its deadline"
            ) from completion.error
        raise completion.error or LLMException("the transfer failed without a reason")


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `global_resource_config` for one backend, by its name."""
    value = options.get(name.partition(":")[2] or name, options.get(name, {}))
    if not isinstance(value, dict):
        raise ParamInvalid(f"global_resource_config[{name!r}]={value!r} must be a JSON object")
    return value
